package gateway

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"
)

// Who tries made-up sandboxes is bounded as who tries one, and cannot end a wait with them.
func TestWrongTokensOfManySandboxes(t *testing.T) {
	var w wrong
	now := time.Now()
	for range wrongMost {
		w.add("192.0.2.1", "a", now)
	}
	if w.wait("192.0.2.1", "a", now) == 0 || w.wait("192.0.2.1", "b", now) != 0 || w.wait("192.0.2.2", "a", now) != 0 {
		t.Error("the bound is not one of an address and a sandbox")
	}
	for i := range 3 * wrongKept {
		w.add(fmt.Sprintf("198.51.100.%d", i%200), fmt.Sprint(i), now)
	}
	if w.wait("192.0.2.1", "a", now) == 0 {
		t.Error("a flood has ended a wait")
	}
	if n := len(w.from); n > wrongKept {
		t.Errorf("%d counts are kept", n)
	}
	for i := range wrongMostAll {
		w.add("203.0.113.1", fmt.Sprint("made up ", i), now)
	}
	if w.wait("203.0.113.1", "another", now) == 0 {
		t.Error("made-up sandboxes have no bound")
	}
	if w.wait("203.0.113.1", "another", now.Add(wrongWindow)) > 0 {
		t.Error("the wait has no end")
	}
}

func TestRemote(t *testing.T) {
	for _, c := range []struct{ peer, forwarded, want string }{
		{"192.0.2.1:1", "", "192.0.2.1"},
		{"192.0.2.1:1", "198.51.100.1", "192.0.2.1"}, // its own word
		{"127.0.0.1:1", "203.0.113.9, 198.51.100.1", "198.51.100.1"},
		{"[::1]:1", "198.51.100.1", "198.51.100.1"},
		{"127.0.0.1:1", "unknown", "127.0.0.1"},
		{"127.0.0.1:1", "", "127.0.0.1"},
		{"[2001:db8:1:2:3:4:5:6]:1", "", "2001:db8:1:2::/64"},
		{"[::ffff:192.0.2.1]:1", "", "192.0.2.1"},
		{"@", "", "@"},
	} {
		r := &http.Request{RemoteAddr: c.peer, Header: http.Header{}}
		if c.forwarded != "" {
			r.Header.Set("X-Forwarded-For", c.forwarded)
		}
		if got := remote(r); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// Z5: a sandbox that answers no connection is 503 after a bound, also where its caller
// went away before.
func TestSilentSandbox_Z5(t *testing.T) {
	ended := make(chan struct{}, 8)
	r := newRig(t, http.NotFoundHandler(), nil, func(c *Config) {
		c.DialMost = 50 * time.Millisecond
		c.Open = func(context.Context, Target, Credential) (Way, error) {
			return Way{Sandbox: box, Generation: 1, Done: func() {}, Dial: func(ctx context.Context, _ int) (net.Conn, error) {
				<-ctx.Done()
				ended <- struct{}{}
				return nil, ctx.Err()
			}}, nil
		}
	})
	for _, method := range []string{"GET", "POST"} {
		if status, body, h := r.do(r.request(method, "/", "")); status != 503 || body != "port_silent" || h.Get("Retry-After") == "" {
			t.Errorf("%s: %d %s %v", method, status, body, h)
		}
		<-ended
	}
}
