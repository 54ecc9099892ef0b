package hostagent

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// When more falls due than is done at a time, what is due longest has the next turn, and
// gets it at once with the end of another.
func TestOverdueTakeTurns_A7(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const others = 12
	held := make(chan struct{})
	w.setPoint(func(ctx context.Context, verb sandbox.Verb, step string, do func(context.Context) error) error {
		if verb == sandbox.Stop && step == sandbox.StepPrepare {
			select {
			case <-held:
			case <-ctx.Done():
			}
		}
		return do(ctx)
	})
	born := func(id string, ttl time.Duration) {
		cmd := w.command(id, sandbox.Create)
		p := sandbox.DefaultPolicy()
		p.TTL = ttl
		cmd.Policy = &p
		w.must(cmd)
	}
	for i := range autosMost {
		born(fmt.Sprint("first-", i), time.Second)
	}
	eventually(t, "the first to be at work", func() bool { return w.agent.autos.Load() == autosMost })
	for i := range others {
		born(fmt.Sprintf("later-%02d", i), time.Second)
	}
	eventually(t, "the others to wait", func() bool {
		w.agent.overdue.mu.Lock()
		defer w.agent.overdue.mu.Unlock()
		return len(w.agent.overdue.since) == others
	})
	var longest string
	var due time.Time
	w.agent.overdue.mu.Lock()
	for o, since := range w.agent.overdue.since {
		if longest == "" || since.Before(due) {
			longest, due = o.id, since
		}
	}
	w.agent.overdue.mu.Unlock()
	w.agent.autos.Add(-1) // as the end of one that is at work
	w.agent.overdue.next()
	eventually(t, longest+" to have its turn", func() bool {
		o, err := w.agent.find(longest)
		begun := false
		return err == nil && o.call(t.Context(), func() error { begun = o.rec.Job != nil; return nil }) == nil && begun
	})
	w.agent.autos.Add(1)
	close(held)
	for i := range others {
		id := fmt.Sprintf("later-%02d", i)
		eventually(t, id+" to stop", func() bool { return w.book.state(id) == sandbox.Stopped })
	}
}
