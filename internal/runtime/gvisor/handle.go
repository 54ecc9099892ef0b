package gvisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// The files of an image, in the order in which the sentry takes them
// (pkg/sentry/control/state.go). Uncompressed, the pages are a file of their own. The
// last is ours: the contents of deleted files that are open.
var imageFiles = []string{"checkpoint.img", "pages_meta.img", "pages.img", "unlinked.img"}

// Bounds for calls that a healthy sentry answers in milliseconds, so that a caller
// without a deadline is not held up for ever by a sick one.
const (
	pauseTimeout  = 30 * time.Second // a task in a long call to a slow disk has to return
	undoTimeout   = 3 * time.Second  // the undoing of a pause; the sentry carries it out even when its answer is late
	quickTimeout  = 10 * time.Second
	killTimeout   = 60 * time.Second
	exitAnswering = 2 * time.Second // the sentry's answer about PID 1 may come after its end was seen
)

// handle is a sandbox that runs, or whose end was not yet collected.
type handle struct {
	d    *Driver
	spec runtime.Spec
	g    group
	r    record

	sandbox *os.File // pidfd of the sentry
	gofer   *os.File // pidfd of the gofer
	killed  atomic.Bool
	kills   atomic.Uint64 // processes inside that were killed for want of memory
	ended   chan struct{} // closed when exit is set

	mu      sync.Mutex
	exit    *runtime.Exit
	waiters []chan runtime.Exit
}

// call calls the sentry with a bound.
func (h *handle) call(ctx context.Context, bound time.Duration, method string, arg any, files []*os.File, result any) error {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	return call(ctx, h.spec.Dir, method, arg, files, result)
}

// nothing is the argument of methods that take none.
var nothing = struct{}{}

// number numbers pauses and resumes: it grows, also over a restart of this process, so
// that the sentry can refuse a call that a later one has overtaken.
func number() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return uint64(t.Nano())
}

// Pause stops all tasks.
func (h *handle) Pause(ctx context.Context) (runtime.Paused, error) {
	begin := time.Now()
	err := h.call(ctx, pauseTimeout, "HutchPause", number(), nil, nil)
	h.d.step(h.spec.ID, "pause", "stop tasks", begin, err)
	if err != nil {
		// Whether it was stopped, or will be, is unknown. A resume undoes it, or keeps it
		// from being carried out when it comes later.
		undone := h.resume(context.WithoutCancel(ctx), undoTimeout)
		return nil, errors.Join(interrupted(err, "pause of the sandbox"), undone)
	}
	return &paused{h}, nil
}

func (h *handle) resume(ctx context.Context, bound time.Duration) error {
	begin := time.Now()
	err := h.call(ctx, bound, "HutchResume", number(), nil, nil)
	h.d.step(h.spec.ID, "resume", "let tasks run", begin, err)
	if err != nil {
		return interrupted(err, "continuation of the sandbox")
	}
	return nil
}

// Thaw ends a pause and a hold.
func (h *handle) Thaw(ctx context.Context) error {
	if err := h.resume(ctx, pauseTimeout); err != nil {
		return err
	}
	return h.release(ctx)
}

// release lets held tasks run, once all memory is there.
func (h *handle) release(ctx context.Context) error {
	if !h.r.Restored {
		return nil
	}
	begin := time.Now()
	err := call(ctx, h.spec.Dir, "WaitRestore", nothing, nil, nil)
	h.d.step(h.spec.ID, "release", "memory loaded", begin, err)
	if refused := (refusal{}); errors.As(err, &refused) {
		return fault.Wrap(err, fault.DataCorrupt, "the saved memory is damaged; the sandbox cannot be woken, resume the disk instead")
	}
	if err != nil {
		return interrupted(err, "wake of the sandbox")
	}
	begin = time.Now()
	err = h.call(ctx, quickTimeout, "HutchRelease", nothing, nil, nil)
	h.d.step(h.spec.ID, "release", "let tasks run", begin, err)
	if err != nil {
		return interrupted(err, "wake of the sandbox")
	}
	return nil
}

// Kill ends every process of the sandbox and removes what this driver has made.
func (h *handle) Kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	begin := time.Now()
	h.killed.Store(true)
	for _, f := range []*os.File{h.sandbox, h.gofer} {
		signal(f, unix.SIGKILL)
	}
	err := h.g.kill(ctx)
	h.d.step(h.spec.ID, "kill", "processes", begin, err)
	if err != nil {
		return interrupted(err, "end of the sandbox")
	}
	begin = time.Now()
	select {
	case <-h.ended:
	case <-h.d.watching.Done():
		reapAll(h.r.Sandbox)
	case <-ctx.Done():
		return interrupted(ctx.Err(), "end of the sandbox")
	}
	reapAll(h.r.Gofer)
	err = errors.Join(h.g.remove(ctx), clean(h.spec.Dir))
	h.d.step(h.spec.ID, "kill", "leftovers", begin, err)
	if err != nil {
		return interrupted(err, "removal of what the sandbox left")
	}
	return nil
}

// DialGuest connects to a port inside.
func (h *handle) DialGuest(ctx context.Context, port int) (net.Conn, error) {
	if h.spec.Dial == nil {
		return nil, fault.New(fault.Unsupported, "port %d of the sandbox cannot be reached: it has no network", port).Because("network")
	}
	return h.spec.Dial(ctx, port)
}

// Usage reads the control group.
func (h *handle) Usage(context.Context) (runtime.Usage, error) {
	cpu, err := h.CPUTime()
	if err != nil {
		return runtime.Usage{}, err
	}
	deleted, err := unlinkedBytes(h.r.Sandbox.PID, h.r.Gofer.PID)
	if err != nil {
		deleted = 0 // it is ending
	}
	return runtime.Usage{CPU: cpu, MemoryBytes: h.g.memoryBytes(), DirtyBytes: h.g.dirtyBytes(), DeletedBytes: deleted}, nil
}

// CPUTime reads one file of the control group.
func (h *handle) CPUTime() (time.Duration, error) {
	cpu, ok := h.g.cpuTime()
	if !ok {
		return 0, fault.New(fault.NotFound, "the sandbox does not run any more, or this machine does not count CPU time")
	}
	return cpu, nil
}

// OOMKills is what the sentry has told by now.
func (h *handle) OOMKills() uint64 { return h.kills.Load() }

// Version is that of the sandbox's runsc.
func (h *handle) Version() string { return h.r.Version }

// Saveable looks at what a save would have to carry.
func (h *handle) Saveable(context.Context) error {
	bytes, err := unlinkedBytes(h.r.Sandbox.PID, h.r.Gofer.PID)
	if err != nil {
		return interrupted(err, "look at the sandbox's open files")
	}
	if bytes > maxUnlinked {
		return fault.New(fault.FailedPrecondition, "the sandbox cannot be saved: its programs hold %d MiB of files open that have been deleted, and more than %d MiB cannot be saved; close them, or stop the sandbox instead", bytes>>20, int64(maxUnlinked>>20)).Because("unlinked_files")
	}
	return nil
}

// paused is a handle whose tasks are stopped.
type paused struct{ *handle }

// Capture writes the memory.
func (p *paused) Capture(ctx context.Context, dir string) error {
	begin := time.Now()
	err := p.capture(ctx, dir)
	p.d.step(p.spec.ID, "capture", "memory", begin, err)
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) || strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		return fault.Wrap(err, fault.Unavailable, "the host has no room left for the sandbox's memory; free some and try again. The sandbox is whole").Because("pool_full")
	}
	if refused := (refusal{}); errors.As(err, &refused) {
		return fault.Wrap(err, fault.Internal, "the sandbox's memory could not be saved; it is whole, and can be resumed")
	}
	return interrupted(err, "save of the sandbox's memory")
}

func (p *paused) capture(ctx context.Context, dir string) error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for _, name := range imageFiles {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return fmt.Errorf("creating a file of the image: %w", err)
		}
		files = append(files, f)
	}
	last := len(files) - 1
	if err := call(ctx, p.spec.Dir, "HutchUnlinked", nothing, files[last:], nil); err != nil {
		return err
	}
	defer func() { // a save to come must not write there
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_ = call(ctx, p.spec.Dir, "HutchUnlinked", nothing, nil, nil)
	}()
	// control.SaveOpts. Resume: the sandbox lives on whatever comes of the save.
	opts := map[string]any{
		"metadata":        map[string]string{"compression": "none"},
		"have_pages_file": true,
		"Resume":          true,
	}
	return call(ctx, p.spec.Dir, "Checkpoint", opts, files[:last], nil)
}

// Resume lets the sandbox run on.
func (p *paused) Resume(ctx context.Context) error { return p.resume(ctx, pauseTimeout) }

// held is a handle of a restored sandbox in which only PID 1 runs.
type held struct{ *handle }

// Release lets everything else run.
func (h *held) Release(ctx context.Context) error { return h.release(ctx) }
