package network

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

const otherAddr = "203.0.113.20"

// ruled gives a Rules of one firewall.
func ruled(mode sandbox.FirewallMode, allow, deny []string) Rules {
	return func() sandbox.Egress { return egressOf(mode, allow, deny) }
}

// hold opens a connection that echoes until it is cut.
func (w *world) echo(s *space, addr string) (port int) {
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
			go func() { defer c.Close(); io.Copy(c, c) }()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func dialIn(t *testing.T, s *space, addr string, port int) net.Conn {
	t.Helper()
	var c net.Conn
	must(t, s.do(func() (err error) {
		c, err = net.DialTimeout("tcp", net.JoinHostPort(addr, strconv.Itoa(port)), 10*time.Second)
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return c
}

// alive says whether a byte comes back.
func alive(c net.Conn) bool {
	c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := c.Write([]byte("x")); err != nil {
		return false
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

// N3: each mode lets through what it says, from the return of the change on, and cuts what
// is established and denied now; what stays allowed is not disturbed.
func TestEgressModes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.address(w.internet, "lo", otherAddr+"/32")
	m := w.open(Config{})
	port := w.echo(w.internet, ":0")
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	ctx := context.Background()
	for _, step := range []struct {
		mode         sandbox.FirewallMode
		allow, deny  []string
		first, other bool
	}{
		{sandbox.FirewallOpen, nil, nil, true, true},
		{sandbox.FirewallOpen, nil, []string{otherAddr}, true, false},
		{sandbox.FirewallOpen, []string{internetAddr}, []string{"203.0.113.0/24"}, true, false},
		{sandbox.FirewallDenyAll, nil, nil, false, false},
		{sandbox.FirewallAllowlist, []string{internetAddr}, nil, true, false},
		{sandbox.FirewallAllowlist, []string{"203.0.113.0/24"}, []string{internetAddr}, false, true},
		{sandbox.FirewallAllowlist, []string{"0.0.0.0/1", "128.0.0.0/1"}, nil, true, true},
		{sandbox.FirewallAllowlist, nil, nil, false, false},
		{sandbox.FirewallOpen, nil, nil, true, true},
	} {
		before := map[string]net.Conn{}
		for _, a := range []string{internetAddr, otherAddr} {
			must(t, m.SetEgress(ctx, id, openRules))
			before[a] = dialIn(t, g, a, port)
			if !alive(before[a]) {
				t.Fatalf("%s does not answer", a)
			}
		}
		must(t, m.SetEgress(ctx, id, ruled(step.mode, step.allow, step.deny)))
		for a, want := range map[string]bool{internetAddr: step.first, otherAddr: step.other} {
			if got := alive(before[a]); got != want {
				t.Errorf("%+v: the old connection to %s lives: %v", step, a, got)
			}
			c, err := net.Conn(nil), error(nil)
			err = g.do(func() (err error) {
				c, err = net.DialTimeout("tcp", net.JoinHostPort(a, strconv.Itoa(port)), 5*time.Second)
				return err
			})
			if (err == nil) != want || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%+v: a new connection to %s: %v", step, a, err)
			}
			if c != nil {
				c.Close()
			}
		}
	}
}

// N3: no rule of a user's opens the host, private ranges, metadata or other sandboxes.
func TestNoRuleOpensWhatIsForbidden(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port, hostPort := w.listen(w.internet, ":0", "internet"), w.listen(w.host, ":0", "host")
	id, _ := w.attach(m)
	victim, _ := w.attach(m)
	g, vr := w.at(m, id, sideGuest), w.at(m, victim, sideRouter)
	victimPort := w.listen(vr, ":0", "router")
	rules := append(slices.Clone(private), "0.0.0.0/0", "10.0.0.0/8", "169.254.0.0/16", hostWAN, hostLAN)
	for _, mode := range []sandbox.FirewallMode{sandbox.FirewallOpen, sandbox.FirewallAllowlist} {
		must(t, m.SetEgress(context.Background(), id, ruled(mode, rules, nil)))
		w.reaches(g, internetAddr, port, "internet")
		for _, a := range private {
			w.reaches(w.host, a, port, "internet")
			w.blocked(g, a, port)
		}
		for _, a := range []string{hostWAN, hostLAN, Gateway.String()} {
			w.blocked(g, a, hostPort)
		}
		addrs, err := vr.addresses(nil)
		must(t, err)
		for _, a := range addrs {
			w.blocked(g, a.IP.String(), victimPort)
		}
	}
}

// A change that the kernel does not take leaves nothing open, also what the rules before
// allowed, and the next that it takes opens the way again.
func TestEgressFailsClosed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.echo(w.internet, ":0")
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	c := dialIn(t, g, internetAddr, port)
	if !alive(c) {
		t.Fatal("the internet does not answer")
	}
	broken := errors.New("no memory")
	m.apply = func(*space, table) error { return broken }
	if err := m.SetEgress(context.Background(), id, ruled(sandbox.FirewallAllowlist, []string{internetAddr}, nil)); !errors.Is(err, broken) {
		t.Fatalf("got %v", err)
	}
	w.blocked(g, internetAddr, port)
	if alive(c) {
		t.Error("the established connection lives")
	}
	m.apply = (*space).apply
	must(t, m.SetEgress(context.Background(), id, ruled(sandbox.FirewallAllowlist, []string{internetAddr}, nil)))
	if !alive(dialIn(t, g, internetAddr, port)) {
		t.Error("the internet does not answer afterwards")
	}
}

// An agent that starts anew finds the rules in the kernel, and those of the record hold
// before DNS answers.
func TestEgressSurvivesTheAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := Config{Tag: unique()}
	m := w.open(cfg)
	port := w.echo(w.internet, ":0")
	id := newID()
	w.forget(cfg.Tag, id)
	rules := ruled(sandbox.FirewallDenyAll, nil, nil)
	_, err := m.AttachTo(context.Background(), id, rules)
	must(t, err)
	g := w.at(m, id, sideGuest)
	w.blocked(g, internetAddr, port)
	must(t, m.Close())
	w.blocked(g, internetAddr, port)
	m = w.open(cfg)
	w.blocked(g, internetAddr, port)
	_, err = m.AttachTo(context.Background(), id, rules)
	must(t, err)
	w.blocked(g, internetAddr, port)
	must(t, m.SetEgress(context.Background(), id, openRules))
	if !alive(dialIn(t, g, internetAddr, port)) {
		t.Error("the internet does not answer")
	}
	must(t, m.Detach(context.Background(), id))
	must(t, m.SetEgress(context.Background(), id, rules)) // one without a network gets them with it
}
