package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The ballast is space inside a disk that its guest cannot fill. An overlay needs a
// directory of its own at each mount and comes up read-only where it cannot make
// one, and then a guest with a full disk could not even delete.
const (
	ballastBytes  = 2 << 20
	ballastInodes = 64
)

const ballastFile = "space"

// makeSpace takes the ballast away where a disk has too little left to be mounted.
func makeSpace(img string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(img, &st); err != nil {
		return err
	}
	if int64(st.Bfree)*st.Frsize >= ballastBytes && st.Ffree >= ballastInodes {
		return nil
	}
	dir := filepath.Join(img, ballastDir)
	for _, name := range names(dir) {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	// ext4 hands freed blocks out again only after the next commit of its journal.
	return syncFS(img)
}

// putBallast puts back what is missing of the ballast. On a disk that has no room
// for all of it, some is better than none.
func (p *Pool) putBallast(id string) {
	if err := putBallast(filepath.Join(p.imgDir(id), ballastDir)); err != nil {
		p.log.Warn("the ballast of a full disk could not be put back in full", "sandbox", id, "step", "mount", "err", err)
	}
}

func putBallast(dir string) error {
	for i := range ballastInodes {
		f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("inode%02d", i)), os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		f.Close()
	}
	f, err := os.OpenFile(filepath.Join(dir, ballastFile), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	// Allocated, not written. By pieces: what fits is kept.
	const piece = 64 << 10
	for at := int64(0); at < ballastBytes; at += piece {
		if err := unix.Fallocate(int(f.Fd()), 0, at, piece); err != nil {
			return errors.Join(err, f.Truncate(at))
		}
	}
	return nil
}
