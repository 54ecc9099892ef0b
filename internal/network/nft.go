package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
)

// nftables opens a connection whose every answer is waited for in bounded time.
func (s *space) nftables() (*nftables.Conn, error) {
	return nftables.New(nftables.WithNetNSFd(int(s.fd)), nftables.WithSockOptions(func(c *netlink.Conn) error {
		opened()
		return c.SetDeadline(time.Now().Add(kernelAnswer))
	}))
}

// apply puts a table into a namespace in one transaction, in place of the one of
// the same name: there is no instant at which half of it holds.
func (s *space) apply(t table) error {
	c, err := s.nftables()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	tab := &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
	// Deleting what is not there fails the transaction, so it is added first.
	c.AddTable(tab)
	c.DelTable(tab)
	c.AddTable(tab)
	for i, st := range t.sets {
		// The id counts within the transaction. The library would draw it from a
		// counter of the whole process that is not safe for concurrent use.
		ns := &nftables.Set{Table: tab, ID: uint32(i + 1), Name: st.name, KeyType: nftables.TypeIPAddr, Interval: true}
		switch {
		case st.ofLinks:
			ns.KeyType, ns.KeyByteOrder, ns.Interval = nftables.TypeIFName, binaryutil.NativeEndian, false
		case st.ofTimed:
			ns.Interval, ns.HasTimeout, ns.Size = false, true, maxNamed
		}
		if err := c.AddSet(ns, st.elements()); err != nil {
			return fmt.Errorf("nftables set %s: %w", st.name, err)
		}
	}
	for _, ch := range t.chains {
		policy := nftables.ChainPolicyAccept
		if ch.drop {
			policy = nftables.ChainPolicyDrop
		}
		nc := c.AddChain(&nftables.Chain{Table: tab, Name: ch.name, Type: ch.kind, Hooknum: ch.hook, Priority: ch.prio, Policy: &policy})
		for _, r := range ch.rules {
			var exprs []expr.Any
			for _, p := range r {
				exprs = append(exprs, p.exprs...)
			}
			c.AddRule(&nftables.Rule{Table: tab, Chain: nc, Exprs: exprs})
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables table %s: %w", t.name, err)
	}
	return nil
}

// elements gives a set's elements for the kernel. An interval is a start and the
// address behind its end; one that reaches the last address has no end.
func (s set) elements() []nftables.SetElement {
	var list []nftables.SetElement
	for _, l := range s.links {
		list = append(list, nftables.SetElement{Key: ifname(l)})
	}
	for a, left := range s.timed {
		list = append(list, nftables.SetElement{Key: a.AsSlice(), Timeout: left})
	}
	for _, p := range s.prefixes {
		list = append(list, nftables.SetElement{Key: p.Addr().AsSlice()})
		if next := lastOf(p).Next(); next.IsValid() {
			list = append(list, nftables.SetElement{Key: next.AsSlice(), IntervalEnd: true})
		}
	}
	return list
}

// lastOf is the last address of an IPv4 prefix.
func lastOf(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		a[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(a)
}

// tables lists hutch's tables of a namespace, of every instance.
func (s *space) tables() ([]string, error) {
	c, err := s.nftables()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	list, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	var names []string
	for _, t := range list {
		if strings.HasPrefix(t.Name, "hutch-") {
			names = append(names, t.Name)
		}
	}
	return names, nil
}

// hasTable says whether a table of hutch's is there.
func (s *space) hasTable(name string) (bool, error) {
	c, err := s.nftables()
	if err != nil {
		return false, fmt.Errorf("open nftables: %w", err)
	}
	_, err = c.ListTableOfFamily(name, nftables.TableFamilyINet)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the nftables table %s: %w", name, err)
	}
	return true, nil
}

// linkSet reads a set of interface names from a table of hutch's.
func (s *space) linkSet(name, set string) ([]string, error) {
	c, err := s.nftables()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	tab := &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
	elements, err := c.GetSetElements(&nftables.Set{Table: tab, Name: set, KeyType: nftables.TypeIFName})
	if err != nil {
		return nil, fmt.Errorf("read nftables set %s of %s: %w", set, name, err)
	}
	var names []string
	for _, e := range elements {
		names = append(names, strings.TrimRight(string(e.Key), "\x00"))
	}
	return names, nil
}

// dropTable removes a table; one that is not there is removed already.
func (s *space) dropTable(name string) error {
	c, err := s.nftables()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	tab := &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
	c.AddTable(tab)
	c.DelTable(tab)
	if err := c.Flush(); err != nil {
		return fmt.Errorf("remove nftables table %s: %w", name, err)
	}
	return nil
}

// droppers names the chains of other programs that drop forwarded packets unless
// told otherwise (Docker, ufw). In nftables every base chain of a hook must let a
// packet through, so an accept of ours cannot overrule them.
func (s *space) droppers() ([]string, error) {
	c, err := s.nftables()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	var names []string
	for family, word := range map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "ip", nftables.TableFamilyINet: "inet"} {
		chains, err := c.ListChainsOfTableFamily(family)
		if err != nil {
			return nil, fmt.Errorf("list nftables chains: %w", err)
		}
		for _, ch := range chains {
			if ch.Hooknum == nil || *ch.Hooknum != *nftables.ChainHookForward || ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop {
				continue
			}
			names = append(names, word+" "+ch.Table.Name+" "+ch.Name)
		}
	}
	return names, nil
}
