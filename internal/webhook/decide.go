package webhook

import (
	"fmt"
	"net/http"
	"time"

	"github.com/hutchrun/hutch/internal/store"
)

// Limits are the settings of the delivery. Zero fields take the defaults.
type Limits struct {
	Timeout    time.Duration   // of one attempt, from the look-up of the name to the answer
	Lease      time.Duration   // how long a server may work on a delivery before another repeats it
	Window     time.Duration   // how long a delivery is tried
	MinTries   int             // and how often at least, for those that waited behind others
	Waits      []time.Duration // between tries; the last one repeats
	PerWebhook int             // attempts of one webhook at once, on this server
	Total      int             // attempts at once, on this server
	Poll       time.Duration   // how often the store is asked when nothing else wakes the deliverer
	Failing    time.Duration   // a receiver that took nothing for so long is not sent to any more
	Backlog    int             // nor is one for which more than so many deliveries wait
	Tend       time.Duration   // how often backlogs are looked at, and the cursor follows what nobody wants
}

// DefaultLimits reach 3 days (H2) with some 20 tries. The lease is four times the timeout,
// so that the clocks of two servers may differ by most of a minute. A receiver has two days
// more than its first delivery before it is given up as a whole.
var DefaultLimits = Limits{
	Timeout:  15 * time.Second,
	Lease:    time.Minute,
	Window:   72 * time.Hour,
	MinTries: 3,
	Waits: []time.Duration{
		5 * time.Second, 30 * time.Second, 2 * time.Minute, 10 * time.Minute, 30 * time.Minute,
		time.Hour, 2 * time.Hour, 4 * time.Hour, 6 * time.Hour,
	},
	PerWebhook: 8,
	Total:      256,
	Poll:       10 * time.Second,
	Failing:    5 * 24 * time.Hour,
	Backlog:    100_000,
	Tend:       time.Minute,
}

func (l Limits) withDefaults() Limits {
	d := DefaultLimits
	for _, f := range []struct{ have, otherwise *time.Duration }{
		{&l.Timeout, &d.Timeout}, {&l.Lease, &d.Lease}, {&l.Window, &d.Window}, {&l.Poll, &d.Poll},
		{&l.Failing, &d.Failing}, {&l.Tend, &d.Tend},
	} {
		if *f.have <= 0 {
			*f.have = *f.otherwise
		}
	}
	for _, f := range []struct{ have, otherwise *int }{
		{&l.MinTries, &d.MinTries}, {&l.PerWebhook, &d.PerWebhook}, {&l.Total, &d.Total}, {&l.Backlog, &d.Backlog},
	} {
		if *f.have <= 0 {
			*f.have = *f.otherwise
		}
	}
	if len(l.Waits) == 0 {
		l.Waits = d.Waits
	}
	// A lease that could end within an attempt would let another server make a second
	// one at the same time.
	l.Lease = max(l.Lease, 2*l.Timeout)
	return l
}

// jitter is the part of a wait that chance takes off or adds, so that deliveries that
// failed together do not all come back together.
const jitter = 0.2

// wait is the time before the next try after so many; chance is in [0, 1). A receiver
// may ask for a longer one, up to the longest of the schedule.
func (l Limits) wait(tries int, asked time.Duration, chance float64) time.Duration {
	longest := l.Waits[len(l.Waits)-1]
	next := longest
	if tries <= len(l.Waits) {
		next = l.Waits[max(tries, 1)-1]
	}
	next = time.Duration(float64(next) * (1 - jitter + 2*jitter*chance))
	return max(next, min(asked, longest))
}

// settle decides what becomes of a delivery after an attempt. A failed one is tried
// again until its window ends, with the last try at that end; one that waited so long
// behind another that its window is over still has its least number of tries.
func (l Limits) settle(c store.ClaimedDelivery, r result, chance float64) store.DeliverySettlement {
	now := r.at.Add(r.took)
	s := store.DeliverySettlement{
		ID: c.Delivery.ID, Status: store.DeliveryFailed, Error: r.err, At: now, Health: healthOf(r),
		Attempt: &store.DeliveryAttempt{Number: c.Delivery.Attempts, At: r.at, Took: r.took, Status: r.status, Error: r.err},
	}
	end := c.Delivery.Since.Add(l.Window)
	switch {
	case r.err == "":
		s.Status = store.DeliveryDelivered
	case r.status == http.StatusGone:
		s.Disable = &store.WebhookDisabling{Reason: "the receiver answered with status 410 (gone)", At: now}
	case r.cut:
		s.Status, s.NextAt = store.DeliveryPending, now
	case now.Before(end):
		s.Status, s.NextAt = store.DeliveryPending, now.Add(l.wait(c.Delivery.Tries, r.retryAfter, chance))
		if s.NextAt.After(end) {
			s.NextAt = end
		}
	case c.Delivery.Tries < l.MinTries:
		s.Status, s.NextAt = store.DeliveryPending, now.Add(l.wait(c.Delivery.Tries, 0, chance))
	}
	if s.Disable == nil && s.Health < 0 && l.hopeless(c, now) {
		s.Disable = &store.WebhookDisabling{
			Reason: fmt.Sprintf("nothing was delivered since %s; the last error: %s", c.Webhook.FailingSince.UTC().Format(time.RFC3339), r.err),
			At:     now, Failing: c.Webhook.FailingSince,
		}
	}
	return s
}

// hopeless says whether a receiver that failed once more has failed for too long. One that
// had nothing to fail on for days has the least number of tries first.
func (l Limits) hopeless(c store.ClaimedDelivery, now time.Time) bool {
	since := c.Webhook.FailingSince
	return !since.IsZero() && !now.Before(since.Add(l.Failing)) && c.Delivery.Tries >= l.MinTries
}

// skip ends a delivery that cannot be sent any more.
func skip(c store.ClaimedDelivery, why string, now time.Time) store.DeliverySettlement {
	return store.DeliverySettlement{ID: c.Delivery.ID, Status: store.DeliveryFailed, Error: why, At: now}
}

// share is how many attempts of a webhook may run at once, when its last ones failed in
// a row and so many places are free. A receiver that always fails is left with one,
// and the fewer places are free the fewer go to each, so that slow receivers do not
// take all and the next one finds a place.
func (l Limits) share(failures, free int) int {
	byHealth := l.PerWebhook >> min(failures/4, 16)
	byRoom := 1 + free/(4*l.PerWebhook)
	return max(1, min(byHealth, byRoom))
}

// deliveries are those of the events for the webhooks that want them and have not seen
// them pass.
func deliveries(webhooks []store.Webhook, events []store.Event, now time.Time) []store.Delivery {
	var out []store.Delivery
	for _, e := range events {
		for _, w := range webhooks {
			if e.Seq > w.After && Wants(w, e) {
				out = append(out, delivery(w, e, now))
			}
		}
	}
	return out
}

// delivery is a new one. Events of no sandbox have no order to keep: each is alone in
// its lane.
func delivery(w store.Webhook, e store.Event, now time.Time) store.Delivery {
	d := store.Delivery{
		ID: MessageID(w.ID, e), Webhook: w.ID, Project: w.Project, Sandbox: e.Sandbox, Seq: e.Seq, Type: e.Type,
		Lane: e.Sandbox, Status: store.DeliveryPending, Since: now, NextAt: now, CreatedAt: now,
	}
	if d.Lane == "" {
		d.Lane = d.ID
	}
	return d
}
