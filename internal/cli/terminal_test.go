package cli

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"github.com/hutchrun/hutch/api"
)

// run is a hutch process on a terminal or on pipes.
type run struct {
	t    *testing.T
	cmd  *exec.Cmd
	tty  *os.File // our side of the terminal
	side *os.File // its side, to look at the mode

	before *term.State // the mode before hutch ran

	mu   sync.Mutex
	text bytes.Buffer
	eof  chan struct{}
}

func hutchCommand(f *fake, vars []string, args ...string) *exec.Cmd {
	cmd := exec.Command("hutch", args...)
	cmd.Env = append(os.Environ(), "HUTCH_URL="+f.server.URL, "HUTCH_API_KEY="+fakeKey, "TERM=xterm-256color", "NO_COLOR=")
	cmd.Env = append(cmd.Env, vars...)
	return cmd
}

// onTerminal starts hutch on a terminal of 100 by 30.
func onTerminal(t *testing.T, f *fake, vars []string, args ...string) *run {
	t.Helper()
	ours, side, err := pty.Open()
	if err != nil {
		t.Fatalf("no terminal can be opened: %v", err)
	}
	if err := pty.Setsize(ours, &pty.Winsize{Rows: 30, Cols: 100}); err != nil {
		t.Fatal(err)
	}
	r := &run{t: t, cmd: hutchCommand(f, vars, args...), tty: ours, side: side, eof: make(chan struct{})}
	if r.before, err = term.GetState(int(side.Fd())); err != nil {
		t.Fatal(err)
	}
	r.cmd.Stdin, r.cmd.Stdout, r.cmd.Stderr = side, side, side
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(r.eof)
		buf := make([]byte, 4096)
		for {
			n, err := ours.Read(buf)
			r.mu.Lock()
			r.text.Write(buf[:n])
			r.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
		side.Close()
		ours.Close()
		<-r.eof
	})
	return r
}

func (r *run) shown() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// await waits until the terminal has shown a text.
func (r *run) await(text string) {
	r.t.Helper()
	for deadline := time.Now().Add(time.Minute); !strings.Contains(r.shown(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("the terminal never showed %q:\n%q", text, r.shown())
		}
	}
}

func (r *run) write(text string) {
	r.t.Helper()
	if _, err := r.tty.WriteString(text); err != nil {
		r.t.Fatal(err)
	}
}

// exit waits for the process and gives its exit code.
func (r *run) exit() int { return exitOf(r.t, r.cmd.Wait()) }

func exitOf(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if exit == nil {
		return 0
	}
	return exit.ExitCode()
}

// E1: -t gives a terminal of our size, passes keys and new sizes on, and puts our
// terminal back.
func TestExecOnATerminal(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	r := onTerminal(t, f, nil, "exec", "demo", "-it", "--", "sh", "-c",
		`trap 'stty size' WINCH; echo "$TERM $(stty size)"; read line; echo "got $line"; read line; exit 5`)
	r.await("xterm-256color 30 100")
	r.write("hello\r")
	r.await("got hello")
	if err := pty.Setsize(r.tty, &pty.Winsize{Rows: 50, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	r.await("50 120")
	r.write("bye\r")
	if code := r.exit(); code != 5 {
		t.Errorf("exit code %d, want 5", code)
	}
	after, err := term.GetState(int(r.side.Fd()))
	if err != nil || *after != *r.before {
		t.Errorf("the terminal's mode was not put back: %v", err)
	}
	if strings.Contains(r.shown(), "hutch:") {
		t.Errorf("hutch wrote to the screen: %q", r.shown())
	}
}

// E1: in raw mode ctrl-C is a key of the command's terminal.
func TestExecTerminalInterruptIsAKey(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	r := onTerminal(t, f, nil, "exec", "demo", "-t", "--", "sh", "-c", `trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.05; done`)
	r.await("ready")
	r.write("\x03")
	r.await("caught")
	if code := r.exit(); code != 4 {
		t.Errorf("exit code %d, want 4", code)
	}
	if n := f.countCalls("POST /v1/sandboxes/demo/commands/cmd_1/signal"); n != 0 {
		t.Errorf("%d signals were sent", n)
	}
}

// E1: the terminal is put back when hutch fails, and when a signal ends the command.
func TestExecPutsTheTerminalBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		code int
		end  func(f *fake, r *run)
	}{
		"the sandbox is gone": {125, func(f *fake, r *run) {
			f.mu.Lock()
			f.sandboxes[0].State = api.StateDeleted
			f.mu.Unlock()
			f.server.CloseClientConnections()
		}},
		"a signal": {143, func(_ *fake, r *run) { _ = r.cmd.Process.Signal(syscall.SIGTERM) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.add("demo", api.StateReady)
			r := onTerminal(t, f, nil, "exec", "demo", "-t", "--", "sh", "-c", `echo ready; exec sleep 600`)
			r.await("ready")
			c.end(f, r)
			if code := r.exit(); code != c.code {
				t.Errorf("exit code %d, want %d: %q", code, c.code, r.shown())
			}
			if after, err := term.GetState(int(r.side.Fd())); err != nil || *after != *r.before {
				t.Errorf("the terminal's mode was not put back: %v", err)
			}
		})
	}
}

// V2: on a terminal the step shows in a line that is taken away at the end.
func TestProgressOnATerminal(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	f.mu.Lock()
	f.held = true
	f.mu.Unlock()
	r := onTerminal(t, f, nil, "sleep", "demo")
	r.await("sleeping demo … capture 50%")
	f.release()
	if code := r.exit(); code != 0 {
		t.Errorf("exit code %d: %q", code, r.shown())
	}
	r.await("demo is sleeping (")
	if _, last, _ := strings.Cut(r.shown(), "demo is sleeping ("); strings.Contains(last, "capture") {
		t.Errorf("the line was left behind: %q", r.shown())
	}
	if !strings.Contains(r.shown(), "\r\x1b[Kdemo is sleeping (") {
		t.Errorf("the line was not cleared: %q", r.shown())
	}
}

// R1: deleting is asked about; only a yes does it.
func TestConfirmOnATerminal(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]struct {
		code  int
		state api.State
	}{
		"y\n": {0, api.StateDeleted}, "n\n": {130, api.StateReady}, "\n": {130, api.StateReady}, "\x03": {130, api.StateReady}, "\x04": {130, api.StateReady},
	} {
		f := newFake(t)
		s := f.add("demo", api.StateReady)
		r := onTerminal(t, f, nil, "delete", "demo")
		r.await("delete demo? [y/N] ")
		r.write(answer)
		if code := r.exit(); code != want.code || f.state(s) != want.state {
			t.Errorf("answer %q: exit code %d, %s; want %d, %s", answer, code, f.state(s), want.code, want.state)
		}
	}
}

// What is not there is not asked about.
func TestNothingToConfirm(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	s := f.add("demo", api.StateReady)
	f.rules = append(f.rules, &rule{method: "GET", prefix: "/v1/templates/nope", times: 1, what: "not_found", message: "there is no template nope"})
	for _, args := range [][]string{{"delete", "nope"}, {"templates", "rm", "nope"}, {"keys", "rm", "nope"}} {
		r := onTerminal(t, f, nil, args...)
		r.await("there is no ")
		if code := r.exit(); code != 12 || strings.Contains(r.shown(), "[y/N]") {
			t.Errorf("%v: exit code %d: %q", args, code, r.shown())
		}
	}
	r := onTerminal(t, f, nil, "delete", "nope", "demo")
	r.await("delete demo? [y/N] ")
	r.write("y\n")
	if code := r.exit(); code != 12 || f.state(s) != api.StateDeleted {
		t.Errorf("one of two: exit code %d, %s", code, f.state(s))
	}
}

func TestColour(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	for _, c := range []struct {
		vars []string
		want bool
	}{{nil, true}, {[]string{"NO_COLOR=1"}, false}, {[]string{"NO_COLOR=yes"}, false}, {[]string{"TERM=dumb"}, false}} {
		r := onTerminal(t, f, c.vars, "ls")
		r.await("demo")
		if code := r.exit(); code != 0 {
			t.Fatalf("exit code %d: %q", code, r.shown())
		}
		if got := strings.Contains(r.shown(), "\x1b["); got != c.want {
			t.Errorf("with %q colour is %v, want %v: %q", c.vars, got, c.want, r.shown())
		}
	}
}

// startExec starts hutch exec on pipes and gives what it wrote so far.
func startExec(t *testing.T, f *fake, script string) (*exec.Cmd, *lockedBuffer) {
	t.Helper()
	out := &lockedBuffer{}
	cmd := hutchCommand(f, nil, "exec", "demo", "--", "sh", "-c", script)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, out
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// E1: signals go to the command, whose exit code is ours.
func TestExecForwardsSignals(t *testing.T) {
	t.Parallel()
	for sig, name := range map[syscall.Signal]string{syscall.SIGINT: "INT", syscall.SIGTERM: "TERM", syscall.SIGHUP: "HUP"} {
		f := newFake(t)
		f.add("demo", api.StateReady)
		cmd, out := startExec(t, f, `trap 'echo caught; exit 33' `+name+`; echo ready; while :; do sleep 0.05; done`)
		eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready") })
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		if code := exitOf(t, cmd.Wait()); code != 33 || !strings.Contains(out.String(), "caught") {
			t.Errorf("%s: exit code %d, output %q; want 33 and caught", name, code, out)
		}
	}
}

// E1, E2: a third ctrl-C leaves a command that ignores them, says how to find it, and
// makes up no exit code.
func TestExecThirdInterruptLeaves(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	cmd, out := startExec(t, f, `trap '' INT; echo ready; exec sleep 600`)
	eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready") })
	for i := range 3 {
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if i < 2 {
			eventually(t, "a signal arrives", func() bool { return f.countCalls("POST /v1/sandboxes/demo/commands/cmd_1/signal") == i+1 })
		}
	}
	if code := exitOf(t, cmd.Wait()); code != exitExec {
		t.Errorf("exit code %d, want %d", code, exitExec)
	}
	for _, want := range []string{"ctrl-C once more", "left the command cmd_1 in demo", "hutch commands logs demo cmd_1 --cursor 6 --follow", "hutch commands kill demo cmd_1"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not say %q: %q", want, out)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.commands["cmd_1"].Exit != nil {
		t.Error("the command has ended")
	}
}

// SPEC section 6: a command survives the sleep of its sandbox, and so does its exec,
// which waits and wakes nothing.
func TestExecOutlastsASleep(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	s := f.add("demo", api.StateReady)
	set := func(state api.State) {
		f.mu.Lock()
		defer f.mu.Unlock()
		s.State = state
		f.cond.Broadcast()
	}
	cmd, out := startExec(t, f, `trap 'echo more; exit 6' USR1; echo ready; while :; do sleep 0.05; done`)
	eventually(t, "ready", func() bool { return strings.Contains(out.String(), "ready") })
	set(api.StateSleeping)
	f.server.CloseClientConnections()
	eventually(t, "it says that demo sleeps", func() bool { return strings.Contains(out.String(), "demo sleeps") })
	if n := f.countCalls("POST /v1/sandboxes/demo/wake"); n != 0 {
		t.Errorf("it was woken %d times", n)
	}
	set(api.StateReady)
	f.mu.Lock()
	pid := f.commands["cmd_1"].PID
	f.mu.Unlock()
	if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if code := exitOf(t, cmd.Wait()); code != 6 || strings.Count(out.String(), "ready") != 1 || !strings.Contains(out.String(), "more") {
		t.Errorf("exit code %d, output %q; want 6, and each line once", code, out)
	}
}

// A command whose output nobody reads any more gets SIGPIPE, as it would in a pipe
// on one machine.
func TestExecBrokenPipe(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := hutchCommand(f, nil, "exec", "demo", "--", "sh", "-c", "while echo y; do sleep 0.01; done")
	cmd.Stdout = writer
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	writer.Close()
	if _, err := reader.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	reader.Close()
	if code := exitOf(t, cmd.Wait()); code != 128+int(syscall.SIGPIPE) {
		t.Errorf("exit code %d, want 141", code)
	}
}
