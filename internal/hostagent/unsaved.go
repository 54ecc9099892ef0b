package hostagent

import (
	"fmt"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// A save that failed never loses what runs (Z10). It leaves the condition save_failed,
// which is set here and nowhere else, and which pauses the meter: so it is set for what
// is the host's fault only, and a try is pending for as long as it holds. It ends with
// what the save was to bring about, with the end of what ran, with the user's word
// (setPolicy), and when a later try is refused for a cause of the guest's.

// saveFailed is how a sleep or a stop ends that failed.
func (w *work) saveFailed(r *record, err error) hostproto.Report {
	l := w.o.live.Load()
	runs := l != nil && !l.ended()
	if !runs && r.Phase != phaseSaved {
		return hostproto.Report{} // what has ended has no condition
	}
	rep := hostproto.Report{}
	if w.frozen {
		rep.Set = r.unheard("it could not be let run on after a save failed")
	}
	f := fault.Of(err)
	switch {
	case f.Kind == fault.Cancelled, w.kept(r):
		return rep
	case forGood(hostproto.Failure{Kind: string(f.Kind)}):
		// The guest's own causes never pause the meter (Z10, X4), nor do they keep it paused.
		rep.Clear = r.healed()
		if r.Timers != nil && !r.Timers.Unsaved.IsZero() {
			t := r.Timers.Kept(w.o.agent.now())
			r.Timers = &t
		}
		return rep
	}
	r.Degraded = true
	verb := w.j.Command.Verb
	failed := map[sandbox.Verb]string{sandbox.Sleep: "it could not be put to sleep", sandbox.Stop: "it could not be stopped"}[verb]
	goesOn := map[bool]string{true: "it runs on", false: "it sleeps on"}[runs]
	rep.Set = append(rep.Set, sandbox.Condition{
		Type: sandbox.Degraded, Reason: saveFailed.Reason,
		Message: fmt.Sprintf("%s: %s; %s and is not metered, and it is tried again at %s; `hutch keep %s` lets it go on as before",
			failed, f.Message, goesOn, w.again(r).UTC().Format(time.RFC3339), r.Name),
	})
	rep.Failure = failure(err)
	rep.Failure.Message = fmt.Sprintf("%s; %s and is not metered, and it is tried again by itself: `hutch get %s` says when, "+
		"and `hutch keep %s` lets it go on as before", f.Message, goesOn, r.Name, r.Name)
	return rep
}

// saveFailed is the condition that a failed save leaves.
var saveFailed = sandbox.Condition{Type: sandbox.Degraded, Reason: "save_failed"}

// kept says that the try which has failed is not wanted any more.
func (w *work) kept(r *record) bool {
	return w.j.Auto != nil && w.j.Auto.Cause == sandbox.CauseSave && (r.Timers == nil || r.Timers.Unsaved.IsZero())
}

// again notes that the save is to be tried again, and gives when. What the timers asked
// for they try again by themselves.
func (w *work) again(r *record) time.Time {
	now, b := w.o.agent.now(), w.o.agent.cfg.Backoff
	switch auto := w.j.Auto; {
	case r.Timers == nil:
		return now // it is being replaced by one with timers; see adoptTimers
	case auto != nil:
		return now.Add(b.Pause(r.Timers.Retries[auto.Cause].Tries + 1))
	}
	t := r.Timers.Unsave(w.j.Command.Verb, w.j.Began, now, b)
	r.Timers = &t
	return t.Retries[sandbox.CauseSave].Until
}

// forkFailed is how a fork ends that failed: its source is as it was.
func (w *work) forkFailed(r *record, _ error) hostproto.Report {
	if l := w.o.live.Load(); !w.frozen || l == nil || l.ended() {
		return hostproto.Report{}
	}
	return hostproto.Report{Set: r.unheard("it could not be let run on after a fork failed")}
}

// healed clears the condition, where it is set.
func (r *record) healed() []sandbox.Condition {
	if !r.Degraded {
		return nil
	}
	r.Degraded = false
	return []sandbox.Condition{saveFailed}
}

// unsaved says that a save that failed is to be tried again, idle sleep included.
func (r *record) unsaved() bool {
	t := r.Timers
	if t == nil {
		return false
	}
	idle := r.Spec.Sleep == sandbox.SleepAuto && t.Retries[sandbox.CauseIdle].Tries > 0
	return idle || r.wanted()
}

// wanted says that it is to be tried again whatever it does inside.
func (r *record) wanted() bool {
	t := r.Timers
	return !t.Unsaved.IsZero() || t.Retries[sandbox.CauseDeadline].Tries > 0 || t.Retries[sandbox.CauseMemory].Tries > 0
}

// relent ends what an idle sleep that failed has left, once it is not idle any more: it
// is not to sleep then, and is metered again.
func (o *owner) relent(p sandbox.IdlePolicy) {
	now := o.agent.now()
	if !o.rec.Degraded || o.rec.wanted() || o.watch.Idleness(p, now).Idle {
		return
	}
	if err := o.write(func(r *record) { r.addReport(hostproto.Report{Clear: r.healed(), At: now}) }); err != nil {
		o.log.Error("the end of a condition could not be written; the next sample tries again", "err", err)
	}
}
