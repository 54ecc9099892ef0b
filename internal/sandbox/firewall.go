package sandbox

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
)

// Firewall says what a sandbox may reach outside, and on which ports it may be reached
// from there (N3). Whatever it says, private, link-local and host addresses and other
// sandboxes stay out of reach: these are no rule of the user's.
type Firewall struct {
	Mode FirewallMode `json:"mode"`
	// Allow and Deny are IPv4 ranges such as 203.0.113.0/24, addresses, and domain names
	// such as example.com or *.example.com (its subdomains, not itself).
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	// Ports says what holds for a port that neither list has, for those with access.
	Ports      PortMode `json:"ports"`
	AllowPorts []int    `json:"allow_ports,omitempty"`
	DenyPorts  []int    `json:"deny_ports,omitempty"`
}

// FirewallMode is what holds where no rule says otherwise. The rules of the mode's own
// kind are its exceptions, and the other list has the exceptions to these.
type FirewallMode string

// The modes.
const (
	FirewallOpen      FirewallMode = "open"      // the internet, without what is denied, save what is allowed
	FirewallAllowlist FirewallMode = "allowlist" // only what is allowed, without what is denied
	FirewallDenyAll   FirewallMode = "deny-all"  // nothing
)

// PortMode is what holds for a port that no rule names.
type PortMode string

// The port modes.
const (
	PortsAllow PortMode = "allow"
	PortsDeny  PortMode = "deny"
)

// firewallMost bounds each list of a firewall: each change is written into the kernel whole.
const firewallMost = 500

// DefaultFirewall is what holds where nobody says otherwise.
func DefaultFirewall() Firewall { return Firewall{Mode: FirewallOpen, Ports: PortsAllow} }

// Walls gives the firewall that a policy has.
func (p Policy) Walls() Firewall {
	if p.Firewall == nil {
		return DefaultFirewall()
	}
	return *p.Firewall
}

// Equal compares what two policies say.
func (p Policy) Equal(q Policy) bool {
	same := p.Walls().Equal(q.Walls())
	p.Firewall, q.Firewall = nil, nil
	return same && p == q
}

// Equal compares two firewalls.
func (f Firewall) Equal(g Firewall) bool {
	return f.Mode == g.Mode && f.Ports == g.Ports && slices.Equal(f.Allow, g.Allow) && slices.Equal(f.Deny, g.Deny) &&
		slices.Equal(f.AllowPorts, g.AllowPorts) && slices.Equal(f.DenyPorts, g.DenyPorts)
}

// Normal checks a firewall and gives it in its one form: names in lower case, ranges
// without bits behind their length, the lists sorted, nothing twice. What is not said
// is the default.
func (f Firewall) Normal() (Firewall, error) {
	out := Firewall{Mode: cmp.Or(f.Mode, FirewallOpen), Ports: cmp.Or(f.Ports, PortsAllow)}
	if out.Mode != FirewallOpen && out.Mode != FirewallAllowlist && out.Mode != FirewallDenyAll {
		return out, badPolicy("mode", "%.60q is no firewall mode; use open, allowlist or deny-all", string(f.Mode))
	}
	if out.Ports != PortsAllow && out.Ports != PortsDeny {
		return out, badPolicy("ports", "%.60q is nothing that holds for ports; use allow or deny", string(f.Ports))
	}
	var err error
	if out.Allow, err = normalRules("allow", f.Allow); err != nil {
		return out, err
	}
	if out.Deny, err = normalRules("deny", f.Deny); err != nil {
		return out, err
	}
	for _, r := range out.Allow {
		if slices.Contains(out.Deny, r) {
			return out, badPolicy("allow", "%s is both allowed and denied; take it out of one list", r)
		}
	}
	if out.AllowPorts, err = normalPorts("allow_ports", f.AllowPorts); err != nil {
		return out, err
	}
	if out.DenyPorts, err = normalPorts("deny_ports", f.DenyPorts); err != nil {
		return out, err
	}
	for _, p := range out.AllowPorts {
		if slices.Contains(out.DenyPorts, p) {
			return out, badPolicy("allow_ports", "port %d is both allowed and denied; take it out of one list", p)
		}
	}
	return out, nil
}

func normalRules(field string, list []string) ([]string, error) {
	if len(list) > firewallMost {
		return nil, badPolicy(field, "a firewall has at most %d rules in a list, this one has %d; use wider ranges or *.names", firewallMost, len(list))
	}
	var out []string
	for _, text := range list {
		r, err := parseRule(field, text)
		if err != nil {
			return nil, err
		}
		out = append(out, r.String())
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func normalPorts(field string, list []int) ([]int, error) {
	if len(list) > firewallMost {
		return nil, badPolicy(field, "a firewall has at most %d ports in a list, this one has %d", firewallMost, len(list))
	}
	for _, p := range list {
		if p < 1 || p > 65535 {
			return nil, badPolicy(field, "%d is no port; a port is between 1 and 65535", p)
		}
	}
	out := slices.Clone(list)
	slices.Sort(out)
	return slices.Compact(out), nil
}

// rule is a range, or a name where that is not valid.
type rule struct {
	prefix netip.Prefix
	name   string
}

func (r rule) String() string {
	if r.prefix.IsValid() {
		return r.prefix.String()
	}
	return r.name
}

func parseRule(field, text string) (rule, *fault.Fault) {
	if addr, err := netip.ParseAddr(text); err == nil && addr.Zone() == "" {
		text = netip.PrefixFrom(addr, addr.BitLen()).String()
	}
	if p, err := netip.ParsePrefix(text); err == nil {
		// All IPv6 is refused already, so that denying some of it holds.
		if p.Addr().Is6() && field == "allow" {
			return rule{}, badPolicy(field, "%s cannot be allowed: sandboxes have no IPv6", p)
		}
		return rule{prefix: p.Masked()}, nil
	}
	name := strings.ToLower(strings.TrimSuffix(text, "."))
	if !validName(strings.TrimPrefix(name, "*.")) {
		return rule{}, badPolicy(field, "%.80q is no IPv4 range, address or domain name; write 203.0.113.0/24, example.com or *.example.com", text)
	}
	return rule{name: name}, nil
}

// validName says whether a name is one of the DNS's, in its ASCII form.
func validName(name string) bool {
	labels := strings.Split(name, ".")
	if len(name) > 253 || len(labels) < 2 {
		return false
	}
	for _, l := range labels {
		if l == "" || len(l) > 63 || strings.Trim(l, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" || l[0] == '-' || l[len(l)-1] == '-' {
			return false
		}
	}
	return strings.Trim(labels[len(labels)-1], "0123456789") != "" // else it is a mistyped address
}

// Admits says whether a port may be reached from outside, by those with access.
func (f Firewall) Admits(port int) bool {
	if f.Ports == PortsDeny {
		return slices.Contains(f.AllowPorts, port) && !slices.Contains(f.DenyPorts, port)
	}
	return !slices.Contains(f.DenyPorts, port)
}

// Egress is the outbound half of a firewall, taken apart.
type Egress struct {
	Mode                  FirewallMode
	Allow, Deny           []netip.Prefix // IPv4
	AllowNames, DenyNames []string
}

// Egress takes the outbound rules apart. One that was not checked gives DenyAll.
func (f Firewall) Egress() Egress {
	f, err := f.Normal()
	if err != nil || f.Mode == FirewallDenyAll {
		return Egress{Mode: FirewallDenyAll}
	}
	e := Egress{Mode: f.Mode}
	split := func(field string, list []string) (nets []netip.Prefix, names []string) {
		for _, text := range list {
			switch r, _ := parseRule(field, text); {
			case r.name != "":
				names = append(names, r.name)
			case r.prefix.Addr().Is4():
				nets = append(nets, r.prefix)
			}
		}
		return nets, names
	}
	e.Allow, e.AllowNames = split("allow", f.Allow)
	e.Deny, e.DenyNames = split("deny", f.Deny)
	return e
}

// Named says whether anything depends on names, so that these have to be watched.
func (e Egress) Named() bool { return len(e.AllowNames)+len(e.DenyNames) > 0 }

// Opens says whether a name opens addresses that would be closed without it.
func (e Egress) Opens(name string) bool {
	switch e.Mode {
	case FirewallAllowlist:
		return matches(e.AllowNames, name) && !matches(e.DenyNames, name)
	case FirewallOpen:
		return matches(e.AllowNames, name)
	}
	return false
}

// Resolves says whether a name may be looked up.
func (e Egress) Resolves(name string) bool {
	if e.Mode == FirewallOpen {
		return !matches(e.DenyNames, name) || matches(e.AllowNames, name)
	}
	return e.Opens(name)
}

// Passes says whether a connection to an address may be made in the name that it gives
// for its peer, "" for none.
func (e Egress) Passes(addr netip.Addr, name string) bool {
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(addr) })
	}
	switch e.Mode {
	case FirewallOpen:
		return in(e.Allow) || e.Opens(name) || !in(e.Deny) && e.Resolves(name)
	case FirewallAllowlist:
		return !in(e.Deny) && (in(e.Allow) || e.Opens(name))
	}
	return false
}

// matches says whether one of the patterns is the name's.
func matches(patterns []string, name string) bool {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return name != "" && slices.ContainsFunc(patterns, func(p string) bool {
		if parent, wild := strings.CutPrefix(p, "*"); wild {
			return strings.HasSuffix(name, parent) && len(name) > len(parent)
		}
		return p == name
	})
}
