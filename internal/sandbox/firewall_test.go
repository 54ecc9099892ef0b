package sandbox

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestFirewallNormal(t *testing.T) {
	t.Parallel()
	got, err := Firewall{Allow: []string{"Example.COM.", "203.0.113.7", "203.0.113.99/24", "example.com"}, Deny: []string{"*.Bad.example", "::/0"}, DenyPorts: []int{9, 8, 9}}.Normal()
	want := Firewall{Mode: FirewallOpen, Allow: []string{"203.0.113.0/24", "203.0.113.7/32", "example.com"}, Deny: []string{"*.bad.example", "::/0"}, Ports: PortsAllow, DenyPorts: []int{8, 9}}
	if err != nil || !got.Equal(want) {
		t.Errorf("got %+v, %v", got, err)
	}
	if again, err := got.Normal(); err != nil || !again.Equal(got) {
		t.Errorf("its normal form is %+v, %v", again, err)
	}
	for field, f := range map[string]Firewall{
		"mode": {Mode: "closed"}, "ports": {Ports: "some"}, "allow_ports": {AllowPorts: []int{0}}, "deny_ports": {DenyPorts: []int{65536}},
		"deny": {Deny: []string{"1.2.3"}}, "allow": {Allow: []string{"2001:db8::/32"}},
	} {
		if _, err := f.Normal(); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, rule := range []string{"", "*", "*.", "localhost", "*.*.example.com", "a..b", "1.2.3.400", "-a.example", "exa mple.com", "http://a.example", "1.2.3.4/33", "ex\u00e4mple.com"} {
		if _, err := (Firewall{Allow: []string{rule}}).Normal(); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", rule, err)
		}
		if e := (Firewall{Allow: []string{rule}}).Egress(); e.Mode != FirewallDenyAll {
			t.Errorf("%q opens %+v", rule, e)
		}
	}
	if _, err := (Firewall{Allow: []string{"a.example"}, Deny: []string{"A.example"}}).Normal(); err == nil {
		t.Error("a rule can be in both lists")
	}
}

// N3: what each mode and the exceptions to its lists let through.
func TestEgress(t *testing.T) {
	t.Parallel()
	in, out := netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("198.51.100.9")
	open := Firewall{Mode: FirewallOpen, Allow: []string{"good.bad.example"}, Deny: []string{"203.0.113.0/24", "*.bad.example"}}.Egress()
	list := Firewall{Mode: FirewallAllowlist, Allow: []string{"203.0.113.0/24", "*.example.com"}, Deny: []string{"x.example.com"}}.Egress()
	none := Firewall{Mode: FirewallDenyAll, Allow: []string{"203.0.113.0/24", "a.example"}}.Egress()
	for _, c := range []struct {
		e    Egress
		addr netip.Addr
		name string
		want bool
	}{
		{open, out, "", true}, {open, in, "", false}, {open, out, "a.bad.example", false}, {open, out, "A.BAD.example.", false}, {open, out, "bad.example", true},
		{open, in, "good.bad.example", true}, {open, out, "good.bad.example", true}, {open, in, "other.example", false},
		{list, in, "", true}, {list, out, "", false}, {list, out, "a.example.com", true}, {list, out, "a.b.example.com", true}, {list, out, "example.com", false},
		{list, out, "x.example.com", false}, {list, out, "aexample.com", false}, {list, out, "a.example.com.evil.example", false},
		{none, in, "", false}, {none, in, "a.example", false},
	} {
		if got := c.e.Passes(c.addr, c.name); got != c.want {
			t.Errorf("%s: %s as %q passes: %v", c.e.Mode, c.addr, c.name, got)
		}
	}
	for name, want := range map[string][3]bool{"a.example.com": {true, true, false}, "a.bad.example": {false, false, false}, "good.bad.example": {true, false, false}, "a.example": {true, false, false}} {
		if got := [3]bool{open.Resolves(name), list.Resolves(name), none.Resolves(name)}; got != want {
			t.Errorf("%s is looked up: %v", name, got)
		}
	}
}

func TestFirewallAdmits(t *testing.T) {
	t.Parallel()
	ports := func(f Firewall) (got []int) {
		for p := 1; p <= 4; p++ {
			if f.Admits(p) {
				got = append(got, p)
			}
		}
		return got
	}
	if got := ports(DefaultFirewall()); !slices.Equal(got, []int{1, 2, 3, 4}) {
		t.Errorf("by default: %v", got)
	}
	if got := ports(Firewall{Ports: PortsAllow, DenyPorts: []int{2}}); !slices.Equal(got, []int{1, 3, 4}) {
		t.Errorf("with one denied: %v", got)
	}
	if got := ports(Firewall{Ports: PortsDeny, AllowPorts: []int{2}}); !slices.Equal(got, []int{2}) {
		t.Errorf("with one allowed: %v", got)
	}
}

func TestPolicyEqual(t *testing.T) {
	t.Parallel()
	a, b := DefaultPolicy(), DefaultPolicy()
	f := DefaultFirewall()
	if b.Firewall = &f; !a.Equal(b) {
		t.Error("no firewall is not the default one")
	}
	b.Firewall = &Firewall{Mode: FirewallDenyAll, Ports: PortsAllow}
	if a.Equal(b) {
		t.Error("another firewall is the same")
	}
	a.Firewall, b.TTL = b.Firewall, 5
	if a.Equal(b) {
		t.Error("another auto-stop is the same")
	}
}
