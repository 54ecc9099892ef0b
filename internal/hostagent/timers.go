package hostagent

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

const (
	// lookEvery is the longest pause between two looks at the timers. Go's own timers
	// stand still while the machine is suspended, so none of them is trusted with more.
	lookEvery = time.Second
	// lookMin is the shortest.
	lookMin = 2 * time.Millisecond
	// autosMost bounds how many operations that the timers asked for are at work at a
	// time: after a long absence everything may be due at once.
	autosMost = 16
	// autoAgain is the pause of one that is due and over that bound, where no end of
	// another gives it its turn before.
	autoAgain = time.Second
)

// overdue are the owners whose timers are due and over the bound. The end of an
// operation gives the one its turn that has waited longest.
type overdue struct {
	mu    sync.Mutex
	since map[*owner]time.Time
}

func (w *overdue) wait(o *owner, due time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.since == nil {
		w.since = map[*owner]time.Time{}
	}
	w.since[o] = due
}

func (w *overdue) forget(o *owner) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.since, o)
}

func (w *overdue) next() {
	w.mu.Lock()
	defer w.mu.Unlock()
	var first *owner
	for o, due := range w.since {
		if first == nil || due.Before(w.since[first]) {
			first = o
		}
	}
	if first != nil {
		delete(w.since, first)
		first.later(0, first.timers)
	}
}

// watchTimers has the owners act on their timers when these fall due, in host time.
// It needs no server (A6).
func (a *Agent) watchTimers(ctx context.Context) {
	for {
		pause := a.ring(a.now())
		a.clock.keep()
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// ring wakes the owners whose timers are due and gives the pause until the next look.
func (a *Agent) ring(now time.Time) time.Duration {
	pause := a.cfg.points.look
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range a.owners {
		due := o.due.Load()
		if due == 0 {
			continue
		}
		if left := time.UnixMilli(due).Sub(now); left > 0 {
			pause = min(pause, left)
		} else if o.due.CompareAndSwap(due, 0) {
			o.later(0, o.timers)
		}
	}
	return max(pause, lookMin)
}

// timers acts on what has fallen due, in the owner's goroutine. While an operation is
// at work nothing is: its end asks again.
func (o *owner) timers() {
	o.agent.overdue.forget(o)
	r := o.rec
	if o.job != nil || r.Job != nil || r.Next != nil || r.Timers == nil {
		return
	}
	if r.Phase == phaseRunning && o.live.Load() == nil {
		return // it has ended, or is not taken over yet: either asks again
	}
	now := o.agent.now()
	switch v := r.due(now); {
	case v.Act == sandbox.Move:
		o.log.Info("the deadline is put off for an active turn", "cause", v.Cause, "due", v.Due)
		if err := o.write(func(r *record) { r.moved(v, now) }); err != nil {
			o.later(time.Second, o.timers)
			return
		}
		o.timers() // each move is an event of its own (A3)
	case v.Act == sandbox.Run && o.agent.autos.Load() >= autosMost:
		o.due.Store(now.Add(autoAgain).UnixMilli())
		o.agent.overdue.wait(o, v.Due)
	case v.Act == sandbox.Run:
		o.log.Info("a timer fell due", "op", v.Operation, "cause", v.Cause, "verb", v.Verb, "due", v.Due)
		cmd := hostproto.Command{Operation: v.Operation, Verb: v.Verb, Sandbox: o.id, Generation: r.Generation}
		if err := o.begin(jobRecord{Command: cmd, Auto: &v}); err != nil {
			o.later(time.Second, o.timers)
		}
	case v.Next.IsZero():
		o.due.Store(0)
	default:
		o.due.Store(v.Next.UnixMilli())
	}
}

// due is what the timers ask for of what this host does. Those of one at rest are the
// control plane's.
func (r *record) due(now time.Time) sandbox.Verdict {
	t := *r.Timers
	t.Archive, t.Delete = time.Time{}, time.Time{}
	return sandbox.Due(t, r.Leases, now)
}

// moved puts the deadline off as a verdict says.
func (r *record) moved(v sandbox.Verdict, now time.Time) {
	t := r.Timers.Moved(v)
	r.Timers = &t
	r.addReport(hostproto.Report{Turn: v.Turn, At: now})
}

// timed moves the timers by what a report tells, in the same write of the journal, and
// puts the deadline into it. A report that is sent again has moved them already: its
// event cannot happen a second time.
func (r *record) timed(rep *hostproto.Report) {
	if r.Timers == nil {
		return
	}
	if rep.Event != "" {
		if rep.Event != sandbox.EventSlept && rep.Event != sandbox.EventWoken {
			r.Leases = sandbox.Leases{} // no turn outlives the programs
		}
		r.Missed = nil
		if rep.Event == sandbox.EventWoken {
			r.Missed = &asleep{From: r.Timers.From, To: rep.At}
		}
		if t, err := r.Timers.After(rep.Event, rep.At); err == nil {
			r.Timers = &t
		}
	}
	rep.Deadline = r.Timers.Deadline
	if rep.Event == sandbox.EventDeleted {
		rep.EraseAt = r.Timers.Erase
	}
}

// tried notes how an operation ended that the timers asked for. One that failed, or
// has left its timer due, is tried again after a pause.
func (r *record) tried(v sandbox.Verdict, rep hostproto.Report, b sandbox.Backoff) {
	if r.Timers == nil || rep.Failure == nil && r.due(rep.At).Operation != v.Operation {
		return
	}
	t := r.Timers.Failed(v, rep.Failure != nil && forGood(*rep.Failure), rep.At, b)
	r.Timers = &t
}

// forGood says that a save was refused for a cause that lasts (Z9).
func forGood(f hostproto.Failure) bool {
	return fault.Kind(f.Kind) == fault.FailedPrecondition || fault.Kind(f.Kind) == fault.Unsupported
}

// adoptTimers gives timers to a record of a hutch that had none.
func (r *record) adoptTimers(now time.Time) {
	state, known := map[phase]sandbox.State{
		phaseRunning: sandbox.Ready, phaseSaved: sandbox.Sleeping, phaseStopped: sandbox.Stopped,
	}[r.Phase]
	if r.Timers != nil || !known {
		return
	}
	t := sandbox.AdoptTimers(r.Sandbox, r.Generation, state, sandbox.PolicyBefore(), now)
	r.Timers = &t
}

// SetPolicy takes a changed policy in, durably; see hostproto.Host.
func (a *Agent) SetPolicy(ctx context.Context, c hostproto.PolicyChange) error {
	o, err := a.find(c.Sandbox)
	if err != nil {
		return err
	}
	return o.call(ctx, func() error { return o.setPolicy(c) })
}

// setPolicy applies each change once, and tells of it as often as it comes: the report
// may have been lost with a database that was put back.
func (o *owner) setPolicy(c hostproto.PolicyChange) error {
	now := o.agent.now()
	keep := c.Keep && c.Change > o.rec.Policy
	var healed []sandbox.Condition
	take := func(r *record) {
		if c.Change > r.Policy {
			r.Policy = c.Change
			if r.Timers == nil { // it is being created for a hutch that had no timers
				t := sandbox.NewTimers(r.Sandbox, c.Policy)
				r.Timers = &t
			}
			t := r.Timers.With(c.Policy, c.Restart, now)
			if keep {
				t = t.Kept(now)
			}
			r.Timers = &t
			r.Spec.Sleep = cmp.Or(c.Sleep, r.Spec.Sleep)
			if keep || !r.unsaved() { // what was to be tried again is not asked for any more
				healed = r.healed()
			}
		}
	}
	// A changed firewall is written down, then applied, then told: what is told holds.
	if c.Change > o.rec.Policy && !c.Policy.Walls().Equal(*o.walls.Load()) {
		if err := o.write(take); err != nil {
			return err
		}
	}
	// Also where it was known before: this may be the call after one that failed.
	if err := o.applyWalls(); err != nil {
		return err
	}
	err := o.write(func(r *record) {
		take(r)
		for _, rep := range r.Unacked {
			if rep.PolicyChange == r.Policy {
				return // it is on its way
			}
		}
		r.addReport(hostproto.Report{PolicyChange: r.Policy, Clear: healed, At: now})
	})
	if j := o.rec.Job; err == nil && keep && j != nil && j.Auto != nil && j.Auto.Cause == sandbox.CauseSave {
		err = o.cancelOperation(j.Command.Operation) // it is not to be saved any more
	}
	o.timers()
	return err
}

// Renew takes in which harness turns are active; see hostproto.Host. What is not written
// down is told again with the next renewal.
func (a *Agent) Renew(ctx context.Context, turns map[string][]string) error {
	a.mu.Lock()
	var told []*owner
	for id, o := range a.owners {
		if len(turns[id]) > 0 || o.leased.Load() {
			told = append(told, o)
		}
	}
	a.mu.Unlock()
	failed := make(chan error, len(told))
	for _, o := range told { // one that does not answer keeps no other's from being renewed
		go func() { failed <- o.call(ctx, func() error { return o.renew(turns[o.id]) }) }()
	}
	var all error
	for range told {
		all = errors.Join(all, <-failed)
	}
	return all
}

func (o *owner) renew(turns []string) error {
	if o.rec.Phase != phaseRunning && o.rec.Phase != phaseSaved {
		turns = nil
	}
	if len(turns) == 0 && len(o.rec.Leases.Turns) == 0 {
		return nil
	}
	err := o.write(func(r *record) {
		r.Leases = r.Leases.Renew(turns, o.agent.now())
		if len(turns) == 0 {
			r.Leases = sandbox.Leases{}
		}
	})
	o.timers()
	return err
}
