package webhook

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// Replay sends the events from one number to another (both included) to a webhook
// again, also those that it has never had: from before it was made, or while it was
// disabled. Those that its filter refuses are left out. It gives the number of
// deliveries. They have the ids that they had before, keep their order among each
// other, and hold up nothing that happens meanwhile. Where it stops in the middle, a
// second call does no harm.
func (d *Deliverer) Replay(ctx context.Context, webhook store.Webhook, from, to int64) (int, error) {
	if from < 1 || to < from {
		return 0, fault.New(fault.InvalidArgument, "cannot replay the events %d to %d: give two numbers from 1 up, the smaller first", from, to)
	}
	if most := int64(d.limits.Backlog); to-from >= most {
		return 0, fault.New(fault.InvalidArgument, "cannot replay the events %d to %d at a time: %d are the most; replay them in parts", from, to, most)
	}
	if err := enabled(webhook); err != nil {
		return 0, err
	}
	run, now, total := "replay-"+rand.Text(), time.Now(), 0
	for after := from - 1; after < to; {
		events, err := d.store.Events(ctx, store.EventFilter{After: after, Limit: page, Project: webhook.Project})
		if err != nil {
			return total, err
		}
		if len(events) == 0 {
			break
		}
		var again []store.Delivery
		for _, e := range events {
			if e.Seq <= to && Wants(webhook, e) {
				again = append(again, replayed(webhook, e, run, now))
			}
		}
		if len(again) > 0 {
			if err := d.store.ReplayDeliveries(ctx, again); err != nil {
				return total, err
			}
			total += len(again)
			d.Nudge()
		}
		after = events[len(events)-1].Seq
	}
	return total, nil
}

// ReplayOne sends one delivery of a webhook again, whatever the filter says today. One
// that is pending is sent now instead of at its next time.
func (d *Deliverer) ReplayOne(ctx context.Context, webhook store.Webhook, id string) error {
	if err := enabled(webhook); err != nil {
		return err
	}
	old, err := d.store.Delivery(ctx, id)
	if err != nil {
		return err
	}
	if old.Webhook != webhook.ID {
		return fault.New(fault.NotFound, "the webhook %s has no delivery %s", webhook.ID, id)
	}
	events, err := d.store.Events(ctx, store.EventFilter{After: old.Seq - 1, Limit: 1})
	if f := fault.Of(err); f != nil && f.Reason != store.ReasonPruned {
		return err
	}
	if len(events) == 0 || events[0].Seq != old.Seq || MessageID(webhook.ID, events[0]) != id {
		return fault.New(fault.FailedPrecondition, "cannot replay the delivery %s: its event is no longer kept", id).Because(store.ReasonPruned)
	}
	if err := d.store.ReplayDeliveries(ctx, []store.Delivery{replayed(webhook, events[0], "replay-"+rand.Text(), time.Now())}); err != nil {
		return err
	}
	d.Nudge()
	return nil
}

// replayed is a delivery in a lane of the replay's own.
func replayed(w store.Webhook, e store.Event, run string, now time.Time) store.Delivery {
	d := delivery(w, e, now)
	d.Lane = run + "/" + d.Lane
	return d
}

func enabled(w store.Webhook) error {
	if w.DisabledAt.IsZero() {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "cannot replay to the webhook %s: it is disabled (%s); enable it first", w.ID, w.DisabledReason).
		Because("disabled")
}
