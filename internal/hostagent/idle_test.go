package hostagent

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// auto is a create of a sandbox that falls asleep by itself.
func (w *world) auto(id string, p sandbox.Policy) hostproto.Command {
	cmd := w.timed(id, p)
	cmd.Spec.Sleep = sandbox.SleepAuto
	return cmd
}

// idleWorld is a world on virtual time whose first sandbox falls asleep by itself, after
// two minutes.
func idleWorld(t *testing.T, change ...func(*sandbox.Policy)) (*world, *virtual) {
	t.Helper()
	v := &virtual{wall: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), up: time.Hour, boot: "boot-1"}
	w := newWorld(t, func(w *world) { w.read, w.look = v.read, 3*time.Millisecond })
	w.must(w.auto(sb, policy(0, change...)))
	w.idle(sb)
	return w, v
}

// sampled lets time pass and takes samples, n of them; between is called before each.
func (w *world) sampled(v *virtual, n int, between func()) {
	for range n {
		v.pass(sandbox.SampleEvery)
		if between != nil {
			between()
		}
		w.agent.sampleAll(w.t.Context()).Wait()
	}
}

// window is how many samples fill two minutes: the first one only begins them.
const window = 13

// use begins a use of the sandbox.
func (w *world) use(use hostproto.Use) hostproto.Guest {
	w.t.Helper()
	g, err := w.agent.Guest(w.t.Context(), sb, use)
	if err != nil {
		w.t.Fatalf("%s: %v", use, err)
	}
	return g
}

// asleep waits for the sleep that nobody asked for.
func (w *world) asleep() {
	w.t.Helper()
	eventually(w.t, "the sleep", func() bool { return w.book.state(sb) == sandbox.Sleeping })
	w.idle(sb)
}

// awake proves that nothing has been done to it.
func (w *world) awake(when string) {
	w.t.Helper()
	w.idle(sb)
	if got := w.autos(); len(got) != 0 || w.book.state(sb) != sandbox.Ready {
		w.t.Fatalf("%s it is %s: %+v", when, w.book.state(sb), got)
	}
}

// Z1, A6: it falls asleep when it has been quiet for the window, also while no server
// answers; the report comes later, with when it fell due. A sandbox in which nothing
// happens is not even asked.
func TestFallsAsleep_Z1_A6(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	w.book.away.Store(true)
	due := v.read().Wall.Add(sandbox.SampleEvery + 2*time.Minute)
	asked := w.guest(sb).asked.Load()
	w.sampled(v, window-1, nil)
	w.idleFacts(func(r *record) {
		if r.Phase != phaseRunning || r.Job != nil {
			t.Errorf("before the window is full it is %s, at work: %+v", r.Phase, r.Job)
		}
	})
	if n := w.guest(sb).asked.Load() - asked; n != 0 {
		t.Errorf("a quiet guest was asked %d times", n)
	}
	w.sampled(v, 1, nil)
	eventually(t, "the sleep without a server", func() bool { return len(w.machine.Running()) == 0 })
	w.book.away.Store(false)
	w.asleep()
	w.consistent(sb)
	got := w.autos()
	if len(got) != 1 || got[0].Cause != sandbox.CauseIdle || got[0].Verb != sandbox.Sleep || !got[0].Due.Equal(due) || !got[0].Ended || !got[0].Saved {
		t.Fatalf("the host made %+v, want a sleep that was due at %s", got, due)
	}
	if want := sandbox.OperationID(sb, 1, sandbox.CauseIdle, due, 0); got[0].Operation != want {
		t.Errorf("its id is %s, want %s", got[0].Operation, want)
	}
	w.must(w.command(sb, sandbox.Wake))
	w.ping(sb)
	w.book.sound(t)
}

// idleFacts looks at the record in the owner's goroutine.
func (w *world) idleFacts(look func(*record)) {
	w.t.Helper()
	o, err := w.agent.find(sb)
	if err == nil {
		err = o.call(w.t.Context(), func() error { look(o.rec); return nil })
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// Z1, Z2: what keeps it awake for as long as it lasts, and what does not.
func TestWhatKeepsItAwake_Z1_Z2(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		begin   func(w *world) (end func()) // once; nil is nothing
		again   func(w *world)              // before each sample; nil is nothing
		blocker string                      // "" lets it sleep
	}{
		"a session":                           {begin: func(w *world) func() { return w.use(hostproto.UseSession).Done }, blocker: sandbox.IdleSessions},
		"calls between the samples":           {again: func(w *world) { w.use(hostproto.UseSession).Done() }, blocker: sandbox.IdleSessions},
		"output that is followed":             {begin: func(w *world) func() { return w.use(hostproto.UseFollow).Done }, blocker: sandbox.IdleSessions},
		"a turn":                              {begin: func(w *world) func() { return func() { w.turns() } }, again: func(w *world) { w.turns("t1") }, blocker: sandbox.IdleTurns},
		"an LLM stream":                       {begin: attends(hostproto.UseStream), blocker: sandbox.IdleStreams},
		"a silent command without its client": {begin: command(hostproto.UseCommand, 1, 1), blocker: sandbox.IdleForeground},
		"a detached server that is silent":    {begin: command(hostproto.UseDetached, 1, 0)},
		"a detached command that writes": {begin: command(hostproto.UseDetached, 1, 0), again: func(w *world) {
			w.guest(sb).do(1, 0, rand.Int64())
		}, blocker: sandbox.IdleOutput},
		"work":                         {again: func(w *world) { w.guest(sb).work.Add(int64(200 * time.Millisecond)) }, blocker: sandbox.IdleCPU},
		"a little work":                {again: func(w *world) { w.guest(sb).work.Add(int64(199 * time.Millisecond)) }},
		"traffic":                      {again: func(w *world) { w.network.move(sb, 10240) }, blocker: sandbox.IdleNetwork},
		"a little traffic":             {again: func(w *world) { w.network.move(sb, 10239) }},
		"X4: what is only said inside": {again: func(w *world) { w.guest(sb).do(3, 3, rand.Int64()) }},
		"looks, probes and questions": {again: func(w *world) {
			_, looked := w.agent.Guest(w.t.Context(), sb, hostproto.UseLook)
			_, used := w.agent.Usage(w.t.Context(), sb)
			_, asked := w.agent.Idleness(w.t.Context(), sb)
			for _, err := range []error{looked, used, asked} { // the last ones may come when it falls asleep
				if err != nil && !fault.Is(err, fault.Unavailable) && !fault.Is(err, fault.FailedPrecondition) && !fault.Is(err, fault.NotFound) {
					w.t.Error(err)
				}
			}
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, v := idleWorld(t)
			end := func() {}
			if tt.begin != nil {
				end = tt.begin(w)
			}
			again := func() {
				if tt.again != nil && w.book.state(sb) == sandbox.Ready {
					tt.again(w)
				}
			}
			if tt.blocker == "" {
				w.sampled(v, 2*window, again)
				w.asleep()
				end()
				return
			}
			w.sampled(v, 3*window, again)
			w.awake("with it")
			why, err := w.agent.Idleness(t.Context(), sb)
			if err != nil || why.Idle || why.Blocker != tt.blocker || why.Next.Before(v.read().Wall) {
				t.Errorf("it says %+v (%v), want the blocker %s", why, err, tt.blocker)
			}
			end()
			w.guest(sb).do(0, 0, 1)
			w.sampled(v, window-2, nil) // the last sample that it was seen in begins the window
			w.awake("before the window is full again")
			w.sampled(v, 2, nil)
			w.asleep()
		})
	}
}

func attends(use hostproto.Use) func(*world) func() {
	return func(w *world) func() {
		done, err := w.agent.Attend(sb, use)
		if err != nil {
			w.t.Fatal(err)
		}
		return done
	}
}

// command starts a command whose client goes away at once.
func command(use hostproto.Use, running, foreground int32) func(*world) func() {
	return func(w *world) func() {
		g := w.use(use)
		w.guest(sb).do(running, foreground, 1)
		g.Done()
		return func() {}
	}
}

// Z4: activity that arrives between the check and the sleep wins, in 10,000 rounds: who is
// let in finds no operation at work, and who is not finds the sandbox asleep.
func TestActivityAgainstTheSweeper_Z4(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t, func(p *sandbox.Policy) { p.IdleAfter = 2 * sandbox.SampleEvery })
	o, err := w.agent.find(sb)
	if err != nil {
		t.Fatal(err)
	}
	// The call comes ever later until the sleep has won, and then earlier again: so that
	// the rounds are about the moment at which it is decided. A round that ends asleep takes
	// a hundred times longer than one that does not.
	delay, won, slept := time.Microsecond, 0, 0
	w.sampled(v, 1, nil)
	for round := range 10_000 {
		w.sampled(v, 1, nil) // the next sample fills the window
		v.pass(sandbox.SampleEvery)
		var sweep sync.WaitGroup
		start := make(chan struct{})
		sweep.Go(func() {
			<-start
			w.agent.sampleAll(t.Context()).Wait()
		})
		close(start)
		for at := time.Now(); time.Since(at) < delay; {
		}
		g, err := w.agent.Guest(t.Context(), sb, hostproto.UseSession)
		sweep.Wait()
		if err == nil {
			won++
			delay = min(delay+delay/20+1, time.Millisecond)
			w.idleFacts(func(r *record) {
				if r.Job != nil || r.Phase != phaseRunning || o.live.Load() == nil {
					t.Errorf("round %d: a call was let in, and %s is at work on a sandbox that is %s", round, r.Job.Command.Verb, r.Phase)
				}
			})
			g.Done()
			if t.Failed() {
				return
			}
			continue
		}
		if !fault.Is(err, fault.Unavailable) {
			t.Fatalf("round %d: %v", round, err)
		}
		slept++
		delay = delay * 6 / 10
		w.asleep()
		w.must(w.command(sb, sandbox.Wake))
		w.sampled(v, 1, nil)
	}
	t.Logf("activity won %d times, the sleep %d times, about %s after the beginning", won, slept, delay)
	if won == 0 || slept == 0 {
		t.Errorf("the rounds were no race: activity won %d times, the sleep %d times", won, slept)
	}
	w.book.sound(t)
}

// A7, Z10: the agent dies before and after each write and each step of a sleep that nobody
// asked for. What was not begun is begun when the window is full again; what was is done
// once.
func TestIdleSleepAtEachDeath_A7(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	w.mortal.arm(nil)
	w.sampled(v, window, nil)
	w.asleep()
	all := w.mortal.instants()
	if len(all) < 20 {
		t.Fatalf("the sleep has the instants %v", all)
	}
	for _, at := range all {
		t.Run(at.String(), func(t *testing.T) {
			w, v := idleWorld(t)
			w.mortal.arm(&at)
			agent := w.agent // dies, and what it was called for with it
			go func() {
				for range window {
					v.pass(sandbox.SampleEvery)
					agent.sampleAll(context.Background()).Wait()
				}
			}()
			select {
			case <-w.mortal.died:
			case <-time.After(15 * time.Second):
				t.Fatal("it did not come to this instant")
			}
			w.bury()
			w.start()
			w.idle(sb)
			if w.book.state(sb) == sandbox.Ready {
				w.sampled(v, window+1, nil)
			}
			w.asleep()
			w.consistent(sb)
			if got := w.autos(); len(got) != 1 || got[0].Cause != sandbox.CauseIdle || got[0].Failure != nil {
				t.Errorf("the host made %+v", got)
			}
			w.book.sound(t)
		})
	}
}

// Z5: a call that comes while it is put to sleep is not let in, and is not lost: it finds
// the sandbox asleep. After a sleep that fails it is let in.
func TestCallDuringTheSleep_Z5(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]bool{"that ends well": false, "that fails": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, v := idleWorld(t)
			reached, goOn := make(chan struct{}), make(chan struct{})
			w.setPoint(func(ctx context.Context, verb sandbox.Verb, step string, do func(context.Context) error) error {
				if verb == sandbox.Sleep && step == sandbox.StepPrepare {
					close(reached)
					<-goOn
					if fails {
						return errFull
					}
				}
				return do(ctx)
			})
			w.sampled(v, window, nil)
			<-reached
			for _, use := range []hostproto.Use{hostproto.UseSession, hostproto.UseLook} {
				if _, err := w.agent.Guest(t.Context(), sb, use); !fault.Is(err, fault.Unavailable) {
					t.Errorf("%s during the sleep: %v", use, err)
				}
			}
			if why, err := w.agent.Idleness(t.Context(), sb); err != nil || why.Blocker != sandbox.IdleOperation {
				t.Errorf("during the sleep it says %+v (%v)", why, err)
			}
			w.setPoint(nil)
			close(goOn)
			if fails {
				w.idle(sb)
				w.use(hostproto.UseSession).Done()
				return
			}
			w.asleep()
		})
	}
}

// Z10: a sleep that fails is tried again after a pause, with its due time, as a new
// operation, and what its try took is no activity.
func TestIdleSleepFails_Z10(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	w.driver.Inject(fake.Fault{Method: "Capture", Action: fake.Fail})
	w.setPoint(func(ctx context.Context, verb sandbox.Verb, step string, do func(context.Context) error) error {
		if g := w.guest(sb); verb == sandbox.Sleep && step == sandbox.StepCapture {
			g.work.Add(int64(3 * time.Second))
		}
		return do(ctx)
	})
	w.sampled(v, window, nil)
	eventually(t, "the failure", func() bool { return len(w.autos()) == 1 })
	w.settled()
	w.sampled(v, 2, nil)
	w.settled()
	got := w.autos()
	if len(got) != 1 || got[0].Failure == nil || w.book.state(sb) != sandbox.Ready || len(w.book.conditions(sb)) != 1 {
		t.Fatalf("20 s after a failed sleep: %+v, %v", got, w.book.conditions(sb))
	}
	if why, err := w.agent.Idleness(t.Context(), sb); err != nil || !why.Idle || why.Failed == nil || why.Failed.Tries != 1 || !why.Next.Equal(why.Failed.Until) {
		t.Errorf("it says %+v (%v)", why, err)
	}
	w.sampled(v, 1, nil) // 30 s
	eventually(t, "the second try", func() bool { return len(w.autos()) == 2 })
	w.settled()
	w.sampled(v, 5, nil) // less than 60 s
	w.settled()
	if got := w.autos(); len(got) != 2 {
		t.Fatalf("within the second pause: %+v", got)
	}
	w.setPoint(nil)
	w.driver.Heal()
	w.sampled(v, 1, nil)
	w.asleep()
	got = w.autos()
	if len(got) != 3 || got[2].Failure != nil || !got[1].Due.Equal(got[0].Due) || !got[2].Due.Equal(got[0].Due) ||
		got[0].Operation == got[1].Operation || got[1].Operation == got[2].Operation || len(w.book.conditions(sb)) != 0 {
		t.Errorf("the tries: %+v, conditions %v", got, w.book.conditions(sb))
	}
	w.consistent(sb)
	w.book.sound(t)
}

// settled waits until what a failed try took has been taken off.
func (w *world) settled() {
	w.t.Helper()
	w.idle(sb)
	o, err := w.agent.find(sb)
	if err != nil {
		w.t.Fatal(err)
	}
	eventually(w.t, "the sample after the failure", func() bool {
		tried := true
		_ = o.call(w.t.Context(), func() error { tried = o.tried; return nil })
		return !tried
	})
}

// A3, Z1: a turn whose server is gone keeps it awake for one auto-stop at most, and a lease
// that comes between the check and the sleep wins.
func TestTurnWithoutServer_A3_Z1(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	w.turns("t1")
	w.sampled(v, 14, nil) // its term is 150 s
	w.awake("with a turn that nobody has ended")
	w.sampled(v, window-2, nil)
	w.awake("before the window is full")
	w.sampled(v, 2, nil)
	w.asleep()
}

// A8: on_idle is stop.
func TestStopsWhenIdle_A8(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t, func(p *sandbox.Policy) { p.OnIdle = sandbox.Stop })
	due := v.read().Wall.Add(sandbox.SampleEvery + 2*time.Minute)
	w.sampled(v, window, nil)
	w.stoppedBy(sandbox.CauseIdle, due)
}

// A change of the mode or the window counts from the change on; never and manual are not
// looked at.
func TestSleepModeChanges_Z1(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	change := func(n int64, mode sandbox.SleepMode, window time.Duration) {
		p := policy(0, func(p *sandbox.Policy) { p.IdleAfter = window })
		if err := w.agent.SetPolicy(t.Context(), hostproto.PolicyChange{Sandbox: sb, Change: n, Policy: p, Sleep: mode}); err != nil {
			t.Fatal(err)
		}
	}
	for n, mode := range []sandbox.SleepMode{sandbox.SleepManual, sandbox.SleepNever} {
		change(int64(n+1), mode, 2*time.Minute)
		w.sampled(v, 3*window, nil)
		w.awake("with sleep mode " + string(mode))
		why, err := w.agent.Idleness(t.Context(), sb)
		if err != nil || why.Mode != mode || why.Blocker != sandbox.IdleMode || !why.Next.IsZero() || len(why.Criteria) != 9 {
			t.Errorf("with sleep mode %s it says %+v (%v)", mode, why, err)
		}
	}
	change(3, sandbox.SleepAuto, 2*time.Minute)
	w.sampled(v, window-1, nil)
	w.awake("before the window of the new mode is full")
	w.sampled(v, 1, nil)
	w.asleep()
}

// After a restart of the agent nothing is known of the time before: the window begins
// anew, and the guest is asked what runs.
func TestIdleAfterRestart_Z1_A7(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	command(hostproto.UseCommand, 1, 1)(w)
	w.sampled(v, 5, nil)
	w.bury()
	w.start()
	w.sampled(v, 3*window, nil)
	w.awake("with a silent command from before")
	w.guest(sb).do(0, 0, 1)
	w.sampled(v, window-2, nil)
	w.awake("before the window is full")
	w.sampled(v, 2, nil)
	w.asleep()
}

// A copy inherits the mode, and the host's knowledge of a change that came before.
func TestForkInheritsSleep_F1(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	p := policy(0)
	cmd := w.command(sb, sandbox.Fork)
	cmd.Policy, cmd.Spec.Sleep = &p, sandbox.SleepAuto
	cmd.Children = []hostproto.Child{{Sandbox: "copy", Operation: opID(), Name: "copy"}}
	w.must(cmd)
	w.book.end(t, cmd.Children[0].Operation)
	w.idle("copy")
	w.sampled(v, window+1, nil)
	for _, id := range []string{sb, "copy"} {
		eventually(t, "the sleep of "+id, func() bool { return w.book.state(id) == sandbox.Sleeping })
	}
	w.consistent(sb, "copy")
}

// What does not run is neither asked nor attended to.
func TestIdlenessOfWhatDoesNotRun(t *testing.T) {
	t.Parallel()
	w, _ := idleWorld(t)
	w.must(w.command(sb, sandbox.Sleep))
	if _, err := w.agent.Idleness(t.Context(), sb); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("asleep: %v", err)
	}
	if _, err := w.agent.Attend(sb, hostproto.UseStream); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("asleep: %v", err)
	}
	if _, err := w.agent.Idleness(t.Context(), "nobody"); !fault.Is(err, fault.NotFound) {
		t.Errorf("unknown: %v", err)
	}
}

// A guest that does not answer holds up nobody else's sample.
func TestSilentGuestBesideOthers(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	command(hostproto.UseDetached, 1, 0)(w)
	answers := make(chan struct{})
	w.guest(sb).hush(answers)
	w.must(w.auto("other", policy(0)))
	w.idle("other")
	other, err := w.agent.find("other")
	if err != nil {
		t.Fatal(err)
	}
	for range window {
		v.pass(sandbox.SampleEvery)
		w.agent.sampleAll(t.Context())
		eventually(t, "the sample of the other", func() bool { return !other.sampling.Load() })
	}
	eventually(t, "the sleep of the other", func() bool { return w.book.state("other") == sandbox.Sleeping })
	close(answers)
	w.awake("with a guest that does not answer")
}

// One that is held, as the pool is full, is not looked at, and why says so.
func TestIdlenessOfOneThatIsHeld(t *testing.T) {
	t.Parallel()
	w, v := idleWorld(t)
	w.room(-1)
	var why hostproto.Idleness
	eventually(t, "it to be held", func() (held bool) {
		var err error
		why, err = w.agent.Idleness(t.Context(), sb)
		return err == nil && why.Blocker == sandbox.IdleHeld
	})
	w.sampled(v, 2*window, nil)
	w.awake("while it is held")
}
