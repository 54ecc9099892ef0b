package gvisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process names a process for good: a pid comes back, a pid with its start time does
// not.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after the machine's boot, field 22 of proc_pid_stat(5)
}

// processOf names the process that has this pid now.
func processOf(pid int) (process, error) {
	start, err := startTime(pid)
	return process{PID: pid, Start: start}, err
}

func startTime(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The name may hold spaces and parentheses: the fields begin after the last one.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat is cut", pid)
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

// open gives a pidfd of the process, or ESRCH when it is gone.
func (p process) open() (int, error) {
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return -1, err
	}
	if start, err := startTime(p.PID); err != nil || start != p.Start || ended(fd) {
		unix.Close(fd)
		return -1, unix.ESRCH
	}
	return fd, nil
}

// ended says whether the process of a pidfd has ended.
func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// waitGone waits until all processes of the pidfds have ended.
func waitGone(ctx context.Context, pidfds []int) error {
	for _, fd := range pidfds {
		for !ended(fd) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			const tick = 20 // milliseconds, to see that ctx has ended
			if _, err := unix.Poll(fds, tick); err != nil && !errors.Is(err, unix.EINTR) {
				return err
			}
		}
	}
	return nil
}

// death is what a parent learns of a child's end.
type death struct {
	known  bool
	code   int
	signal int
}

// reap collects an ended child; of another's child it learns nothing. It never takes
// the status of any process but this one.
func reap(pidfd int) death {
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_PIDFD, pidfd, &info, unix.WEXITED|unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || info.Signo == 0 {
			return death{}
		}
		break
	}
	// si_status, which the package has no name for: sigaction(2), 64-bit layout.
	status := int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), 24)))
	const exited = 1 // CLD_EXITED
	if info.Code == exited {
		return death{known: true, code: status}
	}
	return death{known: true, signal: status & 0x7f}
}

// BecomeSubreaper makes orphans of this process's children its own children, so that
// it reaps sandboxes that it started and learns how they ended. Without it the
// machine's init does the reaping.
func BecomeSubreaper() error {
	return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// bootID names the present boot of the machine; pids of another mean nothing.
func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(text))
}
