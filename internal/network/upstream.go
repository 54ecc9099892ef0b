package network

import (
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Where the host's resolvers are written down. systemd-resolved puts its own stub
// into the first file and the real servers into the second
// (systemd-resolved.service(8)).
const (
	resolvConf   = "/etc/resolv.conf"
	resolvedConf = "/run/systemd/resolve/resolv.conf"
)

// upstreamAge is how long a reading of these files holds.
const upstreamAge = 5 * time.Second

// upstream knows the servers to ask: fixed ones, or the host's, whose files are
// read again from time to time because networks change under a running agent.
type upstream struct {
	fixed []netip.AddrPort

	mu   sync.Mutex
	list []netip.AddrPort
	read time.Time
}

// servers gives the servers to ask, best first; it may be empty.
func (u *upstream) servers(now time.Time) []netip.AddrPort {
	if len(u.fixed) > 0 {
		return u.fixed
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.read.IsZero() || now.Sub(u.read) > upstreamAge {
		u.list, u.read = hostServers(resolvConf, resolvedConf), now
	}
	return u.list
}

// hostServers reads the host's servers. The stub of systemd-resolved is passed over
// where its real servers can be read.
func hostServers(conf, resolved string) []netip.AddrPort {
	list := readServers(conf)
	if len(list) == 1 && list[0].Addr() == netip.AddrFrom4([4]byte{127, 0, 0, 53}) {
		if behind := readServers(resolved); len(behind) > 0 {
			return behind
		}
	}
	return list
}

// readServers reads one resolv.conf; a file that is not there names none.
func readServers(path string) []netip.AddrPort {
	conf, err := dns.ClientConfigFromFile(path)
	if err != nil {
		return nil
	}
	port, err := strconv.ParseUint(conf.Port, 10, 16)
	if err != nil {
		return nil
	}
	var list []netip.AddrPort
	for _, s := range conf.Servers {
		if addr, err := netip.ParseAddr(s); err == nil {
			list = append(list, netip.AddrPortFrom(addr, uint16(port)))
		}
	}
	return list
}
