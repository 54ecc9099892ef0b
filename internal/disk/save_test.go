package disk

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestSaves(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("saved"), 0o644))

	stage := func(generation int64) *Staging {
		t.Helper()
		s, err := p.Stage(ctx, "a", generation, 1<<20, ForKept)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(s.MemDir(), "pages.img"), []byte("memory"), 0o600))
		must(t, s.CloneDisk(ctx, "a"))
		return s
	}
	s := stage(3)
	if list, err := p.Saved(ctx, "a"); err != nil || len(list) > 0 {
		t.Fatalf("an uncommitted save is listed: %v, %v", list, err)
	}
	_, err = p.OpenSaved(ctx, "a", 3)
	wantKind(t, err, fault.NotFound)
	for range 2 {
		must(t, s.Commit(ctx, []byte(`{"generation":3}`)))
	}
	must(t, s.Abort()) // too late to change anything
	got, err := p.OpenSaved(ctx, "a", 3)
	must(t, err)
	if string(got.Manifest) != `{"generation":3}` || read(t, filepath.Join(got.MemDir, "pages.img")) != "memory" || got.Disk == "" {
		t.Errorf("the save is %+v", got)
	}
	_, err = p.Stage(ctx, "a", 3, 0, ForKept)
	wantKind(t, err, fault.Conflict)

	// Z10: a failed save changes nothing.
	for range 2 {
		must(t, stage(4).Abort())
	}
	if read(t, filepath.Join(root, "f")) != "saved" {
		t.Error("an aborted save has changed the disk")
	}
	// A save that a crash cut off gives way to the next attempt.
	left := stage(5)
	inv, err := p.Inventory(ctx)
	must(t, err)
	if len(inv.Saves) != 2 || inv.Saves[1].Generation != 5 || inv.Saves[1].Committed || inv.Saves[0].Info.Size != testSize {
		t.Errorf("the inventory has %+v", inv.Saves)
	}
	q, err := Open(ctx, p.cfg)
	must(t, err)
	if !exists(left.Dir()) {
		t.Error("Open removed a save that only its owner may remove")
	}
	s5, err := q.Stage(ctx, "a", 5, 0, ForKept)
	must(t, err)
	if exists(filepath.Join(s5.MemDir(), "pages.img")) {
		t.Error("the new attempt holds what the old one wrote")
	}
	must(t, s5.Commit(ctx, nil)) // memory only: no disk
	list, err := q.Saved(ctx, "a")
	must(t, err)
	if len(list) != 2 || list[0].Generation != 5 || list[0].Disk != "" || list[1].Generation != 3 {
		t.Errorf("saved: %+v", list)
	}

	testWakes(t, p, spec, got)
}

// testWakes goes on with disk "a" of TestSaves, mounted, and its save of generation 3.
func testWakes(t *testing.T, p *Pool, spec MountSpec, got Saved) {
	t.Helper()
	ctx, root := t.Context(), p.rootDir("a")
	// A wake: the live disk becomes a clone of the saved one, as often as it is tried.
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("after the save"), 0o644))
	must(t, p.Unmount(ctx, "a"))
	wantKind(t, p.Replace(ctx, FromSave("a", 4), "a"), fault.NotFound)
	for range 2 {
		must(t, p.Replace(ctx, FromSave("a", 3), "a"))
		_, err := p.Mount(ctx, "a", spec)
		must(t, err)
		if got := read(t, filepath.Join(root, "f")); got != "saved" {
			t.Errorf("the woken disk has %q", got)
		}
		must(t, os.WriteFile(filepath.Join(root, "f"), []byte("spoilt"), 0o644))
		must(t, p.Unmount(ctx, "a"))
	}
	for range 2 {
		must(t, p.CopySaved(ctx, "a", 3, "b", 1))
	}
	wantKind(t, p.CopySaved(ctx, "a", 9, "b", 2), fault.NotFound)
	b, err := p.OpenSaved(ctx, "b", 1)
	must(t, err)
	if string(b.Manifest) != `{"generation":3}` || read(t, filepath.Join(b.MemDir, "pages.img")) != "memory" || sum(t, b.Disk) != sum(t, got.Disk) {
		t.Errorf("the copy is %+v", b)
	}
	must(t, p.CloneTo(ctx, FromSave("b", 1), "of-b", ForNew))
	must(t, p.DropSaved(ctx, "b", 1))
	must(t, p.Create(ctx, "a", testSize)) // a wake does not make it another disk

	// A fork of the save has its template, and outlives the save (F5).
	must(t, p.CloneTo(ctx, FromSave("a", 3), "fork", ForNew))
	for range 2 {
		must(t, p.DropSaved(ctx, "a", 3))
		must(t, p.DropSaved(ctx, "a", 5))
	}
	if exists(p.path("saves", "a")) {
		t.Error("the directory of the saves is left")
	}
	root, err = p.Mount(ctx, "fork", spec)
	must(t, err)
	if got := read(t, filepath.Join(root, "f")); got != "saved" {
		t.Errorf("the fork has %q", got)
	}
}

// A template that only a save needs is kept for it.
func TestSavePinsItsTemplate(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	must(t, p.Create(ctx, "a", testSize))
	_, err := p.Mount(ctx, "a", spec)
	must(t, err)
	s, err := p.Stage(ctx, "capture", 1, 0, ForKept)
	must(t, err)
	must(t, s.CloneDisk(ctx, "a"))
	must(t, p.Unmount(ctx, "a"))
	must(t, p.Delete(ctx, "a"))
	wantKind(t, p.DeleteTemplate(ctx, spec.Template), fault.FailedPrecondition)
	must(t, s.Commit(ctx, nil))
	wantKind(t, p.DeleteTemplate(ctx, spec.Template), fault.FailedPrecondition)
	must(t, p.DropSaved(ctx, "capture", 1))
	must(t, p.DeleteTemplate(ctx, spec.Template))
}
