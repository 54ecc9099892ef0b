package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// Leftover is what the machine has of one sandbox of this driver.
type Leftover struct {
	ID        string
	Groups    []string // directories of its control group
	Processes []int    // in the group, or at work for it
	Since     time.Time
}

// Leftovers lists all that runs below the driver's control group, and the processes
// of a runsc that works in a directory below runDir ("" for none). It changes nothing.
func (d *Driver) Leftovers(runDir string) ([]Leftover, error) {
	l, err := readLayout()
	if err != nil {
		return nil, err
	}
	found := map[string]*Leftover{}
	of := func(id string) *Leftover {
		if found[id] == nil {
			found[id] = &Leftover{ID: id}
		}
		return found[id]
	}
	for _, dir := range l.group(d.cfg.CgroupParent, "").dirs() {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fault.Wrap(err, fault.Internal, "the control groups below %s cannot be read", dir)
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil || !e.IsDir() {
				continue
			}
			one := of(e.Name())
			one.Groups = append(one.Groups, filepath.Join(dir, e.Name()))
			one.Since = info.ModTime()
		}
	}
	for id, one := range found {
		one.Processes, _ = l.group(d.cfg.CgroupParent, id).pids() // a group that is gone has none
	}
	for pid, id := range workers(runDir) {
		if one := of(id); !slices.Contains(one.Processes, pid) {
			one.Processes = append(one.Processes, pid)
		}
	}
	var list []Leftover
	for _, one := range found {
		slices.Sort(one.Processes)
		list = append(list, *one)
	}
	slices.SortFunc(list, func(a, b Leftover) int { return strings.Compare(a.ID, b.ID) })
	return list, nil
}

// workers finds the processes of hutch-runsc whose command line names a directory
// RUNDIR/ID/…: pid to id.
func workers(runDir string) map[int]string {
	found := map[int]string{}
	if runDir == "" {
		return found
	}
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline") // fails for a bad pattern only
	for _, path := range paths {
		if id := workerOf(filepath.Dir(path), runDir); id != "" {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			found[pid] = id
		}
	}
	return found
}

// workerOf names the sandbox that a process works for, "" for none.
func workerOf(proc, runDir string) string {
	exe, err := os.Readlink(filepath.Join(proc, "exe"))
	if err != nil || !strings.HasPrefix(filepath.Base(exe), "hutch-runsc") {
		return ""
	}
	cmdline, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
	_, rest, ok := strings.Cut(string(cmdline), runDir+"/")
	if !ok {
		return ""
	}
	id, _, _ := strings.Cut(rest, "\x00")
	id, _, _ = strings.Cut(id, "/")
	return id
}

// End kills all that the machine has of a sandbox and removes its control group.
// Nothing is success. What it was and whether anybody needs it, the caller knows.
func (d *Driver) End(ctx context.Context, id, runDir string) error {
	if id == "" || id != filepath.Base(id) || id == ".." || id == "." {
		return fault.New(fault.InvalidArgument, "%q is no sandbox's id", id)
	}
	l, err := readLayout()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, quickTimeout)
	defer cancel()
	g := l.group(d.cfg.CgroupParent, id)
	if err := g.kill(ctx); err != nil {
		return interrupted(err, "end of what was left of "+id)
	}
	var doomed []int // pidfds
	for pid, whose := range workers(runDir) {
		if whose != id {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		defer unix.Close(fd)
		// Read again behind the descriptor: then the answer is about this process.
		if workerOf(fmt.Sprintf("/proc/%d", pid), runDir) == id {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			doomed = append(doomed, fd)
		}
	}
	if err := waitGone(ctx, doomed); err != nil {
		return interrupted(err, "end of what was left of "+id)
	}
	if err := g.remove(ctx); err != nil {
		return fault.Wrap(err, fault.Internal, "the control group of %s cannot be removed", id)
	}
	return nil
}
