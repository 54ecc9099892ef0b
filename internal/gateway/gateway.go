// Package gateway lets HTTP reach the programs in sandboxes (SPEC section 11): by name,
// PORT-ID.DOMAIN, by path, /p/PORT-ID/…, or by header. A request that may reach a port
// wakes the sandbox and waits; the answer is the program's own, or 503 with a time to try
// again, never 502.
package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// Way leads to the programs of one boot of a sandbox.
type Way struct {
	Sandbox    string
	Generation int64
	// Dial connects to a port. That nobody listens on it is a fault, Unavailable.
	Dial func(ctx context.Context, port int) (net.Conn, error)
	Done func() // ends the use of it
}

// Config is what a gateway works with; Next, Open and Fail are needed.
type Config struct {
	Next http.Handler // serves what is for no port
	// Open gives the way to a port for one request, and wakes the sandbox for one that may
	// reach it. Its faults are answers.
	Open func(ctx context.Context, t Target, c Credential) (Way, error)
	// Fail answers with a fault.
	Fail func(w http.ResponseWriter, r *http.Request, err error)
	// Lasting gives the context of what may last as long as its client; nil is the
	// request's own.
	Lasting func(context.Context) (context.Context, context.CancelFunc)
	Domains []string     // besides localhost
	Log     *slog.Logger // nil logs nothing
	// HeldMost is how many requests wait for one sandbox at a time, 0 for 512. What comes
	// past it is told to come again.
	HeldMost int
	// DialMost is how long a sandbox that runs may take to answer a new connection, 0 for
	// 30 s. One that is held for want of disk space, or has given its address away, never does.
	DialMost time.Duration
}

const (
	heldMost = 512
	dialMost = 30 * time.Second
)

// Gateway is the handler.
type Gateway struct {
	cfg     Config
	domains []string
	pool    pool
	wrong   wrong
	proxy   *httputil.ReverseProxy

	mu   sync.Mutex
	held map[string]int // requests that wait, by sandbox
}

// New gives a gateway.
func New(cfg Config) *Gateway {
	g := &Gateway{cfg: cfg, domains: append([]string{"localhost"}, cfg.Domains...), held: map[string]int{}}
	if g.cfg.Log == nil {
		g.cfg.Log = slog.New(slog.DiscardHandler)
	}
	if g.cfg.HeldMost == 0 {
		g.cfg.HeldMost = heldMost
	}
	if g.cfg.DialMost == 0 {
		g.cfg.DialMost = dialMost
	}
	g.pool.dialMost = g.cfg.DialMost
	if g.cfg.Lasting == nil {
		g.cfg.Lasting = context.WithCancel
	}
	g.proxy = &httputil.ReverseProxy{
		Rewrite: rewrite, Transport: trip{g}, BufferPool: &buffers{}, ErrorHandler: g.failed, ModifyResponse: modify,
		ErrorLog: slog.NewLogLogger(g.cfg.Log.Handler(), slog.LevelDebug),
	}
	return g
}

type visitKey struct{}

// visit is one request on its way.
type visit struct {
	target Target
	cred   Credential
	way    Way
}

// ServeHTTP answers for a port, or passes on what is for none.
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	t, ok := find(r, g.domains)
	if !ok {
		g.cfg.Next.ServeHTTP(w, r)
		return
	}
	began := time.Now()
	ctx, cancel := g.cfg.Lasting(r.Context())
	defer cancel()
	r = r.Clone(ctx) // what is taken out of it is its own
	cred, byQuery := credential(r)
	from := remote(r)
	if cred != (Credential{}) {
		if wait := g.wrong.wait(from, t.Sandbox, began); wait > 0 {
			g.cfg.Fail(w, r, fault.New(fault.RateLimited, "too many wrong tokens came from here; try again later").Because("wrong_tokens").After(wait))
			return
		}
	}
	way, err := g.open(ctx, t, cred)
	if err != nil {
		if cred != (Credential{}) && fault.Is(err, fault.Unauthenticated) {
			g.wrong.add(from, t.Sandbox, began)
		}
		g.cfg.Fail(w, r, err)
		return
	}
	v := &visit{target: t, cred: cred, way: way}
	defer func() { v.way.Done() }() // it may be another one by then
	if byQuery && r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Method == http.MethodGet {
		remember(w, r, t, cred.Token)
		return
	}
	g.proxy.ServeHTTP(w, r.WithContext(context.WithValue(ctx, visitKey{}, v)))
	g.cfg.Log.DebugContext(ctx, "a port was called", "sandbox", t.Sandbox, "method", r.Method, "took", time.Since(began))
}

// open asks for the way, with a bound on how many wait for it.
func (g *Gateway) open(ctx context.Context, t Target, c Credential) (Way, error) {
	g.mu.Lock()
	full := g.held[t.Sandbox] >= g.cfg.HeldMost
	if !full {
		g.held[t.Sandbox]++
	}
	g.mu.Unlock()
	if full {
		return Way{}, fault.New(fault.Unavailable, "%d requests wait for this sandbox already; try again", g.cfg.HeldMost).Because("too_many_wait").After(2 * time.Second)
	}
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.held[t.Sandbox]--; g.held[t.Sandbox] <= 0 {
			delete(g.held, t.Sandbox)
		}
	}()
	return g.cfg.Open(ctx, t, c)
}

// rewrite makes of a caller's request the one that the program gets.
func rewrite(p *httputil.ProxyRequest) {
	v := p.In.Context().Value(visitKey{}).(*visit)
	p.SetXForwarded()
	p.Out.Host = p.In.Host
	p.Out.URL.Scheme, p.Out.URL.Host = "http", net.JoinHostPort(v.target.Sandbox, strconv.Itoa(v.target.Port))
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	p.Out.Header.Del(headerSandbox)
	p.Out.Header.Del(headerPort)
	if prefix := v.target.Prefix; prefix != "" {
		p.Out.Header.Set("X-Forwarded-Prefix", prefix)
		cut(p.Out.URL, prefix)
	}
	if p.Out.Header.Get("User-Agent") == "" {
		p.Out.Header.Set("User-Agent", "") // or the library's own goes out
	}
}

func cut(u *url.URL, prefix string) {
	u.Path = "/" + strings.TrimPrefix(strings.TrimPrefix(u.Path, prefix), "/")
	if u.RawPath != "" {
		u.RawPath = "/" + strings.TrimPrefix(strings.TrimPrefix(u.RawPath, prefix), "/")
	}
}

// modify keeps pages that came by a path, on the API's own origin, from acting as pages of
// that origin.
func modify(r *http.Response) error {
	if v := r.Request.Context().Value(visitKey{}).(*visit); v.target.Prefix != "" {
		r.Header.Add("Content-Security-Policy", "sandbox allow-downloads allow-forms allow-modals allow-popups allow-scripts")
	}
	return nil
}

// failed answers for a program that did not. It is not the gateway that is broken, so it
// is no 502: the caller may try again.
func (g *Gateway) failed(w http.ResponseWriter, r *http.Request, err error) {
	v := r.Context().Value(visitKey{}).(*visit)
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		g.cfg.Fail(w, r, f)
		return
	}
	if r.Context().Err() != nil {
		g.cfg.Fail(w, r, fault.Wrap(err, fault.Cancelled, "the request was cancelled"))
		return
	}
	g.cfg.Fail(w, r, fault.Wrap(err, fault.Unavailable, "the program on port %d gave no answer that can be read; try again", v.target.Port).
		Because("port_broken").After(time.Second))
}

// trip carries requests out.
type trip struct{ *Gateway }

// RoundTrip sends a request to the program. One that can be repeated, and whose boot ended
// on the way because the sandbox was put to sleep, wakes it and is sent again.
func (g trip) RoundTrip(r *http.Request) (*http.Response, error) {
	v := r.Context().Value(visitKey{}).(*visit)
	for {
		route := g.pool.route(v.way)
		via := route.http1
		if r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc") {
			via = route.http2
		}
		res, err := via.RoundTrip(r)
		if err == nil || r.Context().Err() != nil || r.Body != nil && r.Body != http.NoBody {
			return res, err
		}
		switch r.Method {
		case http.MethodGet, http.MethodHead, http.MethodOptions:
		default:
			return nil, err
		}
		next, again := g.open(r.Context(), v.target, v.cred)
		if again != nil {
			return nil, again
		}
		v.way.Done()
		same := next.Generation == v.way.Generation
		if v.way = next; same {
			return nil, err
		}
	}
}

// buffers are what answers are copied through.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
