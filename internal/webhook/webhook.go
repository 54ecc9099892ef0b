// Package webhook sends events to the addresses that projects name (SPEC H2). It signs
// them by the Standard Webhooks scheme, guards where they may go, and decides when an
// attempt is repeated, in which order, and when a delivery is given up.
//
// An event becomes one delivery for each webhook that wants it, with an id that never
// changes. Deliveries of one webhook and sandbox go one after the other; a delivery is
// sent at least once or is marked as failed, after 3 days of tries. It is sent twice
// where its answer was lost, or where a server died between the attempt and its record:
// receivers drop what they have seen by the id. What runs where is in the store: a
// server holds a lease on what it sends, and any number of servers may deliver at once.
package webhook

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// Storage is what a Deliverer works on.
type Storage interface {
	store.Webhooks
	Events(ctx context.Context, f store.EventFilter) ([]store.Event, error)
	LastEvent(ctx context.Context) (int64, error)
	Committed() <-chan struct{}
}

// Config is what a Deliverer works with. Store is needed, the rest has defaults.
type Config struct {
	Store  Storage
	Policy Policy
	Limits Limits
	Agent  string       // the User-Agent; "hutch"
	Log    *slog.Logger // nothing is logged
	// NewID makes the id of an event: the prefix, "_" and what is unique.
	NewID func(prefix string) string
}

// Deliverer makes deliveries of events and sends them. Its methods are safe for use from
// any goroutine; Replay works without Start too.
type Deliverer struct {
	store  Storage
	limits Limits
	log    *slog.Logger
	sender *sender
	send   func(ctx context.Context, c store.ClaimedDelivery) result
	chance func() float64 // in [0, 1)
	newID  func(prefix string) string

	nudged chan struct{}

	mu    sync.Mutex // guards stop, places and those in it
	stop  context.CancelCauseFunc
	held  map[string]*places // by webhook
	taken int                // attempts that run
	loops sync.WaitGroup
	sends sync.WaitGroup
}

// places are a webhook's attempts that run, and how many failed in a row before them.
type places struct{ taken, failures int }

// New makes a Deliverer. It does nothing by itself until Start.
func New(cfg Config) *Deliverer {
	d := &Deliverer{
		store: cfg.Store, limits: cfg.Limits.withDefaults(), log: cfg.Log, chance: mathrand.Float64,
		nudged: make(chan struct{}, 1), held: map[string]*places{}, newID: cfg.NewID,
	}
	if d.newID == nil {
		d.newID = func(prefix string) string { return prefix + "_" + strings.ToLower(rand.Text()) }
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if cfg.Agent == "" {
		cfg.Agent = "hutch"
	}
	d.sender = newSender(cfg.Policy, cfg.Agent)
	d.send = d.sender.send
	return d
}

// errClosed is the cause of the contexts that Close ends.
var errClosed = errors.New("webhook: closed")

// CheckURL refuses what the operator does not allow, as Policy.CheckURL does.
func (d *Deliverer) CheckURL(raw string) error { return d.sender.policy.CheckURL(raw) }

// Start begins to deliver. It does not wait for anything, and a second call before Close
// does nothing. The end of ctx is not the Deliverer's: Close is.
func (d *Deliverer) Start(ctx context.Context) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stop != nil {
		return
	}
	run, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	d.stop = stop
	d.loops.Go(func() { d.followEvents(run) })
	d.loops.Go(func() { d.dispatch(run) })
	d.loops.Go(func() { d.tend(run) })
}

// Close stops to deliver and waits for what runs. Attempts that have no answer yet are
// cut off and made again by the next server; their receivers may see them twice.
func (d *Deliverer) Close() {
	d.mu.Lock()
	stop := d.stop
	d.mu.Unlock()
	if stop != nil {
		stop(errClosed)
	}
	d.loops.Wait() // before sends: the loops start them
	d.sends.Wait()
	d.sender.close()
	d.mu.Lock()
	d.stop = nil
	d.mu.Unlock()
}

// Nudge has the store asked for due deliveries now, after a change that is not an
// event, such as a webhook that was enabled again.
func (d *Deliverer) Nudge() {
	select {
	case d.nudged <- struct{}{}:
	default:
	}
}

// pause waits for a wake-up, at most so long. It says whether to go on.
func pause(ctx context.Context, wake <-chan struct{}, most time.Duration) bool {
	timer := time.NewTimer(max(most, 0))
	defer timer.Stop()
	select {
	case <-wake:
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// page is how many events become deliveries in one transaction.
const page = 500

// place is where a server is among the events. What nobody wanted is passed without a
// write: the cursor in the store follows now and then, and where this server dies before,
// the next one passes the same events once more.
type place struct {
	known  bool
	cursor int64     // in the store, as far as this server knows
	wrote  time.Time // when that was
	seen   int64     // up to here there is nothing to do
}

// followEvents makes deliveries of events as they come.
func (d *Deliverer) followEvents(ctx context.Context) {
	var at place
	for {
		committed := d.store.Committed()
		more, err := d.addPage(ctx, &at)
		if err != nil && ctx.Err() == nil {
			d.log.Error("webhook: deliveries could not be made of events; it is tried again", "err", err)
		}
		if more {
			if ctx.Err() != nil {
				return
			}
			continue
		}
		if err != nil {
			committed = nil // a store that refuses is not asked at each of its commits
		}
		if !pause(ctx, committed, d.limits.Poll) {
			return
		}
	}
}

// addPage makes the deliveries of the next events. It says whether there may be more.
// The events are read before the webhooks: what was numbered after a webhook was there
// is then never passed without it.
func (d *Deliverer) addPage(ctx context.Context, at *place) (more bool, err error) {
	if !at.known {
		if at.cursor, err = d.store.WebhookCursor(ctx); err != nil {
			return false, err
		}
		at.known, at.seen, at.wrote = true, at.cursor, time.Now()
	}
	last, err := d.store.LastEvent(ctx)
	if err != nil {
		return false, err
	}
	if last <= at.seen {
		return false, d.pass(ctx, at)
	}
	webhooks, err := d.store.EnabledWebhooks(ctx)
	if err != nil {
		return false, err
	}
	if len(webhooks) == 0 {
		at.seen = last
		return false, d.pass(ctx, at)
	}
	events, err := d.store.Events(ctx, store.EventFilter{After: at.seen, Limit: page})
	if f := fault.Of(err); f != nil && f.Reason == store.ReasonPruned {
		d.log.Warn("webhook: events were pruned before deliveries were made of them; the oldest kept is next", "seq", at.seen)
		events, err = d.store.Events(ctx, store.EventFilter{Limit: page})
	}
	if err != nil || len(events) == 0 {
		return false, err
	}
	if webhooks, err = d.store.EnabledWebhooks(ctx); err != nil {
		return false, err
	}
	made := deliveries(webhooks, events, time.Now())
	at.seen = events[len(events)-1].Seq
	if len(made) == 0 {
		return true, d.pass(ctx, at)
	}
	if err := d.add(ctx, at, made); err != nil {
		return false, err
	}
	d.Nudge()
	return true, nil
}

// pass moves the cursor over events that nobody wants, now and then.
func (d *Deliverer) pass(ctx context.Context, at *place) error {
	if at.seen == at.cursor || time.Since(at.wrote) < d.limits.Tend {
		return nil
	}
	return d.add(ctx, at, nil)
}

// add writes deliveries and moves the cursor. Where another server was quicker, or it
// is not known what was written, this one begins anew from where the cursor is.
func (d *Deliverer) add(ctx context.Context, at *place, made []store.Delivery) error {
	err := d.store.AddDeliveries(ctx, at.cursor, at.seen, made)
	if err != nil {
		at.known = false
	} else {
		at.cursor, at.wrote = at.seen, time.Now()
	}
	if f := fault.Of(err); f != nil && f.Reason == store.ReasonStale {
		return nil
	}
	return err
}

// tend disables webhooks for which too much waits.
func (d *Deliverer) tend(ctx context.Context) {
	for pause(ctx, nil, d.limits.Tend) {
		full, err := d.store.Overfull(ctx, d.limits.Backlog)
		for _, w := range full {
			reason := fmt.Sprintf("more than %d deliveries wait for it", d.limits.Backlog)
			if err = d.store.DisableWebhook(ctx, w.ID, *d.told(w, &store.WebhookDisabling{Reason: reason, At: time.Now()})); err != nil {
				break
			}
			d.log.Warn("webhook: disabled", "webhook", w.ID, "reason", reason)
		}
		if err != nil && ctx.Err() == nil {
			d.log.Error("webhook: the backlogs could not be looked at; it is tried again", "err", err)
		}
	}
}

// told adds the event that tells of a webhook's end. Its project's other webhooks hear of it.
func (d *Deliverer) told(w store.Webhook, why *store.WebhookDisabling) *store.WebhookDisabling {
	data, err := json.Marshal(map[string]string{"webhook_id": w.ID, "reason": why.Reason})
	if err != nil {
		panic(err) // two strings always can be written
	}
	why.Event = store.Event{
		ID: d.newID("ev"), Project: w.Project, Type: "webhook.disabled", Actor: "host", Data: data, At: why.At.UTC().Truncate(time.Millisecond),
	}
	return why
}

// dispatch claims what is due and sends it.
func (d *Deliverer) dispatch(ctx context.Context) {
	for {
		next, err := d.claimDue(ctx)
		wait, wake := d.limits.Poll, (<-chan struct{})(d.nudged)
		if err != nil {
			if ctx.Err() == nil {
				d.log.Error("webhook: due deliveries could not be claimed; it is tried again", "err", err)
			}
			wake = nil
		} else if !next.IsZero() {
			wait = min(wait, time.Until(next))
		}
		if !pause(ctx, wake, wait) {
			return
		}
	}
}

// claimDue starts attempts until nothing is due or no place is free; then the end of an
// attempt nudges. It gives the time at which more will be due.
func (d *Deliverer) claimDue(ctx context.Context) (next time.Time, err error) {
	for ctx.Err() == nil {
		full, free := d.room()
		if free == 0 {
			return time.Time{}, nil
		}
		due, err := d.store.DueWebhooks(ctx, time.Now(), full, free)
		if err != nil {
			return time.Time{}, err
		}
		started := 0
		for _, id := range due.IDs {
			n, err := d.claim(ctx, id)
			if err != nil {
				return time.Time{}, err
			}
			started += n
		}
		if started == 0 { // nothing was due, or another server had it first
			return due.Next, nil
		}
	}
	return time.Time{}, nil
}

// room gives the webhooks whose places are all taken, and how many places are free.
func (d *Deliverer) room() (full []string, free int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	free = d.limits.Total - d.taken
	for id, p := range d.held {
		if p.taken > 0 && p.taken >= d.limits.share(p.failures, free) {
			full = append(full, id)
		}
	}
	return full, free
}

// take takes places for attempts of a webhook, as many as it may have.
func (d *Deliverer) take(webhook string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	p := d.held[webhook]
	if p == nil {
		p = &places{}
		d.held[webhook] = p
	}
	free := d.limits.Total - d.taken
	n := max(0, min(d.limits.share(p.failures, free)-p.taken, free))
	p.taken += n
	d.taken += n
	return n
}

// give gives places back. health is what an attempt said of the receiver: 1 well, -1
// not, 0 nothing.
func (d *Deliverer) give(webhook string, n, health int) {
	d.mu.Lock()
	p := d.held[webhook]
	p.taken -= n
	d.taken -= n
	switch health {
	case 1:
		p.failures = 0
	case -1:
		p.failures++
	}
	if p.taken == 0 && p.failures == 0 {
		delete(d.held, webhook)
	}
	d.mu.Unlock()
}

// claim claims deliveries of a webhook and starts their attempts.
func (d *Deliverer) claim(ctx context.Context, webhook string) (started int, err error) {
	n := d.take(webhook)
	if n == 0 {
		return 0, nil
	}
	now := time.Now()
	c := store.DeliveryClaim{Webhook: webhook, Limit: n, Now: now, Until: now.Add(d.limits.Lease), Lease: rand.Text()}
	claimed, err := d.store.ClaimDeliveries(ctx, c)
	d.give(webhook, n-len(claimed), 0)
	for _, one := range claimed {
		d.sends.Go(func() {
			health := d.attempt(ctx, one, c)
			d.give(webhook, 1, health)
			d.Nudge()
		})
	}
	return len(claimed), err
}

// attempt sends a claimed delivery, or ends it unsent where it cannot be sent, and
// writes down what came of it.
func (d *Deliverer) attempt(ctx context.Context, one store.ClaimedDelivery, c store.DeliveryClaim) (health int) {
	var s store.DeliverySettlement
	now := time.Now()
	switch {
	case !one.Webhook.DisabledAt.IsZero():
		s = skip(one, "the webhook is disabled: "+one.Webhook.DisabledReason, now)
	case one.Event.Seq == 0:
		s = skip(one, "the event is no longer kept", now)
	case now.Add(d.limits.Timeout).After(c.Until):
		// This server stood still since the claim: another may have it already.
		d.log.Warn("webhook: a lease was nearly over before the attempt; it is left to the next", "delivery", one.Delivery.ID)
		return 0
	default:
		bounded, cancel := context.WithTimeout(ctx, d.limits.Timeout)
		r := d.send(bounded, one)
		cancel()
		if b, ok := errors.AsType[*blocked](r.cause); ok {
			d.log.Warn("webhook: a receiver's address is not allowed", "webhook", one.Webhook.ID, "address", b.addr, "reason", b.what)
		}
		s = d.limits.settle(one, r, d.chance())
	}
	s.Lease = c.Lease
	if s.Disable != nil {
		s.Disable = d.told(one.Webhook, s.Disable)
	}
	if d.settle(ctx, s, c.Until) && s.Disable != nil {
		d.log.Warn("webhook: disabled", "webhook", one.Webhook.ID, "reason", s.Disable.Reason)
	}
	return s.Health
}

// Test sends a message to a webhook now and once, also to one that is disabled, and gives
// what came of it. Nothing of it is kept.
func (d *Deliverer) Test(ctx context.Context, w store.Webhook) store.DeliveryAttempt {
	now := time.Now().UTC()
	e := store.Event{
		ID: d.newID("ev"), Project: w.Project, Type: "webhook.test", Actor: "host", At: now.Truncate(time.Millisecond),
		Data: json.RawMessage(`{"webhook_id":"` + w.ID + `"}`),
	}
	bounded, cancel := context.WithTimeout(ctx, d.limits.Timeout)
	defer cancel()
	r := d.send(bounded, store.ClaimedDelivery{
		Delivery: store.Delivery{ID: "msg_" + strings.ToLower(rand.Text()), Attempts: 1}, Webhook: w, Event: e,
	})
	return store.DeliveryAttempt{Number: 1, At: r.at, Took: r.took, Status: r.status, Error: r.err}
}

// healthOf is what an attempt says of its receiver.
func healthOf(r result) int {
	switch {
	case r.cut:
		return 0
	case r.err == "":
		return 1
	}
	return -1
}

// settlePause is the wait between tries to write down what came of an attempt.
const settlePause = 500 * time.Millisecond

// settle writes down what came of an attempt, also while the Deliverer closes, and
// tries again while the lease holds: what is not written is sent once more.
func (d *Deliverer) settle(ctx context.Context, s store.DeliverySettlement, until time.Time) (written bool) {
	running := ctx
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), until)
	defer cancel()
	for {
		err := d.store.SettleDelivery(ctx, s)
		if err == nil {
			return true
		}
		if f := fault.Of(err); f.Reason == store.ReasonStale || ctx.Err() != nil || running.Err() != nil {
			d.log.Warn("webhook: what came of an attempt could not be written; it may be repeated", "delivery", s.ID, "err", err)
			return false
		}
		pause(ctx, nil, settlePause)
	}
}
