package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

const (
	formatEROFS = "erofs"
	formatExt4  = "ext4"
)

// templateFormat says which kind of image this machine makes and mounts. A kernel
// that lists EROFS may still not mount it, so it is tried, once.
func (p *Pool) templateFormat(ctx context.Context) (string, error) {
	if p.cfg.TemplateFormat != "" {
		return p.cfg.TemplateFormat, nil
	}
	unlock, err := p.held.lock(ctx, "format/")
	if err != nil {
		return "", err
	}
	defer unlock()
	if p.format != "" {
		return p.format, nil
	}
	if err := p.tryEROFS(ctx); err != nil {
		if ctx.Err() != nil {
			return "", wrap(ctx.Err(), "EROFS could not be tried")
		}
		p.log.Warn("EROFS does not work here, templates become ext4", "step", "probe", "err", err)
		p.format = formatExt4
	} else {
		p.format = formatEROFS
	}
	return p.format, nil
}

// tryEROFS makes, mounts and unmounts an empty image.
func (p *Pool) tryEROFS(ctx context.Context) error {
	w, err := p.begin("probe")
	if err != nil {
		return err
	}
	defer p.end(w)
	tree, image, target := filepath.Join(w.path, "tree"), filepath.Join(w.path, "image"), filepath.Join(w.path, "mnt")
	if err := errors.Join(os.Mkdir(tree, 0o755), os.Mkdir(target, 0o700)); err != nil {
		return err
	}
	if err := p.makeImage(ctx, formatEROFS, tree, image, ""); err != nil {
		return err
	}
	if err := mountReadOnly(ctx, image, formatEROFS, target); err != nil {
		return err
	}
	clean := context.WithoutCancel(ctx)
	return errors.Join(unmount(clean, target), detach(clean, image))
}

// makeImage packs a tree. The name of the file system (UUID) follows the digest of
// the contents, so that each host that makes this template makes the same one.
func (p *Pool) makeImage(ctx context.Context, format, tree, image, digest string) error {
	uuid := "00000000-0000-0000-0000-000000000000"
	if digest != "" {
		d := digest[:32]
		uuid = fmt.Sprintf("%s-%s-%s-%s-%s", d[:8], d[8:12], d[12:16], d[16:20], d[20:])
	}
	if format == formatEROFS {
		// Not compressed: all sandboxes share its pages, and reading costs no CPU.
		return p.tool(ctx, "mkfs.erofs", "--quiet", "-U", uuid, image, tree)
	}
	size, inodes, err := measure(tree)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(image, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	// Inode tables and directories come on top; what is not used stays a hole.
	if err := f.Truncate(RoundSize(size + size/8 + inodes*512 + 16<<20)); err != nil {
		return err
	}
	return p.tool(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-O", diskFeatures+",^has_journal",
		"-b", "4096", "-I", "256", "-N", strconv.FormatInt(inodes+64, 10), "-m", "0", "-U", uuid,
		"-E", "lazy_itable_init=0,discard,root_owner=0:0", "-d", tree, image)
}

// measure gives the bytes, in whole blocks, and the number of a tree's files.
func measure(tree string) (size, inodes int64, err error) {
	err = filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		size += RoundSize(st.Size)
		inodes++
		return nil
	})
	return size, inodes, err
}

// needTools says early what a build will miss.
func (p *Pool) needTools(ctx context.Context, programs ...string) error {
	format, err := p.templateFormat(ctx)
	if err != nil {
		return err
	}
	for _, name := range append(programs, map[string]string{formatEROFS: "mkfs.erofs", formatExt4: "mke2fs"}[format]) {
		if _, err := p.find(name); err != nil {
			return fault.Wrap(err, fault.Unsupported, "a template cannot be made here: the program %s is missing; install its package", name).Because(name)
		}
	}
	return nil
}
