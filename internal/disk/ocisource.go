package disk

import (
	"archive/tar"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// here is what images have to be for.
var here = v1.Platform{OS: "linux", Architecture: goruntime.GOARCH}

// runsHere says whether a platform is this machine's. What an image leaves open counts
// as fitting.
func runsHere(p v1.Platform) bool {
	return (p.OS == "" || p.OS == here.OS) && (p.Architecture == "" || p.Architecture == here.Architecture)
}

// foreign is the answer for an image that has something for other platforms only.
func foreign(has ...v1.Platform) error {
	list := make([]string, len(has))
	for i, p := range has {
		list[i] = p.String()
	}
	slices.Sort(list)
	return fault.New(fault.Unsupported, "the image is for %s, and this machine is %s; choose one for %s",
		strings.Join(slices.Compact(list), ", "), here, here).Because("architecture")
}

// isPath tells a reference to this machine's files from the name of an image.
func isPath(ref string) bool { return strings.HasPrefix(ref, "/") || strings.HasPrefix(ref, ".") }

// archives are the ends of the names of files that images are kept in.
var archives = []string{".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst", ".oci", ".zip"}

// looksLikeFile says whether a name is more likely a file's than an image's.
func looksLikeFile(ref string) bool {
	return slices.ContainsFunc(archives, func(end string) bool { return strings.HasSuffix(strings.ToLower(ref), end) })
}

// openImage finds the image that a reference names, for this machine's CPU.
func openImage(ctx context.Context, w *work, from OCIImage) (v1.Image, error) {
	if isPath(from.Ref) {
		return localImage(ctx, w, from.Ref)
	}
	if looksLikeFile(from.Ref) {
		return nil, fault.New(fault.NotFound, "there is no file %s: give the whole path on the server's machine, which begins with /", from.Ref).Because("file")
	}
	ref, err := name.ParseReference(from.Ref)
	if err != nil {
		return nil, fault.Wrap(err, fault.InvalidArgument, "%q names no image; write it like debian:12, or a path that begins with / or ./", from.Ref)
	}
	auth := authn.Anonymous
	if from.Username != "" {
		auth = &authn.Basic{Username: from.Username, Password: from.Password}
	}
	found, err := remote.Get(ref, remote.WithContext(ctx), remote.WithPlatform(here), remote.WithAuth(auth))
	if err != nil {
		return nil, err
	}
	if !found.MediaType.IsIndex() {
		return found.Image()
	}
	index, err := found.ImageIndex()
	if err != nil {
		return nil, err
	}
	return pickImage(index)
}

// localImage opens a layout directory, or a tar of one or of `docker save`.
func localImage(ctx context.Context, w *work, path string) (v1.Image, error) {
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, fault.Wrap(err, fault.NotFound, "there is no file %s on the server's machine%s; check the path", path, otherCase(path)).Because("file")
	}
	if err != nil {
		return nil, err
	}
	if st.IsDir() {
		return layoutImage(path, path)
	}
	if isLayout, err := tarHas(path, "oci-layout"); err != nil {
		return nil, err
	} else if isLayout {
		dir := filepath.Join(w.path, "layout")
		if err := untarLayout(ctx, path, dir); err != nil {
			return nil, err
		}
		return layoutImage(dir, path)
	}
	if isSave, err := tarHas(path, "manifest.json"); err != nil {
		return nil, err
	} else if !isSave {
		return nil, fault.New(fault.InvalidArgument, "%s is no tar of an image: it has neither the oci-layout of an OCI layout nor the manifest.json of `docker save`; "+
			"write it with one of them", path).Because("no_image")
	}
	list, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(path) })
	if err != nil {
		return nil, err
	}
	if len(list) != 1 {
		return nil, fault.New(fault.InvalidArgument, "%s has %d images, and a template is made from one; write it with one image", path, len(list)).Because("no_image")
	}
	return tarball.ImageFromPath(path, nil)
}

// otherCase names a file that differs from a missing one in capital letters only.
func otherCase(path string) string {
	for _, base := range names(filepath.Dir(path)) {
		if strings.EqualFold(base, filepath.Base(path)) {
			return ", but there is " + base
		}
	}
	return ""
}

// layoutImage picks the image for this machine out of an OCI layout directory. from is
// what its user knows it by.
func layoutImage(dir, from string) (v1.Image, error) {
	if !exists(filepath.Join(dir, "index.json")) {
		missing := "it has no index.json"
		if !exists(filepath.Join(dir, "oci-layout")) {
			missing = "it has neither oci-layout nor index.json"
		}
		return nil, fault.New(fault.InvalidArgument, "%s is no OCI layout: %s; give the directory of a layout, a tar of one, or what `docker save` writes", from, missing).Because("no_image")
	}
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	return pickImage(index)
}

// pickImage finds the image for this machine in an index. An image that names no
// platform counts as fitting.
func pickImage(index v1.ImageIndex) (v1.Image, error) {
	var others []v1.Platform
	image, err := search(index, 0, &others)
	switch {
	case image != nil || err != nil:
		return image, err
	case len(others) > 0:
		return nil, foreign(others...)
	}
	return nil, fault.New(fault.InvalidArgument, "there is no image in it: its index names none; choose another").Because("no_image")
}

// search is pickImage for one index; it collects the platforms that do not fit.
func search(index v1.ImageIndex, depth int, others *[]v1.Platform) (v1.Image, error) {
	const maxDepth = 4 // an index of indexes is usual, more is not
	manifest, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	for _, d := range manifest.Manifests {
		if d.Platform != nil && !runsHere(*d.Platform) {
			if d.Platform.OS != "unknown" { // what is said about images, not images
				*others = append(*others, *d.Platform)
			}
			continue
		}
		switch {
		case d.MediaType.IsImage():
			return index.Image(d.Digest)
		case d.MediaType.IsIndex() && depth < maxDepth:
			inner, err := index.ImageIndex(d.Digest)
			if err != nil {
				return nil, err
			}
			if image, err := search(inner, depth+1, others); image != nil || err != nil {
				return image, err
			}
		}
	}
	return nil, nil
}

// tarHas says whether a tar has an entry of that name at its top.
func tarHas(path, entry string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, fault.Wrap(err, fault.InvalidArgument, "%s is no tar of an image, or a compressed one; write it with `docker save` or as an OCI layout, not compressed", path)
		}
		if filepath.Clean(h.Name) == entry {
			return true, nil
		}
	}
}

// untarLayout unpacks the tar of an OCI layout. It has plain files in a few known
// places, and nothing else is taken.
func untarLayout(ctx context.Context, path, dir string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(contextReader{ctx, f}); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := root.MkdirAll(filepath.Dir(filepath.Clean(h.Name)), 0o700); err != nil {
			return err
		}
		to, err := root.Create(filepath.Clean(h.Name))
		if err != nil {
			return err
		}
		if _, err := io.Copy(to, r); err != nil {
			to.Close()
			return err
		}
		if err := to.Close(); err != nil {
			return err
		}
	}
}

// imageError gives a kind to what registries and layouts answer.
func imageError(err error, ref string) error {
	if _, ok := errors.AsType[*fault.Fault](err); ok {
		return err
	}
	if kindOf(err) != fault.Internal { // no space, cancelled, too late
		return wrap(err, "the image %s could not be imported", ref)
	}
	if isPath(ref) {
		return localError(err, ref)
	}
	return registryError(err, ref)
}

// localError says which part of an image on this machine is missing.
func localError(err error, ref string) error {
	if missing, ok := errors.AsType[*fs.PathError](err); ok && errors.Is(err, os.ErrNotExist) {
		if _, blob, ok := strings.Cut(missing.Path, "/blobs/"); ok {
			return fault.Wrap(err, fault.DataCorrupt, "the image %s is not whole: it has no blob %s; write it anew and try again",
				ref, strings.Replace(blob, "/", ":", 1))
		}
	}
	return fault.Wrap(err, fault.DataCorrupt, "the image %s could not be read: a part of it is missing or damaged; write it anew and try again", ref)
}

// registryError says what a registry answered, or why it did not.
func registryError(err error, ref string) error {
	registry := "of the image"
	if parsed, err := name.ParseReference(ref); err == nil {
		registry = parsed.Context().RegistryStr()
	}
	if answer, ok := errors.AsType[*transport.Error](err); ok {
		status := fmt.Sprintf("%d %s", answer.StatusCode, http.StatusText(answer.StatusCode))
		switch answer.StatusCode {
		case http.StatusNotFound:
			return fault.Wrap(err, fault.NotFound, "the registry %s has no image %s; check its name and tag", registry, ref).Because("image")
		case http.StatusUnauthorized, http.StatusForbidden:
			return fault.Wrap(err, fault.PermissionDenied, "the registry %s does not give out the image %s (%s): it is private, or there is none of that name; "+
				"check its name, or give it as the tar that `docker save` writes", registry, ref, status)
		default:
			return fault.Wrap(err, fault.Unavailable, "the registry %s could not give the image %s: it answered %s; try again later", registry, ref, status)
		}
	}
	if why := unreachable(err); why != "" {
		return fault.Wrap(err, fault.Unavailable, "the image %s could not be fetched: the registry %s cannot be reached, %s; "+
			"check the image's name and this machine's network, and try again", ref, registry, why)
	}
	return fault.Wrap(err, fault.DataCorrupt, "what the registry %s gives as the image %s could not be read; try again, or choose another image", registry, ref)
}

// unreachable says in a few words why a connection failed, "" for an error that is
// not of the network.
func unreachable(err error) string {
	var why string
	var timeout net.Error
	_, unknown := errors.AsType[*net.DNSError](err)
	_, certificate := errors.AsType[*tls.CertificateVerificationError](err)
	_, authority := errors.AsType[x509.UnknownAuthorityError](err)
	_, record := errors.AsType[tls.RecordHeaderError](err)
	isNet := errors.As(err, &timeout)
	switch {
	case unknown:
		why = "its name is not known"
	case errors.Is(err, unix.ECONNREFUSED):
		why = "the connection was refused"
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		why = "there is no way to it"
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		why = "the connection broke"
	case certificate, authority:
		why = "its certificate is not trusted"
	case record, errors.Is(err, http.ErrSchemeMismatch):
		why = "it does not speak HTTPS"
	case isNet && timeout.Timeout():
		why = "it did not answer in time"
	case isNet:
		why = "the connection failed"
	default:
		return ""
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "proxyconnect" {
		return why + " (by the proxy that this machine uses)"
	}
	return why
}
