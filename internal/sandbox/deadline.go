package sandbox

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Timers are when a sandbox is to be acted on without being asked: one zero instant is
// one timer that does not run. They are plain data; the host keeps them in its journal
// (A6, A7), the control plane beside the sandbox, and both move them by the same
// functions. All instants are host time (Clock), in whole milliseconds, rounded up: no
// timer fires early.
//
// What moves a timer is here and nowhere else: the events of the state machine (After),
// a changed policy (With), and an active turn (Due, Moved). A connect, an exec, a read
// or a list is none of these (A2), and nothing from inside the sandbox is one that
// makes a life longer (X4): a reboot from inside keeps the deadline.
type Timers struct {
	Sandbox    string    `json:"sandbox"`
	Generation int64     `json:"generation"`
	State      State     `json:"state"`
	From       time.Time `json:"from,omitzero"` // when it fell asleep or stopped: what all but Deadline count from
	Policy     Policy    `json:"policy"`
	Changed    time.Time `json:"changed,omitzero"` // when Policy or the sleep mode last changed: nothing is idle under it before

	Deadline  time.Time `json:"deadline,omitzero"`   // the auto-stop (A1)
	MemoryEnd time.Time `json:"memory_end,omitzero"` // the end of the memory window (Z7)
	Archive   time.Time `json:"archive,omitzero"`    // A8, D3
	Delete    time.Time `json:"delete,omitzero"`     // A8

	Window time.Duration `json:"window_ns,omitempty"` // how long it can be brought back once it is deleted (X9)
	Erase  time.Time     `json:"erase,omitzero"`      // the end of that

	// Unsaved is when a save began that its user asked for and that failed: it is tried
	// again, with UnsavedVerb, until it succeeds or its user says `keep` (Z10).
	Unsaved     time.Time `json:"unsaved,omitzero"`
	UnsavedVerb Verb      `json:"unsaved_verb,omitempty"`

	Retries map[Cause]Retry `json:"retries,omitempty"` // of what fell due and failed
}

// Cause is which timer it was.
type Cause string

// The causes.
const (
	CauseDeadline Cause = "deadline"
	CauseMemory   Cause = "memory_window"
	CauseArchive  Cause = "archive_after"
	CauseDelete   Cause = "delete_after"
	CauseIdle     Cause = "idle"
	CauseSave     Cause = "save_failed" // a save that failed is tried again
	CauseErase    Cause = "undelete_window"
)

// order is what goes first of what falls due in the same millisecond: what ends more.
var order = []Cause{CauseErase, CauseDelete, CauseDeadline, CauseMemory, CauseSave, CauseArchive, CauseIdle}

// Retry is how often what fell due has failed (Z10).
type Retry struct {
	Tries   int       `json:"tries"`
	Until   time.Time `json:"until"`             // not tried again before
	Instead bool      `json:"instead,omitempty"` // the fallback is tried from now on
}

// Backoff is the pause between the tries of what failed: it begins with First, doubles,
// and is Most at most (Z10).
type Backoff struct{ First, Most time.Duration }

// DefaultBackoff is that of the contract.
func DefaultBackoff() Backoff { return Backoff{First: 30 * time.Second, Most: 10 * time.Minute} }

// Pause is the pause after so many tries that failed.
func (b Backoff) Pause(tries int) time.Duration {
	pause := min(b.First, b.Most)
	for range tries - 1 {
		if pause *= 2; pause >= b.Most {
			return b.Most
		}
	}
	return pause
}

// NewTimers gives the timers of a sandbox that is being created: none runs yet.
func NewTimers(sandbox string, p Policy) Timers {
	return Timers{Sandbox: sandbox, State: Creating, Policy: p}
}

// instant is a time as timers are kept.
func instant(t time.Time) time.Time {
	t = bare(t)
	if ms := t.Truncate(time.Millisecond); ms.Before(t) {
		return ms.Add(time.Millisecond)
	}
	return t
}

// After gives the timers after an event that happened at an instant, the commit of a
// save or a stop, say. An event that cannot happen changes nothing and is a
// *TransitionError.
func (t Timers) After(e Event, at time.Time) (Timers, error) {
	next, err := t.State.Next(e)
	if err != nil {
		return t, err
	}
	at = instant(at)
	old := t
	t.State, t.Retries = next, nil
	if e.Boots() {
		t.Generation++
	}
	deadline := t.Deadline
	if e.Boots() && e != EventRebooted {
		deadline = t.starts(at, t.Policy.TTL)
	}
	t = t.arrive(at, deadline)
	t.Retries = old.goingOn(t)
	if r, tried := old.Retries[CauseSave]; e == EventRebooted && tried { // what was to be saved still is, whatever the guest does
		t.Unsaved, t.UnsavedVerb, t.Retries = old.Unsaved, old.UnsavedVerb, map[Cause]Retry{CauseSave: r}
	}
	return t, nil
}

// goingOn gives the tries of the timers that next has as they were: an operation's id
// must not come twice (it follows from the due time and the number of the try).
func (t Timers) goingOn(next Timers) map[Cause]Retry {
	if next.Generation != t.Generation {
		return nil
	}
	before := map[Cause]time.Time{}
	for _, d := range t.running() {
		before[d.cause] = d.at
	}
	var kept map[Cause]Retry
	for _, d := range next.running() {
		if r, tried := t.Retries[d.cause]; tried && d.at.Equal(before[d.cause]) {
			if kept == nil {
				kept = map[Cause]Retry{}
			}
			kept[d.cause] = Retry{Tries: r.Tries} // without its pause: a new state has no failures behind it
		}
	}
	return kept
}

// AdoptTimers gives the timers of a sandbox that had none: it was made by a hutch that
// knew no timers. All begin now, as its state has them.
func AdoptTimers(sandbox string, generation int64, s State, p Policy, now time.Time) Timers {
	t := Timers{Sandbox: sandbox, Generation: generation, State: s, Policy: p}
	now = instant(now)
	if s == Archived {
		t.From, t.Delete = now, t.starts(now, p.DeleteAfter)
	}
	return t.arrive(now, t.starts(now, p.TTL))
}

// arrive sets the timers that run in a state that begins at an instant. deadline is the
// auto-stop, where one runs in it.
func (t Timers) arrive(at, deadline time.Time) Timers {
	if t.State == Archived {
		t.Archive = time.Time{} // the rest counts from the stop
		return t
	}
	window := t.Window
	t = Timers{Sandbox: t.Sandbox, Generation: t.Generation, State: t.State, Policy: t.Policy}
	if t.deadlineRuns() {
		t.Deadline = deadline
	}
	switch t.State {
	case Sleeping:
		t.From, t.MemoryEnd = at, t.starts(at, t.Policy.MemoryWindow)
	case Stopped:
		t.From, t.Archive, t.Delete = at, t.starts(at, t.Policy.ArchiveAfter), t.starts(at, t.Policy.DeleteAfter)
	case Deleted:
		if window != 0 {
			t.From, t.Erase = at, t.starts(at, window)
		}
	}
	return t // failed: its disk is its user's to keep or remove
}

// starts is the instant at which a timer of this length ends, zero for one that is off.
func (t Timers) starts(at time.Time, length time.Duration) time.Time {
	if length == 0 {
		return time.Time{}
	}
	return instant(at.Add(length))
}

// deadlineRuns says whether the auto-stop runs in the present state. One that would put
// a sandbox to sleep has nothing left to do when it sleeps.
func (t Timers) deadlineRuns() bool {
	switch t.State {
	case Ready:
		return t.Policy.TTL != 0
	case Sleeping:
		return t.Policy.TTL != 0 && t.Policy.SleepDeadline == DeadlineRunning && t.Policy.OnDeadline != Sleep
	}
	return false
}

// With gives the timers under a changed policy. restart says that the auto-stop was
// named in the change: it then starts anew from now, also with the value that it had
// (A2). A change of the sleep mode comes here too, with the policy as it is. It is also how a user who says `keep` gets a full auto-stop after an automatic
// stop that failed (Z10). What a shorter policy lets fall due in the past falls due now:
// nobody knew of it before.
func (t Timers) With(p Policy, restart bool, now time.Time) Timers {
	now = instant(now)
	old := t.Policy
	t.Policy, t.Changed, t.Retries = p, now, maps.Clone(t.Retries)
	restart = restart || p.TTL != old.TTL
	switch {
	case !t.deadlineRuns():
		t.Deadline = time.Time{}
		delete(t.Retries, CauseDeadline)
	case restart || t.Deadline.IsZero():
		t.Deadline = t.starts(now, p.TTL)
		delete(t.Retries, CauseDeadline)
	case p.OnDeadline != old.OnDeadline:
		if r, ok := t.Retries[CauseDeadline]; ok { // the count goes on, so that no operation's id comes twice
			t.Retries[CauseDeadline] = Retry{Tries: r.Tries, Until: now}
		}
	}
	if t.State == Sleeping && p.MemoryWindow != old.MemoryWindow {
		t.MemoryEnd = later(t.starts(t.From, p.MemoryWindow), now)
	}
	if t.State == Stopped && p.ArchiveAfter != old.ArchiveAfter {
		t.Archive = t.restarts(p.ArchiveAfter, now)
	}
	if (t.State == Stopped || t.State == Archived) && p.DeleteAfter != old.DeleteAfter {
		t.Delete = t.restarts(p.DeleteAfter, now)
	}
	return t
}

func (t Timers) restarts(length time.Duration, now time.Time) time.Time {
	if length == 0 {
		return time.Time{}
	}
	return later(t.starts(t.From, length), now)
}

// Act is what is to be done now.
type Act string

// The acts.
const (
	Wait Act = "wait" // nothing before Next
	Run  Act = "run"  // Verb, metered to Due
	Move Act = "move" // the deadline goes from Due to To; ask again
)

// Verdict is what the timers of a sandbox ask for.
type Verdict struct {
	Act   Act       `json:"act"`
	Cause Cause     `json:"cause,omitempty"`
	Due   time.Time `json:"due,omitzero"` // when it fell due, which is what it is metered to (B4)

	// Of Run. The operation's id is the same on every host and after every restart.
	Verb      Verb   `json:"verb,omitempty"`
	Operation string `json:"operation,omitempty"`

	// Of Move.
	To   time.Time `json:"to,omitzero"`
	Turn string    `json:"turn,omitempty"` // the turn that is active

	Next time.Time `json:"next,omitzero"` // of Wait: when to look again; zero is not before something happens
}

// due is one timer that runs.
type due struct {
	cause Cause
	at    time.Time
	verb  Verb
}

// running lists the timers that run, the first to fall due first.
func (t Timers) running() []due {
	onDeadline := t.Policy.OnDeadline
	if t.Retries[CauseDeadline].Instead {
		onDeadline = Stop
	}
	var list []due
	for _, d := range []due{
		{CauseErase, t.Erase, Delete}, {CauseDelete, t.Delete, Delete}, {CauseDeadline, t.Deadline, onDeadline},
		{CauseMemory, t.MemoryEnd, Stop}, {CauseSave, t.Unsaved, t.UnsavedVerb}, {CauseArchive, t.Archive, Archive},
	} {
		if !d.at.IsZero() {
			list = append(list, d)
		}
	}
	slices.SortStableFunc(list, func(a, b due) int {
		return cmp.Or(a.at.Compare(b.at), cmp.Compare(slices.Index(order, a.cause), slices.Index(order, b.cause)))
	})
	return list
}

// Due decides what the timers ask for now. It is asked while no operation is at work on
// the sandbox: one that is has its end first, after which the timers are what they are
// (a wake restarts them, a sleep does not). What fell due long ago is decided as it
// would have been then.
func Due(t Timers, l Leases, now time.Time) Verdict {
	wait := Verdict{Act: Wait}
	held := map[Verb]bool{} // a try of the same thing is pending
	for _, d := range t.running() {
		retry := t.Retries[d.cause]
		switch {
		case d.at.After(now):
			wait.Next = sooner(wait.Next, d.at)
			continue
		case retry.Until.After(now):
			wait.Next = sooner(wait.Next, retry.Until)
			held[d.verb] = true
			continue
		case held[d.verb]:
			continue
		}
		if d.cause == CauseDeadline {
			if turn, active := l.active(d.at, t.Policy.TTL); active {
				return Verdict{Act: Move, Cause: d.cause, Due: d.at, To: instant(d.at.Add(t.Policy.TTL)), Turn: turn}
			}
		}
		return t.run(d)
	}
	return wait
}

func (t Timers) run(d due) Verdict {
	return Verdict{Act: Run, Cause: d.cause, Due: d.at, Verb: d.verb,
		Operation: OperationID(t.Sandbox, t.Generation, d.cause, d.at, t.Retries[d.cause].Tries)}
}

func sooner(a, b time.Time) time.Time {
	if a.IsZero() || b.Before(a) {
		return b
	}
	return a
}

// Moved gives the timers after a Move, which is an event (A3). All other decisions
// change no timer: the event that ends the operation does.
func (t Timers) Moved(d Verdict) Timers {
	if d.Act == Move && d.Due.Equal(t.Deadline) {
		t.Deadline = d.To
	}
	return t
}

// Failed gives the timers after the operation of a Run has failed. It is tried again
// after a pause that doubles, with its due time kept (Z10). refused says that it was
// refused for a cause that the guest controls or that lasts (Z9): a sleep at the
// deadline then becomes a stop, at once, because the auto-stop guards the bill. One whose
// timer was moved meanwhile is forgotten.
func (t Timers) Failed(d Verdict, refused bool, now time.Time, b Backoff) Timers {
	if at, timed := t.at(d.Cause); timed && !at.Equal(d.Due) {
		return t
	}
	r := t.Retries[d.Cause]
	r.Tries++
	r.Until = instant(now.Add(b.Pause(r.Tries)))
	if refused && d.Cause == CauseDeadline && d.Verb == Sleep {
		r.Instead, r.Until = true, instant(now)
	}
	t.Retries = maps.Clone(t.Retries)
	if t.Retries == nil {
		t.Retries = map[Cause]Retry{}
	}
	t.Retries[d.Cause] = r
	return t
}

// at is when the timer of a cause falls due; false for a cause that has none here.
func (t Timers) at(c Cause) (time.Time, bool) {
	at, timed := map[Cause]time.Time{
		CauseErase: t.Erase, CauseDelete: t.Delete, CauseDeadline: t.Deadline, CauseMemory: t.MemoryEnd, CauseSave: t.Unsaved, CauseArchive: t.Archive,
	}[c]
	return at, timed
}

// Unsave gives the timers after a save that somebody asked for has failed, which began
// at an instant: it is tried again until it succeeds (Z10). A later wish takes the place
// of the one before; the beginning of the first counts.
func (t Timers) Unsave(v Verb, began, now time.Time, b Backoff) Timers {
	if t.Unsaved.IsZero() {
		t.Unsaved = instant(began)
	}
	t.UnsavedVerb = v
	return t.Failed(Verdict{Cause: CauseSave, Due: t.Unsaved, Verb: v}, false, now, b)
}

// Kept gives the timers after its user has said that a sandbox is to go on running
// although a save failed (Z10): nothing is tried again, an auto-stop that failed begins
// anew, and nothing was idle before.
func (t Timers) Kept(now time.Time) Timers {
	now = instant(now)
	if _, failed := t.Retries[CauseDeadline]; failed {
		t.Deadline = t.starts(now, t.Policy.TTL)
	}
	t.Unsaved, t.UnsavedVerb, t.Changed = time.Time{}, "", now
	t.Retries = maps.Clone(t.Retries)
	delete(t.Retries, CauseDeadline)
	delete(t.Retries, CauseSave)
	return t
}
