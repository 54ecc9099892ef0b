package disk

import (
	"archive/tar"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// unpacker applies the layers of an image to a tree. Names are resolved as in a
// root of their own (tree, asRoot), so that no link leads out; a name with .. in it
// is refused, as no honest image has one.
type unpacker struct {
	*tree
	dir     string
	room    func() error         // asked every now and then whether there is space
	since   int64                // bytes written since it was asked
	times   map[string]time.Time // of directories; set in the end, as every new entry changes them
	inLayer map[string]bool      // names that the present layer has made, and those above them
}

// roomEvery is how many bytes are written between two looks at the free space.
const roomEvery = 64 << 20

// The marks of removals in a layer, see the OCI image specification, layer.md.
const (
	whiteout       = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	whiteoutMeta   = ".wh..wh." // notes of the program that made the layer
)

func newUnpacker(dir string, room func() error) (*unpacker, error) {
	t, err := openTree(dir, asRoot)
	if err != nil {
		return nil, err
	}
	return &unpacker{tree: t, dir: dir, room: room, times: map[string]time.Time{}}, nil
}

// layer applies one layer on top of what is there.
func (u *unpacker) layer(r *tar.Reader) error {
	u.inLayer = map[string]bool{}
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && kindOf(err) != fault.Internal {
			return err
		}
		if err != nil {
			return fault.Wrap(err, fault.DataCorrupt, "a layer of the image cannot be read; fetch the image again")
		}
		if err := u.entry(h, r); err != nil {
			if _, ok := errors.AsType[*fault.Fault](err); ok {
				return err
			}
			if kindOf(err) != fault.Internal {
				return err
			}
			return fault.Wrap(err, fault.DataCorrupt, "the image cannot be unpacked: %q does not fit what lies below it", h.Name)
		}
	}
}

func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	if hasDotDot(h.Name) || h.Typeflag == tar.TypeLink && hasDotDot(h.Linkname) {
		return harmful(h, "its name leads upwards")
	}
	up, base := split(h.Name)
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if strings.HasPrefix(base, whiteout) {
		return u.remove(h, up, base)
	}
	name := path.Join(up, base)
	if (h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock) && strings.HasPrefix(name, "dev/") {
		return nil
	}
	for at := name; at != "." && at != "/" && at != ""; at = path.Dir(at) {
		u.inLayer[at] = true
	}
	if base == "" { // the root itself
		u.times[""] = h.ModTime
		return nil
	}
	if err := u.spend(blockSize); err != nil { // an empty file takes space too
		return err
	}
	parent, err := u.mkdirs(up)
	if err != nil {
		return err
	}
	defer parent.Close()
	return u.create(parent, base, name, h, r)
}

// spend counts what is written, and stops an image that would fill the pool.
func (u *unpacker) spend(n int64) error {
	if u.since += n; u.since < roomEvery {
		return nil
	}
	u.since = 0
	return u.room()
}

// create makes one entry. What has the name gives way, but a directory stays for a
// directory.
func (u *unpacker) create(parent *os.File, base, name string, h *tar.Header, r io.Reader) error {
	at := int(parent.Fd())
	var st unix.Stat_t
	err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	isDir := err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
	if err == nil && (!isDir || h.Typeflag != tar.TypeDir) && h.Typeflag != tar.TypeLink {
		if err := removeAt(parent, base); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		u.times[name] = h.ModTime
		if !isDir {
			if err := unix.Mkdirat(at, base, 0o700); err != nil {
				return err
			}
		}
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.file(at, base, h, r)
	case tar.TypeSymlink:
		if err := unix.Symlinkat(h.Linkname, at, base); err != nil {
			return err
		}
	case tar.TypeLink:
		return u.link(parent, base, h)
	case tar.TypeFifo:
		if err := unix.Mknodat(at, base, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
	default:
		return harmful(h, "it is a device, or nothing that a template can have")
	}
	return u.dress(at, base, h)
}

// file writes a plain file and its attributes.
func (u *unpacker) file(at int, base string, h *tar.Header, r io.Reader) error {
	fd, err := unix.Openat(at, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), h.Name)
	defer f.Close()
	for {
		n, err := io.CopyN(f, r, roomEvery)
		if err := u.spend(n); err != nil {
			return err
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := f.Chown(h.Uid, h.Gid); err != nil {
		return err
	}
	// After the owner, whose change drops set-uid bits and capabilities.
	if err := unix.Fchmod(fd, mode(h)); err != nil {
		return err
	}
	if err := setXattrs(f, h); err != nil {
		return err
	}
	return setTime(at, base, h.ModTime)
}

// dress gives anything but a plain file its owner, mode, attributes and time.
func (u *unpacker) dress(at int, base string, h *tar.Header) error {
	if err := unix.Fchownat(at, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeSymlink {
		return setTime(at, base, h.ModTime)
	}
	if err := unix.Fchmodat(at, base, mode(h), 0); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeFifo {
		return setTime(at, base, h.ModTime)
	}
	fd, err := unix.Openat(at, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), h.Name)
	defer f.Close()
	return setXattrs(f, h)
}

// link makes a further name of a file that this layer or a lower one has made.
func (u *unpacker) link(parent *os.File, base string, h *tar.Header) error {
	up, from := split(h.Linkname)
	dir, err := u.tree.dir(up)
	if err != nil {
		return err
	}
	defer dir.Close()
	var target, there unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), from, &target, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if err := unix.Fstatat(int(parent.Fd()), base, &there, unix.AT_SYMLINK_NOFOLLOW); err == nil {
		if target.Ino == there.Ino { // a link to itself, or one that is there
			return nil
		}
		if err := removeAt(parent, base); err != nil {
			return err
		}
	}
	return unix.Linkat(int(dir.Fd()), from, int(parent.Fd()), base, 0)
}

// remove does what a whiteout says: take away a name, or all that lower layers have
// put into a directory.
func (u *unpacker) remove(h *tar.Header, up, base string) error {
	if base != whiteoutOpaque && strings.HasPrefix(base, whiteoutMeta) {
		return nil
	}
	name := strings.TrimPrefix(base, whiteout)
	if name == "" || name == "." || name == ".." {
		return harmful(h, "it would remove a directory from above")
	}
	parent, err := u.tree.dir(up)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	if base != whiteoutOpaque {
		return removeAt(parent, name)
	}
	list, err := parent.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, child := range list {
		if u.inLayer[path.Join(up, child)] {
			continue
		}
		if err := removeAt(parent, child); err != nil {
			return err
		}
	}
	return nil
}

// finish sets the times of the directories, now that nothing changes them any more.
// One that no layer describes gets a fixed time.
func (u *unpacker) finish() error {
	return filepath.WalkDir(u.dir, func(at string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		name, err := filepath.Rel(u.dir, at)
		if err != nil {
			return err
		}
		if name == "." {
			name = ""
		}
		t, ok := u.times[name]
		if !ok {
			t = stamp
		}
		return setTime(unix.AT_FDCWD, at, t)
	})
}

// removeAt removes a name and all below it, following nothing.
func removeAt(parent *os.File, base string) error {
	root, err := os.OpenRoot(fdPath(parent))
	if err != nil {
		return err
	}
	defer root.Close()
	return root.RemoveAll(base)
}

// setTime sets the time of a name itself, to whole seconds, which all formats keep.
func setTime(at int, base string, t time.Time) error {
	ts := unix.Timespec{Sec: t.Unix()}
	return unix.UtimesNanoAt(at, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

// setXattrs sets the attributes that a template keeps. Tars have them in PAX records.
func setXattrs(f *os.File, h *tar.Header) error {
	const prefix = "SCHILY.xattr."
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, prefix)
		if !ok || !keptXattr(name) {
			continue
		}
		if err := unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0); err != nil {
			return &os.PathError{Op: "fsetxattr", Path: h.Name, Err: err}
		}
	}
	return nil
}

func mode(h *tar.Header) uint32 { return uint32(h.Mode) & 0o7777 }

func hasDotDot(name string) bool {
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return true
		}
	}
	return false
}

func harmful(h *tar.Header, why string) error {
	return fault.New(fault.DataCorrupt, "the image is refused because of its entry %q: %s; use an image without it", h.Name, why)
}
