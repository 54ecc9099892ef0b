package disk

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// A guest lays traps where the host reads and writes; none leads outside.
func TestGuestFiles(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", testSize))
	_, err := p.ReadGuestFile(ctx, "a", "etc/passwd", 100)
	wantKind(t, err, fault.FailedPrecondition)
	root, err := p.Mount(ctx, "a", layers(t, p))
	must(t, err)

	got, err := p.ReadGuestFile(ctx, "a", "/etc/passwd", 100)
	must(t, err)
	if !strings.HasPrefix(string(got), "root:") {
		t.Errorf("read %q", got)
	}
	_, err = p.ReadGuestFile(ctx, "a", "etc/passwd", 3)
	wantKind(t, err, fault.TooLarge)
	_, err = p.ReadGuestFile(ctx, "a", "etc/none", 3)
	wantKind(t, err, fault.NotFound)
	for range 2 {
		must(t, p.WriteGuestFile(ctx, "a", "etc/hostname", []byte("fork\n"), 0o644))
	}
	if read(t, filepath.Join(root, "etc/hostname")) != "fork\n" {
		t.Error("the file was not written")
	}
	wantKind(t, p.WriteGuestFile(ctx, "a", "no/such/dir", nil, 0o644), fault.NotFound)

	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, []byte("the host's"), 0o600))
	must(t, os.Symlink(filepath.Dir(outside), filepath.Join(root, "dirlink")))
	must(t, os.Symlink(outside, filepath.Join(root, "link")))
	must(t, os.Symlink("etc", filepath.Join(root, "inner")))
	must(t, unix.Mkfifo(filepath.Join(root, "fifo"), 0o666))
	must(t, unix.Mknod(filepath.Join(root, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	for _, name := range []string{"dirlink/outside", "link", "inner/passwd", "fifo", "null", "etc"} {
		_, err := p.ReadGuestFile(ctx, "a", name, 100)
		wantKind(t, err, fault.FailedPrecondition)
	}
	for _, name := range []string{"dirlink/outside", "inner/new", "etc", "link/x"} {
		wantKind(t, p.WriteGuestFile(ctx, "a", name, []byte("x"), 0o644), fault.FailedPrecondition)
	}
	// .. stays in the root.
	if _, err := p.ReadGuestFile(ctx, "a", "../../../../../../etc/passwd", 100); err != nil {
		t.Error(err)
	}
	// What has the name is replaced and not followed.
	for _, name := range []string{"link", "fifo", "null"} {
		must(t, p.WriteGuestFile(ctx, "a", name, []byte("new"), 0o600))
		if st, err := os.Lstat(filepath.Join(root, name)); err != nil || !st.Mode().IsRegular() {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	if read(t, outside) != "the host's" {
		t.Error("a link of the guest changed a file of the host")
	}
	for _, name := range names(root) {
		if strings.HasPrefix(name, ".hutch-") {
			t.Errorf("a temporary file is left: %s", name)
		}
	}
}

// A guest that removes or replaces its agent boots again with the host's.
func TestAgentComesBack(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	spec := layers(t, p)
	outside := t.TempDir()
	must(t, os.WriteFile(filepath.Join(outside, "guest"), []byte("the host's"), 0o644))
	must(t, p.Create(ctx, "a", testSize))
	for name, trap := range map[string]func(root string) error{
		"removed": func(root string) error { return nil },
		"file":    func(root string) error { return os.WriteFile(filepath.Join(root, agentName), []byte("x"), 0o644) },
		"symlink": func(root string) error { return os.Symlink(outside, filepath.Join(root, agentName)) },
		"fifo":    func(root string) error { return unix.Mkfifo(filepath.Join(root, agentName), 0o644) },
		"other":   func(root string) error { return os.MkdirAll(filepath.Join(root, GuestPath, "deep/er"), 0o755) },
		"replaced": func(root string) error {
			return os.CopyFS(filepath.Join(root, agentName), os.DirFS(outside))
		},
	} {
		root, err := p.Mount(ctx, "a", spec)
		must(t, err)
		must(t, os.RemoveAll(filepath.Join(root, agentName)))
		must(t, trap(root))
		must(t, p.Unmount(ctx, "a"))
		root, err = p.Mount(ctx, "a", spec)
		must(t, err)
		if got := read(t, filepath.Join(root, GuestPath)); !strings.Contains(got, "echo agent") {
			t.Errorf("%s: the agent is %q", name, got)
		}
		if left := names(filepath.Join(p.imgDir("a"), asideDir)); len(left) > 0 {
			t.Errorf("%s: %v lies aside", name, left)
		}
		must(t, p.Unmount(ctx, "a"))
	}
	if read(t, filepath.Join(outside, "guest")) != "the host's" {
		t.Error("a link of the guest changed a file of the host")
	}
}

// A process with a mount namespace of its own, as a service of the host has, holds no
// disk that is unmounted here.
func TestOtherNamespacesHoldNothing(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ctx := t.Context()
	must(t, p.Create(ctx, "a", testSize))
	root, err := p.Mount(ctx, "a", layers(t, p))
	must(t, err)
	holder := exec.CommandContext(ctx, "unshare", "--mount", "--propagation", "slave", "sh", "-c", "grep -q "+root+" /proc/self/mountinfo && echo ready; cat")
	in, err := holder.StdinPipe()
	must(t, err)
	out, err := holder.StdoutPipe()
	must(t, err)
	must(t, holder.Start())
	ready := make([]byte, 6)
	if _, err := out.Read(ready); err != nil || string(ready) != "ready\n" {
		t.Fatalf("the other namespace does not see the mount: %q, %v", ready, err)
	}
	begin := time.Now()
	must(t, p.Unmount(ctx, "a"))
	must(t, p.Delete(ctx, "a"))
	if d := time.Since(begin); d > settle/2 {
		t.Errorf("it took %v", d)
	}
	must(t, in.Close())
	must(t, holder.Wait())
}
