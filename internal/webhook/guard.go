package webhook

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// Policy is what the operator allows receivers to be. The zero Policy is https on
// public addresses.
type Policy struct {
	HTTP   bool           // plain http too
	Inside []netip.Prefix // addresses that are not public and allowed all the same
	Roots  *x509.CertPool // who signs receivers' certificates; nil is the system's list
}

// public is where IPv6 hands out addresses of the internet (RFC 4291, IANA's registry
// of global unicast). All else, fc00::/7, fe80::/10, ff00::/8, ::1 and the NAT64
// prefixes 64:ff9b::/96 and 64:ff9b:1::/48 among it, is not public.
var public = netip.MustParsePrefix("2000::/3")

// closed are the ranges without public receivers: IANA's special-purpose registries
// (RFC 6890 and its updates) and the metadata services of clouds.
var closed = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "this host"},
	{netip.MustParsePrefix("10.0.0.0/8"), "private"},
	{netip.MustParsePrefix("100.64.0.0/10"), "carrier NAT"}, // also Tailscale, and Alibaba's metadata
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("168.63.129.16/32"), "cloud metadata"}, // Azure's is a public address
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local"},       // metadata of AWS, GCP, Azure, OpenStack
	{netip.MustParsePrefix("172.16.0.0/12"), "private"},
	{netip.MustParsePrefix("192.0.0.0/24"), "reserved"}, // Oracle's metadata 192.0.0.192
	{netip.MustParsePrefix("192.0.2.0/24"), "documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), "6to4 relay"},
	{netip.MustParsePrefix("192.168.0.0/16"), "private"},
	{netip.MustParsePrefix("198.18.0.0/15"), "benchmark"},
	{netip.MustParsePrefix("198.51.100.0/24"), "documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved"}, // broadcast too
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped"},
	{netip.MustParsePrefix("64:ff9b::/96"), "NAT64"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "NAT64"},
	{netip.MustParsePrefix("2001::/23"), "reserved"}, // Teredo among it, which carries an IPv4 address
	{netip.MustParsePrefix("2001:db8::/32"), "documentation"},
	{netip.MustParsePrefix("2002::/16"), "6to4"}, // carries an IPv4 address
	{netip.MustParsePrefix("3fff::/20"), "documentation"},
	{netip.MustParsePrefix("fc00::/7"), "private"}, // AWS's metadata fd00:ec2::254
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// refusal says what is wrong with an address; "" where it may be dialled.
func (p Policy) refusal(a netip.Addr) string {
	for _, allowed := range p.Inside {
		if allowed.Contains(a) {
			return ""
		}
	}
	for _, c := range closed {
		if c.prefix.Addr().Is4() == a.Is4() && prefixHolds(c.prefix, a) {
			return c.what
		}
	}
	if !a.IsValid() || a.Zone() != "" || a.Is6() && !public.Contains(a) {
		return "not public"
	}
	return ""
}

// prefixHolds is Contains without its two exceptions: netip finds mapped addresses and
// those with a zone in no prefix.
func prefixHolds(p netip.Prefix, a netip.Addr) bool {
	masked, err := a.WithZone("").Prefix(p.Bits())
	return err == nil && masked.Addr() == p.Addr()
}

// CheckURL refuses the addresses that are never sent to. The address that a name leads
// to is judged when it is dialled, each time.
func (p Policy) CheckURL(raw string) error {
	refuse := func(format string, args ...any) error {
		return fault.New(fault.InvalidArgument, "cannot send webhooks to this URL: "+format, args...)
	}
	if len(raw) > 2048 {
		return refuse("it has %d characters, the most is 2048", len(raw))
	}
	u, err := url.Parse(raw)
	if err != nil { // its text repeats the URL, and with it a password
		return refuse("it cannot be parsed; give one like https://example.com/hook")
	}
	switch {
	case u.Scheme == "http" && !p.HTTP:
		return refuse("it is not https, and the operator of this server does not allow plain http (`hutch up --webhook-http` does)")
	case u.Scheme != "https" && u.Scheme != "http":
		return refuse("it begins with %.20q; give one that begins with https://", u.Scheme)
	case u.User != nil:
		return refuse("it carries a user name or password; every message is signed, check the signature instead")
	case u.Fragment != "" || strings.Contains(raw, "#"):
		return refuse("it has a fragment (#…), which is never sent; leave it out")
	case u.Hostname() == "":
		return refuse("it names no host; give one like https://example.com/hook")
	}
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return refuse("its port is %.20q; it must be between 1 and 65535", port)
		}
	}
	if a, err := netip.ParseAddr(u.Hostname()); err == nil {
		if what := p.refusal(a); what != "" {
			return refuse("%s is not a public address (%s), and the operator of this server does not allow it (`hutch up --webhook-allow` does)", a, what)
		}
	}
	return nil
}

// blocked is the error of an address that may not be dialled. Its text leaves the
// address out: it goes to the webhook's owner, who is not to learn what names resolve
// to inside.
type blocked struct {
	what string
	addr netip.Addr // for the operator's log
}

func (b *blocked) Error() string {
	return fmt.Sprintf("the receiver's address is not a public one (%s), and the operator of this server does not allow it (`hutch up --webhook-allow` does)", b.what)
}

// dialer dials only where the policy lets it. Control runs after the name was resolved
// and before the connect, for each address that is tried, so that a name that leads
// elsewhere the second time is judged by where it leads then.
func (p Policy) dialer() *net.Dialer {
	return &net.Dialer{
		Timeout:   connectTimeout,
		KeepAlive: 15 * time.Second,
		ControlContext: func(_ context.Context, network, address string, _ syscall.RawConn) error {
			if !strings.HasPrefix(network, "tcp") {
				return errors.New("webhook: " + network + " is not dialled")
			}
			at, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("webhook: the address to dial: %w", err)
			}
			if what := p.refusal(at.Addr()); what != "" {
				return &blocked{what: what, addr: at.Addr()}
			}
			return nil
		},
	}
}
