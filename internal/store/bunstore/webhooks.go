package bunstore

import (
	"context"
	"slices"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// Whoever writes deliveries of a webhook holds the webhook's row: which of them is at the
// head of a lane rests on those that are not there, and two writers at a time could leave a
// lane without one.

var _ store.Webhooks = (*Store)(nil)

// chunk is how many rows one statement writes.
const chunk = 500

// updateWebhooks is Update for what is not told through a store.Tx.
func (s *Store) updateWebhooks(ctx context.Context, fn func(context.Context, *tx) error) error {
	return s.Update(ctx, func(ctx context.Context, stx store.Tx) error { return fn(ctx, stx.(*tx)) })
}

// WebhookCursor implements store.Webhooks.
func (s *Store) WebhookCursor(ctx context.Context) (int64, error) {
	var at int64
	err := s.read.NewRaw("SELECT seq FROM webhook_cursor").Scan(ctx, &at)
	return at, s.engine.wrap(err, "read the cursor of the webhooks")
}

// EnabledWebhooks implements store.Webhooks.
func (s *Store) EnabledWebhooks(ctx context.Context) ([]store.Webhook, error) {
	var rows []webhookRow
	if err := s.read.NewSelect().Model(&rows).Where("disabled_at IS NULL").OrderExpr("id").Scan(ctx); err != nil {
		return nil, s.engine.wrap(err, "read webhooks")
	}
	return webhooksOf(rows)
}

// AddDeliveries implements store.Webhooks.
func (s *Store) AddDeliveries(ctx context.Context, from, to int64, deliveries []store.Delivery) error {
	return s.updateWebhooks(ctx, func(ctx context.Context, t *tx) error {
		res, err := t.db.NewRaw("UPDATE webhook_cursor SET seq = ? WHERE seq = ?", to, from).Exec(ctx)
		if err != nil {
			return t.fail(err, "write the cursor of the webhooks")
		}
		n, err := res.RowsAffected()
		if err != nil {
			return t.fail(err, "write the cursor of the webhooks")
		}
		if n == 0 {
			return fault.New(fault.Conflict, "another server was quicker to make the deliveries of the events after %d", from).Because(store.ReasonStale)
		}
		deliveries, err := t.addressed(ctx, deliveries)
		if err != nil {
			return err
		}
		return t.insertDeliveries(ctx, deliveries)
	})
}

// addressed holds the webhooks of deliveries and gives those whose webhook is there.
func (t *tx) addressed(ctx context.Context, deliveries []store.Delivery) ([]store.Delivery, error) {
	var ids, there []string
	for _, d := range deliveries {
		ids = append(ids, d.Webhook)
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	if len(ids) == 0 {
		return nil, nil
	}
	q := t.db.NewSelect().Model((*webhookRow)(nil)).Column("id").Where("id IN (?)", bun.List(ids)).OrderExpr("id")
	if err := t.held(q).Scan(ctx, &there); err != nil {
		return nil, t.fail(err, "read webhooks")
	}
	return slices.DeleteFunc(slices.Clone(deliveries), func(d store.Delivery) bool { return !slices.Contains(there, d.Webhook) }), nil
}

func (t *tx) insertDeliveries(ctx context.Context, deliveries []store.Delivery) error {
	for some := range slices.Chunk(deliveries, chunk) {
		rows := make([]deliveryRow, len(some))
		ids := make([]string, len(some))
		for i, d := range some {
			rows[i], ids[i] = rowOfDelivery(d), d.ID
		}
		if _, err := t.db.NewInsert().Model(&rows).On("CONFLICT (id) DO NOTHING").Exec(ctx); err != nil {
			return t.fail(err, "write deliveries")
		}
		if err := t.lift(ctx, ids); err != nil {
			return err
		}
	}
	return nil
}

// behind says of a delivery d that a pending one of its lane is before it.
const behind = `EXISTS (SELECT 1 FROM webhook_deliveries AS b WHERE b.webhook = d.webhook AND b.lane = d.lane
	AND b.status = 'pending' AND (b.seq < d.seq OR (b.seq = d.seq AND b.id < d.id)))`

// lift makes those of some deliveries that are at the head of their lane its head.
func (t *tx) lift(ctx context.Context, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	_, err := t.db.NewUpdate().Model((*deliveryRow)(nil)).Set("head = ?", true).
		Where("id IN (?) AND status = 'pending'", bun.List(ids)).Where("NOT " + behind).Exec(ctx)
	return t.fail(err, "find the heads of lanes")
}

// DueWebhooks implements store.Webhooks.
func (s *Store) DueWebhooks(ctx context.Context, now time.Time, without []string, limit int) (store.DueWebhooks, error) {
	var due store.DueWebhooks
	heads := func(q *bun.SelectQuery) *bun.SelectQuery {
		q = q.Model((*deliveryRow)(nil)).Where("head")
		if len(without) > 0 {
			q = q.Where("webhook NOT IN (?)", bun.List(without))
		}
		return q
	}
	err := heads(s.read.NewSelect()).Column("webhook").Where("claim_at <= ?", millis(now)).
		GroupExpr("webhook").OrderExpr("MIN(next_at), MIN(seq)").Limit(int64(limit)).Scan(ctx, &due.IDs)
	if err != nil {
		return due, s.engine.wrap(err, "read what is due")
	}
	var next int64
	err = heads(s.read.NewSelect()).ColumnExpr("COALESCE(MIN(claim_at), 0)").Where("claim_at > ?", millis(now)).Scan(ctx, &next)
	due.Next = instant(next)
	return due, s.engine.wrap(err, "read what is due next")
}

// webhook reads and holds a webhook by id alone; nil where it is gone.
func (t *tx) webhook(ctx context.Context, id string) (*webhookRow, error) {
	var row webhookRow
	err := t.held(t.db.NewSelect().Model(&row).Where("id = ?", text(id))).Scan(ctx)
	if missing(err) {
		return nil, nil
	}
	return &row, t.fail(err, "read a webhook")
}

// ClaimDeliveries implements store.Webhooks.
func (s *Store) ClaimDeliveries(ctx context.Context, c store.DeliveryClaim) (out []store.ClaimedDelivery, err error) {
	err = s.updateWebhooks(ctx, func(ctx context.Context, t *tx) error {
		out = nil
		hook, err := t.webhook(ctx, c.Webhook)
		if err != nil || hook == nil {
			return err
		}
		to, err := hook.webhook()
		if err != nil {
			return err
		}
		var rows []deliveryRow
		err = t.db.NewSelect().Model(&rows).Where("head AND webhook = ? AND claim_at <= ?", c.Webhook, millis(c.Now)).
			OrderExpr("next_at, seq").Limit(int64(c.Limit)).Scan(ctx)
		if err != nil || len(rows) == 0 {
			return t.fail(err, "read what is due")
		}
		ids, seqs := make([]string, len(rows)), make([]int64, len(rows))
		for i := range rows {
			ids[i], seqs[i] = rows[i].ID, rows[i].Seq
			rows[i].Attempts++
			rows[i].Tries++
		}
		_, err = t.db.NewUpdate().Model((*deliveryRow)(nil)).
			Set("lease = ?, leased_until = ?, claim_at = ?, attempts = attempts + 1, tries = tries + 1", c.Lease, millis(c.Until), millis(c.Until)).
			Where("id IN (?)", bun.List(ids)).Exec(ctx)
		if err != nil {
			return t.fail(err, "claim deliveries")
		}
		var events []EventRow
		if err := t.db.NewSelect().Model(&events).Where("seq IN (?)", bun.List(seqs)).Scan(ctx); err != nil {
			return t.fail(err, "read events")
		}
		bySeq := map[int64]store.Event{}
		for i := range events {
			bySeq[events[i].Seq] = events[i].event()
		}
		for i := range rows {
			out = append(out, store.ClaimedDelivery{Delivery: rows[i].delivery(), Webhook: to, Event: bySeq[rows[i].Seq]})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// SettleDelivery implements store.Webhooks.
func (s *Store) SettleDelivery(ctx context.Context, d store.DeliverySettlement) error {
	stale := fault.New(fault.Conflict, "the delivery %s is not under this lease any more", d.ID).Because(store.ReasonStale)
	return s.updateWebhooks(ctx, func(ctx context.Context, t *tx) error {
		hook, row, err := t.deliveryHeld(ctx, d.ID)
		if err != nil {
			return err
		}
		if row == nil || d.Lease == "" || row.Lease != d.Lease {
			return stale
		}
		row.Status, row.Error, row.Lease, row.LeasedUntil = string(d.Status), text(d.Error), "", 0
		if d.Status == store.DeliveryPending {
			row.NextAt = millis(d.NextAt)
		} else {
			row.EndedAt, row.Head = millis(d.At), false
		}
		row.ClaimAt = row.NextAt
		if _, err := t.db.NewUpdate().Model(row).WherePK().Exec(ctx); err != nil {
			return t.fail(err, "settle a delivery")
		}
		if !row.Head {
			if err := t.next(ctx, row); err != nil {
				return err
			}
		}
		if err := t.note(ctx, d); err != nil {
			return err
		}
		if err := t.health(ctx, hook, d); err != nil || d.Disable == nil {
			return err
		}
		return t.disable(ctx, hook, *d.Disable)
	})
}

// deliveryHeld reads a delivery under its webhook's lock; nil where one of them is gone.
func (t *tx) deliveryHeld(ctx context.Context, id string) (*webhookRow, *deliveryRow, error) {
	row := deliveryRow{ID: text(id)}
	err := t.db.NewSelect().Model(&row).WherePK().Scan(ctx)
	if missing(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, t.fail(err, "read a delivery")
	}
	hook, err := t.webhook(ctx, row.Webhook)
	if err != nil || hook == nil {
		return nil, nil, err
	}
	now := deliveryRow{ID: row.ID} // as it is since the lock
	err = t.db.NewSelect().Model(&now).WherePK().Scan(ctx)
	if missing(err) {
		return nil, nil, nil
	}
	return hook, &now, t.fail(err, "read a delivery")
}

// next lifts what was behind a delivery that has ended.
func (t *tx) next(ctx context.Context, row *deliveryRow) error {
	var id string
	err := t.db.NewSelect().Model((*deliveryRow)(nil)).Column("id").Where("webhook = ? AND lane = ? AND status = 'pending'", row.Webhook, row.Lane).
		OrderExpr("seq, id").Limit(1).Scan(ctx, &id)
	if missing(err) {
		return nil
	}
	if err != nil {
		return t.fail(err, "read a lane")
	}
	return t.lift(ctx, []string{id})
}

// note writes an attempt into the log, and keeps that bounded.
func (t *tx) note(ctx context.Context, d store.DeliverySettlement) error {
	a := d.Attempt
	if a == nil {
		return nil
	}
	row := attemptRow{Delivery: d.ID, N: a.Number, At: millis(a.At), Took: a.Took.Milliseconds(), Status: a.Status, Error: text(a.Error)}
	if _, err := t.db.NewInsert().Model(&row).Exec(ctx); err != nil {
		return t.fail(err, "write the log of a delivery")
	}
	_, err := t.db.NewDelete().Model((*attemptRow)(nil)).Where("delivery = ? AND n <= ?", d.ID, a.Number-store.KeptAttempts).Exec(ctx)
	return t.fail(err, "prune the log of a delivery")
}

// health writes what an attempt says of the receiver.
func (t *tx) health(ctx context.Context, hook *webhookRow, d store.DeliverySettlement) error {
	before := *hook
	switch {
	case d.Health > 0:
		hook.FailingSince, hook.FailingError = 0, ""
	case d.Health < 0:
		if hook.FailingSince == 0 {
			hook.FailingSince = millis(d.At)
		}
		hook.FailingError = text(d.Error)
	}
	if *hook == before {
		return nil
	}
	_, err := t.db.NewUpdate().Model(hook).Column("failing_since", "failing_error").WherePK().Exec(ctx)
	return t.fail(err, "write how a receiver is")
}

// disable disables a webhook that is held, where that is still to be done.
func (t *tx) disable(ctx context.Context, hook *webhookRow, d store.WebhookDisabling) error {
	if hook.DisabledAt != 0 || !d.Failing.IsZero() && hook.FailingSince != millis(d.Failing) {
		return nil
	}
	hook.DisabledAt, hook.DisabledReason = millis(d.At), text(d.Reason)
	hook.Version++
	if _, err := t.db.NewUpdate().Model(hook).Column("disabled_at", "disabled_reason", "version").WherePK().Exec(ctx); err != nil {
		return t.fail(err, "disable a webhook")
	}
	if err := t.EndDeliveries(ctx, hook.ID, "the webhook is disabled: "+d.Reason, d.At); err != nil {
		return err
	}
	return t.AddEvent(ctx, d.Event)
}

// DisableWebhook implements store.Webhooks.
func (s *Store) DisableWebhook(ctx context.Context, id string, d store.WebhookDisabling) error {
	return s.updateWebhooks(ctx, func(ctx context.Context, t *tx) error {
		hook, err := t.webhook(ctx, id)
		if err != nil || hook == nil {
			return err
		}
		return t.disable(ctx, hook, d)
	})
}

// ReplayDeliveries implements store.Webhooks.
func (s *Store) ReplayDeliveries(ctx context.Context, deliveries []store.Delivery) error {
	return s.updateWebhooks(ctx, func(ctx context.Context, t *tx) error {
		deliveries, err := t.addressed(ctx, deliveries)
		if err != nil || len(deliveries) == 0 {
			return err
		}
		ids := make([]string, len(deliveries))
		for i, d := range deliveries {
			ids[i] = d.ID
		}
		var rows []deliveryRow
		if err := t.db.NewSelect().Model(&rows).Where("id IN (?)", bun.List(ids)).Scan(ctx); err != nil {
			return t.fail(err, "read deliveries")
		}
		old := map[string]*deliveryRow{}
		for i := range rows {
			old[rows[i].ID] = &rows[i]
		}
		var fresh []store.Delivery
		for _, d := range deliveries {
			row := old[d.ID]
			if row == nil {
				fresh = append(fresh, d)
				continue
			}
			again(row, d)
			if _, err := t.db.NewUpdate().Model(row).WherePK().Exec(ctx); err != nil {
				return t.fail(err, "replay a delivery")
			}
		}
		if err := t.insertDeliveries(ctx, fresh); err != nil {
			return err
		}
		return t.lift(ctx, ids)
	})
}

// again makes a delivery pending that is there already.
func again(row *deliveryRow, d store.Delivery) {
	if row.Status == string(store.DeliveryPending) {
		row.NextAt = min(row.NextAt, millis(d.NextAt))
	} else {
		row.Status, row.Lane, row.NextAt, row.EndedAt, row.Error = string(store.DeliveryPending), d.Lane, millis(d.NextAt), 0, ""
	}
	row.Since, row.Tries, row.ClaimAt = millis(d.Since), 0, max(row.NextAt, row.LeasedUntil)
}

// Overfull implements store.Webhooks.
func (s *Store) Overfull(ctx context.Context, most int) ([]store.Webhook, error) {
	var rows []webhookRow
	err := s.read.NewSelect().Model(&rows).Where("disabled_at IS NULL").
		Where("id IN (SELECT webhook FROM webhook_deliveries WHERE status = 'pending' GROUP BY webhook HAVING COUNT(*) > ?)", most).OrderExpr("id").Scan(ctx)
	if err != nil {
		return nil, s.engine.wrap(err, "count what waits")
	}
	return webhooksOf(rows)
}

// Webhook implements store.Webhooks.
func (s *Store) Webhook(ctx context.Context, id string) (store.Webhook, error) {
	var row webhookRow
	err := s.read.NewSelect().Model(&row).Where("id = ?", text(id)).Scan(ctx)
	if missing(err) {
		return store.Webhook{}, noWebhook(id)
	}
	if err != nil {
		return store.Webhook{}, s.engine.wrap(err, "read a webhook")
	}
	return row.webhook()
}

// Delivery implements store.Webhooks.
func (s *Store) Delivery(ctx context.Context, id string) (store.Delivery, error) {
	var row deliveryRow
	err := s.read.NewSelect().Model(&row).Where("id = ?", text(id)).Scan(ctx)
	if missing(err) {
		return store.Delivery{}, fault.New(fault.NotFound, "there is no delivery %s", id)
	}
	if err != nil {
		return store.Delivery{}, s.engine.wrap(err, "read a delivery")
	}
	return row.delivery(), nil
}
