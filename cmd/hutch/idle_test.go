package main

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// idleReading is what `why` says.
type idleReading struct {
	State, Blocker, Message string
	Idle                    bool
	Next                    *time.Time `json:"next_decision_at"`
	Criteria                []struct {
		Name    string
		Reading float64
		OK      bool
	}
}

func (b *box) why() (out idleReading) {
	b.t.Helper()
	if text := b.hutch("why", "--json"); json.Unmarshal([]byte(text), &out) != nil {
		b.t.Fatalf("why: %s", text)
	}
	return out
}

// count says how many operations of a kind there were, and how many of them the host made.
func (b *box) count(kind string) (all, own int) {
	b.t.Helper()
	var list struct {
		Operations []struct{ Kind, Actor string } `json:"operations"`
	}
	if err := json.Unmarshal([]byte(hutchOK(b.t, "operations", "ls", b.name, "--json")), &list); err != nil {
		b.t.Fatal(err)
	}
	for _, op := range list.Operations {
		if op.Kind == kind {
			all++
			if op.Actor == "host" {
				own++
			}
		}
	}
	return all, own
}

// Z1, Z2, Z5: a sandbox that nobody uses falls asleep although it is looked at all the
// time, and any number of commands wake it once, with its memory.
func TestFallsAsleep_Z1_Z2_Z5(t *testing.T) {
	t.Parallel()
	b := newBox(t, "--sleep", "auto", "--idle-after", "3s")
	b.exec(nil, "--detach", "--", "sh", "-c", "echo $$ > /dev/shm/pid; exec sleep 1000")
	b.becomes("sleeping") // asks for it again and again
	if all, own := b.count("sleep"); all != 1 || own != 1 {
		t.Errorf("it was put to sleep %d times, by its host %d times", all, own)
	}
	if why := b.why(); why.State != "sleeping" || why.Blocker != "state" || !strings.Contains(why.Message, "it is sleeping") {
		t.Errorf("asleep it says %+v", why)
	}
	if text := b.hutch("why"); !strings.Contains(text, "auto: it sleeps after 3s of idleness") {
		t.Errorf("why says %s", text)
	}
	var burst sync.WaitGroup
	for range 50 {
		burst.Go(func() {
			if r := b.exec(nil, "--", "sh", "-c", "kill -0 $(cat /dev/shm/pid) && echo alive"); r.stdout != "alive\n" || r.code != 0 {
				t.Errorf("a command that wakes it: %s", r)
			}
		})
	}
	burst.Wait()
	if all, _ := b.count("wake"); all != 1 {
		t.Errorf("50 commands made %d wakes", all)
	}
	// A8, B4: and on_idle stop.
	b.hutch("edit", "--on-idle", "stop")
	if info := b.becomes("stopped"); info.Reason != "idle" {
		t.Errorf("it was stopped for %q", info.Reason)
	}
	if r, err := shared.try(time.Minute, nil, "exec", b.name, "--", "true"); err == nil || !strings.Contains(r.stderr, "hutch resume "+b.name) {
		t.Errorf("a command to a stopped one: %s", r)
	}
}

// Z1, Z3: a command in front keeps it awake however silent it is, with its client and
// without; then it sleeps.
func TestSilentCommandKeepsAwake_Z1_Z3(t *testing.T) {
	t.Parallel()
	b := newBox(t, "--sleep", "manual")
	if why := b.why(); why.Blocker != "sleep_mode" || why.Next != nil || len(why.Criteria) != 9 || !strings.Contains(why.Message, "hutch edit "+b.name+" --sleep auto") {
		t.Errorf("with sleep mode manual it says %+v", why)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	client := exec.CommandContext(ctx, binary, "exec", b.name, "--", "sh", "-c", "echo $$ > /dev/shm/pid; exec sleep 1000")
	client.Env = append(os.Environ(), "HUTCH_CONFIG="+shared.config())
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	for b.sh("cat /dev/shm/pid 2>/dev/null || true") == "" {
		time.Sleep(50 * time.Millisecond)
	}
	b.hutch("edit", "--sleep", "auto", "--idle-after", "3s")
	stays := func(blocker string) {
		t.Helper()
		for until := time.Now().Add(5 * time.Second); time.Now().Before(until); {
			if info := b.get(); info.State != "ready" || info.Generation != 1 {
				t.Fatalf("with a command in front it is %s, generation %d", info.State, info.Generation)
			}
		}
		if why := b.why(); why.Idle || why.Blocker != blocker || why.Next == nil {
			t.Errorf("it says %+v, want the blocker %s", why, blocker)
		}
	}
	stays("sessions")
	cancel()
	_ = client.Wait()
	stays("foreground")
	b.sh("kill $(cat /dev/shm/pid)")
	b.becomes("sleeping")
	if got := b.sh("echo $((6*7))"); got != "42" {
		t.Errorf("after the wake it says %s", got)
	}
}

func TestIdleSettings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		sample, least time.Duration
		ok            bool
	}{
		{10 * time.Second, 30 * time.Second, true}, {time.Second, 2 * time.Second, true}, {time.Second, time.Second, true},
		{0, 30 * time.Second, false}, {-time.Second, 30 * time.Second, false}, {10 * time.Second, 9 * time.Second, false},
		{10 * time.Second, 121 * time.Second, false},
	} {
		i := idleSettings{sampleEvery: c.sample, windowMin: c.least}
		if err := i.check(); (err == nil) != c.ok {
			t.Errorf("samples every %s, windows of %s: %v", c.sample, c.least, err)
		}
		if got := i.bounds(); got.IdleMin != c.least || got.IdleMax != 24*time.Hour {
			t.Errorf("the bounds are %+v", got)
		}
	}
}
