package disk

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/hutchrun/hutch/internal/fault"
)

// Config says where a pool lies.
type Config struct {
	// Dir is the data directory. It is made when it is missing.
	Dir string
	// RunDir is where the mount points go, one directory per installation, on a file
	// system that a reboot empties (/run/hutch/TAG). Dir and RunDir may contain neither
	// comma, colon nor backslash, which mean something in mount options.
	RunDir string
	// PoolBytes is the size of the pool's file in bytes. It counts when the file is
	// first made, and only where Dir's own file system has no reflink. 0 takes 80 % of
	// the free space, at most 1 TiB. The space is allocated at once.
	PoolBytes int64
	// Reserve is how many bytes are held back for saves; 0 is 5 % of the pool, less than
	// 0 is none.
	Reserve int64
	// MemoryQuota is how many bytes saved memory may take; 0 is half of the pool.
	MemoryQuota int64
	// TemplateFormat is "erofs" or "ext4". Empty tries whether the kernel mounts EROFS
	// and takes ext4 where it does not.
	TemplateFormat string
	// Tools gives the path of an outside program by its name (mkfs.xfs, mke2fs,
	// mkfs.erofs, mmdebstrap, apt-get, apt-config) where it is not the one on PATH.
	Tools map[string]string
	// Log gets what is repaired or could not be; nil drops it.
	Log *slog.Logger
}

// lowWater is the share of the pool, in percent, below which new disks and forks
// are refused (SPEC D6).
const lowWater = 10

// stopWater is the share of the pool, in percent, below which what writes has to
// wait.
const stopWater = 3

// blockSize is the unit of disk sizes, and the sector size of every loop device.
const blockSize = 4096

// Pool is an open pool.
type Pool struct {
	cfg  Config
	log  *slog.Logger
	dir  string // the pool's own root, DIR/pool
	run  string // RUN/mnt
	held keyed  // one lock per disk id, template digest, blank

	format string // what templateFormat found; under the lock "format/"

	reserveMu sync.Mutex // guards the reserve file and what follows
	borrowed  map[*Staging]int64
}

// Open makes the pool where there is none, mounts it where it is not mounted, and
// clears away what a dead process has left half made. It may be called again and
// again. Kinds: InvalidArgument (a path that cannot be used), NoCapacity (no room
// for the pool's file), DataCorrupt (the pool's file does not mount), Unsupported (a
// program or a kernel feature is missing).
func Open(ctx context.Context, cfg Config) (*Pool, error) {
	if cfg.TemplateFormat != "" && cfg.TemplateFormat != formatEROFS && cfg.TemplateFormat != formatExt4 {
		return nil, fault.New(fault.InvalidArgument, "the template format %q is not known; use %q, %q, or leave it empty", cfg.TemplateFormat, formatEROFS, formatExt4)
	}
	var err error
	if cfg.Dir, err = realDir(cfg.Dir); err != nil {
		return nil, err
	}
	if cfg.RunDir, err = realDir(cfg.RunDir); err != nil {
		return nil, err
	}
	p := at(cfg)

	// Two processes that open the same pool at once would both make its file.
	lock, err := lockFile(ctx, filepath.Join(cfg.Dir, "pool.lock"))
	if err != nil {
		return nil, wrap(err, "the pool in %s could not be locked", cfg.Dir)
	}
	defer lock.Close()

	if err := p.bring(ctx); err != nil {
		return nil, err
	}
	return p, nil
}

func at(cfg Config) *Pool {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Pool{cfg: cfg, log: cfg.Log, dir: filepath.Join(cfg.Dir, "pool"), run: filepath.Join(cfg.RunDir, "mnt")}
}

// bring does the work of Open, in the order in which each part needs the one before.
func (p *Pool) bring(ctx context.Context) error {
	if err := p.mountPool(ctx); err != nil {
		return err
	}
	for _, name := range []string{"disks", "saves", "templates", "agents", "blanks", "tmp", "trash"} {
		if err := os.Mkdir(p.path(name), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return wrap(err, "the pool's directory %s could not be made", name)
		}
	}
	if err := p.mountRun(); err != nil {
		return err
	}
	p.sweep()
	p.refill()
	return nil
}

// Close lets go of the pool. It stays mounted, and so do its disks: the sandboxes on
// them outlive this process.
func (p *Pool) Close() error { return nil }

// TakeDown removes every mount and loop device of the pool, the pool itself
// included, and keeps all bytes. Afterwards the Pool is of no use. Unavailable where
// a process still uses one of the mounts.
func (p *Pool) TakeDown(ctx context.Context) error {
	table, err := mounts()
	if err != nil {
		return err
	}
	// The last one mounted lies on top, so the table is walked backwards.
	for i := len(table) - 1; i >= 0; i-- {
		if at := table[i].Target; at == p.run || strings.HasPrefix(at, p.run+"/") {
			if err := unmount(ctx, at); err != nil {
				return err
			}
		}
	}
	loops, err := loopsUnder(p.dir + "/")
	if err != nil {
		return err
	}
	for _, l := range loops {
		if err := detach(ctx, l.Backing); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(p.run); err != nil {
		return wrap(err, "the mount points in %s could not be removed", p.run)
	}
	if table.at(p.dir) == nil {
		return nil
	}
	if err := unmount(ctx, p.dir); err != nil {
		return err
	}
	return detach(ctx, p.poolFile())
}

// Dir is the pool's root directory.
func (p *Pool) Dir() string { return p.dir }

func (p *Pool) path(elem ...string) string { return filepath.Join(append([]string{p.dir}, elem...)...) }

func (p *Pool) poolFile() string { return filepath.Join(p.cfg.Dir, "pool.img") }

// mountRun makes the directory of mount points.
func (p *Pool) mountRun() error {
	if err := os.MkdirAll(p.run, 0o700); err != nil {
		return wrap(err, "the directory of mount points could not be made")
	}
	return share(p.run)
}

// sweep removes what no living process is making any more. Nothing here is worth
// failing for: the next Open tries again.
func (p *Pool) sweep() {
	for _, name := range names(p.path("tmp")) {
		if dir := p.path("tmp", name); !lockedByOther(dir) {
			p.remove(dir)
		}
	}
	for _, name := range names(p.path("trash")) {
		p.remove(p.path("trash", name))
	}
}

// remove deletes a tree of the pool's own and logs where it cannot. Large files are
// cut first: XFS frees the space of a deleted file some time later, that of a cut one
// at once, and the next caller may need it.
func (p *Pool) remove(path string) {
	const large = 1 << 20
	_ = filepath.WalkDir(path, func(at string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // RemoveAll will say what is wrong
		}
		if fileSize(at) > large {
			_ = os.Truncate(at, 0)
		}
		return nil
	})
	if err := os.RemoveAll(path); err != nil {
		p.log.Warn("could not be removed", "step", "sweep", "path", path, "err", err)
	}
}

// discard removes a tree in two moves, so that a crash in between leaves it under
// trash and never half there under its own name.
func (p *Pool) discard(path string) error {
	if !exists(path) {
		return nil
	}
	bin, err := os.MkdirTemp(p.path("trash"), filepath.Base(path)+".")
	if err != nil {
		return err
	}
	if err := os.Rename(path, filepath.Join(bin, "it")); err != nil {
		return errors.Join(err, os.Remove(bin))
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return err
	}
	p.remove(bin)
	p.refill()
	return nil
}

// idShape keeps names to what is harmless as a path component, and leaves no room
// for the ".tmp" of a save that is being written.
var idShape = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$`)

func checkID(id string) error {
	if !idShape.MatchString(id) || id == "templates" {
		return fault.New(fault.InvalidArgument, "%q cannot name a disk; use up to 100 letters, digits, - and _", id)
	}
	return nil
}

// realDir makes a directory and gives its path without symbolic links, as the mount
// table shows it.
func realDir(dir string) (string, error) {
	if !filepath.IsAbs(dir) || strings.ContainsAny(dir, ",:\\\n") {
		return "", fault.New(fault.InvalidArgument, "the directory %q cannot hold a pool; name an absolute path without comma, colon or backslash", dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", wrap(err, "the directory %s could not be made", dir)
	}
	resolved, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return "", wrap(err, "the directory %s could not be resolved", dir)
	}
	if strings.ContainsAny(resolved, ",:\\\n") {
		return "", fault.New(fault.InvalidArgument, "the directory %q lies at %q, which cannot hold a pool; name a path without comma, colon or backslash", dir, resolved)
	}
	return resolved, nil
}
