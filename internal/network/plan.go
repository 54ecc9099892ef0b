package network

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strings"
)

// What a sandbox sees is the same in each, so that a memory image needs no change
// when it comes back, on this machine or another. The numbers are those of QEMU's
// user network, which many tools and people know.
var (
	// Guest is the address of eth0 inside, with its prefix length.
	Guest = netip.MustParsePrefix("10.0.2.15/24")
	// Gateway is the guest's default route and its DNS server.
	Gateway = netip.MustParseAddr("10.0.2.2")
)

// ResolvConf is the content of /etc/resolv.conf inside.
const ResolvConf = "nameserver 10.0.2.2\n"

// DefaultPool is where uplinks get their addresses: private, so that no network
// outside ever answers to one, and away from the ranges that other programs hand
// out by default (Docker 172.17-31 and 192.168, Podman 10.88, flannel 10.244, k3s
// 10.42 and 10.43, kubeadm's services 10.96, libvirt 192.168.122, Tailscale 100.64).
// A /16 has room for 32,768 uplinks.
var DefaultPool = netip.MustParsePrefix("10.213.0.0/16")

// Names of the interfaces in the two namespaces of a sandbox.
const (
	guestLink  = "eth0" // in G: the guest's own
	innerLink  = "gw0"  // in R: the other end of eth0
	routerLink = "up0"  // in R: the way out; its other end is on the host
)

// A slot is one uplink: a pair of addresses with nothing else between them, which
// is what a /31 is for (RFC 3021).
type slot struct{ host, router netip.Addr }

// slots is the number of uplinks that a pool has room for.
func slots(pool netip.Prefix) uint32 { return 1 << (31 - pool.Bits()) }

// slotAt gives uplink n of a pool.
func slotAt(pool netip.Prefix, n uint32) slot {
	base := pool.Masked().Addr().As4()
	var even [4]byte
	binary.BigEndian.PutUint32(even[:], binary.BigEndian.Uint32(base[:])+2*n)
	host := netip.AddrFrom4(even)
	return slot{host: host, router: host.Next()}
}

// link is the name of the host's end. It is made of the address, not of a number
// in a pool: so two instances whose pools overlap can never hold one address both,
// because the kernel lets only one of them make the name.
func (s slot) link() string {
	a := s.host.As4()
	return "hutch" + hex.EncodeToString(a[:])
}

// side says which of a sandbox's two namespaces is meant.
type side string

const (
	sideGuest  side = "g"
	sideRouter side = "r"
)

// spaceName names a namespace under /run/netns.
func spaceName(tag, id string, s side) string { return "hutch-" + tag + "-" + id + "-" + string(s) }

// idOfSpace is the reverse of spaceName; ok is false for what is not this instance's.
func idOfSpace(tag, name string) (id string, ok bool) {
	rest, ok := strings.CutPrefix(name, "hutch-"+tag+"-")
	if !ok {
		return "", false
	}
	for _, s := range []side{sideGuest, sideRouter} {
		if id, ok := strings.CutSuffix(rest, "-"+string(s)); ok {
			return id, validID(id) == nil
		}
	}
	return "", false
}

// aliasOf is the ifalias of the host's end of an uplink. It is set last, so a link
// that has it is a finished one.
func aliasOf(tag, id string) string { return "hutch:" + tag + ":" + id }

// idOfAlias is the reverse of aliasOf.
func idOfAlias(tag, alias string) (id string, ok bool) {
	id, ok = strings.CutPrefix(alias, "hutch:"+tag+":")
	return id, ok && validID(id) == nil
}

// tableName names the instance's nftables table on the host.
func tableName(tag string) string { return "hutch-" + tag }

// validID checks that an id can stand in a file name and be found again in it.
// "-" is not allowed, because it separates the parts of the name.
func validID(id string) error {
	if id == "" || len(id) > 64 {
		return fmt.Errorf("a sandbox id has 1 to 64 characters, %q has %d", id, len(id))
	}
	for _, c := range id {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return fmt.Errorf("a sandbox id has the characters a-z, 0-9 and _ only, %q has %q", id, c)
		}
	}
	return nil
}

// groupOf turns a tag into the link group that marks the instance's uplinks. The
// kernel sets it together with the link, so no uplink is ever without its owner.
func groupOf(tag string) (uint32, error) {
	b, err := hex.DecodeString(tag)
	if err != nil || len(b) != 4 || tag != strings.ToLower(tag) {
		return 0, fmt.Errorf("an instance tag is 8 hex digits in lower case, got %q", tag)
	}
	group := binary.BigEndian.Uint32(b)
	if group == 0 {
		return 0, fmt.Errorf("tag 00000000 is the kernel's default link group, in which every interface of the host is")
	}
	return group, nil
}

// validPool checks the operator's pool.
func validPool(pool netip.Prefix) error {
	switch {
	case !pool.IsValid() || !pool.Addr().Is4():
		return fmt.Errorf("the pool of uplink addresses must be an IPv4 range such as %s, got %q", DefaultPool, pool)
	case pool != pool.Masked():
		return fmt.Errorf("the pool %s has bits set behind its length; %s is meant", pool, pool.Masked())
	case pool.Bits() < 8 || pool.Bits() > 30:
		return fmt.Errorf("the pool %s must be between a /8 and a /30", pool)
	case pool.Overlaps(Guest.Masked()):
		return fmt.Errorf("the pool %s overlaps %s, which every sandbox uses inside", pool, Guest.Masked())
	}
	return nil
}

// denied is where no sandbox may go: everything that is not the public internet
// (IANA's special-purpose registry, RFC 6890), and with it the cloud providers'
// metadata services. Documentation ranges are left out: nothing lives there.
var denied = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"), // carriers' NAT, Tailscale; Alibaba's metadata 100.100.100.200
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("168.63.129.16/32"), // Azure's host agent has a public address
	netip.MustParsePrefix("169.254.0.0/16"),   // link-local; metadata of AWS, GCP, Azure, OpenStack
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.0.0.0/24"), // protocol assignments; Oracle's metadata 192.0.0.192
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("198.18.0.0/15"), // benchmark networks
	netip.MustParsePrefix("224.0.0.0/3"),   // multicast, reserved and broadcast
}

// without drops the prefixes that another one of the list contains: an interval
// set refuses elements that overlap.
func without(list []netip.Prefix) []netip.Prefix {
	var kept []netip.Prefix
	for i, p := range list {
		contained := false
		for j, q := range list {
			wider := q.Bits() < p.Bits() || q.Bits() == p.Bits() && j < i
			contained = contained || i != j && wider && q.Contains(p.Addr())
		}
		if !contained {
			kept = append(kept, p)
		}
	}
	return kept
}
