// Package hostagent runs the sandboxes of one machine. One goroutine owns each
// sandbox (owner), one job at a time does the long work beside it, and a journal
// remembers what must not be forgotten: what runs, what is saved, what operation is
// open. Sandboxes do not live in this process: it may be killed at any instant, and
// a new one adopts what runs and finishes or undoes what was open.
//
// The package does not see the database: it is told what is wanted (Submit) and
// tells what happened (the Reporter).
package hostagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/span"
)

// Config is what a host agent is made of.
type Config struct {
	ID     string // the host's name
	Dir    string // journals; durable
	RunDir string // the runtime's per-boot directories; short, gone after a reboot
	BootID string // of the machine's kernel: another one means that nothing runs any more
	Driver runtime.Driver
	// Capabilities is what Driver.Probe said.
	Capabilities runtime.Capabilities
	CPUFeatures  string // of this machine: a memory restores on the same only
	Disks        Disks
	Network      Network
	// Agent is the digest of the agent layer that fresh boots get.
	Agent string
	// BootTimeout bounds the way from the start of PID 1 to its first answer.
	BootTimeout time.Duration
	// StepLimit bounds one try of one step of an operation; 0 is five minutes.
	StepLimit time.Duration
	// GuestAnswer bounds what a guest may take for a question, and its runtime to let it
	// run again; 0 is ten seconds.
	GuestAnswer time.Duration
	// ProbeEvery is how often a running sandbox's agent is asked whether it answers; 0
	// is thirty seconds.
	ProbeEvery time.Duration
	// SampleEvery is how often it is looked whether sandboxes are idle; 0 is
	// sandbox.SampleEvery.
	SampleEvery time.Duration
	// UndeleteFor is how long the disk is kept of what this host deletes by itself.
	UndeleteFor time.Duration
	// Backoff is the pause between the tries of a save that failed; zero is that of the
	// contract.
	Backoff sandbox.Backoff
	// Read looks at the machine's clocks; nil looks at those of the kernel.
	Read func() sandbox.Reading
	Log  *slog.Logger
	// Span traces operations and their steps; nil does not.
	Span span.Start

	points points
}

// points are where tests make faults. Nothing else sets them.
type points struct {
	// step runs a step in the agent's place: fails it, holds it up, does it twice.
	step func(ctx context.Context, sandboxID string, verb sandbox.Verb, step string, do func(context.Context) error) error
	// journal runs a change of a journal's file in the agent's place. r is the record
	// that is written, nil where the file is removed.
	journal func(sandboxID string, r *record, do func() error) error
	// limit stands in for Config.StepLimit.
	limit func(sandboxID string, verb sandbox.Verb, step string) time.Duration
	// stuckAfter is how long a step may go on after it was told to end, 0 is five seconds.
	stuckAfter time.Duration
	// clock writes the host's time in the agent's place.
	clock func(do func() error) error
	// look is the longest pause between two looks at the timers, 0 is one second.
	look time.Duration
}

// Agent is a hostproto.Host on this machine.
type Agent struct {
	cfg Config
	log *slog.Logger

	mu     sync.Mutex // guards owners and closed; never held across I/O
	owners map[string]*owner
	closed bool

	clock    *hostClock
	autos    atomic.Int64 // operations at work that the timers asked for
	overdue  overdue
	captures captures
	reporter hostproto.Reporter

	jobs     context.Context // ends first at Stop, with cause errStopping
	stopJobs context.CancelCauseFunc
	loops    context.Context // ends when the jobs have been told
	stopAll  context.CancelFunc
	running  sync.WaitGroup // owners, senders, watchers
}

var _ hostproto.Host = (*Agent)(nil)

// New makes an agent that does nothing yet.
func New(cfg Config) (*Agent, error) {
	if cfg.Read == nil {
		cfg.Read = func() sandbox.Reading { return reading(cfg.BootID) }
	}
	cfg.points.look = cmp.Or(cfg.points.look, lookEvery)
	cfg.Backoff = cmp.Or(cfg.Backoff, sandbox.DefaultBackoff())
	cfg.BootTimeout = cmp.Or(cfg.BootTimeout, 30*time.Second)
	cfg.StepLimit = cmp.Or(cfg.StepLimit, stepLimit)
	cfg.GuestAnswer = cmp.Or(cfg.GuestAnswer, guestAnswer)
	cfg.ProbeEvery = cmp.Or(cfg.ProbeEvery, probeEvery)
	cfg.SampleEvery = cmp.Or(cfg.SampleEvery, sandbox.SampleEvery)
	cfg.points.stuckAfter = cmp.Or(cfg.points.stuckAfter, stuckAfter)
	for _, dir := range []string{cfg.Dir, cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	clock, err := openClock(cfg.Dir, cfg.Read, cfg.points.clock, cfg.Log)
	if err != nil {
		return nil, fmt.Errorf("the host's time: %w", err)
	}
	a := &Agent{cfg: cfg, clock: clock, log: cfg.Log, owners: map[string]*owner{}, captures: captures{count: map[string]int{}, disks: cfg.Disks, log: cfg.Log}}
	a.jobs, a.stopJobs = context.WithCancelCause(context.Background())
	a.loops, a.stopAll = context.WithCancel(context.Background())
	return a, nil
}

// Start rebuilds the truth from the journals and from what runs, finishes or undoes
// what was open, and then takes commands. It returns when every sandbox has its
// owner; open operations go on behind it.
func (a *Agent) Start(ctx context.Context, reporter hostproto.Reporter) error {
	a.reporter = reporter
	ids, err := journalIDs(a.cfg.Dir)
	if err != nil {
		return err
	}
	var owners []*owner
	for _, id := range ids {
		j, r, err := a.openJournal(id)
		if err != nil {
			return fmt.Errorf("journal of %s: %w", id, err)
		}
		if r == nil { // it died before the first record was whole: nothing was accepted
			if err := j.remove(); err != nil {
				return err
			}
			continue
		}
		r.adoptTimers(a.now())
		o := newOwner(a, id, j, r)
		a.captures.countRecord(r)
		owners = append(owners, o)
	}
	if err := a.sweep(ctx, owners); err != nil {
		// What is left of sandboxes that are gone keeps nothing from those that are here.
		a.log.Error("what no sandbox accounts for could not be removed; `hutch doctor --clean` tells what it is", "err", err)
	}
	a.mu.Lock()
	for _, o := range owners {
		a.owners[o.id] = o
		a.running.Go(func() { o.loop(a.loops) })
	}
	a.mu.Unlock()
	// One that hangs does not make the others wait for its turn.
	all := make(chan error, len(owners))
	for _, o := range owners {
		a.sender(func(context.Context) {
			err := o.call(ctx, func() error { return o.recover(ctx) })
			if err != nil {
				err = fmt.Errorf("recovery of %s: %w", o.id, err)
			}
			all <- err
		})
	}
	var failed error
	for range owners {
		failed = errors.Join(failed, <-all)
	}
	a.sender(a.watch)
	a.sender(a.watchTimers)
	a.sender(a.watchRoom)
	a.sender(a.watchMemory)
	a.sender(a.watchIdle)
	return failed
}

// Stop ends the agent and leaves the sandboxes as they are. Operations that are
// under way stay open in the journal.
func (a *Agent) Stop() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.stopJobs(errStopping)
	a.stopAll()
	a.running.Wait()
}

// Submit takes a command in, durably; see hostproto.Host.
func (a *Agent) Submit(ctx context.Context, cmd hostproto.Command) error {
	return a.submit(ctx, cmd, nil)
}

func (a *Agent) submit(ctx context.Context, cmd hostproto.Command, capture *captureRef) error {
	if sandbox.Steps(cmd.Verb) == nil {
		return fault.New(fault.Unsupported, "this host does not know the verb %s", cmd.Verb).Because(string(cmd.Verb))
	}
	o, err := a.owner(cmd)
	if err != nil {
		return err
	}
	return o.call(ctx, func() error { return o.submit(cmd, capture) })
}

// owner finds the owner of the command's sandbox, and makes one for a new sandbox.
// A delete of a sandbox of which the host has nothing gets an owner too: its end is
// reported like any other.
func (a *Agent) owner(cmd hostproto.Command) (*owner, error) {
	a.mu.Lock()
	o, known := a.owners[cmd.Sandbox]
	closed := a.closed
	a.mu.Unlock()
	if closed {
		return nil, errGone
	}
	if known {
		return o, nil
	}
	if cmd.Verb != sandbox.Create && cmd.Verb != sandbox.Delete {
		return nil, fault.New(fault.NotFound, "this host has nothing of sandbox %s", cmd.Sandbox).Because("unknown_to_host")
	}
	j, r, err := a.openJournal(cmd.Sandbox)
	if err != nil {
		return nil, fault.Wrap(err, fault.Unavailable, "the host's journal cannot be written; is its disk full?").Because("journal")
	}
	if r == nil {
		// What has been here is gone: the end of its deletion is that of what was asked, and
		// of no generation before.
		r = &record{Sandbox: cmd.Sandbox, Name: cmd.Name, Spec: cmd.Spec, Phase: phaseNone, Generation: cmd.Generation}
	}
	made := newOwner(a, cmd.Sandbox, j, r)
	a.mu.Lock()
	defer a.mu.Unlock()
	if o, known := a.owners[cmd.Sandbox]; known {
		go func() { _ = j.close() }()
		return o, nil
	}
	a.owners[cmd.Sandbox] = made
	a.running.Go(func() { made.loop(a.loops) })
	return made, nil
}

func (a *Agent) find(id string) (*owner, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if o, ok := a.owners[id]; ok {
		return o, nil
	}
	return nil, fault.New(fault.NotFound, "this host has nothing of sandbox %s", id).Because("unknown_to_host")
}

func (a *Agent) forget(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.owners, id)
}

// Cancel ends an operation early where it is not committed yet.
func (a *Agent) Cancel(ctx context.Context, sandboxID, operationID string) error {
	o, err := a.find(sandboxID)
	if err != nil {
		return err
	}
	return o.call(ctx, func() error { return o.cancelOperation(operationID) })
}

// Guest gives the way to the guest agent of a sandbox that runs; see hostproto.Host.
func (a *Agent) Guest(_ context.Context, sandboxID string, use hostproto.Use) (hostproto.Guest, error) {
	o, err := a.find(sandboxID)
	if err != nil {
		return hostproto.Guest{}, err
	}
	done, open := o.uses.begin(use)
	l := o.live.Load()
	switch {
	case l != nil && l.held.Load():
		err = errHeld(sandboxID)
	case !open || l == nil || !l.ready.Load():
		err = errNotTaken(sandboxID)
	default:
		return hostproto.Guest{Dial: l.dial(), DialPort: l.dialPort, Token: l.token, Generation: l.generation, Done: done}, nil
	}
	if open {
		done()
	}
	return hostproto.Guest{}, err
}

// Usage says what a running sandbox uses.
func (a *Agent) Usage(ctx context.Context, sandboxID string) (hostproto.Usage, error) {
	o, err := a.find(sandboxID)
	if err != nil {
		return hostproto.Usage{}, err
	}
	l := o.live.Load()
	if l == nil {
		return hostproto.Usage{}, fault.New(fault.FailedPrecondition, "the sandbox %s does not run", sandboxID).Because("not_running")
	}
	u, err := l.handle.Usage(ctx)
	return hostproto.Usage{CPU: u.CPU, MemoryBytes: u.MemoryBytes}, err
}

// Inventory lists the sandboxes that have a journal or a disk here.
func (a *Agent) Inventory(ctx context.Context) ([]string, error) {
	seen := map[string]bool{}
	a.mu.Lock()
	for id := range a.owners {
		seen[id] = true
	}
	a.mu.Unlock()
	disks, err := a.cfg.Disks.IDs(ctx)
	if err != nil {
		return nil, err
	}
	for _, id := range disks {
		seen[id] = true
	}
	return sortedKeys(seen), nil
}

// templateLimit bounds the making of a template: a large image over a slow line.
const templateLimit = 2 * time.Hour

// BuildTemplate makes a template in the pool.
func (a *Agent) BuildTemplate(ctx context.Context, src hostproto.TemplateSource, progress func(string, float64)) (hostproto.Template, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, templateLimit, fault.New(fault.DeadlineExceeded,
		"the template was not made within %s; is the mirror or registry slow? try again", templateLimit).Because("template_timeout"))
	defer cancel()
	return a.cfg.Disks.BuildTemplate(ctx, src, progress)
}

// DeleteTemplate removes a template that no disk is on.
func (a *Agent) DeleteTemplate(ctx context.Context, digest string) error {
	return a.cfg.Disks.DeleteTemplate(ctx, digest)
}

// Info says what this host can do and how full it is.
func (a *Agent) Info(ctx context.Context) (hostproto.HostInfo, error) {
	total, free, err := a.cfg.Disks.Space(ctx)
	if err != nil {
		return hostproto.HostInfo{}, err
	}
	caps := a.cfg.Capabilities
	return hostproto.HostInfo{
		ID: a.cfg.ID, Runtimes: []string{caps.Runtime}, HeldRestore: caps.HeldRestore, Memory: caps.MemorySnapshot,
		PoolBytes: total, PoolFree: free, CPUs: goruntime.NumCPU(), MemoryBytes: memoryTotal(), Ahead: a.clock.ahead(),
	}, nil
}

// meta says what a memory captured of h needs to be restored.
func (a *Agent) meta(h runtime.Handle) runtime.Meta {
	return runtime.Meta{Runtime: a.cfg.Capabilities.Runtime, Version: h.Version(), CPUFeatures: a.cfg.CPUFeatures}
}

// now is host time.
func (a *Agent) now() time.Time { return a.clock.now() }

// sender runs f in a goroutine that the agent's end waits for.
func (a *Agent) sender(f func(ctx context.Context)) {
	a.running.Go(func() { f(a.loops) })
}

func (a *Agent) report(ctx context.Context, r hostproto.Report) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return a.reporter.Report(ctx, r)
}

// progress tells of a step without waiting: it may get lost, and must not hold up
// the operation.
func (a *Agent) progress(r hostproto.Report) {
	ctx, cancel := context.WithTimeout(a.loops, time.Second)
	defer cancel()
	if err := a.reporter.Report(ctx, r); err != nil {
		a.log.Debug("progress was not taken", "sandbox", r.Sandbox, "op", r.Operation, "err", err)
	}
}

// bootDir is the runtime's directory of one boot.
func (a *Agent) bootDir(id string, generation int64) string {
	return filepath.Join(a.cfg.RunDir, id, fmt.Sprint(generation))
}
