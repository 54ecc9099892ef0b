package disk

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// ReadGuestFile reads a file of a mounted disk as its guest sees it, of limit bytes at
// most. Nothing on the way may be a symbolic link. Kinds: NotFound (no such file),
// TooLarge, FailedPrecondition (not mounted, or what is there is no plain file).
func (p *Pool) ReadGuestFile(ctx context.Context, id, name string, limit int64) ([]byte, error) {
	t, err := p.guestTree(id)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	f, err := t.open(name, unix.O_RDONLY, 0)
	if err != nil {
		return nil, guestError(err, id, name)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, guestError(err, id, name)
	}
	if !st.Mode().IsRegular() {
		return nil, fault.New(fault.FailedPrecondition, "%s of sandbox %s is no plain file; replace it with one inside", name, id)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, guestError(err, id, name)
	}
	if int64(len(data)) > limit {
		return nil, fault.New(fault.TooLarge, "%s of sandbox %s has more than %d bytes; read it in parts, inside", name, id, limit)
	}
	return data, nil
}

// WriteGuestFile replaces a file of a mounted disk, in one step, with one that root
// owns. Whatever lies under that name, but for a directory, is replaced and not
// followed; its directory must exist and nothing on the way may be a symbolic link.
// It is for a disk that no guest runs on: a running guest may keep seeing the old
// file. Kinds: NotFound (no such directory), FailedPrecondition (not mounted, or a
// directory or a link is in the way), NoCapacity (the disk is full).
func (p *Pool) WriteGuestFile(ctx context.Context, id, name string, data []byte, perm fs.FileMode) error {
	t, err := p.guestTree(id)
	if err != nil {
		return err
	}
	defer t.Close()
	up, base := split(name)
	dir, err := t.dir(up)
	if err != nil {
		return guestError(err, id, name)
	}
	defer dir.Close()
	return guestError(replaceAt(dir, base, data, perm), id, name)
}

// replaceAt writes a new file beside the old one and renames it over that.
func replaceAt(dir *os.File, base string, data []byte, perm fs.FileMode) error {
	temp := ".hutch-" + rand.Text()
	fd, err := unix.Openat(int(dir.Fd()), temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), temp)
	defer f.Close()
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(perm)
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), base)
	}
	if err != nil {
		return errors.Join(err, unix.Unlinkat(int(dir.Fd()), temp, 0))
	}
	return dir.Sync()
}

// guestTree opens the merged tree of a mounted disk.
func (p *Pool) guestTree(id string) (*tree, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	table, err := mounts()
	if err != nil {
		return nil, err
	}
	if table.at(p.rootDir(id)) == nil {
		return nil, fault.New(fault.FailedPrecondition, "the disk %s is not mounted", id).Because("not_mounted")
	}
	t, err := openTree(p.rootDir(id), noLinks)
	return t, wrap(err, "the tree of disk %s could not be opened", id)
}

// guestError gives a kind to what a guest's tree can do to a lookup.
// EACCES comes from a device node, which a nodev mount opens for nobody.
func guestError(err error, id, name string) error {
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fault.Wrap(err, fault.NotFound, "sandbox %s has no %s", id, name)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES):
		return fault.Wrap(err, fault.FailedPrecondition, "%s of sandbox %s is in the way: a link, a directory or a device lies there; replace it inside", name, id)
	}
	return wrap(err, "%s of sandbox %s could not be used", name, id)
}
