package gvisor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

// Deleted files that are held open are part of a save. What they take on the disk
// counts against a limit, above which it is refused before anything is frozen (Z9,
// Z10).
func TestSaveableCountsUnlinkedFiles_Z10(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	spec := newSpec(t, tree(t))
	spec.Root, _ = ownDisk(t, spec.Root, "6G")
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "unlinked", "8796093022208") // sparse, 2^43
	if err := h.Saveable(ctx); err != nil {
		t.Errorf("a deleted file that is a hole: %v", err)
	}
	// Blocks are set aside and not written.
	f := openDeleted(t, sentries(t, spec)[0])
	if err := unix.Fallocate(int(f.Fd()), 0, 0, 5<<30); err != nil {
		t.Fatal(err)
	}
	got := fault.Of(h.Saveable(ctx))
	if got == nil || got.Kind != fault.FailedPrecondition || got.Reason != "unlinked_files" {
		t.Errorf("a deleted file of 5 GiB: got %v, want failed_precondition unlinked_files", got)
	}
	runtimetest.MustAsk(t, h, "get", "token")
}

// ownDisk copies a tree to a file system of its own in a sparse file.
func ownDisk(t *testing.T, tree, size string) (disk, image string) {
	t.Helper()
	image, disk = filepath.Join(t.TempDir(), "disk"), t.TempDir()
	for _, args := range [][]string{
		{"truncate", "-s", size, image},
		{"mkfs.ext4", "-q", image},
		{"mount", "-o", "loop", image, disk},
		{"cp", "-a", tree + "/.", disk},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
		if args[0] == "mount" {
			t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
		}
	}
	return disk, image
}

// openDeleted opens the deleted file that a sentry holds.
func openDeleted(t *testing.T, pid int) *os.File {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if name, err := os.Readlink(link); err == nil && strings.HasSuffix(name, "/unlinked (deleted)") {
			f, err := os.OpenFile(link, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = f.Close() })
			return f
		}
	}
	t.Fatalf("the sentry %d holds no deleted file", pid)
	return nil
}

// A deleted file that is open keeps its contents over a save and a wake, whatever its
// size and its holes, and takes no memory: here it is larger than the sandbox's whole
// memory (Z1, Z10). On the stock module it is read into memory.
func TestUnlinkedFilesAreStreamed_Z1(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	spec := newSpec(t, tree(t))
	spec.MemoryBytes = 96 << 20
	h := startOne(t, spec)
	ask := func(h runtime.Handle, words ...string) string { t.Helper(); return runtimetest.MustAsk(t, h, words...) }
	check := func(h runtime.Handle, when, middle string) {
		t.Helper()
		for _, c := range [][3]string{
			{"199229439", "2", `"\xbd\xbe"`}, // the end of MiB 189 and the beginning of 190
			{"209715200", "2", `"\x00\x00"`}, // a hole
			{"536870912", "6", strconv.Quote(middle)},
			{"1073741821", "9", `"end"`}, // and no more after it
		} {
			if got := ask(h, "take", c[0], c[1]); got != c[2] {
				t.Errorf("%s: at %s there is %s, not %s", when, c[0], got, c[2])
			}
		}
	}
	ask(h, "unlinked", "1073741824")
	ask(h, "pour", "200")
	ask(h, "put", "536870912", "middle")
	ask(h, "put", "1073741821", "end")
	if err := h.Saveable(ctx); err != nil {
		t.Fatal(err)
	}
	for i, middle := range []string{"middle", "moddle"} { // saved, woken, and saved again
		ask(h, "put", "536870912", middle)
		p, err := h.Pause(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Capture(ctx, full(t)); err == nil {
			t.Fatal("Capture into a full directory succeeded")
		}
		image := t.TempDir()
		if err := p.Capture(ctx, image); err != nil {
			t.Fatalf("Capture: %v", err)
		}
		if info, err := os.Stat(filepath.Join(image, "unlinked.img")); err != nil || info.Size() < 200<<20 || info.Size() > 201<<20 {
			t.Errorf("the file of deleted contents: %v, %v", info, err)
		}
		if err := p.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		check(h, fmt.Sprintf("save %d, in the source", i), middle)
		ask(h, "put", "536870912", "xxxxxx") // of no concern to the image
		kill(t, h)
		place := newSpec(t, spec.Root)
		place.MemoryBytes = spec.MemoryBytes
		again, err := newDriver(t).Restore(ctx, place, image)
		if err != nil {
			t.Fatalf("Restore: %v", err)
		}
		t.Cleanup(func() { kill(t, again) })
		if err := again.Release(ctx); err != nil {
			t.Fatal(err)
		}
		check(again, fmt.Sprintf("wake %d", i), middle)
		if _, err := os.Stat(filepath.Join(place.Root, "unlinked")); !os.IsNotExist(err) {
			t.Errorf("the deleted file has come back: %v", err)
		}
		spec, h = place, again
	}
}

// A sentry that does not answer makes a pause fail in bounded time, and the pause is
// not carried out later (Z10).
func TestPauseOfStuckSentryIsUndone_Z10(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "spawn")
	pid := sentries(t, spec)[0]
	stop(t, pid)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	_, err := h.Pause(ctx)
	if f := fault.Of(err); f == nil || f.Kind != fault.DeadlineExceeded {
		t.Errorf("Pause: got %v, want deadline_exceeded", err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("Pause took %v", took)
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	runtimetest.Await(t, h)
	for range 3 {
		runtimetest.AwaitTicks(t, h, runtimetest.Ticks(t, h))
	}
	// A stuck sentry can be killed.
	stop(t, pid)
	kill(t, h)
}

// stop stops a process and waits until all its threads stand.
func stop(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	runtimetest.Eventually(t, "the process stands", func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, thread := range threads {
			text, err := os.ReadFile(thread)
			if err != nil || !strings.HasPrefix(string(text[bytes.LastIndexByte(text, ')')+1:]), " T ") {
				return false
			}
		}
		return len(threads) > 0
	})
}

// After Kill nothing holds the disk or the network: the disk's file system can be
// unmounted at once, its loop device is free, and the namespace goes away.
func TestKillFreesDiskAndNetwork(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	disk, image := ownDisk(t, spec.Root, "64M")
	spec.Root = disk
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "write", "/kept", "words")
	runtimetest.MustAsk(t, h, "unlinked", "1000") // an open file must not hold it either
	kill(t, h)
	if err := unix.Unmount(disk, 0); err != nil {
		t.Errorf("the disk cannot be unmounted: %v", err)
	}
	runtimetest.Eventually(t, "the loop device is free", func() bool {
		out, err := exec.Command("losetup", "-j", image).Output()
		return err == nil && len(out) == 0
	})
	if left := spoils(t, spec); len(left) > 0 {
		t.Errorf("the processes %v are left", left)
	}
	left, err := os.ReadDir(spec.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if !strings.HasSuffix(e.Name(), ".log") {
			t.Errorf("%s is left in the sandbox's directory", e.Name())
		}
	}
}

// A sandbox without its gofer has no files: it is ended and reported, not left half
// alive.
func TestGoferDies_S8(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	h := startOne(t, spec)
	wait := h.Wait()
	for _, pid := range processes(t, "runsc-gofer", spec.Dir) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	runtimetest.Ended(t, wait)
}

// Cycles of start and kill leave no descriptor, no zombie and no control group
// behind (W3).
func TestCyclesLeaveNothing_W3(t *testing.T) {
	t.Parallel()
	from := tree(t)
	d := newDriver(t)
	cycle := func() {
		spec := newSpec(t, from)
		h, err := d.Start(context.Background(), spec)
		if err != nil {
			t.Fatal(err)
		}
		var pids struct{ Sandbox, Gofer struct{ PID int } }
		text, err := os.ReadFile(filepath.Join(spec.Dir, "hutch.json"))
		if err != nil || json.Unmarshal(text, &pids) != nil {
			t.Fatalf("the record of a sandbox: %s, %v", text, err)
		}
		wait := h.Wait()
		kill(t, h)
		runtimetest.Ended(t, wait)
		for _, pid := range []int{pids.Sandbox.PID, pids.Gofer.PID} {
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
				t.Errorf("process %d is left, or its zombie", pid)
			}
		}
		for _, dir := range []string{"memory", "cpu", "cpuacct", ""} {
			path := filepath.Join("/sys/fs/cgroup", dir, parent, spec.ID)
			if _, err := os.Stat(path); err == nil {
				t.Errorf("%s is left", path)
			}
		}
		if left := spoils(t, spec); len(left) > 0 {
			t.Errorf("the processes %v are left", left)
		}
	}
	for range 5 {
		cycle()
	}
}

// A guest that has filled its memory can be saved and brought back: what the sentry
// needs for that is not taken from the guest's limit (Z10).
func TestSaveOfFullMemory_Z10(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	spec := newSpec(t, tree(t))
	spec.MemoryBytes = 256 << 20
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "alloc", "230")
	p, err := h.Pause(ctx)
	if err != nil {
		t.Fatal(err)
	}
	image := t.TempDir()
	if err := p.Capture(ctx, image); err != nil {
		t.Fatalf("Capture: %v", err)
	}
	if err := p.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	runtimetest.MustAsk(t, h, "get", "token")
	kill(t, h)
	place := newSpec(t, spec.Root)
	place.MemoryBytes = spec.MemoryBytes
	again, err := newDriver(t).Restore(ctx, place, image)
	if err != nil {
		t.Fatalf("Restore: %v", err)
	}
	t.Cleanup(func() { kill(t, again) })
	if err := again.Release(ctx); err != nil {
		t.Fatalf("Release: %v", err)
	}
	runtimetest.MustAsk(t, again, "get", "token")
}

// Close stops the watching and nothing else.
func TestCloseLeavesSandboxes(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	d := newDriver(t)
	h, err := d.Start(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	wait := h.Wait()
	d.Close()
	select {
	case e := <-wait:
		t.Errorf("Close made Wait say %+v", e)
	default:
	}
	again, err := newDriver(t).Adopt(context.Background(), spec)
	if err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	runtimetest.Await(t, again)
	kill(t, again)
	kill(t, h) // the old handle's Kill still works
}
