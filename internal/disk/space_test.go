package disk

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// hog takes space in a pool until so much is free; grow it again by another call.
func hog(t testing.TB, p *Pool, free int64) {
	t.Helper()
	path := p.path("hog")
	u, err := p.Usage(t.Context())
	must(t, err)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	if have := fileSize(path); u.Free > free {
		must(t, unix.Fallocate(int(f.Fd()), 0, have, u.Free-free))
	} else {
		must(t, f.Truncate(have+u.Free-free))
	}
}

// D6: the reserve is for what exists. A sleep gets it, a capture for forks does not,
// and below the low mark it is not even begun; the message says what to do.
func TestD6ReserveIsForSaves(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", testSize))
	u, err := p.Usage(ctx)
	must(t, err)
	// Above the mark, but with less free than the capture needs.
	hog(t, p, u.LowMark+8<<20)
	u, err = p.Usage(ctx)
	must(t, err)
	_, err = p.Stage(ctx, "op_1", 0, u.Free+1<<20, ForNew)
	wantKind(t, err, fault.NoCapacity)
	s, err := p.Stage(ctx, "a", 1, u.Free+1<<20, ForKept)
	must(t, err)
	must(t, s.Abort())
	// Below it.
	hog(t, p, u.LowMark-8<<20)
	for what, err := range map[string]error{
		"create":  p.Create(ctx, "b", testSize),
		"clone":   p.CloneTo(ctx, FromDisk("a"), "b", ForNew),
		"capture": func() error { _, err := p.Stage(ctx, "op_2", 0, 1<<20, ForNew); return err }(),
	} {
		f := fault.Of(err)
		if !fault.Is(err, fault.NoCapacity) || f.Reason != "pool_full" {
			t.Errorf("%s: %v", what, err)
			continue
		}
		for _, part := range []string{" MB of 1.0 GB free", "`hutch df`", "delete", "larger"} {
			if !strings.Contains(f.Message, part) {
				t.Errorf("%s: %q does not say %q", what, f.Message, part)
			}
		}
	}
	if exists(p.diskDir("b")) || exists(p.path("saves", "op_1")) || exists(p.path("saves", "op_2")) || len(names(p.path("tmp"))) > 0 {
		t.Error("what was refused is half made")
	}
	// To the last block: a save of all that the reserve has, and its disk is durable.
	hog(t, p, 1<<20)
	u, err = p.Usage(ctx)
	must(t, err)
	s, err = p.Stage(ctx, "a", 2, u.Reserved*9/10, ForKept)
	must(t, err)
	must(t, s.CloneDisk(ctx, "a"))
	mem, err := os.Create(filepath.Join(s.MemDir(), "pages"))
	must(t, err)
	must(t, unix.Fallocate(int(mem.Fd()), 0, 0, u.Reserved*9/10))
	must(t, mem.Close())
	must(t, s.Commit(ctx, []byte("{}")))
}

// D6: saved memory has a quota of its own.
func TestD6MemoryQuota(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.MemoryQuota = 32 << 20
	p := open(t, cfg)
	ctx := t.Context()
	save := func(id string, bytes int64) (*Staging, error) {
		t.Helper()
		s, err := p.Stage(ctx, id, 1, bytes, ForKept)
		if err == nil {
			must(t, os.WriteFile(filepath.Join(s.MemDir(), "pages"), make([]byte, bytes), 0o600))
		}
		return s, err
	}
	a, err := save("a", 20<<20)
	must(t, err)
	_, err = save("b", 20<<20) // the one that is being written counts
	wantKind(t, err, fault.NoCapacity)
	if f := fault.Of(err); f.Reason != "memory_quota" || !strings.Contains(f.Message, "saved memory takes 21 MB") {
		t.Errorf("the refusal is %+v", f)
	}
	must(t, a.Commit(ctx, nil))
	_, err = save("b", 20<<20)
	wantKind(t, err, fault.NoCapacity)
	if exists(p.path("saves", "b")) {
		t.Error("what was refused is half made")
	}
	must(t, p.DropSaved(ctx, "a", 1))
	b, err := save("b", 20<<20)
	must(t, err)
	must(t, b.Commit(ctx, nil))
}

// D6: writers have to wait before the pool is full.
func TestD6Headroom(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	hog(t, p, 200<<20)
	room, err := p.Headroom(ctx)
	must(t, err)
	u, err := p.Usage(ctx)
	must(t, err)
	if room.Clear != u.Total/100 || room.Left != u.Free-u.StopMark || u.StopMark >= u.LowMark || u.StopMark == 0 {
		t.Errorf("%+v of %+v", room, u)
	}
	hog(t, p, u.StopMark-4<<20)
	if room, err = p.Headroom(ctx); err != nil || room.Left >= 0 {
		t.Errorf("below the mark: %+v, %v", room, err)
	}
}

// D6: a disk that is full, of bytes or of inodes, is saved, woken, stopped and resumed
// like any other.
func TestD6FullDiskLives(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	for _, way := range []string{"bytes", "inodes"} {
		must(t, p.Create(ctx, way, testSize))
		root, err := p.Mount(ctx, way, spec)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(root, "kept"), []byte("whole"), 0o644))
		if way == "bytes" {
			fill(t, filepath.Join(root, "big"))
		} else {
			for i := 0; err == nil; i++ {
				err = unix.Mknod(filepath.Join(root, fmt.Sprint("f", i)), unix.S_IFREG|0o600, 0)
			}
			if err != unix.ENOSPC {
				t.Fatal(err)
			}
		}
		for generation := int64(1); generation <= 2; generation++ {
			s, err := p.Stage(ctx, way, generation, 1<<20, ForKept) // sleep
			must(t, err)
			must(t, p.Sync(ctx, way))
			must(t, s.CloneDisk(ctx, way))
			must(t, s.Commit(ctx, []byte("{}")))
			must(t, p.Unmount(ctx, way))
			must(t, p.Delete(ctx, way))
			must(t, p.Replace(ctx, FromSave(way, generation), way)) // wake
			root, err = p.Mount(ctx, way, spec)
			must(t, err)
			must(t, p.DropSaved(ctx, way, generation))
			must(t, p.Sync(ctx, way)) // stop
			must(t, p.Unmount(ctx, way))
			root, err = p.Mount(ctx, way, spec) // resume
			must(t, err)
			if readOnly(t, root) || read(t, filepath.Join(root, "kept")) != "whole" {
				t.Errorf("%s: the disk is not as it was", way)
			}
		}
		must(t, p.Unmount(ctx, way))
	}
}

// A save does not keep what was deleted, where that is much.
func TestTidyGivesBack(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", 256<<20))
	root, err := p.Mount(ctx, "a", layers(t, p))
	must(t, err)
	takes := func() int64 {
		t.Helper()
		must(t, p.Sync(ctx, "a"))
		p.Tidy(ctx, "a")
		return must1(p.Stat(ctx, "a"))(t).Allocated
	}
	must(t, os.WriteFile(filepath.Join(root, "little"), make([]byte, 16<<20), 0o644))
	must(t, os.WriteFile(filepath.Join(root, "much"), make([]byte, 96<<20), 0o644))
	all := takes()
	must(t, os.Remove(filepath.Join(root, "little")))
	if now := takes(); now < all {
		t.Errorf("for a little the image was torn: %d of %d", now, all)
	}
	must(t, os.Remove(filepath.Join(root, "much")))
	if now := takes(); now > 16<<20 {
		t.Errorf("after deleting all it still takes %d bytes", now)
	}
	must(t, p.Unmount(ctx, "a"))
	p.Tidy(ctx, "a") // not mounted: nothing to do, nothing fails
}

// The file system of the data directory is full: no pool is made, what there is works,
// and all is as before when there is space.
func TestD6DataDirectoryIsFull(t *testing.T) {
	t.Parallel()
	outer := testConfig(t)
	dir := filepath.Dir(outer.Dir)
	image := filepath.Join(dir, "fs.img")
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, 900<<20))
	helper := at(outer)
	must(t, helper.tool(t.Context(), "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", image))
	device, err := attach(t.Context(), image, false)
	must(t, err)
	must(t, os.Mkdir(outer.Dir, 0o700))
	must(t, unix.Mount(device, outer.Dir, "ext4", 0, ""))
	t.Cleanup(func() {
		if err := unmount(context.Background(), outer.Dir); err != nil {
			t.Error(err)
		}
		if err := detach(context.Background(), image); err != nil {
			t.Error(err)
		}
	})
	ctx := t.Context()
	cfg := outer
	cfg.PoolBytes = 600 << 20
	filler := filepath.Join(cfg.Dir, "filler")
	fallocate := func(size int64) {
		t.Helper()
		f, err := os.Create(filler)
		must(t, err)
		defer f.Close()
		must(t, unix.Fallocate(int(f.Fd()), 0, 0, size))
	}
	fallocate(400 << 20)
	_, err = Open(ctx, cfg)
	wantKind(t, err, fault.NoCapacity)
	if left := names(cfg.Dir); len(left) != 4 { // filler, lost+found, pool, pool.lock
		t.Errorf("a pool that did not fit leaves %v", left)
	}
	must(t, os.Remove(filler))
	p, err := Open(ctx, cfg)
	must(t, err)
	defer func() { must(t, p.TakeDown(ctx)) }()
	must(t, p.Create(ctx, "a", testSize))
	fill(t, filler)
	// The pool has its space: it does not notice.
	spec := layers(t, p)
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(root, "f"), make([]byte, 8<<20), 0o644))
	must(t, p.Sync(ctx, "a"))
	must(t, p.Unmount(ctx, "a"))
	must(t, p.TakeDown(ctx))
	p, err = Open(ctx, cfg)
	must(t, err)
	r, err := p.Report(ctx)
	must(t, err)
	if r.DataFree > 1<<20 || r.Free < 100<<20 {
		t.Errorf("the report says %+v", r.Usage)
	}
	must(t, os.Remove(filler))
	must(t, p.Create(ctx, "b", testSize))
}

// R10: the report tells what each thing takes, what is shared and what is not.
func TestR10Report(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	for _, id := range []string{"a", "alone"} {
		must(t, p.Create(ctx, id, testSize))
		root, err := p.Mount(ctx, id, spec)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(root, "f"), make([]byte, 16<<20), 0o644))
		must(t, p.Sync(ctx, id))
	}
	must(t, p.CloneTo(ctx, FromDisk("a"), "b", ForNew))
	root, err := p.Mount(ctx, "b", spec)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(root, "g"), make([]byte, 4<<20), 0o644))
	must(t, p.Sync(ctx, "b"))
	s, err := p.Stage(ctx, "slept", 3, 8<<20, ForKept)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(s.MemDir(), "pages"), make([]byte, 8<<20), 0o600))
	must(t, s.CloneDisk(ctx, "alone"))
	must(t, s.Commit(ctx, nil))
	must(t, os.WriteFile(p.path("tmp", "half"), make([]byte, 2<<20), 0o600))
	r, err := p.Report(ctx)
	must(t, err)
	near := func(what string, got, want int64) {
		t.Helper()
		if got < want || got > want+4<<20 {
			t.Errorf("%s takes %d bytes, not %d and a little", what, got, want)
		}
	}
	byID := map[string]Space{}
	for _, d := range r.Disks {
		byID[d.ID] = d.Space
	}
	near("a", byID["a"].Allocated, 16<<20)
	near("what a shares with nobody", byID["a"].Unique, 0)
	near("b", byID["b"].Allocated, 20<<20)
	near("what b shares with nobody", byID["b"].Unique, 4<<20)
	if byID["b"].Size != testSize || len(r.Disks) != 3 || len(r.Templates) != 1 || r.Templates[0].Disks != 4 || len(r.Saves) != 1 {
		t.Errorf("the report is %+v", r)
	}
	near("saved memory", r.Saves[0].Memory, 8<<20)
	near("the saved disk", r.Saves[0].Disk.Allocated, 16<<20)
	near("the rest", r.Other, 2<<20)
	if r.Total == 0 || r.MemoryQuota != r.Total/2 || r.DataTotal < r.Total || !r.File {
		t.Errorf("the whole is %+v", r)
	}
	for _, id := range []string{"a", "b", "alone"} {
		must(t, p.Unmount(ctx, id))
	}
	// What is too torn to count is told apart from what shares everything.
	must(t, p.Create(ctx, "torn", 1<<30))
	fragment(t, p.image("torn"), maxMapped+512)
	budget := maxMappedAll
	space, err := spaceOf(p.image("torn"), &budget)
	must(t, err)
	if budget >= maxMappedAll {
		t.Error("what is counted costs nothing")
	}
	if space.Unique != -1 || space.Allocated < maxMapped*blockSize {
		t.Errorf("the torn one is %+v", space)
	}
}

// BenchmarkReport is `hutch df` on a host with 100 disks of 500 extents each.
func BenchmarkReport(b *testing.B) {
	p := newPool(b)
	must(b, p.Create(b.Context(), "d0", 256<<20))
	fragment(b, p.image("d0"), 500)
	for i := 1; i < 100; i++ {
		must(b, p.CloneTo(b.Context(), FromDisk("d0"), fmt.Sprintf("d%d", i), ForNew))
	}
	b.ResetTimer()
	for range b.N {
		begin := time.Now()
		r, err := p.Report(b.Context())
		must(b, err)
		if len(r.Disks) != 100 {
			b.Fatal(len(r.Disks))
		}
		b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/df")
	}
}
