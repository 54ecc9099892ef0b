// Package runtimetest is the suite that every runtime driver passes: what
// runtime.Driver and runtime.Handle promise, tried on sandboxes that really run.
package runtimetest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// Bundle is a driver with what the suite needs to try it. Each case gets its own.
type Bundle struct {
	Driver runtime.Driver
	// Restart gives a driver of the same machine that knows nothing of the others, as
	// after a restart of the host agent.
	Restart func() runtime.Driver
	// Spec makes a new place with a disk on which the test guest is PID 1.
	Spec func() runtime.Spec
	// Beside makes a new place with a copy of another's disk.
	Beside func(runtime.Spec) runtime.Spec
	// Full makes an empty directory in which there is no room for an image.
	Full func() string
	// Crash kills a process of the sandbox behind the driver's back.
	Crash func(runtime.Spec)
	// Limits says that memory and CPUs are really limited.
	Limits bool
}

// Run tries a driver. newBundle is called once for each case.
func Run(t *testing.T, newBundle func(testing.TB) Bundle) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t, newBundle(t))
		})
	}
}

var cases = []struct {
	name string
	run  func(*testing.T, Bundle)
}{
	{"Probe", probe},
	{"StartAskKill", startAskKill},
	{"StartRefusesNonsense", startRefusesNonsense},
	{"StartCancelled", startCancelled},
	{"StartTwice", startTwice},
	{"PauseStopsTicks", pauseStopsTicks},
	{"CaptureKeepsSource_Z10", captureKeepsSource},
	{"CaptureIntoFullDirectory_Z10", captureIntoFullDirectory},
	{"CaptureAgain", captureAgain},
	{"RestoreKeepsMemory_HoldsChildren_F2", restoreHolds},
	{"RestoreTwice_F1", restoreTwice},
	{"RestoreThenKillHeld", restoreThenKillHeld},
	{"RestoreDamaged", restoreDamaged},
	{"RestoreCancelled", restoreCancelled},
	{"ExitCode_S8", exitCode},
	{"Crash_S8", crash},
	{"KilledFromOutside_S8", killedFromOutside},
	{"OutOfMemory_S8", outOfMemory},
	{"WaitOften", waitOften},
	{"AdoptRunning", adoptRunning},
	{"AdoptPausedThaw", adoptPausedThaw},
	{"AdoptHeldThaw", adoptHeldThaw},
	{"AdoptDead", adoptDead},
	{"AdoptNothing", adoptNothing},
	{"AdoptUnfinishedCapture", adoptAfterCapture},
	{"Usage", usage},
	{"Clock_Z6", clock},
}

// ctx bounds one case.
func ctx(t *testing.T) context.Context {
	t.Helper()
	c, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return c
}

// start boots a sandbox, waits for its guest, and kills it at the end.
func start(t *testing.T, b Bundle, spec runtime.Spec) runtime.Handle {
	t.Helper()
	h, err := b.Driver.Start(ctx(t), spec)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	killAtEnd(t, h)
	Await(t, h)
	return h
}

func killAtEnd(t *testing.T, h runtime.Handle) {
	t.Helper()
	t.Cleanup(func() {
		c, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := h.Kill(c); err != nil {
			t.Errorf("Kill at the end: %v", err)
		}
	})
}

func kill(t *testing.T, h runtime.Handle) {
	t.Helper()
	if err := h.Kill(ctx(t)); err != nil {
		t.Fatalf("Kill: %v", err)
	}
}

func pause(t *testing.T, h runtime.Handle) runtime.Paused {
	t.Helper()
	p, err := h.Pause(ctx(t))
	if err != nil {
		t.Fatalf("Pause: %v", err)
	}
	return p
}

func resume(t *testing.T, p runtime.Paused) {
	t.Helper()
	if err := p.Resume(ctx(t)); err != nil {
		t.Fatalf("Resume: %v", err)
	}
}

func capture(t *testing.T, p runtime.Paused) (image string) {
	t.Helper()
	image = t.TempDir()
	if err := p.Capture(ctx(t), image); err != nil {
		t.Fatalf("Capture: %v", err)
	}
	return image
}

// restore brings an image back and kills it at the end.
func restore(t *testing.T, b Bundle, spec runtime.Spec, image string) runtime.Held {
	t.Helper()
	h, err := b.Driver.Restore(ctx(t), spec, image)
	if err != nil {
		t.Fatalf("Restore: %v", err)
	}
	killAtEnd(t, h)
	Await(t, h)
	return h
}

func release(t *testing.T, h runtime.Held) {
	t.Helper()
	if err := h.Release(ctx(t)); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

// renewed is the same place with a new network: a driver may use up a namespace.
func renewed(b Bundle, spec runtime.Spec) runtime.Spec {
	fresh := b.Spec()
	spec.NetNS, spec.Dial = fresh.NetNS, fresh.Dial
	return spec
}

// wantKind fails unless err is a fault of the kind.
func wantKind(t *testing.T, err error, kind fault.Kind) *fault.Fault {
	t.Helper()
	f, ok := errors.AsType[*fault.Fault](err)
	if !ok || f.Kind != kind {
		t.Fatalf("got error %v, want a fault %s", err, kind)
	}
	if f.Message == "" {
		t.Errorf("the fault %s says nothing", kind)
	}
	return f
}

// wantGone fails unless the place is free: nothing can be adopted, and a sandbox of
// the same id can be started in it.
func wantGone(t *testing.T, b Bundle, spec runtime.Spec) {
	t.Helper()
	_, err := b.Restart().Adopt(ctx(t), spec)
	wantKind(t, err, fault.NotFound)
}

func probe(t *testing.T, b Bundle) {
	c, err := b.Driver.Probe(ctx(t))
	if err != nil {
		t.Fatalf("Probe: %v", err)
	}
	if c.Runtime == "" || c.Version == "" {
		t.Errorf("Probe names no runtime or no version: %+v", c)
	}
	if !c.MemorySnapshot {
		t.Errorf("the suite needs MemorySnapshot: %+v", c)
	}
}

func startAskKill(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	MustAsk(t, h, "set", "a", "1")
	if got := MustAsk(t, h, "get", "a"); got != "1" {
		t.Errorf("the guest's memory holds %q, not 1", got)
	}
	if err := h.Saveable(ctx(t)); err != nil {
		t.Errorf("Saveable: %v", err)
	}
	wait := h.Wait()
	kill(t, h)
	if exit := Ended(t, wait); !exit.Known || exit.Signal != 9 || exit.OOM || exit.At.IsZero() {
		t.Errorf("a killed sandbox ended as %+v", exit)
	}
	kill(t, h) // a second time succeeds
	c, cancel := context.WithTimeout(ctx(t), time.Second)
	defer cancel()
	if _, err := ask(c, h, "get", "a"); err == nil {
		t.Error("a killed sandbox answers")
	}
	wantGone(t, b, spec)
	again := start(t, b, renewed(b, spec)) // the place can be used again
	if got := MustAsk(t, again, "get", "a"); got != "" {
		t.Errorf("a fresh boot remembers %q", got)
	}
}

func startRefusesNonsense(t *testing.T, b Bundle) {
	good := b.Spec()
	for name, spoil := range map[string]func(*runtime.Spec){
		"no id":          func(s *runtime.Spec) { s.ID = "" },
		"id with slash":  func(s *runtime.Spec) { s.ID = "a/../b" },
		"relative dir":   func(s *runtime.Spec) { s.Dir = "here" },
		"relative root":  func(s *runtime.Spec) { s.Root = "here" },
		"no command":     func(s *runtime.Spec) { s.Args = nil },
		"no CPU":         func(s *runtime.Spec) { s.CPUs = 0 },
		"no memory":      func(s *runtime.Spec) { s.MemoryBytes = 0 },
		"memory below 0": func(s *runtime.Spec) { s.MemoryBytes = -1 },
	} {
		spec := good
		spoil(&spec)
		_, err := b.Driver.Start(ctx(t), spec)
		if !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%s: got %v, want invalid_argument", name, err)
		}
	}
	if left, _ := os.ReadDir(good.Dir); len(left) > 0 {
		t.Errorf("a refused start left %v", left)
	}
}

func startCancelled(t *testing.T, b Bundle) {
	// However early or late the caller gives up, it gets a sandbox or nothing.
	for _, patience := range []time.Duration{0, time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond} {
		spec := b.Spec()
		c, cancel := context.WithTimeout(ctx(t), patience)
		h, err := b.Driver.Start(c, spec)
		cancel()
		if err == nil {
			kill(t, h)
			continue
		}
		wantKind(t, err, fault.DeadlineExceeded)
		wantGone(t, b, spec)
	}
}

func startTwice(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	_, err := b.Driver.Start(ctx(t), spec)
	wantKind(t, err, fault.Conflict)
	MustAsk(t, h, "get", "token") // the first is unharmed
}

func pauseStopsTicks(t *testing.T, b Bundle) {
	h := start(t, b, b.Spec())
	MustAsk(t, h, "spawn")
	AwaitTicks(t, h, 0)
	for range 3 { // pauses do not nest
		pause(t, h)
	}
	p := pause(t, h)
	wantSilent(t, h)
	resume(t, p)
	before := Ticks(t, h)
	AwaitTicks(t, h, before)
	resume(t, p) // a second time succeeds
	MustAsk(t, h, "get", "token")
}

// wantSilent fails if the guest answers: its tasks are stopped.
func wantSilent(t *testing.T, h runtime.Handle) {
	t.Helper()
	c, cancel := context.WithTimeout(ctx(t), 300*time.Millisecond)
	defer cancel()
	if answer, err := ask(c, h, "get", "token"); err == nil {
		t.Errorf("a paused guest answers %q", answer)
	}
}

func captureKeepsSource(t *testing.T, b Bundle) {
	h := start(t, b, b.Spec())
	MustAsk(t, h, "spawn")
	AwaitTicks(t, h, 0)
	token := MustAsk(t, h, "get", "token")
	p := pause(t, h)
	capture(t, p)
	wantSilent(t, h) // Capture leaves it paused
	resume(t, p)
	if got := MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("the source's memory has changed from %s to %s", token, got)
	}
	AwaitTicks(t, h, Ticks(t, h))
}

func captureIntoFullDirectory(t *testing.T, b Bundle) {
	h := start(t, b, b.Spec())
	MustAsk(t, h, "spawn")
	token := MustAsk(t, h, "get", "token")
	p := pause(t, h)
	if err := p.Capture(ctx(t), b.Full()); err == nil {
		t.Fatal("Capture into a full directory succeeded")
	}
	wantSilent(t, h)
	capture(t, p) // it is whole: with room it can be captured
	resume(t, p)
	if got := MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("the source's memory has changed from %s to %s", token, got)
	}
	AwaitTicks(t, h, Ticks(t, h))
}

func captureAgain(t *testing.T, b Bundle) {
	spec := b.Spec()
	h := start(t, b, spec)
	for _, value := range []string{"1", "2", "3"} {
		MustAsk(t, h, "set", "a", value)
		p := pause(t, h)
		image := capture(t, p)
		kill(t, h)
		spec = b.Beside(spec)
		r := restore(t, b, spec, image)
		release(t, r)
		if got := MustAsk(t, r, "get", "a"); got != value {
			t.Fatalf("after a wake the memory holds %q, not %s", got, value)
		}
		h = r
	}
}

func imageOf(t *testing.T, b Bundle, prepare func(runtime.Handle)) (runtime.Spec, string) {
	t.Helper()
	spec := b.Spec()
	h := start(t, b, spec)
	prepare(h)
	p := pause(t, h)
	image := capture(t, p)
	if err := p.Kill(ctx(t)); err != nil {
		t.Fatalf("Kill of a paused sandbox: %v", err)
	}
	return spec, image
}

func restoreHolds(t *testing.T, b Bundle) {
	c, err := b.Driver.Probe(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	var token string
	spec, image := imageOf(t, b, func(h runtime.Handle) {
		token = MustAsk(t, h, "get", "token")
		MustAsk(t, h, "write", "/kept", "words")
		MustAsk(t, h, "spawn")
		AwaitTicks(t, h, 0)
	})
	h := restore(t, b, b.Beside(spec), image)
	if got := MustAsk(t, h, "get", "token"); got != token {
		t.Errorf("the memory holds %q, not %q", got, token)
	}
	if got := MustAsk(t, h, "read", "/kept"); got != "words" {
		t.Errorf("the disk holds %q", got)
	}
	before := Ticks(t, h)
	if c.HeldRestore {
		// What was in the pipe at the capture may still arrive; a child that runs
		// would tick 30 times.
		time.Sleep(300 * time.Millisecond)
		if got := Ticks(t, h); got > before+2 {
			t.Errorf("a held child ticked %d times", got-before)
		}
	}
	release(t, h)
	AwaitTicks(t, h, before+3)
	release(t, h) // a second time succeeds
	p := pause(t, h)
	resume(t, p)
	AwaitTicks(t, h, Ticks(t, h))
}

func restoreTwice(t *testing.T, b Bundle) {
	spec, image := imageOf(t, b, func(h runtime.Handle) { MustAsk(t, h, "set", "a", "both") })
	first := restore(t, b, b.Beside(spec), image)
	second := restore(t, b, b.Beside(spec), image)
	release(t, first)
	release(t, second)
	MustAsk(t, first, "set", "b", "first")
	MustAsk(t, second, "set", "b", "second")
	if got := MustAsk(t, first, "get", "a") + MustAsk(t, second, "get", "a"); got != "bothboth" {
		t.Errorf("the memories hold %q", got)
	}
	if got := MustAsk(t, first, "get", "b") + MustAsk(t, second, "get", "b"); got != "firstsecond" {
		t.Errorf("the memories are not apart: %q", got)
	}
	if a, b := MustAsk(t, first, "random"), MustAsk(t, second, "random"); a == b {
		t.Errorf("both draw %s from the kernel's random stream", a)
	}
	kill(t, first)
	MustAsk(t, second, "get", "b")
}

func restoreThenKillHeld(t *testing.T, b Bundle) {
	spec, image := imageOf(t, b, func(h runtime.Handle) { MustAsk(t, h, "spawn") })
	place := b.Beside(spec)
	h := restore(t, b, place, image)
	kill(t, h)
	wantGone(t, b, place)
	// The image was never released, so it is good for another restore.
	again := restore(t, b, b.Beside(spec), image)
	release(t, again)
	AwaitTicks(t, again, Ticks(t, again))
}

func restoreDamaged(t *testing.T, b Bundle) {
	spec, image := imageOf(t, b, func(runtime.Handle) {})
	manifest, err := runtime.Seal(ctx(t), image, runtime.Meta{Runtime: "test"})
	if err != nil {
		t.Fatalf("Seal: %v", err)
	}
	if err := runtime.Verify(ctx(t), image, manifest); err != nil {
		t.Fatalf("Verify of a whole image: %v", err)
	}
	for _, f := range manifest.Files {
		path := filepath.Join(image, f.Name)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if len(whole) == 0 {
			continue
		}
		for name, bytes := range map[string][]byte{"cut": whole[:len(whole)/2], "missing": nil} {
			if bytes == nil {
				err = os.Remove(path)
			} else {
				err = os.WriteFile(path, bytes, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			wantKind(t, runtime.Verify(ctx(t), image, manifest), fault.DataCorrupt)
			// Also without a Verify a cut image gives no sandbox that runs on.
			place := b.Beside(spec)
			h, err := b.Driver.Restore(ctx(t), place, image)
			if err == nil {
				err = h.Release(ctx(t))
				kill(t, h)
			}
			if err == nil {
				t.Errorf("%s with %s: restored and released", f.Name, name)
			}
			wantGone(t, b, place)
		}
		flipped := append([]byte(nil), whole...)
		flipped[len(flipped)/2] ^= 1
		if err := os.WriteFile(path, flipped, 0o600); err != nil {
			t.Fatal(err)
		}
		wantKind(t, runtime.Verify(ctx(t), image, manifest), fault.DataCorrupt)
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	release(t, restore(t, b, b.Beside(spec), image))
}

func restoreCancelled(t *testing.T, b Bundle) {
	spec, image := imageOf(t, b, func(runtime.Handle) {})
	for _, patience := range []time.Duration{0, 50 * time.Millisecond} {
		place := b.Beside(spec)
		c, cancel := context.WithTimeout(ctx(t), patience)
		h, err := b.Driver.Restore(c, place, image)
		cancel()
		if err == nil {
			kill(t, h)
			continue
		}
		wantKind(t, err, fault.DeadlineExceeded)
		wantGone(t, b, place)
	}
	release(t, restore(t, b, b.Beside(spec), image)) // the image is unharmed
}
