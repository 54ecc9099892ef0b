package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/netutil"
)

// Bounds of the forwarder. A guest is hostile until proved otherwise: whatever it
// sends, it occupies no more than this.
const (
	dnsInFlight      = 128             // questions of one sandbox at a time
	dnsInFlightTotal = 2048            // questions of all sandboxes at a time
	dnsConnections   = 32              // TCP connections of one sandbox
	dnsIdle          = 5 * time.Second // before an idle TCP connection is closed
	dnsQuestion      = 1024            // bytes of a question; a name has 255 at most
	dnsPayload       = 1232            // bytes over UDP that pass any path (DNS flag day 2020)
	dnsTry           = 2 * time.Second // for one upstream server
	dnsTotal         = 4 * time.Second // for all; glibc gives up after 5 (resolv.conf(5))
)

// forwarder answers the questions of all sandboxes from the upstream servers.
type forwarder struct {
	upstream *upstream
	slots    chan struct{}
	best     atomic.Uint32 // the server that answered last; it is asked first
}

func newForwarder(fixed []netip.AddrPort) *forwarder {
	return &forwarder{upstream: &upstream{fixed: fixed}, slots: make(chan struct{}, dnsInFlightTotal)}
}

// dnsServer is the forwarder's ear in one sandbox's R.
type dnsServer struct {
	fwd     *forwarder
	wall    *wall
	path    string // of R
	slots   chan struct{}
	ctx     context.Context // ends the questions in flight
	cancel  context.CancelFunc
	servers []*dns.Server
	running sync.WaitGroup
}

// serve starts a sandbox's DNS unless it runs.
func (m *Manager) serve(id string) error {
	m.mu.Lock()
	_, running := m.servers[id]
	m.mu.Unlock()
	if running {
		return nil
	}
	r, err := openSpace(m.path(id, sideRouter))
	if err != nil {
		return err
	}
	defer r.close()
	s, err := m.dns.listen(r, m.wallOf(id))
	if err != nil {
		return fmt.Errorf("dns: %w", err)
	}
	m.mu.Lock()
	closed := m.closed
	if !closed {
		m.servers[id] = s
	}
	m.mu.Unlock()
	if closed {
		s.close()
		return fmt.Errorf("dns: %w", net.ErrClosed)
	}
	return nil
}

// unserve stops a sandbox's DNS; its sockets would keep R alive.
func (m *Manager) unserve(id string) {
	m.mu.Lock()
	s, w := m.servers[id], m.walls[id]
	delete(m.servers, id)
	delete(m.walls, id)
	m.mu.Unlock()
	if w != nil {
		w.close()
	}
	if s != nil {
		s.close()
	}
}

// listen opens the sockets in R and starts answering.
func (f *forwarder) listen(r *space, w *wall) (*dnsServer, error) {
	address := netip.AddrPortFrom(Gateway, 53).String()
	var udp net.PacketConn
	var tcp net.Listener
	err := r.do(func() (err error) {
		var lc net.ListenConfig
		if udp, err = lc.ListenPacket(context.Background(), "udp4", address); err != nil {
			return err
		}
		if tcp, err = lc.Listen(context.Background(), "tcp4", address); err != nil {
			udp.Close()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	s := &dnsServer{fwd: f, wall: w, path: r.path, slots: make(chan struct{}, dnsInFlight)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.servers = []*dns.Server{
		{PacketConn: udp, Handler: s, UDPSize: dnsQuestion + 1},
		{Listener: netutil.LimitListener(tcp, dnsConnections), Handler: s, IdleTimeout: func() time.Duration { return dnsIdle }},
	}
	for _, srv := range s.servers {
		started := make(chan struct{})
		srv.NotifyStartedFunc = func() { close(started) }
		s.running.Go(func() { _ = srv.ActivateAndServe() })
		<-started
	}
	return s, nil
}

// close stops the servers and waits for the questions in flight, which end at once.
func (s *dnsServer) close() {
	s.cancel()
	for _, srv := range s.servers {
		srv.Shutdown()
	}
	s.running.Wait()
}

// ServeDNS answers one question of the guest.
func (s *dnsServer) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	size := dns.MaxMsgSize
	if _, ok := w.RemoteAddr().(*net.UDPAddr); ok {
		size = dns.MinMsgSize
		if opt := req.IsEdns0(); opt != nil {
			size = min(max(int(opt.UDPSize()), dns.MinMsgSize), dnsPayload)
		}
	}
	answer := s.answer(req, size == dns.MaxMsgSize)
	answer.Truncate(size)
	_ = w.WriteMsg(answer) // a guest that is gone by now needs no answer
}

// answer asks upstream and turns every failure into a DNS answer.
func (s *dnsServer) answer(req *dns.Msg, tcp bool) *dns.Msg {
	if code := refusal(req); code != dns.RcodeSuccess {
		return new(dns.Msg).SetRcode(req, code)
	}
	rules, asked := s.wall.rules(), req.Question[0]
	if !rules.Resolves(asked.Name) {
		return new(dns.Msg).SetRcode(req, dns.RcodeRefused)
	}
	if rules.Named() && (asked.Qtype == dns.TypeHTTPS || asked.Qtype == dns.TypeSVCB) {
		return new(dns.Msg).SetReply(req) // their keys would encrypt the name that is looked for (ECH)
	}
	for _, slots := range []chan struct{}{s.slots, s.fwd.slots} {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
		default:
			return new(dns.Msg).SetRcode(req, dns.RcodeServerFailure)
		}
	}
	ctx, cancel := context.WithTimeout(s.ctx, dnsTotal)
	defer cancel()
	up, err := s.fwd.ask(ctx, question(req), tcp)
	if err != nil {
		return new(dns.Msg).SetRcode(req, dns.RcodeServerFailure)
	}
	if rules.Opens(asked.Name) {
		// The addresses have to be open before the guest knows them.
		if err := s.open(asked.Name, up); err != nil {
			return new(dns.Msg).SetRcode(req, dns.RcodeServerFailure)
		}
	}
	return reply(req, up)
}

// Bounds of how long a name opens an address: never shorter than its TTL, and long enough
// for a program that looks a name up and then takes its time.
const (
	openMin  = time.Minute
	openMost = time.Hour
	openMore = 30 * time.Second
)

// open opens the addresses of an answer. Those that no sandbox may reach stay closed.
func (s *dnsServer) open(name string, up *dns.Msg) error {
	addrs := map[netip.Addr]time.Duration{}
	for addr, ttl := range answered(name, up) {
		addrs[addr] = min(max(ttl, openMin), openMost) + openMore
	}
	if len(addrs) == 0 {
		return nil
	}
	r, err := openSpace(s.path)
	if err != nil {
		return err
	}
	defer r.close()
	return s.wall.open(r, name, addrs)
}

// answered gives the public addresses that an answer has for a name, over its aliases, and
// how long each may be remembered. What may be remembered longer than it is open is cut.
func answered(name string, up *dns.Msg) map[netip.Addr]time.Duration {
	own := map[string]bool{strings.ToLower(dns.Fqdn(name)): true}
	for range up.Answer { // an alias may stand behind what it leads to
		grown := len(own)
		for _, rr := range up.Answer {
			if c, ok := rr.(*dns.CNAME); ok && own[strings.ToLower(c.Hdr.Name)] {
				own[strings.ToLower(c.Target)] = true
			}
		}
		if len(own) == grown {
			break
		}
	}
	addrs := map[netip.Addr]time.Duration{}
	for _, rr := range up.Answer {
		rr.Header().Ttl = min(rr.Header().Ttl, uint32(openMost/time.Second))
		a, ok := rr.(*dns.A)
		if !ok || !own[strings.ToLower(a.Hdr.Name)] {
			continue
		}
		addr, ok := netip.AddrFromSlice(a.A.To4())
		if ok && !slices.ContainsFunc(denied, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			addrs[addr] = time.Duration(a.Hdr.Ttl) * time.Second
		}
	}
	return addrs
}

// refusal says with which code a question is turned away; success lets it pass.
func refusal(req *dns.Msg) int {
	switch {
	case req.Opcode != dns.OpcodeQuery:
		return dns.RcodeNotImplemented
	case len(req.Question) != 1:
		return dns.RcodeFormatError
	case req.Len() > dnsQuestion:
		return dns.RcodeRefused
	case req.Question[0].Qtype == dns.TypeAXFR || req.Question[0].Qtype == dns.TypeIXFR:
		return dns.RcodeRefused // whole zones are nothing that a resolver gives
	}
	return dns.RcodeSuccess
}

// question is what goes upstream: the question alone, so that nothing else that a
// guest puts into its message ever reaches the operator's servers.
func question(req *dns.Msg) *dns.Msg {
	q := new(dns.Msg)
	q.Id = dns.Id()
	q.RecursionDesired = true
	q.CheckingDisabled = req.CheckingDisabled
	q.Question = []dns.Question{req.Question[0]}
	opt := req.IsEdns0()
	q.SetEdns0(dnsPayload, opt != nil && opt.Do())
	return q
}

// reply makes the upstream's answer one to the guest's own message.
func reply(req, up *dns.Msg) *dns.Msg {
	a := new(dns.Msg).SetReply(req)
	a.Rcode, a.Authoritative, a.Truncated = up.Rcode, up.Authoritative, up.Truncated
	a.RecursionAvailable, a.AuthenticatedData = up.RecursionAvailable, up.AuthenticatedData
	a.Answer, a.Ns = up.Answer, up.Ns
	for _, rr := range up.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			a.Extra = append(a.Extra, rr)
		}
	}
	if opt := req.IsEdns0(); opt != nil {
		a.SetEdns0(dnsPayload, opt.Do())
	} else if a.Rcode > 0xF {
		a.Rcode = dns.RcodeServerFailure // the wider codes need EDNS
	}
	return a
}

var errNoUpstream = errors.New("no upstream server")

// ask tries the servers in turn, the one that answered last first.
func (f *forwarder) ask(ctx context.Context, q *dns.Msg, tcp bool) (*dns.Msg, error) {
	servers := f.upstream.servers(time.Now())
	err := errNoUpstream
	first := f.best.Load()
	for i := range servers {
		n := (int(first) + i) % len(servers)
		var a *dns.Msg
		if a, err = exchange(ctx, q, servers[n], tcp); err == nil {
			f.best.Store(uint32(n))
			return a, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// exchange asks one server, over UDP first. An answer that was cut is fetched again
// over TCP where the guest asked over TCP; otherwise the guest comes again itself.
func exchange(ctx context.Context, q *dns.Msg, server netip.AddrPort, tcp bool) (*dns.Msg, error) {
	a, err := exchangeOver(ctx, "udp", q, server)
	if err == nil && a.Truncated && tcp {
		return exchangeOver(ctx, "tcp", q, server)
	}
	return a, err
}

func exchangeOver(ctx context.Context, network string, q *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, dnsTry)
	defer cancel()
	client := &dns.Client{Net: network, Timeout: dnsTry, UDPSize: dnsPayload}
	conn, err := client.DialContext(ctx, server.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	// The library looks at the context's deadline, not at its cancellation.
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	a, _, err := client.ExchangeWithConnContext(ctx, q, conn)
	if err != nil {
		return nil, err
	}
	if !a.Response || len(a.Question) != 1 || !sameQuestion(a.Question[0], q.Question[0]) {
		return nil, fmt.Errorf("%s answered another question", server)
	}
	return a, nil
}

// sameQuestion compares without regard to case, as DNS does (RFC 4343).
func sameQuestion(a, b dns.Question) bool {
	return a.Qtype == b.Qtype && a.Qclass == b.Qclass && strings.EqualFold(a.Name, b.Name)
}
