package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Kinds of a Thing.
const (
	KindMount = "mount"
	KindLoop  = "loop"
	KindFile  = "file" // a file or a directory that is half made, or is being removed
	KindDisk  = "disk" // a whole disk
	KindSave  = "save" // a committed save
)

// OwnerPool owns what serves all disks: the pool's own mount and device, templates.
const OwnerPool = "pool"

// Thing is one thing that a pool has in the kernel or on disk.
type Thing struct {
	Kind  string
	Name  string    // the path, or the device
	Owner string    // id of the disk or the save; OwnerPool; "" for nobody
	Since time.Time // of a file: when it was last changed
	What  string    // of a device: the file that it serves
}

// Peek gives a pool as it is found, beside the process that uses it: nothing is made,
// mounted or cleared away. Made, Show, Things, Clear, Report and TakeDown may be called
// on it. The data directory may be gone: then only what the kernel still has is found.
func Peek(cfg Config) *Pool {
	for _, dir := range []*string{&cfg.Dir, &cfg.RunDir} {
		if real, err := filepath.EvalSymlinks(*dir); err == nil {
			*dir = real
		}
	}
	cfg.Reserve = -1 // the reserve belongs to the process that uses the pool
	return at(cfg)
}

// Made says whether there is a pool: Open would use it and not make one.
func (p *Pool) Made() bool { return exists(p.poolFile()) || len(names(p.dir)) > 0 }

// Show mounts a pool that Peek has given where it is not mounted, so that what lies in
// it shows, and does nothing else. There must be one (Made).
func (p *Pool) Show(ctx context.Context) error { return p.mountPool(ctx) }

// Things lists all that the pool has, what lies on top first. It reads and changes
// nothing. What a living process is making is not listed.
func (p *Pool) Things(ctx context.Context) ([]Thing, error) {
	table, err := mounts()
	if err != nil {
		return nil, err
	}
	devices, err := loops(func(backing string) bool {
		return strings.HasPrefix(backing, p.dir+"/") || strings.TrimSuffix(backing, deletedMark) == p.poolFile()
	})
	if err != nil {
		return nil, err
	}
	var list []Thing
	for i := len(table) - 1; i >= 0; i-- {
		if m := table[i]; m.Target == p.dir || m.Target == p.run || strings.HasPrefix(m.Target, p.run+"/") {
			list = append(list, Thing{Kind: KindMount, Name: m.Target, Owner: p.mountOwner(m.Target)})
		}
	}
	for _, l := range devices {
		list = append(list, Thing{Kind: KindLoop, Name: l.Device, Owner: p.fileOwner(l.Backing), What: l.Backing})
	}
	list = append(list, p.files()...)
	return list, wrap(ctx.Err(), "the pool could not be looked through")
}

// deletedMark ends the name of a device's file that has been deleted.
const deletedMark = " (deleted)"

func (p *Pool) mountOwner(target string) string {
	rel, ok := strings.CutPrefix(target, p.run+"/")
	if !ok {
		return OwnerPool
	}
	id, rest, _ := strings.Cut(rel, "/")
	if id == "templates" {
		return p.templateOwner(rest)
	}
	return id
}

func (p *Pool) templateOwner(digest string) string {
	if digest != "" && exists(p.templateDir(digest)) {
		return OwnerPool
	}
	return ""
}

// fileOwner says whose file a device serves.
func (p *Pool) fileOwner(backing string) string {
	if strings.HasSuffix(backing, deletedMark) {
		return ""
	}
	rel, ok := strings.CutPrefix(backing, p.dir+"/")
	if !ok {
		return OwnerPool
	}
	switch part := strings.Split(rel, "/"); part[0] {
	case "disks", "saves":
		return part[1]
	case "templates":
		return p.templateOwner(part[1])
	case "tmp":
		if lockedByOther(p.path("tmp", part[1])) {
			return OwnerPool
		}
	}
	return ""
}

// files lists what lies in the pool and beside it.
func (p *Pool) files() []Thing {
	var list []Thing
	add := func(kind, path, owner string) {
		if st, err := os.Lstat(path); err == nil {
			list = append(list, Thing{Kind: kind, Name: path, Owner: owner, Since: st.ModTime()})
		}
	}
	for _, name := range names(p.path("tmp")) {
		if path := p.path("tmp", name); !lockedByOther(path) {
			add(KindFile, path, "")
		}
	}
	for _, name := range names(p.path("trash")) {
		add(KindFile, p.path("trash", name), "")
	}
	for _, id := range names(p.path("disks")) {
		add(KindDisk, p.diskDir(id), id)
	}
	for _, id := range names(p.path("saves")) {
		for _, name := range names(p.path("saves", id)) {
			kind := KindFile
			if _, committed, ok := parseSave(name); ok && committed {
				kind = KindSave
			}
			add(kind, p.path("saves", id, name), id)
		}
	}
	for _, id := range names(p.run) {
		if id != "templates" {
			add(KindFile, p.mountDir(id), id)
		}
	}
	add(KindFile, p.poolFile()+".tmp", "")
	return list
}

// Clear removes a thing that Things has listed and that nobody owns. It may be gone
// already. Unavailable where a process still uses it.
func (p *Pool) Clear(ctx context.Context, t Thing) error {
	switch {
	case t.Kind == KindMount:
		return unmount(ctx, t.Name)
	case t.Kind == KindLoop:
		return detach(ctx, t.What)
	case strings.HasPrefix(t.Name, p.run+"/"):
		// Only what is empty goes: a mount that came in between stays.
		for _, dir := range []string{filepath.Join(t.Name, "root"), filepath.Join(t.Name, "img"), t.Name} {
			if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
				return wrap(err, "the mount point %s could not be removed", dir)
			}
		}
		return nil
	case t.Kind == KindDisk:
		return p.Delete(ctx, t.Owner)
	case strings.HasPrefix(t.Name, p.path("saves")+"/"):
		err := p.discard(t.Name)
		if err == nil {
			err = unix.Rmdir(filepath.Dir(t.Name)) // with the last save of its id
		}
		if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.ENOENT) {
			err = nil
		}
		return wrap(err, "%s could not be removed", t.Name)
	}
	return wrap(os.RemoveAll(t.Name), "%s could not be removed", t.Name)
}
