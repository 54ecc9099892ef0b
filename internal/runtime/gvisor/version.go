package gvisor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// A memory image restores under the runsc that wrote it only, so an installation keeps
// each binary that it has ever used. A restore takes the one that it needs.

// versions remembers what the binaries said of themselves. What lies under a path does
// not change while this process runs: kept binaries are named by their digest.
type versions struct {
	mu     sync.Mutex
	byPath map[string]string
}

// versionOf asks a binary for its version.
func (d *Driver) versionOf(ctx context.Context, path string) (string, error) {
	v := &d.versions
	v.mu.Lock()
	defer v.mu.Unlock()
	if version, ok := v.byPath[path]; ok {
		return version, nil
	}
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second // for a child that keeps the pipe open
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return "", interrupted(ctx.Err(), "look at the gVisor runtime")
	}
	line, _, _ := strings.Cut(string(out), "\n")
	version, ok := strings.CutPrefix(line, "runsc version ")
	if err != nil || !ok {
		return "", fault.Wrap(err, fault.Unsupported, "the binary %s cannot be run; install hutch-runsc beside hutch", path).Because("runsc_missing")
	}
	if v.byPath == nil {
		v.byPath = map[string]string{}
	}
	v.byPath[path] = version
	return version, nil
}

// choose gives the version asked for, or this driver's own for "", and its binary.
func (d *Driver) choose(ctx context.Context, version string) (string, string, error) {
	own, err := d.versionOf(ctx, d.cfg.Runsc)
	if err != nil || version == "" || version == own {
		return own, d.cfg.Runsc, err
	}
	for _, path := range d.kept() {
		if v, err := d.versionOf(ctx, path); err == nil && v == version {
			return v, path, nil
		}
	}
	if err := ctx.Err(); err != nil {
		return "", "", interrupted(err, "look at the gVisor runtime")
	}
	return "", "", otherVersion(errors.New(version + " is not among the kept binaries"))
}

func otherVersion(cause error) *fault.Fault {
	return fault.Wrap(cause, fault.FailedPrecondition, "the memory was saved by another version of the gVisor runtime and cannot be woken by this one; install that version, or resume the disk").Because("runtime_version")
}

// kept lists the binaries that are kept. A damaged folder is as good as none.
func (d *Driver) kept() []string {
	if d.cfg.Kept == "" {
		return nil
	}
	folders, _ := os.ReadDir(d.cfg.Kept)
	var paths []string
	for _, folder := range folders {
		path := filepath.Join(d.cfg.Kept, folder.Name(), filepath.Base(d.cfg.Runsc))
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&fs.ModePerm&0o111 != 0 {
			paths = append(paths, path)
		}
	}
	return paths
}

// keptVersions lists the versions of the kept binaries but for one. What cannot be run
// is left out.
func (d *Driver) keptVersions(ctx context.Context, but string) []string {
	var found []string
	for _, path := range d.kept() {
		if v, err := d.versionOf(ctx, path); err == nil && v != but && !slices.Contains(found, v) {
			found = append(found, v)
		}
	}
	return found
}
