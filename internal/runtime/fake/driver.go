package fake

import (
	"context"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// Action is what an injected Fault does.
type Action int

// The actions.
const (
	Fail Action = iota + 1 // the call returns an error
	Hang                   // the call returns when its context ends
	Die                    // the sandbox ends in the middle of the call
)

// Fault makes one call go wrong.
type Fault struct {
	Method string // Probe, Start, Restore, Adopt, Pause, Capture, Resume, Release, Thaw, Saveable, Kill, DialGuest or Usage
	Nth    int    // which call of this method on this driver, from 1; 0 is every one
	Action Action
	After  bool  // the call has its effect first, and only then goes wrong
	Err    error // what Fail returns; a fault of kind Unavailable when nil
}

// Driver is a fake driver. It may be used from several goroutines.
type Driver struct {
	m *Machine

	mu     sync.Mutex
	calls  map[string]int
	faults []Fault
}

// Inject adds faults.
func (d *Driver) Inject(faults ...Fault) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults = append(d.faults, faults...)
}

// Heal takes all faults away.
func (d *Driver) Heal() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults = nil
}

// Calls says how often a method was called.
func (d *Driver) Calls(method string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[method]
}

// do counts a call and carries it out, with the fault that is due for it. die ends
// the sandbox that the call is about.
func (d *Driver) do(ctx context.Context, method string, die func(), effect func() error) error {
	d.mu.Lock()
	d.calls[method]++
	n := d.calls[method]
	i := slices.IndexFunc(d.faults, func(f Fault) bool {
		return f.Method == method && (f.Nth == 0 || f.Nth == n)
	})
	var f Fault
	if i >= 0 {
		f = d.faults[i]
	}
	d.mu.Unlock()

	if err := ctx.Err(); err != nil {
		return interrupted(err)
	}
	if f.Action == 0 || f.After {
		if err := effect(); err != nil {
			return err
		}
	}
	switch f.Action {
	case Fail:
		if f.Err != nil {
			return f.Err
		}
		return fault.New(fault.Unavailable, "the call %s was made to fail", method)
	case Hang:
		<-ctx.Done()
		return interrupted(ctx.Err())
	case Die:
		die()
		return errGone
	}
	return nil
}

// crashed is the exit of a sandbox that an injected fault has ended.
var crashed = runtime.Exit{Known: true, Signal: 9}

// Probe says what the fake can do.
func (d *Driver) Probe(ctx context.Context) (runtime.Capabilities, error) {
	var c runtime.Capabilities
	err := d.do(ctx, "Probe", func() {}, func() error {
		c = runtime.Capabilities{Runtime: "fake", Version: d.m.versionNow(), MemorySnapshot: true, HeldRestore: true, Docker: true}
		return nil
	})
	return c, err
}

// Start boots a guest.
func (d *Driver) Start(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	s, err := d.boot(ctx, "Start", Boot{Spec: spec})
	if err != nil {
		return nil, err
	}
	return &handle{d, spec, s}, nil
}

// OOMKills is what RunOutOfMemory has said.
func (h *handle) OOMKills() uint64 {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	return h.s.ooms
}

// Version is the machine's, which captures carry.
func (h *handle) Version() string { return h.d.m.versionNow() }

// Restore boots a guest from an image.
func (d *Driver) Restore(ctx context.Context, spec runtime.Spec, dir string) (runtime.Held, error) {
	img, err := loadImage(dir, d.m.versionNow())
	if err != nil {
		return nil, err
	}
	if !slices.Equal(img.Args, spec.Args) {
		return nil, fault.New(fault.InvalidArgument, "the memory was saved with the arguments %q and cannot be woken with %q", img.Args, spec.Args)
	}
	s, err := d.boot(ctx, "Restore", Boot{Spec: spec, Restored: true, Memory: img.Memory})
	if err != nil {
		return nil, err
	}
	return &handle{d, spec, s}, nil
}

// boot leaves nothing running when it fails, also when the fault comes afterwards.
func (d *Driver) boot(ctx context.Context, method string, b Boot) (*sandbox, error) {
	if err := b.Spec.Validate(); err != nil {
		return nil, err
	}
	var s *sandbox
	die := func() {
		if s != nil {
			s.end(crashed)
			d.m.remove(b.Spec.ID, s)
		}
	}
	err := d.do(ctx, method, die, func() (err error) {
		s, err = d.m.boot(b)
		return err
	})
	if err != nil {
		die()
		return nil, err
	}
	return s, nil
}

// Adopt finds a sandbox that another driver of the machine has left.
func (d *Driver) Adopt(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	s := d.m.find(spec.ID)
	die := func() {
		if s != nil {
			s.end(crashed)
		}
	}
	err := d.do(ctx, "Adopt", die, func() error {
		if s == nil || !s.running() {
			d.m.remove(spec.ID, s)
			return errGone
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &handle{d, spec, s}, nil
}

// handle is a Handle, a Paused and a Held: which of them it is given out as says what
// may be called.
type handle struct {
	d    *Driver
	spec runtime.Spec
	s    *sandbox
}

func (h *handle) do(ctx context.Context, method string, effect func() error) error {
	return h.d.do(ctx, method, func() { h.s.end(crashed) }, effect)
}

// Pause undoes itself when it fails.
func (h *handle) Pause(ctx context.Context) (runtime.Paused, error) {
	if err := h.do(ctx, "Pause", func() error { return h.s.pause(true) }); err != nil {
		_ = h.s.pause(false)
		return nil, err
	}
	return h, nil
}

func (h *handle) Resume(ctx context.Context) error {
	return h.do(ctx, "Resume", func() error { return h.s.pause(false) })
}

func (h *handle) Release(ctx context.Context) error {
	return h.do(ctx, "Release", h.s.release)
}

func (h *handle) Thaw(ctx context.Context) error {
	return h.do(ctx, "Thaw", func() error {
		if err := h.s.pause(false); err != nil {
			return err
		}
		return h.s.release()
	})
}

func (h *handle) Capture(ctx context.Context, dir string) error {
	return h.do(ctx, "Capture", func() error {
		return h.s.capture(dir, h.d.m.versionNow(), h.spec.Args)
	})
}

func (h *handle) Saveable(ctx context.Context) error {
	return h.do(ctx, "Saveable", func() error { return nil })
}

func (h *handle) Kill(ctx context.Context) error {
	return h.do(ctx, "Kill", func() error {
		h.s.end(crashed)
		h.d.m.remove(h.spec.ID, h.s)
		return nil
	})
}

func (h *handle) DialGuest(ctx context.Context, port int) (conn net.Conn, err error) {
	err = h.do(ctx, "DialGuest", func() error {
		if !h.s.running() {
			return errGone
		}
		conn, err = h.s.guest.Dial(ctx, port)
		return err
	})
	if err != nil && conn != nil { // the fault came after the effect
		_ = conn.Close()
		conn = nil
	}
	return conn, err
}

// Dirty is a guest that says what it has written and the machine has not.
type Dirty interface{ DirtyBytes() int64 }

// Worker is a guest that says how much CPU time it has used.
type Worker interface{ CPUTime() time.Duration }

// CPUTime is what a Worker tells, and nothing for other guests.
func (h *handle) CPUTime() (time.Duration, error) {
	if !h.s.running() {
		return 0, errGone
	}
	if w, ok := h.s.guest.(Worker); ok {
		return w.CPUTime(), nil
	}
	return 0, nil
}

// Usage counts nothing but what a Dirty guest tells.
func (h *handle) Usage(ctx context.Context) (runtime.Usage, error) {
	var u runtime.Usage
	err := h.do(ctx, "Usage", func() error {
		if !h.s.running() {
			return errGone
		}
		if d, ok := h.s.guest.(Dirty); ok {
			u.DirtyBytes = d.DirtyBytes()
		}
		return nil
	})
	return u, err
}

// Wait gives the sandbox's end.
func (h *handle) Wait() <-chan runtime.Exit { return h.s.wait() }
