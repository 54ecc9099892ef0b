package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/api"
)

// line is what the programs in a bare sandbox write when they run.
const line = "up"

// The programs that are PID 1 of a bare sandbox.
var (
	// still writes one line and then does nothing.
	still = []string{"/bin/sh", "-c", "echo " + line + "; exec sleep infinity"}
	// ticker goes on writing lines, so that a restored one is seen to run. It has no
	// children: hutch-runsc holds them back after a restore.
	ticker = []string{"/usr/bin/perl", "-e", `$| = 1; while (1) { print "` + line + `\n"; select(undef, undef, undef, 0.005) }`}
)

// bare is the runtime alone: runsc with a bundle made by hand, on an overlay on the
// image that hutch's sandboxes have.
type bare struct {
	runsc string // the binary
	dir   string

	shared, mounted bool // what close has to undo
	live            map[string]*program
	made            int
}

func (b *bare) root() string { return filepath.Join(b.dir, "root") }

// prepare mounts the root file system. like is a sandbox of hutch's, whose size these
// will have.
func (b *bare) prepare(image string, like api.Sandbox) error {
	b.live = map[string]*program{}
	lower, err := mountOf(image)
	if err != nil {
		return err
	}
	upper, work := filepath.Join(b.dir, "upper"), filepath.Join(b.dir, "work")
	for _, dir := range []string{b.root(), upper, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := share(b.dir); err != nil {
		return err
	}
	b.shared = true
	options := "lowerdir=" + lower + ",upperdir=" + upper + ",workdir=" + work
	if err := unix.Mount("overlay", b.root(), "overlay", unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOATIME, options); err != nil {
		return fmt.Errorf("mount the overlay %s: %w", options, err)
	}
	b.mounted = true
	errs := []error{b.bundle("still", still, like), b.bundle("ticker", ticker, like)}
	for _, f := range fillings {
		errs = append(errs, b.bundle(fmt.Sprintf("filled-%d", f.mib), f.perl(), like))
	}
	return errors.Join(errs...)
}

// share makes a directory a mount whose mounts and unmounts reach the copies that other
// processes of the machine have of it in mount namespaces of their own: a copy that
// stayed would keep the template busy (sharedsubtree.rst).
func share(dir string) error {
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", dir, err)
	}
	// Private first, to leave the group of the file system that it was bound from.
	for _, kind := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", dir, "", kind, ""); err != nil {
			return errors.Join(fmt.Errorf("share %s: %w", dir, err), unix.Unmount(dir, 0))
		}
	}
	return nil
}

// bundle writes an OCI bundle for a program.
func (b *bare) bundle(name string, args []string, like api.Sandbox) error {
	type object = map[string]any
	const period = 100_000 // microseconds
	spec := object{
		"ociVersion": "1.1.0",
		"hostname":   "bench",
		"root":       object{"path": b.root()},
		"process": object{
			"user": object{"uid": 0, "gid": 0}, "cwd": "/", "args": args,
			"env": []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"},
		},
		"mounts": []object{
			{"destination": "/proc", "type": "proc"},
			{"destination": "/sys", "type": "sysfs"},
			{"destination": "/dev", "type": "tmpfs"},
			{"destination": "/dev/pts", "type": "devpts"},
			{"destination": "/run", "type": "tmpfs"},
		},
		"linux": object{
			"namespaces": []object{{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, {"type": "network"}},
			"resources": object{
				"memory": object{"limit": like.MemoryBytes},
				"cpu":    object{"period": period, "quota": like.CPUs * period},
			},
		},
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	dir := filepath.Join(b.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), text, 0o644)
}

// program is a bare sandbox.
type program struct {
	id, state string // runsc's name of it, and its --root
	running   chan struct{}
	launched  chan struct{} // runsc has returned, with err
	err       error
	said      strings.Builder // what came that was not the line; whole when silent is closed
	silent    chan struct{}   // nothing has the pipe open any more
	pids      []int
}

// version is the first line of what the runtime says of itself.
func (b *bare) version(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, b.runsc, "--version").Output()
	first, _, _ := strings.Cut(string(out), "\n")
	return first, err
}

// run boots a sandbox.
func (b *bare) run(ctx context.Context, bundle string) (*program, error) {
	return b.launch(ctx, "run", "--detach", "--bundle="+filepath.Join(b.dir, bundle))
}

// restore brings a ticker back.
func (b *bare) restore(ctx context.Context, image string) (*program, error) {
	return b.restoreAs(ctx, image, "ticker")
}

func (b *bare) restoreAs(ctx context.Context, image, bundle string) (*program, error) {
	return b.launch(ctx, "restore", "--detach", "--background", "--image-path="+image, "--bundle="+filepath.Join(b.dir, bundle))
}

// launch starts runsc and does not wait for it: up and settled do.
func (b *bare) launch(ctx context.Context, verb ...string) (*program, error) {
	b.made++
	p := &program{
		id:      fmt.Sprintf("bench-%06d", b.made), // runsc takes beginnings of names, so none is another's
		running: make(chan struct{}), launched: make(chan struct{}), silent: make(chan struct{}),
	}
	p.state = filepath.Join(b.dir, "state", p.id)
	if err := os.MkdirAll(p.state, 0o700); err != nil {
		return nil, err
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd := b.command(ctx, p, verb...)
	cmd.Stdout, cmd.Stderr = in, in
	err = cmd.Start()
	_ = in.Close()
	if err != nil {
		_ = out.Close()
		return nil, err
	}
	b.live[p.id] = p
	go p.listen(out)
	go func() {
		p.err = cmd.Wait()
		close(p.launched)
	}()
	return p, nil
}

// command makes a call of runsc about one sandbox.
func (b *bare) command(ctx context.Context, p *program, verb ...string) *exec.Cmd {
	args := append([]string{
		"--root=" + p.state, "--log=" + filepath.Join(p.state, "log"),
		"--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=none",
	}, verb...)
	cmd := exec.CommandContext(ctx, b.runsc, append(args, p.id)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = time.Second // what it leaves may hold its output open
	return cmd
}

// listen reads what the sandbox writes, to the end.
func (p *program) listen(out *os.File) {
	defer close(p.silent)
	defer out.Close()
	heard := false
	for s := bufio.NewScanner(out); s.Scan(); {
		switch {
		case s.Text() != line:
			p.said.WriteString(s.Text() + "\n")
		case !heard:
			heard = true
			close(p.running)
		}
	}
}

// up waits for the program's first line.
func (p *program) up(ctx context.Context) error {
	select {
	case <-p.running:
		return nil
	case <-p.silent:
		<-p.launched
		return fmt.Errorf("the bare sandbox ended (runsc: %w): %s", p.err, p.said.String())
	case <-ctx.Done():
		return ctx.Err()
	}
}

// launchedWell waits until runsc has returned.
func (p *program) launchedWell(ctx context.Context) error {
	select {
	case <-p.launched:
	case <-ctx.Done():
		return ctx.Err()
	}
	if p.err != nil {
		words, _ := os.ReadFile(filepath.Join(p.state, "log"))
		return fmt.Errorf("runsc: %w: %s", p.err, words)
	}
	return nil
}

// settled is launchedWell, and finds the processes that the sandbox has now.
func (p *program) settled(ctx context.Context) (err error) {
	if err := p.launchedWell(ctx); err != nil {
		return err
	}
	p.pids, err = family("--root=" + p.state)
	return err
}

// do calls runsc about a sandbox and waits.
func (b *bare) do(ctx context.Context, p *program, verb ...string) error {
	if out, err := b.command(ctx, p, verb...).CombinedOutput(); err != nil {
		return fmt.Errorf("runsc %s: %w: %s", verb[0], err, out)
	}
	return nil
}

func (b *bare) exec(ctx context.Context, p *program) error {
	cmd := b.command(ctx, p, "exec")
	cmd.Args = append(cmd.Args, "true") // after the name
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("runsc exec: %w: %s", err, out)
	}
	return nil
}

// checkpoint writes the memory into a new directory and gives its path.
func (b *bare) checkpoint(ctx context.Context, p *program) (string, error) {
	image, err := os.MkdirTemp(b.dir, "image-")
	if err != nil {
		return "", err
	}
	return image, b.do(ctx, p, "checkpoint", "--leave-running", "--compression=none", "--image-path="+image)
}

// end kills a sandbox and removes what runsc keeps of it.
func (b *bare) end(ctx context.Context, p *program) error {
	kill(p.pids)
	err := b.do(ctx, p, "delete", "--force")
	delete(b.live, p.id)
	return err
}

// kill ends processes and collects them where they are, or become, children of this
// one. Parents come first in pids, so that their children have come to it by then.
func kill(pids []int) {
	for _, pid := range pids {
		_ = unix.Kill(pid, unix.SIGKILL) // one that is gone is as wanted
	}
	for _, pid := range pids {
		for {
			_, err := unix.Wait4(pid, nil, 0, nil)
			if !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
}

// close ends what still runs and unmounts the root file system.
func (b *bare) close(ctx context.Context) error {
	var errs []error
	for _, p := range b.live {
		<-p.launched // its context has ended, so it has, or will at once
		pids, err := family("--root=" + p.state)
		p.pids = pids
		errs = append(errs, err, b.end(ctx, p))
	}
	if b.mounted {
		errs = append(errs, unmount(ctx, b.root()))
	}
	if b.shared {
		errs = append(errs, unmount(ctx, b.dir))
	}
	return errors.Join(errs...)
}

// unmount waits for processes that still hold the mount while they end.
func unmount(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("unmount %s: %w", dir, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
