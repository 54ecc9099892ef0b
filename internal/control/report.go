package control

import (
	"context"
	"encoding/json"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Report implements hostproto.Reporter. A report is applied in one transaction, once,
// and in the order of its sandbox's numbers; nil means that it is durable or not
// needed. Unavailable with reason "gap" asks for the reports before it; NotFound means
// that the sandbox is not known here, so that the host should keep the report.
func (c *Control) Report(ctx context.Context, r hostproto.Report) error {
	if r.Seq == 0 {
		c.progress.note(r.Operation, r.Step, r.Progress, r.At)
		return nil
	}
	if r.At.IsZero() {
		r.At = c.instant()
	}
	var s sandbox.Sandbox
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) (err error) {
		if s, err = tx.Sandbox(ctx, r.Sandbox); err != nil {
			return err
		}
		return c.report(ctx, tx, s, r)
	})
	if fault.Is(err, fault.NotFound) {
		c.inventory.note(c.log, r.Sandbox, "a host reports on a sandbox that is not known here; it can be adopted, and nothing of it is removed")
	}
	if err == nil && (r.Event.Boots() || r.PolicyChange != 0 && r.PolicyChange != s.PolicyChange) {
		c.lanes.nudge(s) // a host may have refused an operation until this was known, or has another policy
	}
	if err == nil && r.Erased { // its template may have been deleted meanwhile
		c.builds.remove(c, s.Spec.Version)
	}
	return err
}

func (c *Control) report(ctx context.Context, tx store.Tx, s sandbox.Sandbox, r hostproto.Report) error {
	op, err := reported(ctx, tx, s, r)
	if err != nil {
		return err
	}
	switch v := judge(s, op, r); v {
	case verdictApply:
	case verdictEarly:
		return fault.New(fault.Unavailable, "cannot take report %d of %s: report %d comes first; send from there on", r.Seq, s.ID, s.HostSeq+1).
			Because("gap")
	default:
		c.log.Debug("a report changes nothing", "sandbox", s.ID, "op", r.Operation, "seq", r.Seq, "reason", v)
		if v == verdictOld && r.Seq == s.HostSeq+1 {
			s.HostSeq = r.Seq // the reports after it must not wait for it
			return tx.UpdateSandbox(ctx, &s)
		}
		return nil
	}
	own := op == nil && r.Cause != "" && r.Ended
	if own {
		op = ownOperation(s, r)
	}
	c.progress.overlay(op)
	w := c.writer(tx, s.Project, hostActor, r.At)
	if op != nil {
		w.actor = op.Actor
	}
	a := apply(s, op, r)
	if r.Event == sandbox.EventUndeleted && a.changed {
		if a.sandbox.Name, err = c.nameBack(ctx, w, a.sandbox, op); err != nil {
			return err
		}
	}
	if own {
		if err := w.InsertOperation(ctx, *op); err != nil {
			return err
		}
	}
	if err := c.write(ctx, w, a, op, r); err != nil {
		return err
	}
	if op != nil && op.Kind == sandbox.Fork && r.Ended && r.Failure != nil {
		return c.unborn(ctx, w, *op, *r.Failure, nil)
	}
	return nil
}

// erasure is the data of the event sandbox.erased: why and when, where nobody asked.
type erasure struct {
	Cause sandbox.Cause `json:"cause,omitempty"`
	Due   time.Time     `json:"due,omitzero"`
}

// deadlineMove is the data of the event deadline.moved; what is left out is none.
type deadlineMove struct {
	From time.Time `json:"from,omitzero"`
	To   time.Time `json:"to,omitzero"`
	Turn string    `json:"turn,omitempty"` // the harness turn that put it off (A3)
}

// reported finds the operation that a report is about. One of another sandbox is a
// host's mistake and counts as none.
func reported(ctx context.Context, tx store.Tx, s sandbox.Sandbox, r hostproto.Report) (*sandbox.Operation, error) {
	if r.Operation == "" {
		return nil, nil
	}
	op, err := tx.Operation(ctx, r.Operation)
	if fault.Is(err, fault.NotFound) || err == nil && op.Sandbox != s.ID {
		return nil, nil
	}
	return &op, err
}

// write stores what a report made of the rows, with the events that tell of it.
func (c *Control) write(ctx context.Context, w *writer, a applied, op *sandbox.Operation, r hostproto.Report) error {
	s := a.sandbox
	for _, err := range a.refused {
		c.log.Error("a part of a report cannot be and was left out", "sandbox", s.ID, "op", r.Operation, "seq", r.Seq, "err", err)
	}
	if err := w.UpdateSandbox(ctx, &s); err != nil {
		return err
	}
	if a.changed {
		change := stateChange{State: s.State, From: a.from, Cause: r.Event, Reason: s.Reason, Message: s.Message, Generation: s.Generation}
		if err := w.event(ctx, "sandbox."+string(s.State), s.ID, r.Operation, change); err != nil {
			return err
		}
		if err := w.meterChange(ctx, c, s, r); err != nil {
			return err
		}
		if r.Event != sandbox.EventSlept && r.Event != sandbox.EventWoken { // no turn outlives the programs
			if err := w.DropLeases(ctx, s.ID, ""); err != nil {
				return err
			}
		}
		switch s.State {
		case sandbox.Stopped, sandbox.Failed, sandbox.Archived, sandbox.Deleted: // no token outlives the programs (N1)
			if err := w.EndPortGrants(ctx, s.ID, s.State == sandbox.Deleted); err != nil {
				return err
			}
		}
		if r.Event.Boots() { // what the sleep before missed is a matter of that wake
			if err := w.PutMissed(ctx, s.ID, nil); err != nil {
				return err
			}
		}
		if err := w.receipt(ctx, s, op, r); err != nil {
			return err
		}
		c.log.Info("the state of a sandbox changed", "sandbox", s.ID, "op", r.Operation, "from", a.from, "state", s.State, "cause", r.Event)
	}
	if r.Erased {
		if err := w.event(ctx, "sandbox.erased", s.ID, r.Operation, erasure{Cause: r.Cause, Due: r.Due}); err != nil {
			return err
		}
	}
	if r.OOMKills > 0 {
		killed := map[string]any{"killed": r.OOMKills, "message": "the sandbox ran out of memory and processes in it were killed; a new one with more --memory has room"}
		if err := w.event(ctx, "sandbox.out_of_memory", s.ID, "", killed); err != nil {
			return err
		}
	}
	if !a.changed && !s.Deadline.Equal(a.moved) {
		move := deadlineMove{From: a.moved, To: s.Deadline, Turn: r.Turn}
		if err := w.event(ctx, "deadline.moved", s.ID, r.Operation, move); err != nil {
			return err
		}
	}
	for _, cond := range a.cleared {
		if err := w.event(ctx, "condition.cleared", s.ID, r.Operation, cond); err != nil {
			return err
		}
		// A failed stop that a sleep has taken the place of is not tried again either.
		if saveFailed(cond) && (s.State == sandbox.Ready || s.State == sandbox.Sleeping) {
			if err := w.meter(ctx, c, s, metering.Fact{Kind: metering.Kept}); err != nil {
				return err
			}
		}
	}
	for _, cond := range a.set {
		if err := w.event(ctx, "condition.set", s.ID, r.Operation, cond); err != nil {
			return err
		}
	}
	if m := r.Missed; m != nil {
		if err := w.missed(ctx, s.ID, *m); err != nil {
			return err
		}
	}
	if r.Identity != nil {
		items, err := json.Marshal(r.Identity)
		if err != nil {
			return err
		}
		if err := w.PutIdentity(ctx, s.ID, items); err != nil {
			return err
		}
	}
	if !a.ended {
		return nil
	}
	if err := w.end(ctx, op); err != nil {
		return err
	}
	return w.meterEnd(ctx, c, a, op, r)
}
