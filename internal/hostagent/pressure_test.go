package hostagent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// room sets what may still be written to the pool.
func (w *world) room(left int64) {
	w.disks.mu.Lock()
	defer w.disks.mu.Unlock()
	w.disks.left = left
}

func (w *world) paused(id string) bool {
	g, ok := w.guests.Load(id)
	return ok && g.(*memGuest).paused.Load()
}

// full says whether the control plane knows that a sandbox is held.
func (b *book) full(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	is := false
	of := func(c sandbox.Condition) bool { return c.Type == sandbox.Degraded && c.Reason == "disk_full" }
	for _, r := range b.facts[id] {
		is = (is || slices.ContainsFunc(r.Set, of)) && !slices.ContainsFunc(r.Clear, of)
	}
	return is
}

// D6: sandboxes that run are held while the pool is full, say so, and go on when there
// is space again. What makes space works meanwhile.
func TestD6FullPoolHolds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const a, b, c, d = "sbx_a", "sbx_b", "sbx_c", "sbx_d"
	for _, id := range []string{a, b, c, d} {
		w.must(w.command(id, sandbox.Create))
	}
	w.must(w.command(d, sandbox.Sleep))
	w.room(-1)
	for _, id := range []string{a, b, c} {
		eventually(t, id+" to be held", func() bool { return w.paused(id) && w.book.full(id) })
		_, err := w.agent.Guest(t.Context(), id, hostproto.UseSession)
		if f := fault.Of(err); !fault.Is(err, fault.NoCapacity) || f.Reason != "disk_full" || !strings.Contains(f.Message, "hutch df") {
			t.Errorf("a call to %s that is held: %v", id, err)
		}
	}
	if w.book.full(d) {
		t.Error("what sleeps writes nothing, and is held")
	}
	// Space that is not enough yet changes nothing: no flapping.
	w.room(5)
	w.must(w.command(b, sandbox.Stop))
	w.must(w.command(c, sandbox.Sleep))
	if !w.paused(a) || w.book.full(b) || w.book.full(c) {
		t.Errorf("a is held: %v; the conditions of b and c are left: %v %v", w.paused(a), w.book.full(b), w.book.full(c))
	}
	// What fails to sleep is held again.
	w.driver.Inject(fake.Fault{Method: "Capture", Nth: 3, Action: fake.Fail, After: true})
	if f := w.run(w.command(a, sandbox.Sleep)); f == nil {
		t.Error("the sleep succeeded")
	}
	eventually(t, "a to be held again", func() bool { return w.paused(a) && w.book.full(a) })
	w.room(11)
	eventually(t, "a to go on", func() bool { return !w.paused(a) && !w.book.full(a) })
	w.ping(a)
	w.consistent(a, b, c, d)
	w.book.sound(t)
}

// An agent that comes back finds what it had held, and the truth of it.
func TestD6HeldAcrossRestart(t *testing.T) {
	t.Parallel()
	for name, left := range map[string]int64{"still full": -1, "space again": 100} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.must(w.command(sb, sandbox.Create))
			w.room(-1)
			eventually(t, "it to be held", func() bool { return w.paused(sb) && w.book.full(sb) })
			w.agent.Stop()
			if !w.paused(sb) {
				t.Error("with nobody to watch the pool it runs")
			}
			w.room(left)
			w.start()
			full := left < 0
			eventually(t, "the truth", func() bool { return w.paused(sb) == full && w.book.full(sb) == full })
			// A crash while it is held is a crash, and no condition is left.
			w.machine.Crash(sb, runtime.Exit{})
			eventually(t, "the report", func() bool { return w.book.last(sb).Event == sandbox.EventCrashed })
			if w.book.full(sb) {
				t.Error("a failed sandbox is held")
			}
			w.consistent(sb)
			w.book.sound(t)
		})
	}
}

// What is written and not on disk yet takes space: it counts, and no other program's.
func TestD6UnwrittenCounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	g, _ := w.guests.Load(sb)
	g.(*memGuest).dirty.Store(60)
	w.room(50)
	eventually(t, "it to be held", func() bool { return w.paused(sb) && w.book.full(sb) })
	g.(*memGuest).dirty.Store(5) // the kernel has written it out; the pool had room
	eventually(t, "it to go on", func() bool { return !w.paused(sb) && !w.book.full(sb) })
}

// A pause that fails is tried again, and nobody is told before it is true.
func TestD6HoldFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.driver.Inject(fake.Fault{Method: "Pause", Nth: 1, Action: fake.Fail})
	w.room(-1)
	eventually(t, "it to be held", func() bool { return w.book.full(sb) })
	if !w.paused(sb) {
		t.Error("it is said to be held and runs")
	}
	w.driver.Inject(fake.Fault{Method: "Thaw", Nth: 1, Action: fake.Fail})
	w.room(100)
	eventually(t, "it to go on", func() bool { return !w.paused(sb) && !w.book.full(sb) })
	w.ping(sb)
}

// smallJournals puts the journals on a file system of 1 MiB.
func smallJournals(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.agent.Stop()
	dir := filepath.Join(w.dir, "journal")
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.agent.Stop()
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	w.start()
	return w
}

// fillJournals takes the last block; the function that it gives frees all again.
func (w *world) fillJournals() (free func()) {
	w.t.Helper()
	path := filepath.Join(w.dir, "journal", "hog")
	f, err := os.Create(path)
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	for size := 4096; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			w.t.Fatal(err)
		}
	}
	return func() {
		if err := os.Remove(path); err != nil {
			w.t.Fatal(err)
		}
	}
}

// D6: where the file system of the data directory is full nothing is taken in, nothing
// is half made, what is under way ends when there is space, and all works again.
func TestD6FullJournal(t *testing.T) {
	t.Parallel()
	w := smallJournals(t)
	// Each record is longer than a block, so that none fits into the rest of one.
	command := func(id string, verb sandbox.Verb) hostproto.Command {
		c := w.command(id, verb)
		c.Spec.Env = map[string]string{"PAD": strings.Repeat("x", 8<<10)}
		return c
	}
	w.must(command(sb, sandbox.Create))
	w.idle(sb)
	free := w.fillJournals()
	refused := func(id string, verb sandbox.Verb) {
		t.Helper()
		err := w.agent.Submit(t.Context(), command(id, verb))
		if f := fault.Of(err); !fault.Is(err, fault.Unavailable) || f.Reason != "journal" {
			t.Errorf("%s of %s on a full disk: %v", verb, id, err)
		}
	}
	for range 3 {
		refused("sbx_new", sandbox.Create)
	}
	if w.disks.has("sbx_new") || w.network.has("sbx_new") {
		t.Error("what was refused is half made")
	}
	w.ping(sb)
	free()
	w.must(command("sbx_new", sandbox.Create))

	// The disk fills up just before a save would be committed: it fails and runs on.
	filled := make(chan func(), 1)
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Sleep && step == sandbox.StepSeal {
			filled <- w.fillJournals()
		}
		return nil
	})
	sleep := command("sbx_new", sandbox.Sleep)
	if err := w.agent.Submit(t.Context(), sleep); err != nil {
		t.Fatal(err)
	}
	free = <-filled
	eventually(t, "the save to be taken back", func() bool { return w.disks.savesOf("sbx_new") == 0 && !w.paused("sbx_new") })
	w.setTrap(nil)
	w.ping("sbx_new")
	free()
	if f := w.book.end(t, sleep.Operation); f == nil || f.Kind != string(fault.Unavailable) || f.Reason != "journal" {
		t.Errorf("the sleep ended with %+v", f)
	}
	w.must(command("sbx_new", sandbox.Sleep))
	w.must(command(sb, sandbox.Stop))
	w.consistent(sb, "sbx_new")
	w.book.sound(t)
}
