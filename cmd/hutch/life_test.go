package main

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// furnish puts into a sandbox what the survival table speaks of: a synced and an
// unsynced file, a running program with memory of its own, a command with an id and
// output, a file in memory.
func (b *box) furnish() (command string) {
	b.t.Helper()
	b.sh("echo synced > /workspace/synced; sync; echo unsynced > /workspace/unsynced; echo $$ > /workspace/.keep; head -c 3000000 /dev/urandom > /workspace/big; sha256sum /workspace/big > /workspace/big.sum")
	b.root("echo memory > /run/in-memory")
	out := b.hutch("exec", "--detach", "--json", "--", "sh", "-c",
		"i=0; while :; do i=$((i+1)); echo $i $(hostname) $(cat /etc/machine-id) $(date +%s.%N) >> /workspace/ticks; echo tick $i; sleep 0.05; done")
	id := field(b.t, out, "id")
	b.waitTicks(0)
	return id
}

// ticks is how far the running program has counted.
func (b *box) ticks() int {
	b.t.Helper()
	n, _ := strconv.Atoi(b.sh("tail -n 1 /workspace/ticks 2>/dev/null | cut -d' ' -f1"))
	return n
}

// waitTicks waits until the program counts beyond n, and says whether it did.
func (b *box) waitTicks(n int) int {
	b.t.Helper()
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(50 * time.Millisecond) {
		if now := b.ticks(); now > n {
			return now
		}
	}
	b.t.Fatalf("the program in %s does not count beyond %d", b.name, n)
	return 0
}

func (b *box) filesAreThere() {
	b.t.Helper()
	got := b.sh("cat /workspace/synced /workspace/unsynced; cd /workspace; sha256sum -c --status big.sum && echo whole")
	if got != "synced\nunsynced\nwhole" {
		b.t.Errorf("files in %s: %q", b.name, got)
	}
}

// still says that the program does not run.
func (b *box) still() {
	b.t.Helper()
	before := b.ticks()
	time.Sleep(300 * time.Millisecond)
	if after := b.ticks(); after != before {
		b.t.Errorf("the program in %s still runs: %d, %d", b.name, before, after)
	}
}

func (b *box) identity() [2]string {
	b.t.Helper()
	return [2]string{b.sh("hostname"), b.sh("cat /etc/machine-id")}
}

func field(t *testing.T, doc, name string) string {
	t.Helper()
	_, rest, ok := strings.Cut(doc, fmt.Sprintf("%q: \"", name))
	if !ok {
		t.Fatalf("no %s in %s", name, doc)
	}
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// W1, the column "sleep": everything stays but connections.
func TestSurvivesSleep(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	id := b.furnish()
	who, shell := b.identity(), b.hutch("exec", "--detach", "--json", "-t", "--", "bash")
	before := b.ticks()
	b.hutch("sleep")
	b.is("sleeping")
	time.Sleep(300 * time.Millisecond)
	b.hutch("wake")
	b.filesAreThere()
	after := b.waitTicks(before)
	if b.identity() != who {
		t.Errorf("identity changed from %v to %v", who, b.identity())
	}
	if b.root("cat /run/in-memory") != "memory" {
		t.Error("a file in memory is gone")
	}
	// The command is listed with its id, and its output has no gap (E2).
	list := b.commands()
	for _, want := range []string{id, field(t, shell, "id")} {
		if !strings.Contains(list, want) {
			t.Errorf("the command %s is not listed after the wake: %s", want, list)
		}
	}
	var logs []string
	for deadline := time.Now().Add(2 * time.Minute); len(logs) < 2*after && time.Now().Before(deadline); {
		logs = strings.Fields(hutchOK(t, "commands", "logs", b.name, id)) // a tick is in the file before it is in the output
	}
	if len(logs) < 2*after {
		t.Fatalf("the output has %d of %d ticks", len(logs)/2, after)
	}
	for i := 0; i < after; i++ {
		if logs[2*i+1] != strconv.Itoa(i+1) {
			t.Fatalf("the output has %q where tick %d belongs", logs[2*i+1], i+1)
		}
	}
	if g := b.get().Generation; g != 2 {
		t.Errorf("generation %d after one wake", g)
	}
}

// W1, the column "stop, resume": files stay, programs and commands do not (W2).
func TestSurvivesStop(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	id := b.furnish()
	who := b.identity()
	b.sh("for n in 1 4095 4096 65537 20000000; do head -c $n /dev/urandom > /workspace/f$n; sha256sum /workspace/f$n; done > /workspace/sums")
	b.hutch("stop")
	b.is("stopped")
	b.hutch("resume")
	b.filesAreThere()
	b.still()
	if got := b.sh("sha256sum -c --quiet /workspace/sums && echo whole"); got != "whole" {
		t.Errorf("files written a moment before the stop: %s", got)
	}
	if b.root("ls /run/in-memory 2>&1 || true") == "/run/in-memory" {
		t.Error("a file in memory survived a stop")
	}
	if b.identity() != who {
		t.Errorf("identity changed from %v to %v", who, b.identity())
	}
	if list := b.commands(); strings.Contains(list, id) {
		t.Errorf("a command is listed after a resume: %s", list)
	}
}

// W1, the column "live fork", from a running and from a sleeping source (F1, F2).
func TestSurvivesLiveFork(t *testing.T) {
	t.Parallel()
	for _, from := range []string{"ready", "sleeping"} {
		t.Run(from, func(t *testing.T) {
			t.Parallel()
			b := newBox(t)
			b.furnish()
			if from == "sleeping" {
				b.hutch("sleep")
			}
			forks := b.forks(2)
			b.is(from)
			if from == "sleeping" {
				b.hutch("wake")
			}
			ids := map[string]string{b.identity()[0]: b.name, b.identity()[1]: b.name}
			randoms := map[string]string{}
			for _, f := range append(forks, b) {
				f.filesAreThere()
				n := f.ticks()
				f.waitTicks(n)
				if f.root("cat /run/in-memory") != "memory" {
					t.Errorf("%s: a file in memory is gone", f.name)
				}
				if r := f.sh("head -c 32 /dev/urandom | sha256sum"); randoms[r] != "" {
					t.Errorf("%s and %s have the same random stream", f.name, randoms[r])
				} else {
					randoms[r] = f.name
				}
				if f == b {
					continue
				}
				for _, id := range f.identity() {
					if other := ids[id]; other != "" {
						t.Errorf("%s and %s share %q", f.name, other, id)
					}
					ids[id] = f.name
				}
				f.neverOldIdentity(b)
				if got := f.identity()[0]; got != f.name {
					t.Errorf("the hostname of %s is %s", f.name, got)
				}
			}
			// Each goes its own way (F5).
			forks[0].sh("echo changed > /workspace/synced")
			b.filesAreThere()
			forks[1].filesAreThere()
			b.hutch("delete", "--yes")
			forks[1].filesAreThere()
		})
	}
}

// neverOldIdentity reads the log of the program that looped through the fork: once a
// new name appears, no old one follows, and the new appear at once (F2).
func (f *box) neverOldIdentity(source *box) {
	f.t.Helper()
	machine := f.identity()[1]
	changed := false
	for line := range strings.Lines(f.sh("cat /workspace/ticks")) {
		parts := strings.Fields(line)
		if len(parts) < 4 {
			continue
		}
		switch {
		case parts[1] == f.name && parts[2] == machine:
			changed = true
		case changed:
			f.t.Fatalf("after the fork the program in %s still saw %v", f.name, parts)
		case parts[1] == f.name || parts[2] == machine:
			// One of the two was read before the fork, the other after: a line that was
			// being made at that instant.
			changed = true
		}
	}
	if !changed {
		f.t.Errorf("the program in %s never saw its new identity", f.name)
	}
}

// W1, the column "disk fork", from each state that has a disk.
func TestSurvivesDiskFork(t *testing.T) {
	t.Parallel()
	for from, verb := range map[string]string{"ready": "", "sleeping": "sleep", "stopped": "stop"} {
		t.Run(from, func(t *testing.T) {
			t.Parallel()
			b := newBox(t, "--disk", "2GB")
			id := b.furnish()
			who := b.identity()
			if verb != "" {
				b.hutch(verb)
			}
			f := b.forks(1, "--mode", "disk")[0]
			b.is(from)
			f.filesAreThere()
			f.still()
			if got := f.identity(); got[0] == who[0] || got[1] == who[1] || got[0] != f.name {
				t.Errorf("identity %v of a fork of %v", got, who)
			}
			if list := f.commands(); strings.Contains(list, id) {
				t.Errorf("a disk fork lists its source's command: %s", list)
			}
			// Disk size travels (F6), and is what df says.
			if size := f.sh("df -B1 --output=size / | tail -1"); strings.TrimSpace(size) != "2000003072" { // whole blocks of 4 KiB
				t.Errorf("df says %s of 2 GB", size)
			}
		})
	}
}

// W3: ten cycles lose nothing and leave nothing.
func TestTenCycles(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.furnish()
	for i := range 10 {
		if i%2 == 0 {
			n := b.ticks()
			b.hutch("sleep")
			b.hutch("wake")
			if i == 0 {
				b.waitTicks(n)
			}
		} else {
			b.hutch("stop")
			b.hutch("resume")
		}
		b.sh(fmt.Sprintf("echo %d >> /workspace/cycles", i))
	}
	b.filesAreThere()
	if got := strings.Fields(b.sh("cat /workspace/cycles")); len(got) != 10 {
		t.Errorf("cycles seen inside: %v", got)
	}
	if g := b.get().Generation; g != 11 {
		t.Errorf("generation %d after ten boots and wakes", g)
	}
}

// Z6: after a wake the clock is right and a ticker does not catch up.
func TestClockAfterWake(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.hutch("exec", "--detach", "--", "python3", "-c", `
import time
with open("/workspace/ticker", "w", buffering=1) as f:
    due = time.monotonic()
    while True:
        due = max(due + 1, time.monotonic())
        time.sleep(max(0, due - time.monotonic()))
        print(time.time(), file=f)
`)
	b.sh("until test -s /workspace/ticker; do sleep 0.05; done")
	b.hutch("sleep")
	asleep := float64(time.Now().UnixNano()) / 1e9
	time.Sleep(4 * time.Second) // ticks that it must not catch up on
	b.hutch("wake")
	before := time.Now()
	inside, err := strconv.ParseFloat(b.sh("date +%s.%N"), 64)
	after := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	if at := time.Unix(0, int64(inside*1e9)); at.Before(before.Add(-500*time.Millisecond)) || at.After(after.Add(500*time.Millisecond)) {
		t.Errorf("inside it is %s, outside %s to %s", at, before, after)
	}
	// The ticks since the wake, until one is past its first second.
	var ticks []float64
	for deadline := time.Now().Add(2 * time.Minute); len(ticks) == 0 || ticks[len(ticks)-1] < ticks[0]+1; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the ticker stands still after the wake: %v", ticks)
		}
		ticks = nil
		for _, line := range strings.Fields(b.sh("cat /workspace/ticker")) {
			at, err := strconv.ParseFloat(line, 64)
			if err != nil {
				t.Fatal(err)
			}
			if at > asleep {
				ticks = append(ticks, at)
			}
		}
	}
	n := 0
	for _, at := range ticks {
		if at < ticks[0]+1 {
			n++
		}
	}
	if n > 2 {
		t.Errorf("the ticker fired %d times in the first second: %v", n, ticks)
	}
}

// S4: fifty wakes at once make one running sandbox and fifty successes.
func TestFiftyWakes(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.hutch("sleep")
	id := b.get().ID
	var wg sync.WaitGroup
	failures := make(chan string, 50)
	for range 50 {
		wg.Go(func() {
			code, body := api(t, "POST", "/v1/sandboxes/"+id+"/wake?wait=5m", nil, strings.NewReader("{}"))
			if code != 200 || strings.Contains(body, `"status":"failed"`) {
				failures <- fmt.Sprint(code, body)
			}
		})
	}
	wg.Wait()
	close(failures)
	for f := range failures {
		t.Error(f)
	}
	if got := b.get(); got.State != "ready" || got.Generation != 2 {
		t.Errorf("after fifty wakes: %+v", got)
	}
}

// Any command wakes a sleeping sandbox, once (Z5); a stopped one answers with the
// verb to use.
func TestExecWakes(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.hutch("sleep")
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if r := b.exec(nil, "--", "echo", "awake"); r.stdout != "awake\n" {
				t.Error(r)
			}
		})
	}
	wg.Wait()
	if got := b.get(); got.State != "ready" || got.Generation != 2 {
		t.Errorf("after five commands: %+v", got)
	}
	b.hutch("stop")
	r := b.exec(nil, "--", "true")
	if r.code != 125 || !strings.Contains(r.stderr, "resume") {
		t.Errorf("a command in a stopped sandbox: %s", r)
	}
	b.is("stopped")
}

// S6: a verb whose goal is reached succeeds and says so.
func TestReachedGoals(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	for _, verbs := range [][]string{{"wake", "resume"}, {"sleep", "sleep"}, {"wake"}, {"stop", "stop"}, {"resume", "resume", "wake"}} {
		for _, v := range verbs {
			b.hutch(v)
		}
	}
	b.is("ready")
	b.hutch("delete", "--yes")
	hutchFails(t, "not_found", "get", b.name)
}

// S5: a delete works from every state.
func TestDeleteFromEveryState(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"", "sleep", "stop"} {
		b := newBox(t)
		if verb != "" {
			b.hutch(verb)
		}
		b.hutch("delete", "--yes")
		hutchFails(t, "not_found", "get", b.name)
	}
}

// S8: ends that no verb caused.
func TestEndsFromInside(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.sh("echo kept > /workspace/f")
	b.exec(nil, "--user", "root", "--", "poweroff")
	if got := b.becomes("stopped"); got.Reason != "exited" {
		t.Errorf("after a poweroff: %+v", got)
	}
	b.hutch("resume")
	gen := b.get().Generation
	b.exec(nil, "--user", "root", "--", "reboot")
	deadline := time.Now().Add(2 * time.Minute)
	for b.get().Generation == gen && time.Now().Before(deadline) {
		time.Sleep(50 * time.Millisecond)
	}
	if got := b.get(); got.State != "ready" || got.Generation != gen+1 {
		t.Errorf("after a reboot: %+v", got)
	}
	if got := b.sh("cat /workspace/f"); got != "kept" {
		t.Errorf("after a reboot the file has %q", got)
	}
}
