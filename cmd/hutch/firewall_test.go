package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// outside says how a connection to a public address ends from inside: "refused" where the
// firewall refuses it, else otherwise. This machine need not reach the internet.
func (b *box) outside(address string) string {
	b.t.Helper()
	return b.sh(`python3 -c 'import socket
s = socket.socket(); s.settimeout(1)
try:
    s.connect(("` + address + `", 443)); print("reached")
except ConnectionRefusedError: print("refused")
except OSError: print("let through")'`)
}

func (b *box) walls(address, want string) {
	b.t.Helper()
	if got := b.outside(address); (got == "refused") != (want == "refused") {
		b.t.Errorf("%s: %s is %s, not %s", b.name, address, got, want)
	}
}

func (b *box) resolves(name string) bool {
	b.t.Helper()
	// REFUSED is an answer at once; an upstream that is not there is SERVFAIL.
	return b.sh(`python3 -c 'import socket
q = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"".join(bytes([len(l)]) + l for l in b"`+name+`".split(b".")) + b"\0\0\1\0\1"
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(30)
s.sendto(q, ("10.0.2.2", 53)); print(s.recv(4096)[3] & 15)'`) != "5"
}

// N3: a real sandbox's firewall, from inside: at its creation, changed while it runs and
// sleeps, over sleep and wake, stop and resume, and in a fork; and no rule opens what is
// forbidden to all.
func TestFirewall(t *testing.T) {
	t.Parallel()
	const listed, other = "203.0.113.9", "198.51.100.99"
	b := newBox(t, "--allow", listed+",*.example.com")
	check := func(b *box) {
		t.Helper()
		b.walls(listed, "let through")
		b.walls(other, "refused")
		if b.resolves("a.example.org") || !b.resolves("a.example.com") {
			t.Error("names that are not allowed are looked up, or others are not")
		}
	}
	check(b)
	b.hutch("sleep")
	b.hutch("wake")
	check(b)
	fork := b.forks(1)[0]
	check(fork)
	b.hutch("firewall", "set", "--mode", "deny-all")
	b.walls(listed, "refused")
	if b.resolves("a.example.com") {
		t.Error("names are looked up in mode deny-all")
	}
	check(fork)
	b.hutch("sleep")
	b.hutch("firewall", "allow", other)
	b.hutch("wake")
	b.walls(listed, "refused")
	b.walls(other, "let through")
	b.hutch("stop")
	b.hutch("resume")
	b.walls(listed, "refused")
	b.walls(other, "let through")

	b.hutch("firewall", "set", "--mode", "allowlist", "--allow", "0.0.0.0/0,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,169.254.0.0/16,100.64.0.0/10")
	b.walls(listed, "let through")
	fork.furnish()
	b.reachesNothing(t, fork)
	b.hutch("firewall", "reset")
	var now struct {
		Firewall struct{ Mode string }
		Pending  bool
	}
	if out := hutchOK(t, "firewall", b.name, "--json"); json.Unmarshal([]byte(out), &now) != nil || now.Firewall.Mode != "open" {
		t.Errorf("after the reset: %s", out)
	}
	if r, err := shared.try(time.Minute, nil, "firewall", b.name, "allow", "no name"); err == nil || !strings.Contains(r.stderr, "domain name") {
		t.Errorf("a wrong rule: %v %s", err, r.stderr)
	}
}
