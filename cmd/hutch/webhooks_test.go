package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

// H1, H2: what befalls a sandbox arrives at a receiver on this machine, in order and signed,
// each event once but for repeats with the same id, across a server that is killed and a
// receiver that is away meanwhile; and `hutch events` tells the same.
func TestWebhooks_H2(t *testing.T) {
	type message struct {
		id    string
		seq   int64
		what  string
		inner string // the sandbox
	}
	var mu sync.Mutex
	var got []message
	var secret string
	var away atomic.Bool
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || away.Load() {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		check, err := standardwebhooks.NewWebhook(secret)
		if err == nil {
			err = check.Verify(body, r.Header)
		}
		var m struct {
			Type string
			Data struct {
				Seq     int64
				Sandbox string
			}
		}
		if err == nil {
			err = json.Unmarshal(body, &m)
		}
		if err != nil {
			t.Errorf("a message of %s: %v", body, err)
			return
		}
		got = append(got, message{r.Header.Get("webhook-id"), m.Data.Seq, m.Type, m.Data.Sandbox})
	}))
	defer receiver.Close()
	mu.Lock()
	made := hutchOK(t, "webhooks", "create", receiver.URL, "--events", "sandbox.creating,sandbox.ready,sandbox.sleeping,sandbox.deleted", "--json")
	var created struct {
		Webhook struct{ ID string }
		Secret  string
	}
	if err := json.Unmarshal([]byte(made), &created); err != nil {
		t.Fatalf("%v: %s", err, made)
	}
	secret = created.Secret
	mu.Unlock()
	hook := created.Webhook.ID
	t.Cleanup(func() { hutchOK(t, "webhooks", "delete", hook, "--yes") })

	b := newBox(t)
	id := b.get().ID
	b.hutch("sleep")
	away.Store(true) // its receiver is gone, and then the server
	b.hutch("wake")
	var failing string
	for end := time.Now().Add(time.Minute); !strings.Contains(failing, "failing since"); time.Sleep(50 * time.Millisecond) {
		if failing = hutchOK(t, "webhooks", "get", hook); time.Now().After(end) {
			t.Fatalf("it is not told that the receiver fails: %s", failing)
		}
	}
	if !strings.Contains(failing, "status 503: not now") {
		t.Errorf("get says %s", failing)
	}
	shared.kill()
	away.Store(false)
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	b.hutch("delete", "--yes")

	want := []string{"creating", "ready", "sleeping", "ready", "deleted"}
	var arrived []string
	seen := map[string]bool{}
	for end := time.Now().Add(2 * time.Minute); len(arrived) < len(want); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("arrived are %v; %s", arrived, hutchOK(t, "webhooks", "deliveries", hook))
		}
		mu.Lock()
		arrived = nil
		clear(seen)
		for _, m := range got {
			if m.inner == id && !seen[m.id] {
				seen[m.id] = true
				arrived = append(arrived, strings.TrimPrefix(m.what, "sandbox."))
			}
		}
		mu.Unlock()
	}
	mu.Lock()
	var last int64
	for _, m := range got {
		if m.inner == id && m.seq < last {
			t.Errorf("%d came after %d", m.seq, last)
		} else if m.inner == id {
			last = m.seq
		}
	}
	mu.Unlock()
	var told []string
	var page struct {
		Events []struct{ Type, Sandbox string }
	}
	text := hutchOK(t, "events", "--json", "--all", "--type", "sandbox.*")
	if err := json.Unmarshal([]byte(text), &page); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, e := range page.Events {
		if e.Sandbox == id && e.Type != "sandbox.erased" { // comes when it cannot be undeleted any more
			told = append(told, strings.TrimPrefix(e.Type, "sandbox."))
		}
	}
	if !slices.Equal(arrived, want) || !slices.Equal(told, want) {
		t.Errorf("arrived are %v, told were %v, want %v", arrived, told, want)
	}
	// Other tests' sandboxes have their deliveries too.
	log, delivered := hutchOK(t, "webhooks", "deliveries", hook), 0
	for line := range strings.Lines(log) {
		if strings.Contains(line, id) && strings.Contains(line, "delivered") {
			delivered++
		}
	}
	if delivered != len(want) {
		t.Errorf("the log says %s", log)
	}
	if out := hutchOK(t, "webhooks", "replay", hook, "--from-event", fmt.Sprint(last)); !strings.Contains(out, " on their way") || strings.HasPrefix(out, "0 ") {
		t.Errorf("replay says %s", out)
	}
}
