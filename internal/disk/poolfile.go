package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// maxPool caps a pool whose size nobody chose.
const maxPool = 1 << 40

// minPool is what mkfs.xfs asks for at least (300 MiB), with room for the reserve.
const minPool = 512 << 20

// mountPool brings the pool's directory up, whichever kind of pool it is.
func (p *Pool) mountPool(ctx context.Context) error {
	if err := os.Mkdir(p.dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return wrap(err, "the pool's directory could not be made")
	}
	table, err := mounts()
	if err != nil {
		return err
	}
	at := table.at(p.dir)
	if _, err := os.Stat(p.poolFile()); errors.Is(err, os.ErrNotExist) {
		if at != nil { // the operator gave the pool a partition of its own
			return p.mustReflink(p.dir)
		}
		ok, err := reflinks(p.cfg.Dir)
		if err != nil {
			return err
		}
		if ok {
			return nil
		}
		if left := names(p.dir); len(left) > 0 {
			return fault.New(fault.FailedPrecondition, "the pool in %s holds %q but lies on a file system without reflink; mount its partition or move the data directory back to where it was made", p.dir, left[0])
		}
		if err := p.makePoolFile(ctx); err != nil {
			return err
		}
	} else if err != nil {
		return wrap(err, "the pool's file could not be looked at")
	}
	device, err := attach(ctx, p.poolFile(), false)
	if err != nil {
		return err
	}
	if at != nil && at.Source == device { // an earlier process mounted it
		return p.mustReflink(p.dir)
	}
	if err := share(p.dir); err != nil {
		return err
	}
	if err := unix.Mount(device, p.dir, "xfs", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		clean := context.WithoutCancel(ctx)
		err = errors.Join(err, unmount(clean, p.dir), detach(clean, p.poolFile()))
		return fault.Wrap(err, fault.DataCorrupt, "the pool's file %s does not mount; look at the kernel's log, and repair it with xfs_repair", p.poolFile())
	}
	return p.mustReflink(p.dir)
}

// makePoolFile allocates and formats the pool's file. A crash leaves the temporary
// file, which the next attempt starts over.
func (p *Pool) makePoolFile(ctx context.Context) error {
	var st unix.Statfs_t
	if err := unix.Statfs(p.cfg.Dir, &st); err != nil {
		return wrap(err, "the free space of %s could not be read", p.cfg.Dir)
	}
	free := int64(st.Bavail) * st.Frsize
	size := p.cfg.PoolBytes
	if size == 0 {
		size = min(free/5*4, maxPool)
	}
	size -= size % blockSize
	if err := CheckPoolSize(p.cfg.Dir, size, free); err != nil {
		return err
	}
	temp := p.poolFile() + ".tmp"
	if err := p.formatPoolFile(ctx, temp, size); err != nil {
		os.Remove(temp)
		return wrap(err, "the pool's file could not be made")
	}
	if err := os.Rename(temp, p.poolFile()); err != nil {
		return wrap(err, "the pool's file could not be put in place")
	}
	p.log.Info("made the pool's file", "step", "open", "path", p.poolFile(), "bytes", size)
	return syncDir(p.cfg.Dir)
}

// CheckPoolSize says whether a pool's file of size bytes can be made in dir, where free
// bytes are free.
func CheckPoolSize(dir string, size, free int64) error {
	switch {
	case size < minPool:
		return fault.New(fault.NoCapacity, "a pool of %s in %s would be too small: it takes at least 512MiB (--pool-size)", inGB(size), dir)
	case size > free:
		return fault.New(fault.NoCapacity, "a pool of %s cannot be made in %s, where %s are free; give a smaller one with --pool-size", inGB(size), dir, inGB(free))
	}
	return nil
}

// inGB writes bytes for people, small amounts as they are.
func inGB(bytes int64) string {
	if bytes < 1e8 {
		return fmt.Sprintf("%d bytes", bytes)
	}
	return fmt.Sprintf("%.1f GB", float64(bytes)/1e9)
}

func (p *Pool) formatPoolFile(ctx context.Context, path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	// Allocated in full: a sparse pool on a host that fills up takes its disks with it.
	// Where the file system cannot do that the pool has to be sparse.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); errors.Is(err, unix.EOPNOTSUPP) {
		if err := f.Truncate(size); err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	// -K: no discard, which would punch the allocated space out again.
	if err := p.tool(ctx, "mkfs.xfs", "-q", "-f", "-K", "-m", "reflink=1", "-s", "size=4096", path); err != nil {
		return err
	}
	return f.Sync()
}

// reflinks tries a clone in a directory.
func reflinks(dir string) (bool, error) {
	temp, err := os.MkdirTemp(dir, ".reflink.")
	if err != nil {
		return false, wrap(err, "the directory %s could not be tried for reflink", dir)
	}
	defer os.RemoveAll(temp)
	src := filepath.Join(temp, "a")
	if err := os.WriteFile(src, make([]byte, blockSize), 0o600); err != nil {
		return false, wrap(err, "the directory %s could not be tried for reflink", dir)
	}
	return cloneFile(src, filepath.Join(temp, "b")) == nil, nil
}

func (p *Pool) mustReflink(dir string) error {
	ok, err := reflinks(dir)
	if err == nil && !ok {
		err = fault.New(fault.Unsupported, "what is mounted at %s has no reflink; use XFS (reflink=1) or btrfs there", dir).Because("reflink")
	}
	return err
}
