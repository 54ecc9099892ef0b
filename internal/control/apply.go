package control

import (
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// verdict says what is to become of a host's report.
type verdict string

const (
	verdictApply verdict = "apply"
	verdictOld   verdict = "old generation" // S7: acknowledged, changes nothing
	verdictTwice verdict = "applied before" // acknowledged
	verdictEarly verdict = "early"          // one before it is missing: the host sends them again in order
)

// judge decides on a report about s. op is the report's operation, nil where there is
// none or it is unknown.
func judge(s sandbox.Sandbox, op *sandbox.Operation, r hostproto.Report) verdict {
	switch {
	case r.Generation < s.Generation:
		return verdictOld
	case r.Seq <= s.HostSeq && r.Ended && op != nil && op.Status.Active():
		// The end of an operation is applied together with its number, so an end of
		// one that is still active cannot have been applied: the host has lost its
		// journal of this sandbox and counts anew.
		return verdictApply
	case r.Seq <= s.HostSeq:
		return verdictTwice
	case r.Seq > s.HostSeq+1:
		return verdictEarly
	}
	return verdictApply
}

// applied is what a report makes of the rows.
type applied struct {
	sandbox sandbox.Sandbox
	// changed says that the sandbox is in a state that the report brought, which may
	// be the one that it was in (a reboot).
	changed bool
	from    sandbox.State
	moved   time.Time           // the deadline before
	ended   bool                // op has ended
	set     []sandbox.Condition // new ones
	cleared []sandbox.Condition // those that were there
	refused []error             // parts of the report that make no sense: logged, not applied
}

// apply gives the rows after a report that judge lets through. op is changed in place
// when the report ends it. It decides and does nothing else.
func apply(s sandbox.Sandbox, op *sandbox.Operation, r hostproto.Report) applied {
	out := applied{from: s.State}
	s.HostSeq, s.UpdatedAt = r.Seq, r.At
	if r.Event != "" {
		next, err := s.State.Next(r.Event)
		if err != nil {
			out.refused = append(out.refused, err)
		} else {
			s, out.changed = arrive(s, next, r), true
		}
	}
	if out.changed && r.Event.Boots() { // nothing else makes a generation
		s.Generation = r.Generation
	}
	if r.Saved {
		s.SavedAt = r.At
	}
	if out.changed && s.State == sandbox.Stopped && op != nil && op.Actor == budgetActor {
		s.Reason, s.Message = "budget", "the project's budget was reached"
	}
	if s.State == sandbox.Deleted {
		switch {
		case r.Erased:
			s.EraseAt = time.Time{}
		case !r.EraseAt.IsZero():
			s.EraseAt = r.EraseAt
		}
	}
	out.moved = s.Deadline
	s.Deadline = r.Deadline
	s.PolicyChange, s.PolicyRestart = told(s, r)
	s.PolicyKeep = s.PolicyKeep && s.PolicyChange != 0
	for _, c := range r.Clear {
		for _, old := range s.Conditions {
			if old.Type == c.Type && old.Reason == c.Reason {
				out.cleared = append(out.cleared, old)
			}
		}
		s.Conditions = sandbox.ClearCondition(s.Conditions, c.Type, c.Reason)
	}
	for _, c := range r.Set {
		if !slices.Contains(sandbox.ConditionReasons[c.Type], c.Reason) {
			out.refused = append(out.refused, fault.New(fault.Internal, "%s (%s) is no condition", c.Type, c.Reason))
			continue
		}
		if c.Since.IsZero() {
			c.Since = r.At
		}
		if !slices.ContainsFunc(s.Conditions, func(old sandbox.Condition) bool { return old.Type == c.Type && old.Reason == c.Reason }) {
			out.set = append(out.set, c)
		}
		s.Conditions = sandbox.SetCondition(s.Conditions, c)
	}
	if r.Ended && op != nil && op.Status.Active() {
		finish(op, r)
		out.ended = true
	}
	out.sandbox = s
	return out
}

// told gives the change of the policy that the host is still to be told of, after it has
// said which it has. One with a number that this row never had is of before the database
// was put back to an earlier time: the policy that is here is told again, under a number
// that the host takes for a new one.
func told(s sandbox.Sandbox, r hostproto.Report) (change int64, restart bool) {
	switch {
	case r.PolicyChange == 0:
	case r.PolicyChange == s.PolicyChange:
		return 0, false
	case s.PolicyChange != 0 && r.PolicyChange > s.PolicyChange, r.PolicyChange > s.Version:
		return r.PolicyChange + 1, s.PolicyRestart
	}
	return s.PolicyChange, s.PolicyRestart
}

// reasons are the words for why a sandbox is stopped or failed although no verb asked
// for it, by the event that brought it there.
var reasons = map[sandbox.Event]string{
	sandbox.EventCreateFailed:  "start_failed",
	sandbox.EventExited:        "exited",
	sandbox.EventCrashed:       "crashed",
	sandbox.EventOOMKilled:     "oom_killed",
	sandbox.EventHostRestarted: "host_restarted",
	sandbox.EventHostLost:      "host_lost",
	sandbox.EventMemoryExpired: "memory_expired",
}

// arrive puts the sandbox into the state that an event brought.
func arrive(s sandbox.Sandbox, next sandbox.State, r hostproto.Report) sandbox.Sandbox {
	if t, err := s.AtRest().After(r.Event, r.At); err == nil {
		s = s.Rest(t)
	}
	if s.State != next {
		s.StateSince = r.At
	}
	s.State, s.Reason, s.Message = next, reasons[r.Event], ""
	if r.Event == sandbox.EventUndeleted {
		s.DeletedAt, s.EraseAt = time.Time{}, time.Time{}
	}
	if next == sandbox.Stopped && r.Cause != "" {
		s.Reason, s.Message = autoReason(s, r)
		return s
	}
	if s.Reason != "" {
		s.Message = r.Message
		if s.Message == "" && r.Failure != nil {
			s.Message = r.Failure.Message
		}
	}
	switch next {
	case sandbox.Ready:
		s.Started = true
	case sandbox.Deleted:
		s.Conditions = nil
		if s.DeletedAt.IsZero() {
			s.DeletedAt = r.At
		}
	}
	return s
}

// mostTimings bounds what is kept of an operation's steps.
const mostTimings = 100

// finish ends an operation as a report says.
func finish(op *sandbox.Operation, r hostproto.Report) {
	op.EndedAt, op.Timings = r.At, r.Timings[:min(len(r.Timings), mostTimings)]
	if op.StartedAt.IsZero() {
		op.StartedAt = op.CreatedAt
	}
	if r.Step != "" {
		op.Step = r.Step
	}
	if r.Failure == nil {
		op.Status, op.Progress = sandbox.Succeeded, 1
		return
	}
	op.Status = sandbox.Errored
	op.Error = operationError(*r.Failure)
	if op.Error.Code == string(fault.Cancelled) {
		op.Status = sandbox.Cancelled
	}
}

// operationError is a host's failure as users see it. A kind that is none is internal.
func operationError(f hostproto.Failure) *sandbox.OperationError {
	if !slices.Contains(fault.Kinds, fault.Kind(f.Kind)) {
		f.Kind = string(fault.Internal)
	}
	return &sandbox.OperationError{Code: f.Kind, Message: f.Message, Reason: f.Reason}
}
