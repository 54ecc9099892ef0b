package network

import (
	"context"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

func (w *world) forwarding(link string) string {
	w.t.Helper()
	v, err := w.host.sysctlOf("ipv4/conf/" + link + "/forwarding")
	must(w.t, err)
	return v
}

// Two instances on one machine: the first goes, the second and its sandboxes do not
// notice, and the last one leaves the host as it was.
func TestRemove(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	before := w.run(w.name+"host", "nft", "list", "ruleset")
	a := w.open(Config{})
	b := w.open(Config{})
	port := w.listen(w.internet, ":0", "internet")
	ida, _ := w.attach(a)
	idb, _ := w.attach(b)
	if err := a.Remove(context.Background()); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("with a sandbox left: %v", err)
	}
	w.reaches(w.at(a, ida, sideGuest), internetAddr, port, "internet")
	must(t, a.Detach(context.Background(), ida))
	theirs := w.fingerprint(b, idb)
	rules := w.run(w.name+"host", "nft", "list", "table", "inet", tableName(b.cfg.Tag))
	for range 2 {
		must(t, a.Remove(context.Background()))
	}
	if w.fingerprint(b, idb) != theirs || w.run(w.name+"host", "nft", "list", "table", "inet", tableName(b.cfg.Tag)) != rules {
		t.Error("the other instance was touched")
	}
	w.reaches(w.at(b, idb, sideGuest), internetAddr, port, "internet")
	if w.forwarding("wan0") != "1" {
		t.Error("forwarding was turned off under the other instance")
	}
	must(t, b.Detach(context.Background(), idb))
	must(t, b.Remove(context.Background()))
	if w.forwarding("wan0") != "0" || w.run(w.name+"host", "nft", "list", "ruleset") != before {
		t.Error("the host is not as it was")
	}
}

// Forwarding that was on before, or that the whole host wants by now, stays on.
func TestRemoveLeavesForeignForwarding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, w.host.sysctl([2]string{"ipv4/conf/wan0/forwarding", "1"}))
	m := w.open(Config{})
	must(t, m.Remove(context.Background()))
	if w.forwarding("wan0") != "1" {
		t.Error("forwarding was turned off that was on before")
	}
	must(t, w.host.sysctl([2]string{"ipv4/conf/wan0/forwarding", "0"}))
	m = w.open(Config{})
	must(t, w.host.sysctl([2]string{"ipv4/ip_forward", "1"}))
	must(t, m.Remove(context.Background()))
	if w.forwarding("wan0") != "1" {
		t.Error("forwarding was turned off that the whole host wants")
	}
}

// What hutch turned on is known to the next agent too.
func TestRemoveAfterAgentRestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := Config{Tag: unique()}
	must(t, w.open(cfg).Close())
	m := w.open(cfg)
	must(t, m.Remove(context.Background()))
	if w.forwarding("wan0") != "0" {
		t.Error("forwarding stays on")
	}
}

// A flushed ruleset and a default route that moves are put right without a call.
func TestSettle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port, lanPort := w.listen(w.internet, ":0", "internet"), w.listen(w.lan, ":0", "lan")
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	w.run(w.name+"host", "nft", "flush", "ruleset")
	w.eventually("the table is back", func() bool {
		names, err := w.host.tables()
		return err == nil && len(names) == 1
	})
	w.reaches(g, internetAddr, port, "internet")
	if !strings.Contains(w.logs.String(), "put back") {
		t.Error("the log does not say so")
	}
	w.blocked(g, lanAddr, lanPort)
	w.route(w.host, "0.0.0.0/0", lanAddr)
	w.eventually("the new way out", func() bool { return w.forwarding("lan0") == "1" })
	w.reaches(g, lanAddr, lanPort, "lan "+hostLAN)
	w.blocked(g, internetAddr, port)
}

// A machine without a default route works, says what is missing, and takes an
// interface from the config.
func TestNoDefaultRoute(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.run(w.name+"host", "ip", "route", "del", "default")
	w.run(w.name+"host", "ip", "route", "add", internetAddr+"/32", "via", "198.51.100.1")
	port := w.listen(w.internet, ":0", "internet")
	m := w.open(Config{})
	id, _ := w.attach(m)
	w.blocked(w.at(m, id, sideGuest), internetAddr, port)
	found, err := m.Diagnose(context.Background())
	if err != nil || len(found) != 1 || !strings.Contains(found[0], "no default route") {
		t.Errorf("%q, %v", found, err)
	}
	n := w.open(Config{Egress: []string{"wan0", "not-there"}})
	id, _ = w.attach(n)
	w.reaches(w.at(n, id, sideGuest), internetAddr, port, "internet "+hostWAN)
	if found, err := n.Diagnose(context.Background()); err != nil || len(found) != 0 {
		t.Errorf("%q, %v", found, err)
	}
}

// A split default route counts as one (OpenVPN's def1), and one in a table of its
// own does (WireGuard).
func TestFindEgress(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	w.run(w.name+"host", "ip", "route", "del", "default")
	w.run(w.name+"host", "ip", "route", "add", "128.0.0.0/1", "via", "198.51.100.1")
	w.run(w.name+"host", "ip", "route", "add", "default", "via", lanAddr, "table", "51820")
	got, err := m.findEgress()
	if err != nil || strings.Join(got, " ") != "lan0 wan0" {
		t.Errorf("%v, %v", got, err)
	}
}

// The public way in, on the real host: no default route is asked for, and nothing
// is left afterwards.
func TestRealHost(t *testing.T) {
	ctx := context.Background()
	m, err := Open(ctx, Config{Tag: unique()})
	must(t, err)
	defer m.Close()
	w := &world{t: t}
	id, a := w.attach(m)
	port := w.listen(w.at(m, id, sideGuest), ":0", "guest")
	c, err := m.Dial(ctx, id, port)
	must(t, err)
	c.Close()
	own, err := m.hostAddresses()
	must(t, err)
	hp := w.listen(m.host, ":0", "host")
	for _, p := range own {
		w.blocked(w.at(m, id, sideGuest), p.Addr().String(), hp)
	}
	must(t, m.Detach(ctx, id))
	w.clean(m)
	must(t, m.Remove(ctx))
	if l, err := m.host.link(a.Uplink); err != nil || l != nil {
		t.Errorf("%s is left: %v", a.Uplink, err)
	}
	if names, err := m.host.tables(); err != nil || strings.Contains(strings.Join(names, " "), m.cfg.Tag) {
		t.Errorf("tables %v, %v", names, err)
	}
}
