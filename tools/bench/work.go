package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The programs of ordinary work. They run in a sandbox and on the machine itself, and
// say how many milliseconds the work took, without their own start.
const (
	// fsyncs prints the mean of writing 4 KiB and waiting until it is durable.
	fsyncs = `
import os, time
fd = os.open("synced", os.O_CREAT | os.O_WRONLY)
begin = time.time()
for i in range(100):
    os.pwrite(fd, b"x" * 4096, i * 4096)
    os.fsync(fd)
print((time.time() - begin) * 10)
`
	gitAdd = `
import os, subprocess, time
os.makedirs("repo"); os.chdir("repo")
for i in range(600):
    os.makedirs("dir%d" % (i % 20), exist_ok=True)
    with open("dir%d/file%d.py" % (i % 20, i), "w") as f: f.write("line %d\n" % i * 100)
subprocess.run(["git", "init", "-q", "."], check=True)
begin = time.time()
subprocess.run(["git", "add", "-A"], check=True)
print((time.time() - begin) * 1000)
`
)

// work does the same in a sandbox and on the machine itself.
func (b *bench) work(ctx context.Context, r *results) error {
	c := b.server.api
	s, err := c.create(ctx)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(b.server.dir, "work-")
	if err != nil {
		return err
	}
	for _, w := range []struct {
		row    rowID
		script string
	}{{rowFsync, fsyncs}, {rowGitAdd, gitAdd}} {
		out, err := c.output(ctx, s.ID, nil, "python3", "-c", w.script)
		if err == nil {
			err = r.said(hutchSide, w.row, out)
		}
		if err != nil {
			return err
		}
		native := exec.CommandContext(ctx, "python3", "-c", w.script)
		native.Dir = dir
		text, err := native.Output()
		if err == nil {
			err = r.said(bareSide, w.row, string(bytes.TrimSpace(text)))
		}
		if err != nil {
			return fmt.Errorf("on the machine itself: %w", err)
		}
	}
	return then(os.RemoveAll(dir), func() error { return c.remove(ctx, s.ID) })
}

// said adds what a program measured itself.
func (r *results) said(on side, row rowID, text string) error {
	ms, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil {
		return fmt.Errorf("%s: the program said %q", rows[row].what, text)
	}
	r.add(on, row, ms)
	return nil
}

// podman starts a container of the same root, where podman is installed and works.
func (b *bench) podman(ctx context.Context, r *results) error {
	path, err := exec.LookPath("podman")
	if err != nil || b.podmanFails {
		return nil
	}
	state := filepath.Join(b.bare.dir, "podman")
	args := []string{"--root", state, "--runroot", state + "-run"}
	if _, err := exec.LookPath("runc"); err == nil { // crun refuses a machine with control groups of both versions
		args = append(args, "--runtime=runc")
	}
	// Its own limits may be more than a machine allows.
	args = append(args, "run", "--rm", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--rootfs", b.bare.root(), "true")
	run := func() error {
		out, err := exec.CommandContext(ctx, path, args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("podman run: %w: %s", err, bytes.TrimSpace(out))
		}
		return nil
	}
	// Where it fails, its storage stays mounted upon itself.
	defer func() { _ = unix.Unmount(filepath.Join(state, "overlay"), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) }()
	if err := run(); err != nil {
		say("its row stays empty: %v", err)
		b.podmanFails = true
		return ctx.Err()
	}
	return r.time(bareSide, run, rowPodman)
}
