package control

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/webhook"
)

// What a project may have, and for how long a secret that was replaced signs along.
const (
	maxWebhooks    = 50
	maxDescription = 200
	maxOverlap     = 7 * 24 * time.Hour
	defaultOverlap = 24 * time.Hour
)

// The types of webhooks that callers of Control handle.
type (
	Delivery        = store.Delivery
	DeliveryStatus  = store.DeliveryStatus
	DeliveryAttempt = store.DeliveryAttempt
)

// WebhookView is a webhook as readers see it. Its secrets are in it, and for nobody but
// who has made them.
type WebhookView struct {
	Webhook store.Webhook
	Pending int64 // deliveries that wait to be sent
}

// CreateWebhookRequest asks for a webhook.
type CreateWebhookRequest struct {
	Idempotency Idempotency
	URL         string
	Description string   // for people
	Types       []string // of events; none is all
	Secret      string   // "" makes one
}

// UpdateWebhookRequest changes a webhook. Nil fields stay as they are.
type UpdateWebhookRequest struct {
	Idempotency Idempotency
	URL         *string
	Description *string
	Types       *[]string
	Enabled     *bool
}

// RotateSecretRequest asks for another signing secret.
type RotateSecretRequest struct {
	Idempotency Idempotency
	Secret      string         // "" makes one
	Overlap     *time.Duration // how long the one before signs along; nil is a day
}

// ReplayRequest asks that events be sent again: one delivery, or those from one number
// to another, both included. Where From is 0, those from the instant Since on; where To
// is 0, those up to now.
type ReplayRequest struct {
	Idempotency Idempotency
	Delivery    string
	From, To    int64
	Since       time.Time
}

// DeliveryQuery selects deliveries of a webhook, the newest event first.
type DeliveryQuery struct {
	Limit   *int64
	Cursor  string
	Status  DeliveryStatus // "" is any
	Sandbox string         // id or name; "" is any
}

// DeliveryPage is one page of deliveries. NextCursor is "" on the last.
type DeliveryPage struct {
	Deliveries []Delivery
	NextCursor string
}

// WebhookPage is one page of webhooks, in the order of their making.
type WebhookPage struct {
	Webhooks   []WebhookView
	NextCursor string
}

func noWebhook(id string) error {
	return fault.New(fault.NotFound, "there is no webhook %s; `hutch webhooks ls` lists those that are", shown(id)).Because("webhook")
}

// webhookOf reads a webhook of the actor's project with what waits for it.
func webhookOf(ctx context.Context, r store.Reader, a Actor, id string) (WebhookView, error) {
	w, err := r.ProjectWebhook(ctx, a.Project, id)
	if fault.Is(err, fault.NotFound) {
		return WebhookView{}, noWebhook(id)
	}
	if err != nil {
		return WebhookView{}, err
	}
	waiting, err := r.PendingDeliveries(ctx, id)
	return WebhookView{Webhook: w, Pending: waiting[id]}, err
}

// webhookAgain answers a repeated call on webhooks with the present state.
func webhookAgain(a Actor) func(context.Context, store.Reader, store.Request) (WebhookView, error) {
	return func(ctx context.Context, r store.Reader, seen store.Request) (WebhookView, error) {
		return webhookOf(ctx, r, a, seen.Resource)
	}
}

func validDescription(text string) error {
	if len(text) > maxDescription || !printable(text) {
		return invalid("description", "cannot take this description: it may have up to %d bytes of printable text in one line", maxDescription)
	}
	return nil
}

// CreateWebhook makes a webhook. What happens from now on is sent to it.
func (c *Control) CreateWebhook(ctx context.Context, a Actor, r CreateWebhookRequest) (WebhookView, error) {
	check := func() error {
		if err := c.webhooks.CheckURL(r.URL); err != nil {
			return err
		}
		if err := validDescription(r.Description); err != nil {
			return err
		}
		if err := webhook.CheckTypes(r.Types); err != nil || r.Secret == "" {
			return err
		}
		return webhook.CheckSecret(r.Secret)
	}
	secret := r.Secret
	if secret == "" {
		secret = webhook.NewSecret()
	}
	v, _, err := once(ctx, c, a, r.Idempotency, check, webhookAgain(a), func(ctx context.Context, w *writer) (WebhookView, error) {
		if err := w.Lock(ctx, "webhooks "+a.Project); err != nil {
			return WebhookView{}, err
		}
		have, err := w.ProjectWebhooks(ctx, a.Project, store.Page{})
		if err != nil {
			return WebhookView{}, err
		}
		if len(have) >= maxWebhooks {
			return WebhookView{}, fault.New(fault.QuotaExceeded, "cannot make a webhook: the project has %d, and that is the most; delete one first", len(have)).Because("webhooks")
		}
		last, err := w.NumberedUpTo(ctx)
		if err != nil {
			return WebhookView{}, err
		}
		made := store.Webhook{
			ID: c.newID("wh"), Project: a.Project, URL: r.URL, Description: r.Description, Types: r.Types,
			Secrets: webhook.Rotate(nil, secret, w.at, 0), After: last, CreatedAt: w.at, Version: 1,
		}
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), made.ID
		if err := w.InsertWebhook(ctx, made); err != nil {
			return WebhookView{}, err
		}
		return WebhookView{Webhook: made}, w.event(ctx, "webhook.created", "", "", map[string]any{"webhook_id": made.ID})
	})
	return v, err
}

// Webhook gives a webhook by id.
func (c *Control) Webhook(ctx context.Context, a Actor, id string) (v WebhookView, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		v, err = webhookOf(ctx, r, a, id)
		return err
	})
	return v, err
}

// Webhooks gives a page of the project's webhooks.
func (c *Control) Webhooks(ctx context.Context, a Actor, q PageQuery) (WebhookPage, error) {
	var out WebhookPage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		rows, err := r.ProjectWebhooks(ctx, a.Project, page)
		if err != nil {
			return err
		}
		rows, out.NextCursor = cut(page, rows, func(w store.Webhook) store.Cursor { return store.Cursor{At: w.CreatedAt, ID: w.ID} })
		var ids []string
		for _, w := range rows {
			ids = append(ids, w.ID)
		}
		waiting, err := r.PendingDeliveries(ctx, ids...)
		for _, w := range rows {
			out.Webhooks = append(out.Webhooks, WebhookView{Webhook: w, Pending: waiting[w.ID]})
		}
		return err
	})
	return out, err
}

// changeWebhook writes what change makes of a webhook, with an event.
func (c *Control) changeWebhook(ctx context.Context, a Actor, id string, idem Idempotency, check func() error,
	change func(ctx context.Context, w *writer, hook *store.Webhook) (event string, data map[string]any, err error)) (WebhookView, error) {
	v, _, err := once(ctx, c, a, idem, check, webhookAgain(a), func(ctx context.Context, w *writer) (WebhookView, error) {
		v, err := webhookOf(ctx, w, a, id)
		if err != nil {
			return v, err
		}
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), id
		event, data, err := change(ctx, w, &v.Webhook)
		if err != nil {
			return v, err
		}
		if err := w.UpdateWebhook(ctx, &v.Webhook); err != nil {
			return v, err
		}
		data["webhook_id"] = id
		return v, w.event(ctx, event, "", "", data)
	})
	c.webhooks.Nudge()
	return v, err
}

// UpdateWebhook changes a webhook. One that is disabled has what waits for it marked as
// failed; one that is enabled again is sent what happens from then on, and what it missed
// can be replayed.
func (c *Control) UpdateWebhook(ctx context.Context, a Actor, id string, r UpdateWebhookRequest) (WebhookView, error) {
	check := func() error {
		if r.URL != nil {
			if err := c.webhooks.CheckURL(*r.URL); err != nil {
				return err
			}
		}
		if r.Description != nil {
			if err := validDescription(*r.Description); err != nil {
				return err
			}
		}
		if r.Types != nil {
			return webhook.CheckTypes(*r.Types)
		}
		return nil
	}
	return c.changeWebhook(ctx, a, id, r.Idempotency, check, func(ctx context.Context, w *writer, hook *store.Webhook) (string, map[string]any, error) {
		if r.URL != nil && *r.URL != hook.URL {
			hook.URL, hook.FailingSince, hook.FailingError = *r.URL, time.Time{}, ""
		}
		if r.Description != nil {
			hook.Description = *r.Description
		}
		if r.Types != nil {
			hook.Types = *r.Types
		}
		disabled := !hook.DisabledAt.IsZero()
		switch {
		case r.Enabled == nil || *r.Enabled != disabled:
			return "webhook.updated", map[string]any{}, nil
		case disabled:
			last, err := w.NumberedUpTo(ctx)
			hook.After, hook.FailingSince, hook.FailingError = last, time.Time{}, ""
			hook.DisabledAt, hook.DisabledReason = time.Time{}, ""
			return "webhook.enabled", map[string]any{}, err
		}
		hook.DisabledAt, hook.DisabledReason = w.at, "disabled by hand"
		err := w.EndDeliveries(ctx, id, "the webhook is disabled: "+hook.DisabledReason, w.at)
		return "webhook.disabled", map[string]any{"reason": hook.DisabledReason}, err
	})
}

// RotateWebhookSecret puts another secret in front. The one before signs along for the
// overlap.
func (c *Control) RotateWebhookSecret(ctx context.Context, a Actor, id string, r RotateSecretRequest) (WebhookView, error) {
	overlap := defaultOverlap
	if r.Overlap != nil {
		overlap = *r.Overlap
	}
	check := func() error {
		if overlap < 0 || overlap > maxOverlap {
			return invalid("overlap", "cannot let the secret before sign along for %s: from 0 to %s can be asked for", overlap, maxOverlap)
		}
		if r.Secret == "" {
			return nil
		}
		return webhook.CheckSecret(r.Secret)
	}
	secret := r.Secret
	if secret == "" {
		secret = webhook.NewSecret()
	}
	return c.changeWebhook(ctx, a, id, r.Idempotency, check, func(_ context.Context, w *writer, hook *store.Webhook) (string, map[string]any, error) {
		hook.Secrets = webhook.Rotate(hook.Secrets, secret, w.at, overlap)
		return "webhook.secret_rotated", map[string]any{}, nil
	})
}

// DeleteWebhook removes a webhook with its deliveries: nothing is sent to it any more.
func (c *Control) DeleteWebhook(ctx context.Context, a Actor, id string, idem Idempotency) error {
	again := func(context.Context, store.Reader, store.Request) (struct{}, error) { return struct{}{}, nil }
	_, _, err := once(ctx, c, a, idem, nil, again, func(ctx context.Context, w *writer) (struct{}, error) {
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), id
		err := w.DeleteWebhook(ctx, a.Project, id)
		if fault.Is(err, fault.NotFound) {
			return struct{}{}, noWebhook(id)
		}
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, w.event(ctx, "webhook.deleted", "", "", map[string]any{"webhook_id": id})
	})
	return err
}

// TestWebhook sends a message of the type webhook.test now and once, and gives what came of
// it. It is not in the log of deliveries.
func (c *Control) TestWebhook(ctx context.Context, a Actor, id string) (DeliveryAttempt, error) {
	v, err := c.Webhook(ctx, a, id)
	if err != nil {
		return DeliveryAttempt{}, err
	}
	return c.webhooks.Test(ctx, v.Webhook), nil
}

// ReplayWebhook sends events to a webhook again, and gives how many. A repeated call of the
// same request key sends none.
func (c *Control) ReplayWebhook(ctx context.Context, a Actor, id string, r ReplayRequest) (int64, error) {
	var sent int64
	replay := func() error {
		v, err := c.Webhook(ctx, a, id)
		if err != nil {
			return err
		}
		if r.Delivery != "" {
			sent = 1
			return c.webhooks.ReplayOne(ctx, v.Webhook, r.Delivery)
		}
		sent, err = c.replayRange(ctx, v.Webhook, r)
		return err
	}
	again := func(_ context.Context, _ store.Reader, seen store.Request) (int64, error) {
		return strconv.ParseInt(seen.Resource, 10, 64)
	}
	// The replay is done before its key is remembered: where this server dies between, the
	// repeat does it once more, which receivers can tell by the ids.
	n, _, err := once(ctx, c, a, r.Idempotency, replay, again, func(_ context.Context, w *writer) (int64, error) {
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), strconv.FormatInt(sent, 10)
		return sent, nil
	})
	return n, err
}

func (c *Control) replayRange(ctx context.Context, w store.Webhook, r ReplayRequest) (int64, error) {
	from, to := r.From, r.To
	if from == 0 {
		if r.Since.IsZero() {
			return 0, invalid("from", "cannot replay: say from where, by an event's number or a time, or which delivery")
		}
		after, err := c.store.EventStart(ctx, store.EventFilter{}, r.Since, 0)
		if err != nil {
			return 0, err
		}
		from = after + 1
	}
	last, err := c.store.LastEvent(ctx)
	if err != nil {
		return 0, err
	}
	if to == 0 || to > last {
		to = last
	}
	if from > last {
		return 0, nil
	}
	n, err := c.webhooks.Replay(ctx, w, from, to)
	return int64(n), err
}

// Deliveries gives a page of a webhook's deliveries, the newest event first.
func (c *Control) Deliveries(ctx context.Context, a Actor, id string, q DeliveryQuery) (DeliveryPage, error) {
	var out DeliveryPage
	page, err := c.page(q.Limit, "")
	if err != nil {
		return out, err
	}
	f := store.DeliveryFilter{Webhook: id, Status: q.Status, Limit: page.Limit}
	if f.Before, err = deliveryCursor(q.Cursor); err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		if _, err := webhookOf(ctx, r, a, id); err != nil {
			return err
		}
		if q.Sandbox != "" {
			s, err := resolve(ctx, r, a, q.Sandbox)
			if err != nil {
				return err
			}
			f.Sandbox = s.ID
		}
		rows, err := r.Deliveries(ctx, f)
		if len(rows) == page.Limit {
			rows = rows[:page.Limit-1]
			last := rows[len(rows)-1]
			out.NextCursor = base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d %s", last.Seq, last.ID))
		}
		out.Deliveries = rows
		return err
	})
	return out, err
}

func deliveryCursor(cursor string) (store.DeliveryCursor, error) {
	if cursor == "" {
		return store.DeliveryCursor{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(cursor)
	number, id, ok := strings.Cut(string(b), " ")
	seq, numErr := strconv.ParseInt(number, 10, 64)
	if err != nil || numErr != nil || !ok || id == "" {
		return store.DeliveryCursor{}, invalid("cursor", "%s is no cursor: use the next_cursor of the page before, or begin without one", shown(cursor))
	}
	return store.DeliveryCursor{Seq: seq, ID: id}, nil
}

// Delivery gives a delivery of a webhook with its attempts, oldest first.
func (c *Control) Delivery(ctx context.Context, a Actor, id, delivery string) (d Delivery, log []DeliveryAttempt, err error) {
	none := fault.New(fault.NotFound, "the webhook %s has no delivery %s; `hutch webhooks deliveries %s` lists those that it has", id, shown(delivery), id).Because("delivery")
	if _, err := c.Webhook(ctx, a, id); err != nil {
		return d, nil, err
	}
	if d, err = c.store.Delivery(ctx, delivery); fault.Is(err, fault.NotFound) || err == nil && d.Webhook != id {
		return Delivery{}, nil, none
	}
	if err != nil {
		return d, nil, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		log, err = r.Attempts(ctx, delivery)
		return err
	})
	return d, log, err
}
