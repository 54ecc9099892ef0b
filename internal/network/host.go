package network

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// checkPool refuses a pool in which the host has an address of its own: a sandbox
// would get the address of a neighbour. A wider network of the host around the
// pool does no harm, because the /31 of an uplink is the more specific route.
func (m *Manager) checkPool() error {
	// The addresses before the names: an interface that came between the two readings
	// then has no address here, and one that went has no name. The other way round, the
	// new uplink of another instance would be an interface without a name.
	addrs, err := m.host.addresses(nil)
	if err != nil {
		return err
	}
	links, err := m.host.links()
	if err != nil {
		return err
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, a := range addrs {
		addr, _ := netip.AddrFromSlice(a.IP.To4())
		// An uplink, of whichever instance, has the name that its address gives.
		if name, there := names[a.LinkIndex]; there && m.cfg.Pool.Contains(addr) && name != (slot{host: addr}).link() {
			return fault.New(fault.FailedPrecondition,
				"the pool %s holds %s, the address of the interface %s; choose a private range that the host does not use", m.cfg.Pool, addr, name).
				Because("pool_in_use")
		}
	}
	return nil
}

// sweep deletes uplinks without an alias: an agent died while it made them, and
// the next Attach of their sandbox makes new ones.
func (m *Manager) sweep() error {
	links, err := m.uplinks()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Attrs().Alias != "" {
			continue
		}
		if err := gone(m.host.nl.LinkDel(l)); err != nil {
			return fmt.Errorf("delete the half-made uplink %s: %w", l.Attrs().Name, err)
		}
	}
	return nil
}

// recall reads from the tables of all instances on which interfaces hutch has
// turned forwarding on. Each instance remembers all of them, so that the last one
// that goes turns it off. A table that cannot be read (its instance is just going,
// or is of another version) is no reason not to start.
func (m *Manager) recall() error {
	names, err := m.host.tables()
	if err != nil {
		return err
	}
	for _, name := range names {
		opened, err := m.host.linkSet(name, "opened")
		if err != nil {
			m.log.Warn("forwarding may stay on after hutch is removed", "step", "recall", "table", name, "err", err)
			continue
		}
		m.opened = append(m.opened, opened...)
	}
	slices.Sort(m.opened)
	m.opened = slices.Compact(m.opened)
	return nil
}

// settle makes the host's side what it should be now and touches nothing that is
// right already.
func (m *Manager) settle() error {
	m.table.Lock()
	defer m.table.Unlock()
	egress, err := m.findEgress()
	if err != nil {
		return err
	}
	present, err := m.host.hasTable(tableName(m.cfg.Tag))
	if err != nil {
		return err
	}
	var shut []string
	for _, name := range egress {
		on, err := m.host.sysctlOf("ipv4/conf/" + name + "/forwarding")
		if err != nil {
			return fmt.Errorf("read forwarding of %s: %w", name, err)
		}
		if on == "0" {
			shut = append(shut, name)
		}
	}
	opened := append(slices.Clone(m.opened), shut...)
	slices.Sort(opened)
	opened = slices.Compact(opened)
	if m.egress == nil || !present || !slices.Equal(egress, m.egress) || !slices.Equal(opened, m.opened) {
		if m.egress != nil && !present {
			m.log.Warn("somebody removed hutch's nftables table; it is put back", "step", "settle")
		}
		// First the record, then the change that it records.
		if err := m.host.apply(hostTable(tableName(m.cfg.Tag), m.group, m.cfg.Pool, egress, opened)); err != nil {
			return err
		}
		m.egress, m.opened = egress, opened
	}
	for _, name := range shut {
		if err := m.host.sysctl([2]string{"ipv4/conf/" + name + "/forwarding", "1"}); err != nil {
			return err
		}
		m.log.Info("turned IPv4 forwarding on for an interface of the host", "step", "settle", "interface", name)
	}
	return nil
}

// ensureTable settles now where the host's table is gone, so that no sandbox ever
// starts without it; a default route that moved can wait for the next tick.
func (m *Manager) ensureTable() error {
	present, err := m.host.hasTable(tableName(m.cfg.Tag))
	if err != nil || present {
		return err
	}
	return m.settle()
}

// findEgress names the interfaces through which sandboxes may leave: those of the
// config that exist, and those that carry a default route in any routing table
// (WireGuard keeps its own in a table apart, OpenVPN splits it into two halves).
func (m *Manager) findEgress() ([]string, error) {
	routes, err := dump("routes", func() ([]netlink.Route, error) {
		return m.host.nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, err
	}
	indexes := map[int]bool{}
	for _, r := range routes {
		if r.Dst != nil {
			if bits, _ := r.Dst.Mask.Size(); bits > 1 {
				continue
			}
		}
		indexes[r.LinkIndex] = true
		for _, hop := range r.MultiPath {
			indexes[hop.LinkIndex] = true
		}
	}
	links, err := m.host.links()
	if err != nil {
		return nil, err
	}
	names := []string{}
	for _, l := range links {
		a := l.Attrs()
		if indexes[a.Index] || slices.Contains(m.cfg.Egress, a.Name) {
			names = append(names, a.Name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// closeForwarding undoes what settle did to the host's interfaces. It leaves
// forwarding on where the whole host forwards by now (Docker was installed since)
// and where another instance still needs it.
func (m *Manager) closeForwarding() error {
	tables, err := m.host.tables()
	if err != nil {
		return err
	}
	others := slices.ContainsFunc(tables, func(name string) bool { return name != tableName(m.cfg.Tag) })
	all, err := m.host.sysctlOf("ipv4/ip_forward")
	if err != nil {
		return err
	}
	if others || all != "0" {
		return nil
	}
	for _, name := range m.opened {
		l, err := m.host.link(name)
		if err != nil {
			return err
		}
		if l == nil {
			continue
		}
		if err := m.host.sysctl([2]string{"ipv4/conf/" + name + "/forwarding", "0"}); err != nil {
			return err
		}
		m.log.Info("turned IPv4 forwarding off again for an interface of the host", "step", "remove", "interface", name)
	}
	m.opened = nil
	return nil
}

// hostAddresses lists the host's own IPv4 addresses, its uplinks' ends left out.
func (m *Manager) hostAddresses() ([]netip.Prefix, error) {
	addrs, err := m.host.addresses(nil)
	if err != nil {
		return nil, err
	}
	var list []netip.Prefix
	for _, a := range addrs {
		if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok && !m.cfg.Pool.Contains(addr) {
			list = append(list, netip.PrefixFrom(addr, 32))
		}
	}
	return list, nil
}
