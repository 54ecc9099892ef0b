package guest

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// syncState joins the syncs that come while one runs: a sync can hang with its disk,
// and hanging ones must not pile up.
type syncState struct {
	mu      sync.Mutex
	waiting chan struct{} // closed when the next sync, not begun yet, has ended
	running bool
}

// sync writes all dirty data of all file systems. A sync that ran before the call does
// not count: it returns after one that began later, or when ctx ends.
func (g *Guest) sync(ctx context.Context) error {
	s := &g.syncing
	s.mu.Lock()
	if s.waiting == nil {
		s.waiting = make(chan struct{})
	}
	ended := s.waiting
	if !s.running {
		s.running = true
		go s.run()
	}
	s.mu.Unlock()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fault.Wrap(ctx.Err(), fault.DeadlineExceeded, "the file systems did not sync in time; the disk may hang").Because("storage_stalled")
	}
}

// run syncs until nobody waits for a sync that has not begun. It cannot be stopped: the
// system call ends with the disk's answer.
func (s *syncState) run() {
	for {
		s.mu.Lock()
		ended := s.waiting
		s.waiting = nil
		if ended == nil {
			s.running = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		unix.Sync()
		close(ended)
	}
}

// shutdownState is the one shutdown of this boot.
type shutdownState struct {
	begun atomic.Bool
	ended chan struct{}
	res   *guestproto.ShutdownResponse
	mu    sync.Mutex
}

// shutDown ends every process but PID 1 and syncs. It goes on without its caller; a
// second call waits for the first's answer.
func (g *Guest) shutDown(ctx context.Context, grace time.Duration) (*guestproto.ShutdownResponse, error) {
	s := &g.shutdown
	s.mu.Lock()
	if s.ended == nil {
		s.ended = make(chan struct{})
		s.begun.Store(true)
		g.commands.close("stopping")
		g.work.Go(func() {
			defer close(s.ended)
			s.res = g.endAll(grace)
		})
	}
	s.mu.Unlock()
	select {
	case <-s.ended:
	case <-ctx.Done():
		return nil, fault.Wrap(ctx.Err(), fault.DeadlineExceeded, "the processes have not all ended yet; ask again")
	}
	if err := g.sync(ctx); err != nil {
		return nil, err
	}
	return s.res, nil
}

// killGrace is how long a killed process may take to vanish.
const killGrace = 2 * time.Second

// endAll sends SIGTERM, waits for the grace, and kills what is left.
func (g *Guest) endAll(grace time.Duration) *guestproto.ShutdownResponse {
	if grace == 0 {
		grace = guestproto.DefaultGrace
	}
	list := g.processes()
	if hasContainers(list) {
		grace = max(grace, guestproto.ContainerGrace)
	}
	res := &guestproto.ShutdownResponse{Signalled: int32(len(list))}
	g.signalAll(list, syscall.SIGTERM)
	g.signalAll(list, syscall.SIGCONT) // a stopped process takes no SIGTERM
	left := g.awaitEnd(grace)
	if len(left) > 0 {
		res.Killed = int32(len(left))
		// Twice: what forked while it was being killed is met by the second.
		for range 2 {
			g.signalAll(left, syscall.SIGKILL)
			if left = g.awaitEnd(killGrace); len(left) == 0 {
				break
			}
		}
	}
	res.Left = g.describe(left[:min(len(left), 100)])
	return res
}

// hasContainers says whether a container engine or one of its shims runs (V5).
func hasContainers(list []process) bool {
	for _, p := range list {
		if p.comm == "dockerd" || p.comm == "conmon" || strings.HasPrefix(p.comm, "containerd") {
			return true
		}
	}
	return false
}

// signalAll signals every process of the sandbox; without Init, each group listed.
func (g *Guest) signalAll(list []process, sig syscall.Signal) {
	if g.cfg.Init {
		syscall.Kill(-1, sig) // all but PID 1 itself (kill(2))
		return
	}
	for _, p := range list {
		syscall.Kill(p.pid, sig)
	}
}

// awaitEnd polls the process table until only PID 1 is left or the time is over, and
// gives what is left. (Nothing tells PID 1 of the end of processes that are not its
// children.)
func (g *Guest) awaitEnd(most time.Duration) []process {
	deadline := time.Now().Add(most)
	for wait := 5 * time.Millisecond; ; wait = min(wait*2, 100*time.Millisecond) {
		left := g.processes()
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		select {
		case <-time.After(wait):
		case <-g.stop:
			return left
		}
	}
}

// leave shuts down because somebody inside asked for it, and leaves word for the host:
// the marker is written last, whole, and durable.
func (g *Guest) leave(why string) {
	if _, err := g.shutDown(context.Background(), 0); err != nil {
		g.log.Warn("the shutdown asked for from inside was not complete", "err", err)
	}
	if err := writeMarker(g.path(guestproto.ExitMarker), why); err != nil {
		g.log.Warn("the exit marker could not be written", "err", err)
	}
}

func writeMarker(path, why string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := replaceFile(path, []byte(why), 0o600); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// replaceFile writes a file beside path, makes it durable and renames it into place.
func replaceFile(path string, data []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".hutch-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
