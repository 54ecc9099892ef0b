package disk

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// D1, D7: what a power cut leaves. The pool's file is copied as it lies on the host's
// disk while everything is mounted, and a pool is opened on the copy.
func TestD1PowerCut(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	f, err := os.Create(filepath.Join(root, "durable"))
	must(t, err)
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	_, err = f.Write(want)
	must(t, err)
	must(t, f.Sync()) // the only sync of this file
	must(t, f.Close())
	s, err := p.Stage(ctx, "a", 1, 0, ForKept)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(s.MemDir(), "pages.img"), want, 0o600))
	must(t, s.CloneDisk(ctx, "a"))
	must(t, s.Commit(ctx, []byte("manifest")))
	must(t, p.CloneTo(ctx, FromDisk("a"), "fork", ForNew))
	must(t, p.Create(ctx, "last", testSize))
	half, err := p.Stage(ctx, "a", 2, 0, ForKept)
	must(t, err)
	must(t, half.CloneDisk(ctx, "a"))

	cfg := testConfig(t)
	must(t, os.MkdirAll(cfg.Dir, 0o700))
	out, err := exec.Command("cp", "--sparse=always", p.poolFile(), filepath.Join(cfg.Dir, "pool.img")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	must(t, p.TakeDown(ctx)) // the kernel does not mount two XFS with one name at once
	q := open(t, cfg)
	for _, id := range []string{"a", "fork", "last"} {
		root, err := q.Mount(ctx, id, spec)
		must(t, err)
		if id != "last" && read(t, filepath.Join(root, "durable")) != string(want) {
			t.Errorf("%s: the synced file is not whole", id)
		}
	}
	saved, err := q.OpenSaved(ctx, "a", 1)
	must(t, err)
	if string(saved.Manifest) != "manifest" || read(t, filepath.Join(saved.MemDir, "pages.img")) != string(want) {
		t.Error("the committed save is not whole")
	}
	if list, err := q.Saved(ctx, "a"); err != nil || len(list) != 1 {
		t.Errorf("saves: %v, %v", list, err)
	}
}

// Programs that fail or hang leave nothing half made, and the next call goes well.
func TestToolsFail(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Tools = map[string]string{}
	cfg.TemplateFormat = formatEROFS
	p := open(t, cfg)
	ctx := t.Context()
	script := func(text string) string {
		path := filepath.Join(t.TempDir(), "tool")
		must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755))
		return path
	}
	clean := func() {
		t.Helper()
		if left := append(names(p.path("tmp")), names(p.path("disks"))...); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	cfg.Tools["mke2fs"] = script("echo broken >&2; exit 1")
	wantKind(t, p.Create(ctx, "a", testSize), fault.Internal)
	clean()
	cfg.Tools["mke2fs"] = script("sleep 1000000 & wait")
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	begin := time.Now()
	wantKind(t, p.Create(short, "a", testSize), fault.DeadlineExceeded)
	if d := time.Since(begin); d > 4*time.Second {
		t.Errorf("a hanging program held the call for %v", d)
	}
	clean()
	cfg.Tools["mke2fs"] = script("") // does nothing and says that it did
	must(t, p.Create(ctx, "a", testSize))
	_, err := p.Mount(ctx, "a", layers(t, p))
	wantKind(t, err, fault.DataCorrupt)
	must(t, p.Unmount(ctx, "a"))
	must(t, p.Delete(ctx, "a"))
	must(t, os.Remove(p.path("blanks", "67108864.img")))
	delete(cfg.Tools, "mke2fs")
	must(t, p.Create(ctx, "a", testSize))

	cfg.Tools["mkfs.erofs"] = script("exit 1")
	w, err := p.begin("test")
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(w.path, "tree"), 0o755))
	must(t, os.WriteFile(filepath.Join(w.path, "tree", "f"), []byte("never packed"), 0o644))
	_, err = p.finishTemplate(ctx, w, Template{}, nil)
	wantKind(t, err, fault.Internal)
	p.end(w)
	if list, err := p.Templates(ctx); err != nil || len(list) != 1 {
		t.Errorf("templates: %v, %v", list, err)
	}
}

// Where EROFS cannot be made or mounted, templates become ext4 by themselves.
func TestFormatFallsBack(t *testing.T) {
	t.Parallel()
	for tool, want := range map[string]string{"": formatEROFS, "/bin/false": formatExt4, "/bin/true": formatExt4} {
		cfg := testConfig(t)
		cfg.Tools = map[string]string{"mkfs.erofs": tool}
		p := open(t, cfg)
		for range 2 {
			if got, err := p.templateFormat(t.Context()); err != nil || got != want {
				t.Errorf("with mkfs.erofs %q: %q, %v", tool, got, err)
			}
		}
		spec := layers(t, p)
		must(t, p.Create(t.Context(), "a", testSize))
		root, err := p.Mount(t.Context(), "a", spec)
		must(t, err)
		if got := read(t, filepath.Join(root, "opt/dir/file")); got != "from the template\n" {
			t.Errorf("the template shows %q", got)
		}
		if left := names(p.path("tmp")); len(left) > 0 {
			t.Errorf("tmp holds %v", left)
		}
	}
}

// A damaged template or record is named, and nothing is left mounted.
func TestDamage(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	must(t, p.Create(ctx, "a", testSize))
	tmpl, err := p.Template(ctx, spec.Template)
	must(t, err)
	image := filepath.Join(p.templateDir(spec.Template), imageFile(tmpl.Format))
	must(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	if _, err := p.Mount(ctx, "a", spec); err == nil {
		t.Error("a template of zeros was mounted")
	}
	if left, err := loopsUnder(p.dir + "/"); err != nil || len(left) > 0 {
		t.Errorf("loops are left: %v, %v", left, err)
	}
	must(t, os.WriteFile(filepath.Join(p.diskDir("a"), recordName), []byte("{"), 0o600))
	_, err = p.Mount(ctx, "a", spec)
	wantKind(t, err, fault.DataCorrupt)
	_, err = p.Stat(ctx, "a")
	wantKind(t, err, fault.DataCorrupt)
	wantKind(t, p.Create(ctx, "a", testSize), fault.DataCorrupt)
	inv, err := p.Inventory(ctx)
	must(t, err)
	if len(inv.Disks) != 1 || inv.Disks[0].Err == nil || inv.Disks[0].Stray {
		t.Errorf("the inventory has %+v", inv.Disks)
	}
	must(t, p.Delete(ctx, "a"))
}

// Mounts whose disk is gone are found and can be cleared.
func TestStrays(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", testSize))
	_, err := p.Mount(ctx, "a", layers(t, p))
	must(t, err)
	must(t, os.Remove(filepath.Join(p.diskDir("a"), recordName)))
	inv, err := p.Inventory(ctx)
	must(t, err)
	if len(inv.Disks) != 1 || !inv.Disks[0].Stray || !inv.Disks[0].Root {
		t.Errorf("the inventory has %+v", inv.Disks)
	}
	must(t, p.Unmount(ctx, "a"))
	must(t, p.Delete(ctx, "a"))
}

func BenchmarkCreate(b *testing.B) {
	p, _ := benchPool(b)
	must(b, p.Create(b.Context(), "warm", 8_000_000_000))
	for i := 0; b.Loop(); i++ {
		must(b, p.Create(b.Context(), id(i), 8_000_000_000))
	}
}

func BenchmarkMount(b *testing.B) {
	p, spec := benchPool(b)
	must(b, p.Create(b.Context(), "a", 8_000_000_000))
	_, err := p.Mount(b.Context(), "a", spec)
	must(b, err)
	must(b, p.Unmount(b.Context(), "a"))
	for b.Loop() {
		_, err := p.Mount(b.Context(), "a", spec)
		must(b, err)
		b.StopTimer()
		must(b, p.Unmount(b.Context(), "a"))
		b.StartTimer()
	}
}

func BenchmarkUnmount(b *testing.B) {
	p, spec := benchPool(b)
	must(b, p.Create(b.Context(), "a", 8_000_000_000))
	for b.Loop() {
		b.StopTimer()
		_, err := p.Mount(b.Context(), "a", spec)
		must(b, err)
		b.StartTimer()
		must(b, p.Unmount(b.Context(), "a"))
	}
}

func BenchmarkCloneTo2000Extents(b *testing.B) {
	p, _ := benchPool(b)
	must(b, p.Create(b.Context(), "a", 256<<20))
	fragment(b, p.image("a"), 2000)
	for i := 0; b.Loop(); i++ {
		must(b, p.CloneTo(b.Context(), FromDisk("a"), id(i), ForNew))
	}
}

func benchPool(b *testing.B) (*Pool, MountSpec) {
	cfg := testConfig(b)
	cfg.Log = nil
	p := open(b, cfg)
	return p, layers(b, p)
}

func id(i int) string { return "d" + strconv.Itoa(i) }

// FuzzUnpack feeds tars to the unpacker; nothing outside its tree may change.
func FuzzUnpack(f *testing.F) {
	for _, entries := range [][]entry{honestLower(), honestUpper(), {symlink("a", "/"), file("a/x", "y")}, {file("a/../../x", "y")}} {
		r, err := layerOf(f, entries...).Uncompressed()
		must(f, err)
		b, err := io.ReadAll(r)
		must(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, layer []byte) {
		outer := t.TempDir()
		dir := filepath.Join(outer, "tree")
		must(t, os.Mkdir(dir, 0o755))
		must(t, os.WriteFile(filepath.Join(outer, "x"), []byte("the host's"), 0o600))
		// A sparse file of a few bytes may be terabytes long: the room ends at once.
		u, err := newUnpacker(dir, func() error { return errors.New("full") })
		must(t, err)
		defer u.Close()
		_ = u.layer(tar.NewReader(bytes.NewReader(layer)))
		if got := names(outer); len(got) != 2 || read(t, filepath.Join(outer, "x")) != "the host's" {
			t.Errorf("outside the tree: %v", got)
		}
	})
}
