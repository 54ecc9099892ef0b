// Package control is the use cases of hutch: what a caller may ask, decided and
// written down in one transaction each, then handed to a host. It knows neither HTTP
// nor drivers.
//
// The order is always the same: read the rows, let sandbox.Admit decide, write the
// sandbox, its operation and the events, commit, and only then tell the host. What
// dies in between is repaired by Start and by the reconciler, which hand every active
// operation to its host again; hosts take repeats without harm. What the host reports
// is applied once, in its order, by Report.
package control

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"go.jetify.com/typeid"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/webhook"
)

// Config is what a Control works with. Store and Hosts are needed, the rest has
// defaults.
type Config struct {
	Store  store.Store
	Hosts  map[string]hostproto.Host // by id
	Now    func() time.Time          // time.Now
	Log    *slog.Logger              // nothing is logged
	Limits Limits                    // DefaultLimits, field by field
	// Shared says that other servers work on the same Store. What they admit for a host
	// that is connected here is handed to it from here, and what is admitted here for
	// other hosts is theirs.
	Shared bool
	// Webhooks says where webhooks may go, how they are tried, and what they are sent as;
	// its other fields are filled in here.
	Webhooks webhook.Config
	// NewID makes an id of a kind ("sbx", "op", "key"): the prefix, "_" and 26
	// characters that sort by time.
	NewID func(prefix string) string
}

// Control carries out the use cases. Its methods are safe for use from any goroutine,
// also before Start: what they admit is handed to the hosts once it has started.
type Control struct {
	store  store.Store
	hosts  map[string]hostproto.Host
	now    func() time.Time
	log    *slog.Logger
	limits Limits
	shared bool
	newID  func(prefix string) string
	pick   func(n int) int // a random number below n, for generated names

	lanes     *lanes
	progress  *progress
	waiters   *waiters
	builds    *builds
	inventory *inventory
	uses      *uses
	feed      *feed
	webhooks  *webhook.Deliverer
	clocks    *clocks
	leasing   sync.Mutex // one renewal of leases at a time
	rates     *rates
	budgets   *budgets

	mu   sync.Mutex // guards stop and done
	stop context.CancelCauseFunc
	done sync.WaitGroup
}

var _ hostproto.Reporter = (*Control)(nil)

// New makes a Control. It does nothing by itself until Start.
func New(cfg Config) *Control {
	c := &Control{
		store: cfg.Store, hosts: cfg.Hosts, now: cfg.Now, log: cfg.Log,
		limits: cfg.Limits.withDefaults(), shared: cfg.Shared, newID: cfg.NewID, pick: rand.IntN,
	}
	if c.now == nil {
		c.now = time.Now
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.newID == nil {
		c.newID = func(prefix string) string { return typeid.Must(typeid.WithPrefix(prefix)).String() }
	}
	c.lanes = newLanes(c)
	c.progress = newProgress()
	c.waiters = newWaiters()
	c.builds = newBuilds()
	c.inventory = &inventory{seen: map[string]bool{}}
	c.clocks = &clocks{ahead: map[string]time.Duration{}}
	c.uses = &uses{written: map[string]time.Time{}, pending: map[string]time.Time{}}
	c.feed = newFeed()
	cfg.Webhooks.Store, cfg.Webhooks.Log, cfg.Webhooks.NewID = c.store, c.log, c.newID
	c.webhooks = webhook.New(cfg.Webhooks)
	c.rates = newRates()
	c.budgets = newBudgets()
	return c
}

// errClosed is the cause of the contexts that Close ends.
var errClosed = errors.New("control: closed")

// Start hands every active operation to its host and begins to reconcile. It returns
// when the store has been read once; it does not wait for hosts.
func (c *Control) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop != nil {
		return nil
	}
	after, err := c.store.LastEvent(ctx)
	if err != nil {
		return err
	}
	if err := c.meterFound(ctx); err != nil {
		return err
	}
	if err := c.ensureSigningKey(ctx); err != nil {
		return err
	}
	run, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	c.stop = stop
	c.lanes.start(run)
	c.builds.start(run)
	c.feed.start(after)
	c.webhooks.Start(run)
	c.done.Go(func() { c.watch(run, after) })
	c.done.Go(func() { c.flushLoop(run) })
	c.done.Go(func() { c.reconcileLoop(run) })
	c.done.Go(func() { c.pruneLoop(run) })
	for id := range c.hosts {
		c.done.Go(func() { c.timersLoop(run, id) })
		c.done.Go(func() { c.leasesLoop(run, id) })
	}
	c.done.Go(func() { c.budgetLoop(run) })
	return nil
}

// Close ends everything that Start began and waits for it. Operations go on at their
// hosts; what the hosts report meanwhile they report again. The store stays open.
func (c *Control) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop == nil {
		return
	}
	c.stop(errClosed)
	c.done.Wait()
	c.webhooks.Close()
	c.feed.stop()
	c.lanes.wait()
	c.builds.wait()
	c.waiters.releaseAll()
	c.stop = nil
}

// instant is now as the store keeps it: UTC, whole milliseconds.
func (c *Control) instant() time.Time { return c.now().UTC().Truncate(time.Millisecond) }

// host gives the host that a sandbox is on.
func (c *Control) host(id string) (hostproto.Host, error) {
	h, ok := c.hosts[id]
	if !ok {
		return nil, fault.New(fault.Unavailable, "the host %s is not connected to this server; check the host, or ask the server that it is connected to", id).After(c.limits.ReconcileEvery)
	}
	return h, nil
}

// Sleep saves memory and disk of a ready sandbox and gives its memory back.
func (c *Control) Sleep(ctx context.Context, a Actor, ref string, idem Idempotency) (Result, error) {
	return c.verb(ctx, a, ref, sandbox.Request{Verb: sandbox.Sleep}, idem)
}

// Wake brings a sleeping sandbox back in memory. Any number of wakes at a time join
// one operation.
func (c *Control) Wake(ctx context.Context, a Actor, ref string, idem Idempotency) (Result, error) {
	return c.WakeFor(ctx, a, ref, TTL{}, idem)
}

// WakeFor is Wake with another auto-stop, where ttl gives one.
func (c *Control) WakeFor(ctx context.Context, a Actor, ref string, ttl TTL, idem Idempotency) (Result, error) {
	return c.boot(ctx, a, ref, sandbox.Wake, ttl, idem)
}

// Stop ends a sandbox's programs and saves its disk.
func (c *Control) Stop(ctx context.Context, a Actor, ref string, idem Idempotency) (Result, error) {
	return c.verb(ctx, a, ref, sandbox.Request{Verb: sandbox.Stop}, idem)
}

// Resume boots a stopped or failed sandbox on its disk; a sleeping one it wakes.
func (c *Control) Resume(ctx context.Context, a Actor, ref string, idem Idempotency) (Result, error) {
	return c.ResumeFor(ctx, a, ref, TTL{}, idem)
}

// ResumeFor is Resume with another auto-stop, where ttl gives one.
func (c *Control) ResumeFor(ctx context.Context, a Actor, ref string, ttl TTL, idem Idempotency) (Result, error) {
	return c.boot(ctx, a, ref, sandbox.Resume, ttl, idem)
}
