package runtimetest

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

func exitCode(t *testing.T, b Bundle) {
	for _, code := range []int{0, 3, 137} {
		h := start(t, b, b.Spec())
		wait := h.Wait()
		_, _ = Ask(h, "exit", strconv.Itoa(code))
		if exit := Ended(t, wait); !exit.Known || exit.Code != code || exit.Signal != 0 || exit.OOM {
			t.Errorf("exit %d: ended as %+v", code, exit)
		}
		kill(t, h)
	}
}

func crash(t *testing.T, b Bundle) {
	h := start(t, b, b.Spec())
	wait := h.Wait()
	_, _ = Ask(h, "crash")
	if exit := Ended(t, wait); !exit.Known || exit.Code != 2 || exit.OOM {
		t.Errorf("a crash ended as %+v", exit)
	}
}

func killedFromOutside(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	wait := h.Wait()
	b.Crash(spec)
	if exit := Ended(t, wait); exit.Known && exit.Signal != 9 || exit.OOM {
		t.Errorf("ended as %+v", exit)
	}
	// All calls on what is gone fail in bounded time, and Kill cleans up.
	if _, err := h.Pause(ctx(t)); !fault.Is(err, fault.NotFound) {
		t.Errorf("Pause: got %v, want not_found", err)
	}
	if err := h.Thaw(ctx(t)); !fault.Is(err, fault.NotFound) {
		t.Errorf("Thaw: got %v, want not_found", err)
	}
	kill(t, h)
	wantGone(t, b, spec)
}

func outOfMemory(t *testing.T, b Bundle) {
	if !b.Limits {
		t.Skip("this driver limits no memory")
	}
	spec := b.Spec()
	spec.MemoryBytes = 128 << 20
	h := start(t, b, spec)
	size := strings.Fields(MustAsk(t, h, "size"))
	if got, _ := strconv.ParseInt(size[0], 10, 64); got != spec.MemoryBytes {
		t.Errorf("the guest sees %d bytes of memory, not %d", got, spec.MemoryBytes)
	}
	if got := size[1]; got != strconv.Itoa(spec.CPUs) {
		t.Errorf("the guest sees %s CPUs, not %d", got, spec.CPUs)
	}
	if got := size[2]; got != spec.Hostname {
		t.Errorf("the guest is named %q, not %q", got, spec.Hostname)
	}
	wait := h.Wait()
	_, _ = Ask(h, "alloc", "400")
	if exit := Ended(t, wait); !exit.OOM {
		t.Errorf("ended as %+v, not by the memory limit", exit)
	}
}

func waitOften(t *testing.T, b Bundle) {
	h := start(t, b, b.Spec())
	first, second := h.Wait(), h.Wait()
	kill(t, h)
	if a, b := Ended(t, first), Ended(t, second); a != b {
		t.Errorf("two ends: %+v and %+v", a, b)
	}
	Ended(t, h.Wait()) // also after the end
}

func adopt(t *testing.T, b Bundle, spec runtime.Spec) runtime.Handle {
	t.Helper()
	h, err := b.Restart().Adopt(ctx(t), spec)
	if err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	return h
}

func adoptRunning(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	token := MustAsk(t, h, "get", "token")
	again := adopt(t, b, spec)
	if got := MustAsk(t, again, "get", "token"); got != token {
		t.Errorf("adopted another: token %s, not %s", got, token)
	}
	image := capture(t, pause(t, again))
	wait := again.Wait()
	kill(t, again)
	if exit := Ended(t, wait); !exit.Known || exit.Signal != 9 {
		t.Errorf("ended as %+v", exit)
	}
	Ended(t, h.Wait())
	wantGone(t, b, spec)
	release(t, restore(t, b, b.Beside(spec), image))

	spec = b.Spec()
	start(t, b, spec)
	again = adopt(t, b, spec)
	wait = again.Wait()
	_, _ = Ask(again, "exit", "7")
	if exit := Ended(t, wait); !exit.Known || exit.Code != 7 {
		t.Errorf("an adopted sandbox ended as %+v, not with code 7", exit)
	}
}

func adoptPausedThaw(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	MustAsk(t, h, "spawn")
	pause(t, h)
	again := adopt(t, b, spec)
	wantSilent(t, again)
	pause(t, again)
	for range 2 {
		if err := again.Thaw(ctx(t)); err != nil {
			t.Fatalf("Thaw: %v", err)
		}
	}
	AwaitTicks(t, again, Ticks(t, again))
}

func adoptHeldThaw(t *testing.T, b Bundle) {
	spec, image := imageOf(t, b, func(h runtime.Handle) {
		MustAsk(t, h, "spawn")
		AwaitTicks(t, h, 0)
	})
	place := b.Beside(spec)
	restore(t, b, place, image)
	again := adopt(t, b, place)
	before := Ticks(t, again)
	if err := again.Thaw(ctx(t)); err != nil {
		t.Fatalf("Thaw: %v", err)
	}
	AwaitTicks(t, again, before+3)
}

func adoptDead(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	b.Crash(spec)
	Ended(t, h.Wait())
	wantGone(t, b, spec)
	start(t, b, renewed(b, spec)) // what was left has been cleared away
}

func adoptNothing(t *testing.T, b Bundle) {
	wantGone(t, b, b.Spec())
}

// adoptAfterCapture is the agent that dies between a capture and its commit.
func adoptAfterCapture(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	MustAsk(t, h, "spawn")
	capture(t, pause(t, h))
	again := adopt(t, b, spec)
	if err := again.Thaw(ctx(t)); err != nil {
		t.Fatalf("Thaw: %v", err)
	}
	AwaitTicks(t, again, Ticks(t, again))
	capture(t, pause(t, again))
}

func usage(t *testing.T, b Bundle) {
	h := start(t, b, b.Spec())
	if _, err := h.Usage(ctx(t)); err != nil {
		t.Fatalf("Usage: %v", err)
	}
	if !b.Limits {
		return // what does not limit does not count either
	}
	MustAsk(t, h, "alloc", "32")
	before, err := h.Usage(ctx(t))
	if err != nil {
		t.Fatalf("Usage: %v", err)
	}
	if before.MemoryBytes < 32<<20 {
		t.Errorf("%d bytes of memory are in use, fewer than were touched", before.MemoryBytes)
	}
	MustAsk(t, h, "calls", "20000")
	after, err := h.Usage(ctx(t))
	if err != nil {
		t.Fatalf("Usage: %v", err)
	}
	if after.CPU <= before.CPU {
		t.Errorf("CPU time went from %v to %v", before.CPU, after.CPU)
	}
	if cpu, err := h.CPUTime(); err != nil || cpu < after.CPU {
		t.Errorf("CPU time alone is %v (%v), after %v", cpu, err, after.CPU)
	}
}

// clock sees that a restored guest reads the true time, though it slept.
func clock(t *testing.T, b Bundle) {
	spec, image := imageOf(t, b, func(runtime.Handle) {})
	time.Sleep(time.Second) // the sleep that the clock has to jump
	h := restore(t, b, b.Beside(spec), image)
	release(t, h)
	at, err := strconv.ParseInt(MustAsk(t, h, "clock"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if off := time.Since(time.UnixMilli(at)).Abs(); off > 500*time.Millisecond {
		t.Errorf("after a wake the clock is %v off", off)
	}
}
