package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guest"
	"github.com/hutchrun/hutch/internal/guest/guesttest"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// rootVar names the root directory of a test binary that is to be PID 1 of a sandbox
// made of namespaces.
const rootVar = "HUTCH_GUEST_TEST_ROOT"

// harmlessVar says that the process has given up the right to set the clock, which is
// the machine's and no namespace's.
const harmlessVar = "HUTCH_GUEST_TEST_HARMLESS"

func TestMain(m *testing.M) {
	if root := os.Getenv(rootVar); root != "" {
		if os.Getenv(harmlessVar) == "" {
			fmt.Fprintln(os.Stderr, "test init:", beHarmless())
			os.Exit(98)
		}
		os.Unsetenv(rootVar)
		os.Unsetenv(harmlessVar)
		os.Exit(beInit(root))
	}
	os.Exit(m.Run())
}

// beHarmless executes this program again without the right to set the clock. It
// returns only when that fails.
func beHarmless() error {
	runtime.LockOSThread() // the bounding set belongs to the thread that executes
	if err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_TIME, 0, 0, 0); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", os.Args, append(os.Environ(), harmlessVar+"=1"))
}

// beInit makes the namespaces that this process was born into a small machine, and is
// its PID 1.
func beInit(root string) int {
	fail := func(err error) int {
		fmt.Fprintln(os.Stderr, "test init:", err)
		return 99
	}
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return fail(err)
	}
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"", "/", "", unix.MS_SLAVE | unix.MS_REC},
		{"/usr", root + "/usr", "", unix.MS_BIND | unix.MS_REC},
		{"/dev", root + "/dev", "", unix.MS_BIND | unix.MS_REC},
		{"tmpfs", root + "/run", "tmpfs", 0},
		{"proc", root + "/proc", "proc", 0},
	} {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fail(fmt.Errorf("mount %s: %w", m.target, err))
		}
	}
	cgroups, err := os.ReadDir(root + "/sys/fs/cgroup")
	if err != nil {
		return fail(err)
	}
	for _, c := range cgroups { // a link to a group of the test's own
		place := filepath.Join(root, "sys/fs/cgroup", c.Name())
		group, err := os.ReadFile(place + "/source")
		if err != nil {
			return fail(err)
		}
		if err := unix.Mount(string(group), place, "", unix.MS_BIND, ""); err != nil {
			return fail(err)
		}
	}
	if err := loopbackUp(); err != nil {
		return fail(err)
	}
	if err := unix.Chroot(root); err != nil {
		return fail(err)
	}
	if err := os.Chdir("/"); err != nil {
		return fail(err)
	}
	g := guest.New(guest.Config{Init: true, Version: "test", Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	return guest.RunInit(g, func() (net.Listener, error) { return l, nil })
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// machine is a real PID 1 in namespaces of its own.
type machine struct {
	guesttest.Agent
	cmd    *exec.Cmd
	socket string // where the agent listens
	log    *bytes.Buffer
	exited chan struct{}
}

// newMachine boots one without Init. group, unless "", is a pids control group of the
// test's own that the machine sees as its hierarchy.
func newMachine(t *testing.T, group string) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root, for namespaces and mounts: run the tests as root")
	}
	root := t.TempDir()
	for _, dir := range []string{"usr", "dev", "proc", "run", "tmp", "etc", "var", "sys/fs/cgroup", "root", "home/user"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+dir, filepath.Join(root, dir)); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string]string{
		"etc/passwd": "root:x:0:0::/root:/bin/bash\nuser:x:1234:1234::/home/user:/bin/bash\n",
		"etc/group":  "root:x:0:\nuser:x:1234:\nextra:x:4321:user\n",
	}
	if group != "" {
		files["sys/fs/cgroup/pids/source"] = group
	}
	for name, text := range files {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	file, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	m := &machine{socket: socket, log: &bytes.Buffer{}, exited: make(chan struct{})}
	m.Root, m.Token = root, guesttest.Token("machine")
	m.cmd = exec.Command("/proc/self/exe")
	m.cmd.Env = append(os.Environ(), rootVar+"="+root)
	m.cmd.ExtraFiles = []*os.File{file}
	m.cmd.Stderr = m.log
	m.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { m.cmd.Wait(); close(m.exited) }()
	m.Client = m.client(m.Token)
	t.Cleanup(func() {
		m.Client.Close()
		m.cmd.Process.Kill() // PID 1's end is the end of the namespace's processes
		<-m.exited
		if t.Failed() {
			t.Logf("the machine's log: %s", m.log)
		}
	})
	return m
}

func (m *machine) boot(t *testing.T, req *guestproto.InitRequest) map[string]*guestproto.ItemResult {
	t.Helper()
	if err := m.Client.Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	req.WallClockUnixNano = time.Now().UnixNano()
	r, err := m.Client.Agent.Init(t.Context(), req)
	if err != nil {
		t.Fatalf("init: %v", err)
	}
	items := map[string]*guestproto.ItemResult{}
	for _, i := range r.Items {
		items[i.Item] = i
	}
	return items
}

func initRequest() *guestproto.InitRequest {
	req := guesttest.InitRequest()
	req.DefaultUser = "user"
	req.Identity.Hosts = []byte("127.0.0.1 localhost box\n")
	req.Identity.ResolvConf = []byte("nameserver 10.0.0.1\n")
	return req
}

func (m *machine) file(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(m.Root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Init makes the machine what it was told to be, and commands see it so.
func TestMachineInit(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	if err := os.MkdirAll(filepath.Join(m.Root, "var/lib/hutch"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(m.Root, guestproto.ExitMarker), []byte("reboot"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, item := range m.boot(t, initRequest()) {
		if item.Status != guestproto.ItemStatus_ITEM_STATUS_DONE {
			t.Errorf("%s: %v %s", name, item.Status, item.Message)
		}
		t.Logf("%s: %s", name, item.Message)
	}
	if _, err := os.Stat(filepath.Join(m.Root, guestproto.ExitMarker)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the exit marker is still there: %v", err)
	}
	a := &m.Agent
	o := run(t, a, shell("hostname; cat /etc/hostname /etc/machine-id /etc/hosts /etc/resolv.conf; id; pwd; echo $HOME; stat -fc %T $DOCKER_CONFIG; stat -c '%U %a' $DOCKER_CONFIG /workspace"))
	want := "box\nbox\n" + strings.Repeat("0a", 16) + "\n127.0.0.1 localhost box\nnameserver 10.0.0.1\n" +
		"uid=1234(user) gid=1234(user) groups=1234(user),4321(extra)\n/workspace\n/home/user\ntmpfs\nuser 700\nuser 755\n"
	if o.stdout() != want {
		t.Errorf("got %q %q\nwant %q", o.stdout(), o.stderr(), want)
	}
	if o := run(t, a, &guestproto.StartRequest{Shell: "id -u; id -G; echo $HOME", User: "root"}); o.stdout() != "0\n0\n/root\n" {
		t.Errorf("as root: %q", o.stdout())
	}
	if o := run(t, a, &guestproto.StartRequest{Shell: "id -u; id -g; id -G", User: "777:778"}); o.stdout() != "777\n778\n778\n" {
		t.Errorf("as a number: %q", o.stdout())
	}
}

// PID 1 reaps orphans while commands start and end beside them, and gives every
// command its own status.
func TestMachineReapsOrphans(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	m.boot(t, initRequest())
	for i := range 60 {
		code := int32(i%250 + 1)
		o := run(t, &m.Agent, shell(fmt.Sprintf("for i in 1 2 3; do (sleep 0.0$i &) ; done >/dev/null 2>&1; exit %d", code)))
		if o.exit.GetCode() != code || o.exit.Error != "" {
			t.Fatalf("command %d: %v", i, o.exit)
		}
	}
	eventually(t, "only PID 1 is left, no zombie", func() bool {
		o := run(t, &m.Agent, shell("grep -l ' Z ' /proc/[0-9]*/stat; ls -d /proc/[0-9]* | wc -l"))
		return !strings.Contains(o.stdout(), "stat") && strings.Count(o.stdout(), "\n") == 1
	})
	r, err := m.Client.Agent.Activity(t.Context(), &guestproto.ActivityRequest{})
	if err != nil || r.CpuNanos <= 0 {
		t.Errorf("the CPU time of the dead: %v, %v", r, err)
	}
}

// Z6: a kernel that does not let its clock be set, as gVisor's, is no failure of the
// guest's: whether the clock is right is for the host to say. A request that was some
// seconds on its way sets nothing back.
func TestZ6MachineClock(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		off  time.Duration
		want guestproto.ItemStatus
	}{
		"slow on its way": {-5 * time.Second, guestproto.ItemStatus_ITEM_STATUS_DONE},
		"another time":    {-time.Hour, guestproto.ItemStatus_ITEM_STATUS_IMPOSSIBLE},
	} {
		m := newMachine(t, "")
		if err := m.Client.Await(t.Context()); err != nil {
			t.Fatal(err)
		}
		req := initRequest()
		req.WallClockUnixNano = time.Now().Add(c.off).UnixNano()
		r, err := m.Client.Agent.Init(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(r.Items, func(it *guestproto.ItemResult) bool { return it.Item == guestproto.ItemClock })
		if i < 0 || r.Items[i].Status != c.want {
			t.Errorf("%s: %v, want %v", name, r.Items, c.want)
		}
	}
}

// E5: file calls have the user's rights, and only those.
func TestE5MachineFilesAsUser(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	m.boot(t, initRequest())
	a := &m.Agent
	e := mustWrite(t, a, "mine", "x")
	if e.Owner != "user" || e.Uid != 1234 || e.Group != "user" {
		t.Errorf("entry %v", e)
	}
	_, err := write(t, a, &guestproto.WriteHeader{Path: []byte("/etc/passwd")}, []byte("x"), true)
	wantFault(t, err, fault.PermissionDenied, "")
	_, err = write(t, a, &guestproto.WriteHeader{Path: []byte("mine"), Owner: "root"}, []byte("x"), true)
	wantFault(t, err, fault.PermissionDenied, "")
	run(t, a, &guestproto.StartRequest{Shell: "umask 077; echo secret >/root/secret; chmod 700 /root; echo own >/etc/own; chown user /etc/own; echo x >/workspace/closed; chmod 600 /workspace/closed", User: "root"})
	_, _, err = read(t, a, &guestproto.ReadRequest{Path: []byte("/root/secret")})
	wantFault(t, err, fault.PermissionDenied, "")
	_, err = list(t, a, "/root", 1)
	wantFault(t, err, fault.PermissionDenied, "")
	_, err = write(t, a, &guestproto.WriteHeader{Path: []byte("closed")}, []byte("x"), true)
	wantFault(t, err, fault.PermissionDenied, "")
	if _, got, err := read(t, a, &guestproto.ReadRequest{Path: []byte("/root/secret"), User: "root"}); err != nil || string(got) != "secret\n" {
		t.Errorf("as root: %q, %v", got, err)
	}
	wantFault(t, startFails(t, a, &guestproto.StartRequest{Shell: "true", Cwd: "/root"}), fault.PermissionDenied, "cwd_permission_denied")
	wantFault(t, startFails(t, a, &guestproto.StartRequest{Args: []string{"/root/secret"}}), fault.PermissionDenied, "not_executable")
	// The file is the user's, its directory is not: it is overwritten.
	if r, err := write(t, a, &guestproto.WriteHeader{Path: []byte("/etc/own")}, []byte("new"), true); err != nil || !r.InPlace || m.file(t, "etc/own") != "new" {
		t.Errorf("in place: %v, %v", r, err)
	}
	// Root keeps the owner of a file that it replaces, and may give files away.
	if r, err := write(t, a, &guestproto.WriteHeader{Path: []byte("mine"), User: "root"}, []byte("y"), true); err != nil || r.Entry.Owner != "user" {
		t.Errorf("by root: %v, %v", r, err)
	}
	if r, err := write(t, a, &guestproto.WriteHeader{Path: []byte("/given"), User: "root", Owner: "user", Mode: 0o4755}, nil, true); err != nil || r.Entry.Owner != "user" || r.Entry.Mode != 0o4755 {
		t.Errorf("given: %v, %v", r, err)
	}
	// The rights of one call never leak into another, whichever thread it meets.
	for i := range 50 {
		if o := run(t, a, &guestproto.StartRequest{Shell: "id -u; id -G", User: fmt.Sprintf("%d:%d", 5000+i, 6000+i)}); o.stdout() != fmt.Sprintf("%d\n%d\n", 5000+i, 6000+i) {
			t.Fatalf("as %d: %q", 5000+i, o.stdout())
		}
		if _, err := list(t, a, "/root", 1); !fault.Is(err, fault.PermissionDenied) {
			t.Fatalf("the user read /root: %v", err)
		}
		if _, err := write(t, a, &guestproto.WriteHeader{Path: []byte("/tmp/by"), User: fmt.Sprintf("%d:%d", 5000+i, 6000+i)}, nil, true); !fault.Is(err, fault.PermissionDenied) {
			t.Fatalf("a number wrote to /tmp: %v", err)
		}
		if _, err := write(t, a, &guestproto.WriteHeader{Path: []byte("/etc/rooted"), User: "root"}, nil, true); err != nil {
			t.Fatal(err)
		}
		if _, err := list(t, a, "/root", 1); !fault.Is(err, fault.PermissionDenied) {
			t.Fatalf("the user read /root: %v", err)
		}
	}
}

// F2: on a real system a fork has another hostname, machine id, boot id, random key
// and SSH keys, and no registry logins.
func TestF2MachineFork(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	m.boot(t, initRequest())
	a := &m.Agent
	look := "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; cat /etc/ssh/ssh_host_ed25519_key.pub; ls -A $DOCKER_CONFIG"
	before := run(t, a, &guestproto.StartRequest{Shell: "mkdir -p /etc/ssh; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; echo login >$DOCKER_CONFIG/config.json; " + look, User: "root"})
	for round := range 2 { // a fork of the fork, too
		next := guesttest.Token(fmt.Sprint("fork", round))
		req := guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_FORK, next)
		req.Identity.Hostname = fmt.Sprint("fork", round)
		req.Identity.MachineId = strings.Repeat(fmt.Sprint(round), 32)
		r, err := a.Client.Agent.Restored(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range r.Items {
			t.Logf("%s: %s", item.Item, item.Message)
			if item.Status != guestproto.ItemStatus_ITEM_STATUS_DONE {
				t.Errorf("%v", item)
			}
		}
		a.Client.Close()
		a.Client = m.client(next)
		after := run(t, a, &guestproto.StartRequest{Shell: look, User: "root"})
		b, f := strings.Split(before.stdout(), "\n"), strings.Split(after.stdout(), "\n")
		if len(b) != 6 || len(f) != 5 || b[4] != "config.json" || f[0] != req.Identity.Hostname || f[1] != req.Identity.MachineId {
			t.Fatalf("before %q, after %q", before.stdout(), after.stdout())
		}
		for i := range 4 {
			if b[i] == f[i] || f[i] == "" {
				t.Errorf("line %d is the source's: %q", i, f[i])
			}
		}
		run(t, a, shell("echo again >$DOCKER_CONFIG/config.json"))
		before = run(t, a, &guestproto.StartRequest{Shell: look, User: "root"})
	}
}

// A fork of a sandbox from which root has taken the user away is one all the same.
func TestF2MachineForkWithoutUser(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	m.boot(t, initRequest())
	a := &m.Agent
	run(t, a, &guestproto.StartRequest{Shell: "mv /etc /etc2 && mkdir /etc", User: "root"})
	r, err := a.Client.Agent.Restored(t.Context(), guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_FORK, guesttest.Token("fork")))
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range r.Items {
		if item.Status == guestproto.ItemStatus_ITEM_STATUS_FAILED {
			t.Errorf("%v", item)
		}
	}
}

// client is a client of the machine's.
func (m *machine) client(token string) *guestproto.Client {
	return guestproto.NewClient(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", m.socket)
	}, token)
}

// Z11, W2: a stop ends everything in the machine, daemons in their own sessions too;
// PID 1 stays.
func TestZ11MachineShutdown(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	m.boot(t, initRequest())
	a := &m.Agent
	run(t, a, shell("setsid sh -c 'trap \"echo ended >/workspace/ended; exit\" TERM; echo up >/workspace/up; while :; do sleep 0.05; done' >/dev/null 2>&1 & setsid sh -c 'trap \"\" TERM; echo up >/workspace/up2; sleep 600' >/dev/null 2>&1 & while [ ! -e /workspace/up -o ! -e /workspace/up2 ]; do sleep 0.01; done"))
	r, err := m.Client.Agent.Shutdown(t.Context(), &guestproto.ShutdownRequest{GraceNanos: int64(500 * time.Millisecond)})
	if err != nil || r.Signalled < 2 || r.Killed < 1 || len(r.Left) != 0 {
		t.Errorf("shutdown: %v, %v", r, err)
	}
	if m.file(t, "workspace/ended") != "ended\n" {
		t.Error("the daemon was not asked to end")
	}
	list, err := m.Client.Agent.Processes(t.Context(), &guestproto.ProcessesRequest{})
	if err != nil || len(list.Processes) != 0 {
		t.Errorf("left: %v, %v", list, err)
	}
}

// Root inside may send PID 1 what it likes.
func TestMachineInitOutlivesSignals(t *testing.T) {
	t.Parallel()
	m := newMachine(t, "")
	m.boot(t, initRequest())
	script := "for s in $(seq 1 31); do kill -$s 1; done; sleep 0.2; echo sent"
	if o := run(t, &m.Agent, &guestproto.StartRequest{Shell: script, User: "root"}); o.stdout() != "sent\n" {
		t.Errorf("got %q, %v", o.stdout(), o.exit)
	}
	select {
	case <-m.exited:
		t.Errorf("PID 1 has ended")
	default:
	}
	if o := run(t, &m.Agent, shell("echo well")); o.stdout() != "well\n" {
		t.Errorf("got %q, %v", o.stdout(), o.exit)
	}
}

// S8: poweroff and reboot from inside end PID 1 in order and leave word.
func TestS8MachineEndsFromInside(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		signal int
		marker string
		code   int
	}{{38, "poweroff", 0}, {37, "poweroff", 0}, {39, "reboot", 133}} {
		t.Run(fmt.Sprint(tc.signal), func(t *testing.T) {
			t.Parallel()
			m := newMachine(t, "")
			m.boot(t, initRequest())
			// Neither the user, nor what ends other programs, ends PID 1.
			o := run(t, &m.Agent, shell(fmt.Sprintf("kill -%d 1 || echo refused", tc.signal)))
			if o.stdout() != "refused\n" {
				t.Errorf("the user: %q", o.stdout())
			}
			run(t, &m.Agent, &guestproto.StartRequest{Shell: "kill -TERM 1; kill -HUP 1; kill -INT 1; kill -PIPE 1; kill -KILL 1; kill -STOP 1; kill -QUIT 1", User: "root"})
			s := start(t, &m.Agent, shell("trap 'echo asked; exit 0' TERM; echo up; while :; do sleep 0.05; done"))
			o = newOutcome(0)
			until(t, s, o, func() bool { return o.stdout() == "up\n" })
			req := &guestproto.StartRequest{Shell: fmt.Sprintf("kill -%d 1", tc.signal), User: "root", Detach: true}
			run(t, &m.Agent, req)
			select {
			case <-m.exited:
			case <-time.After(30 * time.Second):
				t.Fatal("PID 1 did not end")
			}
			if code := m.cmd.ProcessState.ExitCode(); code != tc.code {
				t.Errorf("exit code %d, want %d", code, tc.code)
			}
			if got := m.file(t, guestproto.ExitMarker); got != tc.marker {
				t.Errorf("marker %q, want %q", got, tc.marker)
			}
			if info, err := os.Stat(filepath.Join(m.Root, guestproto.ExitMarker)); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("the marker's mode: %v, %v", info, err)
			}
		})
	}
}

// The limit of processes holds for all commands together, and not for the agent.
func TestMachinePidsLimit(t *testing.T) {
	t.Parallel()
	const hierarchy = "/sys/fs/cgroup/pids"
	if _, err := os.Stat(hierarchy + "/tasks"); err != nil {
		t.Skipf("this machine has no pids controller of cgroup version 1, which is what the agent meets in gVisor: %v", err)
	}
	group, err := os.MkdirTemp(hierarchy, "hutch-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		deadline := time.Now().Add(10 * time.Second)
		for _, dir := range []string{group + "/hutch-commands", group} {
			for err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist); err = os.Remove(dir) {
				if time.Now().After(deadline) {
					t.Errorf("left over: %v", err)
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
		}
	})
	m := newMachine(t, group)
	req := initRequest()
	req.PidsLimit = 20
	if item := m.boot(t, req)[guestproto.ItemPidsLimit]; item.GetStatus() != guestproto.ItemStatus_ITEM_STATUS_DONE {
		t.Fatalf("%v", item)
	}
	a := &m.Agent
	hog := start(t, a, shell("for i in $(seq 40); do sleep 600 & done; echo full; wait"))
	o := newOutcome(0)
	until(t, hog, o, func() bool {
		return strings.Contains(o.all.String(), "Resource temporarily unavailable") || o.exit != nil
	})
	wantFault(t, startFailsOrExits(t, a), fault.Unavailable, "process_limit")
	if _, err := m.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{}); err != nil {
		t.Error(err)
	}
	if _, err := m.Client.Commands.Signal(t.Context(), &guestproto.SignalRequest{Id: o.id, Signal: 9}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "room again", func() bool {
		s := start(t, a, shell("true"))
		ev, err := s.Receive()
		return err == nil && ev.GetStarted() != nil
	})
}

// startFailsOrExits starts commands until one is refused.
func startFailsOrExits(t *testing.T, a *guesttest.Agent) error {
	t.Helper()
	for range 40 {
		s := start(t, a, &guestproto.StartRequest{Args: []string{"sleep", "600"}, Detach: true})
		if _, err := s.Receive(); err != nil {
			return err
		}
	}
	return nil
}
