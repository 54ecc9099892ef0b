package gvisor_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

var serial atomic.Int64

// unique names kernel objects of this test run.
func unique(prefix string) string {
	return fmt.Sprintf("%s%d-%d", prefix, os.Getpid(), serial.Add(1))
}

// runsc is the binary under test. HUTCH_TEST_RUNSC names another, such as one built
// from the stock module, to see which tests fail on it.
func runsc(tb testing.TB) string {
	tb.Helper()
	path := os.Getenv("HUTCH_TEST_RUNSC")
	if path == "" {
		path = "../../../bin/hutch-runsc"
	}
	path, err := filepath.Abs(path)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		tb.Fatalf("no hutch-runsc to test, run `make build`: %v", err)
	}
	return path
}

// newDriver makes a driver with a control group of this test run.
func newDriver(tb testing.TB) *gvisor.Driver {
	tb.Helper()
	d := gvisor.New(gvisor.Config{Runsc: runsc(tb), Log: runtimetest.Log(tb), CgroupParent: parent, Debug: os.Getenv("HUTCH_TEST_DEBUG") != ""})
	tb.Cleanup(d.Close)
	return d
}

var parent = fmt.Sprintf("hutch-test-%d", os.Getpid())

func TestMain(m *testing.M) {
	if os.Getenv(agentEnv) != "" {
		agent()
		return
	}
	err := gvisor.BecomeSubreaper()
	if err == nil {
		guestDir, err = os.MkdirTemp("", "hutch-testguest-")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(guestDir)
	gvisor.RemoveParent(parent)
	os.Exit(code)
}

// newSpec makes a place for a sandbox whose root is a copy of the tree from.
func newSpec(tb testing.TB, from string) runtime.Spec {
	tb.Helper()
	if os.Getuid() != 0 {
		tb.Fatal("sandboxes need root: run the tests as root")
	}
	dir, err := os.MkdirTemp("/run", "hutch-test-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	root := filepath.Join(tb.TempDir(), "root")
	if out, err := exec.Command("cp", "-a", from, root).CombinedOutput(); err != nil {
		tb.Fatalf("cp: %v: %s", err, out)
	}
	ns, dial := network(tb)
	return runtime.Spec{
		ID:          unique("sbx_test"),
		Dir:         dir,
		Root:        root,
		NetNS:       ns,
		Hostname:    "test",
		Args:        []string{"/testguest"},
		Env:         []string{"PATH=/bin"},
		CPUs:        2,
		MemoryBytes: 512 << 20,
		Dial:        dial,
	}
}

// tree makes a root file system with nothing but the test guest.
func tree(tb testing.TB) string {
	tb.Helper()
	root := filepath.Join(tb.TempDir(), "tree")
	for _, dir := range []string{"proc", "sys", "dev", "run", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	if err := os.Link(testguest(tb), filepath.Join(root, "testguest")); err != nil {
		tb.Fatal(err)
	}
	return root
}

// network makes a namespace for a guest and one for its other end, joined by a veth.
// Nothing of the machine's own network is touched, so all guests have one address.
func network(tb testing.TB) (netns string, dial func(context.Context, int) (net.Conn, error)) {
	tb.Helper()
	guest, outside := unique("hg"), unique("ho")
	for _, ns := range []string{guest, outside} {
		ip(tb, "netns", "add", ns)
		tb.Cleanup(func() { ip(tb, "netns", "del", ns) })
	}
	ip(tb, "-n", outside, "link", "add", "out", "type", "veth", "peer", "name", "eth0", "netns", guest)
	ip(tb, "-n", outside, "addr", "add", "10.0.0.1/24", "dev", "out")
	ip(tb, "-n", outside, "link", "set", "out", "up")
	ip(tb, "-n", guest, "addr", "add", "10.0.0.2/24", "dev", "eth0")
	ip(tb, "-n", guest, "link", "set", "eth0", "up")
	ip(tb, "-n", guest, "link", "set", "lo", "up")
	path := "/run/netns/"
	return path + guest, func(ctx context.Context, port int) (net.Conn, error) {
		return dialFrom(ctx, path+outside, fmt.Sprintf("10.0.0.2:%d", port))
	}
}

func ip(tb testing.TB, args ...string) {
	tb.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		tb.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// dialFrom connects from inside a network namespace. The thread that entered it is
// thrown away with its goroutine.
func dialFrom(ctx context.Context, netns, address string) (conn net.Conn, err error) {
	var once sync.WaitGroup
	once.Go(func() {
		goruntime.LockOSThread()
		var fd int
		if fd, err = unix.Open(netns, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			return
		}
		defer unix.Close(fd)
		if err = unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			return
		}
		var dialer net.Dialer
		conn, err = dialer.DialContext(ctx, "tcp4", address)
	})
	once.Wait()
	return conn, err
}

// guestDir is where the test guest is built, once.
var guestDir string

var buildGuest = sync.OnceValues(func() (string, error) {
	path := filepath.Join(guestDir, "testguest")
	cmd := exec.Command("go", "build", "-o", path, "../runtimetest/testguest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the test guest: %w: %s", err, out)
	}
	return path, nil
})

func testguest(tb testing.TB) string {
	tb.Helper()
	path, err := buildGuest()
	if err != nil {
		tb.Fatal(err)
	}
	return path
}
