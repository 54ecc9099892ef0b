package control

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

func TestJudge_S7(t *testing.T) {
	t.Parallel()
	s := sandbox.Sandbox{ID: "sbx_1", Generation: 3, HostSeq: 10}
	active, ended := &sandbox.Operation{Status: sandbox.Running}, &sandbox.Operation{Status: sandbox.Succeeded}
	for _, c := range []struct {
		name string
		op   *sandbox.Operation
		r    hostproto.Report
		want verdict
	}{
		{"the next", nil, hostproto.Report{Seq: 11, Generation: 3}, verdictApply},
		{"the next, after a boot", nil, hostproto.Report{Seq: 11, Generation: 4}, verdictApply},
		{"one that was applied", nil, hostproto.Report{Seq: 10, Generation: 3}, verdictTwice},
		{"one that ends what has ended", ended, hostproto.Report{Seq: 10, Generation: 3, Ended: true}, verdictTwice},
		{"one is missing", nil, hostproto.Report{Seq: 12, Generation: 3}, verdictEarly},
		{"an older generation", nil, hostproto.Report{Seq: 11, Generation: 2}, verdictOld},
		{"an older generation that would end something", active, hostproto.Report{Seq: 11, Generation: 2, Ended: true}, verdictOld},
		{"an older generation out of order", nil, hostproto.Report{Seq: 99, Generation: 2}, verdictOld},
		{"a host that counts anew", active, hostproto.Report{Seq: 1, Generation: 3, Ended: true}, verdictApply},
		{"a host that counts anew and ends nothing", active, hostproto.Report{Seq: 1, Generation: 3}, verdictTwice},
	} {
		if got := judge(s, c.op, c.r); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestApply(t *testing.T) {
	t.Parallel()
	at := time.Unix(1000, 0).UTC()
	ready := sandbox.Sandbox{ID: "sbx_1", State: sandbox.Ready, Generation: 3, HostSeq: 10, Started: true, StateSince: time.Unix(1, 0)}

	crash := apply(ready, nil, hostproto.Report{Seq: 11, Generation: 3, Event: sandbox.EventOOMKilled, Message: "it took 3 GB", At: at})
	if s := crash.sandbox; s.State != sandbox.Failed || s.Reason != "oom_killed" || s.Message != "it took 3 GB" || !s.StateSince.Equal(at) || s.HostSeq != 11 {
		t.Errorf("S8: out of memory: %+v", s)
	}
	if s := apply(crash.sandbox, nil, hostproto.Report{Seq: 12, Generation: 4, Event: sandbox.EventResumed, At: at}).sandbox; s.Reason != "" || s.Message != "" || s.Generation != 4 {
		t.Errorf("a resume leaves the old reason: %+v", s)
	}
	reboot := apply(ready, nil, hostproto.Report{Seq: 11, Generation: 4, Event: sandbox.EventRebooted, At: at})
	if s := reboot.sandbox; !reboot.changed || s.State != sandbox.Ready || s.Generation != 4 || !s.StateSince.Equal(ready.StateSince) {
		t.Errorf("a reboot: %+v", reboot)
	}
	// What cannot be is left out, and the rest of the report holds.
	op := &sandbox.Operation{ID: "op_1", Status: sandbox.Running}
	odd := apply(ready, op, hostproto.Report{Seq: 11, Generation: 3, Event: sandbox.EventWoken, Operation: "op_1", Ended: true, Saved: true, At: at,
		Set: []sandbox.Condition{{Type: "rusty", Reason: "rain"}, {Type: sandbox.Degraded, Reason: "rain"}}})
	if odd.changed || len(odd.refused) != 3 || odd.sandbox.State != sandbox.Ready || odd.sandbox.HostSeq != 11 || !odd.ended || !odd.sandbox.SavedAt.Equal(at) {
		t.Errorf("an event that cannot be: %+v", odd)
	}
	// Nothing but a boot makes a generation.
	for _, r := range []hostproto.Report{{Verb: sandbox.Wake}, {Verb: sandbox.Sleep}, {Event: sandbox.EventStopped}, {Event: sandbox.EventWoken}} {
		r.Seq, r.Generation, r.At = 11, 9, at
		if s := apply(ready, nil, r).sandbox; s.Generation != 3 {
			t.Errorf("after %+v the generation is %d", r, s.Generation)
		}
	}
	gone := ready
	gone.State = sandbox.Deleted
	for _, e := range sandbox.Events {
		if s := apply(gone, nil, hostproto.Report{Seq: 11, Generation: 4, Event: e, At: at}).sandbox; s.State != sandbox.Deleted && e != sandbox.EventUndeleted {
			t.Errorf("%s brings what is deleted to %s", e, s.State)
		}
	}
}

func TestConditions_S2(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	at := time.Now().UTC().Truncate(time.Millisecond)
	failed := sandbox.Condition{Type: sandbox.Degraded, Reason: "save_failed", Message: "no room", Since: at}
	say := func(seq int64, set, cleared []sandbox.Condition) {
		t.Helper()
		must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Seq: seq, Generation: 1, Set: set, Clear: cleared, At: at}))
	}
	say(2, []sandbox.Condition{failed}, nil)
	later := failed
	later.Message, later.Since = "still no room", at.Add(time.Hour)
	say(3, []sandbox.Condition{later}, nil) // known already: no event
	got := b.get(s.ID)
	if len(got.Conditions) != 1 || got.Conditions[0].Message != "still no room" || !got.Conditions[0].Since.Equal(at) || got.State != sandbox.Ready {
		t.Errorf("conditions: %+v", got)
	}
	say(4, nil, []sandbox.Condition{failed})
	say(5, nil, []sandbox.Condition{failed})
	if got := b.get(s.ID); len(got.Conditions) != 0 {
		t.Errorf("conditions: %+v", got.Conditions)
	}
	if got := b.events(s.ID)[4:]; !slices.Equal(got, []string{"condition.set", "condition.cleared"}) {
		t.Errorf("events: %v", got)
	}
}

// TestReportsApplyOnce sends the reports of a life twice, late, early and with lost
// acknowledgements, until each is acknowledged: the result is that of the plain order.
func TestReportsApplyOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	rng := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	told := map[int64]int{}
	b.host.script(func(h *fakeHost) {
		h.deliver = func(r hostproto.Report, send func() error) error {
			err := send()
			mu.Lock()
			defer mu.Unlock()
			if told[r.Seq]++; told[r.Seq] < 3 {
				return errors.New("the acknowledgement is lost")
			}
			return err
		}
	})
	s := b.ready("otter")
	b.ended(must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Wake(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)

	// From here on the host speaks out of order.
	at := time.Now().UTC().Truncate(time.Millisecond)
	reports := []hostproto.Report{
		{Seq: 4, Generation: 3, Event: sandbox.EventRebooted}, {Seq: 5, Generation: 3, Event: sandbox.EventCrashed},
		{Seq: 6, Generation: 4, Event: sandbox.EventResumed, Verb: sandbox.Resume}, {Seq: 7, Generation: 4, Saved: true},
		{Seq: 8, Generation: 4, Event: sandbox.EventStopped}, {Seq: 9, Generation: 5, Event: sandbox.EventResumed},
	}
	pending := slices.Repeat(reports, 3)
	for len(pending) > 0 {
		i := rng.IntN(len(pending))
		r := pending[i]
		r.Sandbox, r.At = s.ID, at
		if err := b.Report(t.Context(), r); err != nil {
			wantFault(t, err, fault.Unavailable, "gap")
		} else {
			pending = slices.Delete(pending, i, i+1)
		}
	}
	got := b.get(s.ID)
	if got.State != sandbox.Ready || got.Generation != 5 || got.HostSeq != 9 || !got.SavedAt.Equal(at) {
		t.Errorf("after all reports: %+v", got)
	}
	states := slices.DeleteFunc(b.events(s.ID), func(e string) bool { return !strings.HasPrefix(e, "sandbox.") })
	want := []string{"creating", "ready", "sleeping", "ready", "ready", "failed", "ready", "stopped", "ready"}
	for i := range want {
		want[i] = "sandbox." + want[i]
	}
	if !slices.Equal(states, want) {
		t.Errorf("events %v, want %v", states, want)
	}
}

// TestOldGenerationsChangeNothing_S7.
func TestOldGenerationsChangeNothing_S7(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.reaches("otter", sandbox.Sleeping)
	b.ended(must(b.Wake(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Stop) })
	stop := must(b.Stop(t.Context(), me, s.ID, Idempotency{}))(t).Operation
	before, events := b.get(s.ID), b.events(s.ID)
	for _, r := range []hostproto.Report{
		{Seq: 4, Generation: 1, Event: sandbox.EventCrashed, Operation: stop.ID, Ended: true, Failure: &hostproto.Failure{Kind: "internal"}},
		{Seq: 77, Generation: 1, Event: sandbox.EventDeleted}, {Seq: 1, Generation: 1, Event: sandbox.EventStopped},
	} {
		r.Sandbox = s.ID
		must0(t, b.Report(t.Context(), r))
	}
	after := b.get(s.ID)
	if after.HostSeq != 4 {
		t.Errorf("the number of a report that was next is %d: those after it would wait for ever", after.HostSeq)
	}
	after.HostSeq, after.Version = before.HostSeq, before.Version
	if !reflect.DeepEqual(after, before) || !slices.Equal(b.events(s.ID), events) {
		t.Errorf("a report of an older generation changed\n%+v to\n%+v", before, after)
	}
	if op := must(b.Operation(t.Context(), me, stop.ID))(t); !op.Status.Active() {
		t.Errorf("a report of an older generation ended the operation: %+v", op)
	}
}

// TestHostThatLostItsJournal: it counts from 1 again, and a deletion still ends.
func TestHostThatLostItsJournal(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.reaches("otter", sandbox.Stopped)
	b.host.script(func(h *fakeHost) { h.at(s.ID).seq = 0 })
	b.ended(must(b.Delete(t.Context(), me, s.ID, DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	if got := b.row(s.ID); got.State != sandbox.Deleted || got.HostSeq != 1 {
		t.Errorf("%s, number %d", got.State, got.HostSeq)
	}
}

// TestUnknownSandboxes_R9: they are logged once as adoptable, and nothing is removed.
func TestUnknownSandboxes_R9(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.host.script(func(h *fakeHost) { h.stranger = []string{"sbx_stranger"} })
		b.ready("otter")
		time.Sleep(5 * time.Minute)
		adoptable := func(id string) func(string) bool {
			return func(line string) bool { return strings.Contains(line, "adopted") && strings.Contains(line, id) }
		}
		if n := b.log.count(adoptable("sbx_stranger")); n != 1 {
			t.Errorf("the stranger was logged %d times", n)
		}
		if n := b.log.count(adoptable("")); n != 1 {
			t.Errorf("%d were logged as adoptable", n)
		}
		wantFault(t, b.Report(t.Context(), hostproto.Report{Sandbox: "sbx_other", Seq: 1}), fault.NotFound, "")
		if n := b.log.count(adoptable("sbx_other")); n != 1 {
			t.Errorf("the other one was logged %d times", n)
		}
		if ids, _ := b.host.operations(sandbox.Delete); len(ids) != 0 {
			t.Errorf("something was removed: %v", ids)
		}
	})
}

// TestFailingDatabase: a report that could not be stored is not acknowledged, and leaves
// nothing.
func TestFailingDatabase(t *testing.T) {
	t.Parallel()
	var cut *cutStore
	b := newBench(t, func(c *Config) {
		cut = &cutStore{Store: c.Store}
		c.Store, c.Limits.FlushEvery = cut, time.Hour
	})
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
	op := must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t).Operation
	r := hostproto.Report{Sandbox: s.ID, Seq: 2, Generation: 1, Operation: op.ID, Verb: sandbox.Sleep, Event: sandbox.EventSlept, Ended: true, Saved: true,
		Set: []sandbox.Condition{{Type: sandbox.Hydrating, Reason: "hydrating"}}, At: time.Now()}
	errDisk := errors.New("the disk is full")
	for n := 1; ; n++ {
		before := b.count()
		cut.arm(n, func() error { return errDisk })
		err := b.Report(t.Context(), r)
		if cut.armed() {
			must0(t, err)
			if n < 6 {
				t.Errorf("a report has only %d writes", n-1)
			}
			break
		}
		if !errors.Is(err, errDisk) || b.count() != before || b.get(s.ID).HostSeq != 1 {
			t.Fatalf("cut before write %d: %v left %+v of %+v", n, err, b.count(), before)
		}
	}
	b.ended(op, sandbox.Succeeded)
}

// TestProgressCostsLittle: steps are read at once and written once a second, and a stop
// takes at most five transactions.
func TestProgressCostsLittle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var store *cutStore
		b := newBench(t, func(c *Config) { store = &cutStore{Store: c.Store}; c.Store = store })
		s := b.ready("otter")
		b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Stop) })
		time.Sleep(time.Minute)
		before := store.count()
		op := must(b.Stop(t.Context(), me, s.ID, Idempotency{}))(t).Operation
		synctest.Wait()
		if got := must(b.Operation(t.Context(), me, op.ID))(t); got.Status != sandbox.Running || got.StartedAt.IsZero() {
			t.Errorf("an operation that its host has is %s", got.Status)
		}
		for i := range 1000 {
			must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Operation: op.ID, Step: sandbox.StepKill, Progress: float64(i) / 1000, At: time.Now()}))
			if i%250 == 0 {
				got := must(b.Operation(t.Context(), me, op.ID))(t)
				view := must(b.Get(t.Context(), me, s.ID))(t)
				page := must(b.List(t.Context(), me, ListQuery{}))(t)
				ops := must(b.Operations(t.Context(), me, OperationQuery{Sandbox: "otter"}))(t)
				for _, p := range []float64{got.Progress, view.Operation.Progress, page.Sandboxes[0].Operation.Progress, ops.Operations[1].Progress} {
					if p != float64(i)/1000 {
						t.Errorf("progress reads %v, want %v", p, float64(i)/1000)
					}
				}
			}
			time.Sleep(2 * time.Millisecond)
		}
		b.host.proceed(op.ID)
		if ended := b.ended(op, sandbox.Succeeded); ended.Step != sandbox.StepKill {
			t.Errorf("the last step is %q", ended.Step)
		}
		time.Sleep(time.Minute)
		if n := store.count() - before; n > 5 {
			t.Errorf("a stop with 1,000 steps in 2 s took %d transactions", n)
		}
		b.progress.mu.Lock()
		defer b.progress.mu.Unlock()
		if len(b.progress.m) != 0 {
			t.Errorf("progress keeps %v", b.progress.m)
		}
	})
}

// TestProgressSurvivesARestart: what was written is there; a step of an operation that
// has ended is dropped.
func TestProgressSurvivesARestart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Stop) })
	op := must(b.Stop(t.Context(), me, s.ID, Idempotency{}))(t).Operation
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Operation: op.ID, Step: sandbox.StepKill, Progress: 0.5, At: time.Now()}))
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Operation: "op_none", Step: "x", At: time.Now()}))
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Step: "x", At: time.Now()}))
	b.restart()
	got := must(b.Operation(context.Background(), me, op.ID))(t)
	if got.Step != sandbox.StepKill || got.Progress != 0.5 || got.Status != sandbox.Running {
		t.Errorf("after a restart: %+v", got)
	}
}
