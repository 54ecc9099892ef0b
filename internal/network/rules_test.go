package network

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/hutchrun/hutch/internal/sandbox"
)

func egressOf(mode sandbox.FirewallMode, allow, deny []string) sandbox.Egress {
	return sandbox.Firewall{Mode: mode, Allow: allow, Deny: deny}.Egress()
}

// The tables of an example, in nft's language.
func exampleTables() map[string]table {
	forbidden := without(append([]netip.Prefix{DefaultPool, netip.MustParsePrefix("198.51.100.2/32")}, denied...))
	return map[string]table{
		"router.nft": routerTable(forbidden, openRules()).versioned(),
		"open.nft":   routerTable(forbidden, egressOf(sandbox.FirewallOpen, []string{"203.0.113.9", "ok.example.com"}, []string{"203.0.113.0/24", "*.example.com"})),
		"allow.nft":  routerTable(forbidden, egressOf(sandbox.FirewallAllowlist, []string{"203.0.113.0/24", "*.example.com"}, []string{"203.0.113.9"})),
		"deny.nft":   routerTable(forbidden, egressOf(sandbox.FirewallDenyAll, nil, nil)),
		"host.nft":   hostTable("hutch-0a1b2c3d", 0x0a1b2c3d, DefaultPool, []string{"eth0", "wlan0"}, []string{"eth0"}),
	}
}

// N3: the rules read as they should.
func TestRuleLists(t *testing.T) {
	t.Parallel()
	for name, tab := range exampleTables() {
		golden(t, name, tab.String())
	}
}

// The words of a rule and its expressions are written side by side; this proves
// that they say the same: nft loads the words, apply the expressions, and the
// kernel must hold one and the same.
func TestWordsAndExpressionsAgree(t *testing.T) {
	t.Parallel()
	for name, tab := range exampleTables() {
		w := &world{t: t, name: "hnt" + unique()}
		w.space("words")
		ours := w.space("ours")
		file := filepath.Join(t.TempDir(), name)
		must(t, os.WriteFile(file, []byte(tab.String()), 0o600))
		w.run(w.name+"words", "nft", "-f", file)
		must(t, ours.apply(tab))
		must(t, ours.apply(tab)) // and in place of itself
		want, got := w.run(w.name+"words", "nft", "list", "ruleset"), w.run(w.name+"ours", "nft", "list", "ruleset")
		if got != want {
			t.Errorf("%s: the expressions give\n%s\nthe words give\n%s", name, got, want)
		}
	}
}

func TestLastOf(t *testing.T) {
	t.Parallel()
	for prefix, want := range map[string]string{"10.0.0.0/8": "10.255.255.255", "1.2.3.4/32": "1.2.3.4", "224.0.0.0/3": "255.255.255.255", "10.213.0.2/31": "10.213.0.3"} {
		if got := lastOf(netip.MustParsePrefix(prefix)).String(); got != want {
			t.Errorf("%s ends with %s, not %s", prefix, got, want)
		}
	}
}
