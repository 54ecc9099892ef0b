package disk

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"
)

// asking gives an image another configuration.
func asking(t testing.TB, image v1.Image, config v1.Config) v1.Image {
	t.Helper()
	image, err := mutate.Config(image, config)
	must(t, err)
	return image
}

func imported(t testing.TB, p *Pool, image v1.Image) Template {
	t.Helper()
	tmpl, err := p.ImportOCI(t.Context(), OCIImage{Ref: onDisk(t, image)}, nil)
	must(t, err)
	return tmpl
}

func inode(t testing.TB, p *Pool, tmpl Template) (ino, links uint64) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(p.templateDir(tmpl.Digest), imageFile(tmpl.Format)), &st))
	return st.Ino, uint64(st.Nlink)
}

// F7, E5: images with the same files and other settings are versions of their own, each
// with its settings. They share one image, which outlives the deletion of either.
func TestF7VersionHasConfig(t *testing.T) {
	t.Parallel()
	for _, format := range []string{formatEROFS, formatExt4} {
		cfg := testConfig(t)
		cfg.TemplateFormat = format
		p := open(t, cfg)
		ctx := t.Context()
		files := imageOf(t, layerOf(t, folder("app"), folder("srv"), file("f", "x"), file("large", strings.Repeat("x", 1<<20))))
		first := imported(t, p, asking(t, files, v1.Config{Env: []string{"A=1"}, WorkingDir: "/app"}))
		seen := map[string]bool{first.Digest: true}
		for what, c := range map[string]v1.Config{
			"env":     {Env: []string{"A=2"}, WorkingDir: "/app"},
			"workdir": {Env: []string{"A=1"}, WorkingDir: "/srv"},
			"cmd":     {Env: []string{"A=1"}, WorkingDir: "/app", Cmd: []string{"run"}},
			"nothing": {},
		} {
			tmpl := imported(t, p, asking(t, files, c))
			if seen[tmpl.Digest] {
				t.Errorf("another %s is no version of its own", what)
			}
			seen[tmpl.Digest] = true
			if tmpl.Contents != first.Contents {
				t.Errorf("%s: the same files have the digest %s", what, tmpl.Contents)
			}
			if tmpl.Config.WorkDir != c.WorkingDir || len(tmpl.Config.Env) != len(c.Env) || len(c.Env) > 0 && tmpl.Config.Env[0] != c.Env[0] {
				t.Errorf("%s: the version has %+v", what, tmpl.Config)
			}
		}
		second := imported(t, p, asking(t, files, v1.Config{Env: []string{"A=2"}, WorkingDir: "/app"}))
		if !seen[second.Digest] {
			t.Error("the same image again is another version")
		}
		ino, links := inode(t, p, first)
		if other, _ := inode(t, p, second); other != ino || links != uint64(len(seen)) {
			t.Errorf("the versions have the inodes %d and %d, of %d names", ino, other, links)
		}
		r, err := p.Report(ctx)
		must(t, err)
		var sum int64
		for _, u := range r.Templates {
			sum += u.Bytes
		}
		if one := treeBytes(p.templateDir(first.Digest)); sum >= 2*one {
			t.Errorf("%d templates that share an image take %d, one takes %d", len(r.Templates), sum, one)
		}

		// Both run at once; one goes, and the other does not feel it.
		spec := layers(t, p)
		mount := func(id string, tmpl Template) {
			t.Helper()
			spec.Template = tmpl.Digest
			must(t, p.Create(ctx, id, testSize))
			root, err := p.Mount(ctx, id, spec)
			must(t, err)
			if got := read(t, filepath.Join(root, "f")); got != "x" {
				t.Errorf("%s shows %q", id, got)
			}
		}
		mount("a", first)
		mount("b", second)
		must(t, p.Unmount(ctx, "a"))
		must(t, p.Delete(ctx, "a"))
		must(t, p.DeleteTemplate(ctx, first.Digest))
		if got := read(t, filepath.Join(p.rootDir("b"), "f")); got != "x" {
			t.Errorf("after the other version is gone it shows %q", got)
		}
		must(t, p.Unmount(ctx, "b"))
		mount("c", second)
		must(t, p.Unmount(ctx, "c"))
	}
}

// A build that dies with the shared image in its work leaves the image to its owner.
func TestSharedImageCrash(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	p := open(t, cfg)
	spec := layers(t, p)
	tmpl, err := p.Template(t.Context(), spec.Template)
	must(t, err)
	w, err := p.begin("oci")
	must(t, err)
	if !p.shareImage(t.Context(), tmpl, filepath.Join(w.path, "image")) {
		t.Fatal("the image is not shared")
	}
	must(t, w.lock.Close()) // as the end of the process does
	must(t, second(Open(t.Context(), cfg)))
	if _, links := inode(t, p, tmpl); links != 1 || len(names(p.path("tmp"))) > 0 {
		t.Errorf("the image has %d names; tmp holds %v", links, names(p.path("tmp")))
	}
	must(t, p.Create(t.Context(), "a", testSize))
	must(t, second(p.Mount(t.Context(), "a", spec)))
}

// A template that was made while its files alone were its version stays valid: the same
// image finds it, another configuration shares its image.
func TestOldVersions(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	files := imageOf(t, layerOf(t, file("f", "x")))
	old := imported(t, p, files)
	made := p.templateDir(old.Digest)
	old.Digest, old.Contents = old.Contents, ""
	text, err := json.Marshal(old)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(made, manifestName), text, 0o600))
	must(t, os.Rename(made, p.templateDir(old.Digest)))

	if same := imported(t, p, files); same.Digest != old.Digest {
		t.Errorf("the same image is the version %s now, and was %s", same.Digest, old.Digest)
	}
	other := imported(t, p, asking(t, files, v1.Config{Env: []string{"A=other"}, WorkingDir: "/app"}))
	if other.Digest == old.Digest || other.Config.Env[0] != "A=other" {
		t.Errorf("the other image is %+v", other)
	}
	a, _ := inode(t, p, old)
	if b, _ := inode(t, p, other); a != b {
		t.Error("the image is not shared")
	}
	spec := layers(t, p)
	spec.Template = old.Digest
	must(t, p.Create(ctx, "a", testSize))
	must(t, second(p.Mount(ctx, "a", spec)))
}
