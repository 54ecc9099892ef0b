package control

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// TestALife walks one sandbox through all verbs (S1, S3).
func TestALife(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	r := must(b.Create(ctx, me, CreateRequest{Name: "otter", Labels: map[string]string{"k": "v"}, Env: map[string]string{"A": "1"}}))(t)
	if r.Outcome != sandbox.Accept || r.Sandbox.State != sandbox.Creating || r.Operation.Kind != sandbox.Create {
		t.Fatalf("create gives %+v", r)
	}
	id := r.Sandbox.ID
	if !strings.HasPrefix(id, "sbx_") || len(id) != 30 || len(r.Operation.ID) != 29 {
		t.Errorf("ids %s, %s", id, r.Operation.ID)
	}
	op := b.ended(r.Operation, sandbox.Succeeded)
	if op.Progress != 1 || op.EndedAt.IsZero() || op.StartedAt.IsZero() || op.Actor != me.KeyID {
		t.Errorf("the ended operation: %+v", op)
	}
	s := b.get("otter")
	if s.State != sandbox.Ready || s.Generation != 1 || !s.Started || s.Spec.Version != "sha256:base" || s.Spec.Runtime != "fake" ||
		s.Labels["k"] != "v" || s.Spec.CPUs != 1 || s.Spec.Sleep != sandbox.SleepManual || s.Host != "local" {
		t.Errorf("ready: %+v", s)
	}
	if items := must(b.Identity(ctx, me, id))(t); len(items) != 1 || items[0].Item != "hostname" {
		t.Errorf("identity: %+v", items)
	}
	for _, step := range []struct {
		verb       func() (Result, error)
		state      sandbox.State
		generation int64
		saved      bool
	}{
		{func() (Result, error) { return b.Sleep(ctx, me, id, Idempotency{}) }, sandbox.Sleeping, 1, true},
		{func() (Result, error) { return b.Wake(ctx, me, "otter", Idempotency{}) }, sandbox.Ready, 2, true},
		{func() (Result, error) { return b.Stop(ctx, me, id, Idempotency{}) }, sandbox.Stopped, 2, true},
		{func() (Result, error) { return b.Resume(ctx, me, id, Idempotency{}) }, sandbox.Ready, 3, true},
		{func() (Result, error) { return b.Sleep(ctx, me, id, Idempotency{}) }, sandbox.Sleeping, 3, true},
		{func() (Result, error) { return b.Resume(ctx, me, id, Idempotency{}) }, sandbox.Ready, 4, true},
	} {
		before := b.get(id)
		r := must(step.verb())(t)
		if r.Sandbox.State != before.State {
			t.Errorf("S1: with an operation at work the state is %s, want still %s", r.Sandbox.State, before.State)
		}
		op := b.ended(r.Operation, sandbox.Succeeded)
		s := b.get(id)
		if s.State != step.state || s.Generation != step.generation || s.SavedAt.IsZero() == step.saved {
			t.Errorf("after %s: %s, generation %d, saved at %s", op.Kind, s.State, s.Generation, s.SavedAt)
		}
	}
	r = must(b.Delete(ctx, me, id, DeleteRequest{}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	if s := b.row(id); s.State != sandbox.Deleted || s.DeletedAt.IsZero() {
		t.Errorf("deleted: %+v", s)
	}
	_, err := b.Get(ctx, me, id)
	wantFault(t, err, fault.NotFound, "")
	want := []string{"sandbox.creating", "operation.started", "sandbox.ready", "operation.succeeded"}
	for _, state := range []string{"sleeping", "ready", "stopped", "ready", "sleeping", "ready", "deleted"} {
		want = append(want, "operation.started", "sandbox."+state)
		if state == "sleeping" || state == "stopped" {
			want = append(want, "receipt.issued")
		}
		want = append(want, "operation.succeeded")
	}
	if got := b.events(id); !slices.Equal(got, want) {
		t.Errorf("S3, H1: events\n%v, want\n%v", got, want)
	}
}

// TestVerbsFollowTheMatrix asks every verb of every state through control.
func TestVerbsFollowTheMatrix_S5_S6(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	verbs := map[string]func(ref string) (Result, error){
		"sleep":     func(ref string) (Result, error) { return b.Sleep(ctx, me, ref, Idempotency{}) },
		"wake":      func(ref string) (Result, error) { return b.Wake(ctx, me, ref, Idempotency{}) },
		"stop":      func(ref string) (Result, error) { return b.Stop(ctx, me, ref, Idempotency{}) },
		"resume":    func(ref string) (Result, error) { return b.Resume(ctx, me, ref, Idempotency{}) },
		"fork live": func(ref string) (Result, error) { return b.Fork(ctx, me, ref, ForkRequest{}) },
		"fork disk": func(ref string) (Result, error) {
			return b.Fork(ctx, me, ref, ForkRequest{Mode: sandbox.ForkDisk})
		},
		"delete": func(ref string) (Result, error) { return b.Delete(ctx, me, ref, DeleteRequest{}) },
	}
	want := map[string]string{ // ready, sleeping, stopped, archived, failed
		"sleep": "run done no no no", "wake": "done run no no no", "stop": "run run done done no",
		"resume": "done run run run run", "fork live": "run run no no no", "fork disk": "run run run no no", "delete": "run run run run run",
	}
	n := 0
	for i, state := range []sandbox.State{sandbox.Ready, sandbox.Sleeping, sandbox.Stopped, sandbox.Archived, sandbox.Failed} {
		for verb, call := range verbs {
			n++
			s := b.reaches(fmt.Sprintf("s-%d", n), state)
			r, err := call(s.ID)
			switch want := strings.Fields(want[verb])[i]; want {
			case "no":
				f := wantFault(t, err, fault.FailedPrecondition, "state_"+string(state))
				if !strings.Contains(f.Message, s.Name) {
					t.Errorf("%s of %s: %q does not name it", verb, state, f.Message)
				}
			case "done":
				if err != nil || r.Outcome != sandbox.Done || r.Operation != nil || r.Sandbox.State != state {
					t.Errorf("%s of %s: %+v, %v, want done", verb, state, r, err)
				}
			default:
				if err != nil || r.Outcome != sandbox.Accept {
					t.Errorf("%s of %s: %+v, %v, want run", verb, state, r, err)
					continue
				}
				b.ended(r.Operation, sandbox.Succeeded)
			}
		}
	}
}

// TestFiftyWakes_S4: one operation, fifty successes.
func TestFiftyWakes_S4(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.reaches("otter", sandbox.Sleeping)
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Wake) })
	var mu sync.Mutex
	outcomes := map[sandbox.Outcome]int{}
	ids := map[string]bool{}
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			r, err := b.Wake(t.Context(), me, s.ID, Idempotency{})
			if err != nil {
				t.Errorf("a wake: %v", err)
				return
			}
			mu.Lock()
			outcomes[r.Outcome]++
			ids[r.Operation.ID] = true
			mu.Unlock()
			if op, err := b.Wait(t.Context(), me, r.Operation.ID, patience); err != nil || op.Status != sandbox.Succeeded {
				t.Errorf("a wake ended %s, %v", op.Status, err)
			}
		})
	}
	until(t, "all fifty are admitted", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return outcomes[sandbox.Accept]+outcomes[sandbox.Join] == 50
	})
	if outcomes[sandbox.Accept] != 1 || len(ids) != 1 {
		t.Errorf("outcomes %v, operations %v", outcomes, ids)
	}
	var op string
	until(t, "the host has the wake", func() bool {
		got, _ := b.host.operations(sandbox.Wake)
		if len(got) == 1 {
			op = got[0]
		}
		return op != ""
	})
	_, err := b.Stop(t.Context(), me, s.ID, Idempotency{})
	if f := wantFault(t, err, fault.Conflict, op); !strings.Contains(f.Message, op) {
		t.Errorf("the conflict %q does not name %s", f.Message, op)
	}
	b.host.proceed(op)
	all.Wait()
	if got := b.get(s.ID); got.State != sandbox.Ready || got.Generation != 2 {
		t.Errorf("after fifty wakes: %s, generation %d", got.State, got.Generation)
	}
}

// TestRacingVerbs_S4: of different verbs at a time one wins, the rest are conflicts or
// joins.
func TestRacingVerbs_S4(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
	var mu sync.Mutex
	started, joined, conflicts := 0, 0, 0
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			call := b.Sleep
			if i%2 == 1 {
				call = b.Stop
			}
			r, err := call(t.Context(), me, s.ID, Idempotency{})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil && r.Outcome == sandbox.Accept:
				started++
			case err == nil && r.Outcome == sandbox.Join:
				joined++
			case fault.Is(err, fault.Conflict):
				conflicts++
			default:
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	all.Wait()
	if started != 1 || joined != 19 || conflicts != 20 {
		t.Errorf("%d started, %d joined, %d were refused", started, joined, conflicts)
	}
}

// TestDeleteWhileAnythingRuns_S5: it cancels what runs, in its own transaction, and the
// name is free at once.
func TestDeleteWhileAnythingRuns_S5(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		verb  sandbox.Verb
		state sandbox.State
	}{
		{sandbox.Create, ""}, {sandbox.Sleep, sandbox.Ready}, {sandbox.Wake, sandbox.Sleeping},
		{sandbox.Stop, sandbox.Ready}, {sandbox.Resume, sandbox.Stopped}, {sandbox.Resume, sandbox.Failed},
	} {
		t.Run(fmt.Sprintf("%s of %s", c.verb, c.state), func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			ctx := t.Context()
			if c.verb != sandbox.Create {
				b.reaches("otter", c.state)
			}
			b.host.script(func(h *fakeHost) { h.hold = only(c.verb) })
			var running Result
			switch c.verb {
			case sandbox.Create:
				running = must(b.Create(ctx, me, CreateRequest{Name: "otter"}))(t)
			case sandbox.Sleep:
				running = must(b.Sleep(ctx, me, "otter", Idempotency{}))(t)
			case sandbox.Wake:
				running = must(b.Wake(ctx, me, "otter", Idempotency{}))(t)
			case sandbox.Stop:
				running = must(b.Stop(ctx, me, "otter", Idempotency{}))(t)
			case sandbox.Resume:
				running = must(b.Resume(ctx, me, "otter", Idempotency{}))(t)
			}
			until(t, "the host has it", func() bool { ids, _ := b.host.operations(c.verb); return slices.Contains(ids, running.Operation.ID) })
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Delete) })
			r := must(b.Delete(ctx, me, "otter", DeleteRequest{Permanent: true}))(t)
			if r.Outcome != sandbox.Accept {
				t.Fatalf("delete: %+v", r)
			}
			cancelled := b.ended(running.Operation, sandbox.Cancelled)
			if cancelled.Error == nil || cancelled.Error.Code != "cancelled" {
				t.Errorf("the cancelled operation says %+v", cancelled.Error)
			}
			again := must(b.Delete(ctx, me, "otter", DeleteRequest{}))(t)
			if again.Outcome != sandbox.Join || again.Operation.ID != r.Operation.ID {
				t.Errorf("a second delete: %+v", again)
			}
			_, err := b.Wake(ctx, me, r.Sandbox.ID, Idempotency{})
			if err == nil {
				t.Error("a wake goes through while it is deleted")
			}
			twin := must(b.Create(ctx, me, CreateRequest{Name: "otter"}))(t) // the name is free
			b.ended(twin.Operation, sandbox.Succeeded)

			until(t, "the host has the deletion", func() bool { ids, _ := b.host.operations(sandbox.Delete); return len(ids) == 1 })
			calls := b.host.callList()
			i := slices.Index(calls, "cancel "+running.Operation.ID)
			if j := slices.Index(calls, "submit delete "+r.Sandbox.ID); i < 0 || j < i {
				t.Errorf("the host was called so: %v", calls)
			}
			b.host.proceed(r.Operation.ID)
			b.ended(r.Operation, sandbox.Succeeded)
			if s := b.row(r.Sandbox.ID); s.State != sandbox.Deleted {
				t.Errorf("it is %s", s.State)
			}
			done := must(b.Delete(ctx, me, r.Sandbox.ID, DeleteRequest{}))(t)
			if done.Outcome != sandbox.Done || done.Operation != nil {
				t.Errorf("S6: a delete of what is deleted: %+v", done)
			}
			if got := b.get("otter"); got.ID != twin.Sandbox.ID {
				t.Errorf("the name finds %s", got.ID)
			}
		})
	}
}

// TestFailedOperations: the operation tells why, and the state is what the host says.
func TestFailedOperations(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) {
		h.fail = func(c hostproto.Command) *hostproto.Failure {
			if c.Verb == sandbox.Stop {
				return &hostproto.Failure{Kind: "nonsense", Message: "an unheard-of kind"}
			}
			return &hostproto.Failure{Kind: "no_capacity", Message: "the pool is full", Reason: "pool_full"}
		}
	})
	op := b.ended(must(b.Sleep(ctx, me, s.ID, Idempotency{}))(t).Operation, sandbox.Errored)
	if want := (sandbox.OperationError{Code: "no_capacity", Message: "the pool is full", Reason: "pool_full"}); *op.Error != want {
		t.Errorf("the error is %+v", *op.Error)
	}
	if got := b.get(s.ID); got.State != sandbox.Ready || got.Generation != 1 {
		t.Errorf("Z10: after a failed sleep: %s, generation %d", got.State, got.Generation)
	}
	if op := b.ended(must(b.Stop(ctx, me, s.ID, Idempotency{}))(t).Operation, sandbox.Errored); op.Error.Code != "internal" {
		t.Errorf("an unknown kind became %q", op.Error.Code)
	}
	r := must(b.Create(ctx, me, CreateRequest{Name: "unlucky"}))(t)
	b.ended(r.Operation, sandbox.Errored)
	got := b.get("unlucky")
	if got.State != sandbox.Failed || got.Reason != "start_failed" || got.Message != "the pool is full" || got.Started {
		t.Errorf("after a failed creation: %+v", got)
	}
	_, err := b.Resume(ctx, me, "unlucky", Idempotency{})
	wantFault(t, err, fault.FailedPrecondition, "never_started")
	b.host.script(func(h *fakeHost) { h.fail = nil })
	b.ended(must(b.Delete(ctx, me, "unlucky", DeleteRequest{}))(t).Operation, sandbox.Succeeded)
}

// TestHostLimits proves Z9 and D6: what the host cannot do is refused beforehand.
func TestHostLimits_Z9_D6(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s, asleep := b.ready("otter"), b.reaches("badger", sandbox.Sleeping)
	b.host.script(func(h *fakeHost) { h.info.Memory = false })
	_, err := b.Sleep(ctx, me, s.ID, Idempotency{})
	wantFault(t, err, fault.Unsupported, "memory_snapshot")
	_, err = b.Fork(ctx, me, s.ID, ForkRequest{})
	if f := wantFault(t, err, fault.Unsupported, "memory_snapshot"); !strings.Contains(f.Message, "disk") {
		t.Errorf("%q does not offer mode disk", f.Message)
	}
	if r := must(b.Sleep(ctx, me, asleep.ID, Idempotency{}))(t); r.Outcome != sandbox.Done {
		t.Errorf("sleep of what sleeps: %+v", r)
	}
	b.host.script(func(h *fakeHost) { h.info.PoolFree = 9 })
	_, err = b.Fork(ctx, me, s.ID, ForkRequest{Mode: sandbox.ForkDisk})
	wantFault(t, err, fault.NoCapacity, "pool_full")
	_, err = b.Create(ctx, me, CreateRequest{})
	wantFault(t, err, fault.NoCapacity, "pool_full")
	b.ended(must(b.Stop(ctx, me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded) // needs no room
	b.host.script(func(h *fakeHost) { h.infoErr = fault.New(fault.Unavailable, "it is away") })
	_, err = b.Create(ctx, me, CreateRequest{})
	wantFault(t, err, fault.Unavailable, "no_host")
	if _, err := b.HostInfo(ctx); !fault.Is(err, fault.Unavailable) {
		t.Errorf("no host answers: %v", err)
	}
}
