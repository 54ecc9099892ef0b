package runtime_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

const chunk = runtime.ChunkBytes

// newImage makes an image: a file of two and a half chunks, an empty one, and a sparse
// one whose middle is a hole.
func newImage(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a", bytes.Repeat([]byte("hutch"), chunk/2))
	write("b", nil)
	sparse, err := os.Create(filepath.Join(dir, "c"))
	if err != nil {
		t.Fatal(err)
	}
	defer sparse.Close()
	if _, err := sparse.WriteAt([]byte("begin"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := sparse.WriteAt([]byte("end"), 9*chunk); err != nil {
		t.Fatal(err)
	}
	return dir
}

func seal(t *testing.T, dir string) runtime.Manifest {
	t.Helper()
	m, err := runtime.Seal(t.Context(), dir, runtime.Meta{Runtime: "gvisor", Version: "1", CPUFeatures: "a b"})
	if err != nil {
		t.Fatal(err)
	}
	// It goes through a file in between.
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var back runtime.Manifest
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	return back
}

func TestSealAndVerify(t *testing.T) {
	t.Parallel()
	dir := newImage(t)
	m := seal(t, dir)
	if got, want := m.Bytes(), int64(chunk/2*5+9*chunk+3); got != want {
		t.Errorf("the image has %d bytes, not %d", got, want)
	}
	if err := runtime.Verify(t.Context(), dir, m); err != nil {
		t.Errorf("Verify: %v", err)
	}
	// A hole and written zeros are the same bytes.
	f, err := os.OpenFile(filepath.Join(dir, "c"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(make([]byte, 2*chunk), 3*chunk); err != nil {
		t.Fatal(err)
	}
	if err := runtime.Verify(t.Context(), dir, m); err != nil {
		t.Errorf("Verify of a filled hole: %v", err)
	}
}

func TestVerifyNamesTheDamage(t *testing.T) {
	t.Parallel()
	flip := func(name string, at int64) func(string) error {
		return func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			b := make([]byte, 1)
			if _, err := f.ReadAt(b, at); err != nil {
				return err
			}
			b[0] ^= 0x80
			_, err = f.WriteAt(b, at)
			return err
		}
	}
	for name, c := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"first byte":     {flip("a", 0), "a differs at byte 0"},
		"last byte":      {flip("a", chunk/2*5-1), "a differs at byte 8388608"},
		"in a hole":      {flip("c", 4*chunk+7), "c differs at byte 16777216"},
		"data to a hole": {func(dir string) error { return punch(filepath.Join(dir, "a"), chunk, chunk) }, "a differs at byte 4194304"},
		"cut":            {func(dir string) error { return os.Truncate(filepath.Join(dir, "a"), 5) }, "a has 5 bytes"},
		"grown":          {func(dir string) error { return os.Truncate(filepath.Join(dir, "b"), 5) }, "b has 5 bytes"},
		"missing":        {func(dir string) error { return os.Remove(filepath.Join(dir, "c")) }, "c is missing"},
		"one too many":   {func(dir string) error { return os.WriteFile(filepath.Join(dir, "d"), nil, 0o600) }, "a file d too many"},
		"a folder": {func(dir string) error {
			path := filepath.Join(dir, "b")
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Mkdir(path, 0o700)
		}, "b has"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := newImage(t)
			m := seal(t, dir)
			if err := c.spoil(dir); err != nil {
				t.Fatal(err)
			}
			err := runtime.Verify(t.Context(), dir, m)
			if !fault.Is(err, fault.DataCorrupt) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want data_corrupt with %q", err, c.want)
			}
		})
	}
}

func punch(path string, at, length int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, length)
}

func TestVerifyRefusesForgedManifest(t *testing.T) {
	t.Parallel()
	dir := newImage(t)
	for name, forge := range map[string]func(*runtime.Manifest){
		"digest":   func(m *runtime.Manifest) { m.Files[0].Chunks[0] = m.Files[0].Chunks[1] },
		"size":     func(m *runtime.Manifest) { m.Files[0].Bytes++ },
		"name":     func(m *runtime.Manifest) { m.Files[0].Name = "../a" },
		"one less": func(m *runtime.Manifest) { m.Files = m.Files[1:] },
		"root":     func(m *runtime.Manifest) { m.Root = "" },
	} {
		m := seal(t, dir)
		forge(&m)
		if err := runtime.Verify(t.Context(), dir, m); !fault.Is(err, fault.DataCorrupt) {
			t.Errorf("%s: got %v, want data_corrupt", name, err)
		}
	}
}

func TestSealRefuses(t *testing.T) {
	t.Parallel()
	dir := newImage(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := runtime.Seal(ctx, dir, runtime.Meta{}); !fault.Is(err, fault.Cancelled) {
		t.Errorf("cancelled: got %v", err)
	}
	if err := runtime.Verify(ctx, dir, seal(t, dir)); !fault.Is(err, fault.Cancelled) {
		t.Errorf("cancelled Verify: got %v", err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := runtime.Seal(t.Context(), dir, runtime.Meta{}); !fault.Is(err, fault.Internal) {
		t.Errorf("a link in the image: got %v", err)
	}
}

func TestRunsOn(t *testing.T) {
	t.Parallel()
	m := runtime.Manifest{Meta: runtime.Meta{Runtime: "gvisor", Version: "1", CPUFeatures: "aes avx"}}
	c := runtime.Capabilities{Runtime: "gvisor", Version: "1"}
	other := c
	other.Version = "2"
	keeps := other
	keeps.Older = []string{"0", "1"}
	for name, x := range map[string]struct {
		c        runtime.Capabilities
		features string
		reason   string
	}{
		"same":          {c, "aes avx", ""},
		"more features": {c, "aes avx sse", ""},
		"one less":      {c, "aes sse", "cpu_features"},
		"other version": {other, "aes avx", "runtime_version"},
		"kept version":  {keeps, "aes avx", ""},
		"other runtime": {runtime.Capabilities{Runtime: "microvm", Version: "1"}, "aes avx", "runtime"},
	} {
		err := m.RunsOn(x.c, x.features)
		if got := fault.Of(err); (got == nil) != (x.reason == "") || got != nil && got.Reason != x.reason {
			t.Errorf("%s: got %v, want the reason %q", name, err, x.reason)
		}
	}
	here, err := runtime.CPUFeatures()
	if err != nil || here == "" {
		t.Errorf("CPUFeatures: %q, %v", here, err)
	}
}

func BenchmarkSeal(b *testing.B) {
	dir := b.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), make([]byte, 256<<20), 0o600); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(256 << 20)
	for b.Loop() {
		if _, err := runtime.Seal(b.Context(), dir, runtime.Meta{}); err != nil {
			b.Fatal(err)
		}
	}
}
