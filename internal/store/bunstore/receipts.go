package bunstore

import (
	"context"
	"encoding/base64"
	"fmt"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

type receiptRow struct {
	bun.BaseModel `bun:"table:receipts,alias:rc"`

	Operation string `bun:",pk"`
	Project   string
	Sandbox   string
	Document  string
	At        int64
}

type signingKeyRow struct {
	bun.BaseModel `bun:"table:signing_keys,alias:sk"`

	ID        string `bun:",pk"`
	Secret    string // base64
	CreatedAt int64
}

// Receipts implements store.ReceiptReader.
func (r *reader) Receipts(ctx context.Context, sandboxID string, p store.Page) ([]store.Receipt, error) {
	var rows []receiptRow
	q := r.db.NewSelect().Model(&rows).Where("sandbox = ?", text(sandboxID)).OrderExpr("at, operation")
	if p.After != (store.Cursor{}) {
		at := millis(p.After.At)
		q = q.Where("at > ? OR (at = ? AND operation > ?)", at, at, text(p.After.ID))
	}
	if p.Limit > 0 {
		q = q.Limit(int64(p.Limit))
	}
	if err := q.Scan(ctx); err != nil {
		return nil, r.fail(err, "read receipts")
	}
	out := make([]store.Receipt, len(rows))
	for i, row := range rows {
		out[i] = store.Receipt{Operation: row.Operation, Project: row.Project, Sandbox: row.Sandbox, Document: row.Document, At: instant(row.At)}
	}
	return out, nil
}

// AddReceipt implements store.ReceiptWriter.
func (t *tx) AddReceipt(ctx context.Context, rc store.Receipt) error {
	row := receiptRow{Operation: rc.Operation, Project: rc.Project, Sandbox: rc.Sandbox, Document: rc.Document, At: millis(rc.At)}
	clash := fault.New(fault.Conflict, "the operation %s has a receipt already", rc.Operation).Because(store.ReasonExists)
	return t.insert(ctx, &row, "receipt", clash)
}

// SigningKeys implements store.ReceiptReader.
func (r *reader) SigningKeys(ctx context.Context) ([]store.SigningKey, error) {
	var rows []signingKeyRow
	if err := r.db.NewSelect().Model(&rows).OrderExpr("created_at, id").Scan(ctx); err != nil {
		return nil, r.fail(err, "read signing keys")
	}
	out := make([]store.SigningKey, len(rows))
	for i, row := range rows {
		secret, err := base64.StdEncoding.DecodeString(row.Secret)
		if err != nil {
			return nil, fmt.Errorf("bunstore: the signing key %s: %w", row.ID, err)
		}
		out[i] = store.SigningKey{ID: row.ID, Secret: secret, CreatedAt: instant(row.CreatedAt)}
	}
	return out, nil
}

// AddSigningKey implements store.ReceiptWriter.
func (t *tx) AddSigningKey(ctx context.Context, k store.SigningKey) error {
	clash := fault.New(fault.Conflict, "the signing key %s is there already", k.ID).Because(store.ReasonExists)
	row := signingKeyRow{ID: k.ID, Secret: base64.StdEncoding.EncodeToString(k.Secret), CreatedAt: millis(k.CreatedAt)}
	return t.insert(ctx, &row, "signing key", clash)
}
