package control

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

func forkResults(t *testing.T, op sandbox.Operation) []ForkResult {
	t.Helper()
	var out []ForkResult
	must0(t, json.Unmarshal(op.Result, &out))
	return out
}

// TestFork_F1_F6: each child has its own row, operation and result; what is inherited is,
// what is not is not.
func TestFork_F1_F6(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	made := must(b.Create(ctx, me, CreateRequest{
		Name: "source", Labels: map[string]string{"team": "x"}, DiskBytes: new(int64(5e9)), CPUs: new(int64(2)), Sleep: SleepSettings{Mode: "never"}, User: "agent",
	}))(t)
	b.ended(made.Operation, sandbox.Succeeded)
	source := b.get("source")
	r := must(b.Fork(ctx, me, "source", ForkRequest{Count: new(int64(3)), Names: []string{"copy"}}))(t)
	if len(r.Children) != 3 || r.Operation.Kind != sandbox.Fork || r.Sandbox.ID != source.ID {
		t.Fatalf("fork gives %+v", r)
	}
	results := forkResults(t, b.ended(r.Operation, sandbox.Succeeded))
	for i, child := range r.Children {
		if child.Sandbox.State != sandbox.Creating || results[i].Sandbox != child.Sandbox.ID || results[i].Operation != child.Operation.ID || results[i].Error != nil {
			t.Errorf("child %d: %+v, result %+v", i, child, results[i])
		}
		b.ended(child.Operation, sandbox.Succeeded)
		s := b.get(fmt.Sprintf("copy-%d", i+1))
		if s.State != sandbox.Ready || s.Generation != 1 || s.Spec.Disk != 5e9 || s.Spec.CPUs != 2 || s.Spec.Sleep != sandbox.SleepNever ||
			s.Spec.Version != source.Spec.Version || s.Labels["team"] != "x" || s.Origin != (sandbox.Origin{Kind: "fork", Source: source.ID, Mode: "live"}) {
			t.Errorf("child %d: %+v", i, s)
		}
	}
	if s := b.get("source"); s.State != sandbox.Ready || s.Generation != 1 {
		t.Errorf("the source is %s, generation %d", s.State, s.Generation)
	}
	b.host.mu.Lock()
	cmd := b.host.submits[len(b.host.submits)-1]
	b.host.mu.Unlock()
	if cmd.Verb != sandbox.Fork || cmd.Mode != sandbox.ForkLive || len(cmd.Children) != 3 || cmd.Children[2].Name != "copy-3" || cmd.Generation != 1 {
		t.Errorf("the host was told %+v", cmd)
	}
	// F5: deleting the source does not touch its forks.
	b.ended(must(b.Delete(ctx, me, "source", DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	if s := b.get("copy-1"); s.State != sandbox.Ready {
		t.Errorf("after its source's deletion a fork is %s", s.State)
	}
}

func TestForkCountsAndNames(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	b.ready("source")
	b.ready("taken-2")
	n := func(v int64) *int64 { return &v }
	for name, c := range map[string]struct {
		req    ForkRequest
		kind   fault.Kind
		reason string
	}{
		"none":                            {ForkRequest{Count: n(0)}, fault.InvalidArgument, "count"},
		"fewer than none":                 {ForkRequest{Count: n(-1)}, fault.InvalidArgument, "count"},
		"too many":                        {ForkRequest{Count: n(101)}, fault.InvalidArgument, "count"},
		"huge":                            {ForkRequest{Count: n(1 << 62)}, fault.InvalidArgument, "count"},
		"names that do not fit":           {ForkRequest{Count: n(3), Names: []string{"a", "b"}}, fault.InvalidArgument, "names"},
		"a bad name":                      {ForkRequest{Names: []string{"A"}}, fault.InvalidArgument, "name"},
		"a name too long with its number": {ForkRequest{Count: n(10), Names: []string{strings.Repeat("a", 38)}}, fault.InvalidArgument, "name"},
		"a mode":                          {ForkRequest{Mode: "warm"}, fault.InvalidArgument, "mode"},
		"a taken name":                    {ForkRequest{Count: n(3), Names: []string{"taken"}}, fault.Conflict, "name_taken"},
		"one name twice":                  {ForkRequest{Names: []string{"x", "x"}}, fault.Conflict, "name_taken"},
	} {
		before := b.count()
		_, err := b.Fork(ctx, me, "source", c.req)
		if f := fault.Of(err); f == nil || f.Kind != c.kind || f.Reason != c.reason {
			t.Errorf("%s: %v, want %s (%s)", name, err, c.kind, c.reason)
		}
		if after := b.count(); after != before {
			t.Errorf("%s: a refused fork left %+v of %+v", name, after, before)
		}
	}
	r := must(b.Fork(ctx, me, "source", ForkRequest{Count: n(100)}))(t) // the most, with generated names
	names := map[string]bool{}
	for _, child := range r.Children {
		names[child.Sandbox.Name] = true
		b.ended(child.Operation, sandbox.Succeeded)
	}
	if len(names) != 100 {
		t.Errorf("%d names for 100 forks", len(names))
	}
	two := must(b.Fork(ctx, me, "source", ForkRequest{Names: []string{"x", "y"}}))(t)
	if len(two.Children) != 2 || two.Children[1].Sandbox.Name != "y" {
		t.Errorf("two names: %+v", two.Children)
	}
}

// TestForkWithFailures: the fork's result names each child that did not start.
func TestForkWithFailures(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("the child fails after the fork %v", late), func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			ctx := t.Context()
			source := b.ready("source")
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Fork) })
			r := must(b.Fork(ctx, me, source.ID, ForkRequest{Count: new(int64(3))}))(t)
			report := func(id string, seq int64, op string, verb sandbox.Verb, e sandbox.Event, f *hostproto.Failure) {
				t.Helper()
				must0(t, b.Report(ctx, hostproto.Report{Sandbox: id, Seq: seq, Generation: 1, Operation: op, Verb: verb, Event: e, Failure: f, Ended: true, At: time.Now()}))
			}
			full := &hostproto.Failure{Kind: "no_capacity", Message: "no memory is left", Reason: "memory"}
			endFork := func() { report(source.ID, 2, r.Operation.ID, sandbox.Fork, "", nil) }
			if late {
				endFork()
			}
			c := r.Children
			report(c[0].Sandbox.ID, 1, c[0].Operation.ID, sandbox.Create, sandbox.EventCreated, nil)
			report(c[1].Sandbox.ID, 1, c[1].Operation.ID, sandbox.Create, sandbox.EventCreateFailed, full)
			report(c[2].Sandbox.ID, 1, c[2].Operation.ID, sandbox.Create, sandbox.EventCreated, nil)
			if !late {
				endFork()
			}
			results := forkResults(t, b.ended(r.Operation, sandbox.Succeeded))
			if results[0].Error != nil || results[2].Error != nil || results[1].Error == nil || *results[1].Error != (sandbox.OperationError{Code: "no_capacity", Message: "no memory is left", Reason: "memory"}) {
				t.Errorf("results: %+v", results)
			}
			b.ended(c[1].Operation, sandbox.Errored)
			if s := b.get(c[1].Sandbox.ID); s.State != sandbox.Failed || s.Reason != "start_failed" {
				t.Errorf("the failed child: %+v", s)
			}
		})
	}
}

// TestDeleteTheSourceOfARunningFork_S5: the deletion cancels the fork's operation; the
// host has the fork before it is told of the cancellation, so that it ends the children,
// and those that have their capture go on.
func TestDeleteTheSourceOfARunningFork_S5(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	source := b.ready("source")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Fork) })
	r := must(b.Fork(ctx, me, source.ID, ForkRequest{Count: new(int64(2))}))(t)
	del := must(b.Delete(ctx, me, source.ID, DeleteRequest{}))(t)
	b.ended(del.Operation, sandbox.Succeeded)
	b.ended(r.Operation, sandbox.Cancelled)
	calls := b.host.callList()
	cancel := slices.Index(calls, "cancel "+r.Operation.ID)
	if cancel < 1 || calls[cancel-1] != "submit fork "+source.ID || !slices.Contains(calls[cancel:], "submit delete "+source.ID) {
		t.Errorf("the host was called so: %v", calls)
	}
	for _, child := range r.Children {
		must0(t, b.Report(ctx, hostproto.Report{Sandbox: child.Sandbox.ID, Seq: 1, Generation: 1, Operation: child.Operation.ID,
			Verb: sandbox.Create, Event: sandbox.EventCreated, Ended: true, At: time.Now()}))
		b.ended(child.Operation, sandbox.Succeeded)
	}
}

// TestDeleteAChildInTheMaking: the fork that is sent after it does not make the child.
func TestDeleteAChildInTheMaking(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		ctx := t.Context()
		source := b.ready("source")
		b.host.script(func(h *fakeHost) {
			h.refuse = func(c hostproto.Command) error {
				if c.Verb == sandbox.Fork {
					return fault.New(fault.Unavailable, "the host is busy")
				}
				return nil
			}
		})
		r := must(b.Fork(ctx, me, source.ID, ForkRequest{Count: new(int64(2))}))(t)
		gone := r.Children[0]
		del := must(b.Delete(ctx, me, gone.Sandbox.ID, DeleteRequest{}))(t)
		b.ended(del.Operation, sandbox.Succeeded)
		b.host.script(func(h *fakeHost) { h.refuse = nil })
		op := b.ended(r.Operation, sandbox.Succeeded)
		if results := forkResults(t, op); results[0].Error == nil || results[0].Error.Code != "cancelled" || results[1].Error != nil {
			t.Errorf("results: %+v", results)
		}
		b.host.mu.Lock()
		cmd := b.host.submits[len(b.host.submits)-1]
		b.host.mu.Unlock()
		if cmd.Verb != sandbox.Fork || len(cmd.Children) != 1 || cmd.Children[0].Sandbox != r.Children[1].Sandbox.ID {
			t.Errorf("the fork that was sent at last: %+v", cmd)
		}
		if s := b.row(gone.Sandbox.ID); s.State != sandbox.Deleted {
			t.Errorf("the deleted child is %s", s.State)
		}
	})
}

// TestForkAcrossARestart: children whose fork has ended, but of which the host has not
// spoken, are asked for through the fork's command.
func TestForkAcrossARestart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	source := b.ready("source")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Fork) })
	r := must(b.Fork(t.Context(), me, source.ID, ForkRequest{Count: new(int64(2))}))(t)
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: source.ID, Seq: 2, Generation: 1, Operation: r.Operation.ID, Verb: sandbox.Fork, Ended: true, At: time.Now()}))
	first := r.Children[0]
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: first.Sandbox.ID, Seq: 1, Generation: 1, Operation: first.Operation.ID,
		Verb: sandbox.Create, Event: sandbox.EventCreated, Ended: true, At: time.Now()}))
	_, before := b.host.operations(sandbox.Fork)
	b.restart()
	until(t, "the fork is sent again", func() bool { _, calls := b.host.operations(sandbox.Fork); return calls > before })
	if creates, _ := b.host.operations(sandbox.Create); len(creates) != 1 {
		t.Errorf("a child was made from the template: %v", creates)
	}
	b.host.mu.Lock()
	cmd := b.host.submits[len(b.host.submits)-1]
	b.host.mu.Unlock()
	if len(cmd.Children) != 1 || cmd.Children[0].Sandbox != r.Children[1].Sandbox.ID || cmd.Operation != r.Operation.ID {
		t.Errorf("the fork that was sent again: %+v", cmd)
	}
}
