package guest

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// Signals by which somebody inside asks PID 1 for an end: those of systemd(1)
// (SIGRTMIN+3 halt, +4 poweroff, +5 reboot, where SIGRTMIN is the C library's 34).
const (
	signalHalt     = syscall.Signal(37)
	signalPoweroff = syscall.Signal(38)
	signalReboot   = syscall.Signal(39)
)

// Main is the program. As PID 1 it is the agent and returns only when somebody inside
// has asked for an end; called poweroff, halt, shutdown or reboot it asks PID 1 for
// one. It returns the exit code.
func Main(args []string, version string) int {
	name := "guest"
	if len(args) > 0 {
		name = filepath.Base(args[0])
	}
	switch sig, ok := request(name, args); {
	case ok:
		if err := syscall.Kill(1, sig); err != nil {
			fmt.Fprintf(os.Stderr, "%s: cannot ask for it: %v; try as root\n", name, err)
			return 1
		}
		return 0
	case len(args) > 1 && args[1] == "--version":
		fmt.Println(version)
		return 0
	case os.Getpid() != 1:
		fmt.Fprintf(os.Stderr, "%s: runs as PID 1 of a sandbox only\n", name)
		return 2
	}
	log := slog.New(slog.NewTextHandler(stderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	g := New(Config{Init: true, RefuseLocal: true, Version: version, Log: log})
	return runInit(g, func() (net.Listener, error) {
		// The wildcard address: a restore under another one changes nothing.
		return net.Listen("tcp", ":"+strconv.Itoa(guestproto.Port))
	})
}

// request gives the signal that a program's name stands for. `shutdown -r` is a reboot,
// as is any name with it.
func request(name string, args []string) (syscall.Signal, bool) {
	sig := signalPoweroff
	switch name {
	case "poweroff", "halt", "shutdown":
		for _, a := range args[1:] {
			if a == "-r" || a == "--reboot" {
				sig = signalReboot
			}
		}
		return sig, true
	case "reboot":
		return signalReboot, true
	}
	return 0, false
}

// runInit serves as PID 1 until an end is asked for.
func runInit(g *Guest, listen func() (net.Listener, error)) int {
	// Caught, not ignored: what is ignored stays so in every child.
	quiet := make(chan os.Signal, 1)
	signal.Notify(quiet, harmless()...)
	asked := make(chan os.Signal, 4)
	signal.Notify(asked, signalHalt, signalPoweroff, signalReboot)
	unix.Umask(0o022)
	go serveForEver(g, listen)
	for {
		select {
		case <-quiet:
		case sig := <-asked:
			if sig == signalReboot {
				g.leave(guestproto.ExitReboot)
				return guestproto.ExitCodeReboot
			}
			g.leave(guestproto.ExitPoweroff)
			return guestproto.ExitCodePoweroff
		}
	}
}

// harmless are the signals that would end a Go program that does not ask for them. Root
// inside may send them, and PID 1 outlives that, as any init does. One that a fault of
// its own causes ends it all the same (os/signal: a synchronous signal).
func harmless() []os.Signal {
	var all []os.Signal
	for n := syscall.Signal(1); n < 32; n++ {
		switch n {
		case syscall.SIGKILL, syscall.SIGSTOP: // never delivered to an init from inside
		case syscall.SIGCHLD, syscall.SIGURG: // the reaper's and the Go scheduler's
		default:
			all = append(all, n)
		}
	}
	return all
}

// serveForEver listens, and begins again whenever the listener fails. It ends with the
// process.
func serveForEver(g *Guest, listen func() (net.Listener, error)) {
	for {
		l, err := listen()
		if err == nil {
			err = g.Serve(l)
		}
		g.log.Warn("the agent does not listen; it tries again", "err", err)
		time.Sleep(100 * time.Millisecond)
	}
}

// stderr is the process's standard error as a writer that never waits and never
// fails: what does not fit into the pipe is lost.
func stderr() io.Writer {
	if err := unix.SetNonblock(2, true); err != nil {
		return io.Discard
	}
	return dropWriter(2)
}

type dropWriter int

func (w dropWriter) Write(p []byte) (int, error) {
	_, _ = syscall.Write(int(w), p)
	return len(p), nil
}

// defaultBudget is an eighth of the memory, within 16 and 256 MiB.
func defaultBudget() int64 {
	const least, most = 16 << 20, 256 << 20
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return least
	}
	return min(max(int64(info.Totalram)*int64(info.Unit)/8, least), most)
}
