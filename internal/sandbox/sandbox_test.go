package sandbox

import (
	"encoding/json"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

var update = flag.Bool("update", false, "write docs/state-machine.md instead of comparing it")

// specMatrix is SPEC section 3, cell by cell, in the order of States. What follows a
// colon is the verb or word that the refusal has to name.
var specMatrix = map[row]string{
	row(Sleep):    "no | run | done | no | no | no | not_found",
	row(Wake):     "join | done | run | no:resume | no:resume | no:resume | not_found",
	row(Stop):     "no:delete | run | run | done | done | no | not_found",
	row(Resume):   "join | done | run=wake | run | run | run | not_found",
	"fork live":   "no | run | run | no:disk | no:resume | no:resume | not_found",
	"fork disk":   "no | run | run | run | no:resume | no:resume | not_found",
	row(Snapshot): "no | run | run | run | no:resume | no:resume | not_found",
	row(Archive):  "no | no:stop | no:stop | run | done | no | not_found",
	row(Migrate):  "no | run | run | run | no | no | not_found",
	row(Delete):   "run | run | run | run | run | run | done",
	row(Undelete): "no | no | no | no | no | no | run",
}

// requests are the rows of the matrix as requests.
var requests = []Request{
	{Verb: Sleep}, {Verb: Wake}, {Verb: Stop}, {Verb: Resume},
	{Verb: Fork, Mode: ForkLive}, {Verb: Fork, Mode: ForkDisk},
	{Verb: Snapshot}, {Verb: Archive}, {Verb: Migrate}, {Verb: Delete}, {Verb: Undelete, Undelete: true},
}

func sample(state State) Sandbox {
	return Sandbox{ID: "sbx_1", Name: "calm-otter-12", State: state, Started: state != Creating, Generation: 1, Spec: Spec{Sleep: SleepManual}}
}

// activeIn is the operation that is at work in a state where no verb has been asked
// for: a sandbox that is creating is being created.
func activeIn(state State) *Operation {
	if state == Creating {
		return &Operation{ID: "op_0", Kind: Create, Status: Running}
	}
	return nil
}

func TestMatrixIsTheContract_V_S6(t *testing.T) {
	if len(requests) != len(specMatrix) || len(matrix) != len(specMatrix) {
		t.Fatalf("the matrix has %d rows, the requests %d, the contract %d", len(matrix), len(requests), len(specMatrix))
	}
	for _, r := range requests {
		for i, cell := range strings.Split(specMatrix[r.row()], "|") {
			cell, state := strings.TrimSpace(cell), States[i]
			d := Admit(sample(state), activeIn(state), r)
			want, word, _ := strings.Cut(cell, ":")
			want, runs, other := strings.Cut(want, "=")
			if !other {
				runs = string(r.Verb)
			}
			switch {
			case want == "not_found":
				if d.Outcome != Refuse || d.Err.Kind != fault.NotFound {
					t.Errorf("%s of %s: %+v, want not_found", r.row(), state, d)
				}
				continue
			case string(d.Outcome) != want:
				t.Errorf("%s of %s: %q, want %q", r.row(), state, d.Outcome, want)
			case d.Outcome == Accept && string(d.Verb) != runs:
				t.Errorf("%s of %s runs %q, want %q", r.row(), state, d.Verb, runs)
			case d.Outcome == Refuse && d.Err.Kind != fault.FailedPrecondition:
				t.Errorf("%s of %s is refused as %s", r.row(), state, d.Err.Kind)
			case d.Outcome == Refuse && (!strings.Contains(d.Err.Message, word) || d.Err.Reason != "state_"+string(state)):
				t.Errorf("%s of %s: the refusal %q (%s) does not name %q", r.row(), state, d.Err.Message, d.Err.Reason, word)
			}
		}
	}
}

func TestRacingVerbsHaveOneWinner_S4_S5(t *testing.T) {
	for _, state := range States[:len(States)-1] {
		for _, running := range []Verb{Create, Sleep, Wake, Stop, Resume, Fork, Snapshot, Archive, Migrate, Delete} {
			active := &Operation{ID: "op_running", Kind: running, Status: Running}
			for _, r := range requests {
				d := Admit(sample(state), active, r)
				switch {
				case r.Verb == Delete && running == Delete:
					if d.Outcome != Join {
						t.Errorf("a second delete of %s: %q, want join", state, d.Outcome)
					}
				case r.Verb == Delete:
					if d.Outcome != Accept || !d.Cancels {
						t.Errorf("delete of %s while %s runs: %+v, want it to run and cancel", state, running, d)
					}
				case d.Outcome == Accept:
					t.Errorf("%s of %s runs beside %s", r.row(), state, running)
				case d.Outcome == Done:
					t.Errorf("%s of %s is done while %s changes it", r.row(), state, running)
				case d.Outcome == Join && running == Delete:
					t.Errorf("%s of %s joins a deletion", r.row(), state)
				case d.Outcome == Refuse && d.Err.Kind == fault.Conflict:
					if d.Err.Reason != "op_running" || !strings.Contains(d.Err.Message, "op_running") {
						t.Errorf("%s of %s: the conflict %q does not name the operation", r.row(), state, d.Err.Message)
					}
				}
			}
		}
	}
	active := &Operation{ID: "op_running", Kind: Wake, Status: Running}
	if d := Admit(sample(Sleeping), active, Request{Verb: Wake}); d.Outcome != Join {
		t.Errorf("a second wake: %q, want join", d.Outcome)
	}
	if d := Admit(sample(Sleeping), active, Request{Verb: Resume}); d.Outcome != Join {
		t.Errorf("a resume while it wakes: %q, want join", d.Outcome)
	}
	fork := &Operation{ID: "op_fork", Kind: Fork, Status: Running}
	if d := Admit(sample(Ready), fork, Request{Verb: Fork, Mode: ForkLive}); d.Outcome != Refuse || d.Err.Kind != fault.Conflict {
		t.Errorf("a second fork: %+v, want a conflict: each makes sandboxes of its own", d)
	}
}

func TestGuards(t *testing.T) {
	never := sample(Ready)
	never.Spec.Sleep = SleepNever
	if d := Admit(never, nil, Request{Verb: Sleep}); d.Outcome != Refuse || d.Err.Reason != "sleep_never" {
		t.Errorf("Z1: sleep with mode never: %+v", d)
	}
	unborn := sample(Failed)
	unborn.Started = false
	if d := Admit(unborn, nil, Request{Verb: Resume}); d.Outcome != Refuse || d.Err.Reason != "never_started" {
		t.Errorf("resume of what never started: %+v", d)
	}
	if d := Admit(sample(Deleted), nil, Request{Verb: Undelete}); d.Outcome != Refuse || d.Err.Kind != fault.NotFound {
		t.Errorf("undelete after its window: %+v", d)
	}
	if d := Admit(sample(Creating), nil, Request{Verb: Wake}); d.Outcome != Refuse || d.Err.Kind != fault.FailedPrecondition {
		t.Errorf("wake of what nothing prepares: %+v", d)
	}
	if r := Lookup("paused", Request{Verb: Sleep}); r.Kind != fault.NotFound {
		t.Errorf("a state that is none: %+v", r)
	}
}

func TestTransitions(t *testing.T) {
	for _, s := range States {
		if !s.Valid() {
			t.Errorf("%s is not valid", s)
		}
		for _, e := range Events {
			to, err := s.Next(e)
			if want, ok := transitions[s][e]; ok != (err == nil) || ok && to != want || !ok && to != s {
				t.Errorf("%s %s: %s, %v", s, e, to, err)
			}
			if err != nil && err.Error() == "" {
				t.Error("a transition error says nothing")
			}
		}
		if _, ok := transitions[s][EventDeleted]; !ok && s != Deleted {
			t.Errorf("S5: %s has no way to deleted", s)
		}
	}
	for from, row := range transitions {
		for e, to := range row {
			if !slices.Contains(Events, e) || !to.Valid() {
				t.Errorf("%s %s %s is not made of listed words", from, e, to)
			}
			if e.Boots() != (to == Ready) {
				t.Errorf("%s leads from %s to %s, but Boots is %v", e, from, to, e.Boots())
			}
		}
	}
	if State("paused").Valid() {
		t.Error("S1: there is an eighth state")
	}
}

func TestConditions_S2(t *testing.T) {
	t0 := time.Unix(100, 0)
	a := Condition{Type: Degraded, Reason: "save_failed", Message: "first", Since: t0}
	list := SetCondition(nil, a)
	a2 := a
	a2.Message, a2.Since = "second", t0.Add(time.Hour)
	again := SetCondition(list, a2)
	if len(again) != 1 || again[0].Message != "second" || !again[0].Since.Equal(t0) || list[0].Message != "first" {
		t.Errorf("set again: %+v, the input is now %+v", again, list)
	}
	both := SetCondition(again, Condition{Type: Degraded, Reason: "disk_full"})
	if len(both) != 2 {
		t.Errorf("two reasons: %+v", both)
	}
	left := ClearCondition(both, Degraded, "save_failed")
	if len(left) != 1 || left[0].Reason != "disk_full" || len(both) != 2 {
		t.Errorf("cleared: %+v", left)
	}
	for typ, reasons := range ConditionReasons {
		if len(reasons) == 0 {
			t.Errorf("%s has no reason", typ)
		}
	}
}

func TestStepsHaveNames(t *testing.T) {
	for verb, list := range steps {
		seen := map[string]bool{}
		for _, s := range Steps(verb) {
			if s.Name == "" || seen[s.Name] {
				t.Errorf("%s: step %q is empty or twice", verb, s.Name)
			}
			seen[s.Name] = true
		}
		if len(list) == 0 {
			t.Errorf("%s has no steps", verb)
		}
	}
	if Steps(Archive) != nil {
		t.Error("archive is carried out by no host yet")
	}
}

func TestOperationStatus(t *testing.T) {
	for status, active := range map[OperationStatus]bool{Pending: true, Running: true, Succeeded: false, Errored: false, Cancelled: false} {
		if status.Active() != active {
			t.Errorf("%s: active is %v", status, status.Active())
		}
	}
	b, err := json.Marshal(Spec{Template: "base", Sleep: SleepManual})
	if err != nil || !strings.Contains(string(b), `"sleep_mode":"manual"`) {
		t.Errorf("%s, %v", b, err)
	}
}

func TestDocument(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "state-machine.md")
	got := document()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s is not what the tables say; run `go test ./internal/sandbox -update` and read the difference", path)
	}
}

// StepNames has every step there is.
func TestStepNamesAreWhole(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "steps.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	constants := 0
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || !strings.HasPrefix(spec.Names[0].Name, "Step") || len(spec.Values) != 1 {
			return true
		}
		lit, ok := spec.Values[0].(*ast.BasicLit)
		if !ok {
			return true
		}
		constants++
		if name, _ := strconv.Unquote(lit.Value); !slices.Contains(StepNames, name) {
			t.Errorf("StepNames lacks %s", name)
		}
		return true
	})
	if constants != len(StepNames) {
		t.Errorf("there are %d steps and %d names", constants, len(StepNames))
	}
}
