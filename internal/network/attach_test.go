package network

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// fingerprint is all that a sandbox's network is, to see whether a call touched it.
func (w *world) fingerprint(m *Manager, id string) string {
	w.t.Helper()
	var b strings.Builder
	for _, s := range []side{sideGuest, sideRouter} {
		name := spaceName(m.cfg.Tag, id, s)
		var st unix.Stat_t
		must(w.t, unix.Stat(filepath.Join(spacesDir, name), &st))
		fmt.Fprintln(&b, st.Ino)
		sp := w.at(m, id, s)
		links, err := sp.nl.LinkList()
		must(w.t, err)
		for _, l := range links {
			a := l.Attrs()
			fmt.Fprintln(&b, a.Index, a.Name, a.HardwareAddr, a.ParentIndex, a.Flags, a.OperState)
		}
		for _, args := range [][]string{{"ip", "-o", "addr"}, {"ip", "route"}, {"nft", "-a", "list", "ruleset"}} {
			b.WriteString(w.run(name, args...))
		}
	}
	return b.String()
}

// N3, D: two sandboxes with one address inside work side by side, and reach the
// internet as the host.
func TestTwoSandboxesReachTheInternet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.internet, ":0", "internet")
	for range 2 {
		id, a := w.attach(m)
		if a.Address != Guest || a.Gateway != Gateway || a.NetNS != m.path(id, sideGuest) || !strings.HasPrefix(a.Uplink, "hutch0ad5") {
			t.Errorf("attachment %+v", a)
		}
		w.reaches(w.at(m, id, sideGuest), internetAddr, port, "internet "+hostWAN)
	}
	if logs := w.logs.String(); !strings.Contains(logs, "interface=wan0") || strings.Contains(logs, "lan0") {
		t.Errorf("forwarding must be turned on for wan0 alone, and logged: %s", logs)
	}
	if all, _ := w.host.sysctlOf("ipv4/ip_forward"); all != "0" {
		t.Error("the whole host forwards")
	}
}

// F2: each attach draws a new hardware address.
func TestHardwareAddressesDiffer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, first := w.attach(m)
	_, other := w.attach(m)
	must(t, m.Detach(context.Background(), id))
	second, err := m.Attach(context.Background(), id)
	must(t, err)
	if first.MAC == other.MAC || first.MAC == second.MAC || first.MAC == "" {
		t.Errorf("%s, %s, %s", first.MAC, other.MAC, second.MAC)
	}
}

// S6: Attach of a finished network touches nothing, also when a runtime has taken
// eth0's address away, also from an agent that started anew.
func TestAttachAgainTouchesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := Config{Tag: unique()}
	m := w.open(cfg)
	id, a := w.attach(m)
	g := w.at(m, id, sideGuest)
	eth, err := g.nl.LinkByName(guestLink)
	must(t, err)
	addrs, err := g.nl.AddrList(eth, netlink.FAMILY_V4)
	must(t, err)
	must(t, g.nl.AddrDel(eth, &addrs[0])) // as runsc does
	before := w.fingerprint(m, id)

	again, err := m.Attach(context.Background(), id)
	must(t, err)
	if again != a || w.fingerprint(m, id) != before {
		t.Errorf("a second Attach changed something: before %s after %s", before, w.fingerprint(m, id))
	}
	must(t, m.Close())
	next := w.open(cfg)
	adopted, err := next.Attach(context.Background(), id)
	must(t, err)
	if adopted != a || w.fingerprint(next, id) != before {
		t.Errorf("the next agent changed something: before %s after %s", before, w.fingerprint(next, id))
	}
}

// An agent may die between any two steps: Attach completes what is there, and
// Detach removes it.
func TestHalfMadeStates(t *testing.T) {
	t.Parallel()
	drop := func(s side, link string) func(*world, *Manager, string) {
		return func(w *world, m *Manager, id string) { must(w.t, w.at(m, id, s).dropLink(link)) }
	}
	states := map[string]func(*world, *Manager, string){
		"an empty file for R": func(w *world, m *Manager, id string) {
			must(w.t, m.Detach(context.Background(), id))
			must(w.t, os.WriteFile(m.path(id, sideRouter), nil, 0o444))
		},
		"R alone": func(w *world, m *Manager, id string) {
			drop(sideRouter, innerLink)(w, m, id)
			drop(sideRouter, routerLink)(w, m, id)
			must(w.t, removeSpace(spaceName(m.cfg.Tag, id, sideGuest)))
		},
		"no links": func(w *world, m *Manager, id string) {
			drop(sideRouter, innerLink)(w, m, id)
			drop(sideRouter, routerLink)(w, m, id)
		},
		"no uplink": drop(sideRouter, routerLink),
		"no eth0":   drop(sideGuest, guestLink),
		"gw0 without address": func(w *world, m *Manager, id string) {
			drop(sideRouter, routerLink)(w, m, id)
			r := w.at(m, id, sideRouter)
			gw, err := r.nl.LinkByName(innerLink)
			must(w.t, err)
			addrs, err := r.nl.AddrList(gw, netlink.FAMILY_V4)
			must(w.t, err)
			must(w.t, r.nl.AddrDel(gw, &addrs[0]))
		},
		"uplink without alias": func(w *world, m *Manager, id string) {
			host, err := m.uplinkOf(w.at(m, id, sideRouter), id)
			must(w.t, err)
			must(w.t, m.host.nl.LinkSetAlias(host, "\x00"))
		},
		"G's name is gone": func(w *world, m *Manager, id string) { must(w.t, removeSpace(spaceName(m.cfg.Tag, id, sideGuest))) },
		"R's name is gone, R is held": func(w *world, m *Manager, id string) {
			w.at(m, id, sideRouter)
			must(w.t, removeSpace(spaceName(m.cfg.Tag, id, sideRouter)))
		},
	}
	for name, spoil := range states {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			cfg := Config{Tag: unique()}
			m := w.open(cfg)
			port := w.listen(w.internet, ":0", "internet")
			id, _ := w.attach(m)
			spoil(w, m, id)
			must(t, m.Close())

			m = w.open(cfg)
			if ids, err := m.Inventory(context.Background()); err != nil || !slices.Equal(ids, []string{id}) {
				t.Errorf("inventory %v, %v", ids, err)
			}
			_, err := m.Attach(context.Background(), id)
			must(t, err)
			w.reaches(w.at(m, id, sideGuest), internetAddr, port, "internet")

			spoil(w, m, id)
			for range 2 {
				must(t, m.Detach(context.Background(), id))
			}
			w.clean(m)
		})
	}
}

// clean fails the test if anything of the instance's sandboxes is left.
func (w *world) clean(m *Manager) {
	w.t.Helper()
	if ids, err := m.Inventory(context.Background()); err != nil || len(ids) != 0 {
		w.t.Errorf("left: %v, %v", ids, err)
	}
	links, err := m.uplinks()
	if err != nil || len(links) != 0 {
		w.t.Errorf("uplinks left: %v, %v", links, err)
	}
}

// S6: Detach of nothing, and twice, is success.
func TestDetachTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	must(t, m.Detach(context.Background(), newID()))
	id, _ := w.attach(m)
	must(t, m.Detach(context.Background(), id))
	must(t, m.Detach(context.Background(), id))
	w.clean(m)
}

// Detach cuts a sandbox off at once, even while a process still holds G.
func TestDetachCutsWhatStillRuns(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.internet, ":0", "internet")
	id, _ := w.attach(m)
	g := w.at(m, id, sideGuest)
	w.reaches(g, internetAddr, port, "internet")
	must(t, m.Detach(context.Background(), id))
	w.blocked(g, internetAddr, port)
	w.clean(m)
}

// S4: parallel calls, for many sandboxes and for one, all succeed.
func TestParallelAttach(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	port := w.listen(w.internet, ":0", "internet")
	ids := make([]string, 20)
	made := make([]Attachment, 2*len(ids))
	var wg sync.WaitGroup
	for i := range ids {
		ids[i] = newID()
		w.forget(m.cfg.Tag, ids[i])
	}
	start := time.Now()
	for i := range made {
		wg.Go(func() {
			var err error
			if made[i], err = m.Attach(context.Background(), ids[i%len(ids)]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	t.Logf("20 sandboxes attached in %v", time.Since(start))
	seen := map[string]bool{}
	for i, id := range ids {
		if made[i] != made[i+len(ids)] {
			t.Errorf("two calls for %s gave %+v and %+v", id, made[i], made[i+len(ids)])
		}
		if seen[made[i].Uplink] {
			t.Errorf("two sandboxes have the uplink %s", made[i].Uplink)
		}
		seen[made[i].Uplink] = true
		w.reaches(w.at(m, id, sideGuest), internetAddr, port, "internet")
	}
	slices.Sort(ids)
	if got, err := m.Inventory(context.Background()); err != nil || !slices.Equal(got, ids) {
		t.Errorf("inventory %v, %v; want %v", got, err, ids)
	}
	for _, id := range ids {
		wg.Go(func() {
			if err := m.Detach(context.Background(), id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	w.clean(m)
}

// Two instances with overlapping pools share the slots without an agreement, and a
// full pool is a refusal that says what to do.
func TestFullPool(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.open(Config{Pool: mustPrefix("10.213.7.0/29")}) // four slots
	b := w.open(Config{Pool: mustPrefix("10.213.7.4/30")}) // two of them
	w.attach(b)
	w.attach(a)
	w.attach(a)
	w.attach(a)
	id := newID()
	w.forget(b.cfg.Tag, id)
	_, err := b.Attach(context.Background(), id)
	if !fault.Is(err, fault.NoCapacity) {
		t.Fatalf("a fifth sandbox on four slots: %v", err)
	}
	must(t, b.Detach(context.Background(), id))
}

// A pool in which the host has an address, and other nonsense, is refused.
func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, c := range []struct {
		cfg  Config
		kind fault.Kind
	}{
		{Config{Pool: mustPrefix("192.0.2.0/24")}, fault.FailedPrecondition},
		{Config{Pool: mustPrefix("10.0.2.0/24")}, fault.InvalidArgument},
		{Config{Tag: "zzz"}, fault.InvalidArgument},
		{Config{Tag: "00000000"}, fault.InvalidArgument},
	} {
		if m, err := w.tryOpen(c.cfg); !fault.Is(err, c.kind) {
			if m != nil {
				m.Close()
			}
			t.Errorf("%+v: %v, want %s", c.cfg, err, c.kind)
		}
	}
	m := w.open(Config{})
	if _, err := m.Attach(context.Background(), "../evil"); !fault.Is(err, fault.InvalidArgument) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := m.Attach(ctx, newID()); !fault.Is(err, fault.Cancelled) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
