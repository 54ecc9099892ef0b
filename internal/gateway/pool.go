package gateway

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

const (
	// idleFor is how long a connection to a program waits for the next request. Node.js
	// closes its side after 5 s (nodejs.org, server.keepAliveTimeout); a request that is
	// just on its way then would be lost.
	idleFor = 4 * time.Second
	// headerMost bounds the header of an answer, in bytes.
	headerMost = 256 << 10
	// waysMost is how many sandboxes' connections are kept before those unused for
	// wayIdle go.
	waysMost = 1024
	wayIdle  = 5 * time.Minute
)

// pool keeps the connections to each sandbox's programs. A sandbox that has woken or
// booted since has another generation: none of its connections is used again (N5).
type pool struct {
	dialMost time.Duration

	mu   sync.Mutex
	byID map[string]*route
}

// route is the way to one boot of a sandbox.
type route struct {
	generation int64
	used       time.Time
	http1      *http.Transport
	http2      *http.Transport // without TLS, for callers that speak gRPC
}

// errSilent is the cause of the context of a connection that was not answered in time.
var errSilent = errors.New("gateway: nobody answered in time")

func (p *pool) newRoute(w Way, keep bool) *route {
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		n, err := strconv.Atoi(port)
		if err != nil {
			return nil, err
		}
		// The transport lets a connection be made for the next caller when its own has gone
		// away: without a bound those to a silent sandbox would pile up.
		ctx, cancel := context.WithTimeoutCause(ctx, p.dialMost, errSilent)
		defer cancel()
		c, err := w.Dial(ctx, n)
		if err != nil && errors.Is(context.Cause(ctx), errSilent) {
			return nil, fault.Wrap(err, fault.Unavailable, "the sandbox did not answer on port %d in time; try again", n).Because("port_silent").After(5 * time.Second)
		}
		return c, err
	}
	transport := func() *http.Transport {
		return &http.Transport{
			DialContext: dial, DisableCompression: true, DisableKeepAlives: !keep, MaxIdleConnsPerHost: 64,
			IdleConnTimeout: idleFor, MaxResponseHeaderBytes: headerMost,
		}
	}
	r := &route{generation: w.Generation, http1: transport(), http2: transport()}
	r.http2.Protocols = new(http.Protocols)
	r.http2.Protocols.SetUnencryptedHTTP2(true)
	return r
}

func (r *route) close() {
	r.http1.CloseIdleConnections()
	r.http2.CloseIdleConnections()
}

// route gives the connections to a sandbox's present boot.
func (p *pool) route(w Way) *route {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.byID[w.Sandbox]
	switch {
	case old != nil && old.generation == w.Generation:
		old.used = now
		return old
	case old != nil && old.generation > w.Generation: // a late caller must not take the newer ones away
		return p.newRoute(w, false)
	case old != nil:
		old.close()
	}
	if len(p.byID) >= waysMost {
		for id, r := range p.byID {
			if now.Sub(r.used) > wayIdle {
				r.close()
				delete(p.byID, id)
			}
		}
	}
	if p.byID == nil {
		p.byID = map[string]*route{}
	}
	r := p.newRoute(w, true)
	r.used = now
	p.byID[w.Sandbox] = r
	return r
}
