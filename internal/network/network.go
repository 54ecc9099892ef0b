// Package network gives each sandbox a network of its own on a shared machine.
//
// A sandbox has two network namespaces. G belongs to the guest: it holds eth0 with
// the same address in every sandbox, and the runtime gets it whole (gVisor takes
// every interface that is up in its namespace over into its own stack, see
// runsc/sandbox/network.go, so nothing else may be in G). R is the sandbox's
// router: it masquerades, filters, and is where the host agent opens its sockets
// to the guest and answers DNS. The way out of R is a veth pair to the host.
//
//	G: eth0 10.0.2.15 ── gw0 10.0.2.2 :R: up0 10.213.x.y ── hutch0ad5xxyy :host ── egress
//
// The kernel is the only record: namespaces are named after instance and sandbox,
// uplinks carry both (link group and alias), so an agent that was killed finds all
// of it again, finished or half made, and no file can disagree with it.
package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Config says what Open needs.
type Config struct {
	// Tag tells hutch instances on one machine apart: 8 hex digits in lower case,
	// not all zero, constant for an installation.
	Tag string
	// Pool is where uplinks get their addresses, two a sandbox; zero is DefaultPool.
	Pool netip.Prefix
	// Upstream are the DNS servers that answer for sandboxes; empty takes the
	// host's own from resolv.conf and follows its changes.
	Upstream []netip.AddrPort
	// Egress names interfaces through which sandboxes may leave beside those that
	// carry a default route.
	Egress []string
	// Spares is how many networks are kept ready for sandboxes to come.
	Spares int
	// Log gets what changes on the host; nil discards.
	Log *slog.Logger
}

// Manager owns the networks of one instance on this machine. Its methods may be
// called from many goroutines at once; calls for one sandbox wait for each other.
type Manager struct {
	cfg   Config
	group uint32 // the link group of this instance's uplinks
	host  *space // the namespace that the uplinks lead to
	log   *slog.Logger
	dns   *forwarder

	peeked  bool            // see Peek
	lasts   context.Context // ends with the Manager
	stop    context.CancelFunc
	running sync.WaitGroup

	asked chan struct{}             // somebody has asked for a network
	apply func(*space, table) error // of R's table; tests make it fail

	mu      sync.Mutex // guards the five below; never held across I/O
	turns   map[string]chan struct{}
	servers map[string]*dnsServer
	walls   map[string]*wall
	spares  []spare // ready and nobody's, oldest first
	closed  bool

	table sync.Mutex // makes writers of the host's table take turns; guards the two below
	// opened are the interfaces on which hutch turned forwarding on.
	opened []string
	// egress is what the host's table holds now; nil before the first settle.
	egress []string
}

// settlePeriod is how often the host's table and default routes are looked at.
const settlePeriod = 5 * time.Second

// Open takes up the networks of an instance: it checks the pool, makes or repairs
// the instance's table on the host, and turns forwarding on for the interfaces
// that carry a default route (for those alone, and the log says so). It changes
// nothing that belongs to a sandbox. Attach each running sandbox afterwards, so
// that its DNS answers again.
func Open(ctx context.Context, cfg Config) (*Manager, error) {
	host, err := openSpace("/proc/self/ns/net")
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the host's network cannot be read; hutch needs root")
	}
	return open(ctx, cfg, host)
}

// open is Open with a namespace that stands for the host.
func open(ctx context.Context, cfg Config, host *space) (m *Manager, err error) {
	defer func() {
		if err != nil {
			host.close()
		}
	}()
	m, err = prepare(ctx, cfg, host)
	if err != nil {
		return nil, err
	}
	for _, step := range []func() error{prepareSpacesDir, m.checkPool, m.sweep, m.dropSpares, m.recall, m.settle} {
		if err := errors.Join(ctx.Err(), step()); err != nil {
			m.stop()
			return nil, m.failed(err, "the host's network could not be prepared; hutch doctor shows what is missing")
		}
	}
	m.running.Go(func() { m.watch(m.lasts) })
	if cfg.Spares > 0 {
		m.running.Go(func() { m.keepSpares(m.lasts) })
	}
	return m, nil
}

// prepare makes a Manager that has touched nothing yet.
func prepare(ctx context.Context, cfg Config, host *space) (*Manager, error) {
	if cfg.Pool == (netip.Prefix{}) {
		cfg.Pool = DefaultPool
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	group, err := groupOf(cfg.Tag)
	if err == nil {
		err = validPool(cfg.Pool)
	}
	if err != nil {
		return nil, fault.New(fault.InvalidArgument, "%s", err)
	}
	lasts, stop := context.WithCancel(context.WithoutCancel(ctx))
	return &Manager{
		cfg: cfg, group: group, host: host, log: cfg.Log, lasts: lasts, stop: stop,
		dns:     newForwarder(cfg.Upstream),
		turns:   map[string]chan struct{}{},
		servers: map[string]*dnsServer{},
		walls:   map[string]*wall{},
		apply:   (*space).apply,
		asked:   make(chan struct{}, 1),
	}, nil
}

// watch repairs the host's side until ctx ends: a default route that moved, a
// ruleset that somebody flushed.
func (m *Manager) watch(ctx context.Context) {
	tick := time.NewTicker(settlePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := m.settle(); err != nil {
				m.log.Error("the host's network rules could not be repaired", "err", err)
			}
		}
	}
}

// Close stops DNS and the watch, takes the spares away and leaves every sandbox's
// network as it is, so sandboxes live on. It is called when no other call runs.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.closed = true
	servers, walls := m.servers, m.walls
	m.servers, m.walls = map[string]*dnsServer{}, map[string]*wall{}
	m.mu.Unlock()
	m.stop()
	for _, w := range walls {
		w.close()
	}
	for _, s := range servers {
		s.close()
	}
	m.running.Wait()
	var err error
	if !m.peeked { // else they are another process's
		err = m.dropSpares()
	}
	m.host.close()
	return err
}

// Inventory lists the sandboxes of this instance that have anything left in the
// kernel: a namespace, or an uplink.
func (m *Manager) Inventory(ctx context.Context) ([]string, error) {
	ids, err := m.inventory()
	if err != nil {
		return nil, err
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return strings.HasPrefix(id, sparePrefix) })
	return ids, ctx.Err()
}

// inventory is Inventory with the spares.
func (m *Manager) inventory() ([]string, error) {
	found := map[string]bool{}
	entries, err := os.ReadDir(spacesDir)
	if err != nil {
		return nil, m.failed(err, "the list of network namespaces could not be read")
	}
	for _, e := range entries {
		if id, ok := idOfSpace(m.cfg.Tag, e.Name()); ok {
			found[id] = true
		}
	}
	links, err := m.uplinks()
	if err != nil {
		return nil, m.failed(err, "the list of network interfaces could not be read")
	}
	for _, l := range links {
		if id, ok := idOfAlias(m.cfg.Tag, l.Attrs().Alias); ok {
			found[id] = true
		}
	}
	ids := make([]string, 0, len(found))
	for id := range found {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids, nil
}

// Remove takes the instance's table off the host and turns forwarding off again
// where hutch turned it on, unless another program or another instance needs it by
// now. It is refused while a sandbox has a network. Only Close may follow.
func (m *Manager) Remove(ctx context.Context) error {
	ids, err := m.Inventory(ctx)
	if err != nil {
		return err
	}
	if len(ids) > 0 {
		return fault.New(fault.FailedPrecondition,
			"the network rules cannot be removed: %d sandboxes still have a network (%s first); delete them, then try again", len(ids), ids[0]).
			Because("sandboxes_left")
	}
	m.stop()
	m.running.Wait()
	if err := m.dropSpares(); err != nil {
		return m.failed(err, "networks that were kept ready could not be taken away")
	}
	m.table.Lock()
	defer m.table.Unlock()
	if err := m.closeForwarding(); err != nil {
		return m.failed(err, "forwarding could not be turned off again")
	}
	if err := m.host.dropTable(tableName(m.cfg.Tag)); err != nil {
		return m.failed(err, "the network rules could not be removed")
	}
	m.egress = nil
	return nil
}

// Diagnose says in sentences what would keep sandboxes from the internet, for
// hutch doctor. An empty list is good news.
func (m *Manager) Diagnose(ctx context.Context) ([]string, error) {
	var found []string
	egress, err := m.findEgress()
	if err != nil {
		return nil, m.failed(err, "the routes could not be read")
	}
	if len(egress) == 0 {
		found = append(found, "this machine has no default route, so sandboxes reach no network; set one, or name an interface in the config")
	}
	chains, err := m.host.droppers()
	if err != nil {
		return nil, m.failed(err, "the firewall could not be read")
	}
	for _, c := range chains {
		found = append(found, fmt.Sprintf("the firewall chain %q drops forwarded packets, and hutch cannot overrule it; let it accept what comes from hutch+ "+
			"and the answers to it: iptables -I FORWARD -i hutch+ -j ACCEPT; iptables -I FORWARD -o hutch+ -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT "+
			"(with Docker into DOCKER-USER instead of FORWARD)", c))
	}
	return found, ctx.Err()
}

// uplinks lists the host's ends of this instance's uplinks.
func (m *Manager) uplinks() ([]netlink.Link, error) {
	all, err := m.host.links()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(l netlink.Link) bool { return l.Attrs().Group != m.group }), nil
}

// turn waits until no other call works on this sandbox and gives the function that
// ends the turn.
func (m *Manager) turn(ctx context.Context, id string) (func(), error) {
	if err := validID(id); err != nil {
		return nil, fault.New(fault.InvalidArgument, "%s", err)
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, m.failed(err, "the network of "+id+" is busy")
		}
		m.mu.Lock()
		busy, taken := m.turns[id]
		if !taken {
			mine := make(chan struct{})
			m.turns[id] = mine
			m.mu.Unlock()
			return func() {
				m.mu.Lock()
				delete(m.turns, id)
				m.mu.Unlock()
				close(mine)
			}, nil
		}
		m.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
	}
}

// failed gives an error its kind: a fault stays what it is, the end of a context
// is the caller's, the rest is internal.
func (m *Manager) failed(err error, message string) error {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	kind := fault.Internal
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.EAGAIN):
		kind = fault.DeadlineExceeded // the last two: no answer over netlink, see kernelAnswer
	case errors.Is(err, context.Canceled):
		kind = fault.Cancelled
	case errors.Is(err, net.ErrClosed):
		kind = fault.Unavailable
	}
	return fault.Wrap(err, kind, "%s", message)
}
