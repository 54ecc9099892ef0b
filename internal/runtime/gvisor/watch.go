package gvisor

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/runtime"
)

// watch makes the handle of a sandbox that runs, with a goroutine that sees its end.
func (d *Driver) watch(spec runtime.Spec, g group, r record) (*handle, error) {
	sandbox, err := r.Sandbox.open()
	if err != nil {
		return nil, interrupted(errGone, "look for the sandbox")
	}
	gofer, err := r.Gofer.open()
	if err != nil {
		unix.Close(sandbox)
		return nil, interrupted(errGone, "look for the sandbox")
	}
	h := &handle{
		d: d, spec: spec, g: g, r: r,
		sandbox: os.NewFile(uintptr(sandbox), "sandbox pidfd"),
		gofer:   os.NewFile(uintptr(gofer), "gofer pidfd"),
		ended:   make(chan struct{}),
	}
	// PID 1's status comes from the sentry, also where this process is not the sentry's
	// parent. It is asked before anybody has the handle: what ends at once is known then.
	end, err := ask(d.watching, spec.Dir, "Wait", containerID, nil)
	if err != nil {
		end = nil // it has just ended, or the driver is being closed: waitEnd finds out
	}
	d.watchers.Go(func() { h.waitEnd(end) })
	return h, nil
}

// Wait gives the sandbox's end to each caller.
func (h *handle) Wait() <-chan runtime.Exit {
	c := make(chan runtime.Exit, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.exit != nil {
		c <- *h.exit
		close(c)
	} else {
		h.waiters = append(h.waiters, c)
	}
	return c
}

// waitEnd sees the end of the sandbox, learns how it came, and tells those who wait.
// PID 1's status comes over the connection on which the sentry was asked, nil where it
// could not be.
// It returns without a word when the driver is closed.
func (h *handle) waitEnd(asked *net.UnixConn) {
	ctx, cancel := context.WithCancel(h.d.watching)
	defer cancel()
	// The answer's connection must be closed at once: the sentry waits for its clients
	// before it ends.
	answer := make(chan uint32, 1)
	go func() {
		defer close(answer)
		var status uint32
		if asked != nil && hear(ctx, asked, "Wait", &status) == nil {
			answer <- status
		}
	}()
	counted := make(chan struct{})
	go func() {
		defer close(counted)
		h.countKills(ctx)
	}()
	// A sandbox without its gofer has no files any more. But the gofer's end may also
	// be a part of the sandbox's own, which is not to be cut short.
	gofer, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gofer)
		if waitPidfd(h.gofer) != nil {
			return
		}
		timer := time.NewTimer(exitAnswering)
		defer timer.Stop()
		select {
		case <-gone:
		case <-timer.C:
			signal(h.sandbox, unix.SIGKILL)
		}
	}()
	stop := context.AfterFunc(h.d.watching, func() {
		_ = h.sandbox.SetReadDeadline(time.Unix(1, 0))
		_ = h.gofer.SetReadDeadline(time.Unix(1, 0))
	})
	defer stop()

	err := waitPidfd(h.sandbox)
	close(gone)
	if err == nil {
		h.finish(h.exitOf(answer))
	}
	cancel()
	_ = h.gofer.SetReadDeadline(time.Unix(1, 0))
	<-gofer
	<-counted
	for range answer { // until its goroutine has ended
	}
	_ = h.sandbox.Close()
	_ = h.gofer.Close()
}

// countKills keeps the count of processes that the sentry killed for want of memory.
// The sentry answers when there are more than it was told, and when PID 1 has ended.
func (h *handle) countKills(ctx context.Context) {
	for {
		seen, now := h.kills.Load(), uint64(0)
		if err := call(ctx, h.spec.Dir, "HutchMemoryKills", seen, nil, &now); err != nil || now == seen {
			return
		}
		h.kills.Store(now)
		h.d.log.Debug("a process was killed for want of memory", "sandbox", h.spec.ID, "count", now)
	}
}

// exitOf collects what is known of the end.
func (h *handle) exitOf(answer <-chan uint32) runtime.Exit {
	var word *uint32
	timer := time.NewTimer(exitAnswering)
	defer timer.Stop()
	select {
	case status, ok := <-answer:
		if ok {
			word = &status
		}
	case <-timer.C:
	}
	info, err := os.Stat(filepath.Join(h.spec.Dir, panicName))
	panicked := err == nil && info.Size() > 0
	e := howItEnded(word, reapFile(h.sandbox), h.killed.Load(), panicked)
	e.At, e.OOM = time.Now(), h.g.oomKills() > 0
	return e
}

// howItEnded puts together the sentry's word about PID 1 (a wait status, nil when it
// could not answer), what the sentry's parent learns, whether it was killed from here,
// and whether the sentry wrote of a panic.
func howItEnded(word *uint32, d death, killed, panicked bool) runtime.Exit {
	switch {
	case word != nil && unix.WaitStatus(*word).Signaled():
		return runtime.Exit{Known: true, Signal: int(unix.WaitStatus(*word).Signal())}
	case word != nil:
		return runtime.Exit{Known: true, Code: unix.WaitStatus(*word).ExitStatus()}
	case killed:
		return runtime.Exit{Known: true, Signal: int(unix.SIGKILL)}
	case panicked:
		return runtime.Exit{Known: true, Signal: int(unix.SIGABRT)}
	case !d.known:
		return runtime.Exit{}
	case d.signal != 0:
		return runtime.Exit{Known: true, Signal: d.signal}
	case d.code > 128: // how runsc/cli tells of a signal
		return runtime.Exit{Known: true, Signal: d.code - 128}
	default:
		return runtime.Exit{Known: true, Code: d.code}
	}
}

func (h *handle) finish(e runtime.Exit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.exit = &e
	for _, c := range h.waiters {
		c <- e
		close(c)
	}
	h.waiters = nil
	close(h.ended)
}

// waitPidfd waits in the poller, without a thread of its own, until the process has
// ended. A read deadline on the file interrupts it.
func waitPidfd(f *os.File) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool { return ended(int(fd)) })
}

// signal sends a signal to the process of a pidfd; one that has ended is left alone.
func signal(f *os.File, sig unix.Signal) {
	if conn, err := f.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	}
}

// reapFile is reap for a pidfd in a file.
func reapFile(f *os.File) (d death) {
	if conn, err := f.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) { d = reap(int(fd)) })
	}
	return d
}
