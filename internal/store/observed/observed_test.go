package observed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/sqlite"
	"github.com/hutchrun/hutch/internal/store/storetest"
)

// The wrapper is a store like any other.
func TestSuite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Engine{Open: func(t *testing.T, dir string) store.Store {
		s, err := sqlite.Open(t.Context(), filepath.Join(dir, "hutch.db"))
		if err != nil {
			t.Fatal(err)
		}
		return New(s, &notes{})
	}})
}

// notes are what a watcher was told.
type notes struct {
	mu  sync.Mutex
	all []string
}

func (n *notes) add(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, fmt.Sprintf(format, args...))
}

// take gives what was told since the last time.
func (n *notes) take() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := n.all
	n.all = nil
	return out
}

func (n *notes) Transaction(kind string, took time.Duration, err error) {
	n.add("%s %v %v", kind, took > 0, err != nil)
}
func (n *notes) OperationEnded(op sandbox.Operation) {
	n.add("%s %s %d steps", op.Kind, op.Status, len(op.Timings))
}
func (n *notes) Entered(state sandbox.State)                      { n.add("%s", state) }
func (n *notes) ConditionSet(t sandbox.ConditionType, why string) { n.add("%s: %s", t, why) }
func (n *notes) OutOfMemory(killed uint64)                        { n.add("%d killed", killed) }
func (n *notes) Metered(e metering.Entry)                         { n.add("metered %s", e.Reason) }
func (n *notes) Settled(s store.DeliveryStatus)                   { n.add("delivery %s", s) }
func (n *notes) EventsRead(last int64, lag time.Duration) {
	n.add("event %d, late %v", last, lag > time.Minute)
}

// What a committed transaction says is told once; what was rolled back, or ran a second
// time, is not.
func TestFactsAreToldOnce(t *testing.T) {
	t.Parallel()
	n := &notes{}
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "hutch.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	s := New(again{db}, n)
	at := time.Now().Add(-time.Hour).UTC().Truncate(time.Millisecond)
	op := sandbox.Operation{ID: "op_1", Project: "p", Sandbox: "sbx_1", Kind: sandbox.Sleep, Status: sandbox.Pending, CreatedAt: at, Version: 1}
	event := func(typ string, data any) store.Event {
		b, err := json.Marshal(data)
		if err != nil {
			t.Fatal(err)
		}
		return store.Event{ID: "ev_" + typ, Project: "p", Sandbox: "sbx_1", Operation: "op_1", Type: typ, At: at, Data: b}
	}
	update := func(fn func(context.Context, store.Tx) error) []string {
		t.Helper()
		n.take()
		if err := s.Update(t.Context(), fn); err != nil {
			t.Fatal(err)
		}
		return n.take()
	}
	want := func(got []string, want ...string) {
		t.Helper()
		if !slices.Equal(got, append([]string{"update true false"}, want...)) {
			t.Errorf("told of %q, want %q", got, want)
		}
	}
	want(update(func(ctx context.Context, tx store.Tx) error {
		return errors.Join(
			tx.InsertProject(ctx, store.Project{ID: "p", Name: "p", CreatedAt: at}),
			tx.InsertSandbox(ctx, sandbox.Sandbox{ID: "sbx_1", Project: "p", Name: "box", State: sandbox.Ready, Version: 1, CreatedAt: at}),
			tx.InsertOperation(ctx, op), tx.AddEvent(ctx, event("operation.started", nil)))
	}))
	op.Status, op.EndedAt, op.Timings = sandbox.Errored, at.Add(time.Second), []sandbox.StepTime{{Step: "pause"}, {Step: "capture"}}
	now := op
	want(update(func(ctx context.Context, tx store.Tx) error {
		op := now // as the function would read it
		return errors.Join(tx.UpdateOperation(ctx, &op), tx.AddEvent(ctx, event("operation.failed", nil)),
			tx.AddEvent(ctx, event("condition.set", sandbox.Condition{Type: sandbox.Degraded, Reason: "save_failed"})),
			tx.AddEvent(ctx, event("condition.cleared", sandbox.Condition{Type: sandbox.Degraded, Reason: "disk_full"})),
			tx.AddEvent(ctx, event("sandbox.out_of_memory", map[string]any{"killed": 3})),
			tx.AddEvent(ctx, event("sandbox.sleeping", nil)), tx.AddEvent(ctx, event("deadline.moved", nil)))
	}), "sleep failed 2 steps", "degraded: save_failed", "3 killed", "sleeping")

	// The result of an operation that has ended is written without its ending again.
	want(update(func(ctx context.Context, tx store.Tx) error {
		op, err := tx.Operation(ctx, "op_1")
		op.Result = json.RawMessage("{}")
		return errors.Join(err, tx.UpdateOperation(ctx, &op))
	}))
	broken := fault.New(fault.Conflict, "no")
	err = s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		return errors.Join(tx.AddEvent(ctx, event("sandbox.ready", nil)), broken)
	})
	if got := n.take(); !errors.Is(err, broken) || !slices.Equal(got, []string{"update true true"}) {
		t.Errorf("%v, told of %q", err, got)
	}

	events, err := s.Events(t.Context(), store.EventFilter{Limit: 100})
	if err != nil || len(events) != 7 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	if _, err := s.Events(t.Context(), store.EventFilter{Limit: 100}); err != nil { // an old reader's
		t.Fatal(err)
	}
	if got := n.take(); !slices.Equal(got, []string{"events true false", "event 7, late true", "events true false"}) {
		t.Errorf("told of %q", got)
	}
}

// again is a store whose transactions run twice, as one that lost against another does.
type again struct{ store.Store }

var errAgain = errors.New("again")

func (a again) Update(ctx context.Context, fn func(context.Context, store.Tx) error) error {
	err := a.Store.Update(ctx, func(ctx context.Context, tx store.Tx) error { return errors.Join(fn(ctx, tx), errAgain) })
	if !errors.Is(err, errAgain) {
		return err
	}
	return a.Store.Update(ctx, fn)
}

// settling answers every settlement in one way.
type settling struct {
	store.Store
	err error
}

func (s settling) SettleDelivery(context.Context, store.DeliverySettlement) error { return s.err }

// An attempt counts when it was made and written.
func TestAttemptsAreToldOnce(t *testing.T) {
	t.Parallel()
	n := &notes{}
	attempt := &store.DeliveryAttempt{}
	settle := func(err error, s store.DeliverySettlement) {
		if got := New(settling{err: err}, n).SettleDelivery(t.Context(), s); !errors.Is(got, err) {
			t.Errorf("got %v, want %v", got, err)
		}
	}
	settle(nil, store.DeliverySettlement{Status: store.DeliveryDelivered, Attempt: attempt})
	settle(nil, store.DeliverySettlement{Status: store.DeliveryPending, Attempt: attempt})
	settle(nil, store.DeliverySettlement{Status: store.DeliveryFailed}) // given up unsent
	settle(errAgain, store.DeliverySettlement{Status: store.DeliveryDelivered, Attempt: attempt})
	if got := n.take(); !slices.Equal(got, []string{"delivery delivered", "delivery pending"}) {
		t.Errorf("told of %q", got)
	}
}
