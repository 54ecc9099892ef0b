package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Rules gives the rules that a sandbox is to have at the time of the call.
type Rules func() sandbox.Egress

// openRules are those of a sandbox that has none.
func openRules() sandbox.Egress { return sandbox.Egress{Mode: sandbox.FirewallOpen} }

// wall is what is remembered of a sandbox's rules beside the kernel's table: what names
// have opened, and what goes through the proxy. A wall that nobody has set lets nothing
// through.
type wall struct {
	mu     sync.Mutex
	egress sandbox.Egress
	named  map[netip.Addr]lease
	proxy  *proxy // nil where no rule depends on names
}

// lease says until when a name opens an address.
type lease struct {
	name  string
	until time.Time
}

// left is what is left of it, at least a moment: the kernel takes 0 for ever.
func (l lease) left() time.Duration { return max(time.Until(l.until), 10*time.Millisecond) }

// wallOf gives the wall of a sandbox.
func (m *Manager) wallOf(id string) *wall {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.walls[id]
	if w == nil {
		w = &wall{egress: sandbox.Egress{Mode: sandbox.FirewallDenyAll}, named: map[netip.Addr]lease{}}
		m.walls[id] = w
	}
	return w
}

// rules are those that hold.
func (w *wall) rules() sandbox.Egress {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.egress
}

func (w *wall) close() {
	w.mu.Lock()
	p := w.proxy
	w.proxy = nil
	w.mu.Unlock()
	if p != nil {
		p.close()
	}
}

// SetEgress gives a sandbox the rules that it is to have, at once, also for what is
// established. Where that fails the sandbox reaches nothing until it succeeds. One that
// has no network gets its rules with it (AttachTo).
func (m *Manager) SetEgress(ctx context.Context, id string, rules Rules) error {
	done, err := m.turn(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	if err := m.enforce(id, rules()); err != nil && !errors.Is(err, errNoSpace) {
		return m.failed(err, "the firewall of "+id+" could not be changed, and it reaches nothing until it can")
	}
	return nil
}

// enforce is SetEgress in the sandbox's turn.
func (m *Manager) enforce(id string, e sandbox.Egress) error {
	r, err := openSpace(m.path(id, sideRouter))
	if err != nil {
		return err
	}
	defer r.close()
	w := m.wallOf(id)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := m.install(r, w, e); err != nil {
		w.egress = sandbox.Egress{Mode: sandbox.FirewallDenyAll}
		w.proxy.cut(w.egress)
		m.log.Error("a firewall could not be changed; the sandbox reaches nothing now", "sandbox", id, "err", err)
		return errors.Join(err, shut(r))
	}
	w.egress = e
	w.proxy.cut(e)
	return nil
}

// install puts the table for e into R, unless it is there.
func (m *Manager) install(r *space, w *wall, e sandbox.Egress) error {
	own, err := m.hostAddresses()
	if err != nil {
		return err
	}
	if e.Named() && w.proxy == nil {
		if w.proxy, err = m.listenProxy(r, w); err != nil {
			return err
		}
	}
	t := routerTable(m.forbidden(own), e).versioned()
	there, err := r.hasSet(t.name, t.sets[len(t.sets)-1].name)
	if err != nil {
		return err
	}
	if !there {
		for a, l := range w.named {
			if !e.Opens(l.name) || time.Now().After(l.until) {
				delete(w.named, a)
			}
		}
		for i := range t.sets {
			if t.sets[i].ofTimed {
				t.sets[i].timed = map[netip.Addr]time.Duration{}
				for a, l := range w.named {
					t.sets[i].timed[a] = l.left()
				}
			}
		}
		if err := m.apply(r, t); err != nil {
			return err
		}
	}
	return reopen(r)
}

// forbidden is where no sandbox of this host may go.
func (m *Manager) forbidden(own []netip.Prefix) []netip.Prefix {
	return without(append(append([]netip.Prefix{m.cfg.Pool}, denied...), own...))
}

// versioned adds an empty set whose name follows from all else in the table, so that the
// kernel says which table it has.
func (t table) versioned() table {
	sum := sha256.Sum256([]byte(t.String()))
	t.sets = append(t.sets[:len(t.sets):len(t.sets)], set{name: "version_" + hex.EncodeToString(sum[:8])})
	return t
}

// hasSet says whether a table has a set of a name.
func (s *space) hasSet(tab, name string) (bool, error) {
	c, err := s.nftables()
	if err != nil {
		return false, fmt.Errorf("open nftables: %w", err)
	}
	_, err = c.GetSetByName(&nftables.Table{Name: tab, Family: nftables.TableFamilyINet}, name)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the nftables set %s of %s: %w", name, tab, err)
	}
	return true, nil
}

// shut takes the way out away without the help of nftables.
func shut(r *space) error {
	up, err := r.link(routerLink)
	if err != nil || up == nil {
		return err
	}
	return r.nl.LinkSetDown(up)
}

// reopen is the reverse of shut; there is nothing to do where the way is open.
func reopen(r *space) error {
	up, err := r.link(routerLink)
	if err != nil || up == nil || up.Attrs().Flags&net.FlagUp != 0 {
		return err
	}
	addrs, err := r.addresses(up)
	if err != nil {
		return err
	}
	if len(addrs) != 1 || addrs[0].IP.To4() == nil {
		return fmt.Errorf("%s has %d addresses", routerLink, len(addrs))
	}
	host := netip.AddrFrom4([4]byte(addrs[0].IP.To4())).Prev() // of the pair, the first (slotAt)
	if err := r.nl.LinkSetUp(up); err != nil {
		return err
	}
	return r.nl.RouteReplace(&netlink.Route{LinkIndex: up.Attrs().Index, Gw: host.AsSlice()})
}

// errFull says that names have opened as many addresses as they may.
var errFull = fault.New(fault.NoCapacity, "names have opened %d addresses, which is the most", maxNamed)

// open lets connections go to the addresses of a name, from the return of the call on.
func (w *wall) open(r *space, name string, addrs map[netip.Addr]time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.egress.Opens(name) {
		return nil // by now
	}
	now, leases := time.Now(), map[netip.Addr]lease{}
	for a, d := range addrs {
		l := lease{name, now.Add(d)}
		if old, ok := w.named[a]; ok && old.until.After(l.until) {
			l.until = old.until // another name's may last longer
		}
		leases[a] = l
	}
	for a, l := range w.named {
		if now.After(l.until) {
			delete(w.named, a)
		}
	}
	if len(w.named)+len(leases) > maxNamed {
		return errFull
	}
	if err := r.open(leases); err != nil {
		return err
	}
	for a, l := range leases {
		w.named[a] = l
	}
	return nil
}
