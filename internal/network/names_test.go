package network

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/miekg/dns"
)

// N3: a name opens its addresses once it is looked up, for connections that tell it, and
// for no others.
func TestNamesOpenAddresses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := startResolver(t)
	m := w.open(Config{Upstream: []netip.AddrPort{r.addr}})
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	must(t, m.SetEgress(context.Background(), id, ruled(sandbox.FirewallAllowlist, []string{"a.test"}, nil)))
	serve := func(useTLS bool) int {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, q *http.Request) { fmt.Fprint(rw, q.Host) }))
		s.Listener.Close()
		must(t, w.internet.do(func() (err error) { s.Listener, err = net.Listen("tcp", internetAddr+":0"); return err }))
		if useTLS {
			s.StartTLS()
		} else {
			s.Start()
		}
		t.Cleanup(s.Close)
		return s.Listener.Addr().(*net.TCPAddr).Port
	}
	plain, secret := serve(false), serve(true)
	try := func(port int, scheme, host string) error {
		c := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: host},
			DialContext: func(context.Context, string, string) (c net.Conn, err error) {
				err = g.do(func() (err error) {
					c, err = net.DialTimeout("tcp", fmt.Sprintf("%s:%d", internetAddr, port), 3*time.Second)
					return err
				})
				return c, err
			}}}
		resp, err := c.Get(scheme + "://" + host + "/")
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	if try(plain, "http", "a.test") == nil {
		t.Error("it is open before the name is looked up")
	}
	if a, _, err := lookup(g, "udp", ask("a.example.")); err != nil || a.Rcode != dns.RcodeRefused {
		t.Errorf("another name: %v, %v", a, err)
	}
	if a, _, err := lookup(g, "udp", ask("a.test.")); err != nil || len(a.Answer) != 1 {
		t.Errorf("the name: %v, %v", a, err)
	}
	for scheme, port := range map[string]int{"http": plain, "https": secret} {
		if err := try(port, scheme, "a.test"); err != nil {
			t.Errorf("%s: %v", scheme, err)
		}
		if try(port, scheme, "evil.example") == nil {
			t.Errorf("%s: another name passes", scheme)
		}
	}
}
