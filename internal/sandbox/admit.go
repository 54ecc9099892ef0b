package sandbox

import (
	"github.com/hutchrun/hutch/internal/fault"
)

// Verb is what a user asks of a sandbox.
type Verb string

// The verbs.
const (
	Create   Verb = "create"
	Sleep    Verb = "sleep"
	Wake     Verb = "wake"
	Stop     Verb = "stop"
	Resume   Verb = "resume"
	Fork     Verb = "fork"
	Snapshot Verb = "snapshot"
	Archive  Verb = "archive"
	Migrate  Verb = "migrate"
	Delete   Verb = "delete"
	Undelete Verb = "undelete"

	BuildTemplate Verb = "build_template" // the kind of an operation that has no sandbox
)

// ForkMode says what a fork copies.
type ForkMode string

// The fork modes.
const (
	ForkLive ForkMode = "live" // memory and disk at one instant
	ForkDisk ForkMode = "disk" // the disk only; the fork boots fresh
)

// Request is a verb with what matters for its admission.
type Request struct {
	Verb     Verb
	Mode     ForkMode // of Fork
	Undelete bool     // of Undelete and Delete: it is deleted and can be brought back yet
	Erase    bool     // of Delete: nothing is to be kept
}

// Outcome is what becomes of a request.
type Outcome string

// The outcomes.
const (
	Accept Outcome = "run"  // start an operation
	Join   Outcome = "join" // the operation that runs is the one asked for
	Done   Outcome = "done" // the goal is reached already
	Refuse Outcome = "no"   // Err says why
)

// Decision is the answer to a request.
type Decision struct {
	Outcome Outcome
	Verb    Verb         // of Accept: what to run (a resume of a sleeping one is a wake)
	Cancels bool         // of Accept: the active operation is to be cancelled first
	Err     *fault.Fault // of Refuse
}

// Rule is one cell of the matrix of verbs and states.
type Rule struct {
	Outcome Outcome
	Run     Verb       // of Accept: another verb does the work; "" is the verb itself
	Kind    fault.Kind // of Refuse; "" is FailedPrecondition
	Instead string     // of Refuse: what to do instead
}

var (
	run  = Rule{Outcome: Accept}
	join = Rule{Outcome: Join}
	done = Rule{Outcome: Done}
	gone = Rule{Outcome: Refuse, Kind: fault.NotFound}
)

func no(instead string) Rule { return Rule{Outcome: Refuse, Instead: instead} }

// column is what a row of the matrix is looked up by: a fork has two rows.
type row string

func (r Request) row() row {
	if r.Verb == Fork {
		return row("fork " + r.Mode)
	}
	return row(r.Verb)
}

// matrix is the table of SPEC section 3, in the order creating, ready, sleeping,
// stopped, archived, failed, deleted.
var matrix = map[row][7]Rule{
	row(Sleep): {no("wait until it is ready"), run, done, no("it is stopped already; `resume` it first"),
		no("`resume` it first"), no("`resume` it first"), gone},
	row(Wake):   {join, done, run, no("use `resume`"), no("use `resume`"), no("use `resume`"), gone},
	row(Stop):   {no("use `delete`"), run, run, done, done, no("it does not run; `resume` or `delete` it"), gone},
	row(Resume): {join, done, {Outcome: Accept, Run: Wake}, run, run, run, gone},
	"fork live": {no("wait until it is ready"), run, run, no("use `--mode disk`"),
		no("`resume` it first"), no("`resume` it first"), gone},
	"fork disk":   {no("wait until it is ready"), run, run, run, no("`resume` it first"), no("`resume` it first"), gone},
	row(Snapshot): {no("wait until it is ready"), run, run, run, no("`resume` it first"), no("`resume` it first"), gone},
	row(Archive): {no("wait until it is ready"), no("`stop` it first"), no("`stop` it first"), run, done,
		no("`resume` and `stop` it first"), gone},
	row(Migrate): {no("wait until it is ready"), run, run, run, no("`resume` it first"), no("`resume` it first"), gone},
	row(Delete):  {run, run, run, run, run, run, done},
	row(Undelete): {no("it is not deleted"), no("it is not deleted"), no("it is not deleted"), no("it is not deleted"),
		no("it is not deleted"), no("it is not deleted"), run},
}

// Lookup gives the cell of the matrix for a state that no operation is at work on.
func Lookup(s State, r Request) Rule {
	for i, state := range States {
		if state == s {
			return matrix[r.row()][i]
		}
	}
	return gone
}

// Admit decides on a request, given the sandbox and its active operation (nil for
// none). It is the only place that decides whether a verb may run.
func Admit(s Sandbox, active *Operation, r Request) Decision {
	rule := Lookup(s.State, r)
	if s.State == Deleted && r.Verb == Delete && r.Erase && r.Undelete {
		rule = run // there is something left to erase
	}
	if active != nil {
		if d, decided := admitBeside(s, *active, r, rule); decided {
			return d
		}
	}
	switch rule.Outcome {
	case Refuse:
		return Decision{Outcome: Refuse, Err: refusal(s, r, rule)}
	case Join: // nothing to join: its creation was cancelled by a deletion that failed
		return Decision{Outcome: Refuse, Err: refusal(s, r, no("nothing prepares it any more; use `delete`"))}
	case Accept:
		if err := guard(s, r); err != nil {
			return Decision{Outcome: Refuse, Err: err}
		}
		verb := rule.Run
		if verb == "" {
			verb = r.Verb
		}
		return Decision{Outcome: Accept, Verb: verb}
	}
	return Decision{Outcome: rule.Outcome}
}

// admitBeside decides where an operation runs already: a delete cancels it, the
// same wish joins it, another one is a conflict that names it. A wish that the
// matrix refuses in any case is refused as such.
func admitBeside(s Sandbox, active Operation, r Request, rule Rule) (Decision, bool) {
	switch {
	case s.State == Deleted && rule.Outcome != Accept && active.Kind != Undelete:
		return Decision{}, false // deleted is deleted, whatever else has not ended yet
	case r.Verb == Delete && active.Kind == Delete:
		return Decision{Outcome: Join}, true
	case r.Verb == Delete:
		return Decision{Outcome: Accept, Verb: Delete, Cancels: true}, true
	case rule.Outcome == Refuse:
		return Decision{}, false
	case sameWish(active.Kind, r.Verb), rule.Outcome == Join && active.Kind == Create:
		return Decision{Outcome: Join}, true
	}
	return Decision{Outcome: Refuse, Err: fault.New(fault.Conflict,
		"cannot %s %s: the operation %s (%s) is at work on it; wait for it with `hutch get %s --wait`, then try again",
		r.Verb, s.Name, active.ID, active.Kind, s.Name).Because(active.ID)}, true
}

// sameWish says whether the running verb ends where the asked one would. Forks are
// never the same: each makes sandboxes of its own.
func sameWish(running, asked Verb) bool {
	boots := func(v Verb) bool { return v == Wake || v == Resume }
	if asked == Fork || asked == Snapshot {
		return false
	}
	return running == asked || boots(running) && boots(asked)
}

// guard refuses what the sandbox's own settings forbid although its state allows it.
func guard(s Sandbox, r Request) *fault.Fault {
	switch {
	case r.Verb == Sleep && s.Spec.Sleep == SleepNever:
		return fault.New(fault.FailedPrecondition,
			"cannot sleep %s: its sleep mode is `never`; `stop` it instead, or `hutch edit %s --sleep manual` allows it", s.Name, s.Name).Because("sleep_never")
	case r.Verb == Resume && s.State == Failed && !s.Started:
		return fault.New(fault.FailedPrecondition,
			"cannot resume %s: it never started, so it has no disk; create it again and delete this one", s.Name).Because("never_started")
	case r.Verb == Undelete && !r.Undelete:
		return fault.New(fault.NotFound, "there is no sandbox %s that could be brought back: it is erased", s.ID).Because("sandbox")
	}
	return nil
}

func refusal(s Sandbox, r Request, rule Rule) *fault.Fault {
	if rule.Kind == fault.NotFound {
		return fault.New(fault.NotFound, "there is no sandbox %s", s.ID).Because("sandbox")
	}
	verb := string(r.Verb)
	if r.Verb == Fork {
		verb = "fork (" + string(r.Mode) + ")"
	}
	return fault.New(fault.FailedPrecondition, "cannot %s %s: it is %s; %s", verb, s.Name, s.State, rule.Instead).
		Because("state_" + string(s.State))
}
