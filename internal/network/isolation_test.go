package network

import (
	"context"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// N3: no address of the host answers, on whatever interface, from whatever route.
func TestHostIsOutOfReach(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.host, ":0", "host")
	w.reaches(w.internet, hostWAN, port, "host") // the listener is there, for others
	id, _ := w.attach(m)
	g, r := w.at(m, id, sideGuest), w.at(m, id, sideRouter)
	addrs, err := w.host.nl.AddrList(nil, netlink.FAMILY_V4)
	must(t, err)
	if len(addrs) < 4 {
		t.Fatalf("the host has %d addresses", len(addrs))
	}
	for _, addr := range addrs { // lo, wan0, lan0 and the uplink's end
		w.blocked(g, addr.IP.String(), port)
	}
	w.blocked(g, Gateway.String(), port)

	// The same from R, whose filter a guest might have broken: the host's own table
	// must hold by itself.
	must(t, r.dropTable("hutch"))
	for _, addr := range addrs {
		w.blocked(g, addr.IP.String(), port)
		w.blocked(r, addr.IP.String(), port)
	}
	// And the other way round: R's filter holds while the host's table is away.
	id, _ = w.attach(m)
	must(t, m.host.dropTable(tableName(m.cfg.Tag)))
	g = w.at(m, id, sideGuest)
	for _, addr := range addrs {
		w.blocked(g, addr.IP.String(), port)
	}
}

// N3: tricks with loopback addresses lead nowhere.
func TestLoopbackTricks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.host, "127.0.0.1:0", "host")
	id, _ := w.attach(m)
	g, r := w.at(m, id, sideGuest), w.at(m, id, sideRouter)
	// The guest owns its namespace and may do all this.
	must(t, g.sysctl([2]string{"ipv4/conf/all/route_localnet", "1"}, [2]string{"ipv4/conf/eth0/route_localnet", "1"}))
	name := spaceName(m.cfg.Tag, id, sideGuest)
	w.run(name, "ip", "addr", "flush", "dev", "lo")
	w.run(name, "ip", "route", "add", "127.0.0.0/8", "via", Gateway.String(), "dev", guestLink)
	w.blocked(g, "127.0.0.1", port)
	// Nor does it help if R's kernel took such packets for routable.
	must(t, r.sysctl([2]string{"ipv4/conf/all/route_localnet", "1"}))
	w.run(spaceName(m.cfg.Tag, id, sideRouter), "ip", "route", "add", "127.0.0.0/8", "dev", routerLink)
	w.blocked(g, "127.0.0.1", port)
}

// N3: private networks, metadata services, and the host's other networks, public
// as their addresses may look, are out of reach, though the host reaches them.
func TestPrivateNetworksAreOutOfReach(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.address(w.lan, "lo", "203.0.113.77/32")
	w.run(w.name+"host", "ip", "route", "add", "203.0.113.77/32", "via", lanAddr)
	must(t, w.host.sysctl([2]string{"ipv4/ip_forward", "1"})) // as where Docker is installed
	m := w.open(Config{})
	port, lanPort := w.listen(w.internet, ":0", "internet"), w.listen(w.lan, ":0", "lan")
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	w.reaches(g, internetAddr, port, "internet")
	for _, a := range private {
		w.reaches(w.host, a, port, "internet")
		if got, err := get(g, a, port, 10*time.Second); err == nil || os.IsTimeout(err) {
			t.Errorf("%s: %q, %v; it should be refused at once", a, got, err)
		}
	}
	for _, a := range []string{lanAddr, "203.0.113.77"} {
		w.reaches(w.host, a, lanPort, "lan")
		w.blocked(g, a, lanPort)
	}
	// The host's table holds without R's.
	must(t, w.at(m, id, sideRouter).dropTable("hutch"))
	w.run(spaceName(m.cfg.Tag, id, sideRouter), "nft", "add table ip n; add chain ip n p { type nat hook postrouting priority 100; }; add rule ip n p oifname up0 masquerade")
	w.reaches(g, internetAddr, port, "internet")
	for _, a := range private {
		w.blocked(g, a, port)
	}
	for _, a := range []string{lanAddr, "203.0.113.77"} {
		w.blocked(g, a, lanPort)
	}
}

// N3: sandboxes do not reach each other, by no address, of one instance or two,
// and nobody outside reaches one.
func TestSandboxesDoNotMeet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, w.host.sysctl([2]string{"ipv4/ip_forward", "1"})) // as where Docker is installed
	m, other := w.open(Config{}), w.open(Config{})
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	for _, n := range []*Manager{m, other} {
		victim, _ := w.attach(n)
		vg, vr := w.at(n, victim, sideGuest), w.at(n, victim, sideRouter)
		gp, rp := w.listen(vg, ":0", "guest"), w.listen(vr, ":0", "router")
		addrs, err := vr.nl.AddrList(nil, netlink.FAMILY_V4)
		must(t, err)
		for _, a := range addrs {
			w.blocked(g, a.IP.String(), rp)
			w.blocked(g, a.IP.String(), gp)
			w.blocked(vg, a.IP.String(), rp) // nor its own router
			w.blocked(w.internet, a.IP.String(), rp)
			w.blocked(w.lan, a.IP.String(), rp)
		}
		// From outside, with a route to the guest's address through the uplink.
		up, err := vr.nl.LinkByName(routerLink)
		must(t, err)
		ua, err := vr.nl.AddrList(up, netlink.FAMILY_V4)
		must(t, err)
		w.run(w.name+"host", "ip", "route", "replace", Guest.Addr().String()+"/32", "via", ua[0].IP.String())
		w.run(w.name+"inet", "ip", "route", "replace", Guest.Addr().String()+"/32", "via", hostWAN)
		w.blocked(w.host, Guest.Addr().String(), gp)
		w.blocked(w.internet, Guest.Addr().String(), gp)
		// The host's table keeps them apart without the routers' own.
		must(t, vr.dropTable("hutch"))
		w.blocked(w.at(m, id, sideRouter), ua[0].IP.String(), rp)
		w.blocked(w.internet, ua[0].IP.String(), rp)
		w.blocked(w.lan, ua[0].IP.String(), rp)
	}
}

// N3: a packet with a source that is not the guest's never leaves R.
func TestSpoofedSourcesAreDropped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, _ := w.attach(m)
	g, r := w.at(m, id, sideGuest), w.at(m, id, sideRouter)
	// The kernel's reverse path check drops them too; here the filter must.
	must(t, r.sysctl([2]string{"ipv4/conf/all/rp_filter", "0"}, [2]string{"ipv4/conf/gw0/rp_filter", "0"}))
	var in *net.UDPConn
	must(t, w.internet.do(func() (err error) {
		in, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(internetAddr)})
		return err
	}))
	defer in.Close()
	send := func(source, text string) {
		t.Helper()
		must(t, g.do(func() error {
			c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(source)}, in.LocalAddr().(*net.UDPAddr))
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte(text))
			return err
		}))
	}
	for _, source := range []string{"10.0.2.99", "198.51.100.77", "203.0.113.200", "10.213.0.1", hostWAN} {
		w.address(g, guestLink, source+"/32")
		send(source, "spoofed "+source)
	}
	// All go the same way one after the other: the honest one comes last.
	send(Guest.Addr().String(), "honest")
	b := make([]byte, 100)
	must(t, in.SetReadDeadline(time.Now().Add(5*time.Second)))
	n, from, err := in.ReadFromUDP(b)
	must(t, err)
	if string(b[:n]) != "honest" || from.IP.String() != hostWAN {
		t.Errorf("the internet got %q from %s", b[:n], from)
	}
}

// N3: there is no IPv6 beyond the guest's own loopback, and none that a guest
// could turn on.
func TestNoIPv6(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, _ := w.attach(m)
	g, r := w.at(m, id, sideGuest), w.at(m, id, sideRouter)
	for _, s := range []*space{g, r} {
		addrs, err := s.nl.AddrList(nil, netlink.FAMILY_V6)
		must(t, err)
		for _, a := range addrs {
			if !a.IP.IsLoopback() {
				t.Errorf("there is the address %s", a)
			}
		}
	}
	// The guest turns it on for itself; then R's kernel is made to, too.
	must(t, g.sysctl([2]string{"ipv6/conf/eth0/disable_ipv6", "0"}, [2]string{"ipv6/conf/eth0/accept_dad", "0"}))
	w.run(spaceName(m.cfg.Tag, id, sideGuest), "ip", "-6", "addr", "add", "fd00:1::15/64", "dev", guestLink, "nodad")
	must(t, r.sysctl([2]string{"ipv6/conf/all/disable_ipv6", "0"}, [2]string{"ipv6/conf/gw0/disable_ipv6", "0"}))
	w.run(spaceName(m.cfg.Tag, id, sideRouter), "ip", "-6", "addr", "add", "fd00:1::2/64", "dev", innerLink, "nodad")
	w.run(spaceName(m.cfg.Tag, id, sideRouter), "nft", "flush chain inet hutch input; chain inet hutch input { policy accept; }")
	port := w.listen(r, "[fd00:1::2]:0", "router")
	w.blocked(g, "fd00:1::2", port)
	w.run(spaceName(m.cfg.Tag, id, sideRouter), "nft", "flush chain inet hutch early")
	w.reaches(g, "fd00:1::2", port, "router") // it is that chain that blocks it
}

// A guest can only occupy one entry of the neighbour table, which all namespaces
// of the machine share, whatever addresses it claims.
func TestGuestCannotFillNeighbours(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, _ := w.attach(m)
	g, r := w.at(m, id, sideGuest), w.at(m, id, sideRouter)
	port := w.listen(w.internet, ":0", "internet")
	for _, a := range []string{"10.0.2.20", "10.0.2.21", "10.9.9.9", "8.8.4.4"} {
		w.address(g, guestLink, a+"/32")
		must(t, g.do(func() error { // the kernel asks for the gateway in the name of this address
			c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.ParseIP(a)}, &net.UDPAddr{IP: Gateway.AsSlice(), Port: 53})
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("x"))
			return err
		}))
		w.run(spaceName(m.cfg.Tag, id, sideGuest), "ip", "neigh", "flush", "dev", guestLink)
	}
	w.reaches(g, internetAddr, port, "internet")
	gw, err := r.nl.LinkByName(innerLink)
	must(t, err)
	list, err := r.nl.NeighList(gw.Attrs().Index, netlink.FAMILY_V4)
	must(t, err)
	for _, n := range list {
		if !n.IP.Equal(Guest.Addr().AsSlice()) && n.State&unix.NUD_NOARP == 0 {
			t.Errorf("R keeps the neighbour %v", n)
		}
	}
}

// A port that Docker publishes is rewritten before routing; it must be as closed as
// the host's own.
func TestPublishedPortsAreClosed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.lan, ":0", "container")
	w.run(w.name+"host", "nft", "add table ip docker; add chain ip docker pre { type nat hook prerouting priority dstnat; }; "+
		"add rule ip docker pre fib daddr type local tcp dport 8080 dnat to "+lanAddr+":"+strconv.Itoa(port))
	must(t, w.host.sysctl([2]string{"ipv4/ip_forward", "1"}))
	w.reaches(w.internet, hostWAN, 8080, "container")
	id, a := w.attach(m)
	g := w.at(m, id, sideGuest)
	must(t, w.at(m, id, sideRouter).dropTable("hutch")) // the host's table must do it alone
	host, err := w.host.nl.LinkByName(a.Uplink)
	must(t, err)
	addrs, err := w.host.nl.AddrList(host, netlink.FAMILY_V4)
	must(t, err)
	for _, addr := range []string{hostWAN, hostLAN, addrs[0].IP.String()} {
		w.blocked(g, addr, 8080)
		w.blocked(w.at(m, id, sideRouter), addr, 8080)
	}
}

// Docker and ufw drop forwarded packets by policy; Diagnose names the chain, and
// what it advises helps.
func TestDiagnoseForeignFirewall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.internet, ":0", "internet")
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	if found, err := m.Diagnose(context.Background()); err != nil || len(found) != 0 {
		t.Errorf("a sound host: %q, %v", found, err)
	}
	w.run(w.name+"host", "nft", "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }")
	w.blocked(g, internetAddr, port)
	found, err := m.Diagnose(context.Background())
	if err != nil || len(found) != 1 || !strings.Contains(found[0], "ip filter FORWARD") {
		t.Errorf("%q, %v", found, err)
	}
	w.run(w.name+"host", "nft", "insert rule ip filter FORWARD iifname \"hutch*\" accept; insert rule ip filter FORWARD oifname \"hutch*\" ct state established,related accept")
	w.reaches(g, internetAddr, port, "internet")
}
