package disk

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cloneFile makes dst share all blocks of src, as src is at one instant: pages that
// are not written yet are written first, and writers wait until the clone is done.
// dst must not exist; it is synced.
func cloneFile(src, dst string) error {
	from, err := os.Open(src)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer to.Close()
	if err := unix.IoctlFileClone(int(to.Fd()), int(from.Fd())); err != nil {
		return errors.Join(&os.PathError{Op: "clone", Path: src, Err: err}, os.Remove(dst))
	}
	return nil
}

// extents counts the extents of a file (FIEMAP, see the kernel's
// Documentation/filesystems/fiemap.rst). The cost of a clone follows it.
func extents(f *os.File) (int, error) {
	// struct fiemap with room for no extent: then the kernel only counts.
	request := struct {
		start, length                   uint64
		flags, mapped, count, reserved_ uint32
	}{length: ^uint64(0)}
	const fsIocFiemap = 0xc020660b // _IOWR('f', 11, struct fiemap), linux/fs.h
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return 0, errno
	}
	return int(request.mapped), nil
}

// syncFS writes out the file system that a path lies on.
func syncFS(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// syncDir makes the names in a directory durable.
func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// syncTree makes every regular file and directory of a tree durable.
func syncTree(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !d.IsDir() && !d.Type().IsRegular() {
			return nil
		}
		return syncDir(path) // a file is synced like a directory
	})
}

// writeFile replaces a file so that a crash leaves the old one or the new one.
func writeFile(path string, data []byte) error {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // gone already where the rename went well
	defer temp.Close()
	if _, err := temp.Write(data); err != nil {
		return err
	}
	if err := temp.Sync(); err != nil {
		return err
	}
	if err := os.Rename(temp.Name(), path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// names lists a directory; one that cannot be read is empty.
func names(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	list := make([]string, len(entries))
	for i, e := range entries {
		list[i] = e.Name()
	}
	return list
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// work is a directory under tmp whose lock says that somebody is at work in it.
type work struct {
	path string
	lock *os.File
}

// begin makes a directory to build something in. Its owner calls end.
func (p *Pool) begin(what string) (*work, error) {
	path, err := os.MkdirTemp(p.path("tmp"), what+".")
	if err != nil {
		return nil, wrap(err, "a temporary directory could not be made in the pool")
	}
	lock, err := os.Open(path)
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		return nil, wrap(err, "a temporary directory could not be locked")
	}
	return &work{path, lock}, nil
}

// end removes the directory; what was renamed out of it is safe.
func (p *Pool) end(w *work) {
	p.remove(w.path)
	w.lock.Close()
}

// publish syncs a finished directory and gives it its final name. It is false where
// that name is taken already.
func publish(from, to string) (bool, error) {
	if err := syncTree(from); err != nil {
		return false, err
	}
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EEXIST) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, syncDir(filepath.Dir(to))
}
