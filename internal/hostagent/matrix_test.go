package hostagent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/crashmatrix"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// proofs is this package's part of docs/crash-matrix.md.
var proofs = crashmatrix.New("hostagent", "../../docs/crash-matrix.md")

// The columns of a journey's table of steps.
const (
	colFails   = "fails"
	colLate    = "fails late"
	colFull    = "pool full"
	colHangs   = "hangs"
	colStuck   = "hangs in the kernel"
	colTwice   = "done twice"
	colDies    = "sandbox dies"
	colKilled  = "agent killed"
	colPower   = "power cut"
	colBefore  = "killed before"
	colAfter   = "killed after"
	colOnce    = "fails once"
	stepColumn = "step"
	callColumn = "call"
)

var stepTables, callTables = tables()

func tables() (steps, calls map[string]*crashmatrix.Table) {
	steps, calls = map[string]*crashmatrix.Table{}, map[string]*crashmatrix.Table{}
	for _, j := range journeys {
		steps[j.name] = proofs.Table(j.name+": at each step", "", stepColumn,
			colFails, colLate, colFull, colHangs, colStuck, colTwice, colDies, colKilled, colPower)
		calls[j.name] = proofs.Table(j.name+": at each record and call", "", callColumn, colOnce, colBefore, colAfter)
	}
	return steps, calls
}

// before is what must not get lost.
type before struct {
	state   sandbox.State
	content string
	life    int
}

func (w *world) before() before {
	w.idle(sb)
	b := before{state: w.book.state(sb), content: w.disks.content(sb)}
	if g := w.guest(sb); g != nil {
		b.life = g.life()
	}
	return b
}

// kept proves that the sandbox, wherever it has come to, has its disk, and its memory
// where that was not to end; and that it can be brought to run.
func (j journey) kept(w *world, b before) {
	w.t.Helper()
	if j.verb == sandbox.Create || j.verb == sandbox.Delete && !j.keep && w.book.state(sb) == sandbox.Deleted {
		return
	}
	if got := w.disks.content(sb); got != b.content {
		w.t.Errorf("the disk was %q and is %q", b.content, got)
	}
	memory := true
	switch w.book.state(sb) {
	case sandbox.Deleted: // and can be brought back
		memory = false
		w.must(w.command(sb, sandbox.Undelete))
		w.must(w.command(sb, sandbox.Resume))
	case sandbox.Sleeping:
		w.must(w.command(sb, sandbox.Wake))
	case sandbox.Stopped, sandbox.Failed:
		memory = false
		w.must(w.command(sb, sandbox.Resume))
	case sandbox.Ready:
		memory = j.verb != sandbox.Resume
	}
	w.ping(sb)
	if got := w.disks.content(sb); got != b.content {
		w.t.Errorf("the disk was %q and came back as %q", b.content, got)
	}
	if got := w.guest(sb).life(); memory && got != b.life {
		w.t.Errorf("the memory was of boot %d and is of %d", b.life, got)
	}
	if left := w.book.conditions(sb); len(left) > 0 {
		w.t.Errorf("conditions are left: %v", left)
	}
}

// outcome says what an operation came to, and proves that it is sound: done, or undone
// so that the next try goes well (Z10, Z11).
func (j journey) outcome(w *world, b before, cmd hostproto.Command, ids []string, f *hostproto.Failure) string {
	w.t.Helper()
	if f == nil {
		j.reached(w, cmd, ids)
		j.kept(w, b)
		return "done: " + string(j.end)
	}
	after := b.state
	if j.verb == sandbox.Create {
		after = sandbox.Failed
	}
	w.idle(sb)
	if got := w.book.state(sb); got != after {
		w.t.Errorf("after the failure (%s) it is %s, not %s", f.Message, got, after)
	}
	text := "undone: " + string(after)
	if conds := w.book.conditions(sb); len(conds) > 0 {
		text += ", " + strings.Join(conds, ", ")
	}
	w.consistent(ids...)
	if j.verb == sandbox.Create {
		w.must(w.command(sb, sandbox.Delete))
		w.consistent(sb)
		return text
	}
	if after == sandbox.Ready {
		if got := w.guest(sb).life(); got != b.life {
			w.t.Errorf("the memory was of boot %d and is of %d", b.life, got)
		}
	}
	again := cmd
	again.Operation, again.Children = opID(), slices.Clone(cmd.Children)
	for i := range again.Children {
		again.Children[i].Operation = opID()
	}
	w.must(again)
	j.reached(w, again, ids)
	j.kept(w, b)
	return text
}

// settled says where a sandbox is that was ended in the middle of a verb, and proves
// that nothing is lost but what ran.
func (j journey) settled(w *world, b before, cmd hostproto.Command, ids []string) string {
	w.t.Helper()
	_ = w.book.end(w.t, cmd.Operation)
	for _, c := range cmd.Children {
		if w.book.state(c.Sandbox) != "" || w.book.generation(c.Sandbox) > 0 {
			_ = w.book.end(w.t, c.Operation)
		}
	}
	w.consistent(ids...)
	w.book.sound(w.t)
	text := string(w.book.state(sb))
	j.kept(w, b)
	w.consistent(ids...)
	return text
}

// affliction is what happens to one step.
type affliction struct {
	column string
	limit  time.Duration // of the step; 0 for plenty
	// point takes the place of the step. false: nothing has happened to it.
	point func(w *world, ctx context.Context, do func(context.Context) error) (bool, error)
	// during runs in the test, from when the step is hit until it may return.
	during func(w *world, j journey, step string)
}

var afflictions = []affliction{
	{column: colFails, point: func(*world, context.Context, func(context.Context) error) (bool, error) { return true, errMade }},
	{column: colLate, point: func(_ *world, ctx context.Context, do func(context.Context) error) (bool, error) {
		_ = do(ctx)
		return true, errMade
	}},
	{column: colFull, point: func(w *world, ctx context.Context, do func(context.Context) error) (bool, error) {
		w.disks.full.Store(true)
		defer w.disks.full.Store(false)
		err := do(ctx)
		return err != nil, err
	}},
	{column: colHangs, limit: 20 * time.Millisecond, point: func(_ *world, ctx context.Context, _ func(context.Context) error) (bool, error) {
		<-ctx.Done()
		return true, context.Cause(ctx)
	}},
	{column: colStuck, limit: 20 * time.Millisecond, point: func(w *world, ctx context.Context, do func(context.Context) error) (bool, error) {
		<-w.release // whatever ctx says
		return true, do(ctx)
	}, during: stuckMeanwhile},
	{column: colTwice, point: func(_ *world, ctx context.Context, do func(context.Context) error) (bool, error) {
		if err := do(ctx); err != nil {
			return true, err
		}
		return true, do(ctx)
	}},
	{column: colDies, point: func(w *world, ctx context.Context, do func(context.Context) error) (bool, error) {
		if !slices.Contains(w.machine.Running(), sb) {
			return false, do(ctx)
		}
		w.machine.Crash(sb, runtime.Exit{Known: true, Signal: 9})
		return true, do(ctx)
	}},
}

// stuckMeanwhile proves that a sandbox whose save hangs in the kernel runs on, and that
// its conditions say what is wrong.
func stuckMeanwhile(w *world, j journey, step string) {
	eventually(w.t, "storage_stalled", func() bool { return slices.Contains(w.book.conditions(sb), "storage_stalled") })
	frees := []string{sandbox.StepPrepare, sandbox.StepPause, sandbox.StepCapture, sandbox.StepClone, sandbox.StepThaw, sandbox.StepSeal}
	if j.start == sandbox.Ready && slices.Contains(frees, step) {
		w.ping(sb)
	}
	close(w.release)
	if j.verb != sandbox.Delete { // which ends all conditions
		eventually(w.t, "the end of storage_stalled", func() bool { return !slices.Contains(w.book.conditions(sb), "storage_stalled") })
	}
}

// Each step of each verb fails, before and after its work; meets a full pool; hangs,
// where it listens and where it does not; is done twice; and its sandbox dies in it.
func TestAtEachStep(t *testing.T) {
	for _, j := range journeys {
		for _, a := range afflictions {
			t.Run(j.name+"/"+a.column, func(t *testing.T) {
				t.Parallel()
				for n, step := range j.steps(t) {
					if a.limit > 0 && step == sandbox.StepSpawn {
						continue // it waits for its children, each of which has its limits
					}
					t.Run(fmt.Sprint(n, step), func(t *testing.T) {
						if text := j.afflict(t, a, n, step); text != "" && !t.Failed() {
							stepTables[j.name].Prove(n, "`"+step+"`", a.column, text)
						}
					})
				}
			})
		}
	}
}

func (j journey) afflict(t *testing.T, a affliction, n int, step string) string {
	w := newWorld(t)
	cmd, ids := j.bring(w)
	b := w.before()
	w.release = make(chan struct{})
	seen, happened, hit := 0, false, make(chan struct{})
	w.mu.Lock()
	w.limits = func(verb sandbox.Verb, _ string) time.Duration {
		if a.limit > 0 && verb == j.verb && seen == n {
			return a.limit
		}
		return time.Minute
	}
	w.mu.Unlock()
	w.setPoint(func(ctx context.Context, verb sandbox.Verb, _ string, do func(context.Context) error) error {
		w.mu.Lock()
		mine := verb == j.verb && seen == n
		if verb == j.verb {
			seen++
		}
		w.mu.Unlock()
		if !mine {
			return do(ctx)
		}
		close(hit)
		did, err := a.point(w, ctx, do)
		w.mu.Lock()
		happened = did
		w.mu.Unlock()
		return err
	})
	if err := w.agent.Submit(t.Context(), cmd); err != nil {
		t.Fatal(err)
	}
	<-hit
	if a.during != nil {
		a.during(w, j, step)
	}
	f := w.book.end(t, cmd.Operation)
	w.setPoint(nil)
	w.mu.Lock()
	done := happened
	w.mu.Unlock()
	if !done {
		return ""
	}
	if a.column == colDies {
		text := j.settled(w, b, cmd, ids)
		if j.verb == sandbox.Stop && step == sandbox.StepPrepare && (text == "stopped" || text == "failed") {
			return "stopped or failed" // the stop goes on, or the end is seen before: both are true
		}
		return text
	}
	if f != nil && (a.column == colHangs || a.column == colStuck) && f.Kind != "deadline_exceeded" {
		t.Errorf("it failed as %s: %s", f.Kind, f.Message)
	}
	return j.outcome(w, b, cmd, ids, f)
}

// dieAt hands a command in and kills the agent at an instant of it.
func (w *world) dieAt(cmd hostproto.Command, at instant) {
	w.t.Helper()
	w.mortal.arm(&at)
	a, ctx := w.agent, w.t.Context()
	go func() { _ = a.Submit(ctx, cmd) }()
	select {
	case <-w.mortal.died:
	case <-time.After(15 * time.Second):
		w.t.Fatalf("the instant did not come: %s", at)
	}
	w.bury()
}

// handIn hands a command in until the host has it, as the control plane does while the
// operation is active.
func (w *world) handIn(cmd hostproto.Command) {
	w.t.Helper()
	for began := time.Now(); !w.book.has(cmd.Operation); time.Sleep(5 * time.Millisecond) {
		err := w.agent.Submit(w.t.Context(), cmd)
		if err == nil {
			return
		}
		// The owner may just be on its way out, with the sandbox that it deleted.
		if !fault.Is(err, fault.Unavailable) || time.Since(began) > 15*time.Second {
			w.t.Fatal(err)
		}
	}
}

// The agent is killed before each step, or the machine loses power there. The next
// agent finishes the verb, once; after a power cut what ran is failed with its disk and
// what was committed stays (S8).
func TestDiesAtEachStep(t *testing.T) {
	for _, j := range journeys {
		for _, column := range []string{colKilled, colPower} {
			t.Run(j.name+"/"+column, func(t *testing.T) {
				t.Parallel()
				times := map[string]int{}
				for n, step := range j.steps(t) {
					times[step]++
					at := instant{sb, "step " + step, times[step], false}
					t.Run(fmt.Sprint(n, step), func(t *testing.T) {
						w := newWorld(t)
						cmd, ids := j.bring(w)
						b := w.before()
						w.dieAt(cmd, at)
						text := ""
						if column == colPower {
							w.reboot()
							w.handIn(cmd)
							text = j.settled(w, b, cmd, ids)
						} else {
							w.start()
							w.handIn(cmd)
							text = j.outcome(w, b, cmd, ids, w.book.end(t, cmd.Operation))
						}
						if !t.Failed() {
							stepTables[j.name].Prove(n, "`"+step+"`", column, text)
						}
					})
				}
			})
		}
	}
}

// calls lists the instants of a journey that are not steps: each record of the journals
// and each call to the machine, for the sandbox and the first of its forks.
func (j journey) calls(t *testing.T) []instant {
	w := newWorld(t)
	cmd, ids := j.bring(w)
	w.idle(sb)
	w.mortal.arm(nil)
	w.must(cmd)
	j.reached(w, cmd, ids)
	var all []instant
	for _, id := range slices.Concat(ids[:1], []string{captured}, ids[1:min(2, len(ids))]) {
		for _, at := range w.mortal.instants() {
			switch {
			case at.sandbox != id || at.after, at.name == "save open" && id == captured, strings.HasPrefix(at.name, "step "), at.name == "progress", at.name == "guest dial":
			default:
				all = append(all, at)
			}
		}
	}
	return all
}

func (i instant) row() string {
	text := "`" + i.name + "`"
	if i.nth > 1 {
		text += fmt.Sprintf(" no. %d", i.nth)
	}
	switch i.sandbox {
	case sb:
	case captured:
		text += ", of the capture"
	default:
		text += ", of a fork"
	}
	return text
}

// The agent is killed before and after each record of a journal and each call to the
// machine, or that call fails once. The verb is done all the same, once, or undone.
func TestAtEachCall(t *testing.T) {
	for _, j := range journeys {
		t.Run(j.name, func(t *testing.T) {
			t.Parallel()
			for n, at := range j.calls(t) {
				for _, column := range []string{colOnce, colBefore, colAfter} {
					t.Run(fmt.Sprint(n, at.name, column), func(t *testing.T) {
						text := j.callFault(t, at, column)
						if !t.Failed() {
							callTables[j.name].Prove(n, at.row(), column, text)
						}
					})
				}
			}
		})
	}
}

func (j journey) callFault(t *testing.T, at instant, column string) string {
	w := newWorld(t)
	cmd, ids := j.bring(w)
	b := w.before()
	if column == colOnce {
		w.mortal.spoil(at)
		if err := w.agent.Submit(t.Context(), cmd); err != nil {
			w.handIn(cmd)
		}
	} else {
		at.after = column == colAfter
		w.dieAt(cmd, at)
		w.start()
		w.handIn(cmd)
	}
	f := w.book.end(t, cmd.Operation)
	if column == colOnce {
		eventually(t, "the call to fail", w.mortal.spoilt)
	}
	if at.sandbox != sb && at.sandbox != captured && column == colOnce {
		return j.forkOutcome(w, b, cmd, ids, at.sandbox)
	}
	return j.outcome(w, b, cmd, ids, f)
}

// forkOutcome says what one fork came to whose creation met a fault: the others and
// the source are not touched.
func (j journey) forkOutcome(w *world, b before, cmd hostproto.Command, ids []string, id string) string {
	w.t.Helper()
	for _, c := range cmd.Children {
		f, want := w.book.end(w.t, c.Operation), sandbox.Ready
		if f != nil && c.Sandbox == id {
			want = sandbox.Failed
		}
		if got := w.book.state(c.Sandbox); got != want {
			w.t.Errorf("fork %s is %s: %+v", c.Sandbox, got, f)
		}
	}
	if got := w.book.state(sb); got != j.end {
		w.t.Errorf("the source is %s", got)
	}
	w.consistent(ids...)
	j.kept(w, b)
	if w.book.state(id) == sandbox.Failed {
		w.must(w.command(id, sandbox.Delete))
		w.consistent(ids...)
		return "fork failed; source " + string(j.end)
	}
	return "done: " + string(j.end)
}
