package control

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// overtaken is the host's no to what was admitted on an older generation.
func overtaken() error { return fault.New(fault.Conflict, "it has gone on").Because("overtaken") }

// strict makes a host refuse commands that facts have overtaken.
func strict(h *fakeHost) {
	h.refuse = func(c hostproto.Command) error {
		if s := h.has[c.Sandbox]; s != nil && c.Generation < s.generation {
			return overtaken()
		}
		return nil
	}
}

// TestOvertaken: the sandbox reboots between a verb's admission and its way to the host.
// What still makes sense goes on with the new generation, the rest ends as overtaken.
func TestOvertaken(t *testing.T) {
	t.Parallel()
	for verb, want := range map[sandbox.Verb]sandbox.OperationStatus{
		sandbox.Stop: sandbox.Succeeded, sandbox.Delete: sandbox.Succeeded, sandbox.Sleep: sandbox.Errored, sandbox.Fork: sandbox.Errored,
	} {
		t.Run(string(verb), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				ctx := t.Context()
				s := b.ready("otter")
				b.host.script(strict)
				b.host.script(func(h *fakeHost) { h.at(s.ID).generation++ }) // it has booted, nobody knows
				var r Result
				switch verb {
				case sandbox.Stop:
					r = must(b.Stop(ctx, me, s.ID, Idempotency{}))(t)
				case sandbox.Delete:
					r = must(b.Delete(ctx, me, s.ID, DeleteRequest{}))(t)
				case sandbox.Sleep:
					r = must(b.Sleep(ctx, me, s.ID, Idempotency{}))(t)
				case sandbox.Fork:
					r = must(b.Fork(ctx, me, s.ID, ForkRequest{}))(t)
				}
				time.Sleep(time.Minute)
				if op := must(b.Operation(ctx, me, r.Operation.ID))(t); !op.Status.Active() {
					t.Fatalf("before the facts are known it is %s", op.Status)
				}
				b.host.script(func(h *fakeHost) { h.at(s.ID).generation-- })
				must0(t, b.host.befall(s.ID, sandbox.EventRebooted)) // now it is told
				op := b.ended(r.Operation, want)
				if want == sandbox.Errored && (op.Error.Code != "conflict" || op.Error.Reason != "overtaken") {
					t.Errorf("the error is %+v", op.Error)
				}
				for _, child := range r.Children {
					failed := b.ended(child.Operation, sandbox.Errored)
					if got := b.get(child.Sandbox.ID); got.State != sandbox.Failed || failed.Error.Reason != "overtaken" {
						t.Errorf("the child of an overtaken fork is %s, %+v", got.State, failed.Error)
					}
				}
			})
		})
	}
}

// TestOvertakenByTheGoal: a stop whose sandbox has stopped by itself is done.
func TestOvertakenByTheGoal(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) {
		h.refuse = func(hostproto.Command) error { return fault.New(fault.Unavailable, "it is away") }
	})
	op := must(b.Stop(t.Context(), me, s.ID, Idempotency{}))(t).Operation
	must0(t, b.host.befall(s.ID, sandbox.EventRebooted))
	must0(t, b.host.befall(s.ID, sandbox.EventExited))
	b.host.script(func(h *fakeHost) { h.refuse = func(hostproto.Command) error { return overtaken() } })
	b.lanes.nudge(s)
	b.ended(op, sandbox.Succeeded)
}

// TestFinalRefusal: a host that has nothing of a sandbox ends the operation with its
// reason; a deletion is tried until it goes through.
func TestFinalRefusal(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) {
		h.refuse = func(c hostproto.Command) error {
			return fault.New(fault.NotFound, "this host has nothing of it").Because("unknown_to_host")
		}
	})
	op := b.ended(must(b.Sleep(ctx, me, s.ID, Idempotency{}))(t).Operation, sandbox.Errored)
	if op.Error.Code != "not_found" || op.Error.Reason != "unknown_to_host" {
		t.Errorf("the error is %+v", op.Error)
	}
	if got := b.get(s.ID); got.State != sandbox.Ready {
		t.Errorf("it is %s: only the host's word changes a state", got.State)
	}
	created := must(b.Create(ctx, me, CreateRequest{Name: "badger"}))(t)
	b.ended(created.Operation, sandbox.Errored)
	if got := b.get("badger"); got.State != sandbox.Failed || got.Message != "this host has nothing of it" {
		t.Errorf("a refused creation: %+v", got)
	}
	fork := must(b.Fork(ctx, me, s.ID, ForkRequest{Count: new(int64(2))}))(t)
	results := forkResults(t, b.ended(fork.Operation, sandbox.Errored))
	if results[0].Error == nil || results[1].Error == nil {
		t.Errorf("results: %+v", results)
	}
	del := must(b.Delete(ctx, me, s.ID, DeleteRequest{}))(t).Operation
	until(t, "it was tried", func() bool { _, calls := b.host.operations(sandbox.Delete); return calls > 0 })
	b.host.script(func(h *fakeHost) { h.refuse = nil })
	b.lanes.nudge(s)
	b.ended(del, sandbox.Succeeded)
}

// TestFailedForkEndsItsChildren: a fork that its host reports as failed, or that was
// cancelled before its capture, has made nobody.
func TestFailedForkEndsItsChildren(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"it fails", "its source is deleted"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			ctx := t.Context()
			s := b.ready("otter")
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Fork) })
			r := must(b.Fork(ctx, me, s.ID, ForkRequest{Count: new(int64(2))}))(t)
			failure := &hostproto.Failure{Kind: "no_capacity", Message: "no room for the capture"}
			want := sandbox.Errored
			if how == "its source is deleted" {
				b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
				must(b.Delete(ctx, me, s.ID, DeleteRequest{}))(t)
				b.ended(r.Operation, sandbox.Cancelled)
				failure = &hostproto.Failure{Kind: "cancelled", Message: "it was cancelled"}
				want = sandbox.Cancelled
			}
			must0(t, b.Report(ctx, hostproto.Report{Sandbox: s.ID, Seq: 2, Generation: 1, Operation: r.Operation.ID, Verb: sandbox.Fork,
				Ended: true, Failure: failure, At: time.Now()}))
			for i, result := range forkResults(t, b.ended(r.Operation, want)) {
				if result.Error == nil || result.Error.Code != failure.Kind {
					t.Errorf("result %d: %+v", i, result)
				}
			}
			for _, child := range r.Children {
				b.ended(child.Operation, want)
				if got := b.get(child.Sandbox.ID); got.State != sandbox.Failed || got.Reason != "start_failed" || got.HostSeq != 0 {
					t.Errorf("a child: %+v", got)
				}
				if got := b.events(child.Sandbox.ID); !slices.Contains(got, "sandbox.failed") {
					t.Errorf("a child's events: %v", got)
				}
			}
		})
	}
}

// TestForgottenForkWithChildren: the host no longer knows the fork, because its source is
// gone, but has the children: they are not given up.
func TestForgottenForkWithChildren(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Fork) })
	r := must(b.Fork(ctx, me, s.ID, ForkRequest{Count: new(int64(2))}))(t)
	must0(t, b.Report(ctx, hostproto.Report{Sandbox: s.ID, Seq: 2, Generation: 1, Operation: r.Operation.ID, Verb: sandbox.Fork, Ended: true, At: time.Now()}))
	known, unknown := r.Children[0], r.Children[1]
	b.host.script(func(h *fakeHost) {
		h.at(known.Sandbox.ID)
		h.refuse = func(hostproto.Command) error { return fault.New(fault.NotFound, "this host has nothing of it") }
	})
	b.restart()
	b.ended(unknown.Operation, sandbox.Errored)
	if op := must(b.Operation(ctx, me, known.Operation.ID))(t); !op.Status.Active() {
		t.Errorf("a child that the host has was given up: %+v", op)
	}
	must0(t, b.Report(ctx, hostproto.Report{Sandbox: known.Sandbox.ID, Seq: 1, Generation: 1, Operation: known.Operation.ID,
		Verb: sandbox.Create, Event: sandbox.EventCreated, Ended: true, At: time.Now()}))
	b.ended(known.Operation, sandbox.Succeeded)
}
