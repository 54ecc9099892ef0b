package disk

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestMain(m *testing.M) {
	if os.Getenv("HUTCH_TEST_BUILD") != "" {
		buildForever()
	}
	os.Exit(m.Run())
}

// standIn writes a program that takes the place of mmdebstrap. Its target directory
// is the argument after the suite, as ours is called: … SUITE TARGET [SOURCE].
func standIn(t testing.TB, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "mmdebstrap")
	must(t, os.WriteFile(path, []byte(`#!/bin/sh
set -e
for a; do case "$a" in --*) ;; *) break;; esac; shift; done
suite=$1 target=$2 source=$3
`+body), 0o755))
	return path
}

const smallTree = `mkdir -p "$target/etc/apt" "$target/usr/bin" "$target/dev" "$target/etc/default" "$target/etc/skel"
ln -s usr/bin "$target/bin"; touch "$target/usr/bin/bash" "$target/etc/sudoers"
echo alias > "$target/etc/skel/.bashrc"
printf 'root:x:0:0::/root:/bin/bash\n' > "$target/etc/passwd"
mknod "$target/dev/null" c 1 3; hostname > "$target/etc/hostname"; echo nameserver > "$target/etc/resolv.conf"
`

func TestBuildDebianSteps(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	args := filepath.Join(t.TempDir(), "args")
	cfg.Tools = map[string]string{"mmdebstrap": standIn(t, smallTree+`echo "I: making it..." >&2; echo W: odd >&2; echo "$suite $source" > `+args)}
	p := open(t, cfg)
	var steps []string
	tmpl, err := p.BuildDebian(t.Context(), DebianRecipe{Packages: []string{"jq"}}, func(step string, _, _ int64) { steps = append(steps, step) })
	must(t, err)
	if got := strings.Join(steps, " "); got != "packages packages: making it files digest image ready" {
		t.Errorf("the steps were %s", got)
	}
	if want := (Account{"user", 1000, 1000, "/home/user", "/bin/bash"}); tmpl.Account != want || tmpl.Ref != "bookworm" || tmpl.Origin != "debian" {
		t.Errorf("the template is %+v", tmpl)
	}
	if got := read(t, args); !strings.HasPrefix(got, "bookworm ") {
		t.Errorf("mmdebstrap was called with %q", got)
	}
	spec := layers(t, p)
	spec.Template = tmpl.Digest
	must(t, p.Create(t.Context(), "a", testSize))
	root, err := p.Mount(t.Context(), "a", spec)
	must(t, err)
	for name, want := range map[string]string{
		"etc/hostname": "sandbox\n", "etc/resolv.conf": "", "etc/default/locale": "LANG=C.UTF-8\n",
		"home/user/.bashrc": "alias\n", "etc/group": "root:x:0:\nuser:x:1000:\n",
	} {
		if got := read(t, filepath.Join(root, name)); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
	if exists(filepath.Join(root, "dev/null")) {
		t.Error("the template has a device")
	}
	// With a mirror that is what packages come from.
	_, err = p.BuildDebian(t.Context(), DebianRecipe{Suite: "trixie", Mirror: "http://mirror.invalid/debian"}, nil)
	must(t, err)
	if got := read(t, args); got != "trixie http://mirror.invalid/debian\n" {
		t.Errorf("mmdebstrap was called with %q", got)
	}
}

func TestBuildDebianFails(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	cfg.Tools = map[string]string{"mmdebstrap": standIn(t, smallTree+"echo no such package >&2; exit 100")}
	p := open(t, cfg)
	ctx := t.Context()
	for _, bad := range []DebianRecipe{{Suite: "--help"}, {Packages: []string{"--hook"}}, {Packages: []string{"a,b"}}, {Packages: []string{"./x.deb"}}} {
		_, err := p.BuildDebian(ctx, bad, nil)
		wantKind(t, err, fault.InvalidArgument)
	}
	_, err := p.BuildDebian(ctx, DebianRecipe{}, nil)
	wantKind(t, err, fault.Unavailable)
	if !strings.Contains(err.Error(), "no such package") {
		t.Errorf("the cause is lost: %v", err)
	}

	// Cancelled: everything that it started is killed.
	mark := filepath.Join(t.TempDir(), "started")
	cfg.Tools["mmdebstrap"] = standIn(t, smallTree+"(exec sleep 1000000) & touch "+mark+"; wait")
	stop, cancel := context.WithCancel(ctx)
	go func() { // ends with the test at the latest: its context ends the poll
		defer cancel()
		poll(ctx, func() (bool, error) { return exists(mark), nil })
	}()
	_, err = p.BuildDebian(stop, DebianRecipe{}, nil)
	wantKind(t, err, fault.Cancelled)
	waitGone(t, p)
	if left := names(p.path("tmp")); len(left) > 0 {
		t.Errorf("tmp holds %v", left)
	}
	cfg.Tools["mmdebstrap"] = "/none/such"
	_, err = p.BuildDebian(ctx, DebianRecipe{}, nil)
	wantKind(t, err, fault.Unavailable)
}

// waitGone waits until no process has the pool in its environment: those of a build
// have TMPDIR there.
func waitGone(t testing.TB, p *Pool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var last string
	err := poll(ctx, func() (bool, error) {
		files, err := filepath.Glob("/proc/[0-9]*/environ")
		for _, f := range files {
			if env, err := os.ReadFile(f); err == nil && strings.Contains(string(env), p.path("tmp")) {
				last = f
				return false, nil
			}
		}
		return true, err
	})
	if err != nil {
		t.Errorf("a process of the build goes on: %s", last)
	}
}

// buildForever is the process that TestBuildDebianKilled kills.
func buildForever() {
	p, err := Open(context.Background(), Config{
		Dir: os.Getenv("HUTCH_TEST_DIR"), RunDir: os.Getenv("HUTCH_TEST_RUN"), PoolBytes: testPool,
		Tools: map[string]string{"mmdebstrap": os.Getenv("HUTCH_TEST_BUILD")},
	})
	if err == nil {
		_, err = p.BuildDebian(context.Background(), DebianRecipe{}, nil)
	}
	os.Stderr.WriteString(err.Error())
	os.Exit(1)
}

// A build that dies with its process leaves rubbish for the next Open to remove, and
// nothing that runs.
func TestBuildDebianKilled(t *testing.T) {
	t.Parallel()
	cfg := testConfig(t)
	p := open(t, cfg)
	pipe := filepath.Join(t.TempDir(), "started")
	must(t, unix.Mkfifo(pipe, 0o600))
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), "HUTCH_TEST_DIR="+cfg.Dir, "HUTCH_TEST_RUN="+cfg.RunDir,
		"HUTCH_TEST_BUILD="+standIn(t, smallTree+"(exec sleep 1000000) & mount -t tmpfs x \"$target/dev\"; echo started > "+pipe+"; wait"))
	child.Stderr = t.Output()
	must(t, child.Start())
	started, err := os.Open(pipe)
	must(t, err)
	defer started.Close()
	if line, err := bufio.NewReader(started).ReadString('\n'); err != nil || line != "started\n" {
		t.Fatalf("the build did not start: %q, %v", line, err)
	}
	// While it runs its work is nobody else's to remove.
	q, err := Open(t.Context(), cfg)
	must(t, err)
	if left := names(q.path("tmp")); len(left) != 1 {
		t.Errorf("tmp holds %v", left)
	}
	must(t, child.Process.Kill())
	if err := child.Wait(); err == nil {
		t.Error("the build ended well")
	}
	waitGone(t, p)
	must(t, second(Open(t.Context(), cfg)))
	if left := names(p.path("tmp")); len(left) > 0 {
		t.Errorf("tmp holds %v", left)
	}
}

func second[T any](_ T, err error) error { return err }

func TestSourceLines(t *testing.T) {
	t.Parallel()
	targets := `http://a/debian/ bookworm main Debian
http://a/debian/ bookworm main Debian
http://a/debian/ bookworm non-free Debian
http://a/debian/ bookworm-updates main Debian
http://a/debian-security/ bookworm-security main
http://a/debian/ trixie main Debian
http://b/linux/ bookworm stable Docker
http://c/apt/ bookworm main HashiCorp
`
	want := "deb http://a/debian/ bookworm main\ndeb http://a/debian/ bookworm-updates main\ndeb http://a/debian-security/ bookworm-security main\n"
	if got := sourceLines(targets, "bookworm"); got != want {
		t.Errorf("got\n%s", got)
	}
	for _, none := range []string{"noble", "bookworm-updates"} {
		if got := sourceLines(targets, none); got != "" && none == "noble" {
			t.Errorf("%s: got %q", none, got)
		}
	}
	if got := sourceLines("http://a/debian/ bookworm-updates main Debian\n", "bookworm"); got != "" {
		t.Errorf("updates alone give %q", got)
	}
}

// The real thing, once: a root file system that runs programs as its user. It takes
// two minutes on a quiet machine.
func TestBuildDebian(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a real Debian: not with -short")
	}
	t.Parallel()
	cfg := testConfig(t)
	cfg.PoolBytes = 2 << 30
	p := open(t, cfg)
	ctx := t.Context()
	begin := time.Now()
	tmpl, err := p.BuildDebian(ctx, DebianRecipe{}, func(step string, _, _ int64) { t.Logf("%7.1fs %s", time.Since(begin).Seconds(), step) })
	must(t, err)
	t.Logf("built %d bytes of %s in %v", tmpl.Bytes, tmpl.Format, time.Since(begin))
	spec := layers(t, p)
	spec.Template = tmpl.Digest
	must(t, p.Create(ctx, "a", 200<<20))
	root, err := p.Mount(ctx, "a", spec)
	must(t, err)
	// A guest's kernel has its own devices and obeys set-uid bits; here the host's does,
	// in a namespace of its own.
	const inside = `mount -o remount,bind,suid,dev "$1" && mount --rbind /dev "$1/dev" && mount -t proc proc "$1/proc" && exec chroot "$1" \
		env -i LANG=C.UTF-8 HOME=/home/user PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
		setpriv --reuid=1000 --regid=1000 --init-groups bash -c "$2"`
	for _, script := range []string{
		`test "$(id -un)" = user && test "$(id -u)" = 1000 && test "$HOME" = /home/user`,
		`cd /workspace && echo x > f && test "$(stat -c %U /workspace)" = user`,
		`git --version && python3 -c 'print(1)' && curl --version && ps --version && ip -V`,
		`test "$(sudo id -u)" = 0`,
		`test "$(locale charmap)" = UTF-8`,
		`test ! -s /etc/machine-id && test ! -e /etc/dpkg/dpkg.cfg.d/99mmdebstrap`,
	} {
		cmd := exec.CommandContext(ctx, "unshare", "--mount", "sh", "-c", inside, "sh", root, script)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", script, err, out)
		}
	}
	if got := names(filepath.Join(root, "dev")); len(got) > 0 {
		t.Errorf("/dev holds %v", got)
	}
	if entries := names(filepath.Join(root, "var/lib/apt/lists")); len(entries) > 2 {
		t.Errorf("package lists are left: %v", entries)
	}
	if !exists(filepath.Join(root, "usr/bin/apt-get")) {
		t.Error("the template has no apt")
	}
	must(t, p.Unmount(ctx, "a"))
}
