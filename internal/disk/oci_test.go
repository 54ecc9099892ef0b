package disk

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// entry is one entry of a layer.
type entry struct {
	tar.Header
	body string
}

func file(name, body string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, body}
}
func folder(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}
func symlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, ""}
}
func hardlink(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to, Mode: 0o644}, ""}
}
func special(name string, kind byte) entry {
	return entry{tar.Header{Name: name, Typeflag: kind, Mode: 0o644}, ""}
}

func layerOf(t testing.TB, entries ...entry) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.body))
		if e.ModTime.IsZero() {
			e.ModTime = time.Unix(1_600_000_000, 0)
		}
		must(t, w.WriteHeader(&e.Header))
		_, err := io.WriteString(w, e.body)
		must(t, err)
	}
	must(t, w.Close())
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	must(t, err)
	return l
}

func imageOf(t testing.TB, layers ...v1.Layer) v1.Image {
	t.Helper()
	image, err := mutate.AppendLayers(empty.Image, layers...)
	must(t, err)
	image, err = mutate.ConfigFile(image, withConfig(t, image))
	must(t, err)
	return image
}

func withConfig(t testing.TB, image v1.Image) *v1.ConfigFile {
	t.Helper()
	c, err := image.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", "amd64"
	c.Config = v1.Config{Env: []string{"A=b"}, WorkingDir: "/app", Cmd: []string{"run"}}
	return c
}

// serve runs a registry in this process and gives its address.
func serve(t testing.TB) string {
	t.Helper()
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func push(t testing.TB, host, repo string, image v1.Image) string {
	t.Helper()
	ref, err := name.ParseReference(host + "/" + repo)
	must(t, err)
	must(t, remote.Write(ref, image))
	return ref.String()
}

func pushIndex(t testing.TB, to string, index v1.ImageIndex) {
	t.Helper()
	ref, err := name.ParseReference(to)
	must(t, err)
	must(t, remote.WriteIndex(ref, index))
}

// honestLower and honestUpper are the layers of an image with everything that a
// template keeps.
func honestLower() []entry {
	suid := file("usr/bin/tool", "tool")
	suid.Mode, suid.Uid, suid.Gid = 0o4755, 12, 34
	attrs := file("etc/attrs", "x")
	attrs.PAXRecords = map[string]string{
		"SCHILY.xattr.user.note":              "kept",
		"SCHILY.xattr.trusted.overlay.opaque": "y",
		"SCHILY.xattr.security.capability":    "\x01\x00\x00\x02\x00\x20" + strings.Repeat("\x00", 14),
	}
	old := folder("var/old/")
	old.ModTime = time.Unix(1_500_000_000, 0)
	return []entry{
		folder("./"), folder("etc"), file("etc/passwd", "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\n"),
		file("etc/group", "root:x:0:\nnode:x:1000:\n"), file("etc/shadow", "root:*:1::::::"), file("etc/sudoers", "root ALL=(ALL) ALL\n"),
		suid, attrs, hardlink("usr/bin/second", "usr/bin/tool"), hardlink("usr/bin/kept", "usr/bin/tool"),
		symlink("link", "/var/real"), folder("var/real"),
		old, file("var/old/a", "a"), file("var/gone", "gone"), folder("srv/full"), file("srv/full/x", "x"),
		file("opt/was-file", "file"), folder("opt/was-dir"), file("opt/was-dir/x", "x"),
		special("dev/null", tar.TypeChar), special("var/pipe", tar.TypeFifo), symlink("abs", "/etc/passwd"),
	}
}

func honestUpper() []entry {
	return []entry{
		file("link/made", "through a link of the image"),
		file("var/.wh.gone", ""), file("srv/full/new", "new"), file("srv/full/.wh..wh..opq", ""),
		folder("opt/was-file"), file("opt/was-file/now", "dir"), file("opt/was-dir", "file"), file("implied/dir/f", "f"),
		file("usr/bin/tool", "replaced"), file(".wh..wh.aufs", ""),
	}
}

func TestImportOCI(t *testing.T) {
	t.Parallel()
	host := serve(t)
	image := imageOf(t, layerOf(t, honestLower()...), layerOf(t, honestUpper()...))
	image = asking(t, image, v1.Config{Env: []string{"A=b"}, WorkingDir: "/app", User: "node", Cmd: []string{"run"}})
	digests := map[string]string{}
	for _, format := range []string{formatEROFS, formatExt4} {
		cfg := testConfig(t)
		cfg.TemplateFormat = format
		p := open(t, cfg)
		ctx := t.Context()
		var steps []string
		ref := push(t, host, "team/app:v1", image)
		tmpl, err := p.ImportOCI(ctx, OCIImage{Ref: ref}, func(step string, done, total int64) {
			if len(steps) == 0 || steps[len(steps)-1] != step {
				steps = append(steps, step)
			}
			if total > 0 && done > total {
				t.Errorf("%s: %d of %d", step, done, total)
			}
		})
		must(t, err)
		if got := strings.Join(steps, " "); got != "manifest layers files digest image ready" {
			t.Errorf("the steps were %s", got)
		}
		again, err := p.ImportOCI(ctx, OCIImage{Ref: ref}, nil)
		must(t, err)
		if again.Digest != tmpl.Digest || !again.MadeAt.Equal(tmpl.MadeAt) {
			t.Error("the same image gave another template")
		}
		list, err := p.Templates(ctx)
		must(t, err)
		if len(list) != 1 || list[0].Digest != tmpl.Digest {
			t.Errorf("the templates are %+v", list)
		}
		d, err := image.Digest()
		must(t, err)
		if tmpl.Format != format || tmpl.Image != d.String() || tmpl.Config.WorkDir != "/app" || tmpl.Config.User != "node" || tmpl.Config.Env[0] != "A=b" {
			t.Errorf("the manifest is %+v", tmpl)
		}
		if want := (Account{Name: "node", UID: 1000, GID: 1000, Home: "/home/node", Shell: "/bin/sh"}); tmpl.Account != want {
			t.Errorf("the account is %+v", tmpl.Account)
		}
		digests[format] = tmpl.Digest
		checkImported(t, p, tmpl)
	}
	if digests[formatEROFS] != digests[formatExt4] {
		t.Error("the digest depends on the format")
	}
}

// checkImported mounts a template below a disk and looks at every kind of file.
func checkImported(t *testing.T, p *Pool, tmpl Template) {
	t.Helper()
	ctx := t.Context()
	spec := layers(t, p)
	spec.Template = tmpl.Digest
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	for name, want := range map[string]string{
		"usr/bin/tool": "replaced", "usr/bin/second": "tool", "usr/bin/kept": "tool",
		"var/old/a": "a", "srv/full/new": "new", "opt/was-file/now": "dir", "opt/was-dir": "file",
		"implied/dir/f": "f", "var/real/made": "through a link of the image",
		"etc/sudoers.d/user": "user ALL=(ALL:ALL) NOPASSWD:ALL\n", "etc/machine-id": "",
		"etc/shadow": "root:*:1::::::\nuser:*:10957:0:99999:7:::\n",
	} {
		if got := read(t, filepath.Join(root, name)); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for _, name := range []string{"var/gone", "srv/full/x", "dev/null", ".wh..wh.aufs", "opt/was-dir/x"} {
		if exists(filepath.Join(root, name)) {
			t.Errorf("%s is there", name)
		}
	}
	var st, second unix.Stat_t
	must(t, unix.Lstat(filepath.Join(root, "usr/bin/second"), &st))
	must(t, unix.Lstat(filepath.Join(root, "usr/bin/kept"), &second))
	if st.Mode != unix.S_IFREG|0o4755 || st.Uid != 12 || st.Gid != 34 || st.Mtim.Sec != 1_600_000_000 || st.Nlink != 2 || st.Ino != second.Ino {
		t.Errorf("usr/bin/second: %+v", st)
	}
	must(t, unix.Lstat(filepath.Join(root, "var/old"), &st))
	if st.Mtim.Sec != 1_500_000_000 {
		t.Errorf("var/old has the time %d", st.Mtim.Sec)
	}
	must(t, unix.Lstat(filepath.Join(root, "workspace"), &st))
	if st.Uid != 1000 || st.Gid != 1000 {
		t.Errorf("/workspace belongs to %d:%d", st.Uid, st.Gid)
	}
	value := make([]byte, 64)
	n, err := unix.Lgetxattr(filepath.Join(root, "etc/attrs"), "user.note", value)
	if err != nil || string(value[:n]) != "kept" {
		t.Errorf("user.note: %q, %v", value[:max(n, 0)], err)
	}
	n, err = unix.Lgetxattr(filepath.Join(root, "etc/attrs"), "security.capability", value)
	if err != nil || n != 20 {
		t.Errorf("security.capability: %d bytes, %v", n, err)
	}
	must(t, p.Unmount(ctx, "a"))
}

func TestOCISources(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	image := imageOf(t, layerOf(t, file("f", "x")))
	host := serve(t)
	dir := t.TempDir()

	layoutDir := filepath.Join(dir, "layout")
	l, err := layout.Write(layoutDir, empty.Index)
	must(t, err)
	must(t, l.AppendImage(image, layout.WithPlatform(v1.Platform{OS: "linux", Architecture: "s390x"})))
	foreign := layoutDir
	_, err = p.ImportOCI(ctx, OCIImage{Ref: foreign}, nil)
	wantSaid(t, err, fault.Unsupported, "linux/s390x", here.String())
	must(t, l.ReplaceImage(image, func(v1.Descriptor) bool { return true }))

	layoutTar := filepath.Join(dir, "layout.tar")
	f, err := os.Create(layoutTar)
	must(t, err)
	w := tar.NewWriter(f)
	must(t, w.AddFS(os.DirFS(layoutDir)))
	must(t, w.Close())
	must(t, f.Close())

	saved := filepath.Join(dir, "saved.tar")
	tag, err := name.NewTag("app:v1")
	must(t, err)
	must(t, tarball.WriteToFile(saved, tag, image))

	var digest string
	for _, ref := range []string{push(t, host, "app:v1", image), layoutDir, layoutTar, saved} {
		tmpl, err := p.ImportOCI(ctx, OCIImage{Ref: ref}, nil)
		if err != nil {
			t.Fatalf("%s: %v", ref, err)
		}
		if digest != "" && tmpl.Digest != digest {
			t.Errorf("%s gives another template", ref)
		}
		digest = tmpl.Digest
	}
	for ref, kind := range map[string]fault.Kind{
		"":                     fault.InvalidArgument,
		"UPPER/case":           fault.InvalidArgument,
		host + "/none:v1":      fault.NotFound,
		"/none/such":           fault.NotFound,
		"127.0.0.1:1/app:v1":   fault.Unavailable,
		"/etc/passwd":          fault.InvalidArgument,
		filepath.Dir(dir) + "": fault.InvalidArgument,
	} {
		if _, err := p.ImportOCI(ctx, OCIImage{Ref: ref}, nil); !fault.Is(err, kind) {
			t.Errorf("%q: got %v, want %s", ref, err, kind)
		}
	}
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	_, err = p.ImportOCI(stopped, OCIImage{Ref: layoutDir}, nil)
	wantKind(t, err, fault.Cancelled)
	if left := names(p.path("tmp")); len(left) > 0 {
		t.Errorf("tmp holds %v", left)
	}
}

// A layer of a layout on disk that is not what the configuration says.
func TestOCIDamagedLayer(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	dir := filepath.Join(t.TempDir(), "layout")
	l, err := layout.Write(dir, empty.Index)
	must(t, err)
	good, bad := layerOf(t, file("f", "x")), layerOf(t, file("f", "y"))
	must(t, l.AppendImage(imageOf(t, good)))
	d, err := good.Digest()
	must(t, err)
	r, err := bad.Compressed()
	must(t, err)
	b, err := io.ReadAll(r)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "blobs/sha256", d.Hex), b, 0o644))
	_, err = p.ImportOCI(t.Context(), OCIImage{Ref: dir}, nil)
	wantKind(t, err, fault.DataCorrupt)
	if list, err := p.Templates(t.Context()); err != nil || len(list) > 0 {
		t.Errorf("templates: %v, %v", list, err)
	}
}

// An image that would fill the pool is stopped on the way (D6).
func TestD6LargeImage(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	ref := onDisk(t, imageOf(t, layerOf(t, file("big", strings.Repeat("0", roomEvery+1<<20)))))
	u, err := p.Usage(ctx)
	must(t, err)
	hog, err := os.Create(p.path("hog"))
	must(t, err)
	must(t, unix.Fallocate(int(hog.Fd()), 0, 0, u.Free-u.Total/100*lowWater-32<<20))
	must(t, hog.Close())
	_, err = p.ImportOCI(ctx, OCIImage{Ref: ref}, nil)
	wantKind(t, err, fault.NoCapacity)
	if left := names(p.path("tmp")); len(left) > 0 {
		t.Errorf("tmp holds %v", left)
	}
	must(t, os.Truncate(hog.Name(), 0)) // XFS frees what is only deleted some time later
	if _, err := p.ImportOCI(ctx, OCIImage{Ref: ref}, nil); err != nil {
		t.Error(err)
	}
}

// Layers that mean harm are refused, or stay in their tree; the host is never touched.
func TestHostileLayers(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "victim"), []byte("the host's"), 0o600))
	up := strings.Repeat("../", 20)
	refused := map[string][]entry{
		"name upwards":     {file("../../victim", "x")},
		"name in between":  {file("a/../../victim", "x")},
		"link upwards":     {hardlink("x", up+outside+"/victim")},
		"link to nothing":  {hardlink("x", outside+"/victim")},
		"whiteout of ..":   {folder("a/b"), file("a/b/.wh...", "")},
		"whiteout of .":    {folder("a/b"), file("a/b/.wh..", "")},
		"block device":     {special("sda", tar.TypeBlock)},
		"device as file":   {special("etc/null", tar.TypeChar)},
		"overlay whiteout": {special("etc/gone", tar.TypeChar)},
		"file as parent":   {file("a", "x"), hardlink("b", "a/c")},
		"passwd is a pipe": {folder("etc"), special("etc/passwd", tar.TypeFifo)},
		"passwd is a dir":  {folder("etc/passwd")},
		"passwd too large": {file("etc/passwd", strings.Repeat("x", maxText+1))},
		"link loop":        {symlink("a", "b"), symlink("b", "a"), file("a/x", "x")},
	}
	for what, entries := range refused {
		_, err := p.ImportOCI(ctx, OCIImage{Ref: onDisk(t, imageOf(t, layerOf(t, entries...)))}, nil)
		if !fault.Is(err, fault.DataCorrupt) {
			t.Errorf("%s: got %v", what, err)
		}
	}
	tame := map[string][]entry{
		"absolute name":          {file(outside+"/victim", "x")},
		"absolute symlink":       {symlink("a", outside), file("a/victim", "x")},
		"symlink upwards":        {symlink("a", up+outside), file("a/victim", "x")},
		"symlink replaced":       {symlink("v", outside+"/victim"), file("v", "x")},
		"symlinked etc":          {symlink("etc", outside)},
		"symlinked passwd":       {folder("etc"), symlink("etc/passwd", outside+"/victim")},
		"symlinked workspace":    {symlink("workspace", outside)},
		"symlinked home":         {symlink("home", up+outside)},
		"whiteout of a symlink":  {symlink("a", outside), file(".wh.a", "")},
		"whiteout behind one":    {symlink("a", outside), file("a/.wh.victim", "")},
		"opaque behind one":      {symlink("a", outside), file("a/.wh..wh..opq", "")},
		"magic link":             {symlink("a", "/proc/self/root"), file("b", "x")},
		"hard link to a symlink": {symlink("a", outside+"/victim"), hardlink("b", "a"), file("b", "x")},
	}
	for what, entries := range tame {
		// What such a link leads to exists in the tree too, as it may in an image.
		entries = append([]entry{folder(outside[1:])}, entries...)
		if _, err := p.ImportOCI(ctx, OCIImage{Ref: onDisk(t, imageOf(t, layerOf(t, entries...)))}, nil); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got := names(outside); len(got) != 1 || read(t, filepath.Join(outside, "victim")) != "the host's" {
		t.Errorf("the host's directory has %v", got)
	}
	if left := names(p.path("tmp")); len(left) > 0 {
		t.Errorf("tmp holds %v", left)
	}
}

func onDisk(t testing.TB, image v1.Image) string {
	t.Helper()
	dir, err := os.MkdirTemp(t.TempDir(), "layout")
	must(t, err)
	l, err := layout.Write(dir, empty.Index)
	must(t, err)
	must(t, l.AppendImage(image))
	return dir
}
