// Package sshgate lets SSH clients into sandboxes: the user's name is the sandbox's, a
// registered public key says whose it is, and a session wakes what sleeps. The sandbox
// needs no SSH server: commands run by its guest agent.
package sshgate

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// Bounds of what a client may have before and after its login.
const (
	loginTimeout  = 30 * time.Second // from the connection to the end of the login
	maxTries      = 6                // keys offered in one connection: OpenSSH's own bound
	maxHandshakes = 64               // connections that have not logged in
	maxPerAddress = 16               // of them from one address
	maxChannels   = 256              // sessions in one connection
	maxUser       = 128              // bytes of a user's name
)

// Doorman knows the registered keys.
type Doorman interface {
	// Login gives what the holder of a public key, in SSH's wire format, may do; NotFound
	// where nobody registered it. It is asked at every login, so that a revoked key
	// opens nothing from then on.
	Login(ctx context.Context, key []byte) (Login, error)
}

// Login is one holder's way to the sandboxes of its project.
type Login interface {
	// Guest gives the way to a sandbox's agent, and wakes it where the use does.
	Guest(ctx context.Context, ref string, use hostproto.Use) (Guest, error)
}

// Stream is what a guest tells of one command.
type Stream interface {
	Receive() (*guestproto.CommandEvent, error)
	Close() error
}

// Guest is a sandbox's agent for one use.
type Guest interface {
	Start(ctx context.Context, r *guestproto.StartRequest) (Stream, error)
	Input(ctx context.Context, r *guestproto.InputRequest) (*guestproto.InputResponse, error)
	Signal(ctx context.Context, r *guestproto.SignalRequest) error
	Resize(ctx context.Context, r *guestproto.ResizeRequest) error
	Done() // ends the use
}

// Config is what a gateway needs.
type Config struct {
	Doorman Doorman
	HostKey ssh.Signer
	Log     *slog.Logger
}

// Gate serves SSH.
type Gate struct {
	cfg   Config
	tries *tries

	mu         sync.Mutex
	handshakes map[netip.Addr]int
	pending    int
}

// New makes a gateway.
func New(cfg Config) *Gate {
	return &Gate{cfg: cfg, tries: newTries(time.Now), handshakes: map[netip.Addr]int{}}
}

// Serve answers connections until ctx ends, closes them then, and waits for their
// sessions.
func (g *Gate) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return nil
		}
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil { // too many open files: what is open goes on
			g.cfg.Log.Warn("an SSH connection was not accepted", "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		conns.Go(func() {
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			g.serve(ctx, conn)
		})
	}
}

// enter counts a connection that has not logged in, or refuses it.
func (g *Gate) enter(from netip.Addr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pending >= maxHandshakes || g.handshakes[from] >= maxPerAddress {
		return false
	}
	g.pending++
	g.handshakes[from]++
	return true
}

func (g *Gate) entered(from netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pending--
	if g.handshakes[from]--; g.handshakes[from] == 0 {
		delete(g.handshakes, from)
	}
}

// login is what a key that was offered opens.
type login struct {
	Login
	ref string
}

type loginKey struct{}

func (g *Gate) serve(ctx context.Context, conn net.Conn) {
	from := addressOf(conn.RemoteAddr())
	if !g.tries.may(from) || !g.enter(from) {
		return
	}
	config := &ssh.ServerConfig{
		ServerVersion: "SSH-2.0-hutch",
		MaxAuthTries:  maxTries,
		PublicKeyCallback: func(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			ref, err := ParseUser(meta.User())
			if err != nil {
				return nil, err
			}
			who, err := g.cfg.Doorman.Login(ctx, key.Marshal())
			if err != nil {
				return nil, err
			}
			return &ssh.Permissions{ExtraData: map[any]any{loginKey{}: login{Login: who, ref: ref}}}, nil
		},
	}
	config.AddHostKey(g.cfg.HostKey)
	_ = conn.SetDeadline(time.Now().Add(loginTimeout))
	server, channels, requests, err := ssh.NewServerConn(conn, config)
	g.entered(from)
	if err != nil {
		g.tries.failed(from)
		g.cfg.Log.Debug("an SSH login failed", "from", from, "err", err)
		return
	}
	defer server.Close()
	g.tries.succeeded(from)
	_ = conn.SetDeadline(time.Time{})
	who, _ := server.Permissions.ExtraData[loginKey{}].(login)
	ctx, cancel := context.WithCancel(ctx)
	go ssh.DiscardRequests(requests) // refuses remote forwarding; answers keep-alives
	var sessions sync.WaitGroup
	defer sessions.Wait()
	defer cancel()
	room := make(chan struct{}, maxChannels)
	for offer := range channels {
		if offer.ChannelType() != "session" {
			_ = offer.Reject(ssh.UnknownChannelType, "hutch opens sessions only: commands and terminals")
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			_ = offer.Reject(ssh.ResourceShortage, "too many sessions in one connection")
			continue
		}
		channel, requests, err := offer.Accept()
		if err != nil {
			<-room
			continue
		}
		sessions.Go(func() {
			defer func() { <-room }()
			serveSession(ctx, who, channel, requests)
		})
	}
}

// ParseUser reads a sandbox's name or id out of an SSH user's name.
func ParseUser(user string) (string, error) {
	if user == "" || len(user) > maxUser || user[0] == '-' || strings.IndexFunc(user, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
	}) >= 0 {
		return "", fault.New(fault.InvalidArgument, "the user's name is no name or id of a sandbox; use `ssh NAME@host`")
	}
	return user, nil
}

// addressOf is where a client comes from; an IPv6 network counts as one address, as one
// machine has all of it.
func addressOf(a net.Addr) netip.Addr {
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	ip := at.Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.WithZone("").Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return ip
}
