package disk

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// Template is a read-only root file system that disks are written on.
type Template struct {
	Digest string `json:"digest"` // of the version: files, Config and Account, see versionDigest
	// Contents is the digest of the files, see digestTree. Templates with the same one
	// share one image on disk. It is empty in a template that was made while the digest of
	// the files was the version; such a template stays what it is.
	Contents string      `json:"contents,omitempty"`
	Format   string      `json:"format"` // "erofs" or "ext4"; no digest depends on it
	Bytes    int64       `json:"bytes"`  // of the image
	MadeAt   time.Time   `json:"made_at"`
	Origin   string      `json:"origin"`          // "debian" or "oci"
	Ref      string      `json:"ref"`             // the suite, or the name of the OCI image
	Image    string      `json:"image,omitempty"` // digest of the OCI manifest
	Config   ImageConfig `json:"config"`
	Account  Account     `json:"account"` // whom commands and file calls run as
}

func (t Template) contents() string { return cmp.Or(t.Contents, t.Digest) }

// ImageConfig is what an image asks of those who run it.
type ImageConfig struct {
	Env        []string          `json:"env,omitempty"` // NAME=value
	WorkDir    string            `json:"work_dir,omitempty"`
	User       string            `json:"user,omitempty"` // as the image names it
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
}

// Progress hears how far a build has come: the step, and done of total in the unit
// of the step; a total of 0 is unknown. It is called by one goroutine at a time and
// holds the build up while it runs.
type Progress func(step string, done, total int64)

func (f Progress) tell(step string, done, total int64) {
	if f != nil {
		f(step, done, total)
	}
}

func (p *Pool) templateDir(digest string) string { return p.path("templates", digest) }

func (p *Pool) templateMount(digest string) string {
	return filepath.Join(p.run, "templates", digest)
}

func imageFile(format string) string { return "rootfs." + format }

// Template finds a template. NotFound where this host has none of that digest.
func (p *Pool) Template(ctx context.Context, digest string) (Template, error) {
	if err := checkDigest(digest); err != nil {
		return Template{}, err
	}
	text, err := os.ReadFile(filepath.Join(p.templateDir(digest), manifestName))
	if errors.Is(err, os.ErrNotExist) {
		return Template{}, fault.New(fault.NotFound, "there is no template %s on this host; build or import it", digest)
	}
	if err != nil {
		return Template{}, wrap(err, "the template %s could not be read", digest)
	}
	var t Template
	if err := json.Unmarshal(text, &t); err != nil {
		return Template{}, fault.Wrap(err, fault.DataCorrupt, "the manifest of template %s is damaged; build or import it again", digest)
	}
	return t, nil
}

// Templates lists the templates of this host, by digest.
func (p *Pool) Templates(ctx context.Context) ([]Template, error) {
	var list []Template
	for _, digest := range names(p.path("templates")) {
		t, err := p.Template(ctx, digest)
		if fault.Is(err, fault.NotFound) { // deleted meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, t)
	}
	return list, nil
}

// DeleteTemplate removes a template. One that is not there is deleted already.
// FailedPrecondition while a disk or a save was written on it.
func (p *Pool) DeleteTemplate(ctx context.Context, digest string) error {
	if err := checkDigest(digest); err != nil {
		return err
	}
	unlock, err := p.held.lock(ctx, "template/"+digest)
	if err != nil {
		return err
	}
	defer unlock()
	t, err := p.Template(ctx, digest)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	if err != nil && !fault.Is(err, fault.DataCorrupt) {
		return err
	}
	if user := p.writtenOn(digest); user != "" {
		return fault.New(fault.FailedPrecondition, "the template %s cannot be deleted: %s was written on it; delete that first", digest, user).Because("in_use")
	}
	if err := unmount(ctx, p.templateMount(digest)); err != nil {
		return err
	}
	if err := detach(ctx, filepath.Join(p.templateDir(digest), imageFile(t.Format))); err != nil {
		return err
	}
	if err := os.Remove(p.templateMount(digest)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return wrap(err, "the mount point of template %s could not be removed", digest)
	}
	return wrap(p.discard(p.templateDir(digest)), "the template %s could not be deleted", digest)
}

// writtenOn names a disk or a save that needs a template, "" where none does.
func (p *Pool) writtenOn(digest string) string {
	for _, pattern := range []string{"disks/*", "saves/*/*"} {
		dirs, _ := filepath.Glob(p.path(pattern)) // fails for a bad pattern only
		for _, dir := range dirs {
			if rec, err := readRecord(dir); err == nil && rec.Template == digest {
				rel, _ := filepath.Rel(p.dir, dir)
				return rel
			}
		}
	}
	return ""
}

// WrittenOn names a disk or a save that was written on a template, "" where there is none.
func (p *Pool) WrittenOn(digest string) string { return p.writtenOn(digest) }

// useTemplate mounts a template, once for all disks, and writes down in the disk's
// record that the disk needs it.
func (p *Pool) useTemplate(ctx context.Context, id string, rec record, digest string) (string, error) {
	if err := checkDigest(digest); err != nil {
		return "", err
	}
	unlock, err := p.held.lock(ctx, "template/"+digest)
	if err != nil {
		return "", err
	}
	defer unlock()
	t, err := p.Template(ctx, digest)
	if err != nil {
		return "", err
	}
	if err := p.pin(id, rec, digest); err != nil {
		return "", err
	}
	target := p.templateMount(digest)
	table, err := mounts()
	if err != nil {
		return "", err
	}
	if table.at(target) != nil {
		return target, nil
	}
	if err := os.MkdirAll(target, 0o700); err != nil {
		return "", err
	}
	image := filepath.Join(p.templateDir(digest), imageFile(t.Format))
	err = mountReadOnly(ctx, image, t.Format, target)
	if damaged(err) {
		return "", fault.Wrap(err, fault.DataCorrupt, "the image of template %s does not mount; build or import it again", digest)
	}
	return target, wrap(err, "the template %s could not be mounted", digest)
}

// mountReadOnly mounts an image file; it undoes what it did where it cannot.
func mountReadOnly(ctx context.Context, image, format, target string) error {
	device, err := attach(ctx, image, true)
	if err != nil {
		return err
	}
	if err := unix.Mount(device, target, format, unix.MS_RDONLY|diskFlags, ""); err != nil {
		return errors.Join(&os.PathError{Op: "mount", Path: image, Err: err}, detach(context.WithoutCancel(ctx), image))
	}
	return nil
}

// finishTemplate makes the image and the manifest of a finished tree, and gives the
// template its name. A template that is there already is kept, and the new tree
// dropped. w holds the tree under "tree".
func (p *Pool) finishTemplate(ctx context.Context, w *work, t Template, progress Progress) (Template, error) {
	tree := filepath.Join(w.path, "tree")
	progress.tell("digest", 0, 0)
	var err error
	if t.Contents, err = digestTree(ctx, tree); err == nil {
		t.Digest, err = versionDigest(t)
	}
	if err != nil {
		return Template{}, wrap(err, "the template's contents could not be read")
	}
	unlock, err := p.held.lock(ctx, "template/"+t.Digest)
	if err != nil {
		return Template{}, err
	}
	defer unlock()
	if have, ok := p.sameTemplate(ctx, t); ok {
		return have, nil
	}
	progress.tell("image", 0, 0)
	out := filepath.Join(w.path, "out")
	if err := os.Mkdir(out, 0o700); err != nil {
		return Template{}, wrap(err, "the template's image could not be made")
	}
	if t.Format, err = p.templateFormat(ctx); err != nil {
		return Template{}, err
	}
	image := filepath.Join(out, imageFile(t.Format))
	if !p.shareImage(ctx, t, image) {
		if err := p.makeImage(ctx, t.Format, tree, image, t.Contents); err != nil {
			return Template{}, wrap(err, "the template's image could not be made")
		}
	}
	t.Bytes, t.MadeAt = fileSize(image), time.Now().UTC().Truncate(time.Millisecond)
	text, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return Template{}, wrap(err, "the template's manifest could not be made")
	}
	if err := os.WriteFile(filepath.Join(out, manifestName), text, 0o600); err != nil {
		return Template{}, wrap(err, "the template's manifest could not be written")
	}
	if _, err := publish(out, p.templateDir(t.Digest)); err != nil {
		return Template{}, wrap(err, "the template could not be put in place")
	}
	progress.tell("ready", 1, 1)
	return t, nil
}

// sameTemplate finds the template of the same files, configuration and account, be it
// one whose name is the digest of the files alone, from before.
func (p *Pool) sameTemplate(ctx context.Context, t Template) (Template, bool) {
	if have, err := p.Template(ctx, t.Digest); err == nil {
		return have, true
	}
	old, err := p.Template(ctx, t.Contents)
	if err != nil {
		return Template{}, false
	}
	version, err := versionDigest(old)
	return old, err == nil && version == t.Digest
}

// shareImage gives a template that is being made the image of one with the same files:
// one more name of that file, which is there until its last name goes, whichever of
// the templates is deleted first. It is false where there is none to share.
func (p *Pool) shareImage(ctx context.Context, t Template, image string) bool {
	for _, digest := range names(p.path("templates")) {
		other, err := p.Template(ctx, digest)
		if err != nil || other.contents() != t.Contents || other.Format != t.Format {
			continue
		}
		from := filepath.Join(p.templateDir(digest), imageFile(other.Format))
		if fileSize(from) == other.Bytes && os.Link(from, image) == nil {
			return true
		}
	}
	return false
}
