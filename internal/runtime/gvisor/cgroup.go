package gvisor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// Every process of a sandbox, from runsc's own first instruction to the last stub,
// is in control groups that carry the sandbox's id. They limit it, they count what it
// uses, and they are how it is found and killed after a crash at any instant: a
// process cannot leave them by itself.

// layout says where the machine has its control groups. On cgroup v2 all three
// controllers are at one place.
type layout struct {
	v2                   bool
	memory, cpu, cpuacct string // mount points; "" where the machine has none
}

// readLayout finds the layout of this machine.
func readLayout() (layout, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return layout{}, err
	}
	l := parseLayout(string(text))
	if l.v2 {
		return l, nil
	}
	if l.memory == "" {
		return layout{}, fault.New(fault.Unsupported, "this machine has no memory control group, so a sandbox cannot be limited; boot it with cgroup v2, or mount the memory controller").Because("cgroup")
	}
	return l, nil
}

// parseLayout reads the text of /proc/PID/mountinfo (proc_pid_mountinfo(5)). Where
// both versions are mounted, v1 counts if it has the memory controller: then v2 has
// no controllers.
func parseLayout(mountinfo string) layout {
	var l layout
	unified := ""
	for line := range strings.Lines(mountinfo) {
		head, tail, ok := strings.Cut(strings.TrimSpace(line), " - ")
		left, right := strings.Fields(head), strings.Fields(tail)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		switch point := left[4]; right[0] {
		case "cgroup2":
			if unified == "" {
				unified = point
			}
		case "cgroup":
			for option := range strings.SplitSeq(right[2], ",") {
				switch option {
				case "memory":
					l.memory = point
				case "cpu":
					l.cpu = point
				case "cpuacct":
					l.cpuacct = point
				}
			}
		}
	}
	if l.memory == "" && unified != "" {
		return layout{v2: true, memory: unified, cpu: unified, cpuacct: unified}
	}
	return l
}

// group is the control group of one sandbox: one directory on cgroup v2, one in each
// hierarchy on v1.
type group struct {
	v2                   bool
	name                 string // parent and id, with a slash before
	memory, cpu, cpuacct string // directories; "" where there is no such controller
}

// group names the group of a sandbox; it need not exist.
func (l layout) group(parent, id string) group {
	g := group{v2: l.v2, name: filepath.Join("/", parent, id)}
	at := func(root string) string {
		if root == "" {
			return ""
		}
		return filepath.Join(root, g.name)
	}
	g.memory, g.cpu, g.cpuacct = at(l.memory), at(l.cpu), at(l.cpuacct)
	return g
}

// dirs are the group's directories, each once.
func (g group) dirs() []string {
	var dirs []string
	for _, dir := range []string{g.memory, g.cpu, g.cpuacct} {
		if dir != "" && (len(dirs) == 0 || dirs[len(dirs)-1] != dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// create makes the group with all its limits but that of the CPU time. A group that
// exists already must be empty.
func (g group) create(memory int64, cpus int) error {
	if pids, err := g.pids(); err == nil && len(pids) > 0 {
		return fault.New(fault.Conflict, "processes of this sandbox still run on this machine; adopt or kill them first").Because("still_running")
	}
	for _, dir := range g.dirs() {
		if g.v2 {
			if err := enableControllers(filepath.Dir(dir)); err != nil {
				return err
			}
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	limit := strconv.FormatInt(memory, 10)
	if g.v2 {
		return errors.Join(
			write(g.memory, "memory.max", limit),
			writeIfThere(g.memory, "memory.swap.max", "0"),
			writeIfThere(g.memory, "memory.oom.group", "1"),
			writeIfThere(g.cpu, "cpu.weight", strconv.Itoa(min(100*cpus, 10_000))),
			writeIfThere(filepath.Dir(g.cpu), "cpu.weight", strconv.Itoa(100*parentWeight)),
		)
	}
	err := errors.Join(
		write(g.memory, "memory.limit_in_bytes", limit),
		writeIfThere(g.memory, "memory.memsw.limit_in_bytes", limit),
	)
	if g.cpu == "" {
		return err
	}
	return errors.Join(err,
		writeIfThere(g.cpu, "cpu.shares", strconv.Itoa(min(1024*cpus, 262_144))),
		writeIfThere(filepath.Dir(g.cpu), "cpu.shares", strconv.Itoa(1024*parentWeight)),
	)
}

// limitCPU bounds the CPU time of the group. It is set once PID 1 runs: what comes
// before is the isolation's own start, which takes about 0.3 s of CPU time on several
// threads and would be throttled for as long again.
func (g group) limitCPU(cpus int) error {
	quota, period := strconv.Itoa(cpus*cpuPeriod), strconv.Itoa(cpuPeriod)
	switch {
	case g.v2:
		return writeIfThere(g.cpu, "cpu.max", quota+" "+period)
	case g.cpu == "":
		return nil
	}
	return errors.Join(
		writeIfThere(g.cpu, "cpu.cfs_period_us", period),
		writeIfThere(g.cpu, "cpu.cfs_quota_us", quota),
	)
}

// parentWeight is how many times the default weight all sandboxes together have for
// the CPUs. With the default they would together get as much as one service on v2, and
// on v1 as much as one process, however many they are.
const parentWeight = 10

// RemoveGroup removes the control group that all sandboxes of this driver were below,
// once none is left: for the end of an installation.
func (d *Driver) RemoveGroup() error {
	l, err := readLayout()
	if err != nil {
		return err
	}
	for _, dir := range l.group(d.cfg.CgroupParent, "").dirs() {
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fault.Wrap(err, fault.FailedPrecondition, "the control group %s cannot be removed; something still runs in it", dir)
		}
	}
	return nil
}

// enableControllers lets the children of dir, and dir itself below its parent, have
// limits (cgroup v2, "Enabling and Disabling").
func enableControllers(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, at := range []string{filepath.Dir(dir), dir} {
		for _, controller := range []string{"+memory", "+cpu"} {
			err := writeIfThere(at, "cgroup.subtree_control", controller)
			if err != nil && controller == "+memory" {
				return fault.Wrap(err, fault.Unsupported, "the memory controller cannot be enabled in %s; the machine's own processes must not be in that group", at).Because("cgroup")
			}
		}
	}
	return nil
}

// write writes a control file, which the kernel has made: there is none to create.
func write(dir, file, text string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// writeIfThere leaves out what this kernel, or this machine's set of controllers,
// does not have.
func writeIfThere(dir, file, text string) error {
	if err := write(dir, file, text); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// procs are the files that a process joins the group by.
func (g group) procs() []string {
	var files []string
	for _, dir := range g.dirs() {
		files = append(files, filepath.Join(dir, "cgroup.procs"))
	}
	return files
}

// pids are the processes in the group.
func (g group) pids() ([]int, error) {
	text, err := os.ReadFile(filepath.Join(g.memory, "cgroup.procs"))
	if errors.Is(err, unix.ENODEV) { // removed since it was opened
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for field := range strings.FieldsSeq(string(text)) {
		if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// has says whether a process is in the group now.
func (g group) has(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) == 3 && strings.HasSuffix(parts[2], g.name) {
			return true
		}
	}
	return false
}

// kill ends every process of the group and waits until they are gone. It reaps none:
// a child's status belongs to whoever started it.
func (g group) kill(ctx context.Context) error {
	for {
		pids, err := g.pids()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		if g.v2 {
			// One write kills also what is being forked; kernels before 5.14 lack it.
			_ = write(g.memory, "cgroup.kill", "1")
		}
		var doomed []int // pidfds
		for _, pid := range pids {
			fd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue
			}
			// Membership is read after the descriptor was opened: if the process still
			// lives when it is signalled, then the answer was about it.
			if !g.has(pid) {
				unix.Close(fd)
				continue
			}
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			doomed = append(doomed, fd)
		}
		err = waitGone(ctx, doomed)
		for _, fd := range doomed {
			unix.Close(fd)
		}
		if err != nil {
			return err
		}
	}
}

// remove removes the group, whose processes have been killed. One that an agent had
// just started when it died may join the group after that: it is killed, too.
func (g group) remove(ctx context.Context) error {
	for _, dir := range g.dirs() {
		for {
			err := os.Remove(dir)
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				break
			}
			// A process that has just ended holds its group a moment longer.
			if !errors.Is(err, unix.EBUSY) {
				return err
			}
			if err := g.kill(ctx); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return err
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	return nil
}

// oomKills counts the processes that the memory limit has killed.
func (g group) oomKills() int64 {
	file := "memory.oom_control"
	if g.v2 {
		file = "memory.events"
	}
	return readKeys(filepath.Join(g.memory, file))["oom_kill"]
}

// memoryBytes is the resident memory: anonymous and shared (the guest's memory is a
// shared memory file), without the page cache.
func (g group) memoryBytes() int64 {
	keys := readKeys(filepath.Join(g.memory, "memory.stat"))
	if g.v2 {
		return keys["anon"] + keys["shmem"]
	}
	return keys["total_rss"] + keys["total_shmem"]
}

// dirtyBytes is the page cache of what was written and is not on disk yet.
func (g group) dirtyBytes() int64 {
	keys := readKeys(filepath.Join(g.memory, "memory.stat"))
	if g.v2 {
		return keys["file_dirty"] + keys["file_writeback"]
	}
	return keys["total_dirty"] + keys["total_writeback"]
}

// cpuTime is the CPU time of all processes that were ever in the group; false where
// the machine does not count it.
func (g group) cpuTime() (time.Duration, bool) {
	if g.v2 {
		usec, ok := readKeys(filepath.Join(g.cpu, "cpu.stat"))["usage_usec"]
		return time.Duration(usec) * time.Microsecond, ok
	}
	text, err := os.ReadFile(filepath.Join(g.cpuacct, "cpuacct.usage"))
	if err != nil {
		return 0, false
	}
	nsec, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return time.Duration(nsec), err == nil
}

// readKeys reads a file of lines "key number".
func readKeys(path string) map[string]int64 {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	keys := map[string]int64{}
	for s := bufio.NewScanner(f); s.Scan(); {
		if key, number, ok := strings.Cut(s.Text(), " "); ok {
			if n, err := strconv.ParseInt(number, 10, 64); err == nil {
				keys[key] = n
			}
		}
	}
	return keys
}
