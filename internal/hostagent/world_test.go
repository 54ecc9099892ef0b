package hostagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// world is a machine in memory: sandboxes, disks and networks outlive the agents
// that come and go on it.
type world struct {
	t       *testing.T
	machine *fake.Machine
	driver  *fake.Driver
	disks   *memDisks
	network *memNetwork
	book    *book
	dir     string
	boot    string
	agent   *Agent
	mortal  *mortal      // what the agent works through
	graves  []*grave     // the agents that were killed
	faults  []fake.Fault // of the next agent's driver
	guests  sync.Map     // *memGuest of the last boot, by id

	guestAnswer, probeEvery, look time.Duration // of the next agent; 0 is as in earnest

	read func() sandbox.Reading // the machine's clocks; nil are those of this one

	release chan struct{} // of a step that hangs in the kernel

	mu     sync.Mutex
	trap   func(verb sandbox.Verb, step string) error
	point  stepPoint
	limits func(verb sandbox.Verb, step string) time.Duration
}

// stepPoint runs a step in the agent's place.
type stepPoint func(ctx context.Context, verb sandbox.Verb, step string, do func(context.Context) error) error

// quickDir is a temporary directory in memory where the machine has one: what a power
// cut leaves is no matter of these worlds, and hundreds of them would keep a disk busy.
func quickDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "hutch-world-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newWorld(t *testing.T, change ...func(*world)) *world {
	t.Helper()
	w := &world{t: t, dir: quickDir(t), boot: "boot-1", book: newBook(), network: &memNetwork{attached: map[string]bool{}}}
	w.disks = &memDisks{dir: filepath.Join(w.dir, "pool"), disks: map[string]string{}, mounted: map[string]bool{}, saves: map[string]*memSave{}, left: 1 << 50}
	w.machine = fake.NewMachine(func(b fake.Boot) (fake.Guest, error) {
		g, err := newMemGuest(b)
		if err == nil {
			w.guests.Store(b.Spec.ID, g)
		}
		return g, err
	})
	for _, c := range change {
		c(w)
	}
	w.start()
	t.Cleanup(func() {
		for _, g := range w.graves {
			g.open()
		}
		w.agent.Stop()
		for _, id := range w.machine.Running() {
			w.machine.Crash(id, runtime.Exit{})
		}
	})
	return w
}

// start brings a new agent up on the machine, as after a crash.
func (w *world) start() {
	w.t.Helper()
	w.driver = w.machine.Driver()
	w.driver.Inject(w.faults...)
	m := newMortal()
	w.mortal = m
	a, err := New(Config{
		ID: "local", Dir: filepath.Join(w.dir, "journal"), RunDir: filepath.Join(w.dir, "run"), BootID: w.boot,
		Driver: mortalDriver{m, w.driver}, Capabilities: runtime.Capabilities{Runtime: "fake", Version: fake.Version, MemorySnapshot: true, HeldRestore: true},
		Disks: mortalDisks{m, w.disks}, Network: mortalNetwork{m, w.network}, Agent: "agent-1", BootTimeout: 5 * time.Second,
		Log: slog.New(slog.DiscardHandler), GuestAnswer: w.guestAnswer, ProbeEvery: w.probeEvery, Read: w.read,
		points: points{
			step: func(ctx context.Context, id string, verb sandbox.Verb, step string, do func(context.Context) error) error {
				return m.around(id, "step "+step, 0, func() error { return w.runStep(ctx, verb, step, do) })
			},
			clock:   func(do func() error) error { return m.call("host", "clock", do) },
			journal: func(id string, r *record, do func() error) error { return m.call(id, recordName(r), do) },
			limit: func(_ string, verb sandbox.Verb, step string) time.Duration {
				w.mu.Lock()
				defer w.mu.Unlock()
				if w.limits != nil {
					return w.limits(verb, step)
				}
				return time.Minute
			},
			stuckAfter: 5 * time.Millisecond, look: w.look,
		},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.agent = a
	if err := a.Start(w.t.Context(), mortalReporter{m, w.book}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) runStep(ctx context.Context, verb sandbox.Verb, step string, do func(context.Context) error) error {
	w.mu.Lock()
	trap, point := w.trap, w.point
	w.mu.Unlock()
	if trap != nil {
		if err := trap(verb, step); err != nil {
			return err
		}
	}
	if point != nil {
		return point(ctx, verb, step, do)
	}
	return do(ctx)
}

func (w *world) setPoint(p stepPoint) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.point = p
}

func (w *world) guest(id string) *memGuest {
	g, _ := w.guests.Load(id)
	is, _ := g.(*memGuest)
	return is
}

func (w *world) setTrap(f func(verb sandbox.Verb, step string) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trap = f
}

// reboot is a power cut of the machine.
func (w *world) reboot() {
	w.bury()
	w.machine.Reboot()
	w.network.clear()
	w.disks.unmountAll()
	if err := os.RemoveAll(filepath.Join(w.dir, "run")); err != nil {
		w.t.Fatal(err)
	}
	w.boot += "+"
	w.start()
}

var serial struct {
	sync.Mutex
	n int
}

func opID() string {
	serial.Lock()
	defer serial.Unlock()
	serial.n++
	return fmt.Sprintf("op_%06d", serial.n)
}

func (w *world) command(id string, verb sandbox.Verb) hostproto.Command {
	return hostproto.Command{Operation: opID(), Verb: verb, Sandbox: id, Generation: w.book.generation(id), Name: "name-" + id,
		Spec: sandbox.Spec{Version: "template-1", CPUs: 1, Memory: 64 << 20, Disk: 1e9}, Mode: sandbox.ForkLive}
}

// deletion is a delete that keeps the disk for so long.
func (w *world) deletion(keep time.Duration) hostproto.Command {
	cmd := w.command(sb, sandbox.Delete)
	cmd.UndeleteFor = keep
	return cmd
}

// run hands a command in and waits for its end.
func (w *world) run(cmd hostproto.Command) *hostproto.Failure {
	w.t.Helper()
	if err := w.agent.Submit(w.t.Context(), cmd); err != nil {
		w.t.Fatalf("submit %s: %v", cmd.Verb, err)
	}
	return w.book.end(w.t, cmd.Operation)
}

func (w *world) must(cmd hostproto.Command) {
	w.t.Helper()
	if f := w.run(cmd); f != nil {
		w.t.Fatalf("%s failed: %s (%s)", cmd.Verb, f.Message, f.Kind)
	}
}

// guest gives the way to a running sandbox's agent and fails the test when it does
// not answer.
func (w *world) ping(id string) {
	w.t.Helper()
	g, err := w.agent.Guest(w.t.Context(), id, hostproto.UseLook)
	if err != nil {
		w.t.Fatalf("guest of %s: %v", id, err)
	}
	c := guestproto.NewClient(g.Dial, g.Token)
	defer c.Close()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*time.Second) // Z10
	defer cancel()
	if _, err := c.Agent.Ping(ctx, &guestproto.PingRequest{}); err != nil {
		w.t.Fatalf("ping of %s: %v", id, err)
	}
}

// idle waits until an agent has nothing to do for a sandbox, and gives its record.
func (w *world) idle(id string) *record {
	w.t.Helper()
	var rec *record
	eventually(w.t, "the sandbox "+id+" to be idle", func() bool {
		o, err := w.agent.find(id)
		if err != nil {
			return true // erased
		}
		busy := false
		err = o.call(w.t.Context(), func() error {
			busy = o.job != nil || o.rec.Job != nil || o.rec.Next != nil || len(o.rec.Unacked) > 0
			rec = o.rec.clone()
			// An end that is not heard of yet is settled soon.
			l := o.live.Load()
			busy = busy || rec.Phase == phaseRunning && (l == nil || l.ended() || !slices.Contains(w.machine.Running(), id))
			return nil
		})
		return err == nil && !busy
	})
	return rec
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// states are what a sandbox is to its user, by what the host holds of it.
var states = map[phase][]sandbox.State{
	phaseNone:    {sandbox.Failed},
	phaseRunning: {sandbox.Ready},
	phaseSaved:   {sandbox.Sleeping},
	phaseStopped: {sandbox.Stopped, sandbox.Failed},
	phaseDeleted: {sandbox.Deleted},
	phaseErased:  {sandbox.Deleted, ""},
}

// consistent proves that what the machine holds is what the journal says, no more
// and no less, and that the state that was reported tells the truth.
func (w *world) consistent(ids ...string) {
	w.t.Helper()
	running := map[string]bool{}
	for _, id := range w.machine.Running() {
		running[id] = true
	}
	for _, id := range ids {
		rec := w.idle(id)
		at := phaseErased
		if rec != nil {
			at = rec.Phase
		}
		if got := w.book.state(id); !slices.Contains(states[at], got) {
			w.t.Errorf("the host has %s %s, and it was reported %q", id, at, got)
		}
		if got, want := running[id], at == phaseRunning; got != want {
			w.t.Errorf("%s is %s and runs: %v", id, at, got)
		}
		if got, want := w.network.has(id), at == phaseRunning; got != want {
			w.t.Errorf("%s is %s and has a network: %v", id, at, got)
		}
		if got, want := w.disks.isMounted(id), at == phaseRunning; got != want {
			w.t.Errorf("%s is %s and is mounted: %v", id, at, got)
		}
		if got, want := w.disks.has(id), at == phaseRunning || at == phaseStopped || at == phaseDeleted; got != want {
			w.t.Errorf("%s is %s and has a disk: %v", id, at, got)
		}
		saves := 0
		if at == phaseSaved {
			saves = 1
		}
		if n := w.disks.savesOf(id); n != saves {
			w.t.Errorf("%s is %s and has %d saves", id, at, n)
		}
		if at == phaseRunning {
			w.ping(id)
		}
		boots, _ := os.ReadDir(filepath.Join(w.dir, "run", id))
		if (len(boots) == 1) != (at == phaseRunning) {
			w.t.Errorf("%s is %s and has %d runtime directories", id, at, len(boots))
		}
	}
	eventually(w.t, "captures to be gone", func() bool { return w.disks.captures() == 0 })
}

// book is the control plane: it writes down what is reported, and checks that facts
// come in order.
type book struct {
	mu      sync.Mutex
	facts   map[string][]hostproto.Report // by sandbox, applied ones
	states  map[string]sandbox.State
	gens    map[string]int64
	conds   map[string][]string          // reasons that hold
	ends    map[string]*hostproto.Report // by operation
	after   map[string]sandbox.State     // of the sandbox, by operation
	broken  []string
	changed chan struct{}
	away    atomic.Bool // nothing is taken
}

func newBook() *book {
	return &book{facts: map[string][]hostproto.Report{}, states: map[string]sandbox.State{}, gens: map[string]int64{}, conds: map[string][]string{},
		ends: map[string]*hostproto.Report{}, after: map[string]sandbox.State{}, changed: make(chan struct{})}
}

// Report applies a fact once.
func (b *book) Report(_ context.Context, r hostproto.Report) error {
	if b.away.Load() {
		return errors.New("no server answers")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.Seq == 0 {
		return nil
	}
	facts := b.facts[r.Sandbox]
	if n := int64(len(facts)); r.Seq <= n {
		return nil
	} else if r.Seq != n+1 {
		b.broken = append(b.broken, fmt.Sprintf("%s: fact %d after %d", r.Sandbox, r.Seq, n))
		return errors.New("out of order")
	}
	b.facts[r.Sandbox] = append(facts, r)
	if old := b.ends[r.Operation]; r.Ended && old != nil { // asked for once more
		if (old.Failure == nil) != (r.Failure == nil) {
			b.broken = append(b.broken, r.Operation+" ended in two ways")
		}
		if r.Event != "" && b.states[r.Sandbox] != b.after[r.Operation] {
			b.broken = append(b.broken, r.Operation+" is told again although something has happened since")
		}
		return nil
	}
	if r.Event != "" {
		from := b.states[r.Sandbox]
		if from == "" {
			from = sandbox.Creating
		}
		to, err := from.Next(r.Event)
		if err != nil {
			b.broken = append(b.broken, r.Sandbox+": "+err.Error())
		}
		b.states[r.Sandbox] = to
	}
	b.gens[r.Sandbox] = r.Generation
	for _, c := range r.Clear {
		if !slices.Contains(b.conds[r.Sandbox], c.Reason) {
			b.broken = append(b.broken, r.Sandbox+": "+c.Reason+" is cleared and was not set")
		}
		b.conds[r.Sandbox] = slices.DeleteFunc(b.conds[r.Sandbox], func(reason string) bool { return reason == c.Reason })
	}
	for _, c := range r.Set {
		if slices.Contains(b.conds[r.Sandbox], c.Reason) {
			continue
		}
		b.conds[r.Sandbox] = append(b.conds[r.Sandbox], c.Reason)
	}
	if r.Ended {
		b.ends[r.Operation] = &r
		b.after[r.Operation] = b.states[r.Sandbox]
	}
	close(b.changed)
	b.changed = make(chan struct{})
	return nil
}

func (b *book) generation(id string) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.gens[id]
}

func (b *book) state(id string) sandbox.State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.states[id]
}

func (b *book) conditions(id string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.conds[id])
}

func (b *book) has(op string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ends[op] != nil
}

func (b *book) last(id string) hostproto.Report {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.facts[id]); n > 0 {
		return b.facts[id][n-1]
	}
	return hostproto.Report{}
}

func (b *book) end(t *testing.T, op string) *hostproto.Failure {
	t.Helper()
	var rep *hostproto.Report
	eventually(t, "the end of "+op, func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		rep = b.ends[op]
		return rep != nil
	})
	return rep.Failure
}

func (b *book) sound(t *testing.T) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.broken {
		t.Error(s)
	}
}
