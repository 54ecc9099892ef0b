package control

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// meter gives a sandbox's meter a fact, which the event that was written last tells of,
// and writes what comes of it: the fact, the meter and the entries that are complete
// now, with an event for each. It is part of the transaction of the transition (S3).
// The sandbox's row is held, so that its meter has one writer.
//
// A fact that the meter cannot take changes nothing: a transition is not refused for the
// sake of the bill.
func (w *writer) meter(ctx context.Context, c *Control, s sandbox.Sandbox, f metering.Fact) error {
	if f.At.IsZero() {
		f.At = w.at
	}
	f.At, f.Event = f.At.UTC().Truncate(time.Millisecond), w.told
	p, m, prices, err := w.metered(ctx, c, s, f.At)
	if err != nil {
		return err
	}
	_, err = w.enter(ctx, c, &p, m, f, prices)
	return err
}

// metered gives the meter that a fact of an instant is given to, after what the project's
// budget has to say of it: what fell due before is told first (B4).
func (w *writer) metered(ctx context.Context, c *Control, s sandbox.Sandbox, at time.Time) (p Project, m metering.Meter, prices metering.Prices, err error) {
	m, err = w.Meter(ctx, s.ID)
	if fault.Is(err, fault.NotFound) {
		m, err = metering.Meter{Project: s.Project, Sandbox: s.ID}, nil
	}
	if err == nil {
		prices, err = w.Prices(ctx)
	}
	if err == nil {
		p, err = w.Project(ctx, s.Project)
	}
	if err == nil && p.Budget.Limit != "" {
		if err = w.Lock(ctx, projectLock(p.ID)); err != nil {
			return p, m, prices, err
		}
		if p, err = w.Project(ctx, p.ID); err != nil {
			return p, m, prices, err
		}
		if now := c.instant(); at.After(now) { // a host's clock may be ahead
			at = now
		}
		err = w.exhaust(ctx, &p, at)
	}
	if err == nil {
		m, err = w.budgeted(ctx, c, &p, m, prices)
	}
	return p, m, prices, err
}

// meterBudget does to a sandbox's meter what its project's budget asks for, and nothing else.
func (w *writer) meterBudget(ctx context.Context, c *Control, s sandbox.Sandbox) (Project, error) {
	p, _, _, err := w.metered(ctx, c, s, w.at)
	return p, err
}

// enter gives a meter a fact and writes what comes of it. The project's budget, where it has
// one, is kept up; then its lock is held.
func (w *writer) enter(ctx context.Context, c *Control, p *Project, m metering.Meter, f metering.Fact, prices metering.Prices) (metering.Meter, error) {
	next, entries, err := m.Next(f, prices)
	if err != nil {
		c.log.Error("a fact could not be metered and was left out", "sandbox", m.Sandbox, "op", f.Operation, "kind", f.Kind, "err", err)
		return m, nil
	}
	if err := w.EnterFact(ctx, next, f, entries); err != nil {
		return m, err
	}
	if p.Budget.Limit != "" && len(entries) > 0 {
		if err := w.spend(ctx, p, entries); err != nil {
			return m, err
		}
		if err := w.UpdateProject(ctx, p); err != nil {
			return m, err
		}
	}
	operation := f.Operation
	if strings.HasPrefix(operation, budgetHalt) {
		operation = ""
	}
	for _, e := range entries {
		if err := w.event(ctx, "meter.entry", m.Sandbox, operation, e); err != nil {
			return m, err
		}
	}
	return next, nil
}

// rate is what a sandbox's machine is metered as.
func rate(s sandbox.Sandbox) metering.Rate {
	return metering.Rate{VCPUs: int64(s.Spec.CPUs), MemoryBytes: s.Spec.Memory}
}

// meterAccepted meters an operation that was accepted: a boot begins to count (B1), what
// is to sleep, to stop or to go counts no longer (B2, B3).
func (w *writer) meterAccepted(ctx context.Context, c *Control, s sandbox.Sandbox, op sandbox.Operation) error {
	f := metering.Fact{Kind: metering.Halted, Operation: op.ID, Verb: op.Kind}
	switch op.Kind {
	case sandbox.Create, sandbox.Resume:
		f = metering.Fact{Kind: metering.Assigned, Operation: op.ID, Rate: rate(s)}
	case sandbox.Sleep:
		f.End = metering.BySleep
	case sandbox.Stop:
		f.End = metering.ByStop
	case sandbox.Delete:
		if s.State == sandbox.Deleted {
			return nil // it is erased, and costs nothing since it was deleted
		}
		f.End = metering.ByDelete
	default:
		return nil
	}
	return w.meter(ctx, c, s, f)
}

// finalEnds are the ends of what runs no longer, by the event that brought them.
var finalEnds = map[sandbox.Event]metering.End{
	sandbox.EventStopped:       metering.ByStop,
	sandbox.EventExited:        metering.ByExit,
	sandbox.EventCrashed:       metering.ByCrash,
	sandbox.EventOOMKilled:     metering.ByOOM,
	sandbox.EventHostRestarted: metering.ByHostRestarted,
	sandbox.EventHostLost:      metering.ByHostLost,
	sandbox.EventMemoryExpired: metering.ByMemoryWindow,
	sandbox.EventDeleted:       metering.ByDelete,
}

// dueEnds are the ends that the host brings about by itself, by their cause.
var dueEnds = map[sandbox.Cause]metering.End{
	sandbox.CauseDeadline: metering.ByAutoStop,
	sandbox.CauseMemory:   metering.ByMemoryWindow,
	sandbox.CauseIdle:     metering.ByIdle,
}

// meterChange meters a transition that a host reported. s is the row after it. How large
// a disk is that went to cold storage no host reports yet, so that it is not metered.
func (w *writer) meterChange(ctx context.Context, c *Control, s sandbox.Sandbox, r hostproto.Report) error {
	if err := w.meterDue(ctx, c, s, r); err != nil {
		return err
	}
	if r.Cause == sandbox.CauseSave { // the retry of what was asked for, which halted it then
		end := map[sandbox.Verb]metering.End{sandbox.Sleep: metering.BySleep, sandbox.Stop: metering.ByStop}[r.Verb]
		if err := w.meter(ctx, c, s, metering.Fact{Kind: metering.Halted, Operation: r.Operation, Verb: r.Verb, End: end, At: r.Due}); err != nil {
			return err
		}
	}
	f := metering.Fact{Operation: r.Operation}
	switch r.Event {
	case sandbox.EventCreated, sandbox.EventResumed:
		f.Kind, f.Generation = metering.Ready, s.Generation
	case sandbox.EventCreateFailed:
		f.Kind = metering.Unstarted
	case sandbox.EventSlept:
		f.Kind = metering.Slept
	case sandbox.EventWoken:
		f.Kind, f.Generation = metering.Woken, s.Generation
	case sandbox.EventRebooted:
		f.Kind, f.Generation = metering.Rebooted, s.Generation
	default:
		end, ends := finalEnds[r.Event]
		if !ends {
			return nil
		}
		f.Kind, f.End = metering.Ended, end
		until, err := w.knownUntil(ctx, s.ID, r)
		if err != nil {
			return err
		}
		f.At = until
	}
	return w.meter(ctx, c, s, f)
}

// meterDue meters that something fell due which the host acted on by itself: up to that
// moment, even if it is carried out later (B4), or fails at first (Z10). A host that
// speaks of a moment to come is not believed.
func (w *writer) meterDue(ctx context.Context, c *Control, s sandbox.Sandbox, r hostproto.Report) error {
	end, ok := dueEnds[r.Cause]
	if !ok || r.Due.IsZero() {
		return nil
	}
	due := r.Due
	if due.After(w.at) {
		due = w.at
	}
	return w.meter(ctx, c, s, metering.Fact{Kind: metering.Halted, Operation: r.Operation, Verb: r.Verb, End: end, At: due})
}

// knownUntil is the instant to which an end is metered that was found only later: the last
// one at which the sandbox is known to have run (D8, S8), which is not before it began to
// do what it is metered for. Zero is the report's own.
func (w *writer) knownUntil(ctx context.Context, id string, r hostproto.Report) (time.Time, error) {
	if r.Until.IsZero() || r.Until.After(w.at) {
		return time.Time{}, nil
	}
	m, err := w.Meter(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return r.Until, nil
	}
	if r.Until.Before(m.Since) {
		return m.Since, err
	}
	return r.Until, err
}

// meterUnchanged meters the end of an operation that did not bring the sandbox where it
// was to go: a boot that failed never counted (B1), and a sleep or a stop lets go of the
// meter, or keeps it paused where it is our fault that nothing was saved (Z10, B5).
func (w *writer) meterUnchanged(ctx context.Context, c *Control, s sandbox.Sandbox, op sandbox.Operation, degraded bool) error {
	f := metering.Fact{Operation: op.ID}
	switch op.Kind {
	case sandbox.Resume:
		if op.Status == sandbox.Succeeded {
			return nil
		}
		f.Kind = metering.Unstarted
	case sandbox.Sleep, sandbox.Stop:
		f.Kind = unsaved(op, degraded)
	default:
		return nil
	}
	return w.meter(ctx, c, s, f)
}

// guestsCauses are the kinds of a save's refusal for what the guest controls (Z9, Z10).
var guestsCauses = []string{string(fault.FailedPrecondition), string(fault.Unsupported)}

// unsaved says what the end of a sleep or stop without effect is to the meter. degraded
// says that it failed for a cause of ours, and is tried again: the meter is paused for as
// long as the condition holds, and no longer.
func unsaved(op sandbox.Operation, degraded bool) metering.FactKind {
	switch {
	case degraded:
		return metering.SaveFailed
	case op.Status == sandbox.Errored && op.Error != nil && op.Error.Reason != reasonOvertaken && slices.Contains(guestsCauses, op.Error.Code):
		return metering.Refused
	}
	return metering.Released
}

// meterEnd meters the end of an operation where the transition of the same report has
// not said all of it.
func (w *writer) meterEnd(ctx context.Context, c *Control, a applied, op *sandbox.Operation, r hostproto.Report) error {
	_, over := finalEnds[r.Event]
	if !a.ended || a.changed && (over || r.Event == endsWell[op.Kind] || r.Event == sandbox.EventCreateFailed) {
		return nil
	}
	if !a.changed {
		if err := w.meterDue(ctx, c, a.sandbox, r); err != nil {
			return err
		}
	}
	return w.meterUnchanged(ctx, c, a.sandbox, *op, slices.ContainsFunc(r.Set, saveFailed))
}

// endsWell are the events that an operation is there for.
var endsWell = map[sandbox.Verb]sandbox.Event{
	sandbox.Sleep:  sandbox.EventSlept,
	sandbox.Stop:   sandbox.EventStopped,
	sandbox.Resume: sandbox.EventResumed,
}

// meterFound begins to meter what ran before there were meters, from now on: what was
// before is not known to the millisecond.
func (c *Control) meterFound(ctx context.Context) error {
	var list []sandbox.Sandbox
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		list, err = r.Sandboxes(ctx, store.SandboxFilter{Unmetered: true})
		return err
	})
	if err != nil {
		return err
	}
	for _, s := range list {
		err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
			s, err := tx.Sandbox(ctx, s.ID)
			if err != nil {
				return err
			}
			if _, err := tx.Meter(ctx, s.ID); !fault.Is(err, fault.NotFound) {
				return err // another server has seen to it
			}
			op, err := tx.ActiveOperation(ctx, s.ID)
			if err != nil {
				return err
			}
			w := c.writer(tx, s.Project, hostActor, c.instant())
			return w.found(ctx, c, s, op)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// found gives the first facts of a sandbox that is there already.
func (w *writer) found(ctx context.Context, c *Control, s sandbox.Sandbox, op *sandbox.Operation) error {
	runs := map[sandbox.State]metering.Reason{sandbox.Ready: metering.Running, sandbox.Sleeping: metering.Sleeping}[s.State]
	boots := op != nil && (op.Kind == sandbox.Create || op.Kind == sandbox.Resume)
	if runs == "" && !boots {
		return nil
	}
	if err := w.event(ctx, "meter.found", s.ID, "", map[string]any{"state": s.State}); err != nil {
		return err
	}
	if runs != "" {
		f := metering.Fact{Kind: metering.Found, Reason: runs, Rate: rate(s), Generation: s.Generation}
		if err := w.meter(ctx, c, s, f); err != nil {
			return err
		}
	}
	if op == nil {
		return nil
	}
	return w.meterAccepted(ctx, c, s, *op)
}
