package fake_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

func TestDriver(t *testing.T) {
	t.Parallel()
	runtimetest.Run(t, func(tb testing.TB) runtimetest.Bundle {
		m := fake.NewMachine(boot)
		return runtimetest.Bundle{
			Driver:  m.Driver(),
			Restart: func() runtime.Driver { return m.Driver() },
			Spec:    func() runtime.Spec { return place(tb, map[string]string{}) },
			Beside:  func(other runtime.Spec) runtime.Spec { return place(tb, disks.of(other.Root)) },
			Full:    func() string { return full(tb) },
			Crash:   func(s runtime.Spec) { m.Crash(s.ID, runtime.Exit{Known: true, Signal: 9}) },
		}
	})
}

// full is a directory in which an image meets ENOSPC.
func full(tb testing.TB) string {
	dir := tb.TempDir()
	if err := os.Symlink("/dev/full", dir+"/memory.img"); err != nil {
		tb.Fatal(err)
	}
	return dir
}

// disks are the root file systems of the guests, by Spec.Root.
var disks = diskSet{m: map[string]map[string]string{}}

type diskSet struct {
	mu sync.Mutex
	m  map[string]map[string]string
}

func (d *diskSet) of(root string) map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.m[root]
}

func place(tb testing.TB, files map[string]string) runtime.Spec {
	dir := tb.TempDir()
	copied := map[string]string{}
	for k, v := range files {
		copied[k] = v
	}
	root := tb.TempDir()
	disks.mu.Lock()
	disks.m[root] = copied
	disks.mu.Unlock()
	return runtime.Spec{ID: strings.ReplaceAll(dir, "/", "_"), Dir: dir, Root: root, Args: []string{"/testguest"}, CPUs: 1, MemoryBytes: 1 << 30}
}

// guest speaks the protocol of runtimetest.Port in memory.
type guest struct {
	exit func(runtime.Exit)
	disk map[string]string
	stop chan struct{}
	once sync.Once

	mu       sync.Mutex
	running  sync.Cond // nothing is answered, and no child ticks, while paused
	paused   bool
	held     bool
	Values   map[string]string
	Children int
	Ticks    int
}

func boot(b fake.Boot) (fake.Guest, error) {
	g := &guest{exit: b.Exit, disk: disks.of(b.Spec.Root), stop: make(chan struct{}), held: b.Restored, Values: map[string]string{"token": random()}}
	g.running.L = &g.mu
	if b.Restored {
		if err := json.Unmarshal(b.Memory, g); err != nil {
			return nil, err
		}
	}
	go g.tick()
	return g, nil
}

func random() string {
	data := make([]byte, 16)
	_, _ = rand.Read(data)
	return hex.EncodeToString(data)
}

func (g *guest) tick() {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-g.stop:
			return
		case <-ticker.C:
			g.mu.Lock()
			if !g.paused && !g.held {
				g.Ticks += g.Children
			}
			g.mu.Unlock()
		}
	}
}

func (g *guest) Dial(_ context.Context, port int) (net.Conn, error) {
	if port != runtimetest.Port {
		return nil, errors.New("connection refused")
	}
	here, there := net.Pipe()
	go func() {
		defer there.Close()
		for lines := bufio.NewScanner(there); lines.Scan(); {
			fmt.Fprintln(there, g.answer(strings.Fields(lines.Text())))
		}
	}()
	go func() { <-g.stop; there.Close() }()
	return here, nil
}

func (g *guest) answer(words []string) string {
	g.mu.Lock()
	for g.paused {
		g.running.Wait()
	}
	defer g.mu.Unlock()
	switch words = append(words, "", ""); words[0] {
	case "set":
		g.Values[words[1]] = words[2]
	case "get":
		return g.Values[words[1]]
	case "spawn":
		g.Children++
	case "ticks":
		return strconv.Itoa(g.Ticks)
	case "random":
		return random()
	case "clock":
		return strconv.FormatInt(time.Now().UnixMilli(), 10)
	case "write":
		g.disk[words[1]] = words[2]
	case "read":
		return g.disk[words[1]]
	case "exit":
		code, _ := strconv.Atoi(words[1])
		go g.exit(runtime.Exit{Known: true, Code: code})
	case "crash":
		go g.exit(runtime.Exit{Known: true, Code: 2})
	default:
		return "error no verb " + words[0]
	}
	return "ok"
}

func (g *guest) set(f func()) {
	g.mu.Lock()
	f()
	g.mu.Unlock()
	g.running.Broadcast()
}

func (g *guest) Pause()   { g.set(func() { g.paused = true }) }
func (g *guest) Resume()  { g.set(func() { g.paused = false }) }
func (g *guest) Release() { g.set(func() { g.held = false }) }

func (g *guest) Snapshot() ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return json.Marshal(g)
}

func (g *guest) Stop() {
	g.once.Do(func() { close(g.stop) })
	g.Resume()
}

func TestFaults(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	spec := func(t *testing.T) runtime.Spec { return place(t, nil) }

	t.Run("a call fails before or after its effect, on the nth time", func(t *testing.T) {
		m := fake.NewMachine(boot)
		d := m.Driver()
		d.Inject(fake.Fault{Method: "Resume", Nth: 2, Action: fake.Fail, After: true})
		h, err := d.Start(ctx, spec(t))
		if err != nil {
			t.Fatal(err)
		}
		defer h.Kill(ctx)
		p, err := h.Pause(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Resume(ctx); err != nil {
			t.Errorf("first Resume: %v", err)
		}
		if p, err = h.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		if err := p.Resume(ctx); !fault.Is(err, fault.Unavailable) {
			t.Errorf("second Resume: got %v, want unavailable", err)
		}
		runtimetest.MustAsk(t, h, "get", "token") // it had its effect
		if got := d.Calls("Resume"); got != 2 {
			t.Errorf("counted %d calls, not 2", got)
		}
	})

	t.Run("a hanging call ends with its context", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := fake.NewMachine(boot)
			d := m.Driver()
			d.Inject(fake.Fault{Method: "Pause", Action: fake.Hang, After: true})
			h, err := d.Start(ctx, runtime.Spec{ID: "a", Dir: "/a", Root: "/a", Args: []string{"a"}, CPUs: 1, MemoryBytes: 1})
			if err != nil {
				t.Fatal(err)
			}
			c, cancel := context.WithTimeout(ctx, time.Hour)
			defer cancel()
			if _, err := h.Pause(c); !fault.Is(err, fault.DeadlineExceeded) {
				t.Errorf("got %v, want deadline_exceeded", err)
			}
			if err := h.Kill(ctx); err != nil {
				t.Error(err)
			}
		})
	})

	t.Run("a sandbox dies in a capture", func(t *testing.T) {
		m := fake.NewMachine(boot)
		d := m.Driver()
		d.Inject(fake.Fault{Method: "Capture", Action: fake.Die})
		h, err := d.Start(ctx, spec(t))
		if err != nil {
			t.Fatal(err)
		}
		p, err := h.Pause(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Capture(ctx, t.TempDir()); !fault.Is(err, fault.NotFound) {
			t.Errorf("got %v, want not_found", err)
		}
		runtimetest.Ended(t, h.Wait())
		if left := m.Running(); len(left) > 0 {
			t.Errorf("%v still run", left)
		}
	})

	t.Run("a start that fails after its effect leaves nothing", func(t *testing.T) {
		m := fake.NewMachine(boot)
		d := m.Driver()
		d.Inject(fake.Fault{Method: "Start", Nth: 1, Action: fake.Fail, After: true})
		s := spec(t)
		if _, err := d.Start(ctx, s); err == nil {
			t.Error("Start succeeded")
		}
		if left := m.Running(); len(left) > 0 {
			t.Errorf("%v still run", left)
		}
		h, err := d.Start(ctx, s)
		if err != nil {
			t.Fatal(err)
		}
		_ = h.Kill(ctx)
	})

	t.Run("another version and a reboot", func(t *testing.T) {
		m := fake.NewMachine(boot)
		s, image := spec(t), t.TempDir()
		h, err := m.Driver().Start(ctx, s)
		if err != nil {
			t.Fatal(err)
		}
		p, err := h.Pause(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Capture(ctx, image); err != nil {
			t.Fatal(err)
		}
		m.Reboot()
		if exit := runtimetest.Ended(t, h.Wait()); exit.Known {
			t.Errorf("after a reboot the end is known: %+v", exit)
		}
		if _, err := m.Driver().Adopt(ctx, s); !fault.Is(err, fault.NotFound) {
			t.Errorf("Adopt: got %v, want not_found", err)
		}
		m.SetVersion("fake-2")
		_, err = m.Driver().Restore(ctx, s, image)
		if f := fault.Of(err); f == nil || f.Kind != fault.FailedPrecondition || f.Reason != "runtime_version" {
			t.Errorf("Restore: got %v, want failed_precondition runtime_version", err)
		}
	})
}
