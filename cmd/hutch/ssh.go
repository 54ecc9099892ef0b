package main

import (
	"context"
	"net"
	"sync"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sshgate"
)

// serveSSH serves SSH where the settings say so. end closes what is open and waits for
// it; it may be called again.
func serveSSH(ctx context.Context, cfg serverConfig, ctl *control.Control) (end func(), err error) {
	if cfg.sshListen == "" {
		return func() {}, nil
	}
	key, err := sshgate.HostKey(cfg.layout.sshHostKey())
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", cfg.sshListen)
	if err != nil {
		return nil, fault.Wrap(err, fault.Unavailable, "cannot listen on %s for SSH; end what uses it, or give another --ssh-listen", cfg.sshListen)
	}
	ctx, cancel := context.WithCancel(ctx)
	gate := sshgate.New(sshgate.Config{Doorman: doorman{ctl}, HostKey: key, Log: cfg.log})
	var running sync.WaitGroup
	running.Go(func() {
		if err := gate.Serve(ctx, listener); err != nil {
			cfg.log.Error("SSH is not served any more", "err", err)
		}
	})
	cfg.log.Info("SSH is served", "address", listener.Addr().String(), "host_key", control.SSHFingerprint(key.PublicKey().Marshal()))
	return func() { cancel(); running.Wait() }, nil
}

// doorman knows SSH keys as control does.
type doorman struct{ ctl *control.Control }

// Login implements sshgate.Doorman.
func (d doorman) Login(ctx context.Context, key []byte) (sshgate.Login, error) {
	actors, err := d.ctl.SSHActors(ctx, key)
	return sshLogin{d.ctl, actors}, err
}

type sshLogin struct {
	ctl    *control.Control
	actors []control.Actor
}

// Guest implements sshgate.Login.
func (l sshLogin) Guest(ctx context.Context, ref string, use hostproto.Use) (g sshgate.Guest, err error) {
	for _, a := range l.actors {
		access, err := l.ctl.Guest(ctx, a, ref, use)
		if fault.Is(err, fault.NotFound) && a != l.actors[len(l.actors)-1] {
			continue
		}
		if err != nil {
			return nil, err
		}
		return &sshGuest{guestproto.NewClient(access.Guest.Dial, access.Guest.Token), access.Guest.Done, access.Sandbox.Spec.Workdir}, nil
	}
	return nil, fault.New(fault.NotFound, "there is no sandbox %s", ref)
}

// sshGuest is a connection to a sandbox's agent of its own: as long as a session.
type sshGuest struct {
	client  *guestproto.Client
	done    func()
	workdir string
}

func (g *sshGuest) Start(ctx context.Context, r *guestproto.StartRequest) (sshgate.Stream, error) {
	if r.Cwd == "" {
		r.Cwd = g.workdir
	}
	stream, err := g.client.Commands.Start(ctx, r)
	if err != nil {
		return nil, err
	}
	return stream, nil
}

func (g *sshGuest) Input(ctx context.Context, r *guestproto.InputRequest) (*guestproto.InputResponse, error) {
	return g.client.Commands.Input(ctx, r)
}

func (g *sshGuest) Signal(ctx context.Context, r *guestproto.SignalRequest) error {
	_, err := g.client.Commands.Signal(ctx, r)
	return err
}

func (g *sshGuest) Resize(ctx context.Context, r *guestproto.ResizeRequest) error {
	_, err := g.client.Commands.Resize(ctx, r)
	return err
}

func (g *sshGuest) Done() {
	g.client.Close()
	g.done()
}
