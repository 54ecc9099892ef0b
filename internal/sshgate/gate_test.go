package sshgate

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// fakeGuest runs "cat", which gives its input back and ends with 7, and keeps what it
// was asked. "garbage" answers what no guest may, "cut" ends without an exit.
type fakeGuest struct {
	mu     sync.Mutex
	req    *guestproto.StartRequest
	size   *guestproto.WindowSize
	events chan *guestproto.CommandEvent
	taken  int64
	done   int
}

func newFakeGuest() *fakeGuest {
	return &fakeGuest{events: make(chan *guestproto.CommandEvent, 64)}
}

func (g *fakeGuest) Login(_ context.Context, key []byte) (Login, error) {
	if !bytes.Equal(key, signer(1).PublicKey().Marshal()) {
		return nil, fault.New(fault.NotFound, "no such key")
	}
	return g, nil
}

func (g *fakeGuest) Guest(_ context.Context, ref string, use hostproto.Use) (Guest, error) {
	if ref != "demo" || use != hostproto.UseCommand {
		return nil, fault.New(fault.NotFound, "there is no sandbox %s", ref)
	}
	return g, nil
}

func (g *fakeGuest) Start(ctx context.Context, r *guestproto.StartRequest) (Stream, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.req = r
	switch r.Shell {
	case "garbage":
		g.exit(&guestproto.Exit{})
	case "cut":
		g.started()
		g.events <- nil
	default:
		g.started()
	}
	return fakeStream{ctx, g}, nil
}

func (g *fakeGuest) started() {
	g.events <- &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Started{Started: &guestproto.Started{Id: "cmd_1"}}}
}

func (g *fakeGuest) exit(e *guestproto.Exit) {
	g.events <- &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Exit{Exit: e}}
}

func (g *fakeGuest) output(s guestproto.Stream, data []byte) {
	g.events <- &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Output{Output: &guestproto.Output{Stream: s, Data: data}}}
}

func (g *fakeGuest) Input(_ context.Context, r *guestproto.InputRequest) (*guestproto.InputResponse, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.Offset != g.taken {
		return nil, errors.New("a gap in the input")
	}
	data := r.Data[:min(len(r.Data), 1000)] // a guest may take less than it is given
	g.taken += int64(len(data))
	if len(data) > 0 {
		g.output(guestproto.Stream_STREAM_STDOUT, bytes.Clone(data))
	}
	if r.Eof {
		g.output(guestproto.Stream_STREAM_STDERR, []byte("bye"))
		g.exit(&guestproto.Exit{Code: 7})
	}
	return &guestproto.InputResponse{Offset: g.taken}, nil
}

func (g *fakeGuest) Signal(_ context.Context, r *guestproto.SignalRequest) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.req.Shell == "cut" {
		return errors.New("the agent is gone")
	}
	g.exit(&guestproto.Exit{Code: 128 + r.Signal, Signal: r.Signal})
	return nil
}

func (g *fakeGuest) Resize(_ context.Context, r *guestproto.ResizeRequest) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.size = r.Size
	return nil
}

func (g *fakeGuest) Done() { g.mu.Lock(); defer g.mu.Unlock(); g.done++ }

type fakeStream struct {
	ctx context.Context //nolint:containedctx // as a real stream's
	g   *fakeGuest
}

func (s fakeStream) Receive() (*guestproto.CommandEvent, error) {
	select {
	case e := <-s.g.events:
		if e == nil {
			return nil, io.EOF
		}
		return e, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

func (fakeStream) Close() error { return nil }

func signer(seed byte) ssh.Signer {
	s, err := ssh.NewSignerFromKey(ed25519.NewKeyFromSeed(bytes.Repeat([]byte{seed}, ed25519.SeedSize)))
	if err != nil {
		panic(err)
	}
	return s
}

// serveGate serves a guest until the test ends.
func serveGate(t *testing.T, g *fakeGuest) (address string, gate *Gate) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gate = New(Config{Doorman: g, HostKey: signer(9), Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- gate.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String(), gate
}

func dial(address, user string, key ssh.Signer) (*ssh.Client, error) {
	return ssh.Dial("tcp", address, &ssh.ClientConfig{
		User: user, Auth: []ssh.AuthMethod{ssh.PublicKeys(key)}, HostKeyCallback: ssh.FixedHostKey(signer(9).PublicKey()), Timeout: time.Minute,
	})
}

func openSession(t *testing.T, g *fakeGuest, user string) *ssh.Session {
	t.Helper()
	address, _ := serveGate(t, g)
	c, err := dial(address, user, signer(1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestExec_N2(t *testing.T) {
	t.Parallel()
	g := newFakeGuest()
	s := openSession(t, g, "demo")
	text := strings.Repeat("0123456789", 1234)
	var out, errs bytes.Buffer
	s.Stdin, s.Stdout, s.Stderr = strings.NewReader(text), &out, &errs
	if err := s.Setenv("LANG", "C"); err != nil {
		t.Error(err)
	}
	err := s.Run("cat")
	exit, ok := errors.AsType[*ssh.ExitError](err)
	if !ok || exit.ExitStatus() != 7 || out.String() != text || errs.String() != "bye" {
		t.Errorf("%v, %d bytes, %q", err, out.Len(), errs.String())
	}
	if g.req.Shell != "cat" || g.req.Env["LANG"] != "C" || g.req.Pty != nil || !g.req.Lossless {
		t.Errorf("asked for %v", g.req)
	}
}

func TestTerminalAndSignal_N2(t *testing.T) {
	t.Parallel()
	g := newFakeGuest()
	s := openSession(t, g, "demo")
	if _, err := s.StdinPipe(); err != nil { // or the client ends the input at once
		t.Fatal(err)
	}
	if err := errors.Join(s.RequestPty("xterm", 24, 80, nil), s.Shell()); err != nil {
		t.Fatal(err)
	}
	if err := s.WindowChange(50, 100); err != nil {
		t.Fatal(err)
	}
	if err := s.Signal(ssh.SIGTERM); err != nil {
		t.Fatal(err)
	}
	err := s.Wait()
	if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.Signal() != "TERM" {
		t.Errorf("ended with %v", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.req.Pty == nil || g.req.Env["TERM"] != "xterm" || !strings.Contains(g.req.Shell, "bash -l") {
		t.Errorf("asked for %v", g.req)
	}
	if last := max(g.size.GetRows(), g.req.Pty.GetRows()); last != 50 {
		t.Errorf("the size is %d rows", last)
	}
}

// TestNoFalseExit_N2: what goes wrong is said in words, and is never an exit code of the
// command.
func TestNoFalseExit_N2(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ user, line, words string }{
		{"none", "cat", "there is no sandbox none"},
		{"demo", "garbage", "answered what it must not"},
		{"demo", "cut", "interrupted"},
	} {
		s := openSession(t, newFakeGuest(), c.user)
		var errs bytes.Buffer
		s.Stderr = &errs
		err := s.Run(c.line)
		if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.ExitStatus() != exitFailed || !strings.Contains(errs.String(), c.words) {
			t.Errorf("%s@%s: %v, %q", c.line, c.user, err, errs.String())
		}
	}
}

// TestRefused_N2: other keys, forwarding, subsystems and an agent are refused, and the
// connection goes on.
func TestRefused_N2(t *testing.T) {
	t.Parallel()
	g := newFakeGuest()
	address, gate := serveGate(t, g)
	if _, err := dial(address, "demo", signer(2)); err == nil {
		t.Error("a key that nobody registered opens")
	}
	c, err := dial(address, "demo", signer(1))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Dial("tcp", "127.0.0.1:22"); err == nil {
		t.Error("a port is forwarded")
	}
	if ok, _, err := c.SendRequest("tcpip-forward", true, nil); ok || err != nil {
		t.Errorf("a port is forwarded back: %v %v", ok, err)
	}
	s, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := s.SendRequest("auth-agent-req@openssh.com", true, nil); ok || err != nil {
		t.Errorf("an agent is forwarded: %v %v", ok, err)
	}
	s.Stdin = strings.NewReader("x")
	if exit, ok := errors.AsType[*ssh.ExitError](s.Run("cat")); !ok || exit.ExitStatus() != 7 {
		t.Error("the connection does not go on")
	}
	from := netip.MustParseAddr("127.0.0.1")
	for range triesBurst {
		gate.tries.failed(from)
	}
	if _, err := dial(address, "demo", signer(1)); err == nil {
		t.Error("an address that failed too often may try again")
	}
}

func TestTries(t *testing.T) {
	t.Parallel()
	now := time.Unix(0, 0)
	tr := newTries(func() time.Time { return now })
	from := netip.MustParseAddr("192.0.2.1")
	for range 2 * triesBurst {
		tr.failed(from)
	}
	if tr.may(from) {
		t.Error("may try at once")
	}
	if now = now.Add(triesInterval); !tr.may(from) {
		t.Error("may not try later")
	}
	for i := range 2 * triesKept {
		tr.failed(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}))
	}
	if len(tr.by) > triesKept {
		t.Errorf("%d addresses are kept", len(tr.by))
	}
}

func TestHostKey(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	one, err := HostKey(path)
	two, err2 := HostKey(path)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one.PublicKey().Marshal(), two.PublicKey().Marshal()) {
		t.Error("the key is another one the second time")
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st.Mode(), err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := HostKey(path); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("a damaged key: %v", err)
	}
}

func FuzzParseUser(f *testing.F) {
	for _, s := range []string{"demo", "sbx_01k3c9a6xwe8htz0s6h1j2k3m4", "", "-oProxyCommand=x", "a/../b", "a\x00", strings.Repeat("a", 200)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		ref, err := ParseUser(s)
		if err == nil && (ref == "" || ref != s || len(ref) > maxUser || ref[0] == '-' || strings.ContainsAny(ref, "/.\x00 \n%@:")) {
			t.Errorf("%q gives %q", s, ref)
		}
		if err != nil && !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", s, err)
		}
	})
}
