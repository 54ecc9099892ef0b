// Package fake is a runtime driver in memory, for tests of what uses a driver. It
// passes the same suite as the real ones.
//
// A Machine stands for the processes of a host: sandboxes live there and outlast the
// Drivers, as real ones outlast the host agent. What runs in them is a Guest of the
// test's choice. Inject makes a driver's calls fail, hang or lose the sandbox.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// Guest is what runs in a fake sandbox. Its methods are called by one goroutine at a
// time, but for Dial and Stop, which may come at any time, from any.
type Guest interface {
	// Dial connects to a port inside.
	Dial(ctx context.Context, port int) (net.Conn, error)
	// Pause stops everything, Resume lets it run on. They come in turns.
	Pause()
	Resume()
	// Snapshot gives the memory of a paused guest.
	Snapshot() ([]byte, error)
	// Release lets the tasks of a restored guest run that are not of PID 1.
	Release()
	// Stop ends the guest; its connections break.
	Stop()
}

// Boot is what a guest is made from.
type Boot struct {
	Spec     runtime.Spec
	Restored bool   // held until Release
	Memory   []byte // of a restored guest, from Snapshot
	// Exit is for the guest to call when PID 1 ends by itself, holding no lock that one
	// of its methods takes.
	Exit func(runtime.Exit)
	// Keep is for the guest to call when its memory has changed, before anyone hears of
	// that. On a machine in memory it does nothing.
	Keep func(memory []byte) error
}

// Version is the version that the fake's images carry. Restoring one of another
// version is refused; a test may change a Machine's.
const Version = "fake-1"

// Machine holds the sandboxes.
type Machine struct {
	guest func(Boot) (Guest, error)
	dir   string // where what runs is kept; "" is in memory only

	mu        sync.Mutex
	version   string
	sandboxes map[string]*sandbox // by Spec.ID
}

// NewMachine makes a machine whose sandboxes run what guest makes.
func NewMachine(guest func(Boot) (Guest, error)) *Machine {
	return &Machine{guest: guest, version: Version, sandboxes: map[string]*sandbox{}}
}

// SetVersion changes the version of the runtime, as an upgrade does.
func (m *Machine) SetVersion(version string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.version = version
}

func (m *Machine) versionNow() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.version
}

// Driver gives a new driver, as a new host agent has.
func (m *Machine) Driver() *Driver { return &Driver{m: m, calls: map[string]int{}} }

// Running lists the ids of the sandboxes that run.
func (m *Machine) Running() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []string
	for id, s := range m.sandboxes {
		if s.running() {
			ids = append(ids, id)
		}
	}
	return ids
}

// Crash ends a sandbox from outside, as the kernel may.
func (m *Machine) Crash(id string, exit runtime.Exit) {
	if s := m.find(id); s != nil {
		s.end(exit)
	}
}

// RunOutOfMemory says that processes inside a sandbox were killed for want of memory.
func (m *Machine) RunOutOfMemory(id string, killed uint64) {
	if s := m.find(id); s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ooms += killed
	}
}

// Reboot ends all sandboxes and forgets them, as a power cut does.
func (m *Machine) Reboot() {
	m.mu.Lock()
	all := m.sandboxes
	m.sandboxes = map[string]*sandbox{}
	m.mu.Unlock()
	for _, s := range all {
		s.end(runtime.Exit{})
	}
}

func (m *Machine) find(id string) *sandbox {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sandboxes[id]
}

// boot makes a sandbox, or refuses while one of the same id runs.
func (m *Machine) boot(b Boot) (*sandbox, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sandboxes[b.Spec.ID]; s != nil && s.running() {
		return nil, fault.New(fault.Conflict, "this sandbox still runs on this machine; adopt or kill it first").Because("still_running")
	}
	s := &sandbox{base: m.base(b.Spec), spec: b.Spec, held: b.Restored}
	b.Exit, b.Keep = s.end, s.keepMemory
	if err := s.forgotten(); err != nil { // of a boot of this name that has ended
		return nil, errNotKept(err)
	}
	guest, err := m.guest(b)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the sandbox could not be started")
	}
	s.guest = guest
	if err := s.keep(); err != nil {
		guest.Stop()
		return nil, errNotKept(err)
	}
	m.sandboxes[b.Spec.ID] = s
	return s, nil
}

// remove forgets a sandbox that has ended.
func (m *Machine) remove(id string, s *sandbox) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sandboxes[id] == s {
		delete(m.sandboxes, id)
	}
}

// sandbox is one boot on a machine.
type sandbox struct {
	guest Guest
	base  string // of its files; "" for none
	spec  runtime.Spec

	mu      sync.Mutex
	paused  bool
	held    bool
	exit    *runtime.Exit
	waiters []chan runtime.Exit
	ooms    uint64
}

var errGone = fault.New(fault.NotFound, "the sandbox does not run any more")

func (s *sandbox) running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.exit == nil
}

// end ends the sandbox once; later ends are not heard.
func (s *sandbox) end(exit runtime.Exit) {
	s.mu.Lock()
	if s.exit != nil {
		s.mu.Unlock()
		return
	}
	if exit.At.IsZero() {
		exit.At = time.Now()
	}
	_ = s.forgotten() // what stays runs again when the machine is opened anew
	s.exit = &exit
	for _, c := range s.waiters {
		c <- exit
		close(c)
	}
	s.waiters = nil
	s.mu.Unlock()
	s.guest.Stop()
}

func (s *sandbox) wait() <-chan runtime.Exit {
	c := make(chan runtime.Exit, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != nil {
		c <- *s.exit
		close(c)
	} else {
		s.waiters = append(s.waiters, c)
	}
	return c
}

// pause makes the sandbox paused or not, whatever it was.
func (s *sandbox) pause(want bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != nil {
		return errGone
	}
	if want && !s.paused {
		s.guest.Pause()
	}
	if !want && s.paused {
		s.guest.Resume()
	}
	if s.paused == want {
		return nil
	}
	s.paused = want
	return s.kept()
}

// kept is keep, with a fault for who called.
func (s *sandbox) kept() error {
	if err := s.keep(); err != nil {
		return errNotKept(err)
	}
	return nil
}

func (s *sandbox) release() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != nil {
		return errGone
	}
	if !s.held {
		return nil
	}
	s.guest.Release()
	s.held = false
	return s.kept()
}

// imageName is the one file of an image.
const imageName = "memory.img"

type image struct {
	Version string   `json:"version"`
	Args    []string `json:"args"`
	Memory  []byte   `json:"memory"`
}

func (s *sandbox) capture(dir, version string, args []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exit != nil {
		return errGone
	}
	if !s.paused {
		return fault.New(fault.Internal, "the sandbox is not paused")
	}
	memory, err := s.guest.Snapshot()
	if err == nil {
		var data []byte
		if data, err = json.Marshal(image{version, args, memory}); err == nil {
			err = os.WriteFile(filepath.Join(dir, imageName), data, 0o600)
		}
	}
	if err != nil {
		return fault.Wrap(err, fault.Internal, "the sandbox's memory could not be saved; it is whole, and can be resumed")
	}
	return nil
}

func loadImage(dir, version string) (image, error) {
	var i image
	data, err := os.ReadFile(filepath.Join(dir, imageName))
	if err == nil {
		err = json.Unmarshal(data, &i)
	}
	if err != nil {
		return i, fault.Wrap(err, fault.DataCorrupt, "the saved memory is damaged; it cannot be woken, resume the disk instead")
	}
	if i.Version != version {
		return i, fault.New(fault.FailedPrecondition, "the memory was saved by version %s of the runtime and cannot be woken by %s", i.Version, version).Because("runtime_version")
	}
	return i, nil
}

// interrupted turns the end of a context into a fault.
func interrupted(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fault.Wrap(err, fault.DeadlineExceeded, "the call to the sandbox took too long; try again")
	}
	return fault.Wrap(err, fault.Cancelled, "the call to the sandbox was cancelled")
}
