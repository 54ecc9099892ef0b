package webhook

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestRefusal_H2(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ addr, want string }{
		{"8.8.8.8", ""},
		{"100.63.255.255", ""},
		{"100.128.0.0", ""},
		{"172.15.255.255", ""},
		{"172.32.0.0", ""},
		{"168.63.129.17", ""},
		{"223.255.255.255", ""},
		{"2606:4700::1111", ""},
		{"2a00::1", ""},
		{"0.0.0.0", "this host"},
		{"0.1.2.3", "this host"},
		{"10.0.0.1", "private"},
		{"172.16.0.1", "private"},
		{"172.31.255.255", "private"},
		{"192.168.1.1", "private"},
		{"100.64.0.1", "carrier NAT"},
		{"100.100.100.200", "carrier NAT"},
		{"127.0.0.1", "loopback"},
		{"127.255.255.254", "loopback"},
		{"169.254.169.254", "link-local"},
		{"168.63.129.16", "cloud metadata"},
		{"192.0.0.192", "reserved"},
		{"198.19.255.255", "benchmark"},
		{"224.0.0.1", "multicast"},
		{"239.255.255.255", "multicast"},
		{"240.0.0.1", "reserved"},
		{"255.255.255.255", "reserved"},
		{"::", "not public"},
		{"::1", "loopback"},
		{"::127.0.0.1", "not public"},
		{"::ffff:127.0.0.1", "IPv4-mapped"},
		{"::ffff:8.8.8.8", "IPv4-mapped"},
		{"64:ff9b::a00:1", "NAT64"},
		{"64:ff9b::808:808", "NAT64"},
		{"64:ff9b:1::a00:1", "NAT64"},
		{"2001::a00:1", "reserved"},
		{"2001:db8::1", "documentation"},
		{"2002:a00:1::", "6to4"},
		{"fc00::1", "private"},
		{"fd00:ec2::254", "private"},
		{"fe80::1", "link-local"},
		{"fe80::1%eth0", "link-local"},
		{"2606:4700::1111%eth0", "not public"},
		{"fec0::1", "not public"},
		{"ff02::1", "multicast"},
		{"4000::1", "not public"},
	} {
		if got := (Policy{}).refusal(netip.MustParseAddr(c.addr)); got != c.want {
			t.Errorf("%s is %q, want %q", c.addr, got, c.want)
		}
	}
	if got := (Policy{}).refusal(netip.Addr{}); got == "" {
		t.Error("no address at all may be dialled")
	}
	p := Policy{Inside: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/8")}}
	for addr, allowed := range map[string]bool{"10.1.2.3": true, "10.2.2.3": false, "fd00::1": true, "fc00::1": false, "127.0.0.1": false, "8.8.8.8": true} {
		if got := p.refusal(netip.MustParseAddr(addr)); (got == "") != allowed {
			t.Errorf("with %v, %s is %q", p.Inside, addr, got)
		}
	}
}

func TestCheckURL_H2(t *testing.T) {
	t.Parallel()
	inside := Policy{HTTP: true, Inside: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	for _, c := range []struct {
		url    string
		policy Policy
		want   string // in the refusal; "" is taken
	}{
		{"https://example.com/hook?a=b", Policy{}, ""},
		{"https://example.com:8443/", Policy{}, ""},
		{"HTTPS://EXAMPLE.COM", Policy{}, ""},
		{"https://[2606:4700::1111]/", Policy{}, ""},
		{"http://example.com/", Policy{}, "not https"},
		{"http://example.com/", inside, ""},
		{"http://127.0.0.1:80/", inside, ""},
		{"https://user:hunter2@example.com/", Policy{}, "user name or password"},
		{"https://user@example.com/", Policy{}, "user name or password"},
		{"https://example.com/#x", Policy{}, "fragment"},
		{"https://example.com/#", Policy{}, "fragment"},
		{"ftp://example.com/", inside, "begins with"},
		{"file:///etc/passwd", inside, "begins with"},
		{"example.com/hook", inside, "begins with"},
		{"//example.com", inside, "begins with"},
		{"", Policy{}, "begins with"},
		{"https://", Policy{}, "no host"},
		{"https:///x", Policy{}, "no host"},
		{"https:example.com", Policy{}, "no host"},
		{"https://:443/", Policy{}, "no host"},
		{"https://example.com:/", Policy{}, "port"},
		{"https://example.com:0/", Policy{}, "port"},
		{"https://example.com:65536/", Policy{}, "port"},
		{"https://example.com:x/", Policy{}, "parsed"},
		{"https://exa mple.com/", Policy{}, "parsed"},
		{"https://u:hunter2@exa\nmple.com/", Policy{}, "parsed"},
		{"https://10.0.0.1/", Policy{}, "private"},
		{"https://127.0.0.1/", Policy{}, "loopback"},
		{"https://[::1]/", Policy{}, "loopback"},
		{"https://[::ffff:10.0.0.1]/", Policy{}, "IPv4-mapped"},
		{"https://[64:ff9b::a00:1]/", Policy{}, "NAT64"},
		{"https://[fe80::1%25eth0]/", Policy{}, "link-local"},
		{"https://169.254.169.254/latest/meta-data", Policy{}, "link-local"},
		{"https://example.com/" + strings.Repeat("a", 2048), Policy{}, "characters"},
	} {
		err := c.policy.CheckURL(c.url)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.url, err)
			}
			continue
		}
		if !fault.Is(err, fault.InvalidArgument) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.url, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the password is in %q", err)
		}
	}
}
