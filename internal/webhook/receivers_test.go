package webhook

import (
	"bytes"
	"context"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"github.com/hutchrun/hutch/internal/store"
)

// loopback is an operator's setting: receivers on this machine are allowed.
var loopback = Policy{HTTP: true, Inside: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}}

// patience is for machines that do a lot else meanwhile.
const patience = time.Minute

func claimed(url, secret string) store.ClaimedDelivery {
	e := store.Event{Seq: 1, Project: "prj_1", Sandbox: "sbx_1", Type: "sandbox.ready", Actor: "host", At: time.Now()}
	w := store.Webhook{ID: "wh_1", Project: "prj_1", URL: url, Secrets: []store.WebhookSecret{{Value: secret}}}
	return store.ClaimedDelivery{Webhook: w, Event: e, Delivery: delivery(w, e, e.At)}
}

// post makes one attempt.
func post(t *testing.T, p Policy, url string, timeout time.Duration) result {
	t.Helper()
	s := newSender(p, "hutch/test")
	t.Cleanup(s.close)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return s.send(ctx, claimed(url, NewSecret()))
}

// receiver serves until the test ends; what it holds up then is let go. The body is
// read first: the server of net/http sees only then that a client has gone.
func receiver(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
		handler(w, r)
	}))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func TestMessageOnTheWire_H2(t *testing.T) {
	t.Parallel()
	secret := NewSecret()
	type request struct {
		header http.Header
		body   []byte
		method string
	}
	got := make(chan request, 1)
	s := receiver(t, func(_ http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- request{r.Header, b, r.Method}
	})
	sender := newSender(loopback, "hutch/1.2")
	t.Cleanup(sender.close)
	c := claimed(s.URL+"/hook?a=b", secret)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if r := sender.send(ctx, c); r.err != "" || r.status != 200 || r.cause != nil {
		t.Fatalf("%+v", r)
	}
	r := <-got
	verifier, err := standardwebhooks.NewWebhook(secret)
	if err != nil {
		t.Fatal(err)
	}
	if err := verifier.Verify(r.body, r.header); err != nil {
		t.Errorf("the receiver refuses the signature: %v", err)
	}
	if err := verifier.Verify(append(r.body, ' '), r.header); err == nil {
		t.Error("a changed body passes")
	}
	want, _ := body(c.Event)
	if !bytes.Equal(r.body, want) || r.method != http.MethodPost || r.header.Get("Webhook-Id") != c.Delivery.ID ||
		r.header.Get("Content-Type") != "application/json" || r.header.Get("User-Agent") != "hutch/1.2" {
		t.Errorf("%s %v %s", r.method, r.header, r.body)
	}
}

// reset cuts the connection with a TCP reset.
func reset(w http.ResponseWriter, _ *http.Request) {
	c, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
}

// endless writes until the other side has had enough.
func endless(status int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		chunk := bytes.Repeat([]byte("x"), 64<<10)
		for {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
}

func TestAnswers_H2(t *testing.T) {
	t.Parallel()
	var followed atomic.Bool
	target := receiver(t, func(http.ResponseWriter, *http.Request) { followed.Store(true) })
	answerWith := func(status int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, text)
		}
	}
	redirect := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, target.URL, status) }
	}
	for _, c := range []struct {
		name    string
		handler http.HandlerFunc
		status  int
		want    string // in the error; "" is a success
	}{
		{"200", answerWith(200, "ok"), 200, ""},
		{"204", answerWith(204, ""), 204, ""},
		{"400 with a reason", answerWith(400, "the\tsignature \x1b[31mis wrong\n"), 400, "the receiver answered with status 400: the signature [31mis wrong"},
		{"500", answerWith(500, " \n"), 500, "the receiver answered with status 500"},
		{"410", answerWith(410, ""), 410, "status 410"},
		{"301", redirect(301), 301, "never followed"},
		{"302", redirect(302), 302, "never followed"},
		{"307", redirect(307), 307, "never followed"},
		{"308", redirect(308), 308, "never followed"},
		{"reset", reset, 0, "connection"},
		{"200 with an endless body", endless(200), 200, ""},
		{"500 with an endless body", endless(500), 500, "status 500: xxx"},
		{"endless headers", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Long", strings.Repeat("x", 2*maxHeader))
		}, 0, "headers exceeded"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := post(t, loopback, receiver(t, c.handler).URL, patience)
			if r.status != c.status || (r.err == "") != (c.want == "") || !strings.Contains(r.err, c.want) || len(r.err) > maxErrorText {
				t.Errorf("%d %q, want %d and %q", r.status, r.err, c.status, c.want)
			}
			if r.cut || r.took <= 0 || strings.Contains(r.err, "127.0.0.1") {
				t.Errorf("%+v", r)
			}
		})
	}
	t.Cleanup(func() { // after the parallel ones
		if followed.Load() {
			t.Error("a redirect was followed")
		}
	})
}

// A body that trickles holds up nothing for long: the status was all that counts.
func TestTricklingBody_H2(t *testing.T) {
	t.Parallel()
	s := receiver(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	if r := post(t, loopback, s.URL, patience); r.err != "" || r.status != 200 || r.took >= patience {
		t.Errorf("%+v", r)
	}
}

func TestSilentReceiver_H2(t *testing.T) {
	t.Parallel()
	s := receiver(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	if r := post(t, loopback, s.URL, 200*time.Millisecond); r.status != 0 || r.err != "the receiver did not answer in time" || r.cut {
		t.Errorf("%+v", r)
	}
	// One that takes the connection and says nothing at all.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if r := post(t, loopback, "https://"+l.Addr().String(), 200*time.Millisecond); r.status != 0 || r.err != "the receiver did not answer in time" {
		t.Errorf("%+v", r)
	}
	l.Close()
	if r := post(t, loopback, "http://"+l.Addr().String(), patience); r.err != "the connection to the receiver failed: connection refused" {
		t.Errorf("%+v", r)
	}
}

func TestTLS_H2(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { calls.Add(1) }))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	trusted := loopback
	trusted.Roots = x509.NewCertPool()
	trusted.Roots.AddCert(s.Certificate())
	if r := post(t, trusted, s.URL, patience); r.err != "" || r.status != 200 {
		t.Errorf("a trusted receiver: %+v", r)
	}
	calls.Store(0)
	nobody := loopback
	nobody.Roots = x509.NewCertPool()
	if r := post(t, nobody, s.URL, patience); !strings.HasPrefix(r.err, "the receiver's certificate is not trusted: x509") {
		t.Errorf("an unknown signer: %+v", r)
	}
	named := strings.Replace(s.URL, "127.0.0.1", "localhost", 1)
	if r := post(t, trusted, named, patience); r.err != "the receiver's certificate is not trusted: it is for another name" {
		t.Errorf("another name: %+v", r)
	}
	plain := receiver(t, func(http.ResponseWriter, *http.Request) { calls.Add(1) })
	plain.Config.ErrorLog = log.New(io.Discard, "", 0)
	if r := post(t, trusted, strings.Replace(plain.URL, "http:", "https:", 1), patience); r.err != "the receiver does not speak TLS" {
		t.Errorf("no TLS: %+v", r)
	}
	if n := calls.Load(); n != 0 {
		t.Errorf("%d messages reached a receiver that was not to be trusted", n)
	}
}

// A name that leads inside is refused before anything is sent, and so is one that led
// elsewhere when it was asked the first time.
func TestPrivateAddress_H2(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	s := receiver(t, func(http.ResponseWriter, *http.Request) { calls.Add(1) })
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			calls.Add(1)
		}
	}
	_, port, err := net.SplitHostPort(s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	r := post(t, Policy{HTTP: true}, "http://localhost:"+port, patience)
	if !strings.Contains(r.err, "not a public one (loopback)") || strings.Contains(r.err, "127.") || r.status != 0 {
		t.Errorf("localhost: %+v", r)
	}
	// A literal is refused too, where the policy was wider when the webhook was made.
	if r := post(t, Policy{HTTP: true}, s.URL, patience); !strings.Contains(r.err, "loopback") {
		t.Errorf("an address: %+v", r)
	}
	if r := post(t, Policy{}, "http://localhost:"+port, patience); !strings.Contains(r.err, "not https") {
		t.Errorf("plain http: %+v", r)
	}
	for _, address := range []string{"127.0.0.2", "::ffff:127.0.0.2", "64:ff9b::7f00:1", "169.254.169.254", "10.0.0.1", "::1"} {
		resolver := newNames(t, address)
		if r := resolver.post(t, loopback, "http://inside.example.com:"+port); !strings.Contains(r.err, "not a public one") {
			t.Errorf("a name that leads to %s: %+v", address, r)
		}
		if resolver.asked.Load() == 0 {
			t.Errorf("%s was never asked for", address)
		}
	}
	if n := calls.Load(); n != 0 {
		t.Errorf("%d connections reached the receiver", n)
	}

	changing := newNames(t, "127.0.0.1", "127.0.0.2")
	sender := changing.sender(t, loopback)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := claimed("http://rebound.example.com:"+port, NewSecret())
	if r := sender.send(ctx, c); r.err != "" {
		t.Errorf("where it is allowed: %+v", r)
	}
	sender.close()
	before := calls.Load()
	if r := sender.send(ctx, c); !strings.Contains(r.err, "not a public one (loopback)") {
		t.Errorf("led elsewhere: %+v", r)
	}
	if n := calls.Load(); n != before || before == 0 {
		t.Errorf("%d connections, then %d", before, n)
	}
}

func TestUnknownName(t *testing.T) {
	t.Parallel()
	if r := newNames(t).post(t, loopback, "http://none.example.com"); r.err != "the receiver's name does not resolve" {
		t.Errorf("%+v", r)
	}
}

// names is a DNS server that answers each question for an address with the next of a
// list, and the last one from then on.
type names struct {
	resolver *net.Resolver
	asked    atomic.Int32

	mu    sync.Mutex // guards addrs
	addrs []netip.Addr
}

func newNames(t *testing.T, addrs ...string) *names {
	t.Helper()
	n := &names{}
	for _, a := range addrs {
		n.addrs = append(n.addrs, netip.MustParseAddr(a))
	}
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ready := make(chan struct{})
	server := &dns.Server{PacketConn: conn, Handler: n, NotifyStartedFunc: func() { close(ready) }}
	done := make(chan error, 1)
	go func() { done <- server.ActivateAndServe() }()
	<-ready
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		<-done
	})
	n.resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
	return n
}

func (n *names) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	n.mu.Lock()
	defer n.mu.Unlock()
	reply := new(dns.Msg).SetReply(q)
	kind, name := q.Question[0].Qtype, q.Question[0].Name
	switch {
	case len(n.addrs) == 0:
		reply.Rcode = dns.RcodeNameError
	case n.addrs[0].Is4() && kind == dns.TypeA:
		reply.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: kind, Class: dns.ClassINET}, A: n.addrs[0].AsSlice()}}
	case n.addrs[0].Is6() && kind == dns.TypeAAAA:
		reply.Answer = []dns.RR{&dns.AAAA{Hdr: dns.RR_Header{Name: name, Rrtype: kind, Class: dns.ClassINET}, AAAA: n.addrs[0].AsSlice()}}
	}
	if len(reply.Answer) > 0 {
		n.asked.Add(1)
		if len(n.addrs) > 1 {
			n.addrs = n.addrs[1:]
		}
	}
	_ = w.WriteMsg(reply) // a resolver that does not hear it asks again
}

func (n *names) sender(t *testing.T, p Policy) *sender {
	s := newSender(p, "hutch/test")
	t.Cleanup(s.close)
	d := p.dialer()
	d.Resolver = n.resolver
	s.client.Transport.(*http.Transport).DialContext = d.DialContext
	return s
}

func (n *names) post(t *testing.T, p Policy, url string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return n.sender(t, p).send(ctx, claimed(url, NewSecret()))
}
