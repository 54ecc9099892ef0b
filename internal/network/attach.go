package network

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Attachment is a sandbox's network as the runtime and the guest need it.
type Attachment struct {
	NetNS   string       // path of G, for the runtime
	Address netip.Prefix // of eth0 inside; the same in each sandbox
	Gateway netip.Addr   // the default route and DNS server inside
	MAC     string       // of eth0; drawn anew by each Attach that makes the network
	Uplink  string       // the host's interface, for counters and people
}

// Attach makes a sandbox's network, or completes one that is half made, and starts
// its DNS. Where all is there it changes nothing, so it is safe beside a running
// sandbox and is how an agent that restarted takes one up again. A fresh boot needs
// a fresh G (a runtime empties eth0 when it takes it over): Detach, then Attach.
func (m *Manager) Attach(ctx context.Context, id string) (Attachment, error) {
	return m.AttachTo(ctx, id, openRules)
}

// AttachTo is Attach for a sandbox with rules of its own, which hold before it is done
// and before its DNS answers.
func (m *Manager) AttachTo(ctx context.Context, id string, rules Rules) (Attachment, error) {
	done, err := m.turn(ctx, id)
	if err != nil {
		return Attachment{}, err
	}
	defer done()
	a, err := m.attached(id)
	if errors.Is(err, errNoSpace) {
		given, spareErr := m.takeSpare(ctx, id)
		if spareErr != nil {
			m.log.Warn("a network that was ready could not be given", "sandbox", id, "err", spareErr)
		}
		if err = nil; !given {
			err = m.build(ctx, id)
		}
		if err == nil {
			a, err = m.attached(id)
		}
	}
	if err == nil {
		err = m.enforce(id, rules())
	}
	if err == nil {
		err = m.serve(id)
	}
	if err != nil {
		return Attachment{}, m.failed(err, "the network of "+id+" could not be made; try again, or delete the sandbox")
	}
	return a, nil
}

// attached describes a finished network; errNoSpace is one that is not finished.
func (m *Manager) attached(id string) (Attachment, error) {
	r, err := openSpace(m.path(id, sideRouter))
	if err != nil {
		return Attachment{}, err
	}
	defer r.close()
	g, err := openSpace(m.path(id, sideGuest))
	if err != nil {
		return Attachment{}, err
	}
	defer g.close()
	host, err := m.uplinkOf(r, id)
	if err != nil {
		return Attachment{}, err
	}
	inner, err := r.link(innerLink)
	if err != nil {
		return Attachment{}, err
	}
	eth, err := g.link(guestLink)
	if err != nil {
		return Attachment{}, err
	}
	if host == nil || inner == nil || eth == nil {
		return Attachment{}, errNoSpace
	}
	return Attachment{
		NetNS: m.path(id, sideGuest), Address: Guest, Gateway: Gateway,
		MAC: eth.Attrs().HardwareAddr.String(), Uplink: host.Attrs().Name,
	}, nil
}

// uplinkOf finds the host's end of R's uplink; nil where it is not finished.
func (m *Manager) uplinkOf(r *space, id string) (netlink.Link, error) {
	up, err := r.link(routerLink)
	if err != nil || up == nil {
		return nil, err
	}
	host, err := m.host.nl.LinkByIndex(up.Attrs().ParentIndex)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the uplink: %w", err)
	}
	if a := host.Attrs(); a.Group != m.group || a.Alias != aliasOf(m.cfg.Tag, id) {
		return nil, nil
	}
	return host, nil
}

// build makes what is missing. R's filter is there before any interface is, and
// the alias of the uplink, set last, says that all before it is done.
func (m *Manager) build(ctx context.Context, id string) error {
	r, _, err := ensureSpace(spaceName(m.cfg.Tag, id, sideRouter))
	if err != nil {
		return err
	}
	defer r.close()
	g, fresh, err := ensureSpace(spaceName(m.cfg.Tag, id, sideGuest))
	if err != nil {
		return err
	}
	defer g.close()
	steps := []struct {
		name string
		do   func() error
	}{
		{"host rules", m.ensureTable},
		{"router rules", func() error { return m.prepareRouter(r) }},
		{"guest link", func() error { return m.linkGuest(r, g, fresh) }},
		{"uplink", func() error { return m.linkHost(r, id) }},
	}
	for _, s := range steps {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.do(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// prepareRouter sets R's kernel up: no IPv6, forwarding, strict reverse path, and
// the filter, which also knows the host's present addresses. (They are filtered on
// the host in any case; this holds while somebody reloads the host's firewall.)
func (m *Manager) prepareRouter(r *space) error {
	own, err := m.hostAddresses()
	if err != nil {
		return err
	}
	if err := m.apply(r, routerTable(m.forbidden(own), openRules()).versioned()); err != nil {
		return err
	}
	return r.sysctl(
		[2]string{"ipv6/conf/all/disable_ipv6", "1"},
		[2]string{"ipv6/conf/default/disable_ipv6", "1"},
		[2]string{"ipv4/conf/all/rp_filter", "1"},
		[2]string{"ipv4/conf/default/rp_filter", "1"},
		[2]string{"ipv4/ip_forward", "1"},
	)
}

// linkGuest connects G with R. gw0's address is set last and marks a finished pair;
// eth0's own is no mark, because a runtime takes it away.
func (m *Manager) linkGuest(r, g *space, fresh bool) error {
	old, err := r.link(innerLink)
	if err != nil {
		return err
	}
	if old != nil && !fresh {
		if addrs, err := r.addresses(old); err != nil || len(addrs) > 0 {
			return err
		}
	}
	// eth0 may be tied to an older R.
	if err := errors.Join(r.dropLink(innerLink), g.dropLink(guestLink)); err != nil {
		return err
	}
	// ::1 stays on lo, for programs that listen there; no interface gets IPv6.
	if err := g.sysctl([2]string{"ipv6/conf/default/disable_ipv6", "1"}); err != nil {
		return err
	}
	if err := addPair(r.nl, innerLink, guestLink, g, 0); err != nil {
		return fmt.Errorf("make %s: %w", guestLink, err)
	}
	lo, err := g.nl.LinkByName("lo")
	if err != nil {
		return err
	}
	eth, err := g.nl.LinkByName(guestLink)
	if err != nil {
		return err
	}
	gw, err := r.nl.LinkByName(innerLink)
	if err != nil {
		return err
	}
	guestOnly := &netlink.Route{LinkIndex: gw.Attrs().Index, Dst: ipNet(Guest.Addr().AsSlice(), 32), Scope: netlink.SCOPE_LINK}
	return errors.Join(
		g.nl.LinkSetUp(lo),
		g.nl.AddrAdd(eth, &netlink.Addr{IPNet: ipNet(Guest.Addr().AsSlice(), Guest.Bits())}),
		g.nl.LinkSetUp(eth),
		g.nl.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: Gateway.AsSlice()}),
		// A guest that is booting may not answer ARP at once; the next try must not
		// wait the usual second.
		r.sysctl([2]string{"ipv4/neigh/" + innerLink + "/retrans_time_ms", "50"}),
		r.nl.LinkSetUp(gw),
		// R knows one neighbour there, not a whole subnet: a guest that claims 254
		// addresses cannot fill the neighbour table, which all namespaces share.
		r.nl.RouteAdd(guestOnly),
		r.nl.AddrAdd(gw, &netlink.Addr{IPNet: ipNet(Gateway.AsSlice(), 32)}),
	)
}

// linkHost makes R's way out.
func (m *Manager) linkHost(r *space, id string) error {
	if err := r.dropLink(routerLink); err != nil {
		return err
	}
	if err := m.dropUplinks(id); err != nil {
		return err
	}
	s, err := m.claim(r)
	if err != nil {
		return err
	}
	name := s.link()
	host, err := m.host.nl.LinkByName(name)
	if err != nil {
		return err
	}
	up, err := r.nl.LinkByName(routerLink)
	if err != nil {
		return err
	}
	err = errors.Join(
		m.host.sysctl(
			[2]string{"ipv6/conf/" + name + "/disable_ipv6", "1"},
			[2]string{"ipv4/conf/" + name + "/rp_filter", "1"},
			[2]string{"ipv4/conf/" + name + "/forwarding", "1"},
		),
		m.host.nl.AddrAdd(host, &netlink.Addr{IPNet: ipNet(s.host.AsSlice(), 31)}),
		m.host.nl.LinkSetUp(host),
		r.nl.AddrAdd(up, &netlink.Addr{IPNet: ipNet(s.router.AsSlice(), 31)}),
		r.nl.LinkSetUp(up),
		r.nl.RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Gw: s.host.AsSlice()}),
	)
	if err != nil {
		return err
	}
	return m.host.nl.LinkSetAlias(host, aliasOf(m.cfg.Tag, id))
}

// claim makes the uplink's pair in a free slot. The kernel refuses a second link of
// one name, and that is the allocation: no file, no lock, no other instance meets.
// The first try is a random slot, so that an address is not used again at once.
func (m *Manager) claim(r *space) (slot, error) {
	n := slots(m.cfg.Pool)
	first := mathrand.Uint32N(n)
	taken := map[string]bool{}
	for i := range n {
		s := slotAt(m.cfg.Pool, (first+i)%n)
		if taken[s.link()] {
			continue
		}
		err := addPair(m.host.nl, s.link(), routerLink, r, m.group)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, unix.EEXIST) {
			return slot{}, fmt.Errorf("make the uplink %s: %w", s.link(), err)
		}
		links, err := m.host.links()
		if err != nil {
			return slot{}, err
		}
		for _, l := range links {
			taken[l.Attrs().Name] = true
		}
	}
	return slot{}, fault.New(fault.NoCapacity,
		"no network for one more sandbox: all %d uplinks of the pool %s are taken; delete sandboxes, or configure a wider pool", n, m.cfg.Pool)
}

// addPair makes a veth pair with one end here and the peer in another namespace.
// Both addresses are set by hand: else udev would replace the one on the host by
// one that follows from the name (systemd.link(5), MACAddressPolicy=persistent).
func addPair(here *netlink.Handle, name, peer string, there *space, group uint32) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group, attrs.HardwareAddr = name, group, randomMAC()
	return here.LinkAdd(&netlink.Veth{
		LinkAttrs: attrs, PeerName: peer, PeerHardwareAddr: randomMAC(), PeerNamespace: netlink.NsFd(there.fd),
	})
}

// randomMAC draws a unicast address that is marked as locally administered.
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	rand.Read(mac)
	mac[0] = mac[0]&^1 | 2
	return mac
}

// dropUplinks deletes the host's ends that carry the sandbox's alias.
func (m *Manager) dropUplinks(id string) error {
	links, err := m.uplinks()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Attrs().Alias != aliasOf(m.cfg.Tag, id) {
			continue
		}
		if err := gone(m.host.nl.LinkDel(l)); err != nil {
			return fmt.Errorf("delete %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

// Detach takes a sandbox's network away, whatever there is of it; nothing is
// success. The uplink goes first and at once, so the outside is out of reach even
// where a process still holds G. Call it when the runtime's processes are dead: a
// namespace lives as long as a process is in it.
func (m *Manager) Detach(ctx context.Context, id string) error {
	done, err := m.turn(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	m.unserve(id)
	if err := m.dismantle(id); err != nil {
		return m.failed(err, "the network of "+id+" could not be taken away; try again")
	}
	return nil
}

func (m *Manager) dismantle(id string) error {
	r, err := openSpace(m.path(id, sideRouter))
	switch {
	case err == nil:
		// gw0 and eth0 need no deletion of their own, which would take the kernel
		// another 10 to 30 ms: they end with R, which nobody else holds.
		err = r.dropLink(routerLink)
		r.close()
	case errors.Is(err, errNoSpace):
		err = nil
	}
	if err != nil {
		return err
	}
	if err := m.dropUplinks(id); err != nil {
		return err
	}
	// R's name is the record that something is left, so it goes last.
	if err := removeSpace(spaceName(m.cfg.Tag, id, sideGuest)); err != nil {
		return err
	}
	return removeSpace(spaceName(m.cfg.Tag, id, sideRouter))
}

// path of one of a sandbox's namespaces.
func (m *Manager) path(id string, s side) string {
	return filepath.Join(spacesDir, spaceName(m.cfg.Tag, id, s))
}
