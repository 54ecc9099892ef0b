package bunstore

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

type webhookRow struct {
	bun.BaseModel `bun:"table:webhooks,alias:w"`

	ID             string `bun:",pk"`
	Project        string
	URL            string `bun:"url"`
	Description    string
	Types          string
	Secrets        string
	AfterSeq       int64
	FailingSince   int64 `bun:",nullzero"`
	FailingError   string
	DisabledAt     int64 `bun:",nullzero"`
	DisabledReason string
	CreatedAt      int64
	Version        int64
}

// secretRow is a signing secret as it is kept.
type secretRow struct {
	Value string `json:"value"`
	Until int64  `json:"until,omitempty"`
}

func rowOfWebhook(w store.Webhook) *webhookRow {
	types := w.Types
	if types == nil {
		types = []string{}
	}
	secrets := []secretRow{}
	for _, s := range w.Secrets {
		secrets = append(secrets, secretRow{Value: s.Value, Until: millis(s.Until)})
	}
	return &webhookRow{
		ID: w.ID, Project: w.Project, URL: text(w.URL), Description: text(w.Description), Types: encode(types), Secrets: encode(secrets),
		AfterSeq: w.After, FailingSince: millis(w.FailingSince), FailingError: text(w.FailingError),
		DisabledAt: millis(w.DisabledAt), DisabledReason: text(w.DisabledReason), CreatedAt: millis(w.CreatedAt), Version: w.Version,
	}
}

func (r *webhookRow) webhook() (store.Webhook, error) {
	w := store.Webhook{
		ID: r.ID, Project: r.Project, URL: r.URL, Description: r.Description, After: r.AfterSeq,
		FailingSince: instant(r.FailingSince), FailingError: r.FailingError,
		DisabledAt: instant(r.DisabledAt), DisabledReason: r.DisabledReason, CreatedAt: instant(r.CreatedAt), Version: r.Version,
	}
	if err := json.Unmarshal([]byte(r.Types), &w.Types); err != nil {
		return w, fmt.Errorf("bunstore: the event types of %s: %w", r.ID, err)
	}
	if len(w.Types) == 0 {
		w.Types = nil
	}
	var secrets []secretRow
	if err := json.Unmarshal([]byte(r.Secrets), &secrets); err != nil {
		return w, fmt.Errorf("bunstore: the secrets of %s cannot be read", r.ID) // the cause would show them
	}
	for _, s := range secrets {
		w.Secrets = append(w.Secrets, store.WebhookSecret{Value: s.Value, Until: instant(s.Until)})
	}
	return w, nil
}

func webhooksOf(rows []webhookRow) ([]store.Webhook, error) {
	out := make([]store.Webhook, len(rows))
	for i := range rows {
		var err error
		if out[i], err = rows[i].webhook(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

type deliveryRow struct {
	bun.BaseModel `bun:"table:webhook_deliveries,alias:d"`

	ID          string `bun:",pk"`
	Webhook     string
	Project     string
	Sandbox     string
	Seq         int64
	Type        string
	Lane        string
	Status      string
	Error       string
	Attempts    int
	Tries       int
	Since       int64
	NextAt      int64
	EndedAt     int64 `bun:",nullzero"`
	CreatedAt   int64
	Head        bool
	ClaimAt     int64
	Lease       string
	LeasedUntil int64
}

func rowOfDelivery(d store.Delivery) deliveryRow {
	return deliveryRow{
		ID: d.ID, Webhook: d.Webhook, Project: d.Project, Sandbox: d.Sandbox, Seq: d.Seq, Type: d.Type, Lane: d.Lane,
		Status: string(d.Status), Error: text(d.Error), Attempts: d.Attempts, Tries: d.Tries, Since: millis(d.Since),
		NextAt: millis(d.NextAt), EndedAt: millis(d.EndedAt), CreatedAt: millis(d.CreatedAt), ClaimAt: millis(d.NextAt),
	}
}

func (r *deliveryRow) delivery() store.Delivery {
	return store.Delivery{
		ID: r.ID, Webhook: r.Webhook, Project: r.Project, Sandbox: r.Sandbox, Seq: r.Seq, Type: r.Type, Lane: r.Lane,
		Status: store.DeliveryStatus(r.Status), Error: r.Error, Attempts: r.Attempts, Tries: r.Tries, Since: instant(r.Since),
		NextAt: instant(r.NextAt), EndedAt: instant(r.EndedAt), CreatedAt: instant(r.CreatedAt),
	}
}

type attemptRow struct {
	bun.BaseModel `bun:"table:webhook_attempts,alias:a"`

	Delivery string `bun:",pk"`
	N        int    `bun:",pk"`
	At       int64
	Took     int64 // milliseconds
	Status   int
	Error    string
}

func noWebhook(id string) error {
	return fault.New(fault.NotFound, "there is no webhook %s", id)
}

// ProjectWebhook implements store.WebhookReader.
func (r *reader) ProjectWebhook(ctx context.Context, project, id string) (store.Webhook, error) {
	var row webhookRow
	err := r.held(r.db.NewSelect().Model(&row).Where("id = ? AND project = ?", text(id), text(project))).Scan(ctx)
	if missing(err) {
		return store.Webhook{}, noWebhook(id)
	}
	if err != nil {
		return store.Webhook{}, r.fail(err, "read a webhook")
	}
	return row.webhook()
}

// ProjectWebhooks implements store.WebhookReader.
func (r *reader) ProjectWebhooks(ctx context.Context, project string, p store.Page) ([]store.Webhook, error) {
	var rows []webhookRow
	if err := after(r.db.NewSelect().Model(&rows).Where("project = ?", text(project)), p).Scan(ctx); err != nil {
		return nil, r.fail(err, "read webhooks")
	}
	return webhooksOf(rows)
}

// PendingDeliveries implements store.WebhookReader.
func (r *reader) PendingDeliveries(ctx context.Context, webhooks ...string) (map[string]int64, error) {
	var rows []struct {
		Webhook string
		N       int64
	}
	out := map[string]int64{}
	if len(webhooks) == 0 {
		return out, nil
	}
	err := r.db.NewSelect().Model((*deliveryRow)(nil)).ColumnExpr("webhook, COUNT(*) AS n").
		Where("status = 'pending' AND webhook IN (?)", bun.List(webhooks)).GroupExpr("webhook").Scan(ctx, &rows)
	for _, row := range rows {
		out[row.Webhook] = row.N
	}
	return out, r.fail(err, "count deliveries")
}

// Deliveries implements store.WebhookReader.
func (r *reader) Deliveries(ctx context.Context, f store.DeliveryFilter) ([]store.Delivery, error) {
	var rows []deliveryRow
	q := r.db.NewSelect().Model(&rows).Where("webhook = ?", text(f.Webhook)).OrderExpr("seq DESC, id DESC")
	if f.Status != "" {
		q = q.Where("status = ?", string(f.Status))
	}
	if f.Sandbox != "" {
		q = q.Where("sandbox = ?", text(f.Sandbox))
	}
	if f.Before != (store.DeliveryCursor{}) {
		q = q.Where("seq < ? OR (seq = ? AND id < ?)", f.Before.Seq, f.Before.Seq, text(f.Before.ID))
	}
	if f.Limit > 0 {
		q = q.Limit(int64(f.Limit))
	}
	if err := q.Scan(ctx); err != nil {
		return nil, r.fail(err, "read deliveries")
	}
	out := make([]store.Delivery, len(rows))
	for i := range rows {
		out[i] = rows[i].delivery()
	}
	return out, nil
}

// Attempts implements store.WebhookReader.
func (r *reader) Attempts(ctx context.Context, delivery string) ([]store.DeliveryAttempt, error) {
	var rows []attemptRow
	if err := r.db.NewSelect().Model(&rows).Where("delivery = ?", text(delivery)).OrderExpr("n").Scan(ctx); err != nil {
		return nil, r.fail(err, "read the log of a delivery")
	}
	out := make([]store.DeliveryAttempt, len(rows))
	for i, a := range rows {
		out[i] = store.DeliveryAttempt{
			Number: a.N, At: instant(a.At), Took: time.Duration(a.Took) * time.Millisecond, Status: a.Status, Error: a.Error,
		}
	}
	return out, nil
}

// NumberedUpTo implements store.WebhookReader.
func (r *reader) NumberedUpTo(ctx context.Context) (int64, error) {
	var last int64
	err := r.db.NewRaw("SELECT last FROM event_numbers").Scan(ctx, &last)
	return last, r.fail(err, "read the last event number")
}

// InsertWebhook implements store.WebhookWriter.
func (t *tx) InsertWebhook(ctx context.Context, w store.Webhook) error {
	return t.insert(ctx, rowOfWebhook(w), "webhook", fault.New(fault.Conflict, "the webhook %s is there already", w.ID).Because(store.ReasonExists))
}

// UpdateWebhook implements store.WebhookWriter.
func (t *tx) UpdateWebhook(ctx context.Context, w *store.Webhook) error {
	row := rowOfWebhook(*w)
	row.Version++
	if err := t.update(ctx, row, w.Version, "webhook", w.ID, nil); err != nil {
		return err
	}
	w.Version++
	return nil
}

// EndDeliveries implements store.WebhookWriter.
func (t *tx) EndDeliveries(ctx context.Context, webhook, why string, at time.Time) error {
	_, err := t.db.NewUpdate().Model((*deliveryRow)(nil)).
		Set("status = ?, error = ?, ended_at = ?, head = ?, lease = '', leased_until = 0", store.DeliveryFailed, text(why), millis(at), false).
		Where("webhook = ? AND status = 'pending' AND leased_until <= ?", webhook, millis(at)).Exec(ctx)
	return t.fail(err, "end deliveries")
}

// DeleteWebhook implements store.WebhookWriter.
func (t *tx) DeleteWebhook(ctx context.Context, project, id string) error {
	return t.delete(ctx, t.db.NewDelete().Model((*webhookRow)(nil)).Where("project = ? AND id = ?", project, text(id)), "webhook", id)
}
