package hostagent

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// spoilt makes a step of a verb fail until the returned function is called.
func (w *world) spoilt(verb sandbox.Verb, step string, err error) (heal func()) {
	w.setTrap(func(v sandbox.Verb, s string) error {
		if v == verb && s == step {
			return err
		}
		return nil
	})
	return func() { w.setTrap(nil) }
}

var errDisk = fault.New(fault.Internal, "the disk made a noise")

func (w *world) saveFailed() bool { return slices.Contains(w.book.conditions(sb), "save_failed") }

// retries gives the tries of a save that the host made by itself.
func (w *world) retries() []hostproto.Report {
	return slices.DeleteFunc(w.autos(), func(r hostproto.Report) bool { return r.Cause != sandbox.CauseSave })
}

// Z10: a save that failed is tried again by itself, after 30 s, then ever later, until it
// succeeds; meanwhile it answers, and the condition says why and when.
func TestRetriesAFailedSave_Z10(t *testing.T) {
	t.Parallel()
	for _, verb := range []sandbox.Verb{sandbox.Sleep, sandbox.Stop} {
		t.Run(string(verb), func(t *testing.T) {
			t.Parallel()
			w, v := timedWorld(t, policy(0))
			heal := w.spoilt(verb, sandbox.StepPrepare, errDisk)
			began := v.read().Wall
			f := w.run(w.command(sb, verb))
			if f == nil || !strings.Contains(f.Message, "hutch keep name-sb") || !strings.Contains(f.Message, errDisk.Message) {
				t.Fatalf("the failure: %+v", f)
			}
			set := w.book.last(sb).Set
			if len(set) != 1 || !strings.Contains(set[0].Message, began.Add(30*time.Second).Format(time.RFC3339)) || !strings.Contains(set[0].Message, errDisk.Message) {
				t.Fatalf("the condition: %+v", set)
			}
			v.pass(29 * time.Second)
			w.looked()
			if w.ping(sb); len(w.retries()) != 0 {
				t.Fatalf("it was tried again too early: %+v", w.retries())
			}
			v.pass(time.Second)
			eventually(t, "a retry", func() bool { w.looked(); return len(w.retries()) == 1 })
			w.ping(sb)
			if again := w.retries()[0]; again.Failure == nil || !again.Due.Equal(began) || again.Verb != verb || !w.saveFailed() {
				t.Fatalf("the retry: %+v", again)
			}
			heal()
			v.pass(time.Minute)
			want := map[sandbox.Verb]sandbox.State{sandbox.Sleep: sandbox.Sleeping, sandbox.Stop: sandbox.Stopped}[verb]
			eventually(t, "the save", func() bool { return w.book.state(sb) == want })
			w.consistent(sb)
			if w.saveFailed() || len(w.retries()) != 2 {
				t.Errorf("after it: %v, %d retries", w.book.conditions(sb), len(w.retries()))
			}
			w.book.sound(t)
		})
	}
}

// Z10: what is tried again outlives the agent, and goes on without a server.
func TestRetriesOutliveTheAgent_Z10(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(0))
	heal := w.spoilt(sandbox.Sleep, sandbox.StepClone, errDisk)
	if w.run(w.command(sb, sandbox.Sleep)) == nil {
		t.Fatal("the sleep succeeded")
	}
	w.bury()
	v.pass(time.Hour)
	heal()
	w.book.away.Store(true)
	w.start()
	eventually(t, "the retry", func() bool { return w.idleRecord().Phase == phaseSaved })
	w.book.away.Store(false)
	eventually(t, "the report", func() bool { return w.book.state(sb) == sandbox.Sleeping })
	w.consistent(sb)
	if len(w.retries()) != 1 || w.saveFailed() {
		t.Errorf("%+v, %v", w.retries(), w.book.conditions(sb))
	}
	w.book.sound(t)
}

// idleRecord is the sandbox's record, reports that are on their way aside.
func (w *world) idleRecord() *record {
	w.t.Helper()
	o, err := w.agent.find(sb)
	if err != nil {
		w.t.Fatal(err)
	}
	var rec *record
	if err := o.call(w.t.Context(), func() error { rec = o.rec.clone(); return nil }); err != nil {
		w.t.Fatal(err)
	}
	return rec
}

// Z10: the user says keep, before a retry and in the middle of one: it runs on, without
// the condition, and nothing is tried again.
func TestKeep_Z10(t *testing.T) {
	t.Parallel()
	for _, during := range []bool{false, true} {
		w, v := timedWorld(t, policy(0))
		heal := w.spoilt(sandbox.Sleep, sandbox.StepSeal, errDisk)
		if w.run(w.command(sb, sandbox.Sleep)) == nil {
			t.Fatal("the sleep succeeded")
		}
		heal()
		change := hostproto.PolicyChange{Sandbox: sb, Change: 7, Policy: policy(0), Keep: true}
		if during {
			reached, goOn := make(chan struct{}), make(chan struct{})
			w.setTrap(func(verb sandbox.Verb, step string) error {
				if verb == sandbox.Sleep && step == sandbox.StepClone {
					close(reached)
					<-goOn
				}
				return nil
			})
			v.pass(30 * time.Second)
			<-reached
			if err := w.agent.SetPolicy(t.Context(), change); err != nil {
				t.Fatal(err)
			}
			close(goOn)
		} else if err := w.agent.SetPolicy(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the end of the condition", func() bool { return !w.saveFailed() })
		w.idle(sb)
		w.setTrap(nil)
		v.pass(24 * time.Hour)
		w.looked()
		if got := w.book.state(sb); got != sandbox.Ready || w.saveFailed() {
			t.Errorf("during a retry: %v; it is %s, %v", during, got, w.book.conditions(sb))
		}
		w.ping(sb)
		if err := w.agent.SetPolicy(t.Context(), change); err != nil { // it may come again
			t.Error(err)
		}
		w.must(w.command(sb, sandbox.Sleep))
		w.consistent(sb)
		w.book.sound(t)
	}
}

// Z10: an automatic stop that failed keeps its due time, and keep begins it anew.
func TestKeepAfterAnAutoStop_Z10(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(time.Hour))
	due := w.deadline()
	heal := w.spoilt(sandbox.Stop, sandbox.StepPrepare, errDisk)
	v.pass(time.Hour)
	eventually(t, "the condition", w.saveFailed)
	w.ping(sb)
	if autos := w.autos(); autos[0].Cause != sandbox.CauseDeadline || !autos[0].Due.Equal(due) {
		t.Fatalf("%+v", autos)
	}
	v.pass(30 * time.Second)
	eventually(t, "a retry", func() bool { return len(w.autos()) == 2 })
	if again := w.autos()[1]; !again.Due.Equal(due) || again.Operation == w.autos()[0].Operation {
		t.Errorf("the retry: %+v", again)
	}
	heal()
	if err := w.agent.SetPolicy(t.Context(), hostproto.PolicyChange{Sandbox: sb, Change: 7, Policy: policy(time.Hour), Keep: true}); err != nil {
		t.Fatal(err)
	}
	now := v.read().Wall
	eventually(t, "the new deadline", func() bool { return w.deadline().Equal(now.Add(time.Hour)) && !w.saveFailed() })
	w.book.sound(t)
}

// Z10, X4: what the guest makes impossible is refused and is no condition; and where it
// does so after a save of ours has failed, that ends the pause.
func TestTheGuestsCauses_X4(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(0))
	refused := fault.New(fault.FailedPrecondition, "deleted files are open").Because("unlinked_files")
	heal := w.spoilt(sandbox.Sleep, sandbox.StepPrepare, refused)
	if f := w.run(w.command(sb, sandbox.Sleep)); f == nil || f.Reason != "unlinked_files" || w.saveFailed() {
		t.Fatalf("%+v, %v", f, w.book.conditions(sb))
	}
	v.pass(time.Hour)
	w.looked()
	if n := len(w.autos()); n != 0 {
		t.Fatalf("what the guest refused was tried again %d times", n)
	}
	heal()
	heal = w.spoilt(sandbox.Sleep, sandbox.StepSeal, errDisk)
	if w.run(w.command(sb, sandbox.Sleep)); !w.saveFailed() {
		t.Fatal("no condition")
	}
	heal()
	defer w.spoilt(sandbox.Sleep, sandbox.StepPrepare, refused)()
	v.pass(30 * time.Second)
	eventually(t, "the end of the pause", func() bool { return !w.saveFailed() })
	v.pass(time.Hour)
	w.looked()
	if n := len(w.retries()); n != 1 || w.book.state(sb) != sandbox.Ready {
		t.Errorf("%d retries, %s", n, w.book.state(sb))
	}
	w.book.sound(t)
}

// Z10: a reboot from inside ends no pause, and nothing that is pending; the end of what
// runs does.
func TestRebootKeepsTheRetry_X4(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(0))
	heal := w.spoilt(sandbox.Sleep, sandbox.StepSeal, errDisk)
	if w.run(w.command(sb, sandbox.Sleep)); !w.saveFailed() {
		t.Fatal("no condition")
	}
	heal()
	w.disks.reboots.Store(true)
	w.machine.Crash(sb, runtime.Exit{Known: true})
	eventually(t, "the reboot", func() bool { return w.book.generation(sb) == 2 })
	w.idle(sb)
	if !w.saveFailed() {
		t.Error("a reboot from inside ended the condition")
	}
	v.pass(time.Minute)
	eventually(t, "the retry", func() bool { return w.book.state(sb) == sandbox.Sleeping })
	if w.saveFailed() {
		t.Error("the condition outlives the save")
	}
	w.book.sound(t)
}

// Z10: a sleeping one that cannot be stopped sleeps on; it is tried again too.
func TestStopOfASleepingOneFails_Z10(t *testing.T) {
	t.Parallel()
	w, v := timedWorld(t, policy(0))
	w.must(w.command(sb, sandbox.Sleep))
	heal := w.spoilt(sandbox.Stop, sandbox.StepDisk, errDisk)
	if f := w.run(w.command(sb, sandbox.Stop)); f == nil || !strings.Contains(f.Message, "it sleeps on") || !w.saveFailed() {
		t.Fatalf("%+v, %v", f, w.book.conditions(sb))
	}
	w.consistent(sb)
	heal()
	v.pass(30 * time.Second)
	eventually(t, "the stop", func() bool { return w.book.state(sb) == sandbox.Stopped })
	w.consistent(sb)
	w.book.sound(t)
}

// A fork that fails is no failed save of its source.
func TestFailedForkIsNoFailedSave(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	j := journey{verb: sandbox.Fork, mode: sandbox.ForkLive, start: sandbox.Ready, forks: 1}
	cmd, _ := j.bring(w)
	defer w.spoilt(sandbox.Fork, sandbox.StepSeal, errors.New("no"))()
	if f := w.run(cmd); f == nil || w.saveFailed() {
		t.Errorf("%+v, %v", f, w.book.conditions(sb))
	}
	w.ping(sb)
}

// An operation is cancelled at each step: before its commit it is undone and everything is
// as before, after it goes through.
func TestCancelAtEachStep(t *testing.T) {
	t.Parallel()
	for _, j := range journeys {
		for n, step := range j.steps(t) {
			if j.verb == sandbox.Delete {
				break // it is never cancelled; see TestDeleteIsNotCancelled
			}
			w := newWorld(t)
			cmd, ids := j.bring(w)
			b := w.before()
			seen := 0
			w.setTrap(func(verb sandbox.Verb, _ string) error {
				if verb != j.verb {
					return nil
				}
				w.mu.Lock()
				mine := seen == n
				seen++
				w.mu.Unlock()
				if !mine {
					return nil
				}
				for range 2 { // it may come twice
					if err := w.agent.Cancel(t.Context(), sb, cmd.Operation); err != nil {
						t.Error(err)
					}
				}
				return nil
			})
			f := w.run(cmd)
			w.setTrap(nil)
			last := n == len(j.steps(t))-1 // what has no commit may have done its last step by then
			late := !sandbox.Cancellable(j.verb, step)
			switch {
			case f == nil && !late && !last:
				t.Errorf("%s was cancelled in %s (%d) and went through", j.name, step, n)
			case f != nil && late:
				t.Errorf("%s was cancelled in %s (%d) after its commit: %+v", j.name, step, n, f)
			case f != nil && f.Kind != string(fault.Cancelled):
				t.Errorf("%s was cancelled in %s (%d) and failed: %+v", j.name, step, n, f)
			}
			j.outcome(w, b, cmd, ids, f)
			if t.Failed() {
				return
			}
		}
	}
}

// A cancellation that overtakes its operation: it never begins. And one that comes while
// no agent is there is remembered by nobody, so it comes again with the operation.
func TestCancelledBeforeItBegins(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	cmd := w.command(sb, sandbox.Sleep)
	cmd.Cancelled = true
	w.setTrap(func(verb sandbox.Verb, step string) error {
		t.Errorf("the step %s of %s", step, verb)
		return nil
	})
	if f := w.run(cmd); f == nil || f.Kind != string(fault.Cancelled) {
		t.Errorf("%+v", f)
	}
	w.setTrap(nil)
	if w.saveFailed() {
		t.Error("a cancelled save is no failed one")
	}
	w.consistent(sb)
	create := w.command("never", sandbox.Create)
	create.Cancelled = true
	if f := w.run(create); f == nil || f.Kind != string(fault.Cancelled) || w.book.state("never") != sandbox.Failed {
		t.Errorf("%+v, %s", f, w.book.state("never"))
	}
	w.consistent("never")
}
