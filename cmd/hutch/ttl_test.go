package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// timing is what `get` says of the auto-stop.
type timing struct {
	TTL      *int64 `json:"ttl_seconds"`
	Deadline struct {
		At      *time.Time `json:"at"`
		Pending bool       `json:"pending"`
	} `json:"deadline"`
	OnDeadline string `json:"on_deadline"`
	Sleep      struct {
		Deadline string `json:"deadline"`
	} `json:"sleep"`
	Archive struct {
		Waiting string `json:"waiting"`
	} `json:"archive"`
}

func (b *box) timing() (out timing) {
	b.t.Helper()
	if text := b.hutch("get", "--json"); json.Unmarshal([]byte(text), &out) != nil {
		b.t.Fatalf("get: %s", text)
	}
	return out
}

// A1, A2, Z7: an auto-stop comes by itself, saves the disk, and says why; a resume begins
// a full one, a change another, and none is none.
func TestAutoStop_A1_A2(t *testing.T) {
	b := newBox(t, "--no-auto-stop")
	b.sh("echo kept > /workspace/kept")
	if got := b.timing(); got.TTL != nil || got.Deadline.At != nil {
		t.Errorf("without an auto-stop: %+v", got)
	}
	before := time.Now()
	b.hutch("edit", "--ttl", "3s")
	info := b.becomes("stopped")
	if took := time.Since(before); took < 3*time.Second {
		t.Errorf("it was stopped after %s", took)
	}
	if info.Reason != "auto_stop" {
		t.Errorf("the reason is %q", info.Reason)
	}
	var ops struct {
		Operations []struct {
			Kind, Status, Actor string
		} `json:"operations"`
	}
	if err := json.Unmarshal([]byte(hutchOK(t, "operations", "ls", b.name, "--json")), &ops); err != nil {
		t.Fatal(err)
	}
	if last := ops.Operations[len(ops.Operations)-1]; last.Kind != "stop" || last.Status != "succeeded" || last.Actor != "host" {
		t.Errorf("the operation of the auto-stop: %+v", last)
	}
	b.hutch("edit", "--ttl", "2h")
	b.hutch("resume")
	now := time.Now()
	got := b.timing()
	if got.TTL == nil || *got.TTL != 7200 || got.Deadline.At == nil || got.Deadline.At.Sub(now) > 2*time.Hour || got.Deadline.At.Sub(now) < 100*time.Minute {
		t.Errorf("after a resume: %+v", got)
	}
	if text := b.sh("cat /workspace/kept"); text != "kept" {
		t.Errorf("the disk has %q", text)
	}
	if again := b.timing(); !again.Deadline.At.Equal(*got.Deadline.At) {
		t.Errorf("a command moved the deadline from %s to %s", got.Deadline.At, again.Deadline.At)
	}
	// A7: it falls due while nothing of hutch runs.
	b.hutch("edit", "--ttl", "10s")
	for got = b.timing(); got.Deadline.Pending; got = b.timing() {
		time.Sleep(20 * time.Millisecond)
	}
	shared.kill()
	time.Sleep(time.Until(*got.Deadline.At))
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	if info := b.becomes("stopped"); info.Reason != "auto_stop" {
		t.Errorf("the reason is %q", info.Reason)
	}
	if r, err := shared.try(time.Minute, nil, "new", "--ttl", "31d"); err == nil || !strings.Contains(r.stderr, "an auto-stop of 744h0m0s") {
		t.Errorf("more than 30 days: %+v", r)
	}
}

// A4, A8, Z7: at its deadline it sleeps, with its memory; a paused deadline does not run
// meanwhile; a command wakes it and begins a full one; then it is deleted at the deadline.
func TestOnDeadline_A4_A8(t *testing.T) {
	b := newBox(t, "--ttl", "3s", "--on-deadline", "sleep", "--sleep-deadline", "paused")
	b.becomes("sleeping")
	if got := b.timing(); got.Deadline.At != nil || got.OnDeadline != "sleep" || got.Sleep.Deadline != "paused" {
		t.Errorf("asleep: %+v", got)
	}
	b.hutch("edit", "--ttl", "1h")
	if text := b.sh("echo awake"); text != "awake" {
		t.Errorf("a command says %q", text)
	}
	if got := b.timing(); got.Deadline.At == nil || time.Until(*got.Deadline.At) < 50*time.Minute {
		t.Errorf("after a wake: %+v", got)
	}
	b.hutch("edit", "--ttl", "2s", "--on-deadline", "delete")
	b.gone()
}

// gone waits until nobody finds the box any more.
func (b *box) gone() {
	b.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		r, err := shared.try(time.Minute, nil, "get", b.name, "--json")
		if err != nil && strings.Contains(r.stderr, "not_found") {
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("it is there still: %+v", r)
		}
	}
}

// A1, A8, B6, D3: a wake, a resume and a fork may name another auto-stop; a stopped one that
// is due to be archived waits, and says so; one that is to be deleted is.
func TestRestAndTTL_A1_A8(t *testing.T) {
	b := newBox(t, "--archive-after", "1s")
	ttl := func(of *box, want int64) {
		t.Helper()
		if got := of.timing(); got.TTL == nil || *got.TTL != want || got.Deadline.At == nil || time.Until(*got.Deadline.At) > time.Duration(want)*time.Second {
			t.Errorf("its auto-stop is %+v, want %d s", got, want)
		}
	}
	b.hutch("sleep")
	b.hutch("wake", "--ttl", "2h")
	ttl(b, 7200)
	b.hutch("stop")
	for end := time.Now().Add(time.Minute); b.timing().Archive.Waiting != "no_blob_store"; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it does not wait: %+v", b.timing())
		}
	}
	b.is("stopped")
	if text := b.hutch("get"); !strings.Contains(text, "it waits for cold storage") {
		t.Errorf("get does not say that it waits:\n%s", text)
	}
	b.hutch("resume", "--ttl", "90m")
	ttl(b, 5400)
	fork := b.forks(1, "--ttl", "5m")[0]
	ttl(fork, 300)
	ttl(b, 5400)
	fork.hutch("stop")
	fork.hutch("edit", "--delete-after", "1s")
	fork.gone()
	b.is("ready")
}
