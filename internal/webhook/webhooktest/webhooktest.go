// Package webhooktest is the suite that every implementation of store.Webhooks passes.
package webhooktest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// Bench is an empty store, with the writes that are not the deliverer's.
type Bench struct {
	Store         store.Webhooks
	AddEvent      func(t *testing.T, e store.Event) store.Event // gives it its number
	PutWebhook    func(t *testing.T, w store.Webhook)           // in place of the one with its id
	DeleteWebhook func(t *testing.T, id string)
	Attempts      func(t *testing.T, delivery string) []store.DeliveryAttempt // oldest first
	Events        func(t *testing.T) []store.Event                            // all that have a number, or will soon have one
}

// Project is the project that a Bench has.
const Project = "prj_1"

// Run runs the suite; open is called for each test.
func Run(t *testing.T, open func(t *testing.T) Bench) {
	for _, c := range []struct {
		name string
		run  func(*rig)
	}{
		{"cursor", cursor},
		{"added twice", addedTwice},
		{"webhooks", webhooks},
		{"lanes", lanes},
		{"times", times},
		{"limits", limits},
		{"leases", leases},
		{"two servers", twoServers},
		{"settled", settled},
		{"disabled", disabled},
		{"disabled while it waits", waiting},
		{"failing", failing},
		{"overfull", overfull},
		{"bounded log", boundedLog},
		{"deleted", deleted},
		{"pruned event", prunedEvent},
		{"replay", replay},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &rig{T: t, Bench: open(t), ctx: t.Context(), now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
			c.run(r)
		})
	}
}

type rig struct {
	*testing.T
	Bench
	ctx context.Context //nolint:containedctx // the test's
	now time.Time
}

func (r *rig) ok(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

func (r *rig) stale(err error) {
	r.Helper()
	if f := fault.Of(err); f == nil || f.Kind != fault.Conflict || f.Reason != store.ReasonStale {
		r.Errorf("%v, want a conflict with reason stale", err)
	}
}

func (r *rig) webhook(id string) store.Webhook {
	r.Helper()
	w := store.Webhook{
		ID: id, Project: Project, URL: "https://example.com/" + id, Types: []string{"sandbox.*"},
		Secrets:   []store.WebhookSecret{{Value: "whsec_b25l"}, {Value: "whsec_dHdv", Until: r.now.Add(time.Hour)}},
		CreatedAt: r.now,
	}
	r.PutWebhook(r.T, w)
	return w
}

// add makes the delivery of a new event.
func (r *rig) add(webhook, sandbox string) store.Delivery {
	r.Helper()
	d := r.delivery(webhook, sandbox)
	from, err := r.Store.WebhookCursor(r.ctx)
	r.ok(err)
	r.ok(r.Store.AddDeliveries(r.ctx, from, d.Seq, []store.Delivery{d}))
	return d
}

func (r *rig) delivery(webhook, sandbox string) store.Delivery {
	r.Helper()
	e := r.AddEvent(r.T, store.Event{Project: Project, Sandbox: sandbox, Type: "sandbox.ready", Actor: "host", At: r.now})
	return store.Delivery{
		ID: fmt.Sprintf("msg_%s_%d", webhook, e.Seq), Webhook: webhook, Project: Project, Sandbox: sandbox, Seq: e.Seq, Type: e.Type,
		Lane: sandbox, Status: store.DeliveryPending, Since: r.now, NextAt: r.now, CreatedAt: r.now,
	}
}

func (r *rig) due(without ...string) store.DueWebhooks {
	r.Helper()
	d, err := r.Store.DueWebhooks(r.ctx, r.now, without, 100)
	r.ok(err)
	return d
}

func (r *rig) wantDue(next time.Time, ids ...string) {
	r.Helper()
	d := r.due()
	if !slices.Equal(d.IDs, ids) || !d.Next.Equal(next) || d.Next.IsZero() != next.IsZero() {
		r.Errorf("due are %v and then something at %v, want %v and %v", d.IDs, d.Next, ids, next)
	}
}

const lease = time.Minute

func (r *rig) claim(webhook, token string) []store.ClaimedDelivery {
	r.Helper()
	c, err := r.Store.ClaimDeliveries(r.ctx, store.DeliveryClaim{Webhook: webhook, Limit: 100, Now: r.now, Until: r.now.Add(lease), Lease: token})
	r.ok(err)
	return c
}

// wantClaim claims and compares what the lease holds.
func (r *rig) wantClaim(webhook, token string, want ...store.Delivery) []store.ClaimedDelivery {
	r.Helper()
	claimed := r.claim(webhook, token)
	var got, wanted []string
	for _, c := range claimed {
		got = append(got, c.Delivery.ID)
	}
	for _, d := range want {
		wanted = append(wanted, d.ID)
	}
	slices.Sort(got)
	slices.Sort(wanted)
	if !slices.Equal(got, wanted) {
		r.Errorf("claimed %v, want %v", got, wanted)
	}
	return claimed
}

func (r *rig) settle(d store.Delivery, token string, status store.DeliveryStatus, next time.Time) {
	r.Helper()
	r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: d.ID, Lease: token, Status: status, NextAt: next, At: r.now}))
}

func (r *rig) get(id string) store.Delivery {
	r.Helper()
	d, err := r.Store.Delivery(r.ctx, id)
	r.ok(err)
	return d
}

func cursor(r *rig) {
	if at, err := r.Store.WebhookCursor(r.ctx); at != 0 || err != nil {
		r.Fatalf("the cursor begins at %d, %v", at, err)
	}
	r.webhook("wh_1")
	d := r.delivery("wh_1", "sbx_1")
	r.ok(r.Store.AddDeliveries(r.ctx, 0, d.Seq, []store.Delivery{d}))
	if at, err := r.Store.WebhookCursor(r.ctx); at != d.Seq || err != nil {
		r.Errorf("the cursor is at %d, %v, want %d", at, err, d.Seq)
	}
	late := r.delivery("wh_1", "sbx_2")
	r.stale(r.Store.AddDeliveries(r.ctx, 0, late.Seq, []store.Delivery{late}))
	if _, err := r.Store.Delivery(r.ctx, late.ID); !fault.Is(err, fault.NotFound) {
		r.Errorf("the delivery of a refused write: %v", err)
	}
	if at, _ := r.Store.WebhookCursor(r.ctx); at != d.Seq {
		r.Errorf("a refused write moved the cursor to %d", at)
	}
	r.ok(r.Store.AddDeliveries(r.ctx, d.Seq, d.Seq+7, nil))
	if at, _ := r.Store.WebhookCursor(r.ctx); at != d.Seq+7 {
		r.Errorf("the cursor is at %d behind events that nobody wants", at)
	}
}

func addedTwice(r *rig) {
	r.webhook("wh_1")
	d := r.add("wh_1", "sbx_1")
	r.wantClaim("wh_1", "a", d)
	r.settle(d, "a", store.DeliveryDelivered, time.Time{})
	r.ok(r.Store.AddDeliveries(r.ctx, d.Seq, d.Seq+1, []store.Delivery{d}))
	if got := r.get(d.ID); got.Status != store.DeliveryDelivered || got.Attempts != 1 {
		r.Errorf("added again it is %+v", got)
	}
}

func webhooks(r *rig) {
	w := r.webhook("wh_1")
	off := r.webhook("wh_2")
	off.DisabledAt, off.DisabledReason = r.now, "by hand"
	r.PutWebhook(r.T, off)
	on, err := r.Store.EnabledWebhooks(r.ctx)
	r.ok(err)
	if len(on) != 1 || on[0].ID != "wh_1" {
		r.Fatalf("enabled are %+v", on)
	}
	got, err := r.Store.Webhook(r.ctx, "wh_1")
	r.ok(err)
	for _, g := range []store.Webhook{got, on[0]} {
		if g.URL != w.URL || g.Project != Project || !slices.Equal(g.Types, w.Types) || len(g.Secrets) != 2 || g.Secrets[0] != w.Secrets[0] ||
			g.Secrets[1].Value != w.Secrets[1].Value || !g.Secrets[1].Until.Equal(w.Secrets[1].Until) || !g.DisabledAt.IsZero() {
			r.Errorf("it is %#v, want %#v", g, w)
		}
	}
	if got, err := r.Store.Webhook(r.ctx, "wh_2"); err != nil || !got.DisabledAt.Equal(r.now) || got.DisabledReason != "by hand" {
		r.Errorf("the disabled one is %+v, %v", got, err)
	}
	if _, err := r.Store.Webhook(r.ctx, "wh_3"); !fault.Is(err, fault.NotFound) {
		r.Errorf("one that is not there: %v", err)
	}
}

func lanes(r *rig) {
	r.webhook("wh_1")
	r.webhook("wh_2")
	first, other := r.add("wh_1", "sbx_1"), r.add("wh_1", "sbx_2")
	second, elsewhere := r.add("wh_1", "sbx_1"), r.add("wh_2", "sbx_1")
	r.wantClaim("wh_1", "a", first, other)
	r.wantClaim("wh_1", "b") // second is not at the head
	r.wantClaim("wh_2", "c", elsewhere)
	r.settle(first, "a", store.DeliveryPending, r.now.Add(time.Hour))
	r.wantClaim("wh_1", "d")
	r.now = r.now.Add(time.Hour)
	r.wantClaim("wh_1", "e", first, other)
	r.settle(first, "e", store.DeliveryFailed, time.Time{})
	r.wantClaim("wh_1", "f", second)
}

func times(r *rig) {
	r.wantDue(time.Time{})
	r.webhook("wh_1")
	r.webhook("wh_2")
	one := r.add("wh_1", "sbx_1")
	r.add("wh_1", "sbx_1") // behind it: makes nothing due
	r.now = r.now.Add(time.Second)
	two := r.add("wh_2", "sbx_1")
	r.wantDue(time.Time{}, "wh_1", "wh_2") // the longest wait first
	if d := r.due("wh_1"); !slices.Equal(d.IDs, []string{"wh_2"}) {
		r.Errorf("without wh_1 due are %v", d.IDs)
	}
	if d, err := r.Store.DueWebhooks(r.ctx, r.now, nil, 1); err != nil || !slices.Equal(d.IDs, []string{"wh_1"}) {
		r.Errorf("the first of them is %v, %v", d.IDs, err)
	}
	r.wantClaim("wh_1", "a", one)
	r.wantDue(r.now.Add(lease), "wh_2")
	r.wantClaim("wh_2", "b", two)
	r.wantDue(r.now.Add(lease))
	r.settle(two, "b", store.DeliveryPending, r.now.Add(2*time.Second))
	r.wantDue(r.now.Add(2 * time.Second))
	if d := r.due("wh_2"); !d.Next.Equal(r.now.Add(lease)) {
		r.Errorf("without wh_2 the next is at %v", d.Next)
	}
	r.now = r.now.Add(2*time.Second - time.Millisecond)
	r.wantClaim("wh_2", "c")
	r.now = r.now.Add(time.Millisecond)
	r.wantClaim("wh_2", "d", two)
}

func limits(r *rig) {
	r.webhook("wh_1")
	var made []store.Delivery
	for i := range 5 {
		made = append(made, r.add("wh_1", fmt.Sprint("sbx_", i)))
		r.now = r.now.Add(time.Second)
	}
	c, err := r.Store.ClaimDeliveries(r.ctx, store.DeliveryClaim{Webhook: "wh_1", Limit: 2, Now: r.now, Until: r.now.Add(lease), Lease: "a"})
	r.ok(err)
	if len(c) != 2 || c[0].Delivery.ID != made[0].ID || c[1].Delivery.ID != made[1].ID {
		r.Errorf("two of five are %+v", c)
	}
	r.wantClaim("wh_1", "b", made[2:]...)
}

func leases(r *rig) {
	r.webhook("wh_1")
	d := r.add("wh_1", "sbx_1")
	r.wantClaim("wh_1", "a", d)
	r.now = r.now.Add(lease - time.Millisecond)
	r.wantClaim("wh_1", "b")
	r.now = r.now.Add(time.Millisecond)
	again := r.wantClaim("wh_1", "c", d) // the first server died
	if len(again) == 1 && (again[0].Delivery.Attempts != 2 || again[0].Delivery.Tries != 2) {
		r.Errorf("claimed twice it has %d attempts and %d tries", again[0].Delivery.Attempts, again[0].Delivery.Tries)
	}
	// It was not dead after all.
	r.stale(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{
		ID: d.ID, Lease: "a", Status: store.DeliveryDelivered, At: r.now, Attempt: &store.DeliveryAttempt{Number: 1, At: r.now},
	}))
	if got := r.get(d.ID); got.Status != store.DeliveryPending || len(r.Attempts(r.T, d.ID)) != 0 {
		r.Errorf("a lost lease wrote %+v", got)
	}
	r.now = r.now.Add(2 * lease)
	r.settle(d, "c", store.DeliveryDelivered, time.Time{}) // it ran out, but nobody took it
	r.stale(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: d.ID, Lease: "c", Status: store.DeliveryFailed, At: r.now}))
	r.stale(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: "msg_none", Lease: "c", Status: store.DeliveryFailed, At: r.now}))
	if got := r.get(d.ID); got.Status != store.DeliveryDelivered {
		r.Errorf("settled twice it is %s", got.Status)
	}
}

func twoServers(r *rig) {
	r.webhook("wh_1")
	const n = 40
	for i := range n {
		r.add("wh_1", fmt.Sprint("sbx_", i))
	}
	var mu sync.Mutex
	var got []string
	var servers sync.WaitGroup
	for i := range 4 {
		servers.Go(func() {
			for {
				c, err := r.Store.ClaimDeliveries(r.ctx, store.DeliveryClaim{
					Webhook: "wh_1", Limit: 3, Now: r.now, Until: r.now.Add(lease), Lease: fmt.Sprint("server ", i),
				})
				if err != nil {
					r.Error(err)
					return
				}
				if len(c) == 0 {
					return
				}
				mu.Lock()
				for _, one := range c {
					got = append(got, one.Delivery.ID)
				}
				mu.Unlock()
			}
		})
	}
	servers.Wait()
	slices.Sort(got)
	if unique := len(slices.Compact(slices.Clone(got))); unique != len(got) {
		r.Errorf("%d claims of %d deliveries: one has two servers", len(got), unique)
	}
	// A server that finds nothing while the others hold what is left has gone; what it
	// then missed is due still.
	if rest := r.claim("wh_1", "rest"); len(got)+len(rest) != n {
		r.Errorf("%d and then %d of %d were claimed", len(got), len(rest), n)
	}
}

func settled(r *rig) {
	w := r.webhook("wh_1")
	d := r.add("wh_1", "sbx_1")
	c := r.wantClaim("wh_1", "a", d)
	if len(c) != 1 {
		r.FailNow()
	}
	if e := c[0].Event; e.Seq != d.Seq || e.Sandbox != "sbx_1" || e.Type != "sandbox.ready" || !e.At.Equal(r.now) {
		r.Errorf("the event of a claim is %+v", e)
	}
	if g := c[0].Webhook; g.ID != w.ID || g.URL != w.URL || len(g.Secrets) != 2 {
		r.Errorf("the webhook of a claim is %+v", g)
	}
	if g := c[0].Delivery; g.Attempts != 1 || g.Tries != 1 || g.Lane != "sbx_1" || !g.Since.Equal(d.Since) || g.Seq != d.Seq || g.Type != d.Type {
		r.Errorf("the delivery of a claim is %+v", g)
	}
	first := store.DeliveryAttempt{Number: 1, At: r.now, Took: 1500 * time.Millisecond, Status: 503, Error: "busy"}
	next := r.now.Add(5 * time.Second)
	r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{
		ID: d.ID, Lease: "a", Status: store.DeliveryPending, Error: "busy", NextAt: next, At: r.now, Attempt: &first,
	}))
	if g := r.get(d.ID); g.Status != store.DeliveryPending || g.Error != "busy" || !g.NextAt.Equal(next) || !g.EndedAt.IsZero() {
		r.Errorf("after a failed attempt it is %+v", g)
	}
	r.now = next
	r.wantClaim("wh_1", "b", d)
	second := store.DeliveryAttempt{Number: 2, At: r.now, Took: time.Millisecond, Status: 204}
	r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: d.ID, Lease: "b", Status: store.DeliveryDelivered, At: r.now, Attempt: &second}))
	if g := r.get(d.ID); g.Status != store.DeliveryDelivered || g.Error != "" || !g.EndedAt.Equal(r.now) || g.Attempts != 2 {
		r.Errorf("delivered it is %+v", g)
	}
	log := r.Attempts(r.T, d.ID)
	if len(log) != 2 || !log[0].At.Equal(first.At) || log[0].Took != first.Took || log[0].Status != 503 || log[0].Error != "busy" ||
		log[1].Number != 2 || log[1].Status != 204 || log[1].Error != "" {
		r.Errorf("the log is %+v", log)
	}
	r.wantDue(time.Time{})
}

func disabled(r *rig) {
	r.webhook("wh_1")
	one, two := r.add("wh_1", "sbx_1"), r.add("wh_1", "sbx_2")
	r.wantClaim("wh_1", "a", one, two)
	r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: one.ID, Lease: "a", Status: store.DeliveryFailed, At: r.now, Disable: r.disabling("gone")}))
	was, err := r.Store.Webhook(r.ctx, "wh_1")
	r.ok(err)
	if !was.DisabledAt.Equal(r.now) || was.DisabledReason != "gone" {
		r.Errorf("it is %+v", was)
	}
	// Another that says the same changes nothing.
	r.now = r.now.Add(time.Second)
	r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: two.ID, Lease: "a", Status: store.DeliveryFailed, At: r.now, Disable: r.disabling("gone, too")}))
	if is, err := r.Store.Webhook(r.ctx, "wh_1"); err != nil || !is.DisabledAt.Equal(was.DisabledAt) || is.DisabledReason != "gone" {
		r.Errorf("disabled twice it is %+v, %v", is, err)
	}
	if on, err := r.Store.EnabledWebhooks(r.ctx); err != nil || len(on) != 0 {
		r.Errorf("enabled are %+v, %v", on, err)
	}
	told := slices.DeleteFunc(r.Events(r.T), func(e store.Event) bool { return e.Type != "webhook.disabled" })
	if len(told) != 1 || told[0].ID != "ev_gone" || told[0].Project != Project {
		r.Errorf("told was %+v", told)
	}
	three := r.add("wh_1", "sbx_3") // made by a server that had read the webhook before
	if c := r.wantClaim("wh_1", "b", three); len(c) == 1 && c[0].Webhook.DisabledAt.IsZero() {
		r.Error("a claim shows the webhook as enabled")
	}
}

func (r *rig) disabling(why string) *store.WebhookDisabling {
	return &store.WebhookDisabling{
		Reason: why, At: r.now, Event: store.Event{ID: "ev_" + why, Project: Project, Type: "webhook.disabled", Actor: "host", At: r.now},
	}
}

func waiting(r *rig) {
	r.webhook("wh_1")
	held, behind, other, elsewhere := r.add("wh_1", "sbx_1"), r.add("wh_1", "sbx_1"), r.add("wh_1", "sbx_2"), r.delivery("wh_2", "sbx_1")
	r.webhook("wh_2")
	from, err := r.Store.WebhookCursor(r.ctx)
	r.ok(err)
	r.ok(r.Store.AddDeliveries(r.ctx, from, elsewhere.Seq, []store.Delivery{elsewhere}))
	r.wantClaim("wh_1", "a", held, other)
	r.settle(other, "a", store.DeliveryPending, r.now.Add(time.Hour))
	r.ok(r.Store.DisableWebhook(r.ctx, "wh_1", *r.disabling("by a test")))
	for _, d := range []store.Delivery{behind, other} {
		if g := r.get(d.ID); g.Status != store.DeliveryFailed || g.Error != "the webhook is disabled: by a test" || !g.EndedAt.Equal(r.now) {
			r.Errorf("what waited is %+v", g)
		}
	}
	for _, d := range []store.Delivery{held, elsewhere} {
		if g := r.get(d.ID); g.Status != store.DeliveryPending {
			r.Errorf("under a lease, or of another webhook, it is %+v", g)
		}
	}
	r.settle(held, "a", store.DeliveryDelivered, time.Time{})
	r.wantClaim("wh_2", "b", elsewhere)
	r.wantDue(r.now.Add(lease))
	r.ok(r.Store.DisableWebhook(r.ctx, "wh_none", *r.disabling("gone")))
	// Enabled again it has nothing that waits in the way of what is new.
	r.webhook("wh_1")
	r.wantClaim("wh_1", "c", r.add("wh_1", "sbx_1"))
}

func failing(r *rig) {
	r.webhook("wh_1")
	since := r.now
	settle := func(health int, why string, disable *store.WebhookDisabling) store.Webhook {
		r.Helper()
		d := r.add("wh_1", "")
		r.wantClaim("wh_1", "a", d)
		status := store.DeliveryFailed
		if health > 0 {
			status = store.DeliveryDelivered
		}
		r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{
			ID: d.ID, Lease: "a", Status: status, Error: why, At: r.now, Health: health, Disable: disable,
		}))
		w, err := r.Store.Webhook(r.ctx, "wh_1")
		r.ok(err)
		r.now = r.now.Add(time.Minute)
		return w
	}
	if w := settle(-1, "busy", nil); !w.FailingSince.Equal(since) || w.FailingError != "busy" {
		r.Errorf("after a failure: %+v", w)
	}
	for _, health := range []int{-1, 0} {
		if w := settle(health, "broken", nil); !w.FailingSince.Equal(since) || w.FailingError != "broken" {
			r.Errorf("after another: %+v", w)
		}
	}
	if w := settle(1, "", nil); !w.FailingSince.IsZero() || w.FailingError != "" {
		r.Errorf("after a success: %+v", w)
	}
	// A decision that rests on a failing receiver falls with it.
	given := r.disabling("failed for long")
	given.Failing = since
	if w := settle(-1, "busy", given); !w.DisabledAt.IsZero() {
		r.Errorf("it was well meanwhile: %+v", w)
	}
	w, err := r.Store.Webhook(r.ctx, "wh_1")
	r.ok(err)
	given.Failing = w.FailingSince
	if w := settle(-1, "busy", given); w.DisabledAt.IsZero() {
		r.Errorf("it failed all the time: %+v", w)
	}
}

func overfull(r *rig) {
	for _, id := range []string{"wh_1", "wh_2", "wh_3"} {
		r.webhook(id)
	}
	for range 3 {
		r.add("wh_1", "sbx_1")
		r.add("wh_3", "sbx_1")
	}
	r.add("wh_2", "sbx_1")
	r.add("wh_2", "sbx_1")
	r.ok(r.Store.DisableWebhook(r.ctx, "wh_3", *r.disabling("by hand")))
	for most, want := range map[int]int{1: 2, 2: 1, 3: 0} {
		got, err := r.Store.Overfull(r.ctx, most)
		r.ok(err)
		if len(got) != want || want > 0 && got[0].ID != "wh_1" {
			r.Errorf("with more than %d: %+v", most, got)
		}
	}
}

func boundedLog(r *rig) {
	r.webhook("wh_1")
	d := r.add("wh_1", "sbx_1")
	for n := 1; n <= store.KeptAttempts+3; n++ {
		r.wantClaim("wh_1", "a", d)
		r.ok(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{
			ID: d.ID, Lease: "a", Status: store.DeliveryPending, NextAt: r.now, At: r.now, Attempt: &store.DeliveryAttempt{Number: n, At: r.now, Status: 500},
		}))
	}
	log := r.Attempts(r.T, d.ID)
	if len(log) != store.KeptAttempts || log[0].Number != 4 || log[len(log)-1].Number != store.KeptAttempts+3 {
		r.Errorf("%d attempts are kept, from %d on", len(log), log[0].Number)
	}
}

func deleted(r *rig) {
	r.webhook("wh_1")
	d := r.add("wh_1", "sbx_1")
	r.wantClaim("wh_1", "a", d)
	r.DeleteWebhook(r.T, "wh_1")
	r.stale(r.Store.SettleDelivery(r.ctx, store.DeliverySettlement{ID: d.ID, Lease: "a", Status: store.DeliveryDelivered, At: r.now}))
	late := r.add("wh_1", "sbx_1") // made by a server that had read the webhook before
	r.ok(r.Store.ReplayDeliveries(r.ctx, []store.Delivery{late}))
	if _, err := r.Store.Delivery(r.ctx, late.ID); !fault.Is(err, fault.NotFound) {
		r.Errorf("a delivery to a webhook that is gone: %v", err)
	}
	r.wantDue(time.Time{})
}

func prunedEvent(r *rig) {
	r.webhook("wh_1")
	d := r.delivery("wh_1", "sbx_1")
	d.Seq += 1000 // of an event that is not kept
	r.ok(r.Store.AddDeliveries(r.ctx, 0, d.Seq, []store.Delivery{d}))
	if c := r.wantClaim("wh_1", "a", d); len(c) == 1 && (c[0].Event.Seq != 0 || c[0].Webhook.ID != "wh_1") {
		r.Errorf("claimed without an event it is %+v", c[0])
	}
}

func replay(r *rig) {
	r.webhook("wh_1")
	ended, waiting := r.add("wh_1", "sbx_1"), r.add("wh_1", "sbx_1")
	r.wantClaim("wh_1", "a", ended)
	r.settle(ended, "a", store.DeliveryDelivered, time.Time{})
	r.wantClaim("wh_1", "b", waiting)
	r.settle(waiting, "b", store.DeliveryPending, r.now.Add(time.Hour))
	never := r.delivery("wh_1", "sbx_1")

	r.now = r.now.Add(time.Minute)
	var again []store.Delivery
	for _, d := range []store.Delivery{ended, waiting, never} {
		d.Lane, d.Since, d.NextAt = "replay/sbx_1", r.now, r.now
		again = append(again, d)
	}
	r.ok(r.Store.ReplayDeliveries(r.ctx, again))
	if g := r.get(ended.ID); g.Status != store.DeliveryPending || g.Lane != "replay/sbx_1" || g.Attempts != 1 || g.Tries != 0 || !g.Since.Equal(r.now) ||
		!g.NextAt.Equal(r.now) || !g.EndedAt.IsZero() || g.Error != "" {
		r.Errorf("one that had ended is %+v", g)
	}
	if g := r.get(waiting.ID); g.Status != store.DeliveryPending || g.Lane != "sbx_1" || g.Attempts != 1 || g.Tries != 0 || !g.Since.Equal(r.now) || !g.NextAt.Equal(r.now) {
		r.Errorf("one that was pending is %+v", g)
	}
	r.wantClaim("wh_1", "c", ended, waiting) // never is behind ended
	r.ok(r.Store.ReplayDeliveries(r.ctx, again))
	r.wantClaim("wh_1", "d") // the leases hold
	r.settle(ended, "c", store.DeliveryDelivered, time.Time{})
	r.wantClaim("wh_1", "e", never)

	later := waiting
	later.Since, later.NextAt = r.now, r.now.Add(2*time.Hour)
	r.ok(r.Store.ReplayDeliveries(r.ctx, []store.Delivery{later}))
	if g := r.get(waiting.ID); g.NextAt.After(r.now) {
		r.Errorf("a replay put it off to %v", g.NextAt)
	}
}
