package disk

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"

	"github.com/hutchrun/hutch/internal/fault"
)

// OCIImage names an image to make a template of.
type OCIImage struct {
	// Ref is a name in a registry (debian:12, registry.example.com/image@sha256:…), or a path
	// that begins with / or ./: an OCI layout directory, or a tar of one, or what
	// `docker save` writes.
	Ref string
	// Username and Password are for the registry; without them it is asked as anybody.
	Username, Password string
}

// ImportOCI makes a template of an OCI image: its layers one on the other, with
// owners, modes, times, hard links, a user's extended attributes and file
// capabilities. Device nodes are left out of /dev, which every sandbox has its own
// of, and refused elsewhere. The same image gives the same template. Kinds:
// InvalidArgument (a reference that is none, a file or directory that is no image, a
// user that the image does not have), NotFound (no such image), Unsupported (none for
// this machine's CPU), PermissionDenied (the registry refuses), Unavailable (it cannot
// be reached), DataCorrupt (a part is missing or damaged, or means harm), NoCapacity.
func (p *Pool) ImportOCI(ctx context.Context, from OCIImage, progress Progress) (Template, error) {
	if err := p.needTools(ctx); err != nil {
		return Template{}, err
	}
	if err := p.room(ctx, ForNew); err != nil {
		return Template{}, err
	}
	w, err := p.begin("oci")
	if err != nil {
		return Template{}, err
	}
	defer p.end(w)
	progress.tell("manifest", 0, 0)
	image, err := openImage(ctx, w, from)
	if err != nil {
		return Template{}, imageError(err, from.Ref)
	}
	t := Template{Origin: "oci", Ref: from.Ref}
	if t.Config, t.Image, err = imageConfig(image); err != nil {
		return Template{}, imageError(err, from.Ref)
	}
	tree := filepath.Join(w.path, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return Template{}, wrap(err, "the image %s could not be unpacked", from.Ref)
	}
	if err := p.unpack(ctx, image, tree, progress); err != nil {
		return Template{}, imageError(err, from.Ref)
	}
	progress.tell("files", 0, 0)
	if t.Account, err = prepareTree(tree, t.Config.WorkDir, t.Config.User); err != nil {
		if _, ok := errors.AsType[*fault.Fault](err); ok {
			return Template{}, err
		}
		return Template{}, fault.Wrap(err, fault.DataCorrupt, "the image %s cannot become a template: what every sandbox needs could not be added to it", from.Ref)
	}
	return p.finishTemplate(ctx, w, t, progress)
}

// unpack puts an image's layers one on the other, the lowest first.
func (p *Pool) unpack(ctx context.Context, image v1.Image, dir string, progress Progress) error {
	layers, err := image.Layers()
	if err != nil {
		return err
	}
	file, err := image.ConfigFile()
	if err != nil {
		return err
	}
	if len(file.RootFS.DiffIDs) != len(layers) {
		return fault.New(fault.DataCorrupt, "the image has %d layers and describes %d; fetch it again", len(layers), len(file.RootFS.DiffIDs))
	}
	var done, total int64
	sizes := make([]int64, len(layers))
	for i, l := range layers {
		if sizes[i], err = l.Size(); err != nil {
			return err
		}
		total += sizes[i]
	}
	u, err := newUnpacker(dir, func() error { return p.room(ctx, ForNew) })
	if err != nil {
		return err
	}
	defer u.Close()
	for i, l := range layers {
		progress.tell("layers", done, total)
		if err := unpackLayer(ctx, u, l, file.RootFS.DiffIDs[i]); err != nil {
			return err
		}
		done += sizes[i]
	}
	progress.tell("layers", done, total)
	return u.finish()
}

// unpackLayer checks the bytes of a layer against the image's configuration (want)
// while it unpacks them: a layout on disk has nobody else who does.
func unpackLayer(ctx context.Context, u *unpacker, layer v1.Layer, want v1.Hash) error {
	stream, err := layer.Uncompressed()
	if err != nil {
		return err
	}
	defer stream.Close()
	sum := sha256.New()
	bytes := io.TeeReader(contextReader{ctx, stream}, sum)
	if err := u.layer(tar.NewReader(bytes)); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, bytes); err != nil { // what follows the last entry
		return err
	}
	if want.Algorithm != "sha256" || hex.EncodeToString(sum.Sum(nil)) != want.Hex {
		return fault.New(fault.DataCorrupt, "the layer %s of the image is damaged; fetch the image again", want)
	}
	return nil
}

// contextReader ends a read when its context does.
type contextReader struct {
	ctx context.Context
	io.Reader
}

func (r contextReader) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(b)
}

// imageConfig gives what an image asks of those who run it, and the digest of its
// manifest.
func imageConfig(image v1.Image) (ImageConfig, string, error) {
	digest, err := image.Digest()
	if err != nil {
		return ImageConfig{}, "", err
	}
	file, err := image.ConfigFile()
	if err != nil {
		return ImageConfig{}, "", err
	}
	if err := configMatches(image); err != nil {
		return ImageConfig{}, "", err
	}
	// A layout need not say in its index what the image itself says.
	if is := (v1.Platform{OS: file.OS, Architecture: file.Architecture}); !runsHere(is) {
		return ImageConfig{}, "", foreign(is)
	}
	c := file.Config
	return ImageConfig{
		Env: c.Env, WorkDir: c.WorkingDir, User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels,
	}, digest.String(), nil
}

// configMatches checks the configuration, which has the digests of the layers,
// against the manifest, which has its own.
func configMatches(image v1.Image) error {
	manifest, err := image.Manifest()
	if err != nil {
		return err
	}
	have, err := partial.ConfigName(image)
	if err != nil {
		return err
	}
	if manifest.Config.Digest != have {
		return fault.New(fault.DataCorrupt, "the configuration of the image is damaged; fetch the image again")
	}
	return nil
}
