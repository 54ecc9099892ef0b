package disk

import (
	"archive/tar"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/hutchrun/hutch/internal/fault"
)

// wantSaid wants an error of a kind whose public message has all the words.
func wantSaid(t testing.TB, err error, kind fault.Kind, words ...string) {
	t.Helper()
	if !fault.Is(err, kind) {
		t.Errorf("got %v, want kind %s", err, kind)
		return
	}
	for _, w := range words {
		if !strings.Contains(fault.Of(err).Message, w) {
			t.Errorf("%q does not say %q", fault.Of(err).Message, w)
		}
	}
}

func forPlatform(t testing.TB, image v1.Image, p v1.Platform) v1.Image {
	t.Helper()
	c, err := image.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.OS, c.Architecture = p.OS, p.Architecture
	image, err = mutate.ConfigFile(image, c)
	must(t, err)
	return image
}

// An image for another machine is refused before it is unpacked, wherever it says so.
func TestForeignImage(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	image := imageOf(t, layerOf(t, file("f", "x")))
	alien := v1.Platform{OS: "linux", Architecture: "riscv64"}
	windows := v1.Platform{OS: "windows", Architecture: here.Architecture}
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
		Add: forPlatform(t, image, alien), Descriptor: v1.Descriptor{Platform: &alien},
	}, mutate.IndexAddendum{
		Add: forPlatform(t, image, windows), Descriptor: v1.Descriptor{Platform: &windows},
	})
	host := serve(t)
	pushIndex(t, host+"/alien:v1", index)
	saved := filepath.Join(t.TempDir(), "saved.tar")
	tag, err := name.NewTag("alien:v1")
	must(t, err)
	must(t, tarball.WriteToFile(saved, tag, forPlatform(t, image, alien)))
	for ref, says := range map[string]string{
		onDisk(t, forPlatform(t, image, alien)):                  "linux/riscv64",
		onDisk(t, forPlatform(t, image, windows)):                "windows/",
		push(t, host, "single:v1", forPlatform(t, image, alien)): "linux/riscv64",
		host + "/alien:v1":                                       "linux/riscv64, windows/",
		saved:                                                    "linux/riscv64",
	} {
		_, err := p.ImportOCI(t.Context(), OCIImage{Ref: ref}, nil)
		wantSaid(t, err, fault.Unsupported, says, "this machine is "+here.String())
	}
	// What it leaves open fits, and of several the fitting one is taken.
	imported(t, p, forPlatform(t, image, v1.Platform{}))
	pushIndex(t, host+"/both:v1", mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: &here}}))
	_, err = p.ImportOCI(t.Context(), OCIImage{Ref: host + "/both:v1"}, nil)
	must(t, err)
}

// E5: commands run as the user that the image names; one that it does not have is named.
func TestE5ImageUser(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	files := imageOf(t, layerOf(t, folder("etc"),
		file("etc/passwd", "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/bash\n"),
		file("etc/group", "root:x:0:\nnode:x:1000:\nstaff:x:50:\n")))
	for spec, want := range map[string]Account{
		"":           {Name: "user", UID: 1001, GID: 1001, Home: "/home/user", Shell: "/bin/sh"},
		"root":       {Name: "root", Home: "/root", Shell: "/bin/sh"},
		"node":       {Name: "node", UID: 1000, GID: 1000, Home: "/home/node", Shell: "/bin/bash"},
		"1000":       {Name: "node", UID: 1000, GID: 1000, Home: "/home/node", Shell: "/bin/bash"},
		"node:node":  {Name: "node", UID: 1000, GID: 1000, Home: "/home/node", Shell: "/bin/bash"},
		"node:staff": {Name: "1000:50", UID: 1000, GID: 50, Home: "/home/node", Shell: "/bin/bash"},
		"77":         {Name: "77:0", UID: 77, Home: "/", Shell: "/bin/sh"},
		"77:88":      {Name: "77:88", UID: 77, GID: 88, Home: "/", Shell: "/bin/sh"},
	} {
		if tmpl := imported(t, p, asking(t, files, v1.Config{User: spec})); tmpl.Account != want {
			t.Errorf("%q: %+v", spec, tmpl.Account)
		}
	}
	for spec, said := range map[string]string{"nosuch": `user "nosuch"`, "nosuch:node": `user "nosuch"`, "node:nosuch": `group "nosuch"`, "-1": `user "-1"`, "4294967295": "user"} {
		_, err := p.ImportOCI(t.Context(), OCIImage{Ref: onDisk(t, asking(t, files, v1.Config{User: spec}))}, nil)
		wantSaid(t, err, fault.InvalidArgument, said)
	}
	// No files at all is fine, and so is a user's number in them.
	imported(t, p, asking(t, empty.Image, v1.Config{User: "65532"}))
}

// What is no image says what it misses; what is no file is not asked of a registry.
func TestNoImage(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	good := onDisk(t, imageOf(t, layerOf(t, file("f", "x"))))
	layer, err := layerOf(t, file("f", "x")).Digest()
	must(t, err)
	must(t, os.Remove(filepath.Join(good, "blobs/sha256", layer.Hex)))
	must(t, os.Mkdir(path("plain"), 0o755))
	must(t, os.Mkdir(path("half"), 0o755))
	must(t, os.WriteFile(path("half/oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644))
	must(t, os.WriteFile(path("empty.tar"), nil, 0o644))
	must(t, os.WriteFile(path("Save.tar"), []byte("\x1f\x8b compressed"), 0o644))
	must(t, second(layout.Write(path("none"), empty.Index)))
	f, err := os.Create(path("holed.tar"))
	must(t, err)
	w := tar.NewWriter(f)
	must(t, w.AddFS(os.DirFS(good)))
	must(t, w.Close())
	must(t, f.Close())
	tags := map[name.Reference]v1.Image{}
	for _, n := range []string{"a:v1", "b:v1"} {
		tag, err := name.NewTag(n)
		must(t, err)
		tags[tag] = imageOf(t, layerOf(t, file("f", n)))
	}
	must(t, tarball.MultiRefWriteToFile(path("two.tar"), tags))
	for ref, want := range map[string]struct {
		kind  fault.Kind
		words []string
	}{
		path("plain"):             {fault.InvalidArgument, []string{"neither oci-layout nor index.json"}},
		path("half"):              {fault.InvalidArgument, []string{"no index.json"}},
		path("none"):              {fault.InvalidArgument, []string{"no image in it"}},
		good:                      {fault.DataCorrupt, []string{good, "no blob " + layer.String()}},
		path("holed.tar"):         {fault.DataCorrupt, []string{path("holed.tar"), "no blob " + layer.String()}},
		path("empty.tar"):         {fault.InvalidArgument, []string{"neither", "manifest.json"}},
		path("Save.tar"):          {fault.InvalidArgument, []string{"compressed"}},
		path("two.tar"):           {fault.InvalidArgument, []string{"2 images"}},
		path("save.tar"):          {fault.NotFound, []string{"no file " + path("save.tar"), "there is Save.tar"}},
		path("half/oci-layout/x"): {fault.NotFound, []string{"no file"}},
		"../none":                 {fault.NotFound, []string{"no file ../none"}},
		"save.tar":                {fault.NotFound, []string{"no file save.tar"}},
		"images/SAVE.TGZ":         {fault.NotFound, []string{"no file images/SAVE.TGZ"}},
	} {
		_, err := p.ImportOCI(t.Context(), OCIImage{Ref: ref}, nil)
		wantSaid(t, err, want.kind, want.words...)
	}
}

// A registry that gives no image is named, with what it answered or why it did not.
func TestRegistryRefuses(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	status := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v2/" {
			return
		}
		w.WriteHeader(status)
		if _, err := w.Write([]byte("inner matters")); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(s.Close)
	host := strings.TrimPrefix(s.URL, "http://")
	for code, want := range map[int]struct {
		kind fault.Kind
		says string
	}{
		http.StatusNotFound:     {fault.NotFound, "has no image"},
		http.StatusUnauthorized: {fault.PermissionDenied, "401 Unauthorized"},
		http.StatusForbidden:    {fault.PermissionDenied, "403 Forbidden"},
		http.StatusTeapot:       {fault.Unavailable, "418"},
		http.StatusOK:           {fault.DataCorrupt, "could not be read"},
	} {
		status = code
		_, err := p.ImportOCI(t.Context(), OCIImage{Ref: host + "/app:v1"}, nil)
		wantSaid(t, err, want.kind, want.says, "the registry "+host)
		if strings.Contains(fault.Of(err).Message, "inner") {
			t.Errorf("%d: %s", code, fault.Of(err).Message)
		}
	}
	gone := httptest.NewServer(nil)
	address := strings.TrimPrefix(gone.URL, "http://")
	gone.Close()
	_, err := p.ImportOCI(t.Context(), OCIImage{Ref: address + "/app:v1"}, nil)
	wantSaid(t, err, fault.Unavailable, "the registry "+address, "the connection was refused")
	_, err = p.ImportOCI(t.Context(), OCIImage{Ref: "registry.invalid/app:v1"}, nil)
	wantSaid(t, err, fault.Unavailable, "the registry registry.invalid cannot be reached")
}
