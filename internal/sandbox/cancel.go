package sandbox

import (
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
)

// Cancellable says whether an operation can still be cancelled when it has come to a
// step: up to its commit, after which nothing is taken back. A deletion can never be;
// before its first step every other one can. The host, which knows whether it has
// committed, has the last word: one that is found cancellable here may succeed yet.
func Cancellable(v Verb, step string) bool {
	if v == Delete {
		return false
	}
	list := steps[v]
	if step == "" || list == nil {
		return true
	}
	at := slices.IndexFunc(list, func(s Step) bool { return s.Name == step })
	if at < 0 { // a variant of the verb: the stop of a sleeping one, the creation of a fork
		return step != StepErase && step != StepRun
	}
	return at < committed(v)
}

// committed is the first step of a verb after its commit.
func committed(v Verb) int {
	last := StepCommit
	if v == Fork {
		last = StepSpawn // its commit has no name
	}
	if at := slices.IndexFunc(steps[v], func(s Step) bool { return s.Name == last }); at >= 0 {
		return at
	}
	return len(steps[v])
}

// Uncancellable refuses a cancellation that comes too late, or that cannot be; nil where
// it may be tried.
func Uncancellable(op Operation) *fault.Fault {
	switch {
	case Cancellable(op.Kind, op.Step):
		return nil
	case op.Kind == Delete:
		return fault.New(fault.FailedPrecondition, "cannot cancel %s: a deletion goes through; `hutch undelete` brings the sandbox back for a time", op.ID).
			Because("delete")
	}
	return fault.New(fault.FailedPrecondition, "cannot cancel %s: the %s is past the point of no return (step %s) and goes through; wait for it with `hutch operations wait %s`",
		op.ID, op.Kind, op.Step, op.ID).Because("too_late")
}
