package gvisor_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

func TestDriver(t *testing.T) {
	t.Parallel()
	runtimetest.Run(t, bundle)
}

func bundle(tb testing.TB) runtimetest.Bundle {
	return runtimetest.Bundle{
		Driver:  newDriver(tb),
		Restart: func() runtime.Driver { return newDriver(tb) },
		Spec:    func() runtime.Spec { return newSpec(tb, tree(tb)) },
		Beside:  func(other runtime.Spec) runtime.Spec { return newSpec(tb, other.Root) },
		Full:    func() string { return full(tb) },
		Crash:   func(spec runtime.Spec) { killSentry(tb, spec) },
		Limits:  true,
	}
}

// full mounts a file system with room for less than an image.
func full(tb testing.TB) string {
	tb.Helper()
	dir := tb.TempDir()
	if err := unix.Mount("hutch-test", dir, "tmpfs", 0, "size=64k"); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// killSentry kills the sandbox's sentry from outside.
func killSentry(tb testing.TB, spec runtime.Spec) {
	tb.Helper()
	pids := sentries(tb, spec)
	if len(pids) != 1 {
		tb.Fatalf("%s has the sentries %v, not one", spec.ID, pids)
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		tb.Fatal(err)
	}
}

// sentries finds the sentry of a place by its command line.
func sentries(tb testing.TB, spec runtime.Spec) []int {
	tb.Helper()
	return processes(tb, "runsc-sandbox", spec.Dir)
}

// processes finds processes whose first argument is name and whose others mention dir.
func processes(tb testing.TB, name, dir string) []int {
	tb.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		tb.Fatal(err)
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err == nil && strings.HasPrefix(string(line), name+"\x00") && strings.Contains(string(line), dir+"\x00") {
			pids = append(pids, pid)
		}
	}
	return pids
}
