package network

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// A world is a host of the test's own with a fake internet behind it, all in
// namespaces, so that tests run beside each other and the machine stays as it is.
//
//	guest ─ R ─ host: wan0 198.51.100.2 ── 198.51.100.1 :internet (203.0.113.10 and others)
//	            host: lan0 192.0.2.1    ── 192.0.2.2    :lan
type world struct {
	t                   *testing.T
	name                string
	host, internet, lan *space
	logs                *logBuffer
}

const (
	internetAddr = "203.0.113.10"
	hostWAN      = "198.51.100.2"
	hostLAN      = "192.0.2.1"
	lanAddr      = "192.0.2.2"
)

// private addresses that the fake internet answers on, so that only hutch's rules
// keep a guest from them.
var private = []string{"10.99.0.1", "172.16.5.5", "192.168.7.7", "100.64.1.1", "100.100.100.200", "169.254.169.254", "168.63.129.16", "198.18.0.5", "192.0.0.192"}

func newWorld(t *testing.T) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("these tests make network namespaces and need root")
	}
	if err := prepareSpacesDir(); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, name: "hnt" + unique(), logs: &logBuffer{}}
	w.host, w.internet, w.lan = w.space("host"), w.space("inet"), w.space("lan")
	w.pair(w.host, "wan0", hostWAN+"/24", w.internet, "eth0", "198.51.100.1/24")
	w.pair(w.host, "lan0", hostLAN+"/24", w.lan, "eth0", lanAddr+"/24")
	for _, a := range append([]string{internetAddr}, private...) {
		w.address(w.internet, "lo", a+"/32")
	}
	w.route(w.host, "0.0.0.0/0", "198.51.100.1")
	w.route(w.lan, "0.0.0.0/0", hostLAN)
	// The world's uplink networks are reachable from outside as they would be from a
	// neighbour that routes through the host.
	w.route(w.internet, DefaultPool.String(), hostWAN)
	w.route(w.lan, DefaultPool.String(), hostLAN)
	return w
}

// unique is 8 hex digits: a tag, or a part of a name.
func unique() string {
	b := make([]byte, 4)
	rand.Read(b)
	b[0] |= 1
	return hex.EncodeToString(b)
}

// newID makes a sandbox id of the usual form.
func newID() string {
	b := make([]byte, 13)
	rand.Read(b)
	return "sbx_" + hex.EncodeToString(b)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) space(role string) *space {
	w.t.Helper()
	s, _, err := ensureSpace(w.name + role)
	must(w.t, err)
	w.t.Cleanup(func() {
		s.close()
		if err := removeSpace(w.name + role); err != nil {
			w.t.Error(err)
		}
	})
	lo, err := s.nl.LinkByName("lo")
	must(w.t, err)
	must(w.t, s.nl.LinkSetUp(lo))
	return s
}

func (w *world) pair(a *space, an, aa string, b *space, bn, ba string) {
	w.t.Helper()
	must(w.t, addPair(a.nl, an, bn, b, 0))
	w.address(a, an, aa)
	w.address(b, bn, ba)
}

func (w *world) address(s *space, link, prefix string) {
	w.t.Helper()
	l, err := s.nl.LinkByName(link)
	must(w.t, err)
	addr, err := netlink.ParseAddr(prefix)
	must(w.t, err)
	must(w.t, s.nl.AddrAdd(l, addr))
	must(w.t, s.nl.LinkSetUp(l))
}

func (w *world) route(s *space, dst, via string) {
	w.t.Helper()
	_, n, err := net.ParseCIDR(dst)
	must(w.t, err)
	must(w.t, s.nl.RouteReplace(&netlink.Route{Dst: n, Gw: net.ParseIP(via)}))
}

// open opens a manager whose host is the world's.
func (w *world) open(cfg Config) *Manager {
	w.t.Helper()
	m, err := w.tryOpen(cfg)
	must(w.t, err)
	w.t.Cleanup(func() { m.Close() })
	return m
}

func (w *world) tryOpen(cfg Config) (*Manager, error) {
	w.t.Helper()
	host, err := openSpace(spacesDir + "/" + w.name + "host")
	must(w.t, err)
	if cfg.Tag == "" {
		cfg.Tag = unique()
	}
	cfg.Log = slog.New(slog.NewTextHandler(w.logs, nil))
	return open(context.Background(), cfg, host)
}

// attach attaches a new sandbox and detaches it when the test ends, whatever
// manager is left then.
func (w *world) attach(m *Manager) (string, Attachment) {
	w.t.Helper()
	id := newID()
	w.forget(m.cfg.Tag, id)
	a, err := m.Attach(context.Background(), id)
	must(w.t, err)
	return id, a
}

// forget takes away the names of a sandbox's namespaces when the test ends.
func (w *world) forget(tag, id string) {
	w.t.Cleanup(func() {
		for _, s := range []side{sideGuest, sideRouter} {
			if err := removeSpace(spaceName(tag, id, s)); err != nil {
				w.t.Error(err)
			}
		}
	})
}

// at opens one of a sandbox's namespaces for the test.
func (w *world) at(m *Manager, id string, s side) *space {
	w.t.Helper()
	sp, err := openSpace(m.path(id, s))
	must(w.t, err)
	w.t.Cleanup(sp.close)
	return sp
}

// listen answers each TCP connection with a greeting and the peer's address.
func (w *world) listen(s *space, addr, greeting string) (port int) {
	w.t.Helper()
	var l net.Listener
	must(w.t, s.do(func() (err error) { l, err = net.Listen("tcp", addr); return err }))
	w.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(c, "%s %s", greeting, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// get connects from a namespace and reads what the server says.
func get(s *space, addr string, port int, patience time.Duration) (string, error) {
	var c net.Conn
	err := s.do(func() (err error) {
		c, err = net.DialTimeout("tcp", net.JoinHostPort(addr, fmt.Sprint(port)), patience)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(c)
	return string(b), err
}

// reaches fails the test unless the namespace reaches the server.
func (w *world) reaches(s *space, addr string, port int, want string) {
	w.t.Helper()
	if got, err := get(s, addr, port, 5*time.Second); err != nil || !strings.HasPrefix(got, want) {
		w.t.Errorf("%s port %d: got %q, %v; want %q", addr, port, got, err, want)
	}
}

// blocked fails the test if the namespace reaches anything there.
func (w *world) blocked(s *space, addr string, port int) {
	w.t.Helper()
	if got, err := get(s, addr, port, 250*time.Millisecond); err == nil {
		w.t.Errorf("%s port %d was reached and said %q", addr, port, got)
	}
}

// run runs a tool inside a namespace and gives its output.
func (w *world) run(name string, args ...string) string {
	w.t.Helper()
	out, err := exec.Command("ip", append([]string{"netns", "exec", name}, args...)...).CombinedOutput()
	if err != nil {
		w.t.Fatalf("%v in %s: %v: %s", args, name, err, out)
	}
	return string(out)
}

// eventually polls until ok or the deadline.
func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("not in time: %s", what)
		}
	}
}

// logBuffer collects log lines from many goroutines.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func mustPrefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func mustLink(t *testing.T, s *space, name string) netlink.Link {
	t.Helper()
	l, err := s.nl.LinkByName(name)
	must(t, err)
	return l
}
