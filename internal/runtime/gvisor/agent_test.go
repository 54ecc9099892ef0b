package gvisor_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

// An agent is a process of this test binary that drives one sandbox and is then
// killed with SIGKILL, as a host agent may be at any instant.

const agentEnv = "HUTCH_TEST_AGENT"

// order is what an agent is told to do.
type order struct {
	Runsc, Parent string
	Spec          runtime.Spec
	Image         string // restore from it, if set
	Capture       string // pause and capture into it, if set
}

// agent is the main function of the agent process. It writes a line before and after
// each step, and waits to be killed at the end.
func agent() {
	var o order
	if err := json.Unmarshal([]byte(os.Getenv(agentEnv)), &o); err != nil {
		panic(err)
	}
	d := gvisor.New(gvisor.Config{Runsc: o.Runsc, CgroupParent: o.Parent})
	ctx := context.Background()
	step := func(name string, do func() error) {
		fmt.Println(name)
		if err := do(); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		fmt.Println("done", name)
	}
	var h runtime.Handle
	step("boot", func() (err error) {
		if o.Image != "" {
			h, err = d.Restore(ctx, o.Spec, o.Image)
		} else {
			h, err = d.Start(ctx, o.Spec)
		}
		return err
	})
	if o.Capture != "" {
		step("capture", func() error {
			p, err := h.Pause(ctx)
			if err != nil {
				return err
			}
			return p.Capture(ctx, o.Capture)
		})
	}
	select {}
}

// killAgentAt runs an agent and kills it some time after it has written a line.
func killAgentAt(t *testing.T, o order, line string, after time.Duration) {
	t.Helper()
	o.Runsc, o.Parent = runsc(t), parent
	dial := o.Spec.Dial
	o.Spec.Dial = nil
	text, err := json.Marshal(o)
	o.Spec.Dial = dial
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), agentEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if lines.Text() == line {
			time.Sleep(after) // the instant to die at
			return
		}
	}
	t.Fatalf("the agent ended before %q", line)
}

// spoils sums up what is left of a sandbox's processes.
func spoils(t *testing.T, spec runtime.Spec) []int {
	t.Helper()
	var all []int
	for _, name := range []string{"runsc-sandbox", "runsc-gofer", "runsc"} {
		all = append(all, processes(t, name, spec.Dir)...)
	}
	return all
}

// The host agent dies at some instant of a start: the next one finds the sandbox or
// nothing, and no process is left over (DESIGN section 4).
func TestAgentDiesWhileStarting(t *testing.T) {
	t.Parallel()
	from := tree(t)
	for _, after := range []time.Duration{0, 20 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond, 300 * time.Millisecond} {
		spec := newSpec(t, from)
		killAgentAt(t, order{Spec: spec}, "boot", after)
		adoptOrNothing(t, spec, after)
	}
}

func adoptOrNothing(t *testing.T, spec runtime.Spec, after time.Duration) {
	t.Helper()
	ctx := context.Background()
	h, err := newDriver(t).Adopt(ctx, spec)
	switch {
	case err == nil:
		t.Logf("killed after %v: adopted", after)
		runtimetest.Await(t, h)
		kill(t, h)
	case fault.Is(err, fault.NotFound):
		t.Logf("killed after %v: nothing to adopt", after)
	default:
		t.Errorf("killed after %v: Adopt: %v", after, err)
	}
	if left := spoils(t, spec); len(left) > 0 {
		t.Errorf("killed after %v: the processes %v are left", after, left)
	}
}

// A sandbox outlives the agent that started it; another process adopts it, knows its
// memory and learns its exit code although it is not its parent's parent.
func TestAgentDiesAfterStart(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	killAgentAt(t, order{Spec: spec}, "done boot", 0)
	h, err := newDriver(t).Adopt(context.Background(), spec)
	if err != nil {
		t.Fatalf("Adopt: %v", err)
	}
	t.Cleanup(func() { kill(t, h) })
	runtimetest.Await(t, h)
	runtimetest.MustAsk(t, h, "set", "a", "1")
	wait := h.Wait()
	_, _ = runtimetest.Ask(h, "exit", "7")
	if exit := runtimetest.Ended(t, wait); !exit.Known || exit.Code != 7 {
		t.Errorf("ended as %+v, not with code 7", exit)
	}
}

// The agent dies in a capture, before the commit: the next one thaws the sandbox, and
// it is whole (Z10, D of the save order in DESIGN section 4).
func TestAgentDiesWhileCapturing_Z10(t *testing.T) {
	t.Parallel()
	from := tree(t)
	for _, after := range []time.Duration{0, 30 * time.Millisecond, 100 * time.Millisecond} {
		spec := newSpec(t, from)
		killAgentAt(t, order{Spec: spec, Capture: t.TempDir()}, "capture", after)
		h, err := newDriver(t).Adopt(context.Background(), spec)
		if err != nil {
			t.Fatalf("killed after %v: Adopt: %v", after, err)
		}
		t.Cleanup(func() { kill(t, h) })
		if err := h.Thaw(context.Background()); err != nil {
			t.Fatalf("killed after %v: Thaw: %v", after, err)
		}
		runtimetest.Await(t, h)
		p, err := h.Pause(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Capture(context.Background(), t.TempDir()); err != nil {
			t.Errorf("killed after %v: the next Capture: %v", after, err)
		}
	}
}

// The agent dies while a sandbox is restored: it is held or gone, and the image is
// good for another restore.
func TestAgentDiesWhileRestoring(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	spec := newSpec(t, tree(t))
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "spawn")
	p, err := h.Pause(ctx)
	if err != nil {
		t.Fatal(err)
	}
	image := t.TempDir()
	if err := p.Capture(ctx, image); err != nil {
		t.Fatal(err)
	}
	kill(t, h)
	for _, after := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond} {
		place := newSpec(t, spec.Root)
		killAgentAt(t, order{Spec: place, Image: image}, "boot", after)
		adoptOrNothing(t, place, after)
	}
	place := newSpec(t, spec.Root)
	killAgentAt(t, order{Spec: place, Image: image}, "done boot", 0)
	again, err := newDriver(t).Adopt(ctx, place)
	if err != nil {
		t.Fatalf("Adopt of a held sandbox: %v", err)
	}
	t.Cleanup(func() { kill(t, again) })
	runtimetest.Await(t, again)
	before := runtimetest.Ticks(t, again)
	time.Sleep(200 * time.Millisecond) // a child that ran would tick 20 times
	if got := runtimetest.Ticks(t, again); got > before+2 {
		t.Errorf("a held child ticked %d times", got-before)
	}
	if err := again.Thaw(ctx); err != nil {
		t.Fatal(err)
	}
	runtimetest.AwaitTicks(t, again, before+3)
}
