package network

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"golang.org/x/sys/unix"
)

// The host agent reaches a listener in the guest, two at once, and nobody else's.
func TestDial(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	a, _ := w.attach(m)
	b, _ := w.attach(m)
	pa := w.listen(w.at(m, a, sideGuest), ":4000", "a")
	pb := w.listen(w.at(m, b, sideGuest), ":4000", "b")
	var wg sync.WaitGroup
	for id, c := range map[string]struct {
		port int
		want string
	}{a: {pa, "a " + Gateway.String()}, b: {pb, "b " + Gateway.String()}} {
		for range 20 {
			wg.Go(func() {
				conn, err := m.Dial(context.Background(), id, c.port)
				if err != nil {
					t.Error(err)
					return
				}
				defer conn.Close()
				if got, err := io.ReadAll(conn); err != nil || string(got) != c.want {
					t.Errorf("%q, %v; want %q", got, err, c.want)
				}
			})
		}
	}
	wg.Wait()
}

func TestDialFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, _ := w.attach(m)
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	if _, err := m.Dial(context.Background(), id, 1); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := m.Dial(context.Background(), newID(), 1); !fault.Is(err, fault.NotFound) {
		t.Errorf("no such sandbox: %v", err)
	}
	for _, port := range []int{-1, 0, 65536} {
		if _, err := m.Dial(context.Background(), id, port); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("port %d: %v", port, err)
		}
	}
	// A guest that swallows packets, as one that is paused does.
	g := w.at(m, id, sideGuest)
	w.run(spaceName(m.cfg.Tag, id, sideGuest), "nft", "add table ip mute; add chain ip mute in { type filter hook input priority 0; policy drop; }")
	start := time.Now()
	if _, err := m.Dial(short(), id, 4001); !fault.Is(err, fault.DeadlineExceeded) || time.Since(start) > 2*time.Second {
		t.Errorf("a mute guest: %v after %v", err, time.Since(start))
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := m.Dial(ctx, id, 4001); !fault.Is(err, fault.Cancelled) {
		t.Errorf("cancelled: %v", err)
	}
	// One without an interface, as before the runtime is up.
	must(t, g.nl.LinkSetDown(mustLink(t, g, guestLink)))
	if _, err := m.Dial(short(), id, 4001); !fault.Is(err, fault.DeadlineExceeded) {
		t.Errorf("a guest that is not up: %v", err)
	}
}

// A guest that comes up while the agent dials is reached soon after, not when the
// kernel repeats its packet: neither the first of TCP nor the first of ARP.
func TestDialReachesALateGuest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ down, up []string }{
		"swallows": {
			[]string{"nft", "add table ip mute; add chain ip mute in { type filter hook input priority 0; policy drop; }"},
			[]string{"nft", "delete table ip mute"},
		},
		"no ARP": {
			[]string{"ip", "link", "set", guestLink, "arp", "off"},
			[]string{"ip", "link", "set", guestLink, "arp", "on"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			m := w.open(Config{})
			id, _ := w.attach(m)
			g, r := w.at(m, id, sideGuest), w.at(m, id, sideRouter)
			port := w.listen(g, ":0", "late")
			w.run(spaceName(m.cfg.Tag, id, sideGuest), c.down...)
			before := mustLink(t, r, innerLink).Attrs().Statistics.TxPackets
			reached := make(chan time.Time, 1)
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			go func() {
				conn, err := m.Dial(ctx, id, port)
				if err != nil {
					t.Error(err)
				} else {
					conn.Close()
				}
				reached <- time.Now()
			}()
			w.eventually("a first packet", func() bool {
				return mustLink(t, r, innerLink).Attrs().Statistics.TxPackets > before
			})
			w.run(spaceName(m.cfg.Tag, id, sideGuest), c.up...)
			up := time.Now()
			if late := (<-reached).Sub(up); late > 700*time.Millisecond {
				t.Errorf("reached %v after the guest was up", late)
			}
		})
	}
}

// Calls that wait hold no threads and leave none in a wrong namespace.
func TestDialLeavesThreadsAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, _ := w.attach(m)
	for range 50 {
		m.Dial(context.Background(), id, 1)
	}
	var here unix.Stat_t
	must(t, unix.Stat("/proc/self/ns/net", &here))
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			var there unix.Stat_t
			if unix.Stat("/proc/thread-self/ns/net", &there) == nil && here.Ino != there.Ino {
				t.Error("a goroutine runs in another namespace")
			}
		})
	}
	wg.Wait()
}
