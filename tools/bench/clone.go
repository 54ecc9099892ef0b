package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The disks that are cloned: allocated whole, with pieces of data in them, so that they
// have many extents, as disks that were in use. A clone's cost follows them.
const (
	diskBytes = 8_000_000_000
	piece     = 64 << 10
)

var clones = []struct {
	row     rowID
	extents int // about
}{{rowClone10, 10}, {rowClone2000, 2000}, {rowClone20000, 20_000}}

// measureClones clones files in the pool, and says how many extents they have.
func measureClones(ctx context.Context, pool string, n int, r *results) (extents []int, err error) {
	dir, err := os.MkdirTemp(pool, "bench-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, c := range clones {
		path := filepath.Join(dir, "disk")
		src, err := makeDisk(ctx, path, c.extents)
		if err != nil {
			return nil, err
		}
		count, err := countExtents(src)
		for i := 0; err == nil && i < n; i++ {
			err = cloneOnce(src, filepath.Join(dir, "clone"), c.row, r)
		}
		if err := errors.Join(err, src.Close(), os.Remove(path)); err != nil {
			return nil, err
		}
		extents = append(extents, count)
	}
	return extents, ctx.Err()
}

func cloneOnce(src *os.File, to string, row rowID, r *results) error {
	dst, err := os.Create(to)
	if err != nil {
		return err
	}
	err = r.time(hutchSide, func() error { return unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) }, row)
	return errors.Join(err, dst.Close(), os.Remove(to))
}

func makeDisk(ctx context.Context, path string, extents int) (_ *os.File, err error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, diskBytes); err != nil {
		return nil, fmt.Errorf("allocate %s: %w", path, err)
	}
	data := make([]byte, piece)
	for i := range data {
		data[i] = byte(i)
	}
	// Each piece of data parts what is allocated but unwritten in two.
	stretch := diskBytes / int64(extents) * 2
	for at := int64(0); at+piece <= diskBytes; at += stretch {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if _, err := f.WriteAt(data, at); err != nil {
			return nil, err
		}
	}
	return f, f.Sync()
}

// countExtents asks the kernel (FIEMAP, Documentation/filesystems/fiemap.rst).
func countExtents(f *os.File) (int, error) {
	// struct fiemap with room for no extent: then the kernel only counts.
	request := struct {
		start, length             uint64
		flags, mapped, count, pad uint32
	}{length: ^uint64(0)}
	const fsIocFiemap = 0xc020660b // _IOWR('f', 11, struct fiemap), linux/fs.h
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return 0, errno
	}
	return int(request.mapped), nil
}
