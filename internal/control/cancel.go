package control

import (
	"context"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Cancel asks that an operation end early, undone: its sandbox is then as it was before,
// and one that was being created is failed and has cost nothing. The wish is kept, so
// that it reaches the host whatever dies meanwhile. It may come too late: the operation
// then ends as it would have, and Wait tells how. A cancellation that is asked for twice
// is one, and of what has ended there is none.
func (c *Control) Cancel(ctx context.Context, a Actor, id string) (sandbox.Operation, error) {
	var op sandbox.Operation
	var s sandbox.Sandbox
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) (err error) {
		if op, err = operation(ctx, tx, a, id); err != nil || !op.Status.Active() || !op.CancelAt.IsZero() {
			return err
		}
		c.progress.overlay(&op)
		if no := sandbox.Uncancellable(op); no != nil {
			return no
		}
		if op.Sandbox != "" {
			if s, err = tx.Sandbox(ctx, op.Sandbox); err != nil {
				return err
			}
		}
		w := c.writer(tx, a.Project, a.KeyID, c.instant())
		op.CancelAt = w.at
		if err := tx.UpdateOperation(ctx, &op); err != nil {
			return err
		}
		return w.event(ctx, eventCancelling, op.Sandbox, op.ID, map[string]any{"kind": op.Kind})
	})
	if err == nil && op.Status.Active() {
		c.cancelling(op.ID, s)
	}
	c.progress.overlay(&op)
	return op, err
}

// eventCancelling tells that the end of an operation was asked for.
const eventCancelling = "operation.cancelling"

// cancelling passes on that an operation is to end, which its row says: to the build that
// runs here, or to its sandbox's host.
func (c *Control) cancelling(op string, s sandbox.Sandbox) {
	if s.ID == "" {
		c.builds.cancel(op)
		return
	}
	c.lanes.nudge(s)
}
