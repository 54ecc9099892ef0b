package gvisor

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

func TestHowItEnded_S8(t *testing.T) {
	t.Parallel()
	status := func(w uint32) *uint32 { return &w }
	for name, c := range map[string]struct {
		word             *uint32
		death            death
		killed, panicked bool
		want             runtime.Exit
	}{
		"the sentry says exit 3":         {word: status(3 << 8), death: death{known: true, code: 3}, want: runtime.Exit{Known: true, Code: 3}},
		"the sentry says SIGSEGV":        {word: status(11), death: death{known: true, code: 139}, want: runtime.Exit{Known: true, Signal: 11}},
		"exit 137 is no signal":          {word: status(137 << 8), death: death{known: true, code: 137}, want: runtime.Exit{Known: true, Code: 137}},
		"it spoke before it was killed":  {word: status(0), killed: true, want: runtime.Exit{Known: true}},
		"killed from here":               {killed: true, want: runtime.Exit{Known: true, Signal: 9}},
		"killed from elsewhere":          {death: death{known: true, signal: 9}, want: runtime.Exit{Known: true, Signal: 9}},
		"the sentry panicked":            {death: death{known: true, code: 2}, panicked: true, want: runtime.Exit{Known: true, Signal: 6}},
		"only its parent heard exit 3":   {death: death{known: true, code: 3}, want: runtime.Exit{Known: true, Code: 3}},
		"only its parent heard a signal": {death: death{known: true, code: 139}, want: runtime.Exit{Known: true, Signal: 11}},
		"nobody heard":                   {want: runtime.Exit{}},
	} {
		if got := howItEnded(c.word, c.death, c.killed, c.panicked); got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

func TestParseLayout(t *testing.T) {
	t.Parallel()
	const (
		v2 = `24 23 0:22 / /proc rw - proc proc rw
29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot
`
		v1 = `30 25 0:28 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
`
		hybrid = v1 + "33 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		none   = "24 23 0:22 / /proc rw - proc proc rw\nrubbish\n"
	)
	unified := layout{v2: true, memory: "/sys/fs/cgroup", cpu: "/sys/fs/cgroup", cpuacct: "/sys/fs/cgroup"}
	apart := layout{memory: "/sys/fs/cgroup/memory", cpu: "/sys/fs/cgroup/cpu,cpuacct", cpuacct: "/sys/fs/cgroup/cpu,cpuacct"}
	for name, c := range map[string]struct {
		text string
		want layout
	}{"v2": {v2, unified}, "v1": {v1, apart}, "hybrid": {hybrid, apart}, "none": {none, layout{}}} {
		if got := parseLayout(c.text); got != c.want {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
	if got := unified.group("hutch", "a").dirs(); len(got) != 1 || got[0] != "/sys/fs/cgroup/hutch/a" {
		t.Errorf("v2 directories: %v", got)
	}
	if got := apart.group("hutch", "a").dirs(); len(got) != 2 {
		t.Errorf("v1 directories: %v", got)
	}
}

// A group on cgroup v2 has one directory with files of other names. The figures are
// those of a directory of plain files that stands for it.
func TestGroupV2Files(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	g := layout{v2: true, memory: root, cpu: root, cpuacct: root}.group("hutch", "a")
	files := map[string]string{
		"memory.max": "", "memory.swap.max": "", "memory.oom.group": "", "cpu.max": "", "cpu.weight": "",
		"memory.events": "low 0\noom 3\noom_kill 2\n",
		"memory.stat":   "anon 100\nfile 5000\nshmem 20\n",
		"cpu.stat":      "usage_usec 1500\nuser_usec 1000\n",
	}
	if err := os.MkdirAll(g.memory, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(g.memory, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(g.create(1<<30, 3), g.limitCPU(3)); err != nil {
		t.Fatalf("create: %v", err)
	}
	for name, want := range map[string]string{"memory.max": "1073741824", "memory.swap.max": "0", "memory.oom.group": "1", "cpu.max": "300000 100000", "cpu.weight": "300"} {
		if got, _ := os.ReadFile(filepath.Join(g.memory, name)); string(got) != want {
			t.Errorf("%s holds %q, want %q", name, got, want)
		}
	}
	if got := g.oomKills(); got != 2 {
		t.Errorf("oomKills: %d", got)
	}
	if got := g.memoryBytes(); got != 120 {
		t.Errorf("memoryBytes: %d", got)
	}
	if got, ok := g.cpuTime(); !ok || got != 1500*time.Microsecond {
		t.Errorf("cpuTime: %v %v", got, ok)
	}
}

// kill ends a tree that forks while it is killed, and nothing else.
func TestGroupKill(t *testing.T) {
	t.Parallel()
	l, err := readLayout()
	if err != nil {
		t.Fatal(err)
	}
	parent := fmt.Sprintf("hutch-test-kill-%d", os.Getpid())
	g := l.group(parent, "a")
	if err := g.create(64<<20, 1); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	t.Cleanup(func() {
		for _, dir := range g.dirs() {
			_ = os.Remove(dir)
		}
		RemoveParent(parent)
	})
	stranger := exec.Command("sleep", "600")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stranger.Process.Kill(); _ = stranger.Wait() })

	// A shell that joins the group and then keeps forking.
	script := "for f in " + strings.Join(g.procs(), " ") + "; do echo 0 > $f || exit 1; done; while :; do sleep 600 & sleep 0.01; done"
	forker := exec.Command("sh", "-c", script)
	if err := forker.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = forker.Wait() }()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if pids, _ := g.pids(); len(pids) > 4 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the shell does not fork")
		}
	}
	if err := g.kill(ctx); err != nil {
		t.Fatalf("kill: %v", err)
	}
	if pids, err := g.pids(); err != nil || len(pids) > 0 {
		t.Errorf("%v still run, %v", pids, err)
	}
	if err := g.remove(ctx); err != nil {
		t.Errorf("remove: %v", err)
	}
	if err := g.kill(ctx); err != nil {
		t.Errorf("kill of nothing: %v", err)
	}
	if err := stranger.Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("a stranger was killed: %v", err)
	}
}

// A pid that has come back is another process.
func TestProcessIsNotItsPid(t *testing.T) {
	t.Parallel()
	p, err := processOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	fd, err := p.open()
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	unix.Close(fd)
	p.Start++
	if _, err := p.open(); !errors.Is(err, unix.ESRCH) {
		t.Errorf("a process of another start time: got %v, want ESRCH", err)
	}
}

func TestBootFault(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		words   string
		restore bool
		kind    fault.Kind
		reason  string
	}{
		{"runsc version does not match across checkpoint restore, checkpoint: a current: b", true, fault.FailedPrecondition, "runtime_version"},
		{"failed to load kernel: incompatible FeatureSet: missing avx", true, fault.FailedPrecondition, "cpu_features"},
		{"starting container: restoring container: unexpected EOF", true, fault.DataCorrupt, ""},
		{"creating container: cannot create sandbox", true, fault.Internal, ""},
		{"starting container: no such file", false, fault.Internal, ""},
	} {
		if f := fault.Of(bootFault(c.words, c.restore, false)); f.Kind != c.kind || f.Reason != c.reason {
			t.Errorf("%q: got %s %q, want %s %q", c.words, f.Kind, f.Reason, c.kind, c.reason)
		}
	}
	if f := fault.Of(bootFault("", false, true)); f.Kind != fault.Unsupported || f.Reason != "runsc_missing" {
		t.Errorf("no binary: got %s %q", f.Kind, f.Reason)
	}
}

func TestSocketPathFits(t *testing.T) {
	t.Parallel()
	spec := runtime.Spec{ID: "a", Dir: "/" + strings.Repeat("d", maxDir-1), Root: "/r", Args: []string{"a"}, CPUs: 1, MemoryBytes: minMemory}
	if err := validate(spec); err != nil {
		t.Errorf("the longest directory is refused: %v", err)
	}
	if got := len(socketPath(spec.Dir)); got > 107 {
		t.Errorf("its socket path has %d bytes", got)
	}
	spec.Dir += "d"
	if !fault.Is(validate(spec), fault.InvalidArgument) {
		t.Error("a longer directory is accepted")
	}
}
