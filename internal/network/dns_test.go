package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// resolver is an upstream server on loopback, for both transports on one port.
type resolver struct {
	addr    netip.AddrPort
	asked   atomic.Int32
	last    atomic.Pointer[dns.Msg]
	release chan struct{} // "stuck.test." is answered when this is closed
}

func startResolver(t *testing.T) *resolver {
	t.Helper()
	r := &resolver{release: make(chan struct{})}
	var pc net.PacketConn
	var l net.Listener
	for l == nil { // a port that is free for UDP may be another's for TCP
		var err error
		pc, err = net.ListenPacket("udp4", "127.0.0.1:0")
		must(t, err)
		r.addr = netip.MustParseAddrPort(pc.LocalAddr().String())
		if l, err = net.Listen("tcp4", r.addr.String()); err != nil {
			pc.Close()
			if !errors.Is(err, unix.EADDRINUSE) {
				t.Fatal(err)
			}
		}
	}
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: r}, {Listener: l, Handler: r}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		running.Go(func() { s.ActivateAndServe() })
		<-started
		t.Cleanup(func() { s.Shutdown() })
	}
	t.Cleanup(func() {
		select {
		case <-r.release:
		default:
			close(r.release)
		}
	})
	return r
}

func (r *resolver) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	r.asked.Add(1)
	r.last.Store(q)
	a := new(dns.Msg).SetReply(q)
	a.RecursionAvailable = true
	name := q.Question[0].Name
	add := func(n int) {
		for i := range n {
			rr, _ := dns.NewRR(fmt.Sprintf("%s 60 IN TXT \"%03d %s\"", name, i, strings.Repeat("x", 100)))
			a.Answer = append(a.Answer, rr)
		}
	}
	_, udp := w.RemoteAddr().(*net.UDPAddr)
	switch strings.ToLower(name) {
	case "big.test.": // cut here already, as a real server does
		add(100)
		if udp {
			a.Truncate(dnsPayload)
		}
	case "medium.test.": // more than 512 bytes, less than the forwarder's limit
		add(7)
	case "nowhere.test.":
		a.Rcode = dns.RcodeNameError
	case "stuck.test.":
		<-r.release
	case "other.test.":
		a.Question[0].Name = "evil.test."
	default:
		rr, _ := dns.NewRR(name + " 60 IN A 203.0.113.10")
		a.Answer = append(a.Answer, rr)
	}
	if opt := q.IsEdns0(); opt != nil {
		a.SetEdns0(4096, opt.Do())
	}
	w.WriteMsg(a)
}

// lookup asks 10.0.2.2 from inside a namespace.
func lookup(s *space, network string, q *dns.Msg) (a *dns.Msg, took time.Duration, err error) {
	err = s.do(func() error {
		c := &dns.Client{Net: network, Timeout: 8 * time.Second}
		start := time.Now()
		a, _, err = c.Exchange(q, Gateway.String()+":53")
		took = time.Since(start)
		return err
	})
	return a, took, err
}

func ask(name string) *dns.Msg { return new(dns.Msg).SetQuestion(name, dns.TypeA) }

func deadPort(t *testing.T) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	must(t, err)
	defer pc.Close()
	return netip.MustParseAddrPort(pc.LocalAddr().String())
}

// silentPort takes questions and never answers.
func silentPort(t *testing.T) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { pc.Close() })
	return netip.MustParseAddrPort(pc.LocalAddr().String())
}

// N3: names resolve inside, over UDP and TCP, small and large.
func TestDNS(t *testing.T) {
	t.Parallel()
	w, up := newWorld(t), startResolver(t)
	m := w.open(Config{Upstream: []netip.AddrPort{up.addr}})
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	edns := func(name string, size uint16) *dns.Msg { return ask(name).SetEdns0(size, true) }
	for _, c := range []struct {
		name    string
		q       *dns.Msg
		network string
		rcode   int
		answers int
		cut     bool
	}{
		{"udp", ask("a.test."), "udp", dns.RcodeSuccess, 1, false},
		{"tcp", ask("a.test."), "tcp", dns.RcodeSuccess, 1, false},
		{"mixed case", ask("wWw.TeSt."), "udp", dns.RcodeSuccess, 1, false},
		{"no such name", ask("nowhere.test."), "udp", dns.RcodeNameError, 0, false},
		{"medium over plain udp", ask("medium.test."), "udp", dns.RcodeSuccess, 0, true},
		{"medium with edns", edns("medium.test.", 1232), "udp", dns.RcodeSuccess, 7, false},
		{"big over udp", edns("big.test.", 4096), "udp", dns.RcodeSuccess, 0, true},
		{"big over tcp", ask("big.test."), "tcp", dns.RcodeSuccess, 100, false},
		{"another's answer", ask("other.test."), "udp", dns.RcodeServerFailure, 0, false},
		{"a whole zone", new(dns.Msg).SetAxfr("test."), "tcp", dns.RcodeRefused, 0, false},
		{"notify", new(dns.Msg).SetNotify("test."), "udp", dns.RcodeNotImplemented, 0, false},
		{"update", new(dns.Msg).SetUpdate("test."), "udp", dns.RcodeNotImplemented, 0, false},
	} {
		a, _, err := lookup(g, c.network, c.q)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if a.Rcode != c.rcode || a.Truncated != c.cut || !c.cut && len(a.Answer) != c.answers {
			t.Errorf("%s: %s, %d answers, cut %v", c.name, dns.RcodeToString[a.Rcode], len(a.Answer), a.Truncated)
		}
		if (a.IsEdns0() != nil) && (c.q.IsEdns0() == nil) {
			t.Errorf("%s: EDNS for one who did not ask", c.name)
		}
	}
	// Nothing but the question goes upstream.
	q := edns("a.test.", 4096)
	q.Extra = append(q.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{"secret"}})
	if _, _, err := lookup(g, "udp", q); err != nil {
		t.Error(err)
	}
	if got := up.last.Load(); len(got.Extra) != 1 || got.Id == q.Id || !got.IsEdns0().Do() {
		t.Errorf("upstream got %v", got)
	}
}

// A dead upstream is an answer, at once; a silent one costs its patience once.
func TestDNSUpstreamFails(t *testing.T) {
	t.Parallel()
	w, up := newWorld(t), startResolver(t)
	const slack = 10 * time.Second // of a machine that is busy: what matters is that there is an end
	for _, c := range []struct {
		name     string
		upstream []netip.AddrPort
		rcode    int
		within   time.Duration
	}{
		{"dead", []netip.AddrPort{deadPort(t)}, dns.RcodeServerFailure, slack},
		{"silent", []netip.AddrPort{silentPort(t), silentPort(t), silentPort(t)}, dns.RcodeServerFailure, dnsTotal + slack},
		{"dead, then well", []netip.AddrPort{deadPort(t), up.addr}, dns.RcodeSuccess, slack},
		{"silent, then well", []netip.AddrPort{silentPort(t), up.addr}, dns.RcodeSuccess, dnsTry + slack},
	} {
		m := w.open(Config{Upstream: c.upstream})
		id, _ := w.attach(m)
		g := w.at(m, id, sideGuest)
		a, took, err := lookup(g, "udp", ask("a.test."))
		if err != nil || a.Rcode != c.rcode || took > c.within {
			t.Errorf("%s: %v, %v after %v", c.name, a, err, took)
			continue
		}
		if c.rcode == dns.RcodeSuccess {
			if _, took, err := lookup(g, "udp", ask("a.test.")); err != nil || took > slack {
				t.Errorf("%s, again: %v after %v", c.name, err, took)
			}
		}
	}
}

// A hostile guest takes neither the forwarder nor its neighbours down.
func TestDNSUnderAttack(t *testing.T) {
	t.Parallel()
	w, up := newWorld(t), startResolver(t)
	m := w.open(Config{Upstream: []netip.AddrPort{up.addr}})
	bad, _ := w.attach(m)
	good, _ := w.attach(m)
	b, g := w.at(m, bad, sideGuest), w.at(m, good, sideGuest)

	// Rubbish, a question that is too long, connections that say nothing.
	var idle []net.Conn
	must(t, b.do(func() error {
		c, err := net.Dial("udp4", Gateway.String()+":53")
		if err != nil {
			return err
		}
		defer c.Close()
		long := ask("a.test.")
		for range 2 {
			long.Extra = append(long.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: "x.", Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{strings.Repeat("x", 250), strings.Repeat("y", 250), strings.Repeat("z", 250)}})
		}
		packed, err := long.Pack()
		if err != nil {
			return err
		}
		for _, p := range [][]byte{{}, {1}, make([]byte, 12), make([]byte, 4000), packed, packed[:20]} {
			c.Write(p)
		}
		for range 2 * dnsConnections {
			c, err := net.DialTimeout("tcp4", Gateway.String()+":53", time.Second)
			if err != nil {
				break
			}
			idle = append(idle, c)
		}
		return nil
	}))
	for _, c := range idle {
		defer c.Close()
	}
	if a, _, err := lookup(b, "udp", ask("a.test.")); err != nil || a.Rcode != dns.RcodeSuccess {
		t.Errorf("after the rubbish: %v, %v", a, err)
	}

	// More questions at once than one sandbox may have.
	var refused atomic.Int32
	var wg sync.WaitGroup
	for range 2 * dnsInFlight {
		wg.Go(func() {
			if a, _, err := lookup(b, "udp", ask("stuck.test.")); err == nil && a.Rcode == dns.RcodeServerFailure {
				refused.Add(1)
			}
		})
	}
	w.eventually("the sandbox's bound is reached", func() bool { return refused.Load() >= dnsInFlight })
	for _, network := range []string{"udp", "tcp"} {
		if a, took, err := lookup(g, network, ask("a.test.")); err != nil || a.Rcode != dns.RcodeSuccess || took > 7*time.Second {
			t.Errorf("the neighbour: %v, %v after %v", a, err, took)
		}
	}
	// Detach does not wait for what is stuck until it is released.
	start := time.Now()
	must(t, m.Detach(context.Background(), bad))
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("detach took %v", took)
	}
	close(up.release)
	wg.Wait()
}

// DNS goes with the agent and comes back with the next one.
func TestDNSAfterAgentRestart(t *testing.T) {
	t.Parallel()
	w, up := newWorld(t), startResolver(t)
	cfg := Config{Tag: unique(), Upstream: []netip.AddrPort{up.addr}}
	m := w.open(cfg)
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	if _, _, err := lookup(g, "tcp", ask("a.test.")); err != nil {
		t.Error(err)
	}
	must(t, m.Close())
	if _, took, err := lookup(g, "udp", ask("a.test.")); err == nil || os.IsTimeout(err) {
		t.Errorf("without an agent: %v after %v, want a refusal at once", err, took)
	}
	m = w.open(cfg)
	for range 2 {
		_, err := m.Attach(context.Background(), id)
		must(t, err)
	}
	for _, network := range []string{"udp", "tcp"} {
		if a, _, err := lookup(g, network, ask("a.test.")); err != nil || len(a.Answer) != 1 {
			t.Errorf("with the next agent: %v, %v", a, err)
		}
	}
}

// Whatever a guest sends, the forwarder's decisions hold and nothing panics.
func TestDNSMessages(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		raw := rapid.SliceOfN(rapid.Byte(), 12, 200).Draw(t, "raw")
		if rapid.Bool().Draw(t, "sane header") {
			copy(raw[4:], []byte{0, 1, 0, 0, 0, 0, 0, 0})
		}
		req := new(dns.Msg)
		if req.Unpack(raw) != nil {
			return
		}
		code := refusal(req)
		if code != dns.RcodeSuccess {
			new(dns.Msg).SetRcode(req, code).Truncate(dns.MinMsgSize)
			return
		}
		q := question(req)
		if len(q.Question) != 1 || len(q.Extra) != 1 || len(q.Answer)+len(q.Ns) != 0 {
			t.Fatalf("upstream would get %v", q)
		}
		up := new(dns.Msg).SetReply(q)
		up.Rcode = rapid.IntRange(0, 25).Draw(t, "rcode")
		a := reply(req, up)
		a.Truncate(dns.MinMsgSize)
		if _, err := a.Pack(); err != nil && len(req.Question[0].Name) < 200 {
			t.Fatalf("the answer cannot be packed: %v", err)
		}
		if a.Id != req.Id || !a.Response {
			t.Fatalf("the answer %v is not one to %v", a, req)
		}
	})
}

// The host's own servers are found behind systemd-resolved's stub.
func TestHostServers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, conf, resolved string
		want                 []string
	}{
		{"plain", "nameserver 192.0.2.53\nnameserver 2001:db8::53\n", "", []string{"192.0.2.53:53", "[2001:db8::53]:53"}},
		{"stub", "nameserver 127.0.0.53\noptions edns0\n", "nameserver 192.0.2.54\n", []string{"192.0.2.54:53"}},
		{"stub alone", "nameserver 127.0.0.53\n", "", []string{"127.0.0.53:53"}},
		{"a server on loopback", "nameserver 127.0.0.1\n", "nameserver 192.0.2.54\n", []string{"127.0.0.1:53"}},
		{"rubbish", "nameserver not-an-address\nnameserver 192.0.2.53\nnameserver\n", "", []string{"192.0.2.53:53"}},
		{"zone", "nameserver fe80::1%eth0\n", "", []string{"[fe80::1%eth0]:53"}},
		{"nothing", "", "", nil},
	} {
		dir := t.TempDir()
		conf, resolved := filepath.Join(dir, "conf"), filepath.Join(dir, "resolved")
		must(t, os.WriteFile(conf, []byte(c.conf), 0o600))
		if c.resolved != "" {
			must(t, os.WriteFile(resolved, []byte(c.resolved), 0o600))
		}
		var got []string
		for _, s := range hostServers(conf, resolved) {
			got = append(got, s.String())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
	if got := hostServers("/nonexistent", "/nonexistent"); got != nil {
		t.Errorf("without a file: %v", got)
	}
}
