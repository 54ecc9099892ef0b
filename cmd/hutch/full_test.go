package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	wire "github.com/hutchrun/hutch/api"
)

// D6: a sandbox whose disk is full sleeps, wakes, stops and resumes, and can make room
// for itself.
func TestD6FullDisk(t *testing.T) {
	b := newBox(t, "--disk", "1GB")
	b.sh("echo kept > /workspace/kept")
	b.root("head -c 1200000000 /dev/zero > /big 2>/dev/null; i=0; while echo x > /small$i; do i=$((i+1)); done 2>/dev/null; true")
	if r := b.exec(nil, "--", "sh", "-c", "head -c 100000 /dev/zero > /workspace/more"); r.code == 0 {
		t.Fatal("the disk is not full")
	}
	b.hutch("sleep")
	b.hutch("wake")
	if b.sh("cat /workspace/kept") != "kept" {
		t.Error("a file is gone after sleep and wake")
	}
	b.hutch("stop")
	b.hutch("resume")
	if b.sh("cat /workspace/kept") != "kept" {
		t.Error("a file is gone after stop and resume")
	}
	b.root("rm -f /big /small*; sync")
	b.sh("echo room > /workspace/room; sync")
}

// usage is what `hutch df` says of a sandbox and its host.
func (b *box) usage() (wire.HostDisk, wire.SandboxDisk) {
	b.t.Helper()
	var df wire.DiskUsage
	if err := json.Unmarshal([]byte(hutchOK(b.t, "df", b.name, "--json")), &df); err != nil {
		b.t.Fatal(err)
	}
	if len(df.Hosts) != 1 || len(df.Hosts[0].Sandboxes) != 1 {
		b.t.Fatalf("df %s: %+v", b.name, df)
	}
	return df.Hosts[0], df.Hosts[0].Sandboxes[0]
}

// hog takes the shared pool's space and keeps it taken, so that no more than so much is
// free; the function that it gives frees all of it.
func hog(t *testing.T, free int64) (away func()) {
	t.Helper()
	pool := filepath.Join(shared.data(), "pool")
	f, err := os.Create(filepath.Join(pool, "hog"))
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	take := func() (taken int64, err error) {
		var st unix.Statfs_t
		if err := unix.Statfs(pool, &st); err != nil {
			return 0, err
		}
		if taken = int64(st.Bavail)*st.Frsize - free; taken <= 0 {
			return 0, nil
		}
		err = unix.Fallocate(int(f.Fd()), 0, size, taken)
		size += taken
		return taken, err
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	close(stopped)
	away = sync.OnceFunc(func() {
		close(stop)
		<-stopped
		_ = f.Truncate(0) // XFS frees what is only deleted some time later
		_ = f.Close()
		_ = os.Remove(f.Name())
	})
	t.Cleanup(away)
	// The disks that earlier tests deleted may still be on their way out: XFS frees them
	// behind the caller's back, so the space is taken until no more of it comes, and what
	// comes later still is taken as it comes.
	for quiet := 0; quiet < 10; quiet++ {
		taken, err := take()
		if err != nil {
			t.Fatal(err)
		}
		if taken > 0 {
			quiet = 0
		}
		time.Sleep(20 * time.Millisecond)
	}
	stopped = make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
				_, _ = take() // a neighbour may have been quicker: the next look tells
			}
		}
	}()
	return away
}

// D6, R10: below a tenth nothing new is made and what exists goes on; below the lower
// mark what runs is held, can be put to sleep, and goes on when there is space.
func TestD6FullPool(t *testing.T) {
	b, other := newBox(t), newBox(t)
	b.furnish()
	b.sh("sync") // what is not written out takes nothing yet
	host, disk := b.usage()
	if host.State != wire.HostDiskStateOk || disk.AllocatedBytes < 3e6 || disk.UniqueBytes == nil || *disk.UniqueBytes < 3e6 {
		t.Errorf("df: %+v %+v", host, disk)
	}
	away := hog(t, (host.LowMarkBytes+host.StopMarkBytes)/2)
	for _, line := range [][]string{{"new", "--name", newName(t)}, {"fork", b.name}, {"fork", b.name, "--mode", "disk"}} {
		if e := hutchFails(t, "no_capacity", line...); !strings.Contains(e["message"].(string), "hutch df") || e["reason"] != "pool_full" {
			t.Errorf("%v: %v", line, e)
		}
	}
	b.hutch("sleep")
	host, disk = b.usage()
	if host.State != wire.HostDiskStateLow || disk.SavedMemoryBytes == 0 || host.SavedMemoryBytes < disk.SavedMemoryBytes {
		t.Errorf("df while it sleeps in a pool that is low: %+v %+v", host, disk)
	}
	b.hutch("wake")
	b.filesAreThere()
	n := b.waitTicks(b.ticks())
	away()

	away = hog(t, host.StopMarkBytes-32<<20)
	b.held(true)
	if e := hutchFails(t, "no_capacity", "exec", b.name, "--", "true"); e["reason"] != "disk_full" {
		t.Errorf("exec while it is held: %v", e)
	}
	if host, _ = b.usage(); host.State != wire.HostDiskStateFull {
		t.Errorf("df says %s", host.State)
	}
	other.hutch("stop")
	b.hutch("sleep") // the reserve is for this
	b.held(false)
	away()
	b.hutch("wake")
	b.waitTicks(n)
	b.filesAreThere()
	other.hutch("resume")
}

// held waits until the sandbox says that it is held, or not.
func (b *box) held(want bool) {
	b.t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		held := false
		for _, c := range b.get().Conditions {
			held = held || c.Type == "degraded" && c.Reason == "disk_full"
		}
		if held == want {
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("held is %v: %+v", held, b.get())
		}
	}
}

// D6: where the data directory's file system is full nothing is lost and nothing half
// made: a call is refused with a reason or carried out in the end, and all works again
// when there is space.
func TestD6FullDataDirectory(t *testing.T) {
	s, err := newServer()
	if err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(s.dir, "fs.img")
	writeFile(t, image, nil)
	if err := os.Truncate(image, 1200<<20); err != nil {
		t.Fatal(err)
	}
	run(t, "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", image)
	if err := os.Mkdir(s.data(), 0o700); err != nil {
		t.Fatal(err)
	}
	run(t, "mount", "-o", "loop", image, s.data())
	t.Cleanup(func() {
		s.gone.Do(func() {})
		s.kill()
		if out, err := exec.Command(binary, "doctor", "--clean", "--yes", "--data", s.data()).CombinedOutput(); err != nil {
			t.Errorf("doctor --clean: %v: %s", err, out)
		}
		run(t, "umount", s.data())
		_ = os.RemoveAll(s.dir)
	})
	if err := os.Remove(filepath.Join(s.data(), "lost+found")); err != nil {
		t.Fatal(err)
	}
	s.pool = "700MB"
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	small := filepath.Join(s.dir, "small.tar")
	writeFile(t, small, dockerTar(t, map[string]string{"etc/os-release": "ID=small\n"}))
	ok := func(args ...string) string {
		t.Helper()
		r, err := s.try(2*time.Minute, nil, args...)
		if err != nil {
			t.Fatal(err)
		}
		return r.stdout
	}
	ok("templates", "build", "base", "--from-oci", small)
	ok("new", "--name", "before", "--disk", "1GB", "--memory", "128MiB")

	filler := filepath.Join(s.data(), "filler")
	fillUp(t, filler)
	accepted, refused := []string{}, 0
	for i := range 12 {
		name := fmt.Sprint("n", i)
		r, err := s.try(time.Minute, nil, "new", "--name", name, "--disk", "1GB", "--memory", "128MiB", "--no-wait", "--json")
		switch {
		case err == nil:
			accepted = append(accepted, name)
		case r.code == 21 && strings.Contains(r.stderr, "full"): // unavailable
			refused++
		default:
			t.Errorf("new on a full disk: %s", r)
		}
	}
	t.Logf("on a full disk %d were accepted and %d refused", len(accepted), refused)
	if out := ok("get", "before", "--json"); !strings.Contains(out, `"state": "ready"`) {
		t.Errorf("what runs is %s", out)
	}
	ok("ls")
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	for _, name := range accepted {
		if out := ok("get", name, "--wait", "--json"); !strings.Contains(out, `"state": "ready"`) {
			t.Errorf("what was accepted is %s", out)
		}
		ok("delete", name, "--yes")
	}
	if n := strings.Count(ok("ls", "--json"), `"id": "sbx_`); n != 1 {
		t.Errorf("%d sandboxes are left of 1", n)
	}
	ok("sleep", "before")
	ok("wake", "before")
	ok("stop", "before")
	ok("resume", "before")
	var found diagnosis
	if err := json.Unmarshal([]byte(ok("doctor", "--json", "--data", s.data())), &found); err != nil || len(found.Orphans) > 0 {
		t.Errorf("orphans: %v %+v", err, found.Orphans)
	}
}

// fillUp writes until a file system has nothing left.
func fillUp(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	_ = f.Sync() // what is full stays full
}
