package guest

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// exitStatus is how a child ended. lost means that somebody else collected it.
type exitStatus struct {
	code   int // 0-255, where signal is 0
	signal syscall.Signal
	lost   bool
}

func statusOf(ws syscall.WaitStatus) exitStatus {
	if ws.Signaled() {
		return exitStatus{signal: ws.Signal()}
	}
	return exitStatus{code: ws.ExitStatus()}
}

// reaper collects children. As PID 1 it collects every child, orphans included, so
// nothing else in the process may wait for one (os/exec does): start and wait are
// both here. Otherwise it waits for its own children one by one.
//
// A child may end before start knows its pid. Its status is kept while a start is
// under way, and claimed by it.
type reaper struct {
	all bool

	mu        sync.Mutex
	starting  int
	children  map[int]chan<- exitStatus
	unclaimed map[int]exitStatus

	sigchld chan os.Signal
	stop    chan struct{}
	done    sync.WaitGroup
}

// newReaper makes a reaper; all says that this is PID 1.
func newReaper(all bool) *reaper {
	r := &reaper{
		all:       all,
		children:  map[int]chan<- exitStatus{},
		unclaimed: map[int]exitStatus{},
		sigchld:   make(chan os.Signal, 1),
		stop:      make(chan struct{}),
	}
	if all {
		signal.Notify(r.sigchld, syscall.SIGCHLD)
		r.done.Go(r.loop)
	}
	return r
}

// close ends the reaper's own work; children that still run are not collected by the
// all-collecting one any more, the others are waited for.
func (r *reaper) close() {
	signal.Stop(r.sigchld)
	close(r.stop)
	r.done.Wait()
}

func (r *reaper) loop() {
	for {
		r.collect()
		select {
		case <-r.sigchld:
		case <-r.stop:
			return
		}
	}
}

// collect reaps all children that have ended. One SIGCHLD may stand for many.
func (r *reaper) collect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil || pid <= 0:
			return
		}
		if ch, ok := r.children[pid]; ok {
			delete(r.children, pid)
			ch <- statusOf(ws)
		} else if r.starting > 0 {
			r.unclaimed[pid] = statusOf(ws)
		}
	}
}

// start runs fork, which starts a child and returns its pid, and gives the channel
// that receives the child's end once.
func (r *reaper) start(fork func() (int, error)) (int, <-chan exitStatus, error) {
	r.mu.Lock()
	r.starting++
	r.mu.Unlock()

	pid, err := fork()

	r.mu.Lock()
	defer r.mu.Unlock()
	r.starting--
	ended := make(chan exitStatus, 1)
	if err == nil {
		if status, ok := r.unclaimed[pid]; ok {
			ended <- status
		} else {
			r.children[pid] = ended
			if !r.all {
				r.done.Go(func() { r.waitOne(pid) })
			}
		}
		delete(r.unclaimed, pid)
	}
	if r.starting == 0 {
		clear(r.unclaimed)
	}
	return pid, ended, err
}

// waitOne waits for one child without collecting it, and collects it under the lock,
// so that signal never meets a pid that has been given to another process.
func (r *reaper) waitOne(pid int) {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	status := exitStatus{lost: true}
	var ws syscall.WaitStatus
	if got, err := syscall.Wait4(pid, &ws, 0, nil); err == nil && got == pid {
		status = statusOf(ws)
	}
	if ch, ok := r.children[pid]; ok {
		delete(r.children, pid)
		ch <- status
	}
}

// signal sends to the process group of a child that has not been collected. ESRCH
// when it has.
func (r *reaper) signal(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.children[pid]; !ok {
		return syscall.ESRCH
	}
	return syscall.Kill(-pid, sig)
}
