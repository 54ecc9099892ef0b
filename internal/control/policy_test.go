package control

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

func seconds(n int64) TTL { return TTL{Given: true, Seconds: n} }

// A1: one hour where nobody says otherwise, none, 1 s to 30 days; the rest is refused
// and makes nothing.
func TestTTL_A1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for _, c := range []struct {
		ttl  TTL
		want time.Duration // negative is refused
	}{
		{TTL{}, time.Hour}, {TTL{Given: true, None: true}, 0}, {seconds(1), time.Second}, {seconds(30 * 86400), 30 * 24 * time.Hour},
		{seconds(0), -1}, {seconds(-5), -1}, {seconds(30*86400 + 1), -1}, {seconds(1 << 62), -1},
	} {
		before := len(must(b.List(t.Context(), me, ListQuery{}))(t).Sandboxes)
		r, err := b.Create(t.Context(), me, CreateRequest{TTL: c.ttl})
		if c.want < 0 {
			wantFault(t, err, fault.InvalidArgument, "ttl_seconds")
			if after := len(must(b.List(t.Context(), me, ListQuery{}))(t).Sandboxes); after != before {
				t.Errorf("%+v was refused and made a sandbox", c.ttl)
			}
			continue
		}
		must0(t, err)
		b.ended(r.Operation, sandbox.Succeeded)
		if got := b.get(r.Sandbox.ID).Policy.TTL; got != c.want {
			t.Errorf("%+v gave the auto-stop %s, want %s", c.ttl, got, c.want)
		}
		cmd := b.command(r.Operation.ID)
		if cmd.Policy == nil || cmd.Policy.TTL != c.want {
			t.Errorf("%+v: the host was told %+v", c.ttl, cmd.Policy)
		}
	}
}

// command is what the host was given for an operation.
func (b *bench) command(op string) (cmd hostproto.Command) {
	b.t.Helper()
	b.host.script(func(h *fakeHost) {
		for _, c := range h.submits {
			if c.Operation == op {
				cmd = c
			}
		}
	})
	return cmd
}

// A1: a fork has the auto-stop of its source, also one that was changed.
func TestForkInheritsTTL_A1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("source")
	must(b.Update(t.Context(), me, s.ID, UpdateRequest{TTL: seconds(7200)}))(t)
	r := must(b.Fork(t.Context(), me, s.ID, ForkRequest{}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	if got := b.get(r.Children[0].Sandbox.ID).Policy.TTL; got != 2*time.Hour {
		t.Errorf("the fork has the auto-stop %s", got)
	}
	if cmd := b.command(r.Operation.ID); cmd.Policy == nil || cmd.Policy.TTL != 2*time.Hour {
		t.Errorf("the host was told %+v for the forks", cmd.Policy)
	}
}

// A2: a change begins anew also with the value that it had; it is pending until the
// host has it, over a host that is away and a server that dies.
func TestPolicyReachesHost_A2(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Limits.ReconcileEvery = 20 * time.Millisecond })
	s := b.ready("timed")
	b.host.script(func(h *fakeHost) { h.away = errors.New("no route") })
	r := must(b.Update(t.Context(), me, s.ID, UpdateRequest{TTL: seconds(3600)}))(t)
	if r.Sandbox.PolicyChange == 0 || !r.Sandbox.PolicyRestart {
		t.Fatalf("the change is not pending: %+v", r.Sandbox)
	}
	b.restart()
	if got := b.get(s.ID); got.PolicyChange == 0 || !got.Deadline.IsZero() {
		t.Errorf("without its host it has taken effect: %+v", got)
	}
	b.host.script(func(h *fakeHost) { h.away = nil })
	until(t, "the host to have the change", func() bool { return b.get(s.ID).PolicyChange == 0 })
	got := b.get(s.ID)
	if got.Deadline.IsZero() || got.PolicyRestart {
		t.Errorf("after the host has it: %+v", got)
	}
	if events := b.events(s.ID); !slices.Contains(events, "deadline.moved") {
		t.Errorf("the move is no event: %v", events)
	}
	var told hostproto.PolicyChange
	b.host.script(func(h *fakeHost) { told = h.policies[0] })
	if told.Policy.TTL != time.Hour || !told.Restart || told.Change != r.Sandbox.PolicyChange {
		t.Errorf("the host was told %+v", told)
	}
	_, err := b.Update(t.Context(), me, s.ID, UpdateRequest{TTL: seconds(0)})
	wantFault(t, err, fault.InvalidArgument, "ttl_seconds")
}

// A6: what a host did by itself is an operation under its derived id, once, and the
// reason of the state is of a closed list.
func TestHostStopsByItself_A6_S3(t *testing.T) {
	t.Parallel()
	for cause, reason := range map[sandbox.Cause]string{sandbox.CauseDeadline: "auto_stop", sandbox.CauseMemory: "memory_window"} {
		b := newBench(t)
		s := b.reaches("timed", sandbox.Sleeping)
		due := time.Now().UTC().Truncate(time.Millisecond)
		id := sandbox.OperationID(s.ID, s.Generation, cause, due, 0)
		var r hostproto.Report
		b.host.script(func(h *fakeHost) { r = h.fact(s.ID, id, sandbox.Stop, sandbox.EventStopped) })
		r.Ended, r.Saved, r.Cause, r.Due = true, true, cause, due
		for range 3 {
			must0(t, b.Report(t.Context(), r))
		}
		got := b.get(s.ID)
		if got.State != sandbox.Stopped || got.Reason != reason || got.Message == "" {
			t.Errorf("it is %s (%s: %s), want stopped (%s)", got.State, got.Reason, got.Message, reason)
		}
		op := must(b.Operation(t.Context(), me, id))(t)
		if op.Status != sandbox.Succeeded || op.Actor != hostActor || op.Kind != sandbox.Stop || !op.CreatedAt.Equal(due) || !op.EndedAt.Equal(r.At) {
			t.Errorf("the operation: %+v", op)
		}
		count := 0
		for _, e := range b.events(s.ID) {
			if e == "sandbox.stopped" {
				count++
			}
		}
		if count != 1 {
			t.Errorf("it was stopped in %d events", count)
		}
		b.ended(must(b.Resume(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
		if got := b.get(s.ID); got.Reason != "" {
			t.Errorf("after a resume the reason is %s", got.Reason)
		}
	}
}

// A failed automatic stop is an operation that failed, and changes no state.
func TestHostFailsByItself_Z10(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("timed")
	var r hostproto.Report
	b.host.script(func(h *fakeHost) { r = h.fact(s.ID, "op_01k3c9a6xwe8htz0s6h1j2k3m4", sandbox.Stop, "") })
	r.Ended, r.Cause, r.Due = true, sandbox.CauseDeadline, r.At
	r.Failure = &hostproto.Failure{Kind: string(fault.NoCapacity), Message: "the pool is full", Reason: "pool_full"}
	must0(t, b.Report(t.Context(), r))
	op := must(b.Operation(t.Context(), me, r.Operation))(t)
	if got := b.get(s.ID); op.Status != sandbox.Errored || op.Error == nil || op.Error.Reason != "pool_full" || got.State != sandbox.Ready || got.Reason != "" {
		t.Errorf("it is %s (%s) after %+v", got.State, got.Reason, op)
	}
}

// A4, A8: what is done at the deadline and what it does in sleep reach the host with the
// create and with each change; what cannot be is refused.
func TestPolicies_A4_A8(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ask := PolicyRequest{OnDeadline: "sleep", SleepDeadline: "paused"}
	r := must(b.Create(t.Context(), me, CreateRequest{Name: "timed", Policy: ask}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	if p := b.command(r.Operation.ID).Policy; p == nil || p.OnDeadline != sandbox.Sleep || p.SleepDeadline != sandbox.DeadlinePaused || p.TTL != time.Hour {
		t.Errorf("the host was told %+v", p)
	}
	u := must(b.Update(t.Context(), me, "timed", UpdateRequest{Policy: PolicyRequest{OnDeadline: "delete"}}))(t)
	if u.Sandbox.PolicyRestart || u.Sandbox.PolicyChange == 0 {
		t.Errorf("a change that does not name the auto-stop: %+v", u.Sandbox)
	}
	until(t, "the host to have the change", func() bool { return b.get("timed").PolicyChange == 0 })
	var told hostproto.PolicyChange
	b.host.script(func(h *fakeHost) { told = h.policies[len(h.policies)-1] })
	if told.Policy.OnDeadline != sandbox.Delete || told.Policy.SleepDeadline != sandbox.DeadlinePaused || told.Restart {
		t.Errorf("the host was told %+v", told)
	}
	_, err := b.Create(t.Context(), me, CreateRequest{Sleep: SleepSettings{Mode: "never"}, Policy: PolicyRequest{OnDeadline: "sleep"}})
	wantFault(t, err, fault.InvalidArgument, "on_deadline")
	_, err = b.Update(t.Context(), me, "timed", UpdateRequest{Policy: PolicyRequest{OnDeadline: "explode"}})
	wantFault(t, err, fault.InvalidArgument, "on_deadline")
	_, err = b.Update(t.Context(), me, "timed", UpdateRequest{Policy: PolicyRequest{SleepDeadline: "running"}})
	wantFault(t, err, fault.InvalidArgument, "sleep.deadline")
}

// A1, A2: a wake, a resume and a fork may name another auto-stop. The host has it before
// the boot; where the sandbox runs already it counts from now; a refused one does nothing.
func TestTTLOfBoots_A1_A2(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for verb, boot := range map[sandbox.Verb]func(TTL) (Result, error){
		sandbox.Wake:   func(ttl TTL) (Result, error) { return b.WakeFor(t.Context(), me, "wake", ttl, Idempotency{}) },
		sandbox.Resume: func(ttl TTL) (Result, error) { return b.ResumeFor(t.Context(), me, "resume", ttl, Idempotency{}) },
	} {
		s := b.reaches(string(verb), map[sandbox.Verb]sandbox.State{sandbox.Wake: sandbox.Sleeping, sandbox.Resume: sandbox.Stopped}[verb])
		_, err := boot(seconds(0))
		wantFault(t, err, fault.InvalidArgument, "ttl_seconds")
		if ops, _ := b.host.operations(verb); len(ops) != 0 {
			t.Errorf("a refused %s was carried out", verb)
		}
		b.ended(must(boot(seconds(7200)))(t).Operation, sandbox.Succeeded)
		until(t, "the host to have the change", func() bool { return b.get(s.ID).PolicyChange == 0 })
		if got := b.get(s.ID); got.Policy.TTL != 2*time.Hour || got.State != sandbox.Ready {
			t.Errorf("after a %s: %+v", verb, got)
		}
		calls := b.host.told(s.ID)
		if i := slices.Index(calls, "policy"); i < 0 || slices.Index(calls, string(verb)) < i {
			t.Errorf("the host was told %v", calls)
		}
		if r := must(boot(TTL{Given: true, None: true}))(t); r.Outcome != sandbox.Done || r.Sandbox.Policy.TTL != 0 || r.Sandbox.PolicyChange == 0 {
			t.Errorf("of one that runs: %+v", r)
		}
	}
	r := must(b.Fork(t.Context(), me, "wake", ForkRequest{TTL: seconds(60)}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	if cmd := b.command(r.Operation.ID); cmd.Policy == nil || cmd.Policy.TTL != time.Minute {
		t.Errorf("the host was told %+v for the forks", cmd.Policy)
	}
	if got := b.get(r.Children[0].Sandbox.ID).Policy.TTL; got != time.Minute {
		t.Errorf("the fork has the auto-stop %s", got)
	}
	if got := b.get("wake").Policy.TTL; got != 0 {
		t.Errorf("its source has the auto-stop %s", got)
	}
}

// told gives what the host was told of a sandbox, in its order: verbs and "policy".
func (h *fakeHost) told(id string) (out []string) {
	for _, call := range h.callList() {
		if what, ok := strings.CutSuffix(call, " "+id); ok {
			out = append(out, strings.TrimPrefix(what, "submit "))
		}
	}
	return out
}

// A6, A8, B4: what a host did at a deadline is metered to when it fell due, whatever it
// did; a deletion frees the name.
func TestHostEndsByItself_A8_B4(t *testing.T) {
	t.Parallel()
	for verb, event := range map[sandbox.Verb]sandbox.Event{sandbox.Sleep: sandbox.EventSlept, sandbox.Delete: sandbox.EventDeleted} {
		b := newBench(t)
		s := b.ready("timed")
		due := time.Now().Add(time.Second).UTC().Truncate(time.Millisecond)
		id := sandbox.OperationID(s.ID, s.Generation, sandbox.CauseDeadline, due, 0)
		var r hostproto.Report
		b.host.script(func(h *fakeHost) { r = h.fact(s.ID, id, verb, event) })
		r.At = due.Add(3 * time.Second)
		r.Ended, r.Saved, r.Cause, r.Due = true, verb == sandbox.Sleep, sandbox.CauseDeadline, due
		must0(t, b.Report(t.Context(), r))
		row := b.row(s.ID)
		want := map[sandbox.Verb]sandbox.State{sandbox.Sleep: sandbox.Sleeping, sandbox.Delete: sandbox.Deleted}[verb]
		if row.State != want || row.DeletedAt.IsZero() != (verb == sandbox.Sleep) {
			t.Errorf("after a %s it is %s, deleted at %s", verb, row.State, row.DeletedAt)
		}
		var entries []metering.Entry
		must0(t, b.db.View(t.Context(), func(ctx context.Context, rd store.Reader) (err error) {
			entries, err = rd.MeterEntries(ctx, store.EntryFilter{Project: "default", Sandbox: s.ID})
			return err
		}))
		last := entries[len(entries)-1]
		if !last.To.Equal(due) || last.End != metering.ByAutoStop {
			t.Errorf("a %s that was due at %s is metered to %s (%s)", verb, due, last.To, last.End)
		}
		if verb == sandbox.Delete {
			b.ready("timed") // the name is free
		}
	}
}

// A2, R9: a host that has a later change than the database, which was put back to an
// earlier time, is told what is there as a new one; nothing stays pending.
func TestPolicyAfterRestoredDatabase_A2_R9(t *testing.T) {
	t.Parallel()
	for name, pending := range map[string]bool{"a change is pending": true, "none is": false} {
		b := newBench(t, func(c *Config) { c.Limits.ReconcileEvery = 20 * time.Millisecond })
		s := b.ready("timed")
		if pending {
			b.host.script(func(h *fakeHost) { h.away = errors.New("no route") })
			must(b.Update(t.Context(), me, s.ID, UpdateRequest{TTL: seconds(7200)}))(t)
		}
		var r hostproto.Report
		b.host.script(func(h *fakeHost) { r = h.fact(s.ID, "", "", "") })
		r.PolicyChange, r.Deadline = 1000, r.At.Add(50*time.Hour)
		must0(t, b.Report(t.Context(), r))
		b.host.script(func(h *fakeHost) { h.away = nil }) // it is told nothing before it has said what it has
		until(t, "the host to be told", func() bool {
			got := b.get(s.ID)
			return got.PolicyChange == 0 && !got.Deadline.Equal(r.Deadline)
		})
		var told []hostproto.PolicyChange
		b.host.script(func(h *fakeHost) { told = slices.Clone(h.policies) })
		// It may be told more than once: a restart once told is done.
		restart := slices.ContainsFunc(told, func(p hostproto.PolicyChange) bool { return p.Change > 1000 && p.Restart })
		if want, last := b.get(s.ID).Policy, told[len(told)-1]; last.Change <= 1000 || !last.Policy.Equal(want) || restart != pending {
			t.Errorf("%s: the host was told %+v, want %+v", name, told, want)
		}
	}
}
