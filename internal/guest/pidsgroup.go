package guest

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// pidsGroup is the control group that limits processes and threads of all commands
// together. The agent stays outside, so a sandbox full of processes cannot starve it.
type pidsGroup struct {
	tasks string   // cgroup v1: the file that takes the forking thread in
	dir   *os.File // cgroup v2: the group that the child is cloned into
}

// newPidsGroup makes the group below a mounted hierarchy (/sys/fs/cgroup): version 1
// with the pids controller, which is what gVisor has, or version 2.
func newPidsGroup(hierarchy string, limit int64) (*pidsGroup, error) {
	v1 := filepath.Join(hierarchy, "pids")
	if _, err := os.Stat(filepath.Join(hierarchy, "cgroup.controllers")); err == nil {
		v1 = ""
		if err := os.WriteFile(filepath.Join(hierarchy, "cgroup.subtree_control"), []byte("+pids"), 0); err != nil {
			return nil, fmt.Errorf("enable the pids controller: %w", err)
		}
	} else if _, err := os.Stat(filepath.Join(v1, "tasks")); err != nil {
		if _, err := os.Stat(filepath.Join(hierarchy, "tasks")); err != nil {
			return nil, fmt.Errorf("no control group hierarchy is mounted at %s", hierarchy)
		}
		v1 = hierarchy // all controllers in one hierarchy
	}
	parent := v1
	if v1 == "" {
		parent = hierarchy
	}
	dir := filepath.Join(parent, "hutch-commands")
	if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte(strconv.FormatInt(limit, 10)), 0); err != nil {
		return nil, err
	}
	if v1 != "" {
		return &pidsGroup{tasks: filepath.Join(dir, "tasks")}, nil
	}
	f, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &pidsGroup{dir: f}, nil
}

// fork runs start, which forks with sys, so that the child is born inside the group. In
// version 1 membership belongs to threads and is inherited: a thread that is inside
// forks.
func (g *pidsGroup) fork(t *threads, sys *syscall.SysProcAttr, start func() error) error {
	if g.dir != nil {
		sys.UseCgroupFD, sys.CgroupFD = true, int(g.dir.Fd())
		return start()
	}
	return t.do("pids", func() error { return os.WriteFile(g.tasks, []byte("0"), 0) }, start)
}
