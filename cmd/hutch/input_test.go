package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Bad input gives a typed error that says what to do, and makes nothing.
func TestBadInput(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	other := newBox(t)
	count := strings.Count(hutchOK(t, "ls", "--json"), `"id": "sbx_`)
	for name, c := range map[string]struct {
		kind string
		args []string
	}{
		"unknown id":    {"not_found", []string{"get", "sbx_01h455vb4pex5vsknk084sn02q"}},
		"unknown name":  {"not_found", []string{"stop", "no-such-box"}},
		"taken name":    {"conflict", []string{"new", "--name", b.name}},
		"taken rename":  {"conflict", []string{"rename", other.name, b.name}},
		"upper case":    {"invalid_argument", []string{"new", "--name", "Upper"}},
		"long name":     {"invalid_argument", []string{"new", "--name", strings.Repeat("a", 41)}},
		"no template":   {"not_found", []string{"new", "--template", "nothing"}},
		"zero cpus":     {"invalid_argument", []string{"new", "--cpus", "0"}},
		"negative cpus": {"invalid_argument", []string{"new", "--cpus", "-1"}},
		"many cpus":     {"invalid_argument", []string{"new", "--cpus", "100000"}},
		"little memory": {"invalid_argument", []string{"new", "--memory", "1KiB"}},
		"much memory":   {"invalid_argument", []string{"new", "--memory", "900TiB"}},
		"little disk":   {"invalid_argument", []string{"new", "--disk", "4KB"}},
		"much disk":     {"invalid_argument", []string{"new", "--disk", "900TB"}},
		"no forks":      {"invalid_argument", []string{"fork", b.name, "--count", "0"}},
		"101 forks":     {"invalid_argument", []string{"fork", b.name, "--count", "101"}},
		"fork mode":     {"invalid_argument", []string{"fork", b.name, "--mode", "half"}},
		"sleep mode":    {"invalid_argument", []string{"new", "--sleep", "sometimes"}},
		"no such image": {"not_found", []string{"templates", "build", "x", "--from-oci", "/no/such/image.tar"}},
	} {
		t.Run(name, func(t *testing.T) {
			e := hutchFailsAt(t, c.kind, c.args...)
			if msg, _ := e["message"].(string); len(msg) < 20 {
				t.Errorf("the message says too little: %q", msg)
			}
		})
	}
	for name, c := range map[string]struct {
		status     int
		body, code string
	}{
		"no JSON":       {http.StatusBadRequest, "{", "invalid_argument"},
		"not an object": {http.StatusBadRequest, "[]", "invalid_argument"},
		"unknown field": {http.StatusBadRequest, `{"nane":"x"}`, "invalid_argument"},
		"twice":         {http.StatusBadRequest, `{"name":"x","name":"y"}`, "invalid_argument"},
		"a later field": {http.StatusNotImplemented, `{"snapshot":"golden"}`, "unsupported"},
		"negative":      {http.StatusBadRequest, `{"disk_bytes":-1}`, "invalid_argument"},
		"zero":          {http.StatusBadRequest, `{"memory_bytes":0}`, "invalid_argument"},
		"a float":       {http.StatusBadRequest, `{"cpus":1.5}`, "invalid_argument"},
	} {
		t.Run(name, func(t *testing.T) {
			status, body := api(t, "POST", "/v1/sandboxes", nil, strings.NewReader(c.body))
			if status != c.status || !strings.Contains(body, c.code) {
				t.Errorf("%d %s", status, body)
			}
		})
	}
	t.Run("100 MB", func(t *testing.T) {
		sent := &counted{Reader: io.LimitReader(zeros{}, 100<<20)}
		status, body := api(t, "POST", "/v1/sandboxes", nil, sent)
		if status != http.StatusRequestEntityTooLarge || !strings.Contains(body, "too_large") {
			t.Errorf("%d %s", status, body)
		}
		if n := sent.n.Load(); n > 50<<20 {
			t.Errorf("the server took %d bytes of it before it refused", n)
		}
	})
	if got := strings.Count(hutchOK(t, "ls", "--json"), `"id": "sbx_`); got < count {
		t.Errorf("%d sandboxes of %d are left", got, count)
	}
	b.sh("true")
}

// hutchFailsAt is hutchFails for verbs whose flags follow sub-commands.
func hutchFailsAt(t *testing.T, kind string, args ...string) map[string]any {
	t.Helper()
	if args[0] == "templates" {
		return hutchFailsRaw(t, kind, append(args, "--json"))
	}
	return hutchFails(t, kind, args...)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// counted counts what is read.
type counted struct {
	io.Reader
	n atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// R6: other hosts' pages and names do not get in, nor a call without a key.
func TestWhoGetsIn(t *testing.T) {
	t.Parallel()
	for name, header := range map[string]map[string]string{
		"another host":   {"Host": "evil.example"},
		"another origin": {"Origin": "https://evil.example"},
	} {
		if status, body := api(t, "GET", "/v1/sandboxes", header, nil); status != http.StatusForbidden {
			t.Errorf("%s: %d %s", name, status, body)
		}
	}
	if status, body := api(t, "GET", "/v1/sandboxes", map[string]string{"Authorization": "Bearer hutch_nothing"}, nil); status != http.StatusUnauthorized {
		t.Errorf("a wrong key: %d %s", status, body)
	}
	info, err := os.Stat(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("the data directory has mode %v", info.Mode())
	}
	r, err := shared.try(30*time.Second, nil, "up", "--foreground", "--data", t.TempDir(), "--listen", "0.0.0.0:0")
	if err == nil || !strings.Contains(r.stderr, "TLS") {
		t.Errorf("listening to all: %s", r)
	}
}

// A directory with something else in it is no installation, and no question makes it
// one.
func TestForeignDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "mine"), []byte("mine"))
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"down"}, {"doctor", "--clean"}, {"up"}, {"up", "--foreground"}} {
		_, _ = shared.try(time.Minute, nil, append(args, "--data", dir)...)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("in the directory: %v, %v", entries, err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the directory: %v, %v", info, err)
	}
}

// V1: a retried call with the same key makes one sandbox.
func TestRequestKey(t *testing.T) {
	t.Parallel()
	name := newName(t)
	t.Cleanup(func() { _, _ = shared.try(time.Minute, nil, "delete", name, "--yes") })
	var ids []string
	for range 5 {
		ids = append(ids, field(t, hutchOK(t, "new", "--name", name, "--request-key", "key-"+name, "--json"), "id"))
	}
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("several sandboxes: %v", ids)
		}
	}
	hutchFails(t, "conflict", "new", "--name", name+"x", "--request-key", "key-"+name)
}

// A template whose image is damaged gives an error that says so, and leaves nothing
// half made.
func TestDamagedTemplate(t *testing.T) {
	t.Parallel()
	image := filepath.Join(t.TempDir(), "image.tar")
	writeFile(t, image, dockerTar(t, map[string]string{"etc/small": "small"}))
	hutchOK(t, "templates", "build", "small", "--from-oci", image)
	fine := newBox(t, "--template", "small")
	if r := fine.exec(nil, "--", "/.hutch/guest", "--version"); r.code != 0 {
		t.Errorf("a template with next to nothing in it: %s", r)
	}
	writeFile(t, image, dockerTar(t, map[string]string{"etc/damaged": "damaged"}))
	hutchOK(t, "templates", "build", "damaged", "--from-oci", image)
	digest := ""
	for _, doc := range strings.Split(hutchOK(t, "templates", "ls", "--json"), "{") {
		if strings.Contains(doc, `"name": "damaged"`) {
			digest = field(t, doc, "version")
		}
	}
	root := filepath.Join(shared.data(), "pool", "templates", digest, "rootfs.erofs")
	for at := int64(1024); at < 1028; at++ { // the magic number of EROFS
		flip(t, root, at)
	}
	name := newName(t)
	hutchFails(t, "data_corrupt", "new", "--name", name, "--template", "damaged")
	b := &box{t, name}
	b.is("failed")
	hutchFails(t, "failed_precondition", "resume", name)
	b.hutch("delete")
	hutchOK(t, "templates", "rm", "damaged", "--yes")
}

// dockerTar makes what `docker save` writes, of one layer.
func dockerTar(t *testing.T, files map[string]string) []byte {
	t.Helper()
	layer := tarOf(t, files)
	return tarOf(t, map[string]string{
		"layer.tar":     string(layer),
		"config.json":   fmt.Sprintf(`{"architecture":"amd64","os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, sha256.Sum256(layer)),
		"manifest.json": `[{"Config":"config.json","RepoTags":["small:latest"],"Layers":["layer.tar"]}]`,
	})
}

func tarOf(t *testing.T, files map[string]string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// R3: CPUs and memory are what was asked for, and running out of memory is an event.
func TestLimits(t *testing.T) {
	t.Parallel()
	b := newBox(t, "--memory", "256MiB", "--cpus", "2", "--disk", "1GB")
	if got := b.sh("nproc; awk '/MemTotal/ {print int($2/1024)}' /proc/meminfo"); got != "2\n256" {
		t.Errorf("cpus and MiB inside: %q", got)
	}
	if size := strings.TrimSpace(b.sh("df -B1 --output=size / | tail -1")); size != "1000001536" { // whole blocks of 4 KiB
		t.Errorf("df says %s of 1 GB", size)
	}
	r := b.exec(nil, "--", "sh", "-c", "head -c 2000000000 /dev/zero > /workspace/full; df --output=avail / | tail -1")
	if strings.TrimSpace(r.stdout) != "0" || !strings.Contains(r.stderr, "No space") {
		t.Errorf("a full disk: %s", r)
	}
	b.hutch("stop") // a full disk does not keep it from stopping and resuming (D6)
	b.hutch("resume")
	b.sh("rm /workspace/full; echo fine > /workspace/after")
	r = b.exec(nil, "--", "python3", "-c", "x = bytearray(600 << 20); print('too much')")
	deadline := time.Now().Add(2 * time.Minute)
	for time.Now().Before(deadline) && b.get().State == "ready" && !strings.Contains(b.exec(nil, "--", "echo", "ok").stdout, "ok") {
		time.Sleep(100 * time.Millisecond)
	}
	switch got := b.get(); {
	case got.State == "failed" && got.Reason == "oom_killed":
		// E1, E2: how the command ended is not known, and why is.
		if r.code != 125 || !strings.Contains(r.stderr, "ran out of memory (it has 256MiB)") {
			t.Errorf("the command that ran out of memory: %s", r)
		}
		b.hutch("resume")
	case got.State != "ready":
		t.Errorf("after running out of memory: %+v", got)
	default:
		b.told("sandbox.out_of_memory")
	}
	if got := b.sh("cat /workspace/after"); got != "fine" {
		t.Errorf("after running out of memory the file has %q", got)
	}
}

// W1, Z9: a file that is deleted and still open is a program's memory as much as its
// other memory is: it survives a sleep.
func TestDeletedOpenFileSurvivesSleep(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.hutch("exec", "--detach", "--", "python3", "-c", `
import hashlib, os, time
f = open("/workspace/gone", "w+b"); f.write(b"x" * (64 << 20)); f.flush(); os.unlink("/workspace/gone")
open("/workspace/done", "w").close()
while not os.path.exists("/workspace/ask"): time.sleep(0.1)
f.seek(0)
text = hashlib.sha256(f.read()).hexdigest()
with open("/workspace/new", "w") as out: out.write(text)
os.rename("/workspace/new", "/workspace/answer")
`)
	b.sh("while ! test -e /workspace/done; do sleep 0.05; done")
	b.hutch("sleep")
	b.hutch("wake")
	want := fmt.Sprintf("%x", sha256.Sum256(bytes.Repeat([]byte("x"), 64<<20)))
	if got := b.sh("touch /workspace/ask; while ! test -e /workspace/answer; do sleep 0.05; done; cat /workspace/answer"); got != want {
		t.Errorf("the deleted file has the digest %s, not %s", got, want)
	}
}

// told waits for an event of the sandbox.
func (b *box) told(event string) {
	b.t.Helper()
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(200 * time.Millisecond) {
		if strings.Contains(b.hutch("events", "--json"), event) {
			return
		}
	}
	b.t.Errorf("no event %s", event)
}
