// Package guesttest runs a guest agent inside a test's own process: the real agent on
// a loopback port, with a directory for its root file system and an identity that only
// records. Commands run on the machine as the test's user.
package guesttest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/guest"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// Agent is an agent that serves.
type Agent struct {
	Guest    *guest.Guest
	Root     string // its root directory; has /workspace and /root
	Identity *guest.Recorder
	Token    string
	Client   *guestproto.Client // shows Token
	addr     string
}

// Token makes a token of a word.
func Token(word string) string { return word + strings.Repeat("-", guestproto.MinToken) }

// Start runs an agent that has not been initialised, until the test ends. Root and
// Identity of cfg are set where they are empty.
func Start(t testing.TB, cfg guest.Config) *Agent {
	t.Helper()
	a := &Agent{Identity: &guest.Recorder{}, Token: Token("first")}
	if cfg.Root == "" {
		cfg.Root = t.TempDir()
		for _, dir := range []string{guestproto.Workspace, "/root"} {
			if err := os.MkdirAll(filepath.Join(cfg.Root, dir), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		// Commands are found by the machine's own paths.
		for _, dir := range []string{"bin", "usr", "lib", "lib64", "sbin"} {
			if err := os.Symlink("/"+dir, filepath.Join(cfg.Root, dir)); err != nil {
				t.Fatal(err)
			}
		}
	}
	a.Root = cfg.Root
	if cfg.Identity == nil {
		cfg.Identity = a.Identity
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a.addr = l.Addr().String()
	a.Guest = guest.New(cfg)
	served := make(chan error, 1)
	go func() { served <- a.Guest.Serve(l) }()
	a.Client = a.Dial(t, a.Token)
	t.Cleanup(func() {
		if err := a.Guest.Close(); err != nil {
			t.Errorf("close the agent: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return a
}

// Boot is Start and Init.
func Boot(t testing.TB, cfg guest.Config) *Agent {
	t.Helper()
	a := Start(t, cfg)
	if _, err := a.Client.Agent.Init(t.Context(), InitRequest()); err != nil {
		t.Fatalf("init: %v", err)
	}
	return a
}

// InitRequest is a valid one.
func InitRequest() *guestproto.InitRequest {
	return &guestproto.InitRequest{
		WallClockUnixNano: time.Now().UnixNano(),
		Entropy:           []byte(strings.Repeat("entropy!", 8)),
		Identity:          &guestproto.Identity{Hostname: "box", MachineId: strings.Repeat("0a", 16)},
		SandboxName:       "box",
	}
}

// RestoredRequest is a valid one that sets a new token.
func RestoredRequest(kind guestproto.RestoreKind, token string) *guestproto.RestoredRequest {
	return &guestproto.RestoredRequest{
		NewToken:          token,
		Kind:              kind,
		WallClockUnixNano: time.Now().UnixNano(),
		Entropy:           []byte(strings.Repeat("newbytes", 8)),
		Identity:          &guestproto.Identity{Hostname: "fork", MachineId: strings.Repeat("0b", 16)},
		SandboxName:       "fork",
	}
}

// Conn connects to the agent.
func (a *Agent) Conn(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", a.addr)
}

// Dial makes another client, with any token.
func (a *Agent) Dial(t testing.TB, token string) *guestproto.Client {
	c := guestproto.NewClient(a.Conn, token)
	t.Cleanup(c.Close)
	return c
}
