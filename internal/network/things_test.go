package network

import (
	"context"
	"testing"

	"github.com/vishvananda/netlink"
)

// R10: Peek lists what an instance has in the kernel with its owner and changes
// nothing; Clear removes what is named, and no other sandbox or instance notices.
func TestR10Things(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.open(Config{}), w.open(Config{})
	live, _ := w.attach(a)
	lost, _ := w.attach(a)
	theirs, _ := w.attach(b)
	// What a crash leaves: a namespace alone, and a link that has no name of its own yet.
	half := newID()
	space, _, err := ensureSpace(spaceName(a.cfg.Tag, half, sideRouter))
	must(t, err)
	space.close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group = "hutch00000001", a.group
	must(t, w.host.nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "peer0"}))
	nameless := "hutch-" + a.cfg.Tag + "-NO.ID"
	space, _, err = ensureSpace(nameless)
	must(t, err)
	space.close()

	rules := w.run(w.name+"host", "nft", "list", "ruleset")
	before := w.fingerprint(a, live) + w.fingerprint(b, theirs)
	host, err := openSpace(spacesDir + "/" + w.name + "host")
	must(t, err)
	q, err := peek(a.cfg, host)
	must(t, err)
	defer q.Close()
	things, err := q.Things(t.Context())
	must(t, err)
	counts := map[string]int{}
	for _, thing := range things {
		counts[thing.Kind+" "+thing.Owner]++
		if thing.Owner == "" {
			counts[thing.Kind+" "+thing.Name]++
		}
	}
	want := map[string]int{
		"netns " + live: 2, "netns " + lost: 2, "netns " + half: 1, "netns ": 1, "netns " + spacesDir + "/" + nameless: 1,
		"veth " + live: 1, "veth " + lost: 1, "veth ": 1, "veth hutch00000001": 1, "nftables " + OwnerHost: 1,
	}
	for what, n := range want {
		if counts[what] != n {
			t.Errorf("%s: %d times, not %d", what, counts[what], n)
		}
		delete(counts, what)
	}
	for what := range counts {
		t.Errorf("listed: %s", what)
	}
	if w.run(w.name+"host", "nft", "list", "ruleset") != rules {
		t.Error("a look has changed the rules")
	}
	for range 2 { // what is gone is gone
		for _, thing := range things {
			if thing.Owner != live && thing.Owner != OwnerHost {
				must(t, q.Clear(context.Background(), thing))
			}
		}
	}
	left, err := q.Things(t.Context())
	must(t, err)
	for _, thing := range left {
		if thing.Owner != live && thing.Owner != OwnerHost {
			t.Errorf("left: %+v", thing)
		}
	}
	if w.fingerprint(a, live)+w.fingerprint(b, theirs) != before || w.run(w.name+"host", "nft", "list", "ruleset") != rules {
		t.Error("what is owned was touched")
	}
}
