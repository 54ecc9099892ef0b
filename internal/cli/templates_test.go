package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/api"
)

// A name that was meant for a file goes to the server as a path, one of an image as it is.
func TestImageOrFile(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for _, name := range []string{"save", "Rootfs", "sub"} {
		if err := os.Mkdir(name, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for ref, path := range map[string]string{
		"save": "save", "./save": "save", ".": "", "..": "..", "../x": "../x", "sub/": "sub", // there, or beginning like paths
		"save.tar": "save.tar", "sub/Save.TGZ": "sub/Save.TGZ", "rootfs": "rootfs", "SAVE": "SAVE", // not there
	} {
		if got, want := absolute(ref), filepath.Join(dir, path); got != want {
			t.Errorf("%q is %q, want %q", ref, got, want)
		}
	}
	for _, ref := range []string{"", "node:22", "registry.example.com/node:24", "save:v1", "debian@sha256:00", "sub2/app"} {
		if got := absolute(ref); got != ref {
			t.Errorf("%q is %q", ref, got)
		}
	}
}

// Whoever replaces the built-in template is told what it is now and how to go back.
func TestDefaultTemplateReplaced(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		t    api.Template
		says []string
	}{
		{api.Template{Name: "base", Source: "oci:/x/good"}, []string{"oci:/x/good", "`hutch templates build base --debian`"}},
		{api.Template{Name: "base", Source: "debian"}, nil},
		{api.Template{Name: "node", Source: "oci:/x/good"}, nil},
	} {
		var out bytes.Buffer
		a := &app{env: Env{Stderr: &out}, progress: &progress{}}
		a.noteDefault(c.t)
		if c.says == nil && out.Len() > 0 {
			t.Errorf("%+v: %q", c.t, out.String())
		}
		for _, want := range c.says {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%+v: %q does not say %q", c.t, out.String(), want)
			}
		}
	}
}
