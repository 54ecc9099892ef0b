package disk

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

// An open pool is taken over as it is by the next process, with its sandboxes.
func TestOpenAgain(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("x"), 0o644))
	// Rubbish of a dead process, and the work of a living one.
	must(t, os.MkdirAll(p.path("tmp", "debian.1", "tree", "etc"), 0o700))
	must(t, os.MkdirAll(p.path("trash", "x.1", "it"), 0o700))
	busy, err := p.begin("busy")
	must(t, err)
	defer p.end(busy)
	must(t, p.Close())

	q, err := Open(ctx, p.cfg)
	must(t, err)
	if got := names(q.path("tmp")); len(got) != 1 || got[0] != filepath.Base(busy.path) {
		t.Errorf("tmp holds %v", got)
	}
	if got := names(q.path("trash")); len(got) != 0 {
		t.Errorf("trash holds %v", got)
	}
	again, err := q.Mount(ctx, "a", spec)
	must(t, err)
	if again != root || read(t, filepath.Join(again, "f")) != "x" {
		t.Error("the running sandbox's disk is not as it was")
	}
	inv, err := q.Inventory(ctx)
	must(t, err)
	if len(inv.Disks) != 1 || !inv.Disks[0].Root || !inv.Disks[0].Image || !inv.Disks[0].Attached || inv.Disks[0].Stray {
		t.Errorf("the inventory has %+v", inv.Disks)
	}
	table, err := mounts()
	must(t, err)
	count := 0
	for _, m := range table {
		if m.Target == q.dir || m.Target == q.run {
			count++
		}
	}
	if count != 3 { // the pool on a shared mount, and the run directory
		t.Errorf("pool and run directory are mounted %d times", count)
	}
}

// A reboot takes mounts, devices and the run directory; a crash may leave a device or
// half a pool file.
func TestOpenAfterReboot(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	must(t, os.MkdirAll(cfg.Dir, 0o700))
	must(t, os.WriteFile(filepath.Join(cfg.Dir, "pool.img.tmp"), []byte("half"), 0o600))
	p := open(t, cfg)
	ctx := t.Context()
	spec := layers(t, p)
	if exists(p.poolFile() + ".tmp") {
		t.Error("the half-made pool file is left")
	}
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(root, "f"), []byte("x"), 0o644))
	must(t, p.TakeDown(ctx))
	must(t, p.TakeDown(ctx))
	for _, stale := range []bool{false, true} {
		if stale {
			_, err := attach(ctx, p.poolFile(), false)
			must(t, err)
		}
		q, err := Open(ctx, p.cfg)
		must(t, err)
		root, err := q.Mount(ctx, "a", spec)
		must(t, err)
		if read(t, filepath.Join(root, "f")) != "x" {
			t.Error("the disk is not as it was")
		}
		must(t, q.TakeDown(ctx))
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	good := testConfig(t)
	for name, change := range map[string]func(*Config){
		"relative": func(c *Config) { c.Dir = "data" },
		"comma":    func(c *Config) { c.Dir += ",x" },
		"colon":    func(c *Config) { c.RunDir += ":x" },
		"format":   func(c *Config) { c.TemplateFormat = "squashfs" },
	} {
		cfg := good
		change(&cfg)
		if _, err := Open(ctx, cfg); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for _, size := range []int64{1, 1 << 60} {
		cfg := good
		cfg.PoolBytes = size
		_, err := Open(ctx, cfg)
		wantKind(t, err, fault.NoCapacity)
	}
	cfg := good
	cfg.Tools = map[string]string{"mkfs.xfs": "/bin/false"}
	_, err := Open(ctx, cfg)
	wantKind(t, err, fault.Internal)
	if left := names(filepath.Join(cfg.Dir, "pool")); len(left) > 0 || exists(filepath.Join(cfg.Dir, "pool.img")) {
		t.Errorf("a failed Open leaves %v", left)
	}
	// Not our pool: a file that is no XFS.
	must(t, os.WriteFile(filepath.Join(cfg.Dir, "pool.img"), make([]byte, 1<<20), 0o600))
	_, err = Open(ctx, good)
	wantKind(t, err, fault.DataCorrupt)
	left, err := loopsUnder(good.Dir)
	must(t, err)
	if len(left) > 0 {
		t.Errorf("loops are left: %v", left)
	}
}

// Where the data directory has reflink itself the pool is a plain directory.
func TestPlainPool(t *testing.T) {
	t.Parallel()
	outer := newPool(t)
	ctx := t.Context()
	cfg := testConfig(t)
	cfg.Dir = outer.path("inner")
	p := open(t, cfg)
	if exists(p.poolFile()) {
		t.Error("a pool file was made")
	}
	u, err := p.Usage(ctx)
	must(t, err)
	if u.File {
		t.Errorf("Usage says %+v", u)
	}
	must(t, p.Create(ctx, "a", testSize))
	_, err = p.Mount(ctx, "a", layers(t, p))
	must(t, err)
	must(t, p.Unmount(ctx, "a"))
}

func TestParseMounts(t *testing.T) {
	t.Parallel()
	table := parseMounts(`36 35 98:0 /mnt1 /mnt\040a rw,noatime master:1 - ext3 /dev/root rw,errors=continue
37 36 0:30 / /mnt/b\134c rw shared:2 propagate_from:3 - overlay overlay rw,lowerdir=/x:/y,upperdir=/u
broken
38 36 0:31 / /mnt\040a ro - tmpfs with\040space ro
`)
	if len(table) != 3 {
		t.Fatalf("got %+v", table)
	}
	if m := table.at("/mnt a"); m == nil || m.Type != "tmpfs" || m.Source != "with space" {
		t.Errorf("the topmost mount is %+v", m)
	}
	if m := table.at(`/mnt/b\c`); m == nil || m.option("upperdir") != "/u" || m.option("lowerdir") != "/x:/y" || m.option("none") != "" {
		t.Errorf("got %+v", m)
	}
	if table.at("/none") != nil {
		t.Error("found what is not there")
	}
}
