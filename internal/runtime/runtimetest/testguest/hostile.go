package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// hostile are the things that a program may do to the rest of its sandbox. Each is
// asked for on the command line, by child.
var hostile = map[string]func(args []string) error{
	"signal": func(args []string) error { return signalInit(args[0]) },
	"hog":    func(args []string) error { return hog(args[0]) },
	"bomb":   func(args []string) error { return bomb(args[0], args[1]) },
	"echo":   func([]string) error { return echo() },
	"fault":  func([]string) error { return fault() },
	"sleep":  func([]string) error { time.Sleep(time.Hour); return nil },
}

// child makes a command that runs this program as one of hostile.
func child(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stderr = os.Stderr
	return cmd
}

// ended says in words how a command came to its end.
func ended(err error) string {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return fmt.Sprint(err)
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return fmt.Sprintf("signal %d", int(status.Signal()))
	}
	return exit.String()
}

// signalInit sends a signal to PID 1 in every way that a program has.
func signalInit(number string) error {
	n, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	sig := syscall.Signal(n)
	if err := syscall.Kill(1, sig); err != nil {
		return err
	}
	for _, call := range []uintptr{syscall.SYS_TKILL, syscall.SYS_TGKILL} {
		args := []uintptr{1, uintptr(sig), 0}
		if call == syscall.SYS_TGKILL {
			args = []uintptr{1, 1, uintptr(sig)}
		}
		if _, _, errno := syscall.Syscall(call, args[0], args[1], args[2]); errno != 0 {
			return errno
		}
	}
	// siginfo_t with si_code SI_QUEUE and the PID 0, as if it came from outside.
	info := [32]int32{0: int32(sig), 2: -1}
	if _, _, errno := syscall.Syscall(syscall.SYS_RT_SIGQUEUEINFO, 1, uintptr(sig), uintptr(unsafe.Pointer(&info))); errno != 0 {
		return errno
	}
	return signalByPipe(sig)
}

// signalByPipe has the kernel send the signal when a pipe can be read.
func signalByPipe(sig syscall.Signal) error {
	var ends [2]int
	if err := syscall.Pipe(ends[:]); err != nil {
		return err
	}
	const setSig, setOwner, async = 10, 8, 0x2000 // F_SETSIG, F_SETOWN, O_ASYNC
	for _, set := range [][2]uintptr{{setOwner, 1}, {setSig, uintptr(sig)}, {syscall.F_SETFL, async}} {
		if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(ends[0]), set[0], set[1]); errno != 0 {
			return errno
		}
	}
	_, err := syscall.Write(ends[1], []byte{1})
	return err
}

// nested starts a command as PID 1 of a namespace of its own, sends it a signal if
// that is not 0, and says how it ended.
func nested(verb, signal string) (string, error) {
	n, err := strconv.Atoi(signal)
	if err != nil {
		return "", err
	}
	cmd := child(verb)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	if n != 0 {
		if err := cmd.Process.Signal(syscall.Signal(n)); err != nil {
			return "", err
		}
	}
	return ended(cmd.Wait()), nil
}

// fault reads an address that is not there, with the signal's default action.
func fault() error {
	var action [4]uint64 // struct sigaction: SIG_DFL, nothing else
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(syscall.SIGSEGV), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0); errno != 0 {
		return errno
	}
	at := uintptr(8)
	return fmt.Errorf("read %d", **(**byte)(unsafe.Pointer(&at)))
}

// hog takes so many MiB and keeps them.
func hog(mib string) error {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return err
	}
	for range n {
		block, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		if err != nil {
			return err
		}
		for i := 0; i < len(block); i += 4096 {
			block[i] = 1
		}
	}
	if _, err := os.Stdout.Write([]byte{'.'}); err != nil {
		return err
	}
	time.Sleep(time.Hour)
	return nil
}

// keep starts a hog and returns when it has what it wants.
func keep(mib string) error {
	cmd := child("hog", mib)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, err = out.Read(make([]byte, 1))
	return err
}

// processes counts the processes of the sandbox.
func processes() (string, error) {
	names, err := os.ReadDir("/proc")
	if err != nil {
		return "", err
	}
	n := 0
	for _, name := range names {
		if _, err := strconv.Atoi(name.Name()); err == nil {
			n++
		}
	}
	return strconv.Itoa(n), nil
}

// bomb starts itself twice, so many generations deep, and takes so many MiB each time.
func bomb(depth, mib string) error {
	n, err := strconv.Atoi(depth)
	if err != nil {
		return err
	}
	if n > 0 {
		for range 2 {
			if err := child("bomb", strconv.Itoa(n-1), mib).Start(); err != nil {
				return err
			}
		}
	}
	return hog(mib)
}

// echo sends back what it is sent, byte by byte.
func echo() error {
	b := make([]byte, 1)
	for {
		if _, err := syscall.Read(0, b); err != nil {
			return err
		}
		if _, err := syscall.Write(1, b); err != nil {
			return err
		}
	}
}

// pingPong sends a byte to another process and back, so many times, and gives the
// microseconds it took.
func pingPong(count string) (string, error) {
	n, err := strconv.Atoi(count)
	if err != nil {
		return "", err
	}
	cmd := child("echo")
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	to, from := int(in.(*os.File).Fd()), int(out.(*os.File).Fd()) // blocking from here on
	b := make([]byte, 1)
	begin := time.Now()
	for range n {
		if _, err := syscall.Write(to, b); err != nil {
			return "", err
		}
		if _, err := syscall.Read(from, b); err != nil {
			return "", err
		}
	}
	return strconv.FormatInt(time.Since(begin).Microseconds(), 10), nil
}

// fill writes so many MiB to a new file, and says how many it wrote and what ended it.
func fill(path, mib string) (string, error) {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return "", err
	}
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	for i := range n {
		if _, err := f.Write(block); err != nil {
			return fmt.Sprintf("%d %v", i, errors.Unwrap(err)), nil
		}
	}
	return fmt.Sprintf("%d ok", n), nil
}

// capacity gives the size of a file system in bytes.
func capacity(path string) (string, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(path, &st); err != nil {
		return "", err
	}
	return strconv.FormatUint(st.Blocks*uint64(st.Bsize), 10), nil
}
