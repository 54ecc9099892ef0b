package webhook

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/webhook/webhooktest"
)

// memory is a Storage without a disk: it passes the suite that databases pass, and
// makes thousands of histories possible.
type memory struct {
	mu         sync.Mutex // guards all below
	events     []store.Event
	kept       int64 // events up to this number are pruned
	committed  chan struct{}
	cursor     int64
	webhooks   map[string]store.Webhook
	deliveries map[string]*leased
	attempts   map[string][]store.DeliveryAttempt
}

type leased struct {
	store.Delivery
	lease string
	until time.Time
}

func newMemory() *memory {
	return &memory{
		committed: make(chan struct{}), webhooks: map[string]store.Webhook{},
		deliveries: map[string]*leased{}, attempts: map[string][]store.DeliveryAttempt{},
	}
}

func TestMemory(t *testing.T) {
	t.Parallel()
	webhooktest.Run(t, func(*testing.T) webhooktest.Bench {
		m := newMemory()
		return webhooktest.Bench{
			Store:         m,
			AddEvent:      func(_ *testing.T, e store.Event) store.Event { return m.add(e) },
			PutWebhook:    func(_ *testing.T, w store.Webhook) { m.put(w) },
			DeleteWebhook: func(_ *testing.T, id string) { m.remove(id) },
			Attempts:      func(_ *testing.T, id string) []store.DeliveryAttempt { return m.log(id) },
			Events: func(t *testing.T) []store.Event {
				all, err := m.Events(t.Context(), store.EventFilter{})
				if err != nil {
					t.Fatal(err)
				}
				return all
			},
		}
	})
}

func (m *memory) add(e store.Event) store.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.append(e)
}

func (m *memory) append(e store.Event) store.Event {
	e.Seq = int64(len(m.events)) + 1
	m.events = append(m.events, e)
	close(m.committed)
	m.committed = make(chan struct{})
	return e
}

func (m *memory) put(w store.Webhook) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.webhooks[w.ID] = w
}

func (m *memory) remove(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.webhooks, id)
	maps.DeleteFunc(m.deliveries, func(_ string, d *leased) bool { return d.Webhook == id })
}

func (m *memory) prune(upTo int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.kept = upTo
}

func (m *memory) log(id string) []store.DeliveryAttempt {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.attempts[id])
}

// all gives the deliveries by number, then webhook.
func (m *memory) all() []store.Delivery {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []store.Delivery
	for _, d := range m.deliveries {
		out = append(out, d.Delivery)
	}
	slices.SortFunc(out, func(a, b store.Delivery) int {
		return cmp.Or(cmp.Compare(a.Seq, b.Seq), cmp.Compare(a.Webhook, b.Webhook))
	})
	return out
}

func (m *memory) Events(_ context.Context, f store.EventFilter) ([]store.Event, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if f.After > 0 && f.After < m.kept {
		return nil, fault.New(fault.FailedPrecondition, "the oldest is %d", m.kept+1).Because(store.ReasonPruned)
	}
	var out []store.Event
	for _, e := range m.events[max(f.After, m.kept):] {
		if (f.Project == "" || f.Project == e.Project) && (f.Limit == 0 || len(out) < f.Limit) {
			out = append(out, e)
		}
	}
	return out, nil
}

func (m *memory) Committed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.committed
}

func (m *memory) WebhookCursor(context.Context) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.cursor, nil
}

func (m *memory) EnabledWebhooks(context.Context) ([]store.Webhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []store.Webhook
	for _, id := range slices.Sorted(maps.Keys(m.webhooks)) {
		if w := m.webhooks[id]; w.DisabledAt.IsZero() {
			out = append(out, w)
		}
	}
	return out, nil
}

func (m *memory) AddDeliveries(ctx context.Context, from, to int64, deliveries []store.Delivery) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.cursor != from {
		return fault.New(fault.Conflict, "the cursor is at %d", m.cursor).Because(store.ReasonStale)
	}
	m.cursor = to
	for _, d := range deliveries {
		m.insert(d)
	}
	return nil
}

func (m *memory) insert(d store.Delivery) {
	if _, there := m.webhooks[d.Webhook]; there && m.deliveries[d.ID] == nil {
		m.deliveries[d.ID] = &leased{Delivery: d}
	}
}

// heads are the pending deliveries with no lower one in their lane.
func (m *memory) heads() []*leased {
	type lane struct{ webhook, lane string }
	first := map[lane]*leased{}
	for _, d := range m.deliveries {
		at := lane{d.Webhook, d.Lane}
		if d.Status == store.DeliveryPending && (first[at] == nil || d.Seq < first[at].Seq) {
			first[at] = d
		}
	}
	return slices.SortedFunc(maps.Values(first), func(a, b *leased) int { return cmp.Or(a.NextAt.Compare(b.NextAt), cmp.Compare(a.Seq, b.Seq)) })
}

// claimable is when a head can be claimed.
func (d *leased) claimable() time.Time {
	if d.until.After(d.NextAt) {
		return d.until
	}
	return d.NextAt
}

func (m *memory) DueWebhooks(_ context.Context, now time.Time, without []string, limit int) (store.DueWebhooks, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var due store.DueWebhooks
	for _, d := range m.heads() {
		at := d.claimable()
		switch {
		case slices.Contains(without, d.Webhook):
		case at.After(now):
			if due.Next.IsZero() || at.Before(due.Next) {
				due.Next = at
			}
		case len(due.IDs) < limit && !slices.Contains(due.IDs, d.Webhook):
			due.IDs = append(due.IDs, d.Webhook)
		}
	}
	return due, nil
}

func (m *memory) ClaimDeliveries(ctx context.Context, c store.DeliveryClaim) ([]store.ClaimedDelivery, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []store.ClaimedDelivery
	for _, d := range m.heads() {
		if d.Webhook != c.Webhook || d.claimable().After(c.Now) || len(out) == c.Limit {
			continue
		}
		d.lease, d.until = c.Lease, c.Until
		d.Attempts++
		d.Tries++
		one := store.ClaimedDelivery{Delivery: d.Delivery, Webhook: m.webhooks[d.Webhook]}
		if d.Seq > m.kept && d.Seq <= int64(len(m.events)) {
			one.Event = m.events[d.Seq-1]
		}
		out = append(out, one)
	}
	return out, nil
}

func (m *memory) SettleDelivery(ctx context.Context, s store.DeliverySettlement) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.deliveries[s.ID]
	if d == nil || d.lease != s.Lease {
		return fault.New(fault.Conflict, "the delivery %s is not under this lease", s.ID).Because(store.ReasonStale)
	}
	d.lease, d.until, d.Status, d.Error = "", time.Time{}, s.Status, s.Error
	w := m.webhooks[d.Webhook]
	switch {
	case s.Health > 0:
		w.FailingSince, w.FailingError = time.Time{}, ""
	case s.Health < 0 && w.FailingSince.IsZero():
		w.FailingSince, w.FailingError = s.At, s.Error
	case s.Health < 0:
		w.FailingError = s.Error
	}
	m.webhooks[d.Webhook] = w
	if s.Status == store.DeliveryPending {
		d.NextAt = s.NextAt
	} else {
		d.EndedAt = s.At
	}
	if s.Attempt != nil {
		m.attempts[s.ID] = append(m.attempts[s.ID], *s.Attempt)
		m.attempts[s.ID] = slices.DeleteFunc(m.attempts[s.ID], func(a store.DeliveryAttempt) bool { return a.Number <= s.Attempt.Number-store.KeptAttempts })
	}
	if s.Disable != nil {
		m.disable(d.Webhook, *s.Disable)
	}
	return nil
}

func (m *memory) disable(id string, why store.WebhookDisabling) {
	w, there := m.webhooks[id]
	if !there || !w.DisabledAt.IsZero() || !why.Failing.IsZero() && !why.Failing.Equal(w.FailingSince) {
		return
	}
	w.DisabledAt, w.DisabledReason = why.At, why.Reason
	w.Version++
	m.webhooks[id] = w
	for _, d := range m.deliveries {
		if d.Webhook == id && d.Status == store.DeliveryPending && !d.until.After(why.At) {
			d.Status, d.Error, d.EndedAt = store.DeliveryFailed, "the webhook is disabled: "+why.Reason, why.At
			d.lease, d.until = "", time.Time{}
		}
	}
	m.append(why.Event)
}

func (m *memory) DisableWebhook(_ context.Context, id string, why store.WebhookDisabling) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.disable(id, why)
	return nil
}

func (m *memory) Overfull(_ context.Context, most int) ([]store.Webhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []store.Webhook
	for _, id := range slices.Sorted(maps.Keys(m.webhooks)) {
		n := 0
		for _, d := range m.deliveries {
			if d.Webhook == id && d.Status == store.DeliveryPending {
				n++
			}
		}
		if w := m.webhooks[id]; n > most && w.DisabledAt.IsZero() {
			out = append(out, w)
		}
	}
	return out, nil
}

func (m *memory) LastEvent(context.Context) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return int64(len(m.events)), nil
}

func (m *memory) ReplayDeliveries(_ context.Context, deliveries []store.Delivery) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range deliveries {
		old := m.deliveries[d.ID]
		switch {
		case old == nil:
			m.insert(d)
			continue
		case old.Status == store.DeliveryPending:
			if d.NextAt.Before(old.NextAt) {
				old.NextAt = d.NextAt
			}
		default:
			old.Status, old.Lane, old.NextAt, old.EndedAt, old.Error = store.DeliveryPending, d.Lane, d.NextAt, time.Time{}, ""
		}
		old.Since, old.Tries = d.Since, 0
	}
	return nil
}

func (m *memory) Webhook(_ context.Context, id string) (store.Webhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w, there := m.webhooks[id]
	if !there {
		return w, fault.New(fault.NotFound, "there is no webhook %s", id)
	}
	return w, nil
}

func (m *memory) Delivery(_ context.Context, id string) (store.Delivery, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.deliveries[id]
	if d == nil {
		return store.Delivery{}, fault.New(fault.NotFound, "there is no delivery %s", id)
	}
	return d.Delivery, nil
}
