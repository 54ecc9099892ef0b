package disk

import (
	"errors"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// tree is the root of files that somebody hostile has made. Every name is resolved
// by the kernel with the tree as its limit, and no directory is ever looked up twice
// in between (openat2(2)).
type tree struct {
	root *os.File
	how  uint64 // RESOLVE_* flags
}

const (
	// asRoot resolves names as a process would that has the tree as its root: absolute
	// symbolic links and .. stay inside. For images that nobody changes meanwhile.
	asRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS
	// noLinks refuses every symbolic link, for trees of guests.
	noLinks = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS
)

func openTree(dir string, how uint64) (*tree, error) {
	root, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	return &tree{root, how}, nil
}

func (t *tree) Close() error { return t.root.Close() }

// open opens a name in the tree. It never waits for the other end of a pipe.
func (t *tree) open(name string, flags int, mode uint32) (*os.File, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: t.how}
	if flags&unix.O_PATH == 0 {
		how.Flags |= unix.O_NONBLOCK | unix.O_NOCTTY
	}
	if flags&unix.O_CREAT != 0 {
		how.Mode = uint64(mode)
	}
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	if clean == "" {
		clean = "."
	}
	for {
		fd, err := unix.Openat2(int(t.root.Fd()), clean, &how)
		// EAGAIN: something was renamed during the lookup, and the kernel cannot prove
		// that it stayed inside.
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "openat2", Path: name, Err: err}
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

// dir opens a directory of the tree.
func (t *tree) dir(name string) (*os.File, error) {
	return t.open(name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
}

// mkdirs opens a directory and makes it, and those above it, where they are missing.
func (t *tree) mkdirs(name string) (*os.File, error) {
	d, err := t.dir(name)
	if !errors.Is(err, os.ErrNotExist) || name == "" || name == "." {
		return d, err
	}
	up, base := split(name)
	parent, err := t.mkdirs(up)
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if err := unix.Mkdirat(int(parent.Fd()), base, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdirat", Path: name, Err: err}
	}
	return t.dir(name)
}

// split cuts a name into the directory and the last element.
func split(name string) (dir, base string) {
	dir, base = path.Split(strings.TrimPrefix(path.Clean("/"+name), "/"))
	return strings.TrimSuffix(dir, "/"), base
}
