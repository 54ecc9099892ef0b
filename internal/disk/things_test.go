package disk

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// R10: Peek lists all that a pool has with its owner, beside the process that uses it,
// and Clear removes what is named and nothing else.
func TestR10Things(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	for _, id := range []string{"live", "lost"} {
		must(t, p.Create(ctx, id, testSize))
		root, err := p.Mount(ctx, id, spec)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(root, "f"), []byte(id), 0o644))
		s, err := p.Stage(ctx, id, 1, 0, ForKept)
		must(t, err)
		must(t, s.Commit(ctx, nil))
		_, err = p.Stage(ctx, id, 2, 0, ForKept)
		must(t, err)
	}
	busy, err := p.begin("busy")
	must(t, err)
	defer p.end(busy)
	must(t, os.MkdirAll(p.path("tmp", "dead.1", "tree"), 0o700))
	must(t, os.MkdirAll(p.path("trash", "x.1", "it"), 0o700))
	must(t, os.MkdirAll(p.imgDir("empty"), 0o700))
	// A device whose file was deleted under it.
	ghost := p.path("disks", "ghost")
	must(t, os.WriteFile(ghost, make([]byte, 1<<20), 0o600))
	_, err = attach(ctx, ghost, false)
	must(t, err)
	must(t, os.Remove(ghost))

	q := Peek(p.cfg)
	things, err := q.Things(ctx)
	must(t, err)
	got := map[string]bool{}
	for _, thing := range things {
		name := thing.Name
		if thing.Kind == KindLoop {
			name = thing.What
		}
		name = strings.TrimPrefix(strings.TrimPrefix(name, p.dir), p.run)
		got[thing.Kind+" "+name+" "+thing.Owner] = true
	}
	want := []string{
		"mount  pool", // the pool's own, and the directory of mounts
		"mount /templates/" + spec.Template + " pool",
		"loop /templates/" + spec.Template + "/rootfs." + must1(p.Template(ctx, spec.Template))(t).Format + " pool",
		"loop " + strings.TrimPrefix(p.poolFile(), p.dir) + " pool",
		"loop /disks/ghost (deleted) ",
		"file /tmp/dead.1 ", "file /trash/x.1 ", "file /empty empty",
	}
	for _, id := range []string{"live", "lost"} {
		want = append(want, "mount /"+id+"/root "+id, "mount /"+id+"/img "+id, "loop /disks/"+id+"/disk.img "+id,
			"disk /disks/"+id+" "+id, "save /saves/"+id+"/1 "+id, "file /saves/"+id+"/2.tmp "+id, "file /"+id+" "+id)
	}
	for _, w := range want {
		if !got[w] {
			t.Errorf("not listed: %s", w)
		}
		delete(got, w)
	}
	for extra := range got {
		t.Errorf("listed: %s", extra)
	}

	reserve := fileSize(p.reserveFile())
	for range 2 { // what is gone is gone
		for _, thing := range things {
			if thing.Owner == "lost" || thing.Owner == "" || thing.Owner == "empty" {
				must(t, q.Clear(ctx, thing))
			}
		}
	}
	if fileSize(p.reserveFile()) != reserve {
		t.Error("a look from outside has changed the reserve")
	}
	again, err := q.Things(ctx)
	must(t, err)
	for _, thing := range again {
		if thing.Owner != "live" && thing.Owner != OwnerPool {
			t.Errorf("left: %+v", thing)
		}
	}
	if exists(p.diskDir("lost")) || exists(p.path("saves", "lost")) || !exists(busy.path) {
		t.Error("too little or too much was removed")
	}
	if read(t, filepath.Join(p.rootDir("live"), "f")) != "live" || !exists(p.saveDir("live", 1)) || !exists(p.saveDir("live", 2)+stagingMark) {
		t.Error("what is owned was touched")
	}
}

func must1[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		must(t, err)
		return v
	}
}

// A clean-up never tears away what a process uses.
func TestClearWaitsForUsers(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	must(t, p.Create(t.Context(), "a", testSize))
	root, err := p.Mount(t.Context(), "a", layers(t, p))
	must(t, err)
	f, err := os.Create(filepath.Join(root, "f"))
	must(t, err)
	defer f.Close()
	q := Peek(p.cfg)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, thing := range must1(q.Things(t.Context()))(t) {
		if thing.Kind == KindMount && thing.Owner == "a" || thing.Kind == KindDisk {
			if err := q.Clear(ctx, thing); err == nil {
				t.Errorf("%+v was removed in use", thing)
			}
		}
	}
	if _, err := f.Write([]byte("x")); err != nil {
		t.Error(err)
	}
}

// Peek makes nothing, and Show makes no pool.
func TestPeekMakesNothing(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	for range 2 {
		q := Peek(cfg)
		if things := must1(q.Things(t.Context()))(t); len(things) > 0 || q.Made() || len(names(cfg.Dir)) > 0 || exists(cfg.RunDir) {
			t.Errorf("nothing has %v", things)
		}
		must(t, os.MkdirAll(cfg.Dir, 0o700))
	}
	q := Peek(cfg)
	p := open(t, cfg)
	must(t, os.MkdirAll(p.path("tmp", "dead.1"), 0o700))
	must(t, p.TakeDown(t.Context()))
	// Not mounted, nothing shows; shown, what a crash left is still there.
	if !q.Made() {
		t.Error("the pool is not seen")
	}
	must(t, q.Show(t.Context()))
	found := false
	for _, thing := range must1(q.Things(t.Context()))(t) {
		found = found || thing.Name == p.path("tmp", "dead.1")
	}
	var st unix.Statfs_t
	if must(t, unix.Statfs(p.dir, &st)); !found || st.Type != unix.XFS_SUPER_MAGIC {
		t.Error("the pool does not show what is in it")
	}
}
