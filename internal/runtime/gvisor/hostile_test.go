package gvisor_test

import (
	"context"
	"strconv"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

// The tests of this file are what a hostile or a careless program may do to its own
// sandbox. Each fails on the stock module.

// Nothing inside can kill, stop or end PID 1 by a signal, as on Linux: pid_namespaces(7).
func TestInitIsProtected(t *testing.T) {
	t.Parallel()
	h := startOne(t, newSpec(t, tree(t)))
	token := runtimetest.MustAsk(t, h, "get", "token")
	for _, signal := range []string{"9", "19", "18"} { // SIGKILL, SIGSTOP, SIGCONT
		if got := runtimetest.MustAsk(t, h, "signal", signal); got != "<nil>" {
			t.Errorf("signal %s: the sender ended with %s", signal, got)
		}
	}
	if got := runtimetest.MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("PID 1 was replaced: token %s, not %s", got, token)
	}
	// An init inside, such as Docker makes, is killed from outside of its namespace, and
	// by a fault of its own.
	if got := runtimetest.MustAsk(t, h, "nested", "sleep", "9"); got != "signal 9" {
		t.Errorf("a nested init that was killed ended with %q", got)
	}
	if got := runtimetest.MustAsk(t, h, "nested", "fault", "0"); got != "signal 11" {
		t.Errorf("a nested init that faulted ended with %q", got)
	}
	// And from the host PID 1 can be ended.
	wait := h.Wait()
	kill(t, h)
	runtimetest.Ended(t, wait)
}

// A file system in memory has half of the sandbox's memory, says so, and being full is
// an error (R3).
func TestMemoryFilesAreBounded_R3(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	spec.MemoryBytes = 256 << 20
	h := startOne(t, spec)
	for _, path := range []string{"/dev/shm", "/run", "/dev"} {
		if got := runtimetest.MustAsk(t, h, "capacity", path); got != strconv.Itoa(128<<20) {
			t.Errorf("%s has %s bytes, not half of the memory", path, got)
		}
	}
	if got := runtimetest.MustAsk(t, h, "fill", "/dev/shm/a", "300"); got != "128 no space left on device" {
		t.Errorf("filling /dev/shm: %q", got)
	}
	// Together they are more than the memory. The rest goes to processes.
	got := runtimetest.MustAsk(t, h, "fill", "/run/a", "300")
	mib, rest, _ := strings.Cut(got, " ")
	if n, _ := strconv.Atoi(mib); n < 50 || n > 120 || rest != "no space left on device" {
		t.Errorf("filling /run: %q", got)
	}
	runtimetest.MustAsk(t, h, "get", "token")
	wantKills(t, h, 0)
}

// A process that takes more memory than there is dies; its neighbour and PID 1 do not
// (R3).
func TestOutOfMemoryKillsTheHog_R3(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	spec.MemoryBytes = 256 << 20
	h := startOne(t, spec)
	token := runtimetest.MustAsk(t, h, "get", "token")
	runtimetest.MustAsk(t, h, "spawn")
	runtimetest.MustAsk(t, h, "keep", "40")
	for range 3 {
		if got := runtimetest.MustAsk(t, h, "hog", "1000"); got != "signal 9" {
			t.Errorf("a process that took all memory ended with %q", got)
		}
	}
	runtimetest.AwaitTicks(t, h, runtimetest.Ticks(t, h))
	if got := runtimetest.MustAsk(t, h, "processes"); got != "3" {
		t.Errorf("%s processes are left, not PID 1, the child that ticks, and the one that keeps 40 MiB", got)
	}
	if got := runtimetest.MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("PID 1 was replaced: token %s, not %s", got, token)
	}
	wantKills(t, h, 3)
	// What is left can be saved.
	p, err := h.Pause(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	image := t.TempDir()
	if err := p.Capture(context.Background(), image); err != nil {
		t.Fatal(err)
	}
	kill(t, h)
	// And the limit holds after a wake.
	place := newSpec(t, spec.Root)
	place.MemoryBytes = spec.MemoryBytes
	again, err := newDriver(t).Restore(context.Background(), place, image)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, again) })
	if err := again.Release(context.Background()); err != nil {
		t.Fatal(err)
	}
	if got := runtimetest.MustAsk(t, again, "hog", "1000"); got != "signal 9" {
		t.Errorf("after a wake a process that took all memory ended with %q", got)
	}
	runtimetest.AwaitTicks(t, again, runtimetest.Ticks(t, again))
	wantKills(t, again, 1)
}

// A tree of processes that together take more memory than there is leaves PID 1 and
// the sandbox (R3).
func TestOutOfMemoryByManyProcesses_R3(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	spec.MemoryBytes = 256 << 20
	h := startOne(t, spec)
	token := runtimetest.MustAsk(t, h, "get", "token")
	runtimetest.MustAsk(t, h, "bomb", "6", "16") // 127 processes, 2 GiB
	runtimetest.Eventually(t, "processes are killed", func() bool { return kills(t, h) >= 20 })
	if got := runtimetest.MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("PID 1 was replaced: token %s, not %s", got, token)
	}
}

// A fork bomb of small processes is killed as a whole, but for what it forks meanwhile.
// PID 1 lives, and there is memory for a command again (R3).
func TestForkBombDies_R3(t *testing.T) {
	t.Parallel()
	h := startOne(t, newSpec(t, tree(t)))
	token := runtimetest.MustAsk(t, h, "get", "token")
	runtimetest.MustAsk(t, h, "bomb", "9", "0") // 1023 processes
	runtimetest.Eventually(t, "processes are killed", func() bool { return kills(t, h) > 16 })
	runtimetest.Eventually(t, "there is memory again", func() bool {
		answer, err := runtimetest.Ask(h, "keep", "40")
		return err == nil && answer == "ok"
	})
	if got := runtimetest.MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("PID 1 was replaced: token %s, not %s", got, token)
	}
}

func kills(_ testing.TB, h runtime.Handle) uint64 { return h.OOMKills() }

func wantKills(tb testing.TB, h runtime.Handle, want uint64) {
	tb.Helper()
	runtimetest.Eventually(tb, "the count of kills", func() bool { return kills(tb, h) >= want })
	if got := kills(tb, h); got != want {
		tb.Errorf("%d processes were killed for want of memory, not %d", got, want)
	}
}
