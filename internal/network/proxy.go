package network

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
	"golang.org/x/sys/unix"
)

// Bounds of the proxy, which a hostile guest speaks to.
const (
	proxyMost   = 1024             // connections of one sandbox
	peekLimit   = 64 << 10         // bytes in which a name has to be
	peekTime    = 10 * time.Second // and the time for them
	proxyDial   = 30 * time.Second // for the peer to answer
	requestTime = 5 * time.Minute  // for one answer to begin
)

// proxy takes the connections of a sandbox that are only allowed by a name (or refused by
// one). It reads the name that the guest gives its peer, in a TLS ClientHello or in the
// Host of an HTTP request, and passes on to the address that the guest meant: it chooses
// no address itself. Of plain HTTP it passes one request a connection, so that no other
// Host follows the first.
type proxy struct {
	m        *Manager
	wall     *wall
	path     string // of R
	listener net.Listener
	slots    chan struct{}
	ctx      context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup

	mu       sync.Mutex
	passages map[*passage]struct{}
}

// passage is one connection through the proxy.
type passage struct {
	guest net.Conn
	addr  netip.AddrPort // that the guest meant
	name  string         // that it gave, "" for none
	end   context.CancelFunc
}

func (m *Manager) listenProxy(r *space, w *wall) (*proxy, error) {
	var l net.Listener
	err := r.do(func() (err error) {
		var lc net.ListenConfig
		l, err = lc.Listen(context.Background(), "tcp4", netip.AddrPortFrom(Gateway, proxyPort).String())
		return err
	})
	if err != nil {
		return nil, err
	}
	p := &proxy{m: m, wall: w, path: r.path, listener: l, slots: make(chan struct{}, proxyMost), passages: map[*passage]struct{}{}}
	p.ctx, p.cancel = context.WithCancel(m.lasts)
	p.running.Go(p.accept)
	return p, nil
}

func (p *proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) || p.ctx.Err() != nil {
			return
		}
		if err != nil { // no descriptor is left, or the guest has gone already
			select {
			case <-p.ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
				continue
			}
		}
		select {
		case p.slots <- struct{}{}:
			p.running.Go(func() {
				defer func() { <-p.slots }()
				p.serve(c)
			})
		default:
			abort(c)
		}
	}
}

// close ends the proxy and what goes through it. It may be called of none.
func (p *proxy) close() {
	p.cancel()
	p.listener.Close()
	p.running.Wait()
}

// cut ends what may not go on under other rules. It may be called of none.
func (p *proxy) cut(e sandbox.Egress) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.passages {
		// Where no rule depends on names, the filter lets nothing through for the proxy.
		if !e.Named() || !e.Passes(c.addr.Addr(), c.name) {
			c.end()
		}
	}
}

// enter notes a passage, if the rules that hold let it through.
func (p *proxy) enter(c *passage) bool {
	p.wall.mu.Lock() // before the list's own, as in a change of the rules
	defer p.wall.mu.Unlock()
	if !p.wall.egress.Passes(c.addr.Addr(), c.name) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.passages[c] = struct{}{}
	return true
}

func (p *proxy) leave(c *passage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.passages, c)
}

// abort ends a connection with a reset, as the filter does.
func abort(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close()
}

// serve passes one connection of the guest on, or aborts it.
func (p *proxy) serve(guest net.Conn) {
	ctx, end := context.WithCancel(p.ctx)
	defer end()
	defer abort(guest)
	defer context.AfterFunc(ctx, func() { abort(guest) })()
	addr, err := meant(guest)
	if err != nil {
		return
	}
	_ = guest.SetReadDeadline(time.Now().Add(peekTime))
	in := bufio.NewReaderSize(guest, peekLimit)
	name, req := nameOf(in)
	_ = guest.SetReadDeadline(time.Time{})
	c := &passage{guest: guest, addr: addr, name: name, end: end}
	if !p.enter(c) {
		return
	}
	defer p.leave(c)
	peer, err := p.dial(ctx, addr)
	if err != nil {
		return
	}
	defer peer.Close()
	defer context.AfterFunc(ctx, func() { abort(peer) })()
	if req != nil {
		p.request(guest, in, peer, req)
		return
	}
	splice(guest, in, peer, peer)
}

// request passes one HTTP request and its answer on. Written anew, it cannot mean another
// thing to the peer than it meant here. What follows it belongs to it only if the peer has
// agreed to speak another protocol.
func (p *proxy) request(guest net.Conn, in *bufio.Reader, peer net.Conn, req *http.Request) {
	upgrade := req.Header.Get("Upgrade") != "" && strings.Contains(strings.ToLower(req.Header.Get("Connection")), "upgrade")
	if req.Close = !upgrade; req.Close {
		req.Header.Del("Upgrade")
	}
	if req.Header.Get("Expect") != "" { // the body comes when this was said
		req.Header.Del("Expect")
		if _, err := io.WriteString(guest, "HTTP/1.1 100 Continue\r\n\r\n"); err != nil {
			return
		}
	}
	if _, ok := req.Header["User-Agent"]; !ok {
		req.Header["User-Agent"] = nil // else Write would put its own
	}
	// A peer may answer before it has read everything.
	sent := make(chan error, 1)
	go func() { sent <- req.Write(peer) }()
	defer func() { abort(guest); abort(peer); <-sent }()
	out := bufio.NewReader(peer)
	for {
		_ = peer.SetReadDeadline(time.Now().Add(requestTime))
		resp, err := http.ReadResponse(out, req)
		if err != nil {
			return
		}
		_ = peer.SetReadDeadline(time.Time{})
		switched := resp.StatusCode == http.StatusSwitchingProtocols
		if !switched {
			resp.Close = true
		}
		if switched && !upgrade {
			return
		}
		if err := resp.Write(guest); err != nil {
			return
		}
		_ = resp.Body.Close()
		switch {
		case switched:
			splice(guest, in, peer, out)
			return
		case resp.StatusCode >= 200:
			if t, ok := guest.(*net.TCPConn); ok {
				_ = t.CloseWrite()
				// A reset would take from the guest what it has not read yet.
				_ = t.SetReadDeadline(time.Now().Add(peekTime))
				_, _ = io.Copy(io.Discard, t)
			}
			return
		}
	}
}

// splice passes both directions on until both have ended; a and b are what was read of
// them already, and the rest.
func splice(guest net.Conn, fromGuest io.Reader, peer net.Conn, fromPeer io.Reader) {
	var both sync.WaitGroup
	pass := func(to net.Conn, from io.Reader, of net.Conn) {
		if b, ok := from.(*bufio.Reader); ok { // so that the kernel can copy the rest
			if n := b.Buffered(); n > 0 {
				if _, err := io.CopyN(to, b, int64(n)); err != nil {
					abort(to)
					return
				}
			}
			from = of
		}
		if _, err := io.Copy(to, from); err != nil {
			abort(to)
			abort(of)
			return
		}
		if t, ok := to.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
	}
	both.Go(func() { pass(peer, fromGuest, guest) })
	both.Go(func() { pass(guest, fromPeer, peer) })
	both.Wait()
}

// dial connects to the peer from R, where the filter sees it.
func (p *proxy) dial(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, proxyDial)
	defer cancel()
	r, err := openSpace(p.path)
	if err != nil {
		return nil, err
	}
	defer r.close()
	return r.connect(ctx, addr, proxyMark, proxyDial)
}

// meant is the address that a redirected connection was to go to.
func meant(c net.Conn) (addr netip.AddrPort, err error) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return addr, errors.New("no TCP connection")
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return addr, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		// The kernel gives a sockaddr_in, which fits into this one.
		var m *unix.IPv6Mreq
		if m, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); err == nil {
			b := m.Multiaddr
			addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
		}
	})
	if err = errors.Join(controlErr, os.NewSyscallError("getsockopt", err)); err == nil && addr.Addr() == Gateway {
		err = errors.New("it was not redirected")
	}
	return addr, err
}

// nameOf reads the name that a guest gives its peer without taking a byte of TLS away; of
// HTTP the request is read. Both are nothing where it is neither, or says too much.
func nameOf(in *bufio.Reader) (name string, req *http.Request) {
	first, err := in.Peek(1)
	if err != nil {
		return "", nil
	}
	if first[0] == 0x16 { // a handshake's record
		return sni(in), nil
	}
	if !wholeHead(in) {
		return "", nil
	}
	req, err = http.ReadRequest(in)
	if err != nil || req.Method == http.MethodConnect || req.ProtoMajor != 1 {
		return "", nil
	}
	host := req.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	return host, req
}

// wholeHead waits until the head of an HTTP request is there, within the buffer.
func wholeHead(in *bufio.Reader) bool {
	for n := 1; ; {
		b, err := in.Peek(n)
		if err != nil {
			return false
		}
		b, _ = in.Peek(in.Buffered())
		if line, _, whole := strings.Cut(string(b[:min(len(b), 8<<10)]), "\n"); whole && !strings.Contains(line, " HTTP/1.") {
			return false // another protocol
		}
		if strings.Contains(string(b), "\r\n\r\n") || strings.Contains(string(b), "\n\n") {
			return true
		}
		if n = len(b) + 1; n > peekLimit {
			return false
		}
	}
}

var errEnough = errors.New("the name is known")

// sni reads the server name of a ClientHello with Go's own TLS, from what is peeked.
func sni(in *bufio.Reader) (name string) {
	c := tls.Server(&peeked{in: in}, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		name = h.ServerName
		return nil, errEnough
	}})
	_ = c.Handshake() // always fails: there is no certificate, and nothing is written
	return name
}

// peeked reads what a reader holds without taking it.
type peeked struct {
	in  *bufio.Reader
	off int
}

func (p *peeked) Read(b []byte) (int, error) {
	if _, err := p.in.Peek(p.off + 1); err != nil {
		return 0, err
	}
	all, _ := p.in.Peek(p.in.Buffered())
	n := copy(b, all[p.off:])
	p.off += n
	return n, nil
}

func (p *peeked) Write(b []byte) (int, error)      { return len(b), nil }
func (p *peeked) Close() error                     { return nil }
func (p *peeked) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (p *peeked) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (p *peeked) SetDeadline(time.Time) error      { return nil }
func (p *peeked) SetReadDeadline(time.Time) error  { return nil }
func (p *peeked) SetWriteDeadline(time.Time) error { return nil }
