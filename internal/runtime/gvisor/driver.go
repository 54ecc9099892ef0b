// Package gvisor runs sandboxes under gVisor: a kernel in user space (the sentry)
// that needs no hardware virtualisation. It starts the hutch-runsc binary to boot or
// restore a sandbox and then talks to the sentry's control socket; runsc's command
// line is not asked about anything, because its state file lies after a timeout.
//
// docs/gvisor.md says what hutch-runsc changes in gVisor and why.
package gvisor

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// Config is what a Driver needs.
type Config struct {
	Runsc string       // path of the hutch-runsc binary
	Kept  string       // folder of earlier ones, each in a folder of its own; "" for none
	Log   *slog.Logger // nil discards; step timings are logged at debug level
	// CgroupParent is the control group below which each sandbox has its own, named
	// by its id; "hutch" when empty. One name: it lies at the root of the hierarchies
	// and not in the group of the caller's service, so that sandboxes outlive it.
	CgroupParent string
	// Debug makes runsc write verbose logs to Spec.Dir/debug.
	Debug bool
}

// Driver is the gVisor driver. It keeps nothing of a sandbox but in Spec.Dir.
type Driver struct {
	cfg      Config
	log      *slog.Logger
	versions versions

	watching context.Context // ends the watchers of all handles
	close    context.CancelFunc
	watchers sync.WaitGroup
}

// New makes a driver. It starts nothing; Probe says whether it can work here.
func New(cfg Config) *Driver {
	if cfg.CgroupParent == "" {
		cfg.CgroupParent = "hutch"
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	return &Driver{cfg: cfg, log: cfg.Log, watching: ctx, close: cancel}
}

// Close stops watching. The sandboxes go on, and their handles' Wait channels stay
// silent from then on; a later Adopt finds them again.
func (d *Driver) Close() {
	d.close()
	d.watchers.Wait()
}

// Start boots PID 1.
func (d *Driver) Start(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	h, err := d.boot(ctx, spec, "", nil)
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Restore brings an image back with all but PID 1 held.
func (d *Driver) Restore(ctx context.Context, spec runtime.Spec, image string) (runtime.Held, error) {
	for _, name := range imageFiles {
		if info, err := os.Stat(filepath.Join(image, name)); err != nil || !info.Mode().IsRegular() {
			return nil, fault.Wrap(err, fault.DataCorrupt, "the saved memory has no file %s; it cannot be woken, resume the disk instead", name)
		}
	}
	h, err := d.boot(ctx, spec, image, nil)
	if err != nil {
		return nil, err
	}
	return &held{h}, nil
}

// boot starts or, with an image, restores. Whatever fails, nothing runs afterwards.
func (d *Driver) boot(ctx context.Context, spec runtime.Spec, image string, extra []ociMount) (_ *handle, err error) {
	if err := validate(spec); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, interrupted(err, "start of the sandbox")
	}
	version, runsc, err := d.choose(ctx, spec.Version)
	if err != nil {
		return nil, err
	}
	layout, err := readLayout()
	if err != nil {
		return nil, err
	}
	g := layout.group(d.cfg.CgroupParent, spec.ID)
	if err := g.create(spec.MemoryBytes+overhead(spec.MemoryBytes), spec.CPUs); err != nil {
		if f := (*fault.Fault)(nil); errors.As(err, &f) {
			return nil, f // before anything of it runs, and nothing of a running one is touched
		}
		_ = g.remove(context.WithoutCancel(ctx))
		return nil, fault.Wrap(err, fault.Internal, "the sandbox's limits cannot be set up")
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.sweep(ctx, spec, g))
		}
	}()
	for _, name := range []string{logName, panicName} { // of an earlier boot here
		_ = os.Remove(filepath.Join(spec.Dir, name))
	}
	r := record{Boot: bootID(), ID: spec.ID, Version: version, Restored: image != ""}
	if err := r.save(spec.Dir); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the sandbox's directory cannot be written")
	}
	if err := writeSpec(spec.Dir, newSpec(spec, extra)); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the sandbox's directory cannot be written")
	}
	if err := d.runsc(ctx, runsc, spec, g, image); err != nil {
		return nil, err
	}
	if err := g.limitCPU(spec.CPUs); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the sandbox's limits cannot be set up")
	}
	if r.Sandbox, r.Gofer, err = findProcesses(spec.Dir); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the sandbox ended while it was started")
	}
	r.Running = true
	if err := r.save(spec.Dir); err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the sandbox's directory cannot be written")
	}
	return d.watch(spec, g, r)
}

// overhead is what the sentry, the gofer and the stubs may use beside the guest's own
// memory, in bytes: 20 MiB when idle, and more for processes, for page tables and for
// what a save builds up. Without it a guest that fills its memory would be killed by
// its own save. The sentry keeps the guest below its memory, and counts what goes
// beyond 56 MiB and a thirty-second here as the guest's (docs/gvisor.md); this limit is
// for when that comes too late.
func overhead(memory int64) int64 { return 96<<20 + memory/16 }

// runsc runs `runsc run` or `runsc restore` to the point where PID 1 runs.
func (d *Driver) runsc(ctx context.Context, binary string, spec runtime.Spec, g group, image string) error {
	verb, what := []string{"run", "--detach", "--bundle=" + spec.Dir}, "start"
	if image != "" {
		verb = []string{"restore", "--detach", "--background", "--image-path=" + image, "--bundle=" + spec.Dir}
		what = "wake"
	}
	args := append([]string{"join"}, g.procs()...)
	args = append(args, "--")
	args = append(args, flags(spec, d.cfg.Debug)...)
	args = append(append(args, verb...), containerID)

	// Its standard streams become the guest's: the null device, for a pipe would
	// break with this process and a regular file loses what a restored guest writes.
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Dir = "/"
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	begin := time.Now()
	err := cmd.Run()
	d.step(spec.ID, what, "runsc", begin, err)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return interrupted(ctx.Err(), what+" of the sandbox")
	}
	words := lastWords(spec.Dir)
	if words == "" {
		words = err.Error()
	}
	d.log.Warn("runsc failed", "sandbox", spec.ID, "call", what, "err", words)
	return bootFault(words, image != "", errors.Is(err, os.ErrNotExist))
}

// bootFault turns runsc's last words into a fault.
func bootFault(words string, restore, noBinary bool) error {
	cause := errors.New(words)
	switch {
	case noBinary:
		return fault.Wrap(cause, fault.Unsupported, "the hutch-runsc binary is missing; install it beside hutch").Because("runsc_missing")
	case restore && strings.Contains(words, "version does not match across checkpoint restore"):
		return otherVersion(cause)
	case restore && strings.Contains(words, unix.ENOSPC.Error()):
		return fault.Wrap(cause, fault.FailedPrecondition, "the sandbox's disk has no room for the deleted files that its programs held open; resume the disk instead").Because("disk_full")
	case restore && strings.Contains(words, "incompatible FeatureSet"):
		return fault.Wrap(cause, fault.FailedPrecondition, "the memory was saved on a CPU with features that this machine lacks; wake it on a machine like the first, or resume the disk").Because("cpu_features")
	case restore && !strings.Contains(words, "creating container"):
		return fault.Wrap(cause, fault.DataCorrupt, "the saved memory is damaged, or does not belong to this disk; it cannot be woken, resume the disk instead")
	default:
		return fault.Wrap(cause, fault.Internal, "the sandbox could not be started; the host's log has the reason")
	}
}

// sweep kills whatever is in the group, removes it and clears Dir of all but logs.
// It goes on when ctx has ended, for a bounded time.
func (d *Driver) sweep(ctx context.Context, spec runtime.Spec, g group) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quickTimeout)
	defer cancel()
	r, _ := loadRecord(spec.Dir)
	if r.Sandbox.PID == 0 {
		r.Sandbox, r.Gofer, _ = findProcesses(spec.Dir)
	}
	begin := time.Now()
	err := g.kill(ctx)
	if err == nil {
		reapAll(r.Sandbox, r.Gofer)
		err = errors.Join(g.remove(ctx), clean(spec.Dir))
	}
	d.step(spec.ID, "sweep", "leftovers", begin, err)
	return err
}

// reapAll collects processes that have ended, where they are children.
func reapAll(processes ...process) {
	for _, p := range processes {
		if p.PID == 0 {
			continue
		}
		if fd, err := unix.PidfdOpen(p.PID, 0); err == nil {
			if start, err := startTime(p.PID); err == nil && start == p.Start {
				reap(fd)
			}
			unix.Close(fd)
		}
	}
}

// Adopt finds a sandbox again by its record.
func (d *Driver) Adopt(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	layout, err := readLayout()
	if err != nil {
		return nil, err
	}
	g := layout.group(d.cfg.CgroupParent, spec.ID)
	r, err := loadRecord(spec.Dir)
	if err == nil && r.Running && r.Boot == bootID() && r.ID == spec.ID {
		if h, err := d.watch(spec, g, r); err == nil {
			return h, nil
		}
	}
	if err := d.sweep(ctx, spec, g); err != nil {
		return nil, interrupted(err, "end of what was left of the sandbox")
	}
	return nil, fault.New(fault.NotFound, "the sandbox does not run on this machine any more")
}

func (d *Driver) step(id, op, step string, begin time.Time, err error) {
	d.log.Debug("runtime step", "sandbox", id, "call", op, "step", step, "took", time.Since(begin), "err", err)
}

// interrupted turns the end of a context, or what came of it, into a fault.
func interrupted(err error, what string) error {
	switch {
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Cancelled, "the %s was cancelled", what)
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.DeadlineExceeded, "the %s took too long; try again", what)
	case errors.Is(err, errGone):
		return fault.Wrap(err, fault.NotFound, "the %s failed: the sandbox does not run any more", what)
	default:
		return fault.Wrap(err, fault.Internal, "the %s failed", what)
	}
}
