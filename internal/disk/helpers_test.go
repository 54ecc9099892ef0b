package disk

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

const (
	testPool = 1 << 30
	testSize = 64 << 20
)

// testConfig names directories of this test alone, on a real disk: a loop device
// with direct I/O needs one below.
func testConfig(t testing.TB) Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("these tests mount file systems: run them as root")
	}
	dir, err := os.MkdirTemp("/var/tmp", "hutch-disk-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return Config{
		Dir:       filepath.Join(dir, "data"),
		RunDir:    filepath.Join(dir, "run"),
		PoolBytes: testPool,
		Log:       slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// open opens a pool and sees to it that nothing of it is left in the end.
func open(t testing.TB, cfg Config) *Pool {
	t.Helper()
	p, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.TakeDown(context.Background()); err != nil {
			t.Errorf("%v; held by %v", err, holders(p))
		}
		left, err := loopsUnder(p.cfg.Dir)
		if err != nil || len(left) > 0 {
			t.Errorf("loop devices are left: %v, %v", left, err)
		}
		table, err := mounts()
		if err != nil {
			t.Error(err)
		}
		for _, m := range table {
			if strings.HasPrefix(m.Target, filepath.Dir(p.cfg.Dir)+"/") {
				t.Errorf("%s is still mounted", m.Target)
			}
		}
	})
	return p
}

// holders names the processes whose mount namespace or open files have the pool.
func holders(p *Pool) []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, dir := range dirs {
		table, _ := os.ReadFile(dir + "/mountinfo")
		held := strings.Contains(string(table), p.dir)
		for _, fd := range names(dir + "/fd") {
			to, _ := os.Readlink(dir + "/fd/" + fd)
			held = held || strings.HasPrefix(to, p.dir)
		}
		if held {
			cmd, _ := os.ReadFile(dir + "/cmdline")
			found = append(found, dir+" "+strings.ReplaceAll(string(cmd), "\x00", " "))
		}
	}
	return found
}

func newPool(t testing.TB) *Pool {
	t.Helper()
	return open(t, testConfig(t))
}

// layers gives a small template and an agent layer.
func layers(t testing.TB, p *Pool) MountSpec {
	t.Helper()
	agent := filepath.Join(t.TempDir(), "guest")
	must(t, os.WriteFile(agent, []byte("#!/bin/sh\necho agent\n"), 0o755))
	digest, err := p.InstallAgent(t.Context(), agent)
	must(t, err)
	return MountSpec{Template: template(t, p, map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "opt/dir/file": "from the template\n"}), Agent: digest}
}

// template makes one of a few files.
func template(t testing.TB, p *Pool, files map[string]string) string {
	t.Helper()
	w, err := p.begin("test")
	must(t, err)
	defer p.end(w)
	for name, text := range files {
		path := filepath.Join(w.path, "tree", name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	tmpl, err := p.finishTemplate(t.Context(), w, Template{Origin: "test"}, nil)
	must(t, err)
	return tmpl.Digest
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t testing.TB, err error, kind fault.Kind) {
	t.Helper()
	if !fault.Is(err, kind) {
		t.Fatalf("got %v, want kind %s", err, kind)
	}
}

func read(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

func sum(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	must(t, err)
	return hex.EncodeToString(h.Sum(nil))
}

// fill writes until the file system has nothing left.
func fill(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	must(t, err)
	defer f.Close()
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(bytes.Repeat([]byte{0xa5}, size)); errors.Is(err, unix.ENOSPC) {
			size /= 2
		} else {
			must(t, err)
		}
	}
	if err := f.Sync(); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}
