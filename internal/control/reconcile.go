package control

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// resendAfter is how many periods an operation that its host has taken is left alone
// before it is handed in again, which makes the host report anew.
const resendAfter = 4

// every calls fn now and then until ctx ends.
func every(ctx context.Context, d time.Duration, fn func(context.Context)) {
	ticker := time.NewTicker(d)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			fn(ctx)
		}
	}
}

func (c *Control) reconcileLoop(ctx context.Context) {
	c.reconcile(ctx)
	every(ctx, c.limits.ReconcileEvery, c.reconcile)
}

// flushLoop writes progress now and then, and once more at the end.
func (c *Control) flushLoop(ctx context.Context) {
	every(ctx, c.limits.FlushEvery, c.flush)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.limits.CallTimeout)
	defer cancel()
	c.flush(last)
}

func (c *Control) pruneLoop(ctx context.Context) {
	c.prune(ctx)
	every(ctx, c.limits.PruneEvery, c.prune)
}

// reconcile reads everything that is active and has what its host does not have, or
// has not reported on for long, sent again. It may be called at any time.
func (c *Control) reconcile(ctx context.Context) {
	var builds []sandbox.Operation
	var rows []sandbox.Sandbox
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		ops, err := r.ActiveOperations(ctx)
		if err != nil {
			return err
		}
		for _, op := range ops {
			if op.Kind == sandbox.BuildTemplate {
				if c.mine(op) {
					builds = append(builds, op)
				}
				continue
			}
			if op.CancelAt.IsZero() && c.now().Sub(c.progress.acceptedAt(op.ID)) < resendAfter*c.limits.ReconcileEvery {
				continue
			}
			s, err := r.Sandbox(ctx, op.Sandbox)
			if err != nil {
				return err
			}
			rows = append(rows, s)
		}
		pending, err := r.Sandboxes(ctx, store.SandboxFilter{PolicyPending: true})
		rows = append(rows, pending...)
		return err
	})
	if err != nil {
		if ctx.Err() == nil {
			c.log.Error("the active operations cannot be read; it will be tried again", "err", err)
		}
		return
	}
	for _, op := range builds {
		c.builds.ensure(c, op)
		if !op.CancelAt.IsZero() {
			c.builds.cancel(op.ID)
		}
	}
	for _, s := range rows {
		c.lanes.nudge(s)
	}
	c.takeStock(ctx)
}

// inventory remembers what was said about things on hosts that the database does not
// know, so that each is said once.
type inventory struct {
	mu   sync.Mutex
	seen map[string]bool
}

func (i *inventory) note(log *slog.Logger, id, what string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.seen[id] {
		i.seen[id] = true
		log.Warn(what, "sandbox", id)
	}
}

// takeStock compares what hosts have with what is known. It removes nothing (R9).
func (c *Control) takeStock(ctx context.Context) {
	for _, id := range c.hostIDs() {
		call, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
		ids, err := c.hosts[id].Inventory(call)
		cancel()
		if err != nil {
			c.log.Debug("a host did not say what it has", "host", id, "err", err)
			continue
		}
		err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
			known, err := r.SandboxNames(ctx, ids)
			if err != nil {
				return err
			}
			for _, sandboxID := range ids {
				if _, ok := known[sandboxID]; !ok {
					c.inventory.note(c.log, sandboxID, "a host has a sandbox that is not known here; it can be adopted, and nothing of it is removed")
				}
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			c.log.Error("the inventory of a host could not be compared", "host", id, "err", err)
		}
	}
}

// prune forgets what is kept for a time only.
func (c *Control) prune(ctx context.Context) {
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		now := c.instant()
		if err := tx.PruneRequests(ctx, now.Add(-c.limits.RequestKeep)); err != nil {
			return err
		}
		return tx.PruneHistory(ctx, now.Add(-c.limits.HistoryKeep))
	})
	if err != nil && ctx.Err() == nil {
		c.log.Error("what is too old could not be pruned; it will be tried again", "err", err)
	}
}
