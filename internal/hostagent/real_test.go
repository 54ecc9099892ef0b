package hostagent

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/network"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// place is one installation on this machine: a real pool, real namespaces, gVisor. An
// agent in this process or in a child of it works there, one at a time.
type place struct {
	Dir, Run, Tag  string
	Boot           string // stands for the machine's boot id where it is set
	Agent, Version string // of the agent layer, of the template

	passed *atomic.Int64 // by how much the host's clocks are ahead of the machine's; nil is nothing
}

// works is what an agent works with in a place.
type works struct {
	pool   *disk.Pool
	net    *network.Manager
	driver *gvisor.Driver
	agent  *Agent
}

func (p place) open(ctx context.Context, log io.Writer, to hostproto.Reporter, pts points) (*works, error) {
	w, err := p.unstarted(ctx, log, pts)
	if err != nil {
		return nil, err
	}
	return w, w.agent.Start(ctx, to)
}

// unstarted is open with an agent that is not started.
func (p place) unstarted(ctx context.Context, log io.Writer, pts points) (*works, error) {
	runsc, err := filepath.Abs("../../bin/hutch-runsc")
	if err != nil {
		return nil, err
	}
	l := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	w := &works{driver: gvisor.New(gvisor.Config{Runsc: runsc, CgroupParent: "hutch-" + p.Tag, Log: l})}
	version, err := exec.CommandContext(ctx, runsc, "--version").Output()
	if err != nil {
		return nil, fmt.Errorf("bin/hutch-runsc is needed (`make build`): %w", err)
	}
	first, _, _ := strings.Cut(string(version), "\n")
	if w.pool, err = disk.Open(ctx, disk.Config{Dir: p.Dir, RunDir: p.Run, PoolBytes: 3e9, Log: l}); err != nil {
		return nil, err
	}
	if w.net, err = network.Open(ctx, network.Config{Tag: p.Tag, Log: l}); err != nil {
		return nil, err
	}
	cpu, err := runtime.CPUFeatures()
	if err != nil {
		return nil, err
	}
	boot, err := BootID()
	if err != nil {
		return nil, err
	}
	if p.Boot != "" {
		boot = p.Boot
	}
	var read func() sandbox.Reading
	if p.passed != nil {
		read = func() sandbox.Reading {
			now, by := reading(boot), time.Duration(p.passed.Load())
			now.Wall, now.Up = now.Wall.Add(by), now.Up+by
			return now
		}
	}
	w.agent, err = New(Config{
		Read: read, ID: "local", Dir: filepath.Join(p.Dir, "journals"), RunDir: p.Run + "/sb", BootID: boot, Driver: w.driver, CPUFeatures: cpu,
		Capabilities: runtime.Capabilities{Runtime: "gvisor", Version: strings.TrimPrefix(first, "runsc version "), MemorySnapshot: true, HeldRestore: true},
		Disks:        Storage{w.pool}, Network: Links{w.net}, Agent: p.Agent, Log: l,
		GuestAnswer: 2 * time.Second, ProbeEvery: 250 * time.Millisecond, points: pts,
	})
	return w, err
}

func (w *works) close() error {
	w.agent.Stop()
	w.driver.Close()
	if err := w.net.Close(); err != nil {
		return err
	}
	return w.pool.Close()
}

// real is a place with the control plane's book and one sandbox.
type real struct {
	t *testing.T
	place
	*works
	book *book
	pts  points
}

func newReal(t *testing.T) *real {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("these tests run sandboxes and need root")
	}
	dir, err := os.MkdirTemp("/var/tmp", "hutch-real-")
	if err != nil {
		t.Fatal(err)
	}
	run, err := os.MkdirTemp("/run", "ht")
	if err != nil {
		t.Fatal(err)
	}
	tag := make([]byte, 4)
	_, _ = rand.Read(tag)
	r := &real{t: t, place: place{Dir: dir, Run: run, Tag: hex.EncodeToString(tag)}, book: newBook()}
	t.Cleanup(r.remove)
	pool, err := disk.Open(t.Context(), disk.Config{Dir: dir, RunDir: run, PoolBytes: 3e9, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	guest, err := filepath.Abs("../../bin/hutch-guest")
	if err != nil {
		t.Fatal(err)
	}
	if r.Agent, err = pool.InstallAgent(t.Context(), guest); err != nil {
		t.Fatal(err)
	}
	tmpl, err := pool.ImportOCI(t.Context(), disk.OCIImage{Ref: smallImage(t)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Version = tmpl.Digest
	if err := pool.Close(); err != nil {
		t.Fatal(err)
	}
	r.start()
	return r
}

// smallImage is a root file system with nothing to run but the agent that every
// sandbox gets.
func smallImage(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, dir := range []string{"etc", "root", "tmp", "workspace", "proc", "sys", "dev", "run", "var", "usr", "bin"} {
		if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			t.Fatal(err)
		}
	}
	for file, text := range map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/workspace:/bin/sh\n", "etc/group": "root:x:0:\nuser:x:1000:\n"} {
		if err := w.WriteHeader(&tar.Header{Name: file, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(text))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	if image, err = mutate.ConfigFile(image, &v1.ConfigFile{OS: "linux", Architecture: "amd64", RootFS: must(image.ConfigFile()).RootFS}); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("small:v1")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "small.tar")
	if err := tarball.WriteToFile(path, tag, image); err != nil {
		t.Fatal(err)
	}
	return path
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (r *real) start() {
	r.t.Helper()
	var err error
	if r.works, err = r.open(r.t.Context(), r.t.Output(), r.book, r.pts); err != nil {
		r.t.Fatal(err)
	}
}

func (r *real) stop() {
	r.t.Helper()
	if err := r.works.close(); err != nil {
		r.t.Error(err)
	}
	r.works = nil
}

// remove ends all and looks for what is left.
func (r *real) remove() {
	ctx := context.Background()
	if r.works == nil && r.Version != "" {
		// The test failed between two agents: what the last one left is found by one more.
		var err error
		if r.works, err = r.open(ctx, io.Discard, r.book, points{}); err != nil {
			r.t.Error(err)
		}
	}
	if r.works != nil {
		r.agent.Stop()
		if err := r.agent.clear(ctx, func(string) bool { return true }); err != nil {
			r.t.Error(err)
		}
		r.driver.Close()
		if err := r.net.Remove(ctx); err != nil {
			r.t.Error(err)
		}
		_ = r.net.Close()
		if err := r.pool.TakeDown(ctx); err != nil {
			r.t.Error(err)
		}
		_ = r.pool.Close()
	} else if pool, err := disk.Open(ctx, disk.Config{Dir: r.Dir, RunDir: r.Run, PoolBytes: 3e9, Log: slog.New(slog.DiscardHandler)}); err == nil { // it was never started
		if err := pool.TakeDown(ctx); err != nil {
			r.t.Error(err)
		}
	}
	if left := r.residue(); len(left) > 0 {
		r.t.Errorf("left: %v", left)
	}
	for _, dir := range []string{r.Dir, r.Run} {
		if err := os.RemoveAll(dir); err != nil {
			r.t.Error(err)
		}
	}
	// The group that the sandboxes' groups were in stays with an installation.
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/hutch-" + r.Tag)
	for _, dir := range append(groups, "/sys/fs/cgroup/hutch-"+r.Tag) {
		_ = os.Remove(dir)
	}
}

// residue says what of the place is still in the kernel.
func (r *real) residue() []string {
	var left []string
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, r.Dir) || strings.Contains(line, r.Run) {
			left = append(left, line)
		}
	}
	for _, where := range []string{"/run/netns/*" + r.Tag + "*", "/sys/fs/cgroup/hutch-" + r.Tag + "/*", "/sys/fs/cgroup/*/hutch-" + r.Tag + "/sb*"} {
		found, _ := filepath.Glob(where)
		left = append(left, found...)
	}
	return append(left, r.processes()...)
}

// processes lists what runs of the place's sandboxes.
func (r *real) processes() []string {
	var all []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if cmd, _ := os.ReadFile(f); bytes.Contains(cmd, []byte(r.Run+"/")) {
			all = append(all, string(bytes.ReplaceAll(cmd, []byte{0}, []byte{' '})))
		}
	}
	return all
}

func (r *real) command(verb sandbox.Verb) hostproto.Command {
	return hostproto.Command{Operation: opID(), Verb: verb, Sandbox: sb, Generation: r.book.generation(sb), Name: "real",
		Spec: sandbox.Spec{Version: r.Version, CPUs: 1, Memory: 256 << 20, Disk: 1e9, User: "root"}, Mode: sandbox.ForkLive}
}

func (r *real) run(cmd hostproto.Command) *hostproto.Failure {
	r.t.Helper()
	if !r.book.has(cmd.Operation) {
		if err := r.agent.Submit(r.t.Context(), cmd); err != nil {
			r.t.Fatal(err)
		}
	}
	return r.ended(cmd.Operation)
}

// ended waits longer than the tests in memory do.
func (r *real) ended(op string) *hostproto.Failure {
	r.t.Helper()
	r.soon("the end of "+op, func() bool { return r.book.has(op) })
	return r.book.end(r.t, op)
}

func (r *real) soon(what string, ok func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("waited in vain for %s", what)
		}
	}
}

func (r *real) must(verb sandbox.Verb) {
	r.t.Helper()
	if f := r.run(r.command(verb)); f != nil {
		r.t.Fatalf("%s failed: %+v", verb, f)
	}
}

// guest calls the agent inside, as long as it takes to be let.
func (r *real) guest(call func(ctx context.Context, c *guestproto.Client) error) {
	r.t.Helper()
	var err error
	r.soon("the guest", func() bool {
		g, gone := r.agent.Guest(r.t.Context(), sb, hostproto.UseSession)
		if gone != nil {
			return false
		}
		c := guestproto.NewClient(g.Dial, g.Token)
		defer c.Close()
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		err = call(ctx, c)
		return err == nil
	})
}

const keptPath = "/workspace/kept"

func (r *real) leave() {
	r.t.Helper()
	r.guest(func(ctx context.Context, c *guestproto.Client) error {
		_, err := c.Files.MakeDir(ctx, &guestproto.MakeDirRequest{Path: []byte(keptPath), User: "root"})
		return err
	})
}

func (r *real) find() {
	r.t.Helper()
	r.guest(func(ctx context.Context, c *guestproto.Client) error {
		_, err := c.Files.Stat(ctx, &guestproto.StatRequest{Path: []byte(keptPath), User: "root"})
		return err
	})
}

// sound proves that the state is what runs, and brings the sandbox to run with what
// was left in it.
func (r *real) sound() string {
	r.t.Helper()
	r.soon("rest", func() bool {
		o, err := r.agent.find(sb)
		if err != nil {
			return true
		}
		rest := false
		_ = o.call(r.t.Context(), func() error {
			l := o.live.Load()
			rest = o.job == nil && o.rec.Job == nil && len(o.rec.Unacked) == 0 && (o.rec.Phase != phaseRunning || l != nil && !l.ended())
			return nil
		})
		return rest
	})
	state := r.book.state(sb)
	if runs := len(r.processes()) > 0; runs != (state == sandbox.Ready) {
		r.t.Errorf("it is %s, and there are the processes %v", state, r.processes())
	}
	switch state {
	case sandbox.Sleeping:
		r.must(sandbox.Wake)
	case sandbox.Stopped, sandbox.Failed:
		r.must(sandbox.Resume)
	case sandbox.Deleted:
		if left, err := r.agent.Inventory(r.t.Context()); err != nil || len(left) > 0 {
			r.t.Errorf("after the delete: %v, %v", left, err)
		}
		return string(state)
	}
	r.find()
	if left := r.book.conditions(sb); len(left) > 0 {
		r.t.Errorf("conditions are left: %v", left)
	}
	return string(state)
}

// victimEnv has the order of a child process that is an agent and kills itself.
const victimEnv = "HUTCH_TEST_VICTIM"

type order struct {
	Place   place
	Command hostproto.Command
	Name    string
	Nth     int
	After   bool
}

// victim is an agent that works until its instant comes and then dies of SIGKILL. What
// it reports nobody hears.
func victim(text string) {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		panic(err)
	}
	count := 0
	at := func(name string, do func() error) error {
		if name != o.Name {
			return do()
		}
		count++
		if count == o.Nth && !o.After {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		err := do()
		if count == o.Nth && o.After {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return err
	}
	w, err := o.Place.open(context.Background(), io.Discard, deaf{}, points{
		journal: func(_ string, r *record, do func() error) error { return at(recordName(r), do) },
		step: func(ctx context.Context, _ string, _ sandbox.Verb, step string, do func(context.Context) error) error {
			return at("step "+step, func() error { return do(ctx) })
		},
	})
	if err == nil {
		count = 0 // only the command's own
		err = w.agent.Submit(context.Background(), o.Command)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	time.Sleep(2 * time.Minute) // until its instant comes
	os.Exit(2)
}

// deaf is a control plane that is away.
type deaf struct{}

func (deaf) Report(ctx context.Context, r hostproto.Report) error {
	if r.Seq == 0 {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// powerCut has a child process carry a command out, and the machine lose power at an
// instant of it: the pool's file is copied as it lies on the host's disk while all is
// mounted and the sandbox runs, and all goes on from the copy. What was written and not
// synced is not in it, because the pool's loop device passes the host's page cache by.
func (r *real) powerCut(cmd hostproto.Command, name string, after bool) {
	r.t.Helper()
	r.stop()
	r.slain(cmd, name, 1, after)
	file := filepath.Join(r.Dir, "pool.img")
	if out, err := exec.Command("cp", "--sparse=always", file, file+".cut").CombinedOutput(); err != nil {
		r.t.Fatalf("cp: %v: %s", err, out)
	}
	// In its time the machine would take all of this with it.
	w, err := r.unstarted(r.t.Context(), r.t.Output(), points{})
	if err != nil {
		r.t.Fatal(err)
	}
	if err := w.agent.clear(r.t.Context(), func(string) bool { return true }); err != nil {
		r.t.Fatal(err)
	}
	if err := w.pool.TakeDown(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	if err := w.close(); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(file+".cut", file); err != nil {
		r.t.Fatal(err)
	}
	r.Boot += "another boot "
	r.start()
}

// killedIn has a child process carry a command out and die at an instant of it.
func (r *real) killedIn(cmd hostproto.Command, name string, nth int, after bool) {
	r.t.Helper()
	r.stop()
	r.slain(cmd, name, nth, after)
	r.start()
}

func (r *real) slain(cmd hostproto.Command, name string, nth int, after bool) {
	r.t.Helper()
	text, err := json.Marshal(order{r.place, cmd, name, nth, after})
	if err != nil {
		r.t.Fatal(err)
	}
	child := exec.Command(must(os.Executable()))
	child.Env = append(os.Environ(), victimEnv+"="+string(text))
	child.Stderr = r.t.Output()
	err = child.Run()
	if status, ok := child.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() || status.Signal() != syscall.SIGKILL {
		r.t.Fatalf("the agent did not die at %s: %v", name, err)
	}
}
