package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// find gives the path of an outside program. Services often run without the sbin
// directories on PATH, so these are looked at too.
func (p *Pool) find(name string) (string, error) {
	if path := p.cfg.Tools[name]; path != "" {
		return path, nil
	}
	if path, err := exec.LookPath(name); err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", fault.New(fault.Unsupported, "the program %s is not on this machine; install the package that has it", name).Because(name)
}

// toolLimit bounds one run of an outside program, whose caller may have no deadline: the
// longest packs a template.
const toolLimit = time.Hour

// tool runs an outside program to its end.
func (p *Pool) tool(ctx context.Context, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, toolLimit)
	defer cancel()
	cmd, err := p.command(ctx, name, args...)
	if err != nil {
		return err
	}
	return finish(ctx, cmd, nil)
}

// command prepares an outside program in a process group of its own, all of which
// is killed when the context ends. It gets a small fixed environment.
func (p *Pool) command(ctx context.Context, name string, args ...string) (*exec.Cmd, error) {
	path, err := p.find(name)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	return cmd, nil
}

// finish runs a command; what it wrote last to stderr becomes part of the error. line,
// where there is one, hears every line of stderr.
func finish(ctx context.Context, cmd *exec.Cmd, line func(string)) error {
	// The kernel sends Pdeathsig when the thread that started the process ends, so that
	// thread is held until the process has.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	last := &tail{line: line}
	cmd.Stderr = last
	err := cmd.Run()
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return fault.Wrap(err, fault.Unsupported, "the program %s does not run; look at how it is installed", cmd.Path)
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(last.data))
}

// maxTail is how many bytes of stderr are kept.
const maxTail = 2048

// tail keeps the last bytes that were written to it, and passes whole lines on.
type tail struct {
	data  []byte
	begun []byte // the line that is not ended yet
	line  func(string)
}

func (t *tail) Write(b []byte) (int, error) {
	t.data = append(t.data, b...)
	if over := len(t.data) - maxTail; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	if t.line == nil {
		return len(b), nil
	}
	t.begun = append(t.begun, b...)
	for {
		line, rest, ok := bytes.Cut(t.begun, []byte("\n"))
		if !ok {
			break
		}
		t.line(string(line))
		t.begun = rest
	}
	if len(t.begun) > maxTail {
		t.begun = nil
	}
	return len(b), nil
}
