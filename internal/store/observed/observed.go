// Package observed tells of what goes through a store, for metrics and traces: how long
// its transactions take, and what those that were committed say has happened. It changes
// nothing of what is read or written.
package observed

import (
	"context"
	"encoding/json"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// The kinds of Watcher.Transaction.
const (
	Update = "update"
	View   = "view"
	Events = "events"
)

// Watcher is told of what was done. Its methods are called from many goroutines, return
// at once, and, but for Transaction, are called once for each fact, after its commit.
type Watcher interface {
	// Transaction tells of a call to the store, the wait for its turn included.
	Transaction(kind string, took time.Duration, err error)
	// OperationEnded tells of an operation with its outcome, its times and its steps.
	OperationEnded(op sandbox.Operation)
	// Entered tells that a sandbox is in a state.
	Entered(state sandbox.State)
	// ConditionSet tells of a condition that a sandbox has now and had not.
	ConditionSet(typ sandbox.ConditionType, reason string)
	// OutOfMemory tells of processes that were killed for want of memory.
	OutOfMemory(killed uint64)
	// Metered tells of an entry of the ledger.
	Metered(e metering.Entry)
	// Settled tells of an attempt to deliver an event to a webhook, and what became of the
	// delivery by it: pending is one that will be tried again.
	Settled(status store.DeliveryStatus)
	// EventsRead tells that events up to a number can be read, and how long ago the
	// newest of them happened.
	EventsRead(last int64, lag time.Duration)
}

// New gives the store with a watcher.
func New(s store.Store, w Watcher) store.Store { return &observed{Store: s, watcher: w} }

type observed struct {
	store.Store
	watcher Watcher
	seen    atomic.Int64 // the highest number of an event that was read
}

// Update implements store.Store.
func (o *observed) Update(ctx context.Context, fn func(context.Context, store.Tx) error) error {
	began := time.Now()
	var last *tx
	err := o.Store.Update(ctx, func(ctx context.Context, t store.Tx) error {
		last = &tx{Tx: t} // a transaction that runs again begins anew
		return fn(ctx, last)
	})
	o.watcher.Transaction(Update, time.Since(began), err)
	if err == nil && last != nil {
		for _, tell := range last.facts {
			tell(o.watcher)
		}
	}
	return err
}

// View implements store.Store.
func (o *observed) View(ctx context.Context, fn func(context.Context, store.Reader) error) error {
	began := time.Now()
	err := o.Store.View(ctx, fn)
	o.watcher.Transaction(View, time.Since(began), err)
	return err
}

// LastEvent implements store.Store.
func (o *observed) LastEvent(ctx context.Context) (int64, error) {
	last, err := o.Store.LastEvent(ctx)
	if err == nil {
		o.advance(last)
	}
	return last, err
}

// advance says whether a number is higher than all before it.
func (o *observed) advance(seq int64) bool {
	for {
		seen := o.seen.Load()
		if seq <= seen {
			return false
		}
		if o.seen.CompareAndSwap(seen, seq) {
			return true
		}
	}
}

// Events implements store.Store.
func (o *observed) Events(ctx context.Context, f store.EventFilter) ([]store.Event, error) {
	began := time.Now()
	events, err := o.Store.Events(ctx, f)
	o.watcher.Transaction(Events, time.Since(began), err)
	if n := len(events); n > 0 {
		if last := events[n-1]; o.advance(last.Seq) {
			o.watcher.EventsRead(last.Seq, time.Since(last.At))
		}
	}
	return events, err
}

// SettleDelivery implements store.Webhooks.
func (o *observed) SettleDelivery(ctx context.Context, s store.DeliverySettlement) error {
	err := o.Store.SettleDelivery(ctx, s)
	if err == nil && s.Attempt != nil {
		o.watcher.Settled(s.Status)
	}
	return err
}

// tx remembers what a transaction says, until it is known to be committed.
type tx struct {
	store.Tx
	ops   map[string]sandbox.Operation // as they were last written
	facts []func(Watcher)
}

func (t *tx) wrote(op sandbox.Operation) {
	if t.ops == nil {
		t.ops = map[string]sandbox.Operation{}
	}
	t.ops[op.ID] = op
}

// InsertOperation implements store.Tx.
func (t *tx) InsertOperation(ctx context.Context, op sandbox.Operation) error {
	err := t.Tx.InsertOperation(ctx, op)
	if err == nil {
		t.wrote(op)
	}
	return err
}

// UpdateOperation implements store.Tx.
func (t *tx) UpdateOperation(ctx context.Context, op *sandbox.Operation) error {
	err := t.Tx.UpdateOperation(ctx, op)
	if err == nil {
		t.wrote(*op)
	}
	return err
}

// AddEvent implements store.Tx. Each fact has one event, so that the events say what
// has happened, once.
func (t *tx) AddEvent(ctx context.Context, e store.Event) error {
	if err := t.Tx.AddEvent(ctx, e); err != nil {
		return err
	}
	subject, what, _ := strings.Cut(e.Type, ".")
	switch {
	case subject == "operation" && what != "started":
		if op, ok := t.ops[e.Operation]; ok {
			t.facts = append(t.facts, func(w Watcher) { w.OperationEnded(op) })
		}
	case e.Type == "sandbox.out_of_memory":
		var data struct {
			Killed uint64 `json:"killed"`
		}
		if json.Unmarshal(e.Data, &data) == nil {
			t.facts = append(t.facts, func(w Watcher) { w.OutOfMemory(data.Killed) })
		}
	case subject == "sandbox":
		t.facts = append(t.facts, func(w Watcher) { w.Entered(sandbox.State(what)) })
	case e.Type == "condition.set":
		var c sandbox.Condition
		if json.Unmarshal(e.Data, &c) == nil {
			t.facts = append(t.facts, func(w Watcher) { w.ConditionSet(c.Type, c.Reason) })
		}
	}
	return nil
}

// EnterFact implements store.Tx.
func (t *tx) EnterFact(ctx context.Context, m metering.Meter, f metering.Fact, entries []metering.Entry) error {
	if err := t.Tx.EnterFact(ctx, m, f, entries); err != nil {
		return err
	}
	for _, e := range entries {
		t.facts = append(t.facts, func(w Watcher) { w.Metered(e) })
	}
	return nil
}
