package network

import (
	"context"
	"slices"
	"strings"
	"testing"
)

// stock waits until the spares are there and gives the uplinks' names of all networks.
func (w *world) stock(m *Manager, n int) (uplinks []string) {
	w.t.Helper()
	w.eventually("the spares are there", func() bool { return !m.lacksSpare() })
	links, err := m.uplinks()
	must(w.t, err)
	for _, l := range links {
		if strings.Contains(l.Attrs().Alias, sparePrefix) {
			uplinks = append(uplinks, l.Attrs().Name)
		}
	}
	if len(uplinks) != n {
		w.t.Fatalf("%d spares, want %d", len(uplinks), n)
	}
	return uplinks
}

// A network that was made ahead is one like any other, and nobody's until it is given.
func TestSpares(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{Spares: 2})
	port := w.listen(w.internet, ":0", "internet")
	m.wantSpare()
	ready := w.stock(m, 2)
	if ids, err := m.Inventory(context.Background()); err != nil || len(ids) != 0 {
		t.Errorf("spares are in the inventory: %v, %v", ids, err)
	}
	var given []string
	for range 2 {
		id, a := w.attach(m)
		if !slices.Contains(ready, a.Uplink) || a.NetNS != m.path(id, sideGuest) {
			t.Errorf("%+v is none of the spares %v", a, ready)
		}
		given = append(given, a.Uplink)
		w.reaches(w.at(m, id, sideGuest), internetAddr, port, "internet "+hostWAN)
		before := w.fingerprint(m, id)
		again, err := m.Attach(context.Background(), id)
		must(t, err)
		if again != a || w.fingerprint(m, id) != before {
			t.Errorf("a second Attach changed something: %+v, %+v", a, again)
		}
		must(t, m.Detach(context.Background(), id))
	}
	if given[0] == given[1] {
		t.Errorf("one spare was given twice: %v", given)
	}
	w.stock(m, 2) // new ones
	must(t, m.Close())
	next := w.open(Config{Tag: m.cfg.Tag})
	if ids, err := next.inventory(); err != nil || len(ids) != 0 {
		t.Errorf("Close left %v, %v", ids, err)
	}
}

// What an agent that died left of spares is taken away, also when one was half given.
func TestSparesOfADeadAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := Config{Tag: unique()}
	m := w.open(cfg)
	port := w.listen(w.internet, ":0", "internet")
	whole, err := m.makeSpare(context.Background())
	must(t, err)
	half, err := m.makeSpare(context.Background())
	must(t, err)
	id := newID()
	w.forget(cfg.Tag, id)
	w.forget(cfg.Tag, whole.id)
	w.forget(cfg.Tag, half.id)
	must(t, renameSpace(m.path(half.id, sideGuest), m.path(id, sideGuest)))

	m = w.open(cfg) // and m is never closed
	if ids, err := m.inventory(); err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("after the next start there is %v, %v", ids, err)
	}
	_, err = m.Attach(context.Background(), id)
	must(t, err)
	w.reaches(w.at(m, id, sideGuest), internetAddr, port, "internet")
	must(t, m.Detach(context.Background(), id))
	w.clean(m)
}

// A spare that somebody took apart, or whose filter does not know an address that the
// host has got since, is not given.
func TestStaleSpares(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*world, *Manager, spare){
		"no uplink":        func(w *world, m *Manager, s spare) { must(w.t, m.dropUplinks(s.id)) },
		"no namespace":     func(w *world, m *Manager, s spare) { must(w.t, removeSpace(spaceName(m.cfg.Tag, s.id, sideGuest))) },
		"another address":  func(w *world, m *Manager, s spare) { w.address(w.host, "lan0", "192.168.77.1/24") },
		"removed entirely": func(w *world, m *Manager, s spare) { must(w.t, m.dismantle(s.id)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			m := w.open(Config{}) // that makes none by itself, however long this takes
			port := w.listen(w.internet, ":0", "internet")
			s, err := m.makeSpare(context.Background())
			must(t, err)
			w.forget(m.cfg.Tag, s.id)
			m.spares = append(m.spares, s)
			uplink := w.stock(m, 1)[0]
			spoil(w, m, s)
			id, a := w.attach(m)
			if a.Uplink == uplink {
				t.Errorf("the spare was given: %+v", a)
			}
			w.reaches(w.at(m, id, sideGuest), internetAddr, port, "internet")
			must(t, m.Detach(context.Background(), id))
			if ids, err := m.inventory(); err != nil || len(ids) != 0 {
				t.Errorf("left: %v, %v", ids, err)
			}
		})
	}
}
