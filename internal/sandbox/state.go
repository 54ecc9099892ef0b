// Package sandbox is the pure model of a sandbox's life: states, conditions, the
// transition table, the admission of verbs, the steps that a verb takes, the timers
// that act unasked, and what is idle. It does no I/O, reads no clock and starts no
// goroutine; what needs the time is given it.
package sandbox

import (
	"fmt"
	"time"
)

// State is one of seven words. No other word is used for a state anywhere.
type State string

// The states.
const (
	Creating State = "creating" // being prepared
	Ready    State = "ready"    // running; commands work
	Sleeping State = "sleeping" // memory and disk saved, RAM given back
	Stopped  State = "stopped"  // disk saved, host released
	Archived State = "archived" // disk in cold storage
	Failed   State = "failed"   // did not start, or was lost
	Deleted  State = "deleted"  // gone for its user
)

// States lists all seven in the order of a life.
var States = []State{Creating, Ready, Sleeping, Stopped, Archived, Failed, Deleted}

// Valid says whether s is one of the seven.
func (s State) Valid() bool {
	_, ok := transitions[s]
	return ok
}

// Event is what happened to a sandbox; with the state it determines the next state.
type Event string

// The events. The first group ends operations, the second group no verb caused.
const (
	EventCreated      Event = "created"
	EventCreateFailed Event = "create_failed"
	EventSlept        Event = "slept"
	EventWoken        Event = "woken"
	EventStopped      Event = "stopped"
	EventResumed      Event = "resumed"
	EventArchived     Event = "archived"
	EventDeleted      Event = "deleted"
	EventUndeleted    Event = "undeleted"

	EventExited        Event = "exited"         // poweroff, or init ended with code 0
	EventRebooted      Event = "rebooted"       // reboot from inside: a fresh boot
	EventCrashed       Event = "crashed"        // init or the isolation ended otherwise
	EventOOMKilled     Event = "oom_killed"     // the memory limit killed the whole
	EventHostRestarted Event = "host_restarted" // the machine booted anew under it
	EventHostLost      Event = "host_lost"      // the machine did not come back
	EventMemoryExpired Event = "memory_expired" // the memory window ended while asleep
)

// Events lists every event.
var Events = []Event{
	EventCreated, EventCreateFailed, EventSlept, EventWoken, EventStopped, EventResumed,
	EventArchived, EventDeleted, EventUndeleted, EventExited, EventRebooted, EventCrashed,
	EventOOMKilled, EventHostRestarted, EventHostLost, EventMemoryExpired,
}

// transitions is the whole machine. What is not in it does not happen.
var transitions = map[State]map[Event]State{
	Creating: {
		EventCreated:       Ready,
		EventCreateFailed:  Failed,
		EventHostRestarted: Failed,
		EventHostLost:      Failed,
		EventDeleted:       Deleted,
	},
	Ready: {
		EventSlept:         Sleeping,
		EventStopped:       Stopped,
		EventExited:        Stopped,
		EventRebooted:      Ready,
		EventCrashed:       Failed,
		EventOOMKilled:     Failed,
		EventHostRestarted: Failed,
		EventHostLost:      Failed,
		EventDeleted:       Deleted,
	},
	Sleeping: {
		EventWoken:         Ready,
		EventStopped:       Stopped,
		EventMemoryExpired: Stopped,
		EventHostLost:      Failed,
		EventDeleted:       Deleted,
	},
	Stopped: {
		EventResumed:  Ready,
		EventArchived: Archived,
		EventHostLost: Failed,
		EventDeleted:  Deleted,
	},
	Archived: {
		EventResumed: Ready,
		EventDeleted: Deleted,
	},
	Failed: {
		EventResumed: Ready,
		EventDeleted: Deleted,
	},
	Deleted: {
		EventUndeleted: Stopped,
	},
}

// TransitionError says that an event cannot happen in a state.
type TransitionError struct {
	From  State
	Event Event
}

// Error names both.
func (e *TransitionError) Error() string {
	return fmt.Sprintf("a sandbox that is %s cannot be %s", e.From, e.Event)
}

// Next gives the state after an event, or a *TransitionError.
func (s State) Next(e Event) (State, error) {
	to, ok := transitions[s][e]
	if !ok {
		return s, &TransitionError{From: s, Event: e}
	}
	return to, nil
}

// Boots says whether the event puts a sandbox's programs to work again, which makes
// a new generation.
func (e Event) Boots() bool {
	switch e {
	case EventCreated, EventWoken, EventResumed, EventRebooted:
		return true
	}
	return false
}

// ConditionType is one of five words that accompany a state.
type ConditionType string

// The conditions, each with the reasons that it may have. Degraded is set by the
// report of a failed save (save_failed), a silent host (host_unreachable), a slow
// blob store (replication_behind), a full disk or pool (disk_full), storage that does
// not answer (storage_stalled) and a guest agent that does not (guest_silent, ADR
// 0006); the report that the cause has ended clears it.
const (
	Migrating    ConditionType = "migrating"
	Degraded     ConditionType = "degraded"
	Recovering   ConditionType = "recovering"
	Hydrating    ConditionType = "hydrating"
	NestedActive ConditionType = "nested_active"
)

// GuestSilent is the reason of a sandbox that runs and whose agent does not answer.
const GuestSilent = "guest_silent"

// ConditionReasons is the closed list of reasons of each condition. A condition
// with no reasons of its own carries its type as the reason.
var ConditionReasons = map[ConditionType][]string{
	Migrating:    {string(Migrating)},
	Degraded:     {"save_failed", "host_unreachable", "replication_behind", "disk_full", "storage_stalled", GuestSilent},
	Recovering:   {string(Recovering)},
	Hydrating:    {string(Hydrating)},
	NestedActive: {string(NestedActive)},
}

// Condition is a fact that holds beside the state.
type Condition struct {
	Type    ConditionType `json:"type"`
	Reason  string        `json:"reason"`
	Message string        `json:"message"`
	Since   time.Time     `json:"since"`
}

// SetCondition puts c into the list, which holds one entry for each type and
// reason; one that is there already keeps its since-time. The input is not changed.
func SetCondition(list []Condition, c Condition) []Condition {
	out := make([]Condition, 0, len(list)+1)
	for _, old := range list {
		if old.Type == c.Type && old.Reason == c.Reason {
			c.Since = old.Since
			continue
		}
		out = append(out, old)
	}
	return append(out, c)
}

// ClearCondition takes a condition out of the list. The input is not changed.
func ClearCondition(list []Condition, t ConditionType, reason string) []Condition {
	out := make([]Condition, 0, len(list))
	for _, c := range list {
		if c.Type != t || c.Reason != reason {
			out = append(out, c)
		}
	}
	return out
}
