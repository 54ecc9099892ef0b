package control

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// reasonOvertaken is the reason of a host's Conflict when the sandbox has gone on to a
// newer generation than the one that a command was admitted on.
const reasonOvertaken = "overtaken"

// final are the kinds of a host's no that trying again does not change.
var final = []fault.Kind{fault.NotFound, fault.Unsupported, fault.InvalidArgument, fault.FailedPrecondition}

// refused deals with a command that a host did not take. A host out of reach gets it
// again later: then refused gives the error back. A host that refuses ends the
// operation, except a deletion. A command that facts have overtaken is admitted again
// once the facts are known here: stop of a stopped one is done, a sleep or a fork is
// not what was asked for any more.
func (c *Control) refused(ctx context.Context, h hostproto.Host, cmd hostproto.Command, no error) error {
	f := fault.Of(no)
	overtaken := f.Kind == fault.Conflict && f.Reason == reasonOvertaken
	if !overtaken && !slices.Contains(final, f.Kind) || cmd.Verb == sandbox.Delete {
		return no
	}
	var has []string
	if cmd.Verb == sandbox.Fork {
		// A host that has forgotten a fork may still have its children, and a report on
		// them under way.
		var err error
		if has, err = h.Inventory(ctx); err != nil {
			return no
		}
	}
	again := false
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		again = false
		op, err := tx.Operation(ctx, cmd.Operation)
		if err != nil {
			return err
		}
		s, err := tx.Sandbox(ctx, cmd.Sandbox)
		if err != nil {
			return err
		}
		w := c.writer(tx, op.Project, op.Actor, c.instant())
		if !overtaken {
			return c.giveUp(ctx, w, s, op, f, has)
		}
		if s.Generation <= op.Generation && op.Status.Active() {
			return no // the host's report is on its way
		}
		switch d := sandbox.Admit(s, nil, requestOf(op)); {
		case !op.Status.Active():
			return c.giveUp(ctx, w, s, op, f, has)
		case d.Outcome == sandbox.Done:
			op.Status, op.Progress, op.EndedAt = sandbox.Succeeded, 1, w.at
			if err := w.end(ctx, &op); err != nil {
				return err
			}
			return w.meterUnchanged(ctx, c, s, op, false)
		case d.Outcome == sandbox.Accept && d.Verb == op.Kind && op.Kind != sandbox.Sleep && op.Kind != sandbox.Fork:
			op.Generation, again = s.Generation, true
			return tx.UpdateOperation(ctx, &op)
		}
		return c.giveUp(ctx, w, s, op, f, has)
	})
	if err == nil && again {
		err = no // sent again with the present generation, at the next turn
		c.lanes.nudge(sandbox.Sandbox{ID: cmd.Sandbox})
	}
	return err
}

// requestOf gives the request that an operation was admitted for.
func requestOf(op sandbox.Operation) sandbox.Request {
	r := sandbox.Request{Verb: op.Kind}
	var p forkParams
	if op.Kind == sandbox.Fork && json.Unmarshal(op.Params, &p) == nil {
		r.Mode = p.Mode
	}
	return r
}

// giveUp ends an operation that its host refuses, and the creation of those children of
// a fork that the host does not have, also where the fork itself has ended.
func (c *Control) giveUp(ctx context.Context, w *writer, s sandbox.Sandbox, op sandbox.Operation, f *fault.Fault, has []string) error {
	why := hostproto.Failure{Kind: string(f.Kind), Message: f.Message, Reason: f.Reason}
	if op.Kind == sandbox.Create && op.Status.Active() {
		return c.notCreated(ctx, w, &op, why)
	}
	if op.Status.Active() {
		c.progress.overlay(&op)
		finish(&op, hostproto.Report{Failure: &why, At: w.at})
		if err := w.end(ctx, &op); err != nil {
			return err
		}
		if err := w.meterUnchanged(ctx, c, s, op, false); err != nil {
			return err
		}
	}
	if op.Kind == sandbox.Fork {
		return c.unborn(ctx, w, op, why, has)
	}
	return nil
}
