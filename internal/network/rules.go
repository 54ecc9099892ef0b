package network

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/hutchrun/hutch/internal/sandbox"
	"golang.org/x/sys/unix"
)

// The rule lists are data: each part of a rule holds nft's own words and the
// kernel's expressions for them, side by side. A test loads the words with nft and
// the expressions with this package and compares what the kernel then holds.

type part struct {
	text  string
	exprs []expr.Any
}

type rule []part

type chain struct {
	name   string
	kind   nftables.ChainType
	hook   *nftables.ChainHook
	prio   *nftables.ChainPriority
	header string // nft's words for kind, hook and priority
	drop   bool   // the policy; false is accept
	rules  []rule
}

type set struct {
	name     string
	prefixes []netip.Prefix // an address set; or
	links    []string       // a set of interface names
	ofLinks  bool
	timed    map[netip.Addr]time.Duration // addresses, each until it times out
	ofTimed  bool
}

type table struct {
	name   string
	sets   []set
	chains []chain
}

// A hostile guest must not fill the host's connection table, which all of the
// host's programs share. 4,096 connections at once and 200 new ones a second (1,000
// in a burst) are more than a build, a crawler or a browser needs; the rate stands
// first because the kernel walks the whole list to count.
const (
	maxFlows      = 4096
	maxFlowRate   = 200
	maxFlowsBurst = 1000
)

// routerTable is the table in R. forbidden are the addresses that no packet may be
// sent to, whatever the sandbox's own rules e say.
func routerTable(forbidden []netip.Prefix, e sandbox.Egress) table {
	t := table{
		name: "hutch",
		sets: append([]set{{name: "denied", prefixes: forbidden}}, egressSets(e)...),
		chains: []chain{
			{
				name: "early", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, prio: nftables.ChainPriorityRaw,
				header: "type filter hook prerouting priority raw",
				rules: []rule{
					{ipv6(), drop()},
					{fromLink(innerLink), ipv4(), notFrom(Guest.Addr()), drop()},
				},
			},
			{
				// Only DNS, and answers to what the host agent opened from here.
				name: "input", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput, prio: nftables.ChainPriorityFilter,
				header: "type filter hook input priority filter", drop: true,
				rules: append([]rule{
					{fromLink(innerLink), state(established), accept()},
					{fromLink(innerLink), ipv4(), to(Gateway), port("udp", 53), accept()},
					{fromLink(innerLink), ipv4(), to(Gateway), port("tcp", 53), accept()},
				}, proxyInput(e)...),
			},
			{
				name: "forward", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward, prio: nftables.ChainPriorityFilter,
				header: "type filter hook forward priority filter", drop: true,
				rules: slices.Concat([]rule{
					// What conntrack cannot place would leave without masquerading.
					{state(invalid), drop()},
					// An answer at once, so that a program fails instead of hanging. A reset
					// for TCP, because the kernel sends ICMP errors to one address at no
					// more than one a second (icmp(7), icmp_ratelimit).
					{fromLink(innerLink), ipv4(), toSet("denied"), tcp(), reset()},
					{fromLink(innerLink), ipv4(), toSet("denied"), reject()},
				}, egressForward(e), []rule{
					{fromLink(innerLink), toLink(routerLink), state(established | related), accept()},
					{fromLink(innerLink), toLink(routerLink), state(fresh), overRate(maxFlowRate, maxFlowsBurst), drop()},
					{fromLink(innerLink), toLink(routerLink), state(fresh), overCount(maxFlows), drop()},
					{fromLink(innerLink), toLink(routerLink), state(fresh), accept()},
					{fromLink(routerLink), toLink(innerLink), state(established | related), accept()},
				}),
			},
			{
				// R itself has no business outside, save the proxy's.
				name: "output", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookOutput, prio: nftables.ChainPriorityFilter,
				header: "type filter hook output priority filter",
				rules:  append(proxyOutput(e), rule{toLink(routerLink), drop()}),
			},
			{
				name: "leave", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, prio: nftables.ChainPriorityNATSource,
				header: "type nat hook postrouting priority srcnat",
				rules:  []rule{{toLink(routerLink), masquerade()}},
			},
		},
	}
	if e.Named() {
		t.chains = append(t.chains, proxyRedirect(e))
	}
	return t
}

// hostTable is an instance's table on the host. group marks the instance's
// uplinks, egress are the interfaces through which sandboxes may leave, opened
// those on which hutch turned forwarding on (kept here so that Remove can turn it
// off again, whatever died in between).
func hostTable(name string, group uint32, pool netip.Prefix, egress, opened []string) table {
	return table{
		name: name,
		sets: []set{
			{name: "denied", prefixes: without(append([]netip.Prefix{pool}, denied...))},
			{name: "egress", links: egress, ofLinks: true},
			{name: "opened", links: opened, ofLinks: true},
		},
		chains: []chain{
			{
				// Before any DNAT: else a port that Docker publishes on the host's
				// address would be rewritten and never be seen as the host's.
				name: "early", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, prio: nftables.ChainPriorityRaw,
				header: "type filter hook prerouting priority raw",
				rules: []rule{
					{fromGroup(group), ipv6(), drop()},
					{fromGroup(group), ipv4(), notFromPool(pool), drop()},
					{fromGroup(group), notUnicast(), drop()},
				},
			},
			{
				name: "input", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput, prio: nftables.ChainPriorityFilter,
				header: "type filter hook input priority filter",
				rules:  []rule{{fromGroup(group), drop()}},
			},
			{
				name: "forward", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward, prio: nftables.ChainPriorityFilter,
				header: "type filter hook forward priority filter",
				rules: []rule{
					{fromGroup(group), ipv4(), toSet("denied"), drop()},
					{fromGroup(group), toLinkSet("egress"), accept()},
					{fromGroup(group), drop()},
					{toGroup(group), state(established | related), accept()},
					{toGroup(group), drop()},
				},
			},
			{
				name: "leave", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, prio: nftables.ChainPriorityNATSource,
				header: "type nat hook postrouting priority srcnat",
				rules:  []rule{{fromGroup(group), toLinkSet("egress"), masquerade()}},
			},
		},
	}
}

// The parts. Register 1 carries each comparison.

func load(key expr.MetaKey) expr.Any { return &expr.Meta{Key: key, Register: 1} }

func equal(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data} }

func differs(data []byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: data} }

// ifname pads a name to the kernel's fixed length.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func fromLink(name string) part {
	return part{fmt.Sprintf("iifname %q", name), []expr.Any{load(expr.MetaKeyIIFNAME), equal(ifname(name))}}
}

func toLink(name string) part {
	return part{fmt.Sprintf("oifname %q", name), []expr.Any{load(expr.MetaKeyOIFNAME), equal(ifname(name))}}
}

func toLinkSet(name string) part {
	return part{"oifname @" + name, []expr.Any{load(expr.MetaKeyOIFNAME), &expr.Lookup{SourceRegister: 1, SetName: name}}}
}

func fromGroup(group uint32) part {
	return part{fmt.Sprintf("iifgroup %d", group), []expr.Any{load(expr.MetaKeyIIFGROUP), equal(binaryutil.NativeEndian.PutUint32(group))}}
}

func toGroup(group uint32) part {
	return part{fmt.Sprintf("oifgroup %d", group), []expr.Any{load(expr.MetaKeyOIFGROUP), equal(binaryutil.NativeEndian.PutUint32(group))}}
}

func ipv4() part {
	return part{"meta nfproto ipv4", []expr.Any{load(expr.MetaKeyNFPROTO), equal([]byte{unix.NFPROTO_IPV4})}}
}

func ipv6() part {
	return part{"meta nfproto ipv6", []expr.Any{load(expr.MetaKeyNFPROTO), equal([]byte{unix.NFPROTO_IPV6})}}
}

// Where the two addresses stand in an IPv4 header (RFC 791).
const (
	sourceOffset      = 12
	destinationOffset = 16
)

func address(offset uint32) expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}
}

func notFrom(a netip.Addr) part {
	return part{"ip saddr != " + a.String(), []expr.Any{address(sourceOffset), differs(a.AsSlice())}}
}

func notFromPool(p netip.Prefix) part {
	mask := binaryutil.BigEndian.PutUint32(^uint32(0) << (32 - p.Bits()))
	return part{"ip saddr != " + p.String(), []expr.Any{
		address(sourceOffset),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		differs(p.Addr().AsSlice()),
	}}
}

func to(a netip.Addr) part {
	return part{"ip daddr " + a.String(), []expr.Any{address(destinationOffset), equal(a.AsSlice())}}
}

func toSet(name string) part {
	return part{"ip daddr @" + name, []expr.Any{address(destinationOffset), &expr.Lookup{SourceRegister: 1, SetName: name}}}
}

// notUnicast is an address of the host itself, a broadcast or multicast one, or
// one that the host has no route to.
func notUnicast() part {
	return part{"fib daddr type != unicast", []expr.Any{
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		differs(binaryutil.NativeEndian.PutUint32(unix.RTN_UNICAST)),
	}}
}

func port(proto string, n uint16) part {
	number := map[string]byte{"udp": unix.IPPROTO_UDP, "tcp": unix.IPPROTO_TCP}[proto]
	return part{fmt.Sprintf("%s dport %d", proto, n), []expr.Any{
		load(expr.MetaKeyL4PROTO), equal([]byte{number}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equal(binaryutil.BigEndian.PutUint16(n)),
	}}
}

// Bits of a connection's state.
const (
	invalid     = expr.CtStateBitINVALID
	established = expr.CtStateBitESTABLISHED
	related     = expr.CtStateBitRELATED
	fresh       = expr.CtStateBitNEW
)

func state(bits uint32) part {
	var names []string
	for _, s := range []struct {
		bit  uint32
		name string
	}{{invalid, "invalid"}, {established, "established"}, {related, "related"}, {fresh, "new"}} {
		if bits&s.bit != 0 {
			names = append(names, s.name)
		}
	}
	return part{"ct state " + strings.Join(names, ","), []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		differs(make([]byte, 4)),
	}}
}

func overRate(rate uint64, burst uint32) part {
	return part{fmt.Sprintf("limit rate over %d/second burst %d packets", rate, burst), []expr.Any{
		&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: burst, Over: true},
	}}
}

func overCount(n uint32) part {
	return part{fmt.Sprintf("ct count over %d", n), []expr.Any{&expr.Connlimit{Count: n, Flags: expr.NFT_CONNLIMIT_F_INV}}}
}

func accept() part { return part{"accept", []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}} }

func drop() part { return part{"drop", []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}} }

func reject() part {
	return part{"reject with icmpx admin-prohibited", []expr.Any{
		&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED},
	}}
}

func tcp() part {
	return part{"meta l4proto tcp", []expr.Any{load(expr.MetaKeyL4PROTO), equal([]byte{unix.IPPROTO_TCP})}}
}

func reset() part {
	return part{"reject with tcp reset", []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}}
}

func masquerade() part { return part{"masquerade", []expr.Any{&expr.Masq{}}} }

// String gives the table in nft's own language.
func (t table) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "table inet %s {\n", t.name)
	for _, s := range t.sets {
		kind, elements := "ipv4_addr\n\t\tflags interval", make([]string, 0, len(s.prefixes)+len(s.links))
		switch {
		case s.ofLinks:
			kind = "ifname"
		case s.ofTimed:
			kind = fmt.Sprintf("ipv4_addr\n\t\tsize %d\n\t\tflags timeout", maxNamed)
		}
		for _, p := range s.prefixes {
			elements = append(elements, strings.TrimSuffix(p.String(), "/32"))
		}
		for _, l := range s.links {
			elements = append(elements, fmt.Sprintf("%q", l))
		}
		fmt.Fprintf(&b, "\tset %s {\n\t\ttype %s\n", s.name, kind)
		if len(elements) > 0 {
			fmt.Fprintf(&b, "\t\telements = { %s }\n", strings.Join(elements, ", "))
		}
		b.WriteString("\t}\n")
	}
	for _, c := range t.chains {
		policy := "accept"
		if c.drop {
			policy = "drop"
		}
		fmt.Fprintf(&b, "\tchain %s {\n\t\t%s; policy %s;\n", c.name, c.header, policy)
		for _, r := range c.rules {
			words := make([]string, len(r))
			for i, p := range r {
				words[i] = p.text
			}
			fmt.Fprintf(&b, "\t\t%s\n", strings.Join(words, " "))
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}
