package main

import (
	"bytes"
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
)

// usage is what processes have of the machine.
type usage struct {
	own, pss, rss int64         // bytes: PSS without files, PSS, RSS
	cpu           time.Duration // since they began
}

// usageOf sums over processes; one that has ended counts nothing.
func usageOf(pids []int) (usage, error) {
	var sum usage
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if gone(err) {
			continue
		}
		if err != nil {
			return usage{}, err
		}
		sum.own += kilobytes(text, "Pss_Anon") + kilobytes(text, "Pss_Shmem")
		sum.pss += kilobytes(text, "Pss")
		sum.rss += kilobytes(text, "Rss")
		cpu, err := cpuTime(pid)
		if err != nil {
			return usage{}, err
		}
		sum.cpu += cpu
	}
	return sum, nil
}

// gone says that a process has ended.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// cpuTime sums the threads' time on a CPU, in nanoseconds (sched-stats.rst), where
// /proc/PID/stat has hundredths of a second.
func cpuTime(pid int) (time.Duration, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, path := range files {
		text, err := os.ReadFile(path)
		if gone(err) {
			continue
		}
		if err != nil {
			return 0, err
		}
		first, _, _ := strings.Cut(string(text), " ")
		ns, err := strconv.ParseInt(first, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		sum += time.Duration(ns)
	}
	return sum, nil
}

// kilobytes reads a line "Key:   123 kB" of a file of /proc, in bytes; 0 where it has none.
func kilobytes(text []byte, key string) int64 {
	for l := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(l, []byte(key+":")); ok {
			n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(string(rest)), " kB"), 10, 64)
			return n << 10
		}
	}
	return 0
}

// processes lists what runs.
func processes() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// family finds the processes that were started with an argument, and then their
// descendants: the stubs of a sandbox have no arguments of their own.
func family(arg string) ([]int, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var found []int
	children := map[int][]int{}
	for _, pid := range all {
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && slices.Contains(strings.Split(string(line), "\x00"), arg) {
			found = append(found, pid)
		}
		if parent := parentOf(pid); parent > 0 {
			children[parent] = append(children[parent], pid)
		}
	}
	for i := 0; i < len(found); i++ {
		for _, child := range children[found[i]] {
			if !slices.Contains(found, child) {
				found = append(found, child)
			}
		}
	}
	return found, nil
}

// parentOf reads field 4 of proc_pid_stat(5); 0 for one that is gone.
func parentOf(pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name may hold spaces and parentheses: the fields begin after the last one.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0
	}
	parent, _ := strconv.Atoi(string(fields[1]))
	return parent
}

// members finds the processes in the control group of one of hutch's sandboxes, which
// is named by its id, and the group's directory among the memory controller's; "" where
// that cannot be found.
func members(sandbox string) (pids []int, group string, err error) {
	all, err := processes()
	if err != nil {
		return nil, "", err
	}
	for _, pid := range all {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			continue
		}
		if at := memoryGroup(string(text)); strings.HasSuffix(at, "/"+sandbox) {
			pids = append(pids, pid)
			group = at
		}
	}
	if len(pids) == 0 {
		return nil, "", fmt.Errorf("the sandbox %s has no processes", sandbox)
	}
	return pids, groupDir(group), nil
}

// memoryGroup reads from /proc/PID/cgroup the group for memory (cgroups(7)).
func memoryGroup(text string) string {
	unified := ""
	for l := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(l, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		if slices.Contains(strings.Split(parts[1], ","), "memory") {
			return parts[2]
		}
		if parts[0] == "0" {
			unified = parts[2]
		}
	}
	return unified
}

// groupDir finds a group's directory; "" where no memory controller shows it.
func groupDir(group string) string {
	table, err := mounts()
	if err != nil {
		return ""
	}
	for _, m := range table {
		if m.kind == "cgroup2" || m.kind == "cgroup" && slices.Contains(strings.Split(m.options, ","), "memory") {
			dir := filepath.Join(m.target, group)
			if _, err := os.Stat(filepath.Join(dir, "memory.stat")); err == nil {
				return dir
			}
		}
	}
	return ""
}

// groupMemory is a group's anonymous and shared memory in bytes; false where it cannot
// be read.
func groupMemory(dir string) (int64, bool) {
	text, err := os.ReadFile(filepath.Join(dir, "memory.stat"))
	if dir == "" || err != nil {
		return 0, false
	}
	keys := map[string]int64{}
	for l := range strings.Lines(string(text)) {
		if key, number, ok := strings.Cut(strings.TrimSpace(l), " "); ok {
			keys[key], _ = strconv.ParseInt(number, 10, 64)
		}
	}
	if _, v1 := keys["total_rss"]; v1 {
		return keys["total_rss"] + keys["total_shmem"], true
	}
	return keys["anon"] + keys["shmem"], true
}

// mount is a line of the mount table.
type mount struct{ device, target, kind, options string }

// mounts reads the mount table (proc_pid_mountinfo(5)).
func mounts() ([]mount, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	return parseMounts(string(text)), nil
}

func parseMounts(text string) []mount {
	var table []mount
	for l := range strings.Lines(text) {
		head, tail, ok := strings.Cut(strings.TrimSpace(l), " - ")
		left, right := strings.Fields(head), strings.Fields(tail)
		if ok && len(left) >= 5 && len(right) >= 3 {
			table = append(table, mount{device: left[2], target: left[4], kind: right[0], options: right[2]})
		}
	}
	return table
}

// mountOf finds where an image file is mounted through a loop device.
func mountOf(image string) (string, error) {
	table, err := mounts()
	if err != nil {
		return "", err
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return "", err
	}
	for _, path := range loops {
		backing, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(backing)) != image {
			continue // freed since it was listed, or another's
		}
		device, err := os.ReadFile(filepath.Join(filepath.Dir(path), "../dev"))
		if err != nil {
			return "", err
		}
		for _, m := range table {
			if m.device == strings.TrimSpace(string(device)) {
				return m.target, nil
			}
		}
	}
	return "", fmt.Errorf("the template's image %s is not mounted", image)
}
