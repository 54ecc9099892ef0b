package sandbox

import (
	"testing"

	"pgregory.net/rapid"
)

// life is a sandbox with what hosts and users do to it at random.
type life struct {
	s      Sandbox
	active *Operation
	seen   []State
	boots  int64
	ops    int
}

// outcomes are the events that may end an operation; "" is an end without success.
var outcomes = map[Verb][]Event{
	Create: {EventCreated, EventCreateFailed}, Sleep: {EventSlept, ""}, Wake: {EventWoken, ""}, Stop: {EventStopped, ""},
	Resume: {EventResumed, ""}, Fork: {""}, Snapshot: {""}, Archive: {EventArchived, ""}, Migrate: {""},
	Delete: {EventDeleted, ""}, Undelete: {EventUndeleted, ""},
}

// happen applies an event as a host's report would.
func (l *life) happen(t *rapid.T, e Event) {
	before := l.s
	next, err := l.s.State.Next(e)
	if err != nil {
		if next != before.State {
			t.Fatalf("%s in %s is refused and still leads to %s", e, before.State, next)
		}
		return
	}
	if transitions[before.State][e] != next {
		t.Fatalf("%s leads from %s to %s, which is not in the table", e, before.State, next)
	}
	if before.State == Deleted && e != EventUndeleted {
		t.Fatalf("what was deleted is %s after %s", next, e)
	}
	l.s.State = next
	if e.Boots() {
		l.s.Generation++
		l.boots++
		l.s.Started = true
	}
	l.seen = append(l.seen, next)
}

func (l *life) ask(t *rapid.T, r Request) {
	d := Admit(l.s, l.active, r)
	switch d.Outcome {
	case Accept:
		if l.active != nil && !d.Cancels {
			t.Fatalf("%s starts while %s is active", d.Verb, l.active.Kind)
		}
		if d.Cancels && r.Verb != Delete {
			t.Fatalf("%s cancels %s", r.Verb, l.active.Kind)
		}
		if l.s.State == Deleted && r.Verb != Undelete && !(d.Cancels && l.active.Kind == Undelete) {
			t.Fatalf("%s starts on what is deleted", d.Verb)
		}
		l.ops++
		l.active = &Operation{ID: "op", Kind: d.Verb, Status: Pending, Generation: l.s.Generation}
	case Join:
		if l.active == nil {
			t.Fatalf("%s in %s joins nothing", r.Verb, l.s.State)
		}
	case Done:
		if l.active != nil && l.s.State != Deleted {
			t.Fatalf("%s in %s is done while %s is active", r.Verb, l.s.State, l.active.Kind)
		}
	case Refuse:
		if d.Err == nil || d.Err.Message == "" || d.Err.Kind == "" {
			t.Fatalf("%s in %s is refused without a word", r.Verb, l.s.State)
		}
	default:
		t.Fatalf("%s in %s: outcome %q", r.Verb, l.s.State, d.Outcome)
	}
}

// TestRandomLives walks random verbs and random events, orderly and not, and holds the
// invariants of the model: S1, S4, S5, S6.
func TestRandomLives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := &life{s: Sandbox{ID: "sbx_1", Name: "x", State: Creating, Spec: Spec{Sleep: SleepManual}}, active: &Operation{ID: "op", Kind: Create, Status: Pending}}
		t.Repeat(map[string]func(*rapid.T){
			"ask": func(t *rapid.T) {
				r := rapid.SampledFrom(requests).Draw(t, "request")
				r.Undelete = r.Verb == Undelete && rapid.Bool().Draw(t, "in its window")
				l.ask(t, r)
			},
			"end": func(t *rapid.T) {
				if l.active == nil {
					t.Skip("nothing is active")
				}
				e := rapid.SampledFrom(outcomes[l.active.Kind]).Draw(t, "event")
				l.active = nil
				if e != "" {
					l.happen(t, e)
				}
			},
			"befall": func(t *rapid.T) { l.happen(t, rapid.SampledFrom(Events).Draw(t, "event")) },
			"": func(t *rapid.T) {
				if !l.s.State.Valid() {
					t.Fatalf("%q is no state", l.s.State)
				}
				if l.s.Generation != l.boots {
					t.Fatalf("generation %d after %d boots", l.s.Generation, l.boots)
				}
				if l.s.State == Ready && l.boots == 0 {
					t.Fatal("ready without a boot")
				}
			},
		})
	})
}
