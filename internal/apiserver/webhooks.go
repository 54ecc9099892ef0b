package apiserver

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

// CreateWebhook makes a webhook and shows its secret.
func (s *server) CreateWebhook(ctx context.Context, r CreateWebhookRequestObject) (CreateWebhookResponseObject, error) {
	v, err := s.control.CreateWebhook(durable(ctx), callOf(ctx).caller, control.CreateWebhookRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), URL: r.Body.URL, Description: r.Body.Description,
		Types: r.Body.Events, Secret: r.Body.Secret,
	})
	if err != nil {
		return nil, err
	}
	return CreateWebhook201JSONResponse(secretOf(v)), nil
}

// ListWebhooks gives a page of webhooks.
func (s *server) ListWebhooks(ctx context.Context, r ListWebhooksRequestObject) (ListWebhooksResponseObject, error) {
	page, err := s.control.Webhooks(ctx, callOf(ctx).caller, control.PageQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor})
	if err != nil {
		return nil, err
	}
	out := ListWebhooks200JSONResponse{Webhooks: []api.Webhook{}, NextCursor: page.NextCursor}
	for _, v := range page.Webhooks {
		out.Webhooks = append(out.Webhooks, webhookOf(v))
	}
	return out, nil
}

// GetWebhook gives a webhook.
func (s *server) GetWebhook(ctx context.Context, r GetWebhookRequestObject) (GetWebhookResponseObject, error) {
	v, err := s.control.Webhook(ctx, callOf(ctx).caller, r.ID)
	if err != nil {
		return nil, err
	}
	return GetWebhook200JSONResponse(webhookOf(v)), nil
}

// UpdateWebhook changes a webhook.
func (s *server) UpdateWebhook(ctx context.Context, r UpdateWebhookRequestObject) (UpdateWebhookResponseObject, error) {
	v, err := s.control.UpdateWebhook(durable(ctx), callOf(ctx).caller, r.ID, control.UpdateWebhookRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), URL: r.Body.URL, Description: r.Body.Description,
		Types: r.Body.Events, Enabled: r.Body.Enabled,
	})
	if err != nil {
		return nil, err
	}
	return UpdateWebhook200JSONResponse(webhookOf(v)), nil
}

// DeleteWebhook removes a webhook.
func (s *server) DeleteWebhook(ctx context.Context, r DeleteWebhookRequestObject) (DeleteWebhookResponseObject, error) {
	err := s.control.DeleteWebhook(durable(ctx), callOf(ctx).caller, r.ID, idempotency(ctx, r.Params.IdempotencyKey))
	return DeleteWebhook204Response{}, err
}

// RotateWebhookSecret makes another secret and shows it.
func (s *server) RotateWebhookSecret(ctx context.Context, r RotateWebhookSecretRequestObject) (RotateWebhookSecretResponseObject, error) {
	ask := control.RotateSecretRequest{Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Secret: r.Body.Secret}
	if seconds := r.Body.OverlapSeconds; seconds != nil {
		overlap := time.Duration(*seconds) * time.Second
		ask.Overlap = &overlap
	}
	v, err := s.control.RotateWebhookSecret(durable(ctx), callOf(ctx).caller, r.ID, ask)
	if err != nil {
		return nil, err
	}
	return RotateWebhookSecret200JSONResponse(secretOf(v)), nil
}

// TestWebhook sends a message now.
func (s *server) TestWebhook(ctx context.Context, r TestWebhookRequestObject) (TestWebhookResponseObject, error) {
	waiting, cancel := Lasting(ctx)
	defer cancel()
	a, err := s.control.TestWebhook(waiting, callOf(ctx).caller, r.ID)
	if err != nil {
		return nil, err
	}
	return TestWebhook200JSONResponse(attemptOf(a)), nil
}

// ReplayWebhook sends events again.
func (s *server) ReplayWebhook(ctx context.Context, r ReplayWebhookRequestObject) (ReplayWebhookResponseObject, error) {
	ways := 0
	for _, given := range []bool{r.Body.Delivery != "", r.Body.From != 0, r.Body.Since != ""} {
		if given {
			ways++
		}
	}
	if ways != 1 || r.Body.Delivery != "" && r.Body.To != 0 {
		return nil, fault.New(fault.InvalidArgument, "cannot replay: give one of delivery, from and since, and to only with the last two")
	}
	ask := control.ReplayRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Delivery: r.Body.Delivery, From: r.Body.From, To: r.Body.To,
	}
	var err error
	if ask.Since, err = parseInstant("since", r.Body.Since); err != nil {
		return nil, err
	}
	n, err := s.control.ReplayWebhook(durable(ctx), callOf(ctx).caller, r.ID, ask)
	if err != nil {
		return nil, err
	}
	return ReplayWebhook200JSONResponse{Deliveries: n}, nil
}

// ListDeliveries gives a page of a webhook's deliveries.
func (s *server) ListDeliveries(ctx context.Context, r ListDeliveriesRequestObject) (ListDeliveriesResponseObject, error) {
	page, err := s.control.Deliveries(ctx, callOf(ctx).caller, r.ID, control.DeliveryQuery{
		Limit: r.Params.Limit, Cursor: r.Params.Cursor, Status: control.DeliveryStatus(r.Params.Status), Sandbox: r.Params.Sandbox,
	})
	if err != nil {
		return nil, err
	}
	out := ListDeliveries200JSONResponse{Deliveries: []api.Delivery{}, NextCursor: page.NextCursor}
	for _, d := range page.Deliveries {
		out.Deliveries = append(out.Deliveries, deliveryOf(d))
	}
	return out, nil
}

// GetDelivery gives a delivery with its log.
func (s *server) GetDelivery(ctx context.Context, r GetDeliveryRequestObject) (GetDeliveryResponseObject, error) {
	d, log, err := s.control.Delivery(ctx, callOf(ctx).caller, r.ID, r.Delivery)
	if err != nil {
		return nil, err
	}
	out := GetDelivery200JSONResponse{Delivery: deliveryOf(d), Attempts: []api.DeliveryAttempt{}}
	for _, a := range log {
		out.Attempts = append(out.Attempts, attemptOf(a))
	}
	return out, nil
}

// webhookOf is a webhook in the API's words, without its secrets.
func webhookOf(v control.WebhookView) api.Webhook {
	w := v.Webhook
	out := api.Webhook{
		ID: w.ID, URL: w.URL, Description: w.Description, Events: w.Types, Status: api.WebhookStatusEnabled,
		FailingSince: api.AtOrNil(w.FailingSince), LastError: w.FailingError,
		DisabledAt: api.AtOrNil(w.DisabledAt), DisabledReason: w.DisabledReason, Pending: v.Pending, CreatedAt: api.At(w.CreatedAt),
	}
	switch {
	case !w.DisabledAt.IsZero():
		out.Status = api.WebhookStatusDisabled
	case !w.FailingSince.IsZero():
		out.Status = api.WebhookStatusFailing
	}
	if out.Events == nil {
		out.Events = []string{}
	}
	now := time.Now()
	for _, secret := range w.Secrets {
		if secret.Until.IsZero() || now.Before(secret.Until) {
			out.Secrets++
		}
	}
	return out
}

// secretOf is a webhook with its newest secret.
func secretOf(v control.WebhookView) api.WebhookSecret {
	out := api.WebhookSecret{Webhook: webhookOf(v)}
	if len(v.Webhook.Secrets) > 0 {
		out.Secret = v.Webhook.Secrets[0].Value
	}
	return out
}

func deliveryOf(d control.Delivery) api.Delivery {
	out := api.Delivery{
		ID: d.ID, Seq: d.Seq, Type: d.Type, Sandbox: d.Sandbox, Status: api.DeliveryStatus(d.Status), Error: d.Error,
		Attempts: d.Attempts, EndedAt: api.AtOrNil(d.EndedAt), CreatedAt: api.At(d.CreatedAt),
	}
	if d.EndedAt.IsZero() {
		out.NextAt = api.AtOrNil(d.NextAt)
	}
	return out
}

func attemptOf(a control.DeliveryAttempt) api.DeliveryAttempt {
	return api.DeliveryAttempt{Number: a.Number, At: api.At(a.At), Milliseconds: a.Took.Milliseconds(), Status: a.Status, Error: a.Error}
}
