package disk

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Report says what takes the space of a pool, in bytes.
type Report struct {
	Usage
	MemoryQuota int64 // what saved memory may take
	DataTotal   int64 // of the file system that the data directory lies on
	DataFree    int64
	Disks       []DiskUse
	Saves       []SaveUse
	Templates   []TemplateUse
	Other       int64 // agent layers, blank disks, what is being made or removed
}

// Space is what an image takes. Unique is the part that no clone shares, which is what
// its removal gives back at least; -1 where counting it would take too long.
type Space struct {
	Size      int64 // the limit
	Allocated int64
	Unique    int64
}

// DiskUse is a disk.
type DiskUse struct {
	ID string
	Space
}

// SaveUse is a save, committed or not.
type SaveUse struct {
	ID         string
	Generation int64
	Committed  bool
	Memory     int64
	Disk       Space
}

// TemplateUse is a template. An image that several share counts for the first of them.
type TemplateUse struct {
	Digest string
	Bytes  int64
	Disks  int // disks and saves that were written on it
}

// Report adds everything up. It reads and changes nothing. What goes away meanwhile
// is left out.
func (p *Pool) Report(ctx context.Context) (Report, error) {
	u, err := p.Usage(ctx)
	if err != nil {
		return Report{}, err
	}
	r := Report{Usage: u, MemoryQuota: p.memoryQuota(u)}
	var st unix.Statfs_t
	if err := unix.Statfs(p.cfg.Dir, &st); err != nil {
		return Report{}, wrap(err, "the free space of the data directory could not be read")
	}
	r.DataTotal, r.DataFree = int64(st.Blocks)*st.Frsize, int64(st.Bavail)*st.Frsize
	budget := maxMappedAll
	users := map[string]int{}
	written := func(dir string) {
		if rec, err := readRecord(dir); err == nil && rec.Template != "" {
			users[rec.Template]++
		}
	}
	for _, id := range names(p.path("disks")) {
		if err := ctx.Err(); err != nil {
			return Report{}, wrap(err, "the disks of the pool could not be added up")
		}
		space, err := spaceOf(p.image(id), &budget)
		if err != nil {
			continue
		}
		written(p.diskDir(id))
		r.Disks = append(r.Disks, DiskUse{id, space})
	}
	for _, id := range names(p.path("saves")) {
		for _, name := range names(p.path("saves", id)) {
			generation, committed, ok := parseSave(name)
			if !ok {
				continue
			}
			dir := p.path("saves", id, name)
			s := SaveUse{ID: id, Generation: generation, Committed: committed, Memory: treeBytes(filepath.Join(dir, memName))}
			if s.Disk, err = spaceOf(filepath.Join(dir, imageName), &budget); err != nil {
				s.Disk = Space{}
			}
			written(dir)
			r.Saves = append(r.Saves, s)
		}
	}
	counted := map[uint64]bool{}
	for _, digest := range names(p.path("templates")) {
		r.Templates = append(r.Templates, TemplateUse{Digest: digest, Bytes: newBytes(p.templateDir(digest), counted), Disks: users[digest]})
	}
	for _, name := range []string{"agents", "blanks", "tmp", "trash"} {
		r.Other += treeBytes(p.path(name))
	}
	return r, nil
}

// treeBytes is what all files of a tree take; what cannot be read counts as nothing.
func treeBytes(root string) int64 {
	var sum int64
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			sum += allocated(path)
		}
		return nil
	})
	return sum
}

// newBytes is what the files of a directory take, those left out whose inode was counted
// before.
func newBytes(dir string, counted map[uint64]bool) int64 {
	var sum int64
	for _, name := range names(dir) {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err == nil && !counted[st.Ino] {
			counted[st.Ino] = true
			sum += st.Blocks * statBlock
		}
	}
	return sum
}

// spaceOf measures an image.
func spaceOf(path string, budget *int) (Space, error) {
	f, err := os.Open(path)
	if err != nil {
		return Space{}, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Space{}, err
	}
	s := Space{Size: st.Size, Allocated: st.Blocks * statBlock}
	if s.Unique, err = unshared(f, budget); err != nil {
		s.Unique = -1
	}
	return s, nil
}

// These bound the extents that are looked at, in one image and in all: each costs the
// kernel some 5 µs, as it asks who shares it.
const (
	maxMapped    = 4 << 10
	maxMappedAll = 128 << 10
)

// unshared adds up the extents of a file that no other file shares, -1 where there are
// too many (FIEMAP, see the kernel's Documentation/filesystems/fiemap.rst). What is
// looked at is taken off the budget.
func unshared(f *os.File, budget *int) (int64, error) {
	const (
		batch       = 512
		fsIocFiemap = 0xc020660b // _IOWR('f', 11, struct fiemap), linux/fs.h
		last        = 0x1        // FIEMAP_EXTENT_LAST
		shared      = 0x2000     // FIEMAP_EXTENT_SHARED
	)
	var request struct {
		start, length                   uint64
		flags, mapped, count, reserved_ uint32
		extents                         [batch]struct {
			logical, physical, length uint64
			reserved64                [2]uint64
			flags                     uint32
			reserved                  [3]uint32
		}
	}
	var sum int64
	for seen := 0; seen < maxMapped && *budget > 0; seen += int(request.mapped) {
		request.length, request.count = ^uint64(0)-request.start, batch
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(&request))); errno != 0 {
			return 0, errno
		}
		*budget -= int(request.mapped)
		for _, e := range request.extents[:request.mapped] {
			if e.flags&shared == 0 {
				sum += int64(e.length)
			}
			request.start = e.logical + e.length
			if e.flags&last != 0 {
				return sum, nil
			}
		}
		if request.mapped == 0 {
			return sum, nil
		}
	}
	return -1, nil
}
