package network

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		must(t, os.MkdirAll("testdata", 0o755))
		must(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	must(t, err)
	if got != string(want) {
		t.Errorf("%s differs; with -update it is written anew. Got:\n%s", path, got)
	}
}

func TestSlots(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pool         string
		n            uint32
		host, router string
		link         string
	}{
		{"10.213.0.0/16", 0, "10.213.0.0", "10.213.0.1", "hutch0ad50000"},
		{"10.213.0.0/16", 1, "10.213.0.2", "10.213.0.3", "hutch0ad50002"},
		{"10.213.0.0/16", 32767, "10.213.255.254", "10.213.255.255", "hutch0ad5fffe"},
		{"192.168.9.4/30", 1, "192.168.9.6", "192.168.9.7", "hutchc0a80906"},
	} {
		s := slotAt(netip.MustParsePrefix(c.pool), c.n)
		if s.host.String() != c.host || s.router.String() != c.router || s.link() != c.link {
			t.Errorf("slot %d of %s: %v %s, want %s %s %s", c.n, c.pool, s, s.link(), c.host, c.router, c.link)
		}
	}
	if n := slots(DefaultPool); n != 32768 {
		t.Errorf("the default pool has %d slots", n)
	}
}

// Every slot of every pool is inside the pool, has a name that the kernel accepts
// and shares no address with another.
func TestSlotsNeverMeet(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.IntRange(8, 30).Draw(t, "bits")
		raw := rapid.Uint32().Draw(t, "base")
		pool := netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(raw >> 24), byte(raw >> 16), byte(raw >> 8), byte(raw)}), bits).Masked()
		a := rapid.Uint32Range(0, slots(pool)-1).Draw(t, "a")
		b := rapid.Uint32Range(0, slots(pool)-1).Draw(t, "b")
		x, y := slotAt(pool, a), slotAt(pool, b)
		if !pool.Contains(x.host) || !pool.Contains(x.router) || len(x.link()) > 15 {
			t.Fatalf("slot %d of %s: %v %s", a, pool, x, x.link())
		}
		if a != b && (x.host == y.host || x.host == y.router || x.router == y.router || x.link() == y.link()) {
			t.Fatalf("slots %d and %d of %s meet: %v %v", a, b, pool, x, y)
		}
	})
}

// The kernel is the only record, so names must lead back to the sandbox, and never
// to another instance's.
func TestNamesAreReversible(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching(`[a-z0-9_]{1,64}`).Draw(t, "id")
		tag := rapid.StringMatching(`[0-9a-f]{8}`).Draw(t, "tag")
		other := rapid.StringMatching(`[0-9a-f]{8}`).Filter(func(s string) bool { return s != tag }).Draw(t, "other")
		for _, s := range []side{sideGuest, sideRouter} {
			name := spaceName(tag, id, s)
			if got, ok := idOfSpace(tag, name); !ok || got != id {
				t.Fatalf("%s gives %q, %v", name, got, ok)
			}
			if _, ok := idOfSpace(other, name); ok {
				t.Fatalf("%s is taken for one of %s", name, other)
			}
			if len(name) > 255 {
				t.Fatalf("%s is too long for a file name", name)
			}
		}
		if got, ok := idOfAlias(tag, aliasOf(tag, id)); !ok || got != id {
			t.Fatalf("the alias gives %q, %v", got, ok)
		}
		if _, ok := idOfAlias(other, aliasOf(tag, id)); ok {
			t.Fatal("the alias is taken for another instance's")
		}
	})
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "a-b", "../x", "A", "a/b", "a.b", "a b", string(make([]byte, 65))} {
		if validID(id) == nil {
			t.Errorf("id %q passes", id)
		}
	}
	for _, tag := range []string{"", "00000000", "0123456", "012345678", "0123456G", "ABCDEF01"} {
		if _, err := groupOf(tag); err == nil {
			t.Errorf("tag %q passes", tag)
		}
	}
	for _, pool := range []string{"10.213.0.1/16", "10.0.0.0/7", "10.213.0.0/31", "10.0.0.0/8", "10.0.2.0/28", "fd00::/64"} {
		if validPool(netip.MustParsePrefix(pool)) == nil {
			t.Errorf("pool %s passes", pool)
		}
	}
	if err := validPool(DefaultPool); err != nil {
		t.Error(err)
	}
}

// N3: what is not the public internet is on the list, the public internet is not.
func TestDeniedRanges(t *testing.T) {
	t.Parallel()
	in := func(s string) bool {
		for _, p := range denied {
			if p.Contains(netip.MustParseAddr(s)) {
				return true
			}
		}
		return false
	}
	for _, s := range append([]string{"0.0.0.1", "10.213.4.4", "127.0.0.53", "172.31.255.255", "224.0.0.251", "239.1.1.1", "240.0.0.1", "255.255.255.255"}, private...) {
		if !in(s) {
			t.Errorf("%s is not denied", s)
		}
	}
	for _, s := range []string{"1.1.1.1", "8.8.8.8", "11.0.0.1", "100.63.0.1", "100.128.0.1", "172.15.0.1", "172.32.0.1", "192.169.0.1", "223.255.255.255", internetAddr} {
		if in(s) {
			t.Errorf("%s is denied", s)
		}
	}
}

// An interval set refuses what overlaps.
func TestWithoutOverlaps(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOf(rapid.Custom(func(t *rapid.T) netip.Prefix {
			a := rapid.SampledFrom([]byte{10, 127, 203}).Draw(t, "a")
			b := rapid.Byte().Draw(t, "b")
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{a, 0, b, b}), rapid.IntRange(8, 32).Draw(t, "bits")).Masked()
		})).Draw(t, "list")
		kept := without(list)
		for i, p := range kept {
			for _, q := range kept[i+1:] {
				if p.Overlaps(q) {
					t.Fatalf("%s and %s of %v overlap", p, q, kept)
				}
			}
		}
		for _, p := range list {
			found := false
			for _, q := range kept {
				found = found || q.Bits() <= p.Bits() && q.Contains(p.Addr())
			}
			if !found {
				t.Fatalf("%s got lost in %v", p, kept)
			}
		}
	})
}
