package hostagent

import (
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// virtual is a machine's clocks as a test turns them.
type virtual struct {
	mu   sync.Mutex
	wall time.Time
	up   time.Duration
	boot string
}

func (v *virtual) read() sandbox.Reading {
	v.mu.Lock()
	defer v.mu.Unlock()
	return sandbox.Reading{Wall: v.wall, Up: v.up, Boot: v.boot}
}

// pass lets time go by.
func (v *virtual) pass(d time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wall, v.up = v.wall.Add(d), v.up+d
}

// set sets the wall clock, and nothing else.
func (v *virtual) set(by time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wall = v.wall.Add(by)
}

// timedWorld is a world with clocks of its own, and its first sandbox with a policy.
func timedWorld(t *testing.T, p sandbox.Policy) (*world, *virtual) {
	t.Helper()
	v := &virtual{wall: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), up: time.Hour, boot: "boot-1"}
	w := newWorld(t, func(w *world) { w.read, w.look = v.read, 3*time.Millisecond })
	w.must(w.timed(sb, p))
	return w, v
}

// timed is a create with a policy.
func (w *world) timed(id string, p sandbox.Policy) hostproto.Command {
	cmd := w.command(id, sandbox.Create)
	cmd.Policy = &p
	return cmd
}

func policy(ttl time.Duration, change ...func(*sandbox.Policy)) sandbox.Policy {
	p := sandbox.DefaultPolicy()
	p.TTL = ttl
	for _, c := range change {
		c(&p)
	}
	return p
}

// deadline is the auto-stop as it was last reported.
func (w *world) deadline() time.Time {
	w.t.Helper()
	facts := w.book.of(sb)
	return facts[len(facts)-1].Deadline
}

// looked has the timers looked at, and waits for what comes of it.
func (w *world) looked() {
	w.t.Helper()
	w.lookAt()
	w.idle(sb)
}

func (w *world) lookAt() {
	w.t.Helper()
	o, err := w.agent.find(sb)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := o.call(w.t.Context(), func() error { o.timers(); return nil }); err != nil {
		w.t.Fatal(err)
	}
}

func (b *book) of(id string) []hostproto.Report {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.facts[id])
}

// autos gives the operations that the host made by itself.
func (w *world) autos() (out []hostproto.Report) {
	for _, r := range w.book.of(sb) {
		if r.Cause != "" {
			out = append(out, r)
		}
	}
	return out
}

// stoppedBy proves that one operation, of this cause, has stopped it, which fell due at
// an instant and has the id that follows from that.
func (w *world) stoppedBy(cause sandbox.Cause, due time.Time) {
	w.t.Helper()
	eventually(w.t, "the stop", func() bool { return w.book.state(sb) == sandbox.Stopped })
	w.consistent(sb)
	autos := w.autos()
	if len(autos) != 1 || autos[0].Cause != cause || !autos[0].Due.Equal(due) || autos[0].Verb != sandbox.Stop || !autos[0].Ended {
		w.t.Fatalf("the host made %+v, want one stop that was due at %s", autos, due)
	}
	if want := sandbox.OperationID(sb, autos[0].Generation, cause, due, 0); autos[0].Operation != want {
		w.t.Errorf("its id is %s, want %s", autos[0].Operation, want)
	}
	if d := w.deadline(); !d.IsZero() {
		w.t.Errorf("a stopped one has the deadline %s", d)
	}
	w.book.sound(w.t)
}

// A1, A2: at its second, counted from its creation, whatever is asked of it meanwhile.
func TestAutoStopAtItsSecond_A1_A2(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	due := w.deadline()
	if want := v.read().Wall.Add(time.Hour); !due.Equal(want) {
		t.Fatalf("the deadline is %s, want %s", due, want)
	}
	for range 59 {
		v.pass(time.Minute)
		w.ping(sb)
		if _, err := w.agent.Usage(t.Context(), sb); err != nil {
			t.Fatal(err)
		}
	}
	v.pass(59 * time.Second)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Ready || len(w.autos()) != 0 {
		t.Fatalf("a second before its deadline it is %s: %+v", got, w.autos())
	}
	v.pass(time.Second)
	w.stoppedBy(sandbox.CauseDeadline, due)
}

// A1, A4: a wake begins a full auto-stop; while it sleeps the deadline runs on.
func TestAutoStopAcrossSleep_A4(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	v.pass(50 * time.Minute)
	w.must(w.command(sb, sandbox.Sleep))
	w.must(w.command(sb, sandbox.Wake))
	due := v.read().Wall.Add(time.Hour)
	if got := w.deadline(); !got.Equal(due) {
		t.Errorf("after a wake the deadline is %s, want %s", got, due)
	}
	v.pass(50 * time.Minute)
	w.must(w.command(sb, sandbox.Sleep))
	if got := w.deadline(); !got.Equal(due) {
		t.Errorf("in sleep the deadline is %s, want %s", got, due)
	}
	v.pass(10 * time.Minute)
	w.stoppedBy(sandbox.CauseDeadline, due)
}

// A8: at its deadline it sleeps, once, metered to that moment; in sleep only the memory
// window counts, and a wake begins a full auto-stop.
func TestSleepsAtItsDeadline_A8(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour, func(p *sandbox.Policy) { p.OnDeadline, p.MemoryWindow = sandbox.Sleep, 5*time.Hour }))
	due := w.deadline()
	v.pass(time.Hour)
	eventually(t, "the sleep", func() bool { return w.book.state(sb) == sandbox.Sleeping })
	autos := w.autos()
	if len(autos) != 1 || autos[0].Verb != sandbox.Sleep || !autos[0].Due.Equal(due) || autos[0].Cause != sandbox.CauseDeadline {
		t.Fatalf("the host made %+v", autos)
	}
	if d := w.deadline(); !d.IsZero() {
		t.Errorf("in sleep it has the deadline %s", d)
	}
	v.pass(4 * time.Hour)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Sleeping {
		t.Fatalf("before the window's end it is %s", got)
	}
	w.must(w.command(sb, sandbox.Wake))
	if got, want := w.deadline(), v.read().Wall.Add(time.Hour); !got.Equal(want) {
		t.Errorf("after a wake the deadline is %s, want %s", got, want)
	}
	v.pass(time.Hour)
	eventually(t, "the second sleep", func() bool { return w.book.state(sb) == sandbox.Sleeping })
	v.pass(5 * time.Hour)
	eventually(t, "the end of the window", func() bool { return w.book.state(sb) == sandbox.Stopped })
	if autos = w.autos(); len(autos) != 3 || autos[2].Cause != sandbox.CauseMemory || autos[2].Failure != nil {
		t.Errorf("the host made %+v", autos)
	}
	w.consistent(sb)
}

// A8: a sleep that is refused for what the guest controls becomes a stop at once, with
// the same due time: the auto-stop guards the bill.
func TestRefusedSleepBecomesStop_A8_Z9(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour, func(p *sandbox.Policy) { p.OnDeadline = sandbox.Sleep }))
	due := w.deadline()
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Sleep && step == sandbox.StepPrepare {
			return fault.New(fault.FailedPrecondition, "its disk is full").Because("disk_full")
		}
		return nil
	})
	v.pass(time.Hour)
	eventually(t, "the stop", func() bool { return w.book.state(sb) == sandbox.Stopped })
	autos := w.autos()
	if len(autos) != 2 || autos[0].Verb != sandbox.Sleep || autos[0].Failure == nil || autos[1].Verb != sandbox.Stop ||
		!autos[1].Due.Equal(due) || autos[0].Operation == autos[1].Operation {
		t.Errorf("the host made %+v", autos)
	}
	w.consistent(sb)
}

// A6, A7, A8: one that is to be deleted at its deadline is, by the host alone, also
// where that came while all was down; nothing of it is left.
func TestDeletesAtItsDeadline_A8(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour, func(p *sandbox.Policy) { p.OnDeadline = sandbox.Delete }))
	due := w.deadline()
	w.bury()
	v.pass(5 * time.Hour)
	w.book.away.Store(true)
	w.start()
	eventually(t, "the end without a server", func() bool { return len(w.machine.Running()) == 0 })
	w.book.away.Store(false)
	eventually(t, "the report", func() bool { return w.book.state(sb) == sandbox.Deleted })
	autos := w.autos()
	if len(autos) != 1 || autos[0].Verb != sandbox.Delete || !autos[0].Due.Equal(due) || !autos[0].Ended {
		t.Errorf("the host made %+v", autos)
	}
	eventually(t, "the last trace to go", func() bool {
		ids, err := w.agent.Inventory(t.Context())
		return err == nil && !slices.Contains(ids, sb)
	})
	w.book.sound(t)
}

// A4: a paused deadline does not run while it sleeps; a wake begins a full one.
func TestPausedInSleep_A4(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour, func(p *sandbox.Policy) {
		p.SleepDeadline, p.MemoryWindow = sandbox.DeadlinePaused, 10*time.Hour
	}))
	w.must(w.command(sb, sandbox.Sleep))
	due := v.read().Wall.Add(10 * time.Hour)
	if d := w.deadline(); !d.IsZero() {
		t.Errorf("in sleep it has the deadline %s", d)
	}
	v.pass(9 * time.Hour)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Sleeping {
		t.Fatalf("it is %s", got)
	}
	v.pass(time.Hour)
	w.stoppedBy(sandbox.CauseMemory, due)
}

// A4: at the deadline or at the end of the memory window, whichever is first.
func TestMemoryWindow_Z7(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(0, func(p *sandbox.Policy) { p.MemoryWindow = 3 * time.Hour }))
	v.pass(40 * 24 * time.Hour)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Ready {
		t.Fatalf("without an auto-stop it is %s", got)
	}
	w.must(w.command(sb, sandbox.Sleep))
	due := v.read().Wall.Add(3 * time.Hour)
	v.pass(3*time.Hour - time.Second)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Sleeping {
		t.Fatalf("before the window's end it is %s", got)
	}
	v.pass(time.Minute)
	w.stoppedBy(sandbox.CauseMemory, due)
}

// A7: steps of the wall clock neither fire nor skip a timer.
func TestWallClockSteps_A7(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{24 * time.Hour, -24 * time.Hour} {
		t.Run(step.String(), func(t *testing.T) {
			t.Parallel()
			w, v := timedWorld(t, policy(time.Hour))
			due := w.deadline()
			v.pass(30 * time.Minute)
			w.looked()
			v.set(step)
			w.looked()
			w.bury() // an agent that comes after the step has its clock from the file
			w.start()
			v.pass(29 * time.Minute)
			w.looked()
			if got := w.book.state(sb); got != sandbox.Ready {
				t.Fatalf("after a step it is %s", got)
			}
			v.pass(time.Minute)
			w.stoppedBy(sandbox.CauseDeadline, due)
		})
	}
}

// A6, A7: it fell due while no agent ran and no server was there: it is stopped at the
// start, once, with its due time; the server hears of it when it is back.
func TestDueWhileAllWasDown_A6_A7(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	due := w.deadline()
	w.bury()
	v.pass(5 * time.Hour)
	w.book.away.Store(true)
	w.start()
	eventually(t, "the stop without a server", func() bool { return len(w.machine.Running()) == 0 })
	if got := w.book.state(sb); got != sandbox.Ready {
		t.Fatalf("without a server it was reported %s", got)
	}
	w.book.away.Store(false)
	w.stoppedBy(sandbox.CauseDeadline, due)
}

// A7: the agent dies before and after each write and each step of what is done at a
// deadline.
func TestDeadlineAtEachDeath_A7_A8(t *testing.T) {
	t.Parallel()
	for verb, state := range map[sandbox.Verb]sandbox.State{sandbox.Stop: sandbox.Stopped, sandbox.Sleep: sandbox.Sleeping, sandbox.Delete: sandbox.Deleted} {
		t.Run(string(verb), func(t *testing.T) {
			t.Parallel()
			begin := func(t *testing.T) (*world, *virtual) {
				w, v := timedWorld(t, policy(time.Hour, func(p *sandbox.Policy) { p.OnDeadline = verb }))
				w.idle(sb)
				return w, v
			}
			atEachDeath(t, begin, 12, func(t *testing.T, w *world, v *virtual, due time.Time) {
				v.pass(time.Hour)
			}, func(t *testing.T, w *world, _ *virtual, due time.Time) {
				eventually(t, "the end", func() bool { return w.book.state(sb) == state })
				w.endedBy(verb, due)
			})
		})
	}
}

// A3, A7: the agent dies before and after each write of a deadline that is put off: it is
// put off once.
func TestMoveAtEachDeath_A3_A7(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T) (*world, *virtual) {
		w, v := timedWorld(t, policy(time.Hour))
		v.pass(30 * time.Minute)
		w.turns("t1")
		w.idle(sb)
		return w, v
	}
	atEachDeath(t, begin, 2, func(t *testing.T, w *world, v *virtual, due time.Time) {
		v.pass(30 * time.Minute)
	}, func(t *testing.T, w *world, v *virtual, due time.Time) {
		eventually(t, "the move", func() bool { return len(w.moves()) > 0 })
		if moves := w.moves(); len(moves) != 1 || !moves[0].Deadline.Equal(due.Add(time.Hour)) {
			t.Errorf("it was moved so: %+v", moves)
		}
		w.turns()
		v.pass(time.Hour)
		w.stoppedBy(sandbox.CauseDeadline, due.Add(time.Hour))
	})
}

// endedBy proves that one operation has ended it, which was due at an instant.
func (w *world) endedBy(verb sandbox.Verb, due time.Time) {
	w.t.Helper()
	autos := w.autos()
	if len(autos) != 1 || autos[0].Verb != verb || autos[0].Failure != nil || !autos[0].Due.Equal(due) {
		w.t.Errorf("the host made %+v, want one %s that was due at %s", autos, verb, due)
	}
	if verb != sandbox.Delete {
		w.consistent(sb)
	}
	w.book.sound(w.t)
}

// atEachDeath kills the agent at each instant of what act sets off, and checks what the
// next one makes of it.
func atEachDeath(t *testing.T, begin func(*testing.T) (*world, *virtual), least int, act, check func(*testing.T, *world, *virtual, time.Time)) {
	w, v := begin(t)
	due := w.deadline()
	w.mortal.arm(nil)
	act(t, w, v, due)
	if o, err := w.agent.find(sb); err == nil { // else it is erased already
		_ = o.call(t.Context(), func() error { o.timers(); return nil })
	}
	w.idle(sb)
	all := w.mortal.instants()
	check(t, w, v, due)
	if len(all) < least {
		t.Fatalf("it has the instants %v", all)
	}
	for _, at := range all {
		t.Run(at.String(), func(t *testing.T) {
			w, v := begin(t)
			due := w.deadline()
			w.mortal.arm(&at)
			act(t, w, v, due)
			select {
			case <-w.mortal.died:
			case <-time.After(15 * time.Second):
				t.Fatal("it did not come to this instant")
			}
			w.bury()
			w.start()
			check(t, w, v, due)
		})
	}
}

// A2: a changed auto-stop begins anew, once, however often the change is told.
func TestPolicyChange_A2(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	v.pass(59 * time.Minute)
	change := hostproto.PolicyChange{Sandbox: sb, Change: 7, Policy: policy(2 * time.Hour), Restart: true}
	due := v.read().Wall.Add(2 * time.Hour)
	for range 3 {
		if err := w.agent.SetPolicy(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		w.idle(sb)
		if got := w.deadline(); !got.Equal(due) {
			t.Fatalf("the deadline is %s, want %s", got, due)
		}
		v.pass(time.Minute)
		w.bury()
		w.start()
	}
	applied := func(r hostproto.Report) bool { return r.PolicyChange == 7 }
	if facts := w.book.of(sb); !slices.ContainsFunc(facts, applied) {
		t.Errorf("the change was not told to be applied: %+v", facts)
	}
	v.pass(2 * time.Hour)
	w.stoppedBy(sandbox.CauseDeadline, due)
}

// Z10: an auto-stop that fails is tried again, with its due time, as a new operation.
func TestAutoStopFails_Z10(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	due := w.deadline()
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Stop && step == sandbox.StepPrepare {
			return errFull
		}
		return nil
	})
	v.pass(time.Hour)
	eventually(t, "the failure", func() bool { return len(w.autos()) == 1 })
	w.looked()
	if got := w.autos(); len(got) != 1 || got[0].Failure == nil || w.book.state(sb) != sandbox.Ready {
		t.Fatalf("after a failed stop: %+v", got)
	}
	w.setTrap(nil)
	v.pass(31 * time.Second)
	eventually(t, "the next try", func() bool { return w.book.state(sb) == sandbox.Stopped })
	got := w.autos()
	if len(got) != 2 || got[1].Failure != nil || !got[1].Due.Equal(due) || got[1].Operation == got[0].Operation {
		t.Errorf("the tries: %+v", got)
	}
	w.consistent(sb)
}

// A1: a fork's copies begin a full auto-stop of their source's length.
func TestForkInherits_A1(t *testing.T) {
	t.Parallel()
	p := policy(time.Hour)
	w, v := timedWorld(t, p)
	v.pass(30 * time.Minute)
	cmd := w.command(sb, sandbox.Fork)
	cmd.Policy = &p
	cmd.Children = []hostproto.Child{{Sandbox: "copy", Operation: opID(), Name: "copy"}}
	w.must(cmd)
	w.book.end(t, cmd.Children[0].Operation)
	facts := w.book.of("copy")
	if got, want := facts[len(facts)-1].Deadline, v.read().Wall.Add(time.Hour); !got.Equal(want) {
		t.Errorf("the copy's deadline is %s, want %s", got, want)
	}
}

// A sandbox of a hutch that knew no timers gets no auto-stop, and a memory window.
func TestTimersAreAdopted(t *testing.T) {
	t.Parallel()
	v := &virtual{wall: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), up: time.Hour, boot: "boot-1"}
	w := newWorld(t, func(w *world) { w.read, w.look = v.read, 3*time.Millisecond })
	w.must(w.command(sb, sandbox.Create))
	if rec := w.idle(sb); rec.Timers != nil {
		t.Fatalf("without a policy it has the timers %+v", rec.Timers)
	}
	w.bury()
	w.start()
	v.pass(100 * 24 * time.Hour)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Ready {
		t.Fatalf("it is %s", got)
	}
	w.must(w.command(sb, sandbox.Sleep))
	due := v.read().Wall.Add(7 * 24 * time.Hour)
	v.pass(8 * 24 * time.Hour)
	w.stoppedBy(sandbox.CauseMemory, due)
}

// A7: host time that was lost begins anew; one that is there goes on.
func TestClockFile_A7(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := &virtual{wall: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), up: time.Hour, boot: "boot-1"}
	log := slog.New(slog.DiscardHandler)
	c, err := openClock(dir, v.read, nil, log)
	if err != nil {
		t.Fatal(err)
	}
	v.pass(time.Minute)
	v.set(-48 * time.Hour)
	c.keep()
	want := time.Date(2026, 3, 1, 12, 1, 0, 0, time.UTC)
	if got := c.now(); !got.Equal(want) {
		t.Errorf("host time is %s, want %s", got, want)
	}
	v.pass(time.Hour)
	later := want.Add(time.Hour)
	if c, err = openClock(dir, v.read, nil, log); err != nil || !c.now().Equal(later) || !c.before.Equal(want) {
		t.Errorf("after a restart host time is %s, want %s, and was last kept at %s (%v)", c.now(), later, c.before, err)
	}
	if err := replaceFile(filepath.Join(dir, "clock.json"), []byte("{")); err != nil {
		t.Fatal(err)
	}
	if c, err = openClock(dir, v.read, nil, log); err != nil || !c.now().Equal(v.read().Wall) || !c.before.IsZero() {
		t.Errorf("after a loss host time is %s (%v)", c.now(), err)
	}
}

// turns tells the host which turns are active in sb.
func (w *world) turns(turns ...string) {
	w.t.Helper()
	if err := w.agent.Renew(w.t.Context(), map[string][]string{sb: turns, "another": {"t9"}}); err != nil {
		w.t.Fatal(err)
	}
}

// moves gives the reports of a deadline that was put off.
func (w *world) moves() (out []hostproto.Report) {
	for _, r := range w.book.of(sb) {
		if r.Turn != "" {
			out = append(out, r)
		}
	}
	return out
}

// A3: while a turn is active the deadline moves one auto-stop later each time it comes,
// each move told; when none is, it is stopped at the deadline that it then has.
func TestTurnPutsDeadlineOff_A3(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	due := w.deadline()
	w.turns("t1")
	for n := range 3 {
		for range 60 {
			v.pass(time.Minute)
			w.turns("t1")
		}
		w.looked()
		due = due.Add(time.Hour)
		if got := w.moves(); len(got) != n+1 || got[n].Turn != "t1" || !got[n].Deadline.Equal(due) {
			t.Fatalf("after %d hours it was moved so: %+v, want to %s", n+1, got, due)
		}
	}
	w.bury() // a lease outlives the agent
	w.start()
	v.pass(30 * time.Minute)
	w.turns()
	v.pass(30*time.Minute - time.Second)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Ready {
		t.Fatalf("a second before its deadline it is %s", got)
	}
	v.pass(time.Second)
	w.stoppedBy(sandbox.CauseDeadline, due)
	if got := w.moves(); len(got) != 3 {
		t.Errorf("it was moved %d times", len(got))
	}
}

// A3: without a server the last lease holds for one auto-stop at most: the deadline is
// put off once, also over a restart and over a time when nothing ran.
func TestLastLease_A3(t *testing.T) {
	t.Parallel()
	for name, absent := range map[string]bool{"the agent runs": false, "nothing runs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, v := timedWorld(t, policy(time.Hour))
			due := w.deadline()
			v.pass(59 * time.Minute)
			w.turns("t1")
			w.book.away.Store(true)
			w.bury()
			if absent {
				v.pass(5 * time.Hour)
				w.start()
			} else {
				w.start()
				v.pass(time.Minute)
				w.lookAt()
				if len(w.machine.Running()) != 1 {
					t.Fatal("it was stopped under a lease")
				}
				v.pass(5 * time.Hour)
			}
			w.book.away.Store(false)
			w.stoppedBy(sandbox.CauseDeadline, due.Add(time.Hour))
			if got := w.moves(); len(got) != 1 || !got[0].Deadline.Equal(due.Add(time.Hour)) {
				t.Errorf("it was moved so: %+v", got)
			}
		})
	}
}

// A3, X4: a turn does not outlive the programs: after a stop and a resume, and after a
// reboot from inside, the deadline is not put off.
func TestTurnEndsWithPrograms_A3_X4(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	w.turns("t1")
	w.must(w.command(sb, sandbox.Stop))
	w.turns("t1") // told before the stop was known
	w.must(w.command(sb, sandbox.Resume))
	due := w.deadline()
	v.pass(time.Hour)
	w.stoppedBy(sandbox.CauseDeadline, due)
	if got := w.moves(); len(got) != 0 {
		t.Errorf("it was moved so: %+v", got)
	}
}

// A8: what is at rest is the control plane's: a host by itself neither archives nor
// deletes what is stopped.
func TestHostLeavesWhatRests_A8(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour, func(p *sandbox.Policy) { p.ArchiveAfter, p.DeleteAfter = time.Hour, 2*time.Hour }))
	w.must(w.command(sb, sandbox.Stop))
	v.pass(1000 * time.Hour)
	w.looked()
	if got := w.book.state(sb); got != sandbox.Stopped || len(w.autos()) != 0 {
		t.Errorf("it is %s: %+v", got, w.autos())
	}
}

// A7: by how much host time is ahead of the wall clock is told, so that a deadline is
// shown as the wall clock has it.
func TestAheadIsTold_A7(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	for _, step := range []time.Duration{0, -24 * time.Hour, 25 * time.Hour} {
		v.set(step)
		info, err := w.agent.Info(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got, want := w.deadline().Add(-info.Ahead), v.read().Wall.Add(time.Hour); !got.Equal(want) {
			t.Errorf("after a step of %s the deadline is shown as %s, want %s", step, got, want)
		}
	}
}
