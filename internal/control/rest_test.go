package control

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

func rested(t *testing.T, b *bench, by sandbox.Verb) (list []Rested, left []sandbox.Sandbox) {
	t.Helper()
	left, err := b.Rest(t.Context(), by, func(r Rested) error { list = append(list, r); return nil })
	must0(t, err)
	return list, left
}

// R7: before the machine goes down what runs is put to sleep, what cannot sleep is
// stopped, and what does not run is left. The next start brings back just those.
func TestRestAndReturn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	awake, stubborn := b.ready("awake"), b.ready("stubborn")
	asleep, stopped := b.reaches("asleep", sandbox.Sleeping), b.reaches("stopped", sandbox.Stopped)
	never := must(b.Create(t.Context(), me, CreateRequest{Name: "never", Sleep: SleepSettings{Mode: "never"}}))(t)
	b.ended(never.Operation, sandbox.Succeeded)
	b.host.script(func(h *fakeHost) {
		h.fail = func(c hostproto.Command) *hostproto.Failure {
			if c.Sandbox == stubborn.ID && c.Verb == sandbox.Sleep {
				return &hostproto.Failure{Kind: string(fault.FailedPrecondition), Message: "nested guests run"}
			}
			return nil
		}
	})
	list, left := rested(t, b, sandbox.Sleep)
	if len(left) != 0 || len(list) != 3 {
		t.Fatalf("put away %+v, left %+v", list, left)
	}
	for id, want := range map[string]sandbox.State{awake.ID: sandbox.Sleeping, stubborn.ID: sandbox.Stopped, never.Sandbox.ID: sandbox.Stopped,
		asleep.ID: sandbox.Sleeping, stopped.ID: sandbox.Stopped} {
		if got := b.get(id); got.State != want {
			t.Errorf("%s is %s, want %s", got.Name, got.State, want)
		}
	}
	b.restart()
	for _, want := range []int{3, 0} { // twice brings nothing back twice
		begun, err := b.Return(t.Context(), list)
		if err != nil || begun != want {
			t.Errorf("%d come back, %v; want %d", begun, err, want)
		}
		for _, id := range []string{awake.ID, stubborn.ID, never.Sandbox.ID} {
			b.becomes(id, sandbox.Ready)
		}
	}
	if a, s := b.get(asleep.ID), b.get(stopped.ID); a.State != sandbox.Sleeping || s.State != sandbox.Stopped {
		t.Errorf("what did not run became %s and %s", a.State, s.State)
	}
}

// R7: what happened to a sandbox meanwhile counts: its auto-stop, its user.
func TestReturnLeavesWhatWentOn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	due, used, gone := b.ready("due"), b.ready("used"), b.ready("gone")
	list, _ := rested(t, b, sandbox.Sleep)
	must0(t, b.host.befall(due.ID, sandbox.EventStopped)) // as its auto-stop does
	b.ended(must(b.Wake(t.Context(), me, used.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Sleep(t.Context(), me, used.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Delete(t.Context(), me, gone.ID, DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	begun, err := b.Return(t.Context(), list)
	if err != nil || begun != 0 {
		t.Errorf("%d come back, %v", begun, err)
	}
	if a, s := b.get(due.ID), b.get(used.ID); a.State != sandbox.Stopped || s.State != sandbox.Sleeping {
		t.Errorf("they are %s and %s", a.State, s.State)
	}
}

// R7: an operation that is under way is waited for; what cannot be put away is told, and
// holds up nothing.
func TestRestWaitsAndGivesUp(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("s")
	broken := b.ready("broken")
	var once sync.Once
	held := make(chan hostproto.Command, 1)
	b.host.script(func(h *fakeHost) {
		h.hold = func(c hostproto.Command) bool {
			first := false
			if c.Verb == sandbox.Fork {
				once.Do(func() { first = true; held <- c })
			}
			return first
		}
		h.fail = func(c hostproto.Command) *hostproto.Failure {
			if c.Sandbox == broken.ID {
				return &hostproto.Failure{Kind: string(fault.Internal), Message: "the disk is broken"}
			}
			return nil
		}
	})
	must(b.Fork(t.Context(), me, s.ID, ForkRequest{Mode: sandbox.ForkDisk}))(t)
	cmd := <-held
	go func() {
		b.host.mu.Lock()
		defer b.host.mu.Unlock()
		b.host.send(b.host.obey(cmd))
	}()
	list, left := rested(t, b, sandbox.Sleep)
	if len(left) != 1 || left[0].ID != broken.ID {
		t.Errorf("left: %+v", left)
	}
	if len(list) != 2 || !slices.ContainsFunc(list, func(r Rested) bool { return r.Sandbox == s.ID }) {
		t.Errorf("put away: %+v, want the source and its fork", list)
	}
}

// R7: the time is bounded, and what is safe by then is on record.
func TestRestInTime(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	quick, slow := b.ready("quick"), b.ready("slow")
	b.host.script(func(h *fakeHost) {
		h.hold = func(c hostproto.Command) bool { return c.Sandbox == slow.ID }
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	var list []Rested
	left, err := b.Rest(ctx, sandbox.Sleep, func(r Rested) error {
		list = append(list, r)
		cancel(errors.New("the time is over"))
		return nil
	})
	if err != nil || len(list) != 1 || list[0].Sandbox != quick.ID || len(left) != 1 || left[0].ID != slow.ID {
		t.Errorf("put away %+v, left %+v, %v", list, left, err)
	}
}

// becomes waits for a state that an operation brings.
func (b *bench) becomes(id string, want sandbox.State) {
	b.t.Helper()
	must0(b.t, b.settled(b.t.Context(), me, id))
	if s := b.get(id); s.State != want {
		b.t.Errorf("%s is %s, want %s", s.Name, s.State, want)
	}
}
