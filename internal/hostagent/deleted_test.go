package hostagent

import (
	"slices"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// X9: what is deleted is kept for its time, to the second, without a server and across a
// restart, and then erased, once.
func TestErasedInItsTime_X9(t *testing.T) {
	t.Parallel()
	for _, start := range []sandbox.State{sandbox.Ready, sandbox.Sleeping, sandbox.Stopped} {
		w, v := timedWorld(t, policy(time.Hour))
		switch start {
		case sandbox.Sleeping:
			w.must(w.command(sb, sandbox.Sleep))
		case sandbox.Stopped:
			w.must(w.command(sb, sandbox.Stop))
		}
		content := w.disks.content(sb)
		w.must(w.deletion(24 * time.Hour))
		until := v.read().Wall.Add(24 * time.Hour)
		if rep := w.book.last(sb); rep.Event != sandbox.EventDeleted || !rep.EraseAt.Equal(until) || !rep.Deadline.IsZero() {
			t.Fatalf("%s: the report is %+v", start, rep)
		}
		w.consistent(sb)
		w.bury()
		v.pass(24*time.Hour - time.Second)
		w.start()
		w.looked()
		if got := w.disks.content(sb); got != content {
			t.Fatalf("%s: a second before its end it has %q, not %q", start, got, content)
		}
		w.book.away.Store(true)
		v.pass(time.Second)
		eventually(t, "its end", func() bool { return w.disks.content(sb) == "" })
		w.book.away.Store(false)
		eventually(t, "the report", func() bool { return w.book.last(sb).Erased })
		eventually(t, "the end of its journal", func() bool { _, err := w.agent.find(sb); return err != nil })
		if autos := w.autos(); len(autos) != 1 || autos[0].Cause != sandbox.CauseErase || !autos[0].Due.Equal(until) || autos[0].Event != "" {
			t.Errorf("%s: the host made %+v", start, autos)
		}
		w.consistent(sb)
		w.book.sound(t)
	}
}

// X9: it comes back as stopped, with its disk and without its memory, and its timers are
// those of one that has just been stopped.
func TestUndelete_X9(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	content, life := w.disks.content(sb), w.guest(sb).life()
	w.must(w.deletion(24 * time.Hour))
	v.pass(23 * time.Hour)
	w.must(w.command(sb, sandbox.Undelete))
	if got := w.book.state(sb); got != sandbox.Stopped || w.disks.content(sb) != content {
		t.Fatalf("it is %s with %q", got, w.disks.content(sb))
	}
	v.pass(48 * time.Hour)
	w.looked()
	w.consistent(sb)
	w.must(w.command(sb, sandbox.Resume))
	if w.ping(sb); w.guest(sb).life() == life || !w.deadline().Equal(v.read().Wall.Add(time.Hour)) {
		t.Errorf("boot %d, deadline %s", w.guest(sb).life(), w.deadline())
	}
	w.must(w.deletion(time.Hour)) // and a second time
	w.must(w.command(sb, sandbox.Undelete))
	w.must(w.deletion(0)) // for good
	w.consistent(sb)
	w.book.sound(t)
}

// X9: where nothing is left an undelete is refused; so is one of what is not deleted.
func TestNothingToUndelete_X9(t *testing.T) {
	t.Parallel()
	w, _ := timedWorld(t, policy(0))
	if f := w.run(w.command(sb, sandbox.Undelete)); f == nil || f.Reason != "overtaken" {
		t.Errorf("of one that runs: %+v", f)
	}
	w.must(w.deletion(time.Hour))
	w.disks.lose(sb)
	if f := w.run(w.command(sb, sandbox.Undelete)); f == nil || f.Kind != string(fault.NotFound) {
		t.Errorf("of one without a disk: %+v", f)
	}
	if err := w.agent.Submit(t.Context(), w.command("nobody", sandbox.Undelete)); !fault.Is(err, fault.NotFound) {
		t.Errorf("of one that is not known: %v", err)
	}
}

// S5, X9: a save that is damaged does not keep a deletion from going through; then there
// is nothing to bring back.
func TestDeleteOfADamagedSave_S5(t *testing.T) {
	t.Parallel()
	w, _ := timedWorld(t, policy(0))
	w.must(w.command(sb, sandbox.Sleep))
	w.disks.lose(sb)
	w.must(w.deletion(time.Hour))
	if rep := w.book.last(sb); !rep.EraseAt.IsZero() {
		t.Errorf("it can be brought back until %s", rep.EraseAt)
	}
	w.consistent(sb)
}

// X9: less when the pool is short: the one that was deleted first goes first, one after
// the other, and only for as long as it is short.
func TestShortPoolErasesEarlier_X9(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(0))
	ids := []string{sb, "second", "third"}
	for _, id := range ids {
		if id != sb {
			w.must(w.timed(id, policy(0)))
		}
		cmd := w.command(id, sandbox.Delete)
		cmd.UndeleteFor = 24 * time.Hour
		w.must(cmd)
		v.pass(time.Minute)
	}
	w.disks.onDelete = func(string) { w.disks.short.Store(false) }
	w.disks.short.Store(true)
	eventually(t, "the first to go", func() bool { return w.book.last(sb).Erased })
	facts := w.book.of(sb)
	if moved := facts[len(facts)-2]; moved.Operation != "" || moved.EraseAt.IsZero() || moved.EraseAt.After(v.read().Wall) {
		t.Errorf("the move of its end: %+v", moved)
	}
	for _, id := range ids[1:] {
		if w.book.last(id).Erased || !w.disks.has(id) {
			t.Errorf("%s is erased too", id)
		}
	}
	w.disks.onDelete = nil
	w.disks.short.Store(true)
	for _, id := range ids[1:] {
		eventually(t, "the end of "+id, func() bool { return w.book.last(id).Erased })
	}
	w.book.sound(t)
}

// S5: a deletion is not cancelled, whoever asks.
func TestDeleteIsNotCancelled(t *testing.T) {
	t.Parallel()
	w, _ := timedWorld(t, policy(0))
	cmd := w.deletion(time.Hour)
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Delete {
			if err := w.agent.Cancel(t.Context(), sb, cmd.Operation); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	w.must(cmd)
	w.setTrap(nil)
	w.consistent(sb)
	// One that comes while it is deleted already, after an undelete was cancelled.
	undelete := w.command(sb, sandbox.Undelete)
	undelete.Cancelled = true
	if f := w.run(undelete); f == nil || f.Kind != string(fault.Cancelled) {
		t.Errorf("%+v", f)
	}
	w.must(w.deletion(time.Hour))
	if !w.disks.has(sb) || slices.ContainsFunc(w.book.of(sb), func(r hostproto.Report) bool { return r.Erased }) {
		t.Error("a second deletion erased it")
	}
	w.book.sound(t)
}
