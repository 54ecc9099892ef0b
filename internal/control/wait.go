package control

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// waiters are the calls that wait for an operation's end. One goroutine follows the
// events and tells them; none asks the database again and again.
type waiters struct {
	mu sync.Mutex
	m  map[string]map[chan struct{}]bool // by operation
}

func newWaiters() *waiters { return &waiters{m: map[string]map[chan struct{}]bool{}} }

// add gives a channel that is closed when the operation has ended, and a function that
// takes it away again.
func (ws *waiters) add(op string) (<-chan struct{}, func()) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.m[op] == nil {
		ws.m[op] = map[chan struct{}]bool{}
	}
	ch := make(chan struct{})
	ws.m[op][ch] = true
	return ch, func() {
		ws.mu.Lock()
		defer ws.mu.Unlock()
		delete(ws.m[op], ch)
		if len(ws.m[op]) == 0 {
			delete(ws.m, op)
		}
	}
}

func (ws *waiters) release(op string) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for ch := range ws.m[op] {
		close(ch)
	}
	delete(ws.m, op)
}

func (ws *waiters) releaseAll() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, set := range ws.m {
		for ch := range set {
			close(ch)
		}
	}
	clear(ws.m)
}

// watch follows the events from a number on and releases who waits for an operation
// that has ended.
func (c *Control) watch(ctx context.Context, after int64) {
	for {
		committed := c.store.Committed()
		events, err := c.store.Events(ctx, store.EventFilter{After: after, Limit: int(c.limits.PageMax)})
		if f := fault.Of(err); f != nil && f.Reason == store.ReasonPruned {
			// This server stood still for longer than events are kept.
			after = 0
			c.feed.stop()
			continue
		}
		c.feed.add(events)
		if err != nil && ctx.Err() == nil {
			c.log.Error("the events cannot be read; waiting calls hear of nothing until they can", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(c.limits.FlushEvery):
			}
		}
		for _, e := range events {
			after = e.Seq
			if strings.HasPrefix(e.Type, "sandbox.") || strings.HasPrefix(e.Type, "operation.") || e.Type == "project.updated" {
				c.budgets.wake() // the spending goes another way from here
			}
			switch {
			case !strings.HasPrefix(e.Type, "operation."):
			case e.Type == eventCancelling:
				if c.shared {
					c.admitted(ctx, e)
				}
			case e.Type != "operation.started":
				c.progress.forget(e.Operation)
				c.waiters.release(e.Operation)
			case c.shared && e.Sandbox != "":
				c.admitted(ctx, e)
			}
		}
		if len(events) > 0 || err != nil && ctx.Err() == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-committed:
		}
	}
}

// admitted hands on an operation, or its cancellation, that another server may have
// admitted for a host that is connected here. One that was admitted here is handed in a second time at most,
// which hosts take without harm. What fails is left to the reconciler.
func (c *Control) admitted(ctx context.Context, e store.Event) {
	if e.Sandbox == "" {
		c.builds.cancel(e.Operation)
		return
	}
	if e.Type != eventCancelling && !c.progress.acceptedAt(e.Operation).IsZero() {
		return
	}
	var s sandbox.Sandbox
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		s, err = r.Sandbox(ctx, e.Sandbox)
		return err
	})
	if err != nil {
		c.log.Debug("an operation that began is not handed on yet", "sandbox", e.Sandbox, "op", e.Operation, "err", err)
		return
	}
	c.lanes.nudge(s)
}

// Wait holds until the operation ends or the time is over, and gives it as it then
// is: a wait that ran out is no error. The longest is Limits.WaitMax. It hears of the
// end only between Start and Close.
func (c *Control) Wait(ctx context.Context, a Actor, id string, d time.Duration) (sandbox.Operation, error) {
	if d < 0 || d > c.limits.WaitMax {
		return sandbox.Operation{}, invalid("wait", "cannot wait %s: a wait is at most %s; wait again after it", d, c.limits.WaitMax)
	}
	ended, forget := c.waiters.add(id)
	defer forget()
	op, err := c.Operation(ctx, a, id)
	if err != nil || !op.Status.Active() || d == 0 {
		return op, err
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return op, fault.Wrap(context.Cause(ctx), fault.Cancelled, "the wait for %s was cancelled; the operation goes on", id)
	case <-timer.C:
	case <-ended:
	}
	return c.Operation(ctx, a, id)
}
