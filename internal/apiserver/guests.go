package apiserver

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// Times that a guest has to answer. It is not trusted to answer at all, so that only
// streams and input, which end with their client, wait without a limit.
const (
	guestTimeout     = 30 * time.Second
	guestWorkTimeout = 10 * time.Minute // of what may go through many files
)

// maxGuests is how many clients are kept before those unused for guestIdle go.
const (
	maxGuests = 1024
	guestIdle = 10 * time.Minute
)

// guestPool keeps one client for each sandbox, so that calls share connections. A new
// boot, wake or fork has another token and generation: its first call closes the old
// client's connections and never uses them (N5).
type guestPool struct {
	mu   sync.Mutex
	byID map[string]*guestEntry
}

type guestEntry struct {
	generation int64
	token      string
	used       time.Time
	client     *guestproto.Client
}

// client gives the client for a sandbox's present generation.
func (p *guestPool) client(id string, generation int64, token string, dial func(context.Context) (net.Conn, error)) *guestproto.Client {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.byID[id]; e != nil {
		if e.generation == generation && e.token == token {
			e.used = now
			return e.client
		}
		if e.generation > generation { // a late caller must not take the newer one away
			return guestproto.NewClient(dial, token)
		}
		e.client.Close()
	}
	if len(p.byID) >= maxGuests {
		p.sweep(now)
	}
	e := &guestEntry{generation: generation, token: token, used: now, client: guestproto.NewClient(dial, token)}
	if p.byID == nil {
		p.byID = map[string]*guestEntry{}
	}
	p.byID[id] = e
	return e.client
}

func (p *guestPool) sweep(now time.Time) {
	for id, e := range p.byID {
		if now.Sub(e.used) > guestIdle {
			e.client.Close()
			delete(p.byID, id)
		}
	}
}

// drop forgets a client that is of no use any more; calls that run on it end by themselves.
func (p *guestPool) drop(id string, client *guestproto.Client) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.byID[id]; e != nil && e.client == client {
		client.Close()
		delete(p.byID, id)
	}
}

// guest is a way to one sandbox's agent for one call.
type guest struct {
	*guestproto.Client
	pool    *guestPool
	id      string // the sandbox's
	workdir string // where its commands start
}

// guest gives the way to a sandbox's agent, for a use that lasts as long as the request.
// The use says whether a sleeping one is woken for it; reading what commands there are
// and what they wrote wakes nothing (Z5).
func (s *server) guest(ctx context.Context, ref string, use control.Use) (guest, error) {
	access, err := s.control.Guest(ctx, callOf(ctx).caller, ref, use)
	if err != nil {
		return guest{}, err
	}
	context.AfterFunc(ctx, access.Guest.Done)
	id := access.Sandbox.ID
	return guest{
		Client: s.guests.client(id, access.Guest.Generation, access.Guest.Token, access.Guest.Dial),
		pool:   &s.guests, id: id, workdir: access.Sandbox.Spec.Workdir,
	}, nil
}

// failed makes of a guest's error what the API's caller may see. A token that is
// refused means that the sandbox has booted or woken since: the next call finds it.
func (g guest) failed(err error) error {
	if err == nil {
		return nil
	}
	f := faultOf(err)
	switch f.Kind {
	case fault.Unauthenticated:
		g.pool.drop(g.id, g.Client)
		return fault.Wrap(err, fault.Unavailable, "the sandbox %s has just started anew; try again", g.id).Because("generation_changed")
	case fault.Unavailable:
		g.pool.drop(g.id, g.Client)
		if f.Err != nil && f.Reason == "" {
			return fault.Wrap(err, fault.Unavailable, "the agent in the sandbox %s does not answer; try again", g.id).Because("guest_unreachable")
		}
	}
	return f
}

// unary runs a call that must end in time.
func unary[Req, Res any](ctx context.Context, g guest, limit time.Duration, call func(context.Context, Req) (Res, error), req Req) (Res, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	res, err := call(ctx, req)
	return res, g.failed(err)
}
