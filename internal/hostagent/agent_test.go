package hostagent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/sandbox"
)

func TestMain(m *testing.M) {
	if text := os.Getenv(victimEnv); text != "" {
		victim(text)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) { os.Exit(proofs.Main(code)) }))
}

// journey is a verb with the way to where it can be used, and what it leads to.
type journey struct {
	name  string
	verb  sandbox.Verb
	mode  sandbox.ForkMode
	start sandbox.State // of the sandbox "sb"
	end   sandbox.State
	forks int
	keep  bool // of a delete: the disk is kept
}

var journeys = []journey{
	{"create", sandbox.Create, "", sandbox.Creating, sandbox.Ready, 0, false},
	{"sleep", sandbox.Sleep, "", sandbox.Ready, sandbox.Sleeping, 0, false},
	{"wake", sandbox.Wake, "", sandbox.Sleeping, sandbox.Ready, 0, false},
	{"stop ready", sandbox.Stop, "", sandbox.Ready, sandbox.Stopped, 0, false},
	{"stop sleeping", sandbox.Stop, "", sandbox.Sleeping, sandbox.Stopped, 0, false},
	{"resume", sandbox.Resume, "", sandbox.Stopped, sandbox.Ready, 0, false},
	{"fork live ready", sandbox.Fork, sandbox.ForkLive, sandbox.Ready, sandbox.Ready, 3, false},
	{"fork live sleeping", sandbox.Fork, sandbox.ForkLive, sandbox.Sleeping, sandbox.Sleeping, 2, false},
	{"fork disk ready", sandbox.Fork, sandbox.ForkDisk, sandbox.Ready, sandbox.Ready, 2, false},
	{"fork disk sleeping", sandbox.Fork, sandbox.ForkDisk, sandbox.Sleeping, sandbox.Sleeping, 2, false},
	{"fork disk stopped", sandbox.Fork, sandbox.ForkDisk, sandbox.Stopped, sandbox.Stopped, 2, false},
	{"delete ready", sandbox.Delete, "", sandbox.Ready, sandbox.Deleted, 0, false},
	{"delete sleeping", sandbox.Delete, "", sandbox.Sleeping, sandbox.Deleted, 0, false},
	{"delete stopped", sandbox.Delete, "", sandbox.Stopped, sandbox.Deleted, 0, false},
	{"delete ready, kept", sandbox.Delete, "", sandbox.Ready, sandbox.Deleted, 0, true},
	{"delete sleeping, kept", sandbox.Delete, "", sandbox.Sleeping, sandbox.Deleted, 0, true},
	{"delete stopped, kept", sandbox.Delete, "", sandbox.Stopped, sandbox.Deleted, 0, true},
	{"undelete", sandbox.Undelete, "", sandbox.Deleted, sandbox.Stopped, 0, false},
	{"erase deleted", sandbox.Delete, "", sandbox.Deleted, sandbox.Deleted, 0, false},
}

const sb = "sb"

// bring takes the sandbox to where the journey starts and gives the journey's
// command with all sandboxes that it is about.
func (j journey) bring(w *world) (hostproto.Command, []string) {
	if j.start != sandbox.Creating {
		create := w.command(sb, sandbox.Create)
		if j.keep || j.start == sandbox.Deleted {
			p := policy(0)
			create.Policy = &p
		}
		w.must(create)
	}
	switch j.start {
	case sandbox.Sleeping:
		w.must(w.command(sb, sandbox.Sleep))
	case sandbox.Stopped:
		w.must(w.command(sb, sandbox.Stop))
	case sandbox.Deleted:
		w.must(w.deletion(time.Hour))
	}
	cmd := w.command(sb, j.verb)
	if j.keep {
		cmd.UndeleteFor = time.Hour
	}
	cmd.Mode = j.mode
	ids := []string{sb}
	for i := range j.forks {
		child := hostproto.Child{Sandbox: fmt.Sprintf("fork-%d", i), Operation: opID(), Name: fmt.Sprintf("fork-%d", i)}
		cmd.Children = append(cmd.Children, child)
		ids = append(ids, child.Sandbox)
	}
	return cmd, ids
}

// reached proves that the journey has come to its end.
func (j journey) reached(w *world, cmd hostproto.Command, ids []string) {
	w.t.Helper()
	for _, c := range cmd.Children {
		if f := w.book.end(w.t, c.Operation); f != nil {
			w.t.Errorf("fork %s failed: %s", c.Sandbox, f.Message)
		}
		if got := w.book.state(c.Sandbox); got != sandbox.Ready {
			w.t.Errorf("fork %s is %s", c.Sandbox, got)
		}
		if w.guest(c.Sandbox) == nil {
			continue
		}
		if was, is := w.guest(sb).life(), w.guest(c.Sandbox).life(); (was == is) != (j.mode == sandbox.ForkLive) {
			w.t.Errorf("the memory of fork %s is of boot %d, that of its source of %d", c.Sandbox, is, was)
		}
	}
	if got := w.book.state(sb); got != j.end {
		w.t.Errorf("it is %s, not %s", got, j.end)
	}
	w.consistent(ids...)
	w.book.sound(w.t)
}

// steps lists the steps that the journey goes through, by taking it once.
func (j journey) steps(t *testing.T) []string {
	taken.Lock()
	defer taken.Unlock()
	if taken.steps[j.name] == nil {
		taken.steps[j.name] = j.take(t)
	}
	return taken.steps[j.name]
}

// taken has the steps of the journeys that were taken before.
var taken = struct {
	sync.Mutex
	steps map[string][]string
}{steps: map[string][]string{}}

func (j journey) take(t *testing.T) []string {
	w := newWorld(t)
	cmd, ids := j.bring(w)
	var steps []string
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == j.verb {
			w.mu.Lock()
			defer w.mu.Unlock()
			steps = append(steps, step)
		}
		return nil
	})
	w.must(cmd)
	j.reached(w, cmd, ids)
	w.mu.Lock()
	defer w.mu.Unlock()
	return steps
}

func TestJourneys(t *testing.T) {
	for _, j := range journeys {
		t.Run(j.name, func(t *testing.T) {
			t.Parallel()
			if len(j.steps(t)) == 0 {
				t.Error("it took no step")
			}
		})
	}
}

// Handing a command in twice, before and after its end, does it once.
func TestCommandTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cmd := w.command(sb, sandbox.Create)
	for range 3 {
		if err := w.agent.Submit(t.Context(), cmd); err != nil {
			t.Fatal(err)
		}
	}
	w.must(cmd)
	if n := w.driver.Calls("Start"); n != 1 {
		t.Errorf("it was started %d times", n)
	}
	w.consistent(sb)
}

// An operation that is handed in again after something else has happened is reported
// as ended, and not as news: the state stays true.
func TestRepeatIsNoNews(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.must(w.command(sb, sandbox.Stop))
	resume := w.command(sb, sandbox.Resume)
	w.must(resume)
	for range 2 {
		w.idle(sb)
		n := w.book.last(sb).Seq
		if err := w.agent.Submit(t.Context(), resume); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the repeat", func() bool { return w.book.last(sb).Seq == n+1 })
		last := w.book.last(sb)
		if got := w.book.state(sb); !last.Ended || (last.Event != "") != (got == sandbox.Ready) {
			t.Errorf("it is %s, and the repeat says %+v", got, last)
		}
		w.idle(sb)
		w.machine.Crash(sb, runtime.Exit{Known: true, Signal: 9})
		eventually(t, "the end", func() bool { return w.book.state(sb) == sandbox.Failed })
	}
	w.consistent(sb)
	w.book.sound(t)
}

// A verb that was asked of an older generation changes nothing (S7).
func TestOlderGenerationIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	old := w.command(sb, sandbox.Stop)
	w.must(w.command(sb, sandbox.Sleep))
	w.must(w.command(sb, sandbox.Wake))
	err := w.agent.Submit(t.Context(), old)
	if !fault.Is(err, fault.Conflict) || fault.Of(err).Reason != "overtaken" {
		t.Errorf("got %v", err)
	}
	w.consistent(sb)
}

// A delete cancels what runs (S5).
func TestDeleteCancels(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Sleep && step == sandbox.StepCapture {
			close(reached)
			<-goOn
		}
		return nil
	})
	sleep := w.command(sb, sandbox.Sleep)
	if err := w.agent.Submit(t.Context(), sleep); err != nil {
		t.Fatal(err)
	}
	<-reached
	del := w.command(sb, sandbox.Delete)
	if err := w.agent.Cancel(t.Context(), sb, sleep.Operation); err != nil {
		t.Fatal(err)
	}
	if err := w.agent.Submit(t.Context(), del); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if f := w.book.end(t, sleep.Operation); f == nil || f.Kind != string(fault.Cancelled) {
		t.Errorf("the sleep ended with %+v", f)
	}
	if f := w.book.end(t, del.Operation); f != nil {
		t.Errorf("the delete failed: %s", f.Message)
	}
	w.consistent(sb)
}

// A fork whose source is deleted once it has its capture still makes its sandboxes (S5).
func TestForkOutlivesItsSource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	j := journey{verb: sandbox.Fork, mode: sandbox.ForkLive, start: sandbox.Ready, forks: 3}
	cmd, ids := j.bring(w)
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Fork && step == sandbox.StepSpawn {
			close(reached)
			<-goOn
		}
		return nil
	})
	if err := w.agent.Submit(t.Context(), cmd); err != nil {
		t.Fatal(err)
	}
	<-reached
	del := w.command(sb, sandbox.Delete)
	if err := w.agent.Cancel(t.Context(), sb, cmd.Operation); err != nil {
		t.Fatal(err)
	}
	if err := w.agent.Submit(t.Context(), del); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if f := w.book.end(t, del.Operation); f != nil {
		t.Fatalf("the delete failed: %s", f.Message)
	}
	for _, c := range cmd.Children {
		if f := w.book.end(t, c.Operation); f != nil {
			t.Errorf("fork %s failed: %s", c.Sandbox, f.Message)
		}
	}
	w.consistent(ids...)
}

// A damaged memory is refused before anything runs; the sandbox sleeps on, and goes
// on from its disk.
func TestDamagedMemory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.must(w.command(sb, sandbox.Sleep))
	save, err := w.disks.Saved(t.Context(), sb, 1)
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(save.MemDir + "/*")
	if err != nil || len(files) == 0 {
		t.Fatal("no memory", err)
	}
	data, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)/2] ^= 1
	if err := os.WriteFile(files[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	if f := w.run(w.command(sb, sandbox.Wake)); f == nil || f.Kind != string(fault.DataCorrupt) {
		t.Fatalf("the wake ended with %+v", f)
	}
	if got := w.book.state(sb); got != sandbox.Sleeping {
		t.Errorf("it is %s", got)
	}
	w.consistent(sb)
	w.must(w.command(sb, sandbox.Stop))
	w.must(w.command(sb, sandbox.Resume))
	w.consistent(sb)
}

// A save that fails leaves the condition degraded, and the next good one clears it (Z10).
func TestFailedSaveDegrades(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.timed(sb, policy(0)))
	w.driver.Inject(fake.Fault{Method: "Capture", Nth: 1, Action: fake.Fail, After: true})
	if f := w.run(w.command(sb, sandbox.Sleep)); f == nil {
		t.Fatal("the sleep succeeded")
	}
	w.ping(sb)
	if set := w.book.last(sb).Set; len(set) != 1 || set[0].Type != sandbox.Degraded || set[0].Reason != "save_failed" {
		t.Errorf("conditions set: %+v", set)
	}
	w.consistent(sb)
	w.must(w.command(sb, sandbox.Sleep))
	if cleared := w.book.last(sb).Clear; len(cleared) != 1 || cleared[0].Reason != "save_failed" {
		t.Errorf("conditions cleared: %+v", cleared)
	}
	w.consistent(sb)
}

// Ends that no verb caused (S8).
func TestEndsByItself(t *testing.T) {
	for name, c := range map[string]struct {
		exit  runtime.Exit
		event sandbox.Event
	}{
		"clean":  {runtime.Exit{Known: true}, sandbox.EventExited},
		"code":   {runtime.Exit{Known: true, Code: 3}, sandbox.EventCrashed},
		"signal": {runtime.Exit{Known: true, Signal: 11}, sandbox.EventCrashed},
		"memory": {runtime.Exit{Known: true, Signal: 9, OOM: true}, sandbox.EventOOMKilled},
		"lost":   {runtime.Exit{}, sandbox.EventCrashed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.must(w.command(sb, sandbox.Create))
			w.machine.Crash(sb, c.exit)
			eventually(t, "the report", func() bool { return w.book.last(sb).Event == c.event })
			w.consistent(sb)
			w.must(w.command(sb, sandbox.Resume))
			w.consistent(sb)
			w.book.sound(t)
		})
	}
}

// A sandbox that ended while no agent ran is found ended.
func TestEndedWhileDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.agent.Stop()
	w.machine.Crash(sb, runtime.Exit{})
	w.start()
	eventually(t, "the report", func() bool { return w.book.last(sb).Event == sandbox.EventCrashed })
	w.consistent(sb)
}

// What a clean-up has ended is told as that; what it did not get to end goes on, and a
// later crash of it is a crash.
func TestEndedByACleanUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const cleaned, spared = sb, "sbx_spared"
	for _, id := range []string{cleaned, spared} {
		w.must(w.command(id, sandbox.Create))
		w.idle(id)
	}
	w.agent.Stop()
	for _, id := range []string{cleaned, spared} {
		if err := (Holdings{Dir: filepath.Join(w.dir, "journal"), BootID: w.boot}).NoteClean(id); err != nil {
			t.Fatal(err)
		}
	}
	w.machine.Crash(cleaned, runtime.Exit{})
	w.start()
	why := func(id string) string {
		eventually(t, "the report", func() bool { return w.book.last(id).Event == sandbox.EventCrashed })
		return w.book.last(id).Message
	}
	if got := why(cleaned); !strings.Contains(got, "removed by `hutch doctor --clean`") {
		t.Errorf("of the one that was ended is said %q", got)
	}
	w.ping(spared)
	w.machine.Crash(spared, runtime.Exit{})
	if got := why(spared); strings.Contains(got, "doctor") {
		t.Errorf("of the one that crashed later is said %q", got)
	}
	// The next boot of it is another one.
	w.must(w.command(cleaned, sandbox.Resume))
	w.machine.Crash(cleaned, runtime.Exit{})
	eventually(t, "the crash", func() bool { return strings.Contains(w.book.last(cleaned).Message, "unexpectedly") })
	w.consistent(cleaned, spared)
}

// A sandbox that cannot be taken over at the start keeps neither the agent nor other
// sandboxes, and is tried again.
func TestAdoptionIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.must(w.command("other", sandbox.Create))
	w.agent.Stop()
	w.faults = []fake.Fault{{Method: "Adopt", Nth: 1, Action: fake.Fail}}
	w.start()
	eventually(t, "both to take calls", func() bool {
		_, one := w.agent.Guest(t.Context(), sb, hostproto.UseSession)
		_, two := w.agent.Guest(t.Context(), "other", hostproto.UseSession)
		return one == nil && two == nil
	})
	w.consistent(sb, "other")
	w.must(w.command(sb, sandbox.Sleep))
	w.consistent(sb)
}

// A runtime that hangs in a call does not keep the sandbox: the step's time is over,
// or somebody cancels, and a save leaves it running (Z10).
func TestHangingRuntime(t *testing.T) {
	for _, method := range []string{"Pause", "Capture"} {
		for _, end := range []string{"limit", "cancel"} {
			t.Run(method+" "+end, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				w.must(w.command(sb, sandbox.Create))
				if end == "limit" {
					w.limits = func(_ sandbox.Verb, step string) time.Duration {
						if step == sandbox.StepPause || step == sandbox.StepCapture {
							return 200 * time.Millisecond
						}
						return time.Minute
					}
				}
				w.driver.Inject(fake.Fault{Method: method, Nth: w.driver.Calls(method) + 1, Action: fake.Hang})
				cmd := w.command(sb, sandbox.Sleep)
				if err := w.agent.Submit(t.Context(), cmd); err != nil {
					t.Fatal(err)
				}
				eventually(t, "the call", func() bool { return w.driver.Calls(method) > 0 })
				want := fault.DeadlineExceeded
				if end == "cancel" {
					want = fault.Cancelled
					if err := w.agent.Cancel(t.Context(), sb, cmd.Operation); err != nil {
						t.Fatal(err)
					}
				}
				if f := w.book.end(t, cmd.Operation); f == nil || f.Kind != string(want) {
					t.Errorf("the sleep ended with %+v", f)
				}
				w.ping(sb)
				w.consistent(sb)
				w.must(w.command(sb, sandbox.Sleep))
				w.consistent(sb)
			})
		}
	}
}

// A journal whose last line is torn is read up to the line before.
func TestTornJournal(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, r, err := openJournal(dir, sb)
	if err != nil || r != nil {
		t.Fatal(r, err)
	}
	for i := range 3 {
		if err := j.write(&record{Sandbox: sb, Seq: int64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(journalPath(dir, sb))
	if err != nil {
		t.Fatal(err)
	}
	for cut := len(whole) - 1; cut > len(whole)*2/3; cut-- {
		if err := os.WriteFile(journalPath(dir, sb), whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j, r, err := openJournal(dir, sb)
		if err != nil || r == nil || r.Seq != 1 {
			t.Fatalf("cut at %d: %+v, %v", cut, r, err)
		}
		if err := j.write(&record{Sandbox: sb, Seq: 9}); err != nil {
			t.Fatal(err)
		}
		_ = j.close()
		if j, r, err = openJournal(dir, sb); err != nil || r.Seq != 9 {
			t.Fatalf("after the cut at %d: %+v, %v", cut, r, err)
		}
		_ = j.close()
	}
}
