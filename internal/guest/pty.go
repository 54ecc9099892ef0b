package guest

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// openPTY makes a terminal of a size whose slave belongs to a user.
func openPTY(acc account, size *guestproto.WindowSize) (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("open /dev/ptmx", err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx") // non-blocking: reads and writes can be interrupted
	defer func() {
		if err != nil {
			master.Close()
		}
	}()
	if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, os.NewSyscallError("unlock the terminal", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, nil, os.NewSyscallError("number the terminal", err)
	}
	if err = resize(master, size); err != nil {
		return nil, nil, err
	}
	// Opened without the os package, which would make it non-blocking for the child.
	name := fmt.Sprintf("/dev/pts/%d", n)
	sfd, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("open "+name, err)
	}
	slave = os.NewFile(uintptr(sfd), name)
	// The user owns the terminal (programs reopen /dev/tty and /dev/pts/N). Where the
	// agent is not root the terminal is its own user's already.
	if os.Geteuid() == 0 {
		if err = slave.Chown(int(acc.uid), int(acc.gid)); err != nil {
			slave.Close()
			return nil, nil, err
		}
	}
	return master, slave, nil
}

// resize sets a terminal's size. Zero rows or columns become 24 and 80. Linux tells the
// group in front by SIGWINCH; gVisor does not (pkg/sentry/fsimpl/devpts).
func resize(master *os.File, size *guestproto.WindowSize) error {
	ws := &unix.Winsize{Row: 24, Col: 80}
	if size.GetRows() > 0 {
		ws.Row = uint16(min(size.Rows, 1<<16-1))
	}
	if size.GetCols() > 0 {
		ws.Col = uint16(min(size.Cols, 1<<16-1))
	}
	return control(master, func(fd int) error {
		return os.NewSyscallError("resize the terminal", unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, ws))
	})
}

// foreground gives the process group in front in a terminal. gVisor tells it only to
// processes of the terminal (ENOTTY): ok is false there.
func foreground(master *os.File) (pgrp int, ok bool) {
	err := control(master, func(fd int) (err error) {
		pgrp, err = unix.IoctlGetInt(fd, unix.TIOCGPGRP)
		return err
	})
	return pgrp, err == nil && pgrp > 0
}

// unread is how many bytes can be read at once.
func unread(f *os.File) (n int, err error) {
	err = control(f, func(fd int) error {
		n, err = unix.IoctlGetInt(fd, unix.TIOCINQ)
		return err
	})
	return n, err
}

// control runs fn on a file's descriptor without making the file blocking, as Fd would.
func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = fn(int(fd)) }); err != nil {
		return err
	}
	return ferr
}
