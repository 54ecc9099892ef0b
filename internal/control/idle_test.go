package control

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// Z1, A8, F1: the settings reach the host with the creation, with a change and with a
// fork; what cannot be is refused, and never clipped.
func TestSleepSettings_Z1_A8_F1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	r := must(b.Create(t.Context(), me, CreateRequest{Name: "otter", Sleep: SleepSettings{Mode: "auto", IdleSeconds: new(int64(300)), OnIdle: "stop"}}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	cmd := b.command(r.Operation.ID)
	if cmd.Spec.Sleep != sandbox.SleepAuto || cmd.Policy.IdleAfter != 5*time.Minute || cmd.Policy.OnIdle != sandbox.Stop {
		t.Errorf("the host was told %+v, %+v", cmd.Spec, cmd.Policy)
	}
	deadline := b.get("otter").Deadline
	must(b.Update(t.Context(), me, "otter", UpdateRequest{Sleep: SleepSettings{Mode: "never", OnIdle: "sleep"}}))(t)
	until(t, "the host to have the change", func() bool { return b.get("otter").PolicyChange == 0 })
	var told hostproto.PolicyChange
	b.host.script(func(h *fakeHost) { told = h.policies[len(h.policies)-1] })
	if told.Sleep != sandbox.SleepNever || told.Policy.IdleAfter != 5*time.Minute || told.Policy.OnIdle != sandbox.Sleep || told.Restart {
		t.Errorf("the host was told %+v", told)
	}
	if s := b.get("otter"); s.Spec.Sleep != sandbox.SleepNever || s.Deadline.Before(deadline) {
		t.Errorf("after the change %+v, the deadline was %s", s, deadline)
	}
	_, err := b.Sleep(t.Context(), me, "otter", Idempotency{})
	wantFault(t, err, fault.FailedPrecondition, "sleep_never")
	must(b.Update(t.Context(), me, "otter", UpdateRequest{Sleep: SleepSettings{Mode: "auto", IdleSeconds: new(int64(86400))}}))(t)
	fork := must(b.Fork(t.Context(), me, "otter", ForkRequest{}))(t)
	b.ended(fork.Operation, sandbox.Succeeded)
	if s := b.get(fork.Children[0].Sandbox.ID); s.Spec.Sleep != sandbox.SleepAuto || s.Policy.IdleAfter != 24*time.Hour {
		t.Errorf("the fork has %s, %+v", s.Spec.Sleep, s.Policy)
	}
	for reason, bad := range map[string][]SleepSettings{
		"idle_seconds": {{IdleSeconds: new(int64(29))}, {IdleSeconds: new(int64(86401))}, {IdleSeconds: new(int64(0))}, {IdleSeconds: new(int64(1 << 62))}},
		"sleep_mode":   {{Mode: "often"}},
		"on_idle":      {{OnIdle: "delete"}},
	} {
		for _, settings := range bad {
			_, err := b.Create(t.Context(), me, CreateRequest{Sleep: settings})
			wantFault(t, err, fault.InvalidArgument, reason)
			_, err = b.Update(t.Context(), me, "otter", UpdateRequest{Sleep: settings})
			wantFault(t, err, fault.InvalidArgument, reason)
		}
	}
	if s := b.get("otter"); s.Policy.IdleAfter != 24*time.Hour || s.Spec.Sleep != sandbox.SleepAuto {
		t.Errorf("a refused change has changed %+v", s)
	}
}

// byItself reports the end of what the host has done by itself because it was idle.
func (l *life) byItself(due, at int, verb sandbox.Verb, e sandbox.Event, failure *hostproto.Failure) {
	l.t.Helper()
	l.seq++
	instant := func(seconds int) time.Time { return l.t0.Add(time.Duration(seconds) * time.Second) }
	r := hostproto.Report{
		Sandbox: l.id, Seq: l.seq, Generation: l.gen, Event: e, Failure: failure, At: instant(at), Verb: verb, Ended: true,
		Cause: sandbox.CauseIdle, Due: instant(due), Operation: sandbox.OperationID(l.id, l.gen, sandbox.CauseIdle, instant(due), at),
	}
	if failure != nil && failure.Kind == string(fault.NoCapacity) {
		r.Set = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed", Message: "no"}}
	}
	must0(l.t, l.Report(l.t.Context(), r))
}

// B2, B4, Z10: from the moment at which the idle window was full nothing is metered until
// the sandbox sleeps.
func TestIdleIsMetered_B2_B4_Z10(t *testing.T) {
	t.Parallel()
	full := &hostproto.Failure{Kind: string(fault.NoCapacity), Message: "the pool is full"}
	guests := &hostproto.Failure{Kind: string(fault.FailedPrecondition), Message: "files are deleted and open"}
	for name, c := range map[string]struct {
		live func(*life)
		want string // at 1000
	}{
		"a sleep": {func(l *life) { l.byItself(130, 140, sandbox.Sleep, sandbox.EventSlept, nil) },
			"starting 0-10 ready, running 10-130 idle, sleeping 140-1000 open"},
		"a stop": {func(l *life) { l.byItself(130, 140, sandbox.Stop, sandbox.EventStopped, nil) },
			"starting 0-10 ready, running 10-130 idle"},
		"a sleep that fails": {func(l *life) { l.byItself(130, 140, sandbox.Sleep, "", full) },
			"starting 0-10 ready, running 10-130 open"},
		"and one that succeeds then": {func(l *life) {
			l.byItself(130, 140, sandbox.Sleep, "", full)
			l.byItself(130, 170, sandbox.Sleep, sandbox.EventSlept, nil)
		}, "starting 0-10 ready, running 10-130 idle, sleeping 170-1000 open"},
		"one that the guest prevents": {func(l *life) { l.byItself(130, 140, sandbox.Sleep, "", guests) },
			"starting 0-10 ready, running 10-1000 open"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			l.told(10, sandbox.EventCreated)
			c.live(l)
			if got := l.ledger(1000); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if s := l.get("otter"); s.State == sandbox.Stopped && (s.Reason != "idle" || !strings.Contains(s.Message, "2m0s")) {
				t.Errorf("it is stopped: %s (%s)", s.Reason, s.Message)
			}
		})
	}
}

// Z3: the criteria are the host's; of a sandbox that does not run there are none, and
// nothing is woken to read them. What there is to do is said.
func TestWhy_Z3_Z2(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	why := func(ref string) Why { t.Helper(); return must(b.Why(t.Context(), me, ref))(t) }
	says := func(w Why, blocker string, criteria int, words ...string) {
		t.Helper()
		if w.Idle.Blocker != blocker || len(w.Idle.Criteria) != criteria {
			t.Errorf("the blocker is %q, with %d criteria; want %q, %d", w.Idle.Blocker, len(w.Idle.Criteria), blocker, criteria)
		}
		for _, word := range words {
			if !strings.Contains(w.Message, word) {
				t.Errorf("%q lacks %q", w.Message, word)
			}
		}
	}
	for _, state := range []sandbox.State{sandbox.Sleeping, sandbox.Stopped} {
		s := b.reaches(string(state), state)
		says(why(s.Name), sandbox.IdleState, 0, "it is "+string(state), "sleep mode is manual", "hutch edit "+s.Name+" --sleep auto", "2m0s")
		if now := b.get(s.ID); now.State != state || now.Generation != s.Generation {
			t.Errorf("asking has made it %s", now.State)
		}
	}
	must(b.Update(t.Context(), me, "sleeping", UpdateRequest{Sleep: SleepSettings{Mode: "auto", OnIdle: "stop"}}))(t)
	says(why("sleeping"), sandbox.IdleState, 0, "it is sleeping", "is stopped after 2m0s")

	b.ready("otter")
	says(why("otter"), sandbox.IdleOperation, 0, "an operation is at work") // the host has gone on
	list := []sandbox.Criterion{
		{Name: sandbox.IdleSamples, OK: true, Limit: 20}, {Name: sandbox.IdleForeground, Reading: 1, Limit: 1}, {Name: sandbox.IdleCPU, OK: true, Limit: 2},
	}
	idle := hostproto.Idleness{Mode: sandbox.SleepAuto, Window: 2 * time.Minute, OnIdle: sandbox.Sleep}
	set := func(change func(*hostproto.Idleness)) {
		b.host.script(func(h *fakeHost) {
			next := idle
			next.Criteria = list
			change(&next)
			h.idle = &next
		})
	}
	set(func(i *hostproto.Idleness) { i.Blocker = sandbox.IdleForeground })
	says(why("otter"), sandbox.IdleForeground, 3, "it stays awake: a command runs in front")
	set(func(i *hostproto.Idleness) { i.Blocker = sandbox.IdleCPU })
	says(why("otter"), sandbox.IdleCPU, 3, "has not been quiet for 2m0s", "CPU time")
	set(func(i *hostproto.Idleness) { i.Idle = true })
	says(why("otter"), "", 3, "it is idle and is put to sleep now")
	set(func(i *hostproto.Idleness) { i.Idle, i.Failed = true, &sandbox.Retry{Tries: 2} })
	says(why("otter"), "", 3, "the last try to save it failed", "2 so far")
	set(func(i *hostproto.Idleness) { i.Mode, i.Blocker = sandbox.SleepManual, sandbox.IdleMode })
	says(why("otter"), sandbox.IdleMode, 3, "sleep mode is manual", "--sleep auto", "at present it would stay awake: a command runs in front")
	_, err := b.Why(t.Context(), Actor{Project: "other"}, "otter")
	wantFault(t, err, fault.NotFound, "sandbox")
	if ids, _ := b.host.operations(sandbox.Wake); len(ids) != 0 {
		t.Errorf("asking has woken: %v", ids)
	}
}

// Z5: a call that comes while the host puts the sandbox to sleep by itself, of which
// nobody here knows yet, waits until that is told, and wakes it.
func TestGuestWaitsForTheHostsOwnSleep_Z5(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := b.ready("otter")
		b.host.script(func(h *fakeHost) {
			h.guest = func(string) (hostproto.Guest, error) {
				return hostproto.Guest{}, fault.New(fault.Unavailable, "it does not take calls").Because("not_running")
			}
		})
		done := make(chan error)
		go func() {
			got, err := b.Guest(t.Context(), me, "otter", hostproto.UseCommand)
			if err == nil && got.Guest.Generation != 2 {
				t.Errorf("it reached generation %d", got.Guest.Generation)
			}
			done <- err
		}()
		time.Sleep(10 * time.Second)
		var r hostproto.Report
		b.host.script(func(h *fakeHost) {
			r = h.fact(s.ID, sandbox.OperationID(s.ID, 1, sandbox.CauseIdle, time.Now(), 0), sandbox.Sleep, sandbox.EventSlept)
			h.guest = nil
		})
		r.Ended, r.Saved, r.Cause, r.Due = true, true, sandbox.CauseIdle, r.At
		must0(t, b.Report(t.Context(), r))
		must0(t, <-done)
		if ids, _ := b.host.operations(sandbox.Wake); len(ids) != 1 {
			t.Errorf("%d wakes", len(ids))
		}
	})
}
