package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestLifeOfADisk(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	// Every call twice: the second finds the goal reached.
	for range 2 {
		must(t, p.Create(ctx, "a", testSize))
	}
	var root string
	for range 2 {
		r, err := p.Mount(ctx, "a", spec)
		must(t, err)
		if root != "" && r != root {
			t.Fatalf("mounted at %s, then at %s", root, r)
		}
		root = r
	}
	if got := read(t, filepath.Join(root, "opt/dir/file")); got != "from the template\n" {
		t.Errorf("the template shows %q", got)
	}
	if got := read(t, filepath.Join(root, GuestPath)); !strings.Contains(got, "agent") {
		t.Errorf("the agent layer shows %q", got)
	}
	// redirect_dir: a directory of the template can be renamed.
	wantKind(t, p.DeleteAgent(ctx, spec.Agent), fault.FailedPrecondition)
	must(t, os.Rename(filepath.Join(root, "opt/dir"), filepath.Join(root, "opt/moved")))
	must(t, os.WriteFile(filepath.Join(root, "mine"), []byte("kept"), 0o644))
	wantKind(t, p.Delete(ctx, "a"), fault.FailedPrecondition)
	must(t, p.Sync(ctx, "a"))
	must(t, p.Trim(ctx, "a"))
	for range 2 {
		must(t, p.Unmount(ctx, "a"))
	}
	wantKind(t, p.Sync(ctx, "a"), fault.FailedPrecondition)
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	if read(t, filepath.Join(root, "mine")) != "kept" || read(t, filepath.Join(root, "opt/moved/file")) != "from the template\n" {
		t.Error("what was written is gone after a remount")
	}
	must(t, p.Unmount(ctx, "a"))
	info, err := p.Stat(ctx, "a")
	must(t, err)
	if info.Size != testSize || info.Allocated <= 0 || info.Allocated > testSize || info.Extents == 0 || info.Template != spec.Template {
		t.Errorf("Stat gives %+v", info)
	}
	for range 2 {
		must(t, p.Delete(ctx, "a"))
	}
	_, err = p.Stat(ctx, "a")
	wantKind(t, err, fault.NotFound)
	for range 2 {
		must(t, p.DeleteAgent(ctx, spec.Agent))
	}
	if left := names(p.path("trash")); len(left) > 0 {
		t.Errorf("the trash holds %v", left)
	}
}

func TestLoopsAreDirect(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	must(t, p.Create(t.Context(), "a", testSize))
	_, err := p.Mount(t.Context(), "a", layers(t, p))
	must(t, err)
	inv, err := p.Inventory(t.Context())
	must(t, err)
	own, err := loopsOf(p.poolFile())
	must(t, err)
	if len(own) != 1 || len(inv.Loops) != 2 { // the disk's and the template's
		t.Fatalf("loops: pool %v, others %v", own, inv.Loops)
	}
	for _, l := range append(own, inv.Loops...) {
		if !l.DirectIO {
			t.Errorf("%s is not read and written directly", l.Backing)
		}
	}
}

// F6: the size is what df shows, and a hard limit; rounded up, never down.
func TestF6SizeIsAHardLimit(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	const asked = 100_000_001
	must(t, p.Create(ctx, "a", asked))
	must(t, p.Create(ctx, "a", asked))
	wantKind(t, p.Create(ctx, "a", asked+blockSize), fault.Conflict)
	root, err := p.Mount(ctx, "a", layers(t, p))
	must(t, err)
	var st unix.Statfs_t
	must(t, unix.Statfs(root, &st))
	if got := int64(st.Blocks) * st.Frsize; got != RoundSize(asked) || got < asked {
		t.Errorf("df shows %d bytes, want %d", got, RoundSize(asked))
	}
	fill(t, filepath.Join(root, "big"))
	if got := fileSize(filepath.Join(root, "big")); got > asked || got < asked/2 {
		t.Errorf("%d bytes went into a disk of %d", got, asked)
	}
	info, err := p.Stat(ctx, "a")
	must(t, err)
	if info.Allocated > RoundSize(asked) {
		t.Errorf("the image takes %d bytes in the pool", info.Allocated)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	for _, id := range []string{"", ".", "..", "a/b", "a.tmp", "-a", "templates", strings.Repeat("x", 101)} {
		wantKind(t, p.Create(ctx, id, testSize), fault.InvalidArgument)
	}
	for _, size := range []int64{-1, 0, MinSize - 1, MaxSize + 1} {
		wantKind(t, p.Create(ctx, "a", size), fault.InvalidArgument)
	}
	wantKind(t, p.CloneTo(ctx, FromDisk("none"), "a", ForNew), fault.NotFound)
	wantKind(t, p.CloneTo(ctx, FromSave("none", 1), "a", ForNew), fault.NotFound)
	wantKind(t, p.CloneTo(ctx, Source{}, "a", ForNew), fault.InvalidArgument)
	wantKind(t, p.CloneTo(ctx, FromDisk("../x"), "a", ForNew), fault.InvalidArgument)
	spec := layers(t, p)
	_, err := p.Mount(ctx, "none", spec)
	wantKind(t, err, fault.NotFound)
	must(t, p.Create(ctx, "a", testSize))
	for _, bad := range []MountSpec{{Template: "x", Agent: spec.Agent}, {Template: spec.Template}} {
		_, err := p.Mount(ctx, "a", bad)
		wantKind(t, err, fault.InvalidArgument)
	}
	other := strings.Repeat("0", 64)
	_, err = p.Mount(ctx, "a", MountSpec{Template: other, Agent: spec.Agent})
	wantKind(t, err, fault.NotFound)
	_, err = p.Mount(ctx, "a", MountSpec{Template: spec.Template, Agent: other})
	wantKind(t, err, fault.NotFound)
	// A failed mount leaves nothing.
	if found, err := loopsOf(p.image("a")); err != nil || len(found) > 0 {
		t.Errorf("loops are left: %v, %v", found, err)
	}
	must(t, p.Create(ctx, "b", testSize))
	_, err = p.Mount(ctx, "b", spec)
	must(t, err)
	must(t, p.Unmount(ctx, "b"))
	_, err = p.Mount(ctx, "b", MountSpec{Template: template(t, p, map[string]string{"x": "y"}), Agent: spec.Agent})
	wantKind(t, err, fault.FailedPrecondition)
	wantKind(t, p.DeleteTemplate(ctx, spec.Template), fault.FailedPrecondition)
	must(t, p.Delete(ctx, "b"))
	for range 2 {
		must(t, p.DeleteTemplate(ctx, spec.Template))
	}
}

// Every state that a crash in Mount or Unmount can leave is taken down and brought up.
func TestHalfDoneMounts(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	states := map[string]func(id string) error{
		"nothing":   func(string) error { return nil },
		"directory": func(id string) error { return os.MkdirAll(p.imgDir(id), 0o700) },
		"loop":      func(id string) error { _, err := attach(ctx, p.image(id), false); return err },
		"image": func(id string) error {
			return p.mountImage(ctx, id)
		},
		"no-ballast": func(id string) error {
			if err := p.mountImage(ctx, id); err != nil {
				return err
			}
			return os.RemoveAll(filepath.Join(p.imgDir(id), ballastDir, ballastFile))
		},
		"all": func(id string) error { _, err := p.Mount(ctx, id, spec); return err },
	}
	for name, reach := range states {
		id := "s-" + name
		must(t, p.Create(ctx, id, testSize))
		must(t, reach(id))
		must(t, p.Unmount(ctx, id))
		if found, err := loopsOf(p.image(id)); err != nil || len(found) > 0 {
			t.Errorf("%s: loops are left: %v, %v", name, found, err)
		}
		if exists(p.mountDir(id)) {
			t.Errorf("%s: the mount points are left", name)
		}
		must(t, reach(id))
		root, err := p.Mount(ctx, id, spec)
		must(t, err)
		if got := fileSize(filepath.Join(p.imgDir(id), ballastDir, ballastFile)); got != ballastBytes {
			t.Errorf("%s: the ballast has %d bytes", name, got)
		}
		if got := len(names(filepath.Join(p.imgDir(id), ballastDir))); got != ballastInodes+1 {
			t.Errorf("%s: the ballast has %d files", name, got)
		}
		must(t, os.WriteFile(filepath.Join(root, "f"), []byte("x"), 0o644))
		if found, err := loopsOf(p.image(id)); err != nil || len(found) != 1 {
			t.Errorf("%s: loops: %v, %v", name, found, err)
		}
		must(t, p.Unmount(ctx, id))
	}
}

// A mount that is in use is not torn away; it goes once it is free.
func TestUnmountWaitsForUsers(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", layers(t, p))
	must(t, err)
	f, err := os.Create(filepath.Join(root, "f"))
	must(t, err)
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	wantKind(t, p.Unmount(short, "a"), fault.Unavailable)
	must(t, f.Close())
	must(t, p.Unmount(ctx, "a"))
}

// D6: a disk that is full to the last block still mounts read-write, and the guest
// can make room.
func TestD6FullDiskMounts(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	for _, way := range []string{"bytes", "inodes", "both"} {
		must(t, p.Create(ctx, way, testSize))
		root, err := p.Mount(ctx, way, spec)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(root, "big"+way), nil, 0o600))
		if way != "bytes" {
			must(t, os.Mkdir(filepath.Join(root, "many"), 0o755))
			for i := 0; ; i++ {
				f, err := os.Create(filepath.Join(root, "many", fmt.Sprint(i)))
				if errors.Is(err, unix.ENOSPC) {
					break
				}
				must(t, err)
				f.Close()
			}
		}
		if way != "inodes" {
			fill(t, filepath.Join(root, "big"+way))
		}
		for range 3 {
			must(t, p.Unmount(ctx, way))
			root, err = p.Mount(ctx, way, spec)
			must(t, err)
			table, err := mounts()
			must(t, err)
			if m := table.at(root); m == nil || m.option("upperdir") == "" || readOnly(t, root) {
				t.Fatalf("%s: the overlay is read-only: %+v", way, m)
			}
		}
		must(t, os.Remove(filepath.Join(root, "big"+way)))
		if way == "inodes" {
			must(t, os.RemoveAll(filepath.Join(root, "many")))
		}
		must(t, p.Sync(ctx, way))
		must(t, os.WriteFile(filepath.Join(root, "after"), []byte("room"), 0o644))
		must(t, p.Unmount(ctx, way))
	}
}

func readOnly(t testing.TB, path string) bool {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(path, &st))
	return st.Flags&unix.ST_RDONLY != 0
}

// D6: below 10 % free new disks and forks are refused, and what exists goes on.
func TestD6PoolIsFull(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", testSize))
	u, err := p.Usage(ctx)
	must(t, err)
	if u.Low || !u.File || u.Reserved < u.Total/25 {
		t.Fatalf("a new pool: %+v", u)
	}
	hog, err := os.Create(p.path("hog"))
	must(t, err)
	defer hog.Close()
	must(t, unix.Fallocate(int(hog.Fd()), 0, 0, u.Free-u.Total/20))
	u, err = p.Usage(ctx)
	must(t, err)
	if !u.Low {
		t.Fatalf("a nearly full pool: %+v", u)
	}
	wantKind(t, p.Create(ctx, "b", testSize), fault.NoCapacity)
	wantKind(t, p.CloneTo(ctx, FromDisk("a"), "b", ForNew), fault.NoCapacity)
	must(t, p.Create(ctx, "a", testSize)) // that one is there
	must(t, p.CloneTo(ctx, FromDisk("a"), "c", ForKept))
	must(t, p.Replace(ctx, FromDisk("a"), "c"))

	// A save gets the reserve, and nobody takes it from the save meanwhile.
	need := u.Free + u.Reserved/2
	s, err := p.Stage(ctx, "a", 1, need, ForKept)
	must(t, err)
	must(t, p.Delete(ctx, "c"))
	mem, err := os.Create(filepath.Join(s.MemDir(), "pages"))
	must(t, err)
	must(t, unix.Fallocate(int(mem.Fd()), 0, 0, need))
	must(t, mem.Close())
	must(t, s.CloneDisk(ctx, "a"))
	must(t, s.Commit(ctx, []byte("{}")))
	_, err = p.Stage(ctx, "a", 2, testPool, ForKept)
	wantKind(t, err, fault.NoCapacity)
	must(t, os.Truncate(hog.Name(), 0)) // XFS frees what is only deleted some time later
	must(t, hog.Close())
	must(t, p.DropSaved(ctx, "a", 1))
	u, err = p.Usage(ctx)
	must(t, err)
	if u.Reserved < u.Total/25 {
		t.Errorf("the reserve was not filled again: %+v", u)
	}
}

func TestClones(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("not synced by its writer"), 0o644))
	// Of a live disk, and twice.
	for range 2 {
		must(t, p.CloneTo(ctx, FromDisk("a"), "live", ForNew))
	}
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("later"), 0o644))
	other, err := p.Mount(ctx, "live", spec)
	must(t, err)
	if got := read(t, filepath.Join(other, "f")); got != "not synced by its writer" {
		t.Errorf("the clone has %q", got)
	}
	must(t, p.Unmount(ctx, "live"))
	must(t, p.Unmount(ctx, "a"))
	// Of one at rest: the same bytes.
	must(t, p.CloneTo(ctx, FromDisk("a"), "rest", ForNew))
	if sum(t, p.image("a")) != sum(t, p.image("rest")) {
		t.Error("a clone differs from its source")
	}
	wantKind(t, p.CloneTo(ctx, FromDisk("live"), "rest", ForNew), fault.Conflict)
	wantKind(t, p.Create(ctx, "rest", testSize), fault.Conflict)
	// F5: either side may go.
	must(t, p.Delete(ctx, "a"))
	root, err = p.Mount(ctx, "rest", spec)
	must(t, err)
	if got := read(t, filepath.Join(root, "f")); got != "later" {
		t.Errorf("after the source's end the clone has %q", got)
	}
	wantKind(t, p.Replace(ctx, FromDisk("live"), "rest"), fault.FailedPrecondition)
	must(t, p.Unmount(ctx, "rest"))
	must(t, p.Replace(ctx, FromDisk("live"), "rest"))
	if sum(t, p.image("live")) != sum(t, p.image("rest")) {
		t.Error("a replaced disk differs from its source")
	}
}

// fragment writes every other 32 KiB, which makes that many extents.
func fragment(t testing.TB, path string, count int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DIRECT, 0)
	must(t, err)
	defer f.Close()
	block, err := unix.Mmap(-1, 0, blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE) // aligned
	must(t, err)
	defer unix.Munmap(block)
	for i := range count {
		for j := range block {
			block[j] = byte(i)
		}
		_, err := f.WriteAt(block, int64(i)*32<<10+16<<20)
		must(t, err)
	}
	must(t, f.Sync())
}

func TestCloneOfAFragmentedDisk(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", 256<<20))
	fragment(t, p.image("a"), 2000)
	info, err := p.Stat(ctx, "a")
	must(t, err)
	if info.Extents < 2000 {
		t.Fatalf("only %d extents", info.Extents)
	}
	must(t, p.CloneTo(ctx, FromDisk("a"), "b", ForNew))
	if sum(t, p.image("a")) != sum(t, p.image("b")) {
		t.Error("the clone differs")
	}
}

func TestConcurrentCalls(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	errs := make(chan error, 64)
	var all sync.WaitGroup
	for i := range 8 {
		id := fmt.Sprintf("d%d", i)
		for range 2 { // each twice at once
			all.Go(func() { errs <- p.Create(ctx, id, testSize+int64(i%2)<<20) })
		}
	}
	all.Wait()
	for i := range 8 {
		id := fmt.Sprintf("d%d", i)
		all.Go(func() {
			_, err := p.Mount(ctx, id, spec)
			errs <- err
			_, err = p.Mount(ctx, id, spec)
			errs <- err
			errs <- p.CloneTo(ctx, FromDisk(id), "c"+id, ForNew)
			errs <- p.Unmount(ctx, id)
			errs <- p.Delete(ctx, id)
		})
	}
	all.Wait()
	close(errs)
	for err := range errs {
		must(t, err)
	}
	inv, err := p.Inventory(ctx)
	must(t, err)
	if len(inv.Disks) != 8 || len(inv.Loops) != 1 { // the clones; the template
		t.Errorf("left: %+v", inv)
	}
}
