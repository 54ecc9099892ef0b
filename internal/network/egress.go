package network

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/hutchrun/hutch/internal/sandbox"
	"golang.org/x/sys/unix"
)

// The rules of a sandbox's own firewall. Addresses are looked at in every packet, in
// both directions, not only in the first of a connection: so a change also ends what
// is established. What depends on names goes to the proxy (proxy.go): the names that
// the guest looks up put their addresses into the set named (dns.go), and TCP to one
// of those is redirected. What is no TCP has no name that could be checked, and does
// not pass.

const (
	maxNamed  = 4096   // addresses that names have opened
	proxyPort = 15001  // of the proxy, on the gateway's address
	proxyMark = 0x6874 // of the proxy's own packets; a guest cannot set it
)

// egressSets are the sets that the rules of e use.
func egressSets(e sandbox.Egress) []set {
	var list []set
	if e.Mode == sandbox.FirewallAllowlist || len(e.Allow) > 0 {
		list = append(list, set{name: "allowed", prefixes: without(e.Allow)})
	}
	if len(e.Deny) > 0 {
		list = append(list, set{name: "refused", prefixes: without(e.Deny)})
	}
	if len(e.AllowNames) > 0 {
		list = append(list, set{name: "named", ofTimed: true})
	}
	return list
}

// egressForward are the rules for forwarded packets. They only refuse; what is left
// goes the way of every packet.
func egressForward(e sandbox.Egress) []rule {
	var list []rule
	refuse := func(match ...part) {
		from := append([]part{fromLink(innerLink), ipv4()}, match...)
		list = append(list, append(slices.Clone(from), tcp(), reset()), append(slices.Clone(from), reject()))
	}
	// Errors come from any router on the way, and belong to something that was allowed.
	errorsIn := rule{fromLink(routerLink), toLink(innerLink), state(related), accept()}
	answers := func(match ...part) {
		list = append(list, append(append(rule{fromLink(routerLink), ipv4()}, match...), drop()))
	}
	if e.Named() {
		// Else answers of other servers would tell addresses that nobody has seen.
		for _, n := range []uint16{53, 853} {
			list = append(list, rule{fromLink(innerLink), ipv4(), port("tcp", n), reset()}, rule{fromLink(innerLink), ipv4(), port("udp", n), reject()})
		}
	}
	switch e.Mode {
	case sandbox.FirewallOpen:
		if len(e.DenyNames) > 0 { // QUIC hides the name
			list = append(list, rule{fromLink(innerLink), ipv4(), port("udp", 443), reject()})
		}
		if len(e.Deny) == 0 {
			return list
		}
		match, back := []part{toSet("refused")}, []part{fromSet("refused")}
		if len(e.Allow) > 0 {
			match, back = append(match, notToSet("allowed")), append(back, notFromSet("allowed"))
		}
		refuse(match...)
		list = append(list, errorsIn)
		answers(back...)
	case sandbox.FirewallAllowlist:
		list = append(list, errorsIn)
		if len(e.Deny) > 0 {
			refuse(toSet("refused"))
			answers(fromSet("refused"))
		}
		refuse(notToSet("allowed"))
		answers(notFromSet("allowed"))
	default:
		refuse()
		list = append(list, rule{fromLink(routerLink), drop()})
	}
	return list
}

// proxyInput lets in what was redirected, and the answers to the proxy.
func proxyInput(e sandbox.Egress) []rule {
	if !e.Named() {
		return nil
	}
	return []rule{
		{fromLink(innerLink), ipv4(), port("tcp", proxyPort), redirected(), accept()},
		{fromLink(routerLink), state(established | related), accept()},
	}
}

// proxyOutput lets the proxy out, to where a guest may go.
func proxyOutput(e sandbox.Egress) []rule {
	if !e.Named() {
		return nil
	}
	return []rule{{toLink(routerLink), ipv4(), toSet("denied"), drop()}, {toLink(routerLink), marked(proxyMark), accept()}}
}

// proxyRedirect says which connections the proxy gets. It has to tell the name of those.
func proxyRedirect(e sandbox.Egress) chain {
	c := chain{
		name: "names", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPrerouting, prio: nftables.ChainPriorityNATDest,
		header: "type nat hook prerouting priority dstnat",
		rules:  []rule{{fromLink(innerLink), ipv4(), toSet("denied"), accept()}},
	}
	leave := func(s string) { c.rules = append(c.rules, rule{fromLink(innerLink), ipv4(), toSet(s), accept()}) }
	take := func(match ...part) {
		c.rules = append(c.rules, append(append(rule{fromLink(innerLink), ipv4()}, match...), redirect(proxyPort)))
	}
	if e.Mode == sandbox.FirewallAllowlist {
		if len(e.Deny) > 0 {
			leave("refused")
		}
		leave("allowed")
		if len(e.AllowNames) > 0 {
			take(toSet("named"), tcp())
		}
		return c
	}
	if len(e.Allow) > 0 {
		leave("allowed")
	}
	if len(e.Deny) > 0 {
		if len(e.AllowNames) > 0 {
			take(toSet("refused"), toSet("named"), tcp())
		}
		leave("refused")
	}
	if len(e.DenyNames) > 0 {
		take(port("tcp", 80))
		take(port("tcp", 443))
	}
	return c
}

func inSet(offset uint32, set string, invert bool) []expr.Any {
	return []expr.Any{address(offset), &expr.Lookup{SourceRegister: 1, SetName: set, Invert: invert}}
}

func notToSet(name string) part {
	return part{"ip daddr != @" + name, inSet(destinationOffset, name, true)}
}

func fromSet(name string) part { return part{"ip saddr @" + name, inSet(sourceOffset, name, false)} }

func notFromSet(name string) part {
	return part{"ip saddr != @" + name, inSet(sourceOffset, name, true)}
}

// redirected is a connection that the redirect has turned here.
func redirected() part {
	return part{"ct status dnat", []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(ipsDstNAT), Xor: make([]byte, 4)},
		differs(make([]byte, 4)),
	}}
}

// ipsDstNAT is IPS_DST_NAT of nf_conntrack_common.h.
const ipsDstNAT = 1 << 5

func marked(n uint32) part {
	return part{fmt.Sprintf("meta mark 0x%08x", n), []expr.Any{load(expr.MetaKeyMARK), equal(binaryutil.NativeEndian.PutUint32(n))}}
}

func redirect(n uint16) part {
	return part{fmt.Sprintf("redirect to :%d", n), []expr.Any{
		&expr.Immediate{Register: 1, Data: binaryutil.BigEndian.PutUint16(n)},
		&expr.Redir{RegisterProtoMin: 1, Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED},
	}}
}

// open puts addresses into the set named, each for a time that begins now, whether they
// are in it or not.
func (s *space) open(addrs map[netip.Addr]lease) error {
	c, err := s.nftables()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	tab := &nftables.Table{Name: "hutch", Family: nftables.TableFamilyINet}
	named := &nftables.Set{Table: tab, Name: "named", KeyType: nftables.TypeIPAddr, HasTimeout: true}
	for a, l := range addrs {
		key := []byte(a.AsSlice())
		// The kernel does not prolong what is there, and does not delete what is not.
		for _, step := range []func() error{
			func() error { return c.SetAddElements(named, []nftables.SetElement{{Key: key}}) },
			func() error { return c.SetDeleteElements(named, []nftables.SetElement{{Key: key}}) },
			func() error { return c.SetAddElements(named, []nftables.SetElement{{Key: key, Timeout: l.left()}}) },
		} {
			if err := step(); err != nil {
				return fmt.Errorf("open addresses: %w", err)
			}
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("open addresses: %w", err)
	}
	return nil
}
