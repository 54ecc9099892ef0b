package disk

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// Limits of a disk's size in bytes. The smallest one holds ext4, its journal and the
// ballast with some room left.
const (
	MinSize int64 = 64 << 20
	MaxSize int64 = 16 << 40
)

// Source names what a disk is cloned from: a disk, or the disk of a saved copy.
type Source struct {
	Disk       string `json:"disk,omitempty"`
	Save       string `json:"save,omitempty"`
	Generation int64  `json:"generation,omitempty"` // of the save
}

// FromDisk is a disk as it is at the instant of the clone, mounted or not.
func FromDisk(id string) Source { return Source{Disk: id} }

// FromSave is the disk of a committed save.
func FromSave(id string, generation int64) Source { return Source{Save: id, Generation: generation} }

// record is disk.json, which lies beside an image.
type record struct {
	Size     int64   `json:"size"`               // of the image in bytes
	Template string  `json:"template,omitempty"` // digest; what the upper layer was written on
	Origin   *Source `json:"origin,omitempty"`   // what it was cloned from
}

// Info is what there is to know about a disk or the disk of a save.
type Info struct {
	Size      int64  // bytes, the hard limit
	Allocated int64  // bytes in the pool, those shared with clones included
	Extents   int    // a clone takes longer the more there are: 20,000 take 0.3 s
	Template  string // digest, "" before the first mount
}

const imageName, recordName = "disk.img", "disk.json"

func (p *Pool) diskDir(id string) string { return p.path("disks", id) }
func (p *Pool) image(id string) string   { return filepath.Join(p.diskDir(id), imageName) }

// RoundSize gives the size that a disk of size bytes gets: the next whole number of
// 4 KiB blocks.
func RoundSize(size int64) int64 { return (size + blockSize - 1) / blockSize * blockSize }

// Create makes an empty disk. The same call again finds it made. Kinds:
// InvalidArgument (id, size), NoCapacity, Conflict (the id names another disk).
func (p *Pool) Create(ctx context.Context, id string, size int64) error {
	if err := checkID(id); err != nil {
		return err
	}
	if size < MinSize || size > MaxSize {
		return fault.New(fault.InvalidArgument, "a disk cannot have %d bytes; choose %d to %d", size, MinSize, MaxSize)
	}
	want := record{Size: RoundSize(size)}
	return p.make(ctx, id, ForNew, want, func(dst string) error {
		blank, err := p.blank(ctx, want.Size)
		if err != nil {
			return err
		}
		return cloneFile(blank, dst)
	})
}

// CloneTo makes a disk from another one at one instant, without stopping it: what a
// mounted source has not written out yet is written first. The same call again finds
// it made. Kinds: NotFound (the source), NoCapacity, Conflict (the id names another
// disk).
func (p *Pool) CloneTo(ctx context.Context, src Source, id string, use Use) error {
	if err := checkID(id); err != nil {
		return err
	}
	dir, want, err := p.source(src)
	if err != nil {
		return err
	}
	want.Origin = &src
	return p.make(ctx, id, use, want, func(dst string) error { return p.cloneImage(src, dir, dst) })
}

// make is Create and CloneTo: fill gets the path at which to make the image.
func (p *Pool) make(ctx context.Context, id string, use Use, want record, fill func(dst string) error) error {
	unlock, err := p.held.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if have, err := readRecord(p.diskDir(id)); err == nil {
		return same(id, have, want)
	} else if !fault.Is(err, fault.NotFound) {
		return err
	}
	if err := p.room(ctx, use); err != nil {
		return err
	}
	w, err := p.begin("disk")
	if err != nil {
		return err
	}
	defer p.end(w)
	dir, err := fillDir(w, want, fill)
	if err == nil {
		_, err = publish(dir, p.diskDir(id)) // under the lock of the id nobody else makes it
	}
	return wrap(err, "the disk %s could not be made", id)
}

// same says whether a disk that is there is the one that was asked for.
func same(id string, have, want record) error {
	origin := func(r record) Source {
		if r.Origin == nil {
			return Source{}
		}
		return *r.Origin
	}
	if have.Size != want.Size || origin(have) != origin(want) {
		return fault.New(fault.Conflict, "the id %s names another disk, of %d bytes; choose another id or delete that one", id, have.Size)
	}
	return nil
}

// Replace puts a clone of a source in the place of a disk that is not mounted (or
// makes it, where there is none). A crash leaves the old disk or the new one. Kinds:
// NotFound (the source), FailedPrecondition (the disk is mounted).
func (p *Pool) Replace(ctx context.Context, src Source, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := p.held.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := p.mustBeUnused(id); err != nil {
		return err
	}
	from, rec, err := p.source(src)
	if err != nil {
		return err
	}
	rec.Origin = &src
	if old, err := readRecord(p.diskDir(id)); err == nil {
		rec.Origin = old.Origin // it stays the disk that Create or CloneTo has made
	}
	w, err := p.begin("disk")
	if err != nil {
		return err
	}
	defer p.end(w)
	dir, err := fillDir(w, rec, func(dst string) error { return p.cloneImage(src, from, dst) })
	if err == nil {
		err = exchange(dir, p.diskDir(id))
	}
	return wrap(err, "the disk %s could not be replaced", id)
}

// exchange gives a finished directory its final name and takes away what had it.
func exchange(from, to string) error {
	if fresh, err := publish(from, to); err != nil || fresh {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE); err != nil {
		return err
	}
	return syncDir(filepath.Dir(to))
}

// fillDir makes a disk's directory inside a work directory.
func fillDir(w *work, rec record, fill func(dst string) error) (string, error) {
	dir := filepath.Join(w.path, "disk")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	if err := fill(filepath.Join(dir, imageName)); err != nil {
		return "", err
	}
	return dir, writeRecord(dir, rec)
}

// writeRecord writes disk.json into a directory that is still being made.
func writeRecord(dir string, rec record) error {
	text, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, recordName), text, 0o600)
}

// Delete removes a disk. One that is not there is deleted already. FailedPrecondition
// while it is mounted.
func (p *Pool) Delete(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := p.held.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if !exists(p.diskDir(id)) {
		return nil
	}
	if err := p.mustBeUnused(id); err != nil {
		return err
	}
	return wrap(p.discard(p.diskDir(id)), "the disk %s could not be deleted", id)
}

// Stat looks at a disk. NotFound where there is none.
func (p *Pool) Stat(ctx context.Context, id string) (Info, error) {
	if err := checkID(id); err != nil {
		return Info{}, err
	}
	return statImage(p.diskDir(id))
}

func statImage(dir string) (Info, error) {
	rec, err := readRecord(dir)
	if err != nil {
		return Info{}, err
	}
	f, err := os.Open(filepath.Join(dir, imageName))
	if err != nil {
		return Info{}, wrap(err, "the image in %s could not be opened", dir)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return Info{}, wrap(err, "the image in %s could not be looked at", dir)
	}
	count, err := extents(f)
	if err != nil {
		return Info{}, wrap(err, "the extents of the image in %s could not be counted", dir)
	}
	return Info{Size: st.Size, Allocated: st.Blocks * statBlock, Extents: count, Template: rec.Template}, nil
}

// source finds the directory that a clone is taken from.
func (p *Pool) source(src Source) (dir string, rec record, err error) {
	switch {
	case src.Disk != "" && src.Save == "":
		if err := checkID(src.Disk); err != nil {
			return "", record{}, err
		}
		dir = p.diskDir(src.Disk)
	case src.Save != "" && src.Disk == "":
		if err := checkID(src.Save); err != nil {
			return "", record{}, err
		}
		dir = p.saveDir(src.Save, src.Generation)
	default:
		return "", record{}, fault.New(fault.InvalidArgument, "a clone needs one source; name a disk or a save")
	}
	rec, err = readRecord(dir)
	return dir, rec, err
}

// cloneImage clones the image in a source's directory. A disk that is mounted is
// synced first, so that the clone has every finished write. It is never frozen
// (FIFREEZE): a freeze with a paused sandbox on it deadlocks.
func (p *Pool) cloneImage(src Source, dir, dst string) error {
	if src.Disk != "" {
		if err := p.syncMounted(src.Disk); err != nil {
			return err
		}
	}
	err := cloneFile(filepath.Join(dir, imageName), dst)
	if errors.Is(err, os.ErrNotExist) {
		return fault.Wrap(err, fault.NotFound, "the disk to clone was deleted meanwhile")
	}
	return err
}

// mustBeUnused refuses what would pull a disk from under a sandbox.
func (p *Pool) mustBeUnused(id string) error {
	found, err := loopsOf(p.image(id))
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return fault.New(fault.FailedPrecondition, "the disk %s is mounted; unmount it first", id).Because("mounted")
	}
	return nil
}

// readRecord reads disk.json. NotFound where there is no disk.
func readRecord(dir string) (record, error) {
	text, err := os.ReadFile(filepath.Join(dir, recordName))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return record{}, fault.Wrap(err, fault.NotFound, "there is no disk %s on this host", filepath.Base(dir))
	}
	if err != nil {
		return record{}, wrap(err, "the record of the disk %s could not be read", filepath.Base(dir))
	}
	var rec record
	if err := json.Unmarshal(text, &rec); err != nil {
		return record{}, fault.Wrap(err, fault.DataCorrupt, "the record %s is damaged; restore it from a clone of the same disk", filepath.Join(dir, recordName))
	}
	return rec, nil
}

// blank gives an empty formatted image of a size, made at its first use.
func (p *Pool) blank(ctx context.Context, size int64) (string, error) {
	path := p.path("blanks", strconv.FormatInt(size, 10)+".img")
	unlock, err := p.held.lock(ctx, path)
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(path) {
		return path, nil
	}
	w, err := p.begin("blank")
	if err != nil {
		return "", err
	}
	defer p.end(w)
	temp := filepath.Join(w.path, imageName)
	if err := p.formatDisk(ctx, w, temp, size); err != nil {
		return "", wrap(err, "an empty disk of %d bytes could not be formatted", size)
	}
	if err := syncDir(temp); err != nil {
		return "", wrap(err, "an empty disk of %d bytes could not be written", size)
	}
	if err := os.Rename(temp, path); err != nil {
		return "", wrap(err, "an empty disk of %d bytes could not be put in place", size)
	}
	return path, wrap(syncDir(filepath.Dir(path)), "an empty disk of %d bytes could not be put in place", size)
}

// diskFeatures are those of ext4 that every kernel and e2fsprogs of the last ten
// years has, named in full so that a disk does not depend on a host's mke2fs.conf.
const diskFeatures = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum"

// formatDisk makes an image with the directories that Mount expects in it.
func (p *Pool) formatDisk(ctx context.Context, w *work, path string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return err
	}
	tree := filepath.Join(w.path, "tree")
	for _, name := range []string{upperDir, workDir, ballastDir, asideDir} {
		if err := os.MkdirAll(filepath.Join(tree, name), 0o755); err != nil {
			return err
		}
	}
	// The file is a hole, so inode tables and journal are zero already and need no
	// writing, now (lazy) or later (discard tells mke2fs that they are).
	journal := min(max(size>>20/64, 4), 32) // MiB; the smallest one is 1,024 blocks
	return p.tool(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-O", diskFeatures,
		"-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-J", "size="+strconv.FormatInt(journal, 10),
		"-E", "lazy_itable_init=0,lazy_journal_init=1,discard,root_owner=0:0", "-d", tree, path)
}
