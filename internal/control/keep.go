package control

import (
	"context"
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// saveFailed says whether a condition is that of a failed save.
func saveFailed(c sandbox.Condition) bool {
	return c.Type == sandbox.Degraded && c.Reason == "save_failed"
}

// Keep lets a sandbox go on running that could not be saved (Z10): it is metered from
// now on, and its host does not try to save it again. It is done when Keep returns, also
// while its host does not answer. There is nothing to do where no save has failed.
func (c *Control) Keep(ctx context.Context, a Actor, ref string, idem Idempotency) (Result, error) {
	return c.onSandboxes(ctx, a, idem, nil, func(ctx context.Context, w *writer) (Result, error) {
		s, err := resolve(ctx, w, a, ref)
		if err != nil {
			return Result{}, err
		}
		if !s.DeletedAt.IsZero() {
			return Result{}, unknown(ref)
		}
		i := slices.IndexFunc(s.Conditions, saveFailed)
		switch {
		case s.State == sandbox.Sleeping && i >= 0:
			return Result{}, fault.New(fault.FailedPrecondition, "cannot keep %s running: it sleeps; `hutch wake %s` goes on with it", s.Name, s.Name).
				Because("state_sleeping")
		case i < 0:
			return Result{Sandbox: s, Outcome: sandbox.Done}, nil
		}
		cond := s.Conditions[i]
		s.Conditions = sandbox.ClearCondition(s.Conditions, cond.Type, cond.Reason)
		s.PolicyKeep = true
		c.change(&s, s.Policy, false)
		s.UpdatedAt = w.at
		if err := w.UpdateSandbox(ctx, &s); err != nil {
			return Result{}, err
		}
		if err := w.event(ctx, "condition.cleared", s.ID, "", cond); err != nil {
			return Result{}, err
		}
		return Result{Sandbox: s, Outcome: sandbox.Accept}, w.meter(ctx, c, s, metering.Fact{Kind: metering.Kept})
	})
}
