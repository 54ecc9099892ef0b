package control

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// TestCrashBetweenCommitAndSubmit: what was written and never sent is sent by the next
// Start.
func TestCrashBetweenCommitAndSubmit(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Close() // from here on nothing is sent, as after a kill
	r := must(b.Create(t.Context(), me, CreateRequest{Name: "otter"}))(t)
	if ids, _ := b.host.operations(sandbox.Create); len(ids) != 0 {
		t.Fatalf("the host has it already: %v", ids)
	}
	b.restart()
	b.ended(r.Operation, sandbox.Succeeded)
}

// TestRestartInTheMiddle: the host has the operation, the control plane begins anew, the
// host is handed it again and reports as if nothing had been.
func TestRestartInTheMiddle(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
	op := must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t).Operation
	until(t, "the host has it", func() bool { ids, _ := b.host.operations(sandbox.Sleep); return len(ids) == 1 })
	for range 3 {
		_, before := b.host.operations(sandbox.Sleep)
		b.restart()
		until(t, "it is handed in again", func() bool { _, calls := b.host.operations(sandbox.Sleep); return calls > before })
	}
	join := must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t)
	if join.Outcome != sandbox.Join || join.Operation.ID != op.ID {
		t.Errorf("after restarts a second sleep: %+v", join)
	}
	b.host.proceed(op.ID)
	b.ended(op, sandbox.Succeeded)
	if got := b.get(s.ID); got.State != sandbox.Sleeping {
		t.Errorf("it is %s", got.State)
	}
	if ids, _ := b.host.operations(sandbox.Sleep); len(ids) != 1 {
		t.Errorf("the host was handed %v", ids)
	}
}

// TestHostOutOfReach: the operation stays pending and is sent again until the host takes
// it. A cancelled one is not.
func TestHostOutOfReach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		away := func(h *fakeHost) {
			h.refuse = func(hostproto.Command) error { return fault.New(fault.Unavailable, "the host is away") }
		}
		s := b.ready("otter")
		b.host.script(away)
		op := must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t).Operation
		time.Sleep(10 * time.Minute)
		if got := must(b.Operation(t.Context(), me, op.ID))(t); got.Status != sandbox.Pending {
			t.Errorf("it is %s", got.Status)
		}
		if _, calls := b.host.operations(sandbox.Sleep); calls < 20 {
			t.Errorf("it was sent %d times in ten minutes", calls)
		}
		b.host.script(func(h *fakeHost) { h.refuse = nil })
		b.ended(op, sandbox.Succeeded)
		_, calls := b.host.operations(sandbox.Sleep)
		time.Sleep(10 * time.Minute)
		if _, after := b.host.operations(sandbox.Sleep); after != calls {
			t.Error("an operation that has ended was sent again")
		}
	})
}

// TestSilentHost: an operation that the host took and never spoke of again is handed in
// again, and one that it is known to have is otherwise left alone.
func TestSilentHost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := b.ready("otter")
		synctest.Wait() // what the start sends again is sent by now
		b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
		must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t)
		time.Sleep(50 * time.Second)
		if _, calls := b.host.operations(sandbox.Sleep); calls != 1 {
			t.Errorf("it was sent %d times in 50 s", calls)
		}
		time.Sleep(10 * time.Minute)
		if _, calls := b.host.operations(sandbox.Sleep); calls < 5 || calls > 12 {
			t.Errorf("it was sent %d times in eleven minutes", calls)
		}
	})
}

// TestSlowHostDoesNotHoldUpOthers: a call that hangs ends after its time, and other
// sandboxes' commands go meanwhile.
func TestSlowHostDoesNotHoldUpOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *Config) {
			c.Hosts = map[string]hostproto.Host{"local": &hanging{c.Hosts["local"].(*fakeHost)}}
			c.Limits.CallTimeout = 5 * time.Second
		})
		stuck := must(b.Create(t.Context(), me, CreateRequest{Name: "stuck"}))(t)
		quick := must(b.Create(t.Context(), me, CreateRequest{Name: "quick"}))(t)
		b.ended(quick.Operation, sandbox.Succeeded)
		if got := must(b.Operation(t.Context(), me, stuck.Operation.ID))(t); got.Status != sandbox.Pending {
			t.Errorf("the stuck one is %s", got.Status)
		}
		// Its deletion waits its turn behind the hanging call, and goes through.
		b.ended(must(b.Delete(t.Context(), me, "stuck", DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	})
}

// hanging is a host whose creation of a sandbox named stuck never answers.
type hanging struct{ *fakeHost }

func (h *hanging) Submit(ctx context.Context, c hostproto.Command) error {
	if c.Verb == sandbox.Create && c.Name == "stuck" {
		<-ctx.Done()
		return ctx.Err()
	}
	return h.fakeHost.Submit(ctx, c)
}

// TestHostIsGone: a sandbox on a host that is not connected keeps its operation pending.
func TestHostIsGone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.cfg.Hosts = map[string]hostproto.Host{"elsewhere": b.host}
	b.restart()
	r := must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t)
	until(t, "it is logged", func() bool {
		return b.log.count(func(l string) bool { return strings.Contains(l, "could not be handed") }) > 0
	})
	if got := must(b.Operation(t.Context(), me, r.Operation.ID))(t); got.Status != sandbox.Pending {
		t.Errorf("it is %s", got.Status)
	}
	if _, err := b.Usage(t.Context(), me, s.ID); !fault.Is(err, fault.Unavailable) {
		t.Errorf("usage: %v", err)
	}
	if op := must(b.Cancel(t.Context(), me, r.Operation.ID))(t); !op.Status.Active() || op.CancelAt.IsZero() {
		t.Errorf("a cancellation that waits for the host: %+v", op)
	}
}

// TestStartAndCloseRepeat: both may be called twice, and Close waits for all it started.
func TestStartAndCloseRepeat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // fails when a goroutine is left
		b := newBench(t)
		must0(t, b.Start(t.Context()))
		op := must(b.Create(t.Context(), me, CreateRequest{}))(t).Operation
		b.ended(op, sandbox.Succeeded)
		b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
		held := must(b.Create(t.Context(), me, CreateRequest{}))(t).Operation
		released := make(chan sandbox.OperationStatus)
		go func() {
			op, err := b.Wait(context.Background(), me, held.ID, time.Minute)
			if err != nil {
				t.Errorf("a wait at the close: %v", err)
			}
			released <- op.Status
		}()
		synctest.Wait()
		b.Close()
		if status := <-released; !status.Active() {
			t.Errorf("a wait at the close gives %s", status)
		}
		b.Close()
	})
}
