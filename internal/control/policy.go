package control

import (
	"context"
	"math"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// TTL is a length of time as a caller gives it: nothing, none, or a number of seconds.
type TTL struct {
	Given   bool
	None    bool
	Seconds int64
}

// length is what was asked for, before where nothing was. Nothing is clipped: what
// cannot be held is not ok.
func (t TTL) length(before time.Duration) (d time.Duration, ok bool) {
	switch {
	case !t.Given:
		return before, true
	case t.None:
		return 0, true
	case t.Seconds <= 0 || t.Seconds > math.MaxInt64/int64(time.Second):
		return 0, false
	}
	return time.Duration(t.Seconds) * time.Second, true
}

// set gives the policy with the auto-stop that was asked for (A1).
func (t TTL) set(p sandbox.Policy, mode sandbox.SleepMode, b sandbox.Bounds) (sandbox.Policy, error) {
	ttl, ok := t.length(p.TTL)
	if !ok {
		return p, invalid("ttl_seconds", "an auto-stop of %d seconds is not possible; it can be %s to %s, or none", t.Seconds, b.TTLMin, b.TTLMax)
	}
	p.TTL = ttl
	return p, p.Check(mode, "", b)
}

// policyOf gives the policy of a new sandbox: its project may have an auto-stop of its own
// for those where nobody names one (P1).
func (w *writer) policyOf(ctx context.Context, p sandbox.Policy, asked TTL) (sandbox.Policy, error) {
	if asked.Given {
		return p, nil
	}
	owner, err := w.Project(ctx, w.project)
	if err == nil && owner.TTL != 0 {
		p.TTL = owner.TTL
	}
	return p, err
}

// PolicyRequest is what else a caller asks of a sandbox's life (A4, A8). What is "" or
// not given stays as it is.
type PolicyRequest struct {
	OnDeadline    string
	SleepDeadline string // run or paused
	ArchiveAfter  TTL
	DeleteAfter   TTL
}

// set gives the policy with what was asked for. Whether that can be, its Check says.
func (r PolicyRequest) set(p sandbox.Policy) (sandbox.Policy, error) {
	var ok bool
	if p.ArchiveAfter, ok = r.ArchiveAfter.length(p.ArchiveAfter); !ok {
		return p, invalid("archive_after", "it cannot be archived after %d seconds; use 1 or more, or null for never", r.ArchiveAfter.Seconds)
	}
	if p.DeleteAfter, ok = r.DeleteAfter.length(p.DeleteAfter); !ok {
		return p, invalid("delete_after", "it cannot be deleted after %d seconds; use 1 or more, or null for never", r.DeleteAfter.Seconds)
	}
	if r.OnDeadline != "" {
		p.OnDeadline = sandbox.Verb(r.OnDeadline)
	}
	switch r.SleepDeadline {
	case "":
	case "run":
		p.SleepDeadline = sandbox.DeadlineRunning
	case "paused":
		p.SleepDeadline = sandbox.DeadlinePaused
	default:
		return p, invalid("sleep.deadline", "%s is nothing that a deadline does during sleep; use run or paused", shown(r.SleepDeadline))
	}
	return p, nil
}

// change puts a new policy into the row, for the host to take note of. The timers of one
// at rest have it at once.
func (c *Control) change(s *sandbox.Sandbox, p sandbox.Policy, restart bool) {
	*s = s.Rest(s.AtRest().With(p, restart, c.clocks.at(s.Host, c.instant())))
	s.Policy = p
	s.PolicyChange = s.Version + 1 // that of the row with the change: it grows
	s.PolicyRestart = s.PolicyRestart || restart
}

// wholeSeconds is a length of time as events write it, nil for none.
func wholeSeconds(d time.Duration) *int64 {
	if d == 0 {
		return nil
	}
	n := int64(d / time.Second)
	return &n
}

// updated is the data of the event sandbox.updated.
func updated(s sandbox.Sandbox) map[string]any {
	return map[string]any{
		"name": s.Name, "labels": s.Labels, "ttl_seconds": wholeSeconds(s.Policy.TTL),
		"on_deadline": s.Policy.OnDeadline, "sleep_deadline": s.Policy.SleepDeadline,
		"archive_after": wholeSeconds(s.Policy.ArchiveAfter), "delete_after": wholeSeconds(s.Policy.DeleteAfter),
	}
}

// boot is the use case of the verbs that begin an auto-stop, with another one where ttl
// names it. Where the sandbox runs already, or is being brought there, the change counts
// all the same, as every change does (A2): it is never passed over.
func (c *Control) boot(ctx context.Context, a Actor, ref string, verb sandbox.Verb, ttl TTL, idem Idempotency) (Result, error) {
	return c.onSandboxes(ctx, a, idem, nil, func(ctx context.Context, w *writer) (Result, error) {
		r, err := w.admit(ctx, c, a, ref, sandbox.Request{Verb: verb}, hostFacts{}, nil)
		if err != nil {
			return Result{}, err
		}
		p, err := ttl.set(r.Sandbox.Policy, r.Sandbox.Spec.Sleep, c.limits.Bounds)
		boots := r.Outcome == sandbox.Accept && r.Operation.Kind == sandbox.Resume
		if err == nil && (boots || ttl.Given) {
			err = w.planAllows(ctx, c, r.Sandbox, p)
		}
		if err != nil || !ttl.Given {
			return r, err
		}
		c.change(&r.Sandbox, p, true)
		r.Sandbox.UpdatedAt = w.at
		if err := w.UpdateSandbox(ctx, &r.Sandbox); err != nil {
			return Result{}, err
		}
		return r, w.event(ctx, "sandbox.updated", r.Sandbox.ID, "", updated(r.Sandbox))
	})
}

// tellPolicy hands a changed policy to the sandbox's host, where it has not said yet
// that it has it.
func (c *Control) tellPolicy(ctx context.Context, id string) error {
	var s sandbox.Sandbox
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		s, err = r.Sandbox(ctx, id)
		return err
	})
	if err != nil || s.PolicyChange == 0 {
		return err
	}
	h, err := c.host(s.Host)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	err = h.SetPolicy(ctx, hostproto.PolicyChange{Sandbox: s.ID, Change: s.PolicyChange, Policy: s.Policy,
		Restart: s.PolicyRestart, Sleep: s.Spec.Sleep, Keep: s.PolicyKeep})
	if fault.Is(err, fault.NotFound) && s.State == sandbox.Creating {
		return nil // it is told when the host has it
	}
	return err
}

// autoReason says why a sandbox is stopped that its host has stopped by itself: in a
// word, and in a sentence. A verb that somebody asked for has neither.
func autoReason(s sandbox.Sandbox, r hostproto.Report) (reason, message string) {
	switch r.Cause {
	case sandbox.CauseDeadline:
		return "auto_stop", "its auto-stop of " + s.Policy.TTL.String() + " ended"
	case sandbox.CauseIdle:
		return "idle", "it was idle for " + s.Policy.IdleAfter.String()
	case sandbox.CauseMemory:
		return "memory_window", "its memory was kept for " + s.Policy.MemoryWindow.String() + ", and is dropped then; its disk is kept"
	}
	return "", ""
}

// ownOperation gives the operation that a host made by itself and reports on for the
// first time. Its id is the same wherever it was decided.
func ownOperation(s sandbox.Sandbox, r hostproto.Report) *sandbox.Operation {
	return &sandbox.Operation{
		ID: r.Operation, Project: s.Project, Sandbox: s.ID, Kind: r.Verb, Status: sandbox.Pending, Generation: s.Generation,
		Actor: hostActor, CreatedAt: r.Due, StartedAt: r.Due, Version: 1,
	}
}
