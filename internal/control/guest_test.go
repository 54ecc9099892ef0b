package control

import (
	"context"
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

// TestGuestByState_Z5.
func TestGuestByState_Z5(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s := b.ready("otter")
	got := must(b.Guest(ctx, me, "otter", hostproto.UseLook))(t)
	if got.Guest.Token != "token-"+s.ID || got.Guest.Generation != 1 || got.Sandbox.ID != s.ID {
		t.Errorf("ready: %+v", got)
	}
	if u := must(b.Usage(ctx, me, "otter"))(t); u.MemoryBytes != 7 {
		t.Errorf("usage: %+v", u)
	}
	b.ended(must(b.Sleep(ctx, me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	_, err := b.Guest(ctx, me, "otter", hostproto.UseLook)
	if f := wantFault(t, err, fault.FailedPrecondition, "state_sleeping"); !strings.Contains(f.Message, "hutch wake otter") {
		t.Errorf("asleep, without a wake: %q", f.Message)
	}
	if got := must(b.Guest(ctx, me, "otter", hostproto.UseSession))(t); got.Guest.Generation != 2 || got.Sandbox.State != sandbox.Ready {
		t.Errorf("woken: %+v", got)
	}
	for _, state := range []sandbox.State{sandbox.Stopped, sandbox.Archived, sandbox.Failed} {
		s := b.reaches("x-"+string(state), state)
		_, err := b.Guest(ctx, me, s.ID, hostproto.UseSession)
		if f := wantFault(t, err, fault.FailedPrecondition, "state_"+string(state)); !strings.Contains(f.Message, "hutch resume "+s.Name) {
			t.Errorf("%s: %q does not name the resume command", state, f.Message)
		}
		if f := fault.Of(err); state == sandbox.Failed && !strings.Contains(f.Message, "failed ("+b.get(s.Name).Reason+")") {
			t.Errorf("%q does not say why it failed", f.Message)
		}
	}
	_, err = b.Guest(ctx, me, "nobody", hostproto.UseSession)
	wantFault(t, err, fault.NotFound, "")
}

// TestBurstOfGuests_S4_Z5: fifty calls to a sleeping sandbox cause one wake.
func TestBurstOfGuests_S4_Z5(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.reaches("otter", sandbox.Sleeping)
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Wake) })
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if got, err := b.Guest(t.Context(), me, s.ID, hostproto.UseSession); err != nil || got.Guest.Generation != 2 {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	until(t, "the host has the wake", func() bool { ids, _ := b.host.operations(sandbox.Wake); return len(ids) == 1 })
	ids, _ := b.host.operations(sandbox.Wake)
	b.host.proceed(ids[0])
	all.Wait()
	if ids, _ := b.host.operations(sandbox.Wake); len(ids) != 1 {
		t.Errorf("%d wakes", len(ids))
	}
}

// TestGuestWaits_Z5: for a creation, for a running sleep (then it wakes), for a fork of a
// sleeping one (then it wakes), for a resume.
func TestGuestWaits_Z5(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(b *bench) *sandbox.Operation{
		"a creation": func(b *bench) *sandbox.Operation {
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Create) })
			return must(b.Create(b.t.Context(), me, CreateRequest{Name: "otter"}))(b.t).Operation
		},
		"a sleep": func(b *bench) *sandbox.Operation {
			b.ready("otter")
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
			return must(b.Sleep(b.t.Context(), me, "otter", Idempotency{}))(b.t).Operation
		},
		"a fork of a sleeping one": func(b *bench) *sandbox.Operation {
			b.reaches("otter", sandbox.Sleeping)
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Fork) })
			return must(b.Fork(b.t.Context(), me, "otter", ForkRequest{}))(b.t).Operation
		},
		"a resume": func(b *bench) *sandbox.Operation {
			b.reaches("otter", sandbox.Stopped)
			b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Resume) })
			return must(b.Resume(b.t.Context(), me, "otter", Idempotency{}))(b.t).Operation
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				op := prepare(b)
				done := make(chan error)
				go func() { _, err := b.Guest(t.Context(), me, "otter", hostproto.UseSession); done <- err }()
				time.Sleep(20 * time.Second)
				select {
				case err := <-done:
					t.Fatalf("it did not wait: %v", err)
				default:
				}
				b.host.proceed(op.ID)
				must0(t, <-done)
				if s := b.get("otter"); s.State != sandbox.Ready {
					t.Errorf("it is %s", s.State)
				}
			})
		})
	}
}

// TestGuestGivesUp_Z5: never longer than the limit, then 503 with a time to try again.
func TestGuestGivesUp_Z5(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := b.reaches("otter", sandbox.Sleeping)
		b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Wake) })
		began := time.Now()
		_, err := b.Guest(t.Context(), me, s.ID, hostproto.UseSession)
		if f := wantFault(t, err, fault.Unavailable, "not_running_yet"); f.RetryAfter == 0 || time.Since(began) != DefaultLimits.GuestWait {
			t.Errorf("after %s: %+v", time.Since(began), f)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = b.Guest(ctx, me, s.ID, hostproto.UseSession)
		wantFault(t, err, fault.Cancelled, "")
		ids, _ := b.host.operations(sandbox.Wake)
		b.host.proceed(ids[0])
		must(b.Guest(t.Context(), me, s.ID, hostproto.UseSession))(t)

		// Frozen for a capture: tried again until it answers.
		frozen := true
		b.host.script(func(h *fakeHost) {
			h.guest = func(string) (hostproto.Guest, error) {
				if frozen {
					return hostproto.Guest{}, fault.New(fault.Unavailable, "it is frozen")
				}
				return hostproto.Guest{Token: "thawed"}, nil
			}
		})
		time.AfterFunc(10*time.Second, func() { b.host.script(func(*fakeHost) { frozen = false }) })
		if got := must(b.Guest(t.Context(), me, s.ID, hostproto.UseSession))(t); got.Guest.Token != "thawed" {
			t.Errorf("after the capture: %+v", got)
		}
		b.host.script(func(*fakeHost) { frozen = true })
		_, err = b.Guest(t.Context(), me, s.ID, hostproto.UseSession)
		wantFault(t, err, fault.Unavailable, "not_running_yet")
		b.host.script(func(h *fakeHost) {
			h.guest = func(string) (hostproto.Guest, error) { return hostproto.Guest{}, fault.New(fault.Internal, "odd") }
		})
		_, err = b.Guest(t.Context(), me, s.ID, hostproto.UseSession)
		wantFault(t, err, fault.Internal, "")
	})
}

func TestGuestOfWhatEnds(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s := b.reaches("otter", sandbox.Sleeping)
	b.host.script(func(h *fakeHost) {
		h.fail = func(c hostproto.Command) *hostproto.Failure {
			return &hostproto.Failure{Kind: "data_corrupt", Message: "a page is damaged"}
		}
	})
	_, err := b.Guest(ctx, me, s.ID, hostproto.UseSession)
	if f := wantFault(t, err, fault.Unavailable, "wake_failed"); !strings.Contains(f.Message, "a page is damaged") || f.RetryAfter == 0 {
		t.Errorf("a wake that fails: %+v", f)
	}
	b.host.script(func(h *fakeHost) { h.fail = nil; h.hold = only(sandbox.Stop) })
	op := must(b.Stop(ctx, me, s.ID, Idempotency{}))(t).Operation
	_, err = b.Guest(ctx, me, s.ID, hostproto.UseSession)
	if f := wantFault(t, err, fault.Conflict, op.ID); !strings.Contains(f.Message, "`hutch get otter --wait`") {
		t.Errorf("a stop at work: %q does not say how to wait for it", f.Message)
	}
}

// TestCancel: what can be cancelled is passed on to the host, which says how it ends.
func TestCancel(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
	op := must(b.Sleep(ctx, me, s.ID, Idempotency{}))(t).Operation
	must(b.Cancel(ctx, me, op.ID))(t)
	until(t, "the host is told", func() bool { return slices.Contains(b.host.callList(), "cancel "+op.ID) })
	must0(t, b.Report(ctx, hostproto.Report{Sandbox: s.ID, Seq: 2, Generation: 1, Operation: op.ID, Verb: sandbox.Sleep, Ended: true,
		Failure: &hostproto.Failure{Kind: "cancelled", Message: "as asked"}, At: time.Now()}))
	b.ended(op, sandbox.Cancelled)
	if got := must(b.Cancel(ctx, me, op.ID))(t); got.Status != sandbox.Cancelled {
		t.Errorf("S6: a cancel of what is cancelled: %+v", got)
	}
	b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
	del := must(b.Delete(ctx, me, s.ID, DeleteRequest{}))(t).Operation
	_, err := b.Cancel(ctx, me, del.ID)
	wantFault(t, err, fault.FailedPrecondition, "delete")
	_, err = b.Cancel(ctx, Actor{Project: "other"}, del.ID)
	wantFault(t, err, fault.NotFound, "")
}
