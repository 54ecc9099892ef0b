package disk

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// The directories of a disk's own file system. A guest sees the first one only.
const (
	upperDir   = "upper"   // the overlay's upper layer
	workDir    = "work"    // the overlay's work directory
	ballastDir = "ballast" // see ballast.go
	asideDir   = "aside"   // what was taken out of the upper layer and is being removed
)

// agentName is where the agent layer has the guest agent, beneath the root.
const agentName = ".hutch"

// MountSpec names the layers below a disk.
type MountSpec struct {
	Template string // digest of the template
	Agent    string // digest of the agent layer, which lies on top of the template
}

func (p *Pool) mountDir(id string) string { return filepath.Join(p.run, id) }
func (p *Pool) imgDir(id string) string   { return filepath.Join(p.run, id, "img") }
func (p *Pool) rootDir(id string) string  { return filepath.Join(p.run, id, "root") }

// Mount brings a disk up as a root file system and gives the path of its tree. A
// disk that is mounted already stays as it is, with the agent layer that it has. A
// Mount that fails leaves nothing mounted. Kinds: NotFound (disk, template, agent
// layer), FailedPrecondition (the disk was written on another template),
// DataCorrupt (the image does not mount).
func (p *Pool) Mount(ctx context.Context, id string, spec MountSpec) (root string, err error) {
	if err := checkID(id); err != nil {
		return "", err
	}
	unlock, err := p.held.lock(ctx, id)
	if err != nil {
		return "", err
	}
	defer unlock()
	rec, err := readRecord(p.diskDir(id))
	if err != nil {
		return "", err
	}
	if rec.Template != "" && rec.Template != spec.Template {
		return "", fault.New(fault.FailedPrecondition, "the disk %s was written on template %s and cannot be mounted on %s", id, rec.Template, spec.Template).Because("template")
	}
	table, err := mounts()
	if err != nil {
		return "", err
	}
	if table.at(p.rootDir(id)) != nil {
		p.putBallast(id)
		return p.rootDir(id), nil
	}
	if err := p.mountLayers(ctx, id, rec, spec); err != nil {
		if undo := p.unmount(context.WithoutCancel(ctx), id); undo != nil {
			p.log.Warn("a failed mount could not be taken down", "sandbox", id, "step", "mount", "err", undo)
		}
		return "", wrap(err, "the disk %s could not be mounted", id)
	}
	return p.rootDir(id), nil
}

// mountLayers does the steps of Mount. Each finds what an earlier attempt has done.
func (p *Pool) mountLayers(ctx context.Context, id string, rec record, spec MountSpec) error {
	agent, err := p.agentDir(spec.Agent)
	if err != nil {
		return err
	}
	template, err := p.useTemplate(ctx, id, rec, spec.Template)
	if err != nil {
		return err
	}
	if err := p.mountImage(ctx, id); err != nil {
		return err
	}
	img := p.imgDir(id)
	if err := makeSpace(img); err != nil {
		return err
	}
	if err := p.dropAgent(id); err != nil {
		return err
	}
	if err := os.MkdirAll(p.rootDir(id), 0o700); err != nil {
		return err
	}
	// redirect_dir: without it a directory of the template cannot be renamed. The
	// others would tie the upper layer to one place, and a disk moves.
	options := strings.Join([]string{
		"lowerdir=" + agent + ":" + template,
		"upperdir=" + filepath.Join(img, upperDir),
		"workdir=" + filepath.Join(img, workDir),
		"redirect_dir=on", "index=off", "metacopy=off", "nfs_export=off", "xino=off",
	}, ",")
	if err := unix.Mount("overlay", p.rootDir(id), "overlay", diskFlags, options); err != nil {
		return fmt.Errorf("mount the overlay: %w", err)
	}
	p.putBallast(id)
	return nil
}

// diskFlags keep what a guest writes from meaning anything to the host's kernel: no
// device node opens, no set-uid bit counts. A guest's own kernel obeys the bits
// themselves. No access times, so that reading writes nothing.
const diskFlags = unix.MS_NODEV | unix.MS_NOSUID | unix.MS_NOATIME

// mountImage attaches a disk's image and mounts its file system.
func (p *Pool) mountImage(ctx context.Context, id string) error {
	table, err := mounts()
	if err != nil {
		return err
	}
	if table.at(p.imgDir(id)) != nil {
		return nil
	}
	if err := os.MkdirAll(p.imgDir(id), 0o700); err != nil {
		return err
	}
	device, err := attach(ctx, p.image(id), false)
	if err != nil {
		return err
	}
	// minixdf: statfs counts all blocks, so that df shows the size that was asked for.
	err = unix.Mount(device, p.imgDir(id), "ext4", diskFlags, "minixdf,errors=remount-ro")
	if damaged(err) {
		return fault.Wrap(err, fault.DataCorrupt, "the image of disk %s does not mount; look at the kernel's log, check it with e2fsck, or resume from a saved copy", id)
	}
	return err
}

// dropAgent takes whatever the guest has put in the agent's place out of the upper
// layer, so that the agent layer shows through and the guest boots. It is moved
// first, which is one step whatever it is; what cannot be removed then stays aside
// and costs the guest its own space.
func (p *Pool) dropAgent(id string) error {
	img, err := os.OpenRoot(p.imgDir(id))
	if err != nil {
		return err
	}
	defer img.Close()
	aside := names(filepath.Join(p.imgDir(id), asideDir))
	free := 0
	for slices.Contains(aside, strconv.Itoa(free)) {
		free++
	}
	to := strconv.Itoa(free)
	err = img.Rename(filepath.Join(upperDir, agentName), filepath.Join(asideDir, to))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, name := range append(aside, to) {
		if err := img.RemoveAll(filepath.Join(asideDir, name)); err != nil {
			p.log.Warn("what lay in the agent's place could not be removed", "sandbox", id, "step", "mount", "err", err)
		}
	}
	return nil
}

// Unmount takes a disk down: overlay, file system, loop device. All that was written
// is on the pool afterwards. A disk that is half mounted, or not at all, is fine.
// Unavailable where a process still uses it.
func (p *Pool) Unmount(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := p.held.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return p.unmount(ctx, id)
}

func (p *Pool) unmount(ctx context.Context, id string) error {
	for _, path := range []string{p.rootDir(id), p.imgDir(id)} {
		if err := unmount(ctx, path); err != nil {
			return err
		}
	}
	if err := detach(ctx, p.image(id)); err != nil {
		return err
	}
	// Only empty directories are removed: a mount that came in between keeps them.
	for _, path := range []string{p.rootDir(id), p.imgDir(id), p.mountDir(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return wrap(err, "the mount point %s could not be removed", path)
		}
	}
	return nil
}

// Sync makes all that was written to a mounted disk durable. FailedPrecondition where
// it is not mounted.
func (p *Pool) Sync(ctx context.Context, id string) error {
	img, err := p.mounted(id)
	if err != nil {
		return err
	}
	return wrap(syncFS(img), "the disk %s could not be synced", id)
}

// Trim gives the space of deleted files in a mounted disk back to the pool.
func (p *Pool) Trim(ctx context.Context, id string) error {
	img, err := p.mounted(id)
	if err != nil {
		return err
	}
	f, err := os.Open(img)
	if err != nil {
		return wrap(err, "the disk %s could not be trimmed", id)
	}
	defer f.Close()
	const fiTrim = 0xc0185879 // _IOWR('X', 121, struct fstrim_range), linux/fs.h
	// Start, length and the shortest run: shorter ones only add extents.
	request := struct{ start, length, shortest uint64 }{0, ^uint64(0), 64 << 10}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fiTrim, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return wrap(errno, "the disk %s could not be trimmed", id)
	}
	return nil
}

// worthTrim is how much there must be to give back before a save, in bytes: a trim
// tears the image into more extents, and each makes a clone slower.
const worthTrim = 64 << 20

// Tidy gives the space of deleted files in a mounted disk back to the pool where that
// is much, so that a save does not keep it. It takes 2 ms where there is nothing to
// give back, and 60 ms for 150 MiB in as many pieces. It is worth no failure.
func (p *Pool) Tidy(ctx context.Context, id string) {
	img, err := p.mounted(id)
	if err == nil {
		var st unix.Statfs_t
		if err = unix.Statfs(img, &st); err == nil && allocated(p.image(id))-int64(st.Blocks-st.Bfree)*st.Frsize >= worthTrim {
			err = p.Trim(ctx, id)
		}
	}
	if err != nil {
		p.log.Warn("the space of deleted files could not be given back", "sandbox", id, "step", "tidy", "err", err)
	}
}

// mounted gives the mount point of a disk's own file system.
func (p *Pool) mounted(id string) (string, error) {
	if err := checkID(id); err != nil {
		return "", err
	}
	table, err := mounts()
	if err != nil {
		return "", err
	}
	if table.at(p.imgDir(id)) == nil {
		return "", fault.New(fault.FailedPrecondition, "the disk %s is not mounted", id).Because("not_mounted")
	}
	return p.imgDir(id), nil
}

// syncMounted syncs a disk where it is mounted.
func (p *Pool) syncMounted(id string) error {
	img, err := p.mounted(id)
	if fault.Is(err, fault.FailedPrecondition) {
		return nil
	}
	if err != nil {
		return err
	}
	return syncFS(img)
}

// pin writes down the template that a disk is written on.
func (p *Pool) pin(id string, rec record, digest string) error {
	if rec.Template == digest {
		return nil
	}
	rec.Template = digest
	text, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(p.diskDir(id), recordName), text)
}
