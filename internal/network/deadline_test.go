package network

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// What a netlink socket gives when its deadline is over becomes a typed error.
func TestKernelThatDoesNotAnswer(t *testing.T) {
	m := &Manager{log: slog.New(slog.DiscardHandler)}
	for _, err := range []error{unix.EAGAIN, os.ErrDeadlineExceeded} {
		if got := m.failed(fmt.Errorf("list interfaces: %w", err), "the list could not be read"); !fault.Is(got, fault.DeadlineExceeded) {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// A deaf netlink socket does what it is asked, and its answers never arrive: a filter
// drops them. It is the nth that is opened after newDeaf; 0 is none.
type deaf struct {
	t       *testing.T
	nth     int
	mu      sync.Mutex
	opened  []int           // descriptors, in order
	sockets map[string]bool // that were there
}

func newDeaf(t *testing.T, nth int) *deaf {
	d := &deaf{t: t, nth: nth, sockets: map[string]bool{}}
	d.look(func(int) {})
	opened = func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.look(func(fd int) {
			if d.opened = append(d.opened, fd); len(d.opened) == d.nth {
				d.deafen(fd)
			}
		})
	}
	return d
}

// look calls new with the descriptor of each netlink socket of this process that it
// has not seen.
func (d *deaf) look(new func(fd int)) {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		d.t.Error(err)
	}
	for _, e := range all {
		fd, _ := strconv.Atoi(e.Name())
		domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		if err != nil || domain != unix.AF_NETLINK {
			continue
		}
		// Descriptors are used again, inodes are not.
		if socket, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !d.sockets[socket] {
			d.sockets[socket] = true
			new(fd)
		}
	}
}

func (d *deaf) deafen(fd int) {
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop[0]}); err != nil {
		d.t.Error(err)
	}
}

// impatient makes the kernel's answers due at once. The test must not be parallel.
func impatient(t *testing.T) {
	was := kernelAnswer
	kernelAnswer = 300 * time.Millisecond
	t.Cleanup(func() {
		kernelAnswer = was
		opened = func() {}
	})
}

// S6: the kernel answers nothing on the nth netlink socket of a call. The call ends
// with its kind of error in bounded time, and the next one finds what was half done.
func TestDeafSockets(t *testing.T) {
	impatient(t)
	calls := map[string]func(w *world, m *Manager, id string) error{
		"attach": func(_ *world, m *Manager, id string) error {
			_, err := m.Attach(context.Background(), id)
			return err
		},
		"detach": func(_ *world, m *Manager, id string) error { return m.Detach(context.Background(), id) },
		"open": func(w *world, m *Manager, _ string) error {
			again, err := w.tryOpen(Config{Tag: m.cfg.Tag})
			if err == nil {
				err = again.Close()
			}
			return err
		},
	}
	for name, call := range calls {
		nth := 1
		for ; ; nth++ {
			w := newWorld(t)
			m := w.open(Config{})
			id := newID()
			w.forget(m.cfg.Tag, id)
			if name == "detach" {
				_, err := m.Attach(context.Background(), id)
				must(t, err)
			}
			d := newDeaf(t, nth)
			began := time.Now()
			err := call(w, m, id)
			opened = func() {}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("%s, socket %d: it took %s", name, nth, took)
			}
			deafened := len(d.opened) >= nth
			if deafened && err != nil && !fault.Is(err, fault.DeadlineExceeded) {
				t.Errorf("%s, socket %d: %v", name, nth, err)
			}
			if !deafened {
				must(t, err)
			}
			a, err := m.Attach(context.Background(), id)
			must(t, err)
			if a.Uplink == "" {
				t.Errorf("%s, socket %d: it is attached to nothing", name, nth)
			}
			must(t, m.Detach(context.Background(), id))
			w.clean(m)
			if !deafened {
				break
			}
		}
		if nth == 1 {
			t.Errorf("%s has no socket that was deafened", name)
		}
		t.Logf("%s: %d sockets", name, nth-1)
	}
}

// S6: the socket that an instance keeps for the host goes deaf, and hears again.
func TestDeafHost(t *testing.T) {
	impatient(t)
	w := newWorld(t)
	d := newDeaf(t, 0)
	m := w.open(Config{})
	gone, _ := w.attach(m)
	id := newID()
	w.forget(m.cfg.Tag, id)
	d.deafen(d.opened[0])
	if _, err := m.Attach(context.Background(), id); !fault.Is(err, fault.DeadlineExceeded) {
		t.Errorf("attach: %v", err)
	}
	if err := m.Detach(context.Background(), gone); !fault.Is(err, fault.DeadlineExceeded) {
		t.Errorf("detach: %v", err)
	}
	if err := unix.SetsockoptInt(d.opened[0], unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil {
		t.Fatal(err)
	}
	_, err := m.Attach(context.Background(), id)
	must(t, err)
	for _, id := range []string{id, gone} {
		must(t, m.Detach(context.Background(), id))
	}
	w.clean(m)
}
