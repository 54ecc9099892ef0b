package hostagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// watchful gives a world whose agents look at their guests all the time.
func watchful(t *testing.T) *world {
	w := newWorld(t)
	w.agent.Stop()
	w.guestAnswer, w.probeEvery = 50*time.Millisecond, 10*time.Millisecond
	w.start()
	return w
}

func (w *world) silent() bool {
	return slices.Contains(w.book.conditions(sb), sandbox.GuestSilent)
}

// A guest agent that hangs in mid-life: the sandbox is ready and degraded
// (guest_silent), sleeps and stops all the same, and is well again when its agent is
// (S2).
func TestSilentGuest_S2(t *testing.T) {
	t.Parallel()
	w := watchful(t)
	w.must(w.command(sb, sandbox.Create))
	answers := make(chan struct{})
	w.guest(sb).hush(answers)
	eventually(t, "guest_silent", w.silent)
	if got := w.book.state(sb); got != sandbox.Ready {
		t.Errorf("it is %s", got)
	}
	close(answers)
	eventually(t, "the end of guest_silent", func() bool { return !w.silent() })
	w.consistent(sb)
	w.guest(sb).hush(make(chan struct{}))
	eventually(t, "guest_silent", w.silent)
	w.must(w.command(sb, sandbox.Stop))
	if w.silent() {
		t.Error("what is stopped is silent")
	}
	w.must(w.command(sb, sandbox.Resume))
	w.consistent(sb)
	w.book.sound(t)
}

// A sandbox that sleeps with an agent that hangs does not wake, says so, and goes on
// from its disk.
func TestSleepsSilent(t *testing.T) {
	t.Parallel()
	w := watchful(t)
	w.must(w.command(sb, sandbox.Create))
	w.guest(sb).hush(make(chan struct{}))
	w.must(w.command(sb, sandbox.Sleep))
	if got := w.book.conditions(sb); len(got) > 0 {
		t.Errorf("asleep it has %v", got)
	}
	w.must(w.command(sb, sandbox.Stop))
	w.must(w.command(sb, sandbox.Resume))
	w.consistent(sb)
}

// A save that fails and cannot be taken back leaves a frozen sandbox: the report of the
// failure says so at once, and the agent goes on trying until it runs (Z10).
func TestThawFails_Z10(t *testing.T) {
	t.Parallel()
	for _, action := range []fake.Action{fake.Fail, fake.Hang} {
		w := watchful(t)
		w.must(w.command(sb, sandbox.Create))
		life := w.guest(sb).life()
		w.driver.Inject(fake.Fault{Method: "Capture", Nth: 1, Action: fake.Fail}, fake.Fault{Method: "Thaw", Nth: 1, Action: fake.Fail}, fake.Fault{Method: "Thaw", Nth: 2, Action: action})
		cmd := w.command(sb, sandbox.Sleep)
		if f := w.run(cmd); f == nil {
			t.Fatal("the sleep succeeded")
		}
		w.book.mu.Lock()
		var set []string
		for _, c := range w.book.ends[cmd.Operation].Set {
			set = append(set, c.Reason)
		}
		w.book.mu.Unlock()
		if !slices.Equal(set, []string{sandbox.GuestSilent, "save_failed"}) {
			t.Errorf("the failed sleep set %v", set)
		}
		eventually(t, "the thaw", func() bool { return !w.silent() })
		w.consistent(sb)
		if got := w.guest(sb).life(); got != life {
			t.Error("it was booted anew")
		}
		w.must(w.command(sb, sandbox.Sleep))
		w.consistent(sb)
		if got := w.book.conditions(sb); len(got) > 0 {
			t.Errorf("conditions are left: %v", got)
		}
	}
}

// An agent that finds a sandbox frozen and cannot let it run says so; neither its start
// nor other sandboxes wait for it.
func TestFoundFrozen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.must(w.command("other", sandbox.Create))
	cmd := w.command(sb, sandbox.Sleep)
	w.dieAt(cmd, instant{sb, "runtime capture", 1, false})
	w.guestAnswer, w.probeEvery = 50*time.Millisecond, 10*time.Millisecond
	w.faults = []fake.Fault{{Method: "Thaw", Nth: 0, Action: fake.Fail}}
	w.start()
	// The sleep is begun anew, with all its steps; nothing thaws in it.
	if f := w.book.end(t, cmd.Operation); f != nil {
		t.Fatalf("the sleep failed: %s", f.Message)
	}
	w.consistent(sb, "other")
}

// The record before is the truth where a write fails, also where only its sync did.
func TestJournalWriteFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	j, _, err := openJournal(dir, sb)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.write(&record{Sandbox: sb, Seq: 1}); err != nil {
		t.Fatal(err)
	}
	read := func() int64 {
		data, err := os.ReadFile(journalPath(dir, sb))
		if err != nil {
			t.Fatal(err)
		}
		r, _ := lastRecord(data)
		return r.Seq
	}
	// A pipe takes the line and refuses the sync.
	file := j.file
	r, p, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	j.file = p
	if err := j.write(&record{Sandbox: sb, Seq: 2}); err == nil {
		t.Error("a journal that cannot be synced was written")
	}
	_ = p.Close()
	j.file = file
	if got := read(); got != 1 {
		t.Errorf("the journal is at %d", got)
	}
	if err := j.write(&record{Sandbox: sb, Seq: 3}); err != nil || read() != 3 {
		t.Errorf("the next write: %v, %d", err, read())
	}
	// Rewritten, it has the last record; where that fails it goes on as it was.
	long := &record{Sandbox: sb, Seq: 4, Name: string(make([]byte, compactAt/4))}
	if err := os.Mkdir(journalPath(dir, sb)+tempMark, 0o700); err != nil {
		t.Fatal(err)
	}
	var failed error
	for range 20 {
		failed = errors.Join(failed, j.write(long))
	}
	if failed == nil || read() < 3 {
		t.Errorf("with the rewriting in the way: %v, at %d", failed, read())
	}
	if err := os.Remove(journalPath(dir, sb) + tempMark); err != nil {
		t.Fatal(err)
	}
	long.Seq = 5
	if err := j.write(long); err != nil || read() != 5 {
		t.Errorf("after it: %v, at %d", err, read())
	}
	if err := j.remove(); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// An owner whose journal hangs does not hold its callers for ever.
func TestJournalHangs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.idle(sb)
	o, err := w.agent.find(sb)
	if err != nil {
		t.Fatal(err)
	}
	hung, release := make(chan struct{}), make(chan struct{})
	go func() {
		_ = o.call(context.Background(), func() error { close(hung); <-release; return nil })
	}()
	<-hung
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	cmd := w.command(sb, sandbox.Sleep)
	if err := w.agent.Submit(ctx, cmd); err == nil {
		t.Error("a command was taken by a journal that hangs")
	}
	w.ping(sb) // the guest is reached without the journal
	close(release)
	w.handIn(cmd)
	if f := w.book.end(t, cmd.Operation); f != nil {
		t.Errorf("the sleep failed: %s", f.Message)
	}
	w.consistent(sb)
}

// A program that pings through an agent's guest while it is frozen gets its answer when
// it runs again.
func TestGuestAnswersAfterSave_Z10(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	g, err := w.agent.Guest(t.Context(), sb, hostproto.UseSession)
	if err != nil {
		t.Fatal(err)
	}
	c := guestproto.NewClient(g.Dial, g.Token)
	defer c.Close()
	answered := make(chan error, 1)
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Sleep && step == sandbox.StepSeal {
			go func() {
				_, err := c.Agent.Ping(context.Background(), &guestproto.PingRequest{})
				answered <- err
			}()
			return errMade
		}
		return nil
	})
	if f := w.run(w.command(sb, sandbox.Sleep)); f == nil {
		t.Fatal("the sleep succeeded")
	}
	if err := <-answered; err != nil {
		t.Errorf("the ping: %v", err)
	}
	w.machine.Crash(sb, runtime.Exit{})
	w.consistent(sb)
}

// A damaged memory whose restore hangs is refused as soon as its digests are known, not
// when the step's time is over.
func TestDamagedMemoryHangs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.must(w.command(sb, sandbox.Sleep))
	save, err := w.disks.Saved(t.Context(), sb, 1)
	if err != nil {
		t.Fatal(err)
	}
	// Another file than the one that the fake runtime reads.
	if err := os.WriteFile(save.MemDir+"/more", []byte("whole"), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := runtime.Seal(t.Context(), save.MemDir, runtime.Meta{Runtime: "fake", Version: fake.Version})
	if err != nil {
		t.Fatal(err)
	}
	w.disks.mu.Lock()
	w.disks.saves[saveKey(sb, 1)].manifest, err = json.Marshal(manifest{Memory: m})
	w.disks.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(save.MemDir+"/more", []byte("whale"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.driver.Inject(fake.Fault{Method: "Restore", Nth: 1, Action: fake.Hang})
	if f := w.run(w.command(sb, sandbox.Wake)); f == nil || f.Kind != "data_corrupt" {
		t.Errorf("the wake ended with %+v", f)
	}
	w.consistent(sb)
	w.must(w.command(sb, sandbox.Stop))
	w.must(w.command(sb, sandbox.Resume))
	w.consistent(sb)
}

// However many sandboxes run, few are asked at a time whether they answer: on a machine
// that has much else to do the others would be taken for silent while they wait.
func TestProbesTakeTurns(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(w *world) { w.probeEvery, w.guestAnswer = 5*time.Millisecond, time.Minute })
	silent := make(chan struct{})
	var ids []string
	for i := range probesMost + 8 {
		id := fmt.Sprint("turn-", i)
		w.must(w.command(id, sandbox.Create))
		w.guest(id).hush(silent)
		ids = append(ids, id)
	}
	asked := func() int {
		n := 0
		for _, o := range w.agent.everyOwner() {
			if o.probing.Load() {
				n++
			}
		}
		return n
	}
	// One more waits for its turn.
	eventually(t, "the probes to take all turns", func() bool { return asked() == probesMost+1 })
	for range 100 {
		if n := asked(); n > probesMost+1 {
			t.Fatalf("%d are asked at a time", n)
		}
		time.Sleep(time.Millisecond)
	}
	close(silent)
	eventually(t, "every probe to end", func() bool { return asked() <= probesMost })
	w.consistent(ids...)
}
