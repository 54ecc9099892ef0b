package gvisor_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

// damages are what may happen to a file of an image. Each undoes itself.
var damages = map[string]func(t *testing.T, path string) (undo func()){
	"first byte":  func(t *testing.T, path string) func() { return flip(t, path, 0) },
	"middle byte": func(t *testing.T, path string) func() { return flip(t, path, size(t, path)/2) },
	"last byte":   func(t *testing.T, path string) func() { return flip(t, path, size(t, path)-1) },
	"cut by one": func(t *testing.T, path string) func() {
		return aside(t, path, func() error { return os.Truncate(path, size(t, path)-1) })
	},
	"emptied": func(t *testing.T, path string) func() {
		return aside(t, path, func() error { return os.Truncate(path, 0) })
	},
	"longer": func(t *testing.T, path string) func() {
		return aside(t, path, func() error { return os.Truncate(path, size(t, path)+1) })
	},
	"removed": func(t *testing.T, path string) func() {
		return aside(t, path, func() error { return os.Remove(path) })
	},
	"a link": func(t *testing.T, path string) func() {
		return aside(t, path, func() error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Symlink(path+".aside", path)
		})
	},
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// flip changes one bit.
func flip(t *testing.T, path string, at int64) (undo func()) {
	t.Helper()
	turn := func() {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 0x10
		if _, err := f.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
	turn()
	return turn
}

// aside keeps the file's bytes while it is spoiled.
func aside(t *testing.T, path string, spoil func() error) (undo func()) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := spoil(); err != nil {
		t.Fatal(err)
	}
	return func() {
		_ = os.Remove(path)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// Any damage to any file of an image is found before a task of it may run: by the
// digests, whatever the runtime itself would make of it (Z9).
func TestDamagedImage_Z9(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	spec := newSpec(t, tree(t))
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "unlinked", "3000000") // so that none of the files is empty
	runtimetest.MustAsk(t, h, "pour", "2")
	p, err := h.Pause(ctx)
	if err != nil {
		t.Fatal(err)
	}
	image := t.TempDir()
	if err := p.Capture(ctx, image); err != nil {
		t.Fatal(err)
	}
	kill(t, h)
	m, err := runtime.Seal(ctx, image, runtime.Meta{Runtime: "gvisor"})
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Files) != 4 {
		t.Fatalf("the image has the files %v, not four", m.Files)
	}
	for _, f := range m.Files {
		path := filepath.Join(image, f.Name)
		for name, spoil := range damages {
			undo := spoil(t, path)
			if err := runtime.Verify(ctx, image, m); !fault.Is(err, fault.DataCorrupt) {
				t.Errorf("%s, %s: got %v, want data_corrupt", f.Name, name, err)
			}
			// A file that is missing is refused by the driver, too.
			if name == "removed" {
				_, err := newDriver(t).Restore(ctx, newSpec(t, spec.Root), image)
				if !fault.Is(err, fault.DataCorrupt) {
					t.Errorf("restoring without %s: got %v, want data_corrupt", f.Name, err)
				}
			}
			undo()
		}
	}
	extra := filepath.Join(image, "extra.img")
	if err := os.WriteFile(extra, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := runtime.Verify(ctx, image, m); !fault.Is(err, fault.DataCorrupt) {
		t.Errorf("a file too many: got %v, want data_corrupt", err)
	}
	if err := os.Remove(extra); err != nil {
		t.Fatal(err)
	}
	// All has been undone.
	if err := runtime.Verify(ctx, image, m); err != nil {
		t.Fatal(err)
	}
	again, err := newDriver(t).Restore(ctx, newSpec(t, spec.Root), image)
	if err != nil {
		t.Fatal(err)
	}
	kill(t, again)
}
