package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// The end-to-end tests drive the built programs as a user does: real processes, real
// gVisor sandboxes, the real template.

// binary is the program under test; `make build` makes it.
var binary = func() string {
	path, err := filepath.Abs("../../bin/hutch")
	if err != nil {
		panic(err)
	}
	return path
}()

// shared is the server that most tests use. Its template takes a minute to make.
var shared *server

func TestMain(m *testing.M) {
	if _, err := os.Stat(binary); err != nil {
		fmt.Fprintln(os.Stderr, "bin/hutch is not there: `make build` makes it, `make test` does all in order")
		os.Exit(1)
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests run sandboxes and need root")
		os.Exit(1)
	}
	os.Exit(func() int {
		var err error
		if shared, err = newServer(); err == nil {
			shared.keep = "8s"
			if sshAddress, err = freeAddress(); err != nil {
				return 1
			}
			shared.args = []string{"--ssh-listen", sshAddress}
			defer shared.remove()
			if err = shared.start(); err == nil {
				_, err = shared.try(15*time.Minute, nil, "templates", "build", "base", "--debian")
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "the shared server:", err)
			return 1
		}
		code := m.Run()
		// B7: whatever the tests did and killed, every figure is what happened.
		if _, err := shared.try(2*time.Minute, nil, "bill", "--verify"); err != nil {
			fmt.Fprintln(os.Stderr, "the ledger after all tests:", err)
			code = 1
		}
		if err := shared.remove(); err != nil {
			fmt.Fprintln(os.Stderr, "the shared server leaves something:", err)
			return 1
		}
		return code
	}())
}

// server is one installation with a server process.
type server struct {
	dir    string   // of data and context
	listen string   // the same address after each restart, as of a real one
	pool   string   // size of the pool
	args   []string // more of them, of `hutch up`
	env    []string // more of it
	keep   string   // how long what is deleted can be brought back
	cmd    *exec.Cmd
	ended  chan struct{}
	log    *os.File
	gone   sync.Once
	remErr error
}

func newServer() (*server, error) {
	dir, err := os.MkdirTemp("/var/tmp", "hutch-e2e-")
	if err != nil {
		return nil, err
	}
	listen, err := freeAddress()
	return &server{dir: dir, listen: listen, pool: "10GB", keep: "0"}, err
}

// freeAddress finds a port that nothing listens on, below those that the kernel gives
// to outgoing connections.
func freeAddress() (string, error) {
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000)))
		if err != nil {
			continue
		}
		return l.Addr().String(), l.Close()
	}
	return "", errors.New("no port is free between 20000 and 32000")
}

func (s *server) data() string { return filepath.Join(s.dir, "data") }

// start runs the server and waits until it answers.
func (s *server) start() error {
	var err error
	if s.log, err = os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return err
	}
	s.cmd = exec.Command(binary, "up", "--foreground", "--data", s.data(), "--listen", s.listen, "--pool-size", s.pool,
		"--idle-sample", "1s", "--idle-min", "2s", "--webhook-http", "--webhook-allow", "127.0.0.0/8",
		"--save-retry", "1s,2s", "--undelete-for", s.keep)
	s.cmd.Args = append(s.cmd.Args, s.args...)
	s.cmd.Env = append(s.environ(), "HUTCH_DEBUG=1")
	s.cmd.Env = append(s.cmd.Env, s.env...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { _ = cmd.Wait(); close(ended) }(s.cmd, s.ended)
	deadline := time.Now().Add(2 * time.Minute)
	for time.Now().Before(deadline) {
		select {
		case <-s.ended:
			return fmt.Errorf("the server ended: %s", s.lastLog())
		default:
		}
		l, err := layoutOf(s.data()) // may be another once the directory is there
		if err != nil {
			return err
		}
		if info, err := l.readServer(); err == nil && info.PID == s.cmd.Process.Pid && answers(context.Background(), info.URL) {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("the server does not answer: %s", s.lastLog())
}

// environ keeps what is set up on this machine out of the tests.
func (s *server) environ() []string {
	return append(os.Environ(), "HUTCH_CONFIG="+s.config(), configVariable+"="+os.DevNull)
}

func (s *server) config() string { return filepath.Join(s.dir, "config.toml") }

func (s *server) lastLog() string {
	data, _ := os.ReadFile(filepath.Join(s.dir, "log"))
	if len(data) > 4000 {
		data = data[len(data)-4000:]
	}
	return string(data)
}

// kill ends the server as a crash does.
func (s *server) kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	<-s.ended
	_ = s.log.Close()
}

// remove ends the server, has hutch clean up, and looks for what is left.
func (s *server) remove() error {
	s.gone.Do(func() { s.remErr = s.cleanUp() })
	return s.remErr
}

func (s *server) cleanUp() error {
	l, err := layoutOf(s.data())
	if err != nil {
		return err
	}
	s.kill()
	out, err := exec.Command(binary, "doctor", "--clean", "--yes", "--data", s.data()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("doctor --clean: %w: %s", err, out)
	}
	if left := residue(l); left != "" {
		return errors.New(left)
	}
	return os.RemoveAll(s.dir)
}

// residue says what of an installation is still in the kernel.
func residue(l layout) string {
	var left []string
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, l.data) || strings.Contains(line, l.run()) {
			left = append(left, "mount: "+line)
		}
	}
	loops, _ := exec.Command("losetup", "-l", "-n", "-O", "BACK-FILE").Output()
	for line := range strings.Lines(string(loops)) {
		if strings.Contains(line, l.data) {
			left = append(left, "loop device: "+line)
		}
	}
	spaces, _ := filepath.Glob("/run/netns/*" + l.tag + "*")
	left = append(left, spaces...)
	groups, _ := filepath.Glob("/sys/fs/cgroup/*hutch-" + l.tag)
	nested, _ := filepath.Glob("/sys/fs/cgroup/*/hutch-" + l.tag)
	left = append(append(left, groups...), nested...)
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		if cmd, _ := os.ReadFile(p); bytes.Contains(cmd, []byte(l.run()+"/")) {
			left = append(left, "process: "+p+" "+string(bytes.ReplaceAll(cmd, []byte{0}, []byte{' '})))
		}
	}
	return strings.Join(left, "\n")
}

// result is how a command of the CLI ended.
type result struct {
	stdout, stderr string
	code           int
}

func (r result) String() string {
	return fmt.Sprintf("exit code %d\nstdout: %s\nstderr: %s", r.code, r.stdout, r.stderr)
}

// try runs the CLI against the server.
func (s *server) try(limit time.Duration, stdin io.Reader, args ...string) (result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = s.environ()
	cmd.Stdin = stdin
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	r := result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
	if err != nil {
		err = fmt.Errorf("hutch %s: %w: %s", strings.Join(args, " "), err, r)
	}
	return r, err
}

// hutch runs the CLI and fails the test when it fails.
func hutchOK(t *testing.T, args ...string) string {
	t.Helper()
	r, err := shared.try(2*time.Minute, nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return r.stdout
}

// hutchFails runs the CLI and wants an error of this kind.
func hutchFails(t *testing.T, kind string, args ...string) map[string]any {
	t.Helper()
	return hutchFailsRaw(t, kind, append([]string{args[0], "--json"}, args[1:]...))
}

func hutchFailsRaw(t *testing.T, kind string, args []string) map[string]any {
	t.Helper()
	r, err := shared.try(2*time.Minute, nil, args...)
	if err == nil {
		t.Fatalf("hutch %s succeeded: %s", strings.Join(args, " "), r)
	}
	var body struct {
		Error map[string]any `json:"error"`
	}
	if err := json.Unmarshal([]byte(r.stderr), &body); err != nil {
		t.Fatalf("hutch %s: stderr is no JSON (%v): %s", strings.Join(args, " "), err, r)
	}
	if body.Error["code"] != kind {
		t.Fatalf("hutch %s: the code is %v, not %s: %s", strings.Join(args, " "), body.Error["code"], kind, r)
	}
	return body.Error
}

// box is a sandbox of a test.
type box struct {
	t    *testing.T
	name string
}

var boxes struct {
	sync.Mutex
	n int
}

// newName makes a name that no other test uses.
func newName(t *testing.T) string {
	t.Helper()
	boxes.Lock()
	defer boxes.Unlock()
	boxes.n++
	return fmt.Sprintf("t%d-%d", os.Getpid(), boxes.n)
}

// newBox makes a sandbox that goes away with the test.
func newBox(t *testing.T, args ...string) *box {
	t.Helper()
	b := &box{t, newName(t)}
	t.Cleanup(func() {
		if r, err := shared.try(time.Minute, nil, "delete", b.name, "--yes"); err != nil && !strings.Contains(r.stderr, "no sandbox") {
			t.Error(err)
		}
	})
	hutchOK(t, append([]string{"new", "--name", b.name}, args...)...)
	return b
}

// forks makes count forks that go away with the test.
func (b *box) forks(count int, args ...string) []*box {
	b.t.Helper()
	out := hutchOK(b.t, append([]string{"fork", b.name, "--count", fmt.Sprint(count), "--json"}, args...)...)
	var body struct {
		Forks []struct {
			Sandbox struct {
				Name string `json:"name"`
			} `json:"sandbox"`
		} `json:"forks"`
	}
	if err := json.Unmarshal([]byte(out), &body); err != nil {
		b.t.Fatalf("fork: %v: %s", err, out)
	}
	var made []*box
	for _, f := range body.Forks {
		child := &box{b.t, f.Sandbox.Name}
		made = append(made, child)
		b.t.Cleanup(func() { _, _ = shared.try(time.Minute, nil, "delete", child.name, "--yes") })
	}
	if len(made) != count {
		b.t.Fatalf("%d forks were made of %d: %s", len(made), count, out)
	}
	return made
}

func (b *box) hutch(verb string, args ...string) string {
	b.t.Helper()
	return hutchOK(b.t, append([]string{verb, b.name}, args...)...)
}

// commands lists the commands inside, as JSON.
func (b *box) commands() string {
	b.t.Helper()
	return hutchOK(b.t, "commands", "ls", b.name, "--json")
}

// sh runs a shell line inside and gives its stdout.
func (b *box) sh(script string) string {
	b.t.Helper()
	return strings.TrimRight(b.hutch("exec", "--", "sh", "-c", script), "\n")
}

// root is sh as root.
func (b *box) root(script string) string {
	b.t.Helper()
	return strings.TrimRight(b.hutch("exec", "--user", "root", "--", "sh", "-c", script), "\n")
}

// exec runs a command and gives all of how it ended.
func (b *box) exec(stdin io.Reader, args ...string) result {
	b.t.Helper()
	r, _ := shared.try(2*time.Minute, stdin, append([]string{"exec", b.name}, args...)...)
	return r
}

type boxInfo struct {
	ID         string `json:"id"`
	Name       string `json:"name"`
	State      string `json:"state"`
	Reason     string `json:"reason"`
	Message    string `json:"message"`
	Generation int64  `json:"generation"`
	Conditions []struct {
		Type, Reason string
	} `json:"conditions"`
	Operation *struct {
		ID   string `json:"id"`
		Kind string `json:"kind"`
	} `json:"operation"`
}

func (b *box) get() boxInfo {
	b.t.Helper()
	var info boxInfo
	out := b.hutch("get", "--json")
	if err := json.Unmarshal([]byte(out), &info); err != nil {
		b.t.Fatalf("get: %v: %s", err, out)
	}
	return info
}

func (b *box) is(state string) {
	b.t.Helper()
	if got := b.get(); got.State != state {
		b.t.Fatalf("%s is %s (%s), not %s", b.name, got.State, got.Reason, state)
	}
}

// becomes waits for a state that no verb of the test asked for.
func (b *box) becomes(state string) boxInfo {
	b.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		got := b.get()
		if got.State == state {
			return got
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%s is %s and does not become %s", b.name, got.State, state)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// api calls the server's API with the command line's key.
func api(t *testing.T, method, path string, header map[string]string, body io.Reader) (int, string) {
	t.Helper()
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	info, err := l.readServer()
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, info.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+shared.key(t))
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for k, v := range header {
		if k == "Host" {
			req.Host = v
		}
		req.Header.Set(k, v)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(data)
}

func (s *server) key(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile(s.config())
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), "api_key = "); ok {
			return strings.Trim(rest, `'"`)
		}
	}
	t.Fatal("no key in the context file")
	return ""
}
