package sandbox

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.jetify.com/typeid"
	"pgregory.net/rapid"
)

func mustAfter(t *testing.T, timers Timers, e Event, at time.Time) Timers {
	t.Helper()
	next, err := timers.After(e, at)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// at is an instant some time after the epoch.
func at(d time.Duration) time.Time { return epoch.Add(d) }

func ready(t *testing.T, change func(*Policy)) Timers {
	p := DefaultPolicy()
	if change != nil {
		change(&p)
	}
	return mustAfter(t, NewTimers("sbx_1", p), EventCreated, epoch)
}

func wantRun(t *testing.T, v Verdict, cause Cause, verb Verb, due time.Duration) {
	t.Helper()
	if v.Act != Run || v.Cause != cause || v.Verb != verb || !v.Due.Equal(at(due)) {
		t.Fatalf("got %+v, want %s for %s, due after %s", v, verb, cause, due)
	}
}

func wantWait(t *testing.T, v Verdict, next time.Duration) {
	t.Helper()
	if v.Act != Wait || !v.Next.Equal(at(next)) {
		t.Fatalf("got %+v, want to look again after %s", v, next)
	}
}

// TestEvents_A1_A4 walks a life and looks at each timer after each event.
func TestEvents_A1_A4(t *testing.T) {
	now := epoch
	l := ready(t, func(p *Policy) { p.DeleteAfter = 30 * day })
	type all struct{ deadline, memory, archive, remove time.Time }
	look := func(what string, want all) {
		t.Helper()
		if got := (all{l.Deadline, l.MemoryEnd, l.Archive, l.Delete}); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}
	happens := func(e Event) { now = now.Add(10 * time.Minute); l = mustAfter(t, l, e, now) }
	none := time.Time{}
	look("created", all{deadline: at(time.Hour)})
	happens(EventRebooted)
	look("X4: rebooted from inside", all{deadline: at(time.Hour)})
	happens(EventSlept)
	look("asleep", all{at(time.Hour), now.Add(7 * day), none, none})
	happens(EventWoken)
	look("woken", all{deadline: now.Add(time.Hour)})
	happens(EventStopped)
	stopped := now
	look("stopped", all{none, none, stopped.Add(14 * day), stopped.Add(30 * day)})
	happens(EventArchived)
	look("archived", all{remove: stopped.Add(30 * day)})
	happens(EventResumed)
	look("resumed", all{deadline: now.Add(time.Hour)})
	happens(EventSlept)
	happens(EventMemoryExpired)
	look("its memory window has ended", all{none, none, now.Add(14 * day), now.Add(30 * day)})
	happens(EventDeleted)
	look("deleted", all{})
	happens(EventUndeleted)
	look("undeleted", all{none, none, now.Add(14 * day), now.Add(30 * day)})
	happens(EventResumed)
	happens(EventCrashed)
	look("failed", all{})
	if l.Generation != 5 {
		t.Errorf("generation %d after 5 boots", l.Generation)
	}
	if next, err := l.After(EventSlept, now); err == nil || !reflect.DeepEqual(next, l) {
		t.Errorf("an impossible event gives %+v, %v", next, err)
	}
}

// TestAdopted has sandboxes from before there were timers: each gets what its state has,
// in full from now on.
func TestAdopted(t *testing.T) {
	p := DefaultPolicy()
	p.DeleteAfter = 30 * day
	for state, want := range map[State]Timers{
		Creating: {},
		Ready:    {Deadline: at(time.Hour)},
		Sleeping: {Deadline: at(time.Hour), MemoryEnd: at(7 * day), From: epoch},
		Stopped:  {Archive: at(14 * day), Delete: at(30 * day), From: epoch},
		Archived: {Delete: at(30 * day), From: epoch},
		Failed:   {},
		Deleted:  {},
	} {
		want.Sandbox, want.Generation, want.State, want.Policy = "sbx_1", 4, state, p
		if got := AdoptTimers("sbx_1", 4, state, p, epoch); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", state, got, want)
		}
	}
}

func TestDeadlineWhileAsleep_A4_A8(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*Policy)
		cause  Cause
		verb   Verb
		due    time.Duration
	}{
		"running":             {nil, CauseDeadline, Stop, time.Hour},
		"a short memory":      {func(p *Policy) { p.MemoryWindow = time.Minute }, CauseMemory, Stop, 2 * time.Minute},
		"both at once":        {func(p *Policy) { p.MemoryWindow = 59 * time.Minute }, CauseDeadline, Stop, time.Hour},
		"paused":              {func(p *Policy) { p.SleepDeadline = DeadlinePaused }, CauseMemory, Stop, 7*day + time.Minute},
		"none":                {func(p *Policy) { p.TTL = 0 }, CauseMemory, Stop, 7*day + time.Minute},
		"to sleep, and it is": {func(p *Policy) { p.OnDeadline = Sleep }, CauseMemory, Stop, 7*day + time.Minute},
		"to delete":           {func(p *Policy) { p.OnDeadline = Delete }, CauseDeadline, Delete, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			l := mustAfter(t, ready(t, tt.change), EventSlept, at(time.Minute))
			wantWait(t, Due(l, Leases{}, at(tt.due-1)), tt.due)
			wantRun(t, Due(l, Leases{}, at(tt.due)), tt.cause, tt.verb, tt.due)
			wantRun(t, Due(l, Leases{}, at(100*day)), tt.cause, tt.verb, tt.due) // A7: all was down, B4: its due time stays
		})
	}
}

func TestChangedPolicy_A2_A8(t *testing.T) {
	l := ready(t, nil)
	p := l.Policy
	if again := l.With(p, false, at(time.Minute)); !again.Deadline.Equal(l.Deadline) {
		t.Errorf("a change of nothing moves the deadline to %s", again.Deadline)
	}
	if again := l.With(p, true, at(time.Minute)); !again.Deadline.Equal(at(61 * time.Minute)) {
		t.Errorf("A2: the same ttl again: the deadline is %s", again.Deadline)
	}
	p.TTL = 2 * time.Hour
	if other := l.With(p, false, at(time.Minute)); !other.Deadline.Equal(at(121 * time.Minute)) {
		t.Errorf("another ttl: the deadline is %s", other.Deadline)
	}
	p.TTL = 0
	none := l.With(p, true, at(time.Minute))
	if !none.Deadline.IsZero() {
		t.Errorf("no auto-stop: the deadline is %s", none.Deadline)
	}
	p.TTL = time.Minute
	if back := none.With(p, true, at(2*time.Minute)); !back.Deadline.Equal(at(3 * time.Minute)) {
		t.Errorf("an auto-stop again: %s", back.Deadline)
	}

	asleep := mustAfter(t, l, EventSlept, at(time.Minute))
	p = asleep.Policy
	p.SleepDeadline = DeadlinePaused
	paused := asleep.With(p, false, at(2*time.Minute))
	if !paused.Deadline.IsZero() {
		t.Errorf("paused while asleep: %s", paused.Deadline)
	}
	p.SleepDeadline = DeadlineRunning
	if on := paused.With(p, false, at(3*time.Minute)); !on.Deadline.Equal(at(63 * time.Minute)) {
		t.Errorf("running again: %s, want a full auto-stop", on.Deadline)
	}
	p.MemoryWindow = time.Second
	if short := asleep.With(p, false, at(5*time.Minute)); !short.MemoryEnd.Equal(at(5 * time.Minute)) {
		t.Errorf("a memory window that would have ended falls due at %s, want the change's time", short.MemoryEnd)
	}

	stopped := mustAfter(t, l, EventStopped, at(time.Minute))
	p = stopped.Policy
	p.ArchiveAfter, p.DeleteAfter = 0, time.Hour
	if s := stopped.With(p, true, at(2*time.Minute)); !s.Archive.IsZero() || !s.Delete.Equal(at(61*time.Minute)) || !s.Deadline.IsZero() {
		t.Errorf("stopped: %+v", s)
	}
	wantRun(t, Due(stopped.With(p, false, at(2*day)), Leases{}, at(3*day)), CauseDelete, Delete, 2*day)
}

// TestTurns_A3 moves the deadline while a turn is active, and no longer.
func TestTurns_A3(t *testing.T) {
	l := ready(t, nil)
	var leases Leases
	moves := 0
	look := func(now time.Duration) Verdict {
		for {
			v := Due(l, leases, at(now))
			if v.Act != Move {
				return v
			}
			if v.Turn != "turn_1" || !v.Due.Equal(l.Deadline) || !v.To.Equal(v.Due.Add(time.Hour)) {
				t.Fatalf("the move is %+v", v)
			}
			moves++
			l = l.Moved(v)
		}
	}
	for m := 30; m <= 190; m++ { // the server renews once a minute
		leases = leases.Renew([]string{"turn_1"}, at(time.Duration(m)*time.Minute+time.Second))
		if v := look(time.Duration(m)*time.Minute + time.Second); v.Act != Wait {
			t.Fatalf("after %d minutes: %+v", m, v)
		}
	}
	if moves != 3 {
		t.Fatalf("%d moves, want one an hour", moves)
	}
	before := l
	ended := leases.Renew(nil, at(191*time.Minute))
	wantRun(t, Due(l, ended, at(240*time.Minute)), CauseDeadline, Stop, 4*time.Hour)
	if v := Due(l, ended.Renew([]string{"turn_2"}, at(240*time.Minute+1)), at(241*time.Minute)); v.Act != Run {
		t.Errorf("a turn that began after the deadline: %+v", v)
	}
	wantRun(t, look(1000*time.Hour), CauseDeadline, Stop, 5*time.Hour) // no server since 3:10
	if moves != 4 {
		t.Errorf("a server that stays away gives %d moves, want one", moves-3)
	}
	if l.Moved(Verdict{Act: Run}).Deadline != l.Deadline || before.Moved(Verdict{Act: Move, Due: at(1), To: at(2)}).Deadline != before.Deadline {
		t.Error("what is no move of this deadline moves it")
	}
}

// TestShortAutoStopDuringATurn_A3 has an auto-stop below the time between renewals: a
// server in reach carries it over, one out of reach does not.
func TestShortAutoStopDuringATurn_A3(t *testing.T) {
	l := ready(t, func(p *Policy) { p.TTL = 10 * time.Second })
	leases := Leases{}.Renew([]string{"turn_1"}, at(0))
	leases.Heard = at(55 * time.Second)
	for range 5 {
		v := Due(l, leases, at(time.Minute))
		if v.Act != Move {
			t.Fatalf("got %+v", v)
		}
		l = l.Moved(v)
	}
	wantRun(t, Due(l, leases, at(time.Minute)), CauseDeadline, Stop, time.Minute)
	leases.Heard = at(time.Hour) // in reach, and it renews no more
	moves := 0
	for v := Due(l, leases, at(time.Hour)); v.Act == Move; v = Due(l, leases, at(time.Hour)) {
		l = l.Moved(v)
		moves++
	}
	if moves != 9 {
		t.Errorf("a lease that is not renewed holds for %d moves of 10 s more, want 9", moves)
	}
}

func TestSimultaneousDues(t *testing.T) {
	l := mustAfter(t, ready(t, func(p *Policy) { p.ArchiveAfter, p.DeleteAfter = time.Hour, time.Hour }), EventStopped, epoch)
	wantRun(t, Due(l, Leases{}, at(time.Hour)), CauseDelete, Delete, time.Hour)

	l = ready(t, func(p *Policy) { p.OnIdle = Sleep })
	idle := Idleness{Idle: true, Due: at(time.Hour)}
	if v := l.DueIdle(idle, at(time.Hour)); v.Act != Wait {
		t.Errorf("the deadline goes before an idle sleep of its instant: %+v", v)
	}
	idle.Due = at(time.Hour - time.Second)
	wantRun(t, l.DueIdle(idle, at(2*time.Hour)), CauseIdle, Sleep, time.Hour-time.Second)
	changed := l.With(l.Policy, false, at(30*time.Minute))
	idle.Due = at(time.Minute)
	wantRun(t, changed.DueIdle(idle, at(31*time.Minute)), CauseIdle, Sleep, 30*time.Minute)
	if v := mustAfter(t, l, EventSlept, at(time.Minute)).DueIdle(idle, at(time.Hour)); v.Act != Wait {
		t.Errorf("what sleeps is put to sleep: %+v", v)
	}
	if v := l.DueIdle(Idleness{Next: at(time.Minute)}, at(0)); v.Act != Wait || !v.Next.Equal(at(time.Minute)) {
		t.Errorf("what is not idle: %+v", v)
	}
}

// TestRetries_Z10 has automatic operations fail: each try is an operation of its own,
// the due time stays, the pauses grow, and one timer's failure does not hold others up.
func TestRetries_Z10(t *testing.T) {
	l := ready(t, nil)
	now := time.Hour
	seen := map[string]bool{}
	for i, pause := range []time.Duration{30, 60, 120, 240, 480, 600, 600} {
		v := Due(l, Leases{}, at(now))
		wantRun(t, v, CauseDeadline, Stop, time.Hour)
		if seen[v.Operation] {
			t.Fatalf("try %d has the id of another", i)
		}
		seen[v.Operation] = true
		before := through(t, l)
		failed := l.Failed(v, false, at(now), DefaultBackoff())
		if !reflect.DeepEqual(l, before) {
			t.Fatal("Failed changes the timers that it was asked of")
		}
		l = through(t, failed)
		wantWait(t, Due(l, Leases{}, at(now)), now+pause*time.Second)
		now += pause * time.Second
	}
	wantRun(t, Due(l, Leases{}, at(now)), CauseDeadline, Stop, time.Hour)
	wantWait(t, Due(l.Kept(at(now)), Leases{}, at(now)), now+time.Hour)
	asleep := mustAfter(t, l, EventSlept, at(now))
	wantRun(t, Due(asleep, Leases{}, at(now-time.Second)), CauseDeadline, Stop, time.Hour) // a new state has no failures behind it

	p := l.Policy
	p.OnDeadline = Delete
	v := Due(l.With(p, false, at(now)), Leases{}, at(now))
	if wantRun(t, v, CauseDeadline, Delete, time.Hour); seen[v.Operation] {
		t.Error("another verb has the id of an operation that failed")
	}

	l = mustAfter(t, ready(t, func(p *Policy) { p.ArchiveAfter, p.DeleteAfter = time.Hour, 2*time.Hour }), EventStopped, epoch)
	l = l.Failed(Due(l, Leases{}, at(2*time.Hour-time.Second)), false, at(2*time.Hour-time.Second), DefaultBackoff())
	wantRun(t, Due(l, Leases{}, at(2*time.Hour)), CauseDelete, Delete, 2*time.Hour)

	l = mustAfter(t, ready(t, func(p *Policy) { p.MemoryWindow = time.Hour }), EventSlept, at(time.Second))
	l = l.Failed(Due(l, Leases{}, at(time.Hour)), false, at(time.Hour), DefaultBackoff())
	wantWait(t, Due(l, Leases{}, at(time.Hour+2*time.Second)), time.Hour+30*time.Second) // the window's end is the same stop

	l = ready(t, nil)
	idle := Idleness{Idle: true, Due: at(time.Minute)}
	v = l.DueIdle(idle, at(time.Minute))
	l = l.Failed(v, true, at(time.Minute), DefaultBackoff())
	wantWait(t, l.DueIdle(idle, at(time.Minute)), 90*time.Second)
	if again := l.DueIdle(idle, at(90*time.Second)); again.Operation == v.Operation || again.Verb != Sleep {
		t.Errorf("the second try is %+v", again)
	}
}

// TestUnsaved_Z10: a save that its user asked for and that failed is tried again, with the
// verb that was asked for last, under an id that never comes twice, until it succeeds or
// its user keeps what runs. What the guest does ends none of it.
func TestUnsaved_Z10(t *testing.T) {
	l := ready(t, func(p *Policy) { p.TTL = 0 })
	now, seen := time.Minute, map[string]bool{}
	l = through(t, l.Unsave(Sleep, at(time.Minute-time.Second), at(now), DefaultBackoff()))
	for _, pause := range []time.Duration{30, 60, 120, 240, 480, 600, 600} {
		wantWait(t, Due(l, Leases{}, at(now)), now+pause*time.Second)
		now += pause * time.Second
		v := Due(l, Leases{}, at(now))
		wantRun(t, v, CauseSave, Sleep, time.Minute-time.Second)
		if seen[v.Operation] {
			t.Fatalf("after %s a try has the id of another", now)
		}
		seen[v.Operation] = true
		l = through(t, l.Failed(v, false, at(now), DefaultBackoff()))
	}
	again := through(t, l.Unsave(Stop, at(now), at(now), DefaultBackoff()))
	now += 10 * time.Minute
	v := Due(again, Leases{}, at(now))
	if wantRun(t, v, CauseSave, Stop, time.Minute-time.Second); seen[v.Operation] {
		t.Error("another wish has the id of an operation that failed")
	}
	rebooted := mustAfter(t, again, EventRebooted, at(now))
	if v := Due(rebooted, Leases{}, at(now)); v.Verb != Stop || v.Cause != CauseSave || seen[v.Operation] {
		t.Errorf("after a reboot from inside: %+v", v)
	}
	kept := through(t, again.Kept(at(now)))
	if v := Due(kept, Leases{}, at(now)); v.Act != Wait || !v.Next.IsZero() {
		t.Errorf("after `keep`: %+v", v)
	}
	if late := kept.Failed(v, false, at(now), DefaultBackoff()); !reflect.DeepEqual(late, kept) {
		t.Errorf("a try that ends after `keep` leaves %+v", late)
	}
	for _, e := range []Event{EventSlept, EventStopped, EventCrashed, EventDeleted} {
		if after := mustAfter(t, again, e, at(now)); !after.Unsaved.IsZero() || after.Retries[CauseSave].Tries != 0 {
			t.Errorf("after %s it is still to be saved: %+v", e, after)
		}
	}
}

// TestSleepAtTheDeadline_A8 falls back to a stop where a sleep is refused for good.
func TestSleepAtTheDeadline_A8(t *testing.T) {
	l := ready(t, func(p *Policy) { p.OnDeadline = Sleep })
	v := Due(l, Leases{}, at(time.Hour))
	wantRun(t, v, CauseDeadline, Sleep, time.Hour)
	again := Due(l.Failed(v, false, at(time.Hour), DefaultBackoff()), Leases{}, at(2*time.Hour))
	wantRun(t, again, CauseDeadline, Sleep, time.Hour)
	l = through(t, l.Failed(v, true, at(time.Hour), DefaultBackoff()))
	stop := Due(l, Leases{}, at(time.Hour))
	wantRun(t, stop, CauseDeadline, Stop, time.Hour)
	if stop.Operation == v.Operation || stop.Operation != again.Operation {
		t.Errorf("ids %s, %s, %s: the second try has one id", v.Operation, again.Operation, stop.Operation)
	}
	wantWait(t, Due(l.Failed(stop, true, at(time.Hour), DefaultBackoff()), Leases{}, at(time.Hour)), time.Hour+time.Minute)
	wantWait(t, Due(mustAfter(t, l, EventSlept, at(time.Hour)), Leases{}, at(time.Hour)), time.Hour+7*day)
}

// TestInstant rounds up, so that nothing is early, and drops what no journal keeps.
func TestInstant_A1(t *testing.T) {
	for add, want := range map[time.Duration]time.Duration{0: 0, 1: 1e6, 999_999: 1e6, 1e6: 1e6, 1e6 + 1: 2e6, -1: 0} {
		if got := instant(at(add)); !got.Equal(at(want)) {
			t.Errorf("%s is kept as %s, want %s", add, got.Sub(epoch), want)
		}
	}
	now := time.Now()
	if kept := instant(now); kept != through(t, kept) || kept.Before(now) {
		t.Errorf("%s is kept as %s", now, kept)
	}
	if l := mustAfter(t, NewTimers("sbx_1", DefaultPolicy()), EventCreated, at(1)); l.Deadline.Before(at(time.Hour + 1)) {
		t.Errorf("the deadline %s is early", l.Deadline)
	}
}

func TestOperationID(t *testing.T) {
	one := OperationID("sbx_1", 3, CauseDeadline, at(time.Hour), 0)
	if other := OperationID("sbx_1", 3, CauseDeadline, at(time.Hour).In(time.FixedZone("", 3600)), 0); one != other {
		t.Errorf("%s is %s elsewhere", one, other)
	}
	seen := []string{one}
	for _, id := range []string{
		OperationID("sbx_2", 3, CauseDeadline, at(time.Hour), 0), OperationID("sbx_1", 4, CauseDeadline, at(time.Hour), 0),
		OperationID("sbx_1", 3, CauseMemory, at(time.Hour), 0), OperationID("sbx_1", 3, CauseDeadline, at(time.Hour+time.Millisecond), 0),
		OperationID("sbx_1", 3, CauseDeadline, at(time.Hour), 1),
	} {
		if slices.Contains(seen, id) {
			t.Errorf("%s comes twice", id)
		}
		seen = append(seen, id)
		tid, err := typeid.FromString(id)
		if err != nil || tid.Prefix() != "op" {
			t.Errorf("%s is no id of an operation: %v", id, err)
		}
		if u := tid.UUIDBytes(); u[6]>>4 != 7 || u[8]>>6 != 2 {
			t.Errorf("%s is no UUIDv7: %x", id, u)
		}
	}
	if early := OperationID("sbx_9", 1, CauseIdle, at(0), 0); !(early < one) {
		t.Errorf("%s sorts after the later %s", early, one)
	}
	if !strings.HasPrefix(one, "op_") || len(one) != 29 {
		t.Errorf("%s", one)
	}
}

// lifeline is a sandbox on a machine whose clocks are set at will, beside an oracle that
// knows true time and adds up when what is due.
type lifeline struct {
	m        *machine
	clock    Clock
	t        Timers
	l        Leases
	open     *Verdict // an operation is at work
	ids      map[string]bool
	deadline time.Time // the oracle's
	memory   time.Time
}

func (w *lifeline) now() time.Time {
	w.clock, _ = w.clock.Read(w.m.read())
	return w.clock.Now
}

func (w *lifeline) truth() time.Time { return instant(epoch.Add(w.m.real)) }

// happens applies an event to both.
func (w *lifeline) happens(t *rapid.T, e Event) {
	next, err := w.t.After(e, w.now())
	if err != nil {
		return
	}
	w.t, w.open = next, nil
	p := w.t.Policy
	switch {
	case e == EventCreated || e == EventWoken || e == EventResumed:
		w.deadline, w.memory = time.Time{}, time.Time{}
		if p.TTL > 0 {
			w.deadline = w.truth().Add(p.TTL)
		}
	case e == EventSlept:
		w.memory = w.truth().Add(p.MemoryWindow)
		if p.SleepDeadline == DeadlinePaused || p.OnDeadline == Sleep {
			w.deadline = time.Time{}
		}
	case e != EventRebooted:
		w.deadline, w.memory = time.Time{}, time.Time{}
	}
}

// ends are what the operations of this test end with.
var ends = map[State]map[Verb]Event{
	Ready:    {Sleep: EventSlept, Stop: EventStopped, Delete: EventDeleted},
	Sleeping: {Stop: EventStopped, Delete: EventDeleted},
	Stopped:  {Archive: EventArchived, Delete: EventDeleted},
	Archived: {Delete: EventDeleted},
}

// TestDeadlines_A1_A2_A6_A7_B4 lives random lives and restarts everything at any
// instant.
func TestDeadlines_A1_A2_A6_A7_B4(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := DefaultPolicy()
		p.TTL = time.Duration(rapid.SampledFrom([]int64{0, 1000, 3_600_000, 30 * 86_400_000}).Draw(t, "ttl")) * time.Millisecond
		p.OnDeadline = rapid.SampledFrom([]Verb{Stop, Sleep, Delete}).Draw(t, "on deadline")
		p.SleepDeadline = rapid.SampledFrom([]DeadlineMode{DeadlineRunning, DeadlinePaused}).Draw(t, "asleep")
		p.DeleteAfter = rapid.SampledFrom([]time.Duration{0, day, 14 * day}).Draw(t, "delete after")
		m := &machine{}
		w := &lifeline{m: m, clock: NewClock(m.read()), t: NewTimers("sbx_1", p), ids: map[string]bool{}}
		t.Repeat(map[string]func(*rapid.T){
			"time passes": func(t *rapid.T) {
				m.pass(time.Duration(rapid.SampledFrom([]int64{1, 999_999, int64(time.Second), int64(time.Hour), int64(10 * day)}).Draw(t, "passes")))
			},
			"the wall clock is set": func(t *rapid.T) {
				m.set += rapid.SampledFrom([]time.Duration{day, -day, time.Hour, -time.Second}).Draw(t, "step")
				w.now()
			},
			"everything restarts": func(t *rapid.T) {
				w.t, w.l, w.clock = through(t, w.t), through(t, w.l), through(t, w.clock)
			},
			"the machine restarts": func(t *rapid.T) {
				w.now()
				m.reboot(time.Hour)
				w.clock = through(t, w.clock)
				w.now()
				w.happens(t, EventHostRestarted)
			},
			"something happens": func(t *rapid.T) {
				if w.open == nil {
					w.happens(t, rapid.SampledFrom(Events).Draw(t, "event"))
				}
			},
			"the ttl is set": func(t *rapid.T) {
				w.t = w.t.With(w.t.Policy, true, w.now())
				if !w.deadline.IsZero() {
					w.deadline = w.truth().Add(w.t.Policy.TTL)
				}
			},
			"the server renews": func(t *rapid.T) {
				w.l = w.l.Renew(rapid.SampledFrom([][]string{nil, {"turn_1"}}).Draw(t, "turns"), w.now())
			},
			"timers are asked": func(t *rapid.T) {
				if w.open != nil {
					t.Skip("an operation is at work")
				}
				v := Due(w.t, w.l, w.now())
				switch v.Act {
				case Move:
					if !v.Due.Equal(w.deadline) || v.Due.After(w.now()) || len(w.l.Turns) == 0 {
						t.Fatalf("A3: %+v, the deadline is %s", v, w.deadline)
					}
					w.t, w.deadline = w.t.Moved(v), w.deadline.Add(p.TTL)
				case Run:
					if v.Due.After(w.now()) {
						t.Fatalf("A1: %+v is early at %s", v, w.now())
					}
					if w.ids[v.Operation] {
						t.Fatalf("A7: %+v fires twice", v)
					}
					if ends[w.t.State][v.Verb] == "" {
						t.Fatalf("%s while %s", v.Verb, w.t.State)
					}
					w.ids[v.Operation], w.open = true, &v
				case Wait:
					for _, d := range w.t.running() {
						if !d.at.After(w.now()) && w.t.Retries == nil {
							t.Fatalf("A7: %s of %s is skipped at %s", d.cause, d.at, w.now())
						}
					}
				}
			},
			"its operation ends": func(t *rapid.T) {
				if w.open == nil {
					t.Skip("no operation is at work")
				}
				v := *w.open
				if rapid.Bool().Draw(t, "fails") {
					w.t, w.open = w.t.Failed(v, rapid.Bool().Draw(t, "refused"), w.now(), DefaultBackoff()), nil
					return
				}
				w.happens(t, ends[w.t.State][v.Verb])
			},
			"": func(t *rapid.T) {
				if w.open != nil {
					return
				}
				if !w.t.Deadline.Equal(w.deadline) || !w.t.MemoryEnd.Equal(w.memory) {
					t.Fatalf("%s: the deadline is %s, want %s; the memory's end %s, want %s", w.t.State, w.t.Deadline, w.deadline, w.t.MemoryEnd, w.memory)
				}
				if kept := through(t, w.t); !reflect.DeepEqual(Due(kept, w.l, w.now()), Due(w.t, w.l, w.now())) {
					t.Fatalf("a restart changes the decision: %+v, %+v", kept, w.t)
				}
			},
		})
	})
}
