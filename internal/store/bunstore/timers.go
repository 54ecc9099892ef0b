package bunstore

import (
	"context"
	"encoding/json"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

type leaseRow struct {
	bun.BaseModel `bun:"table:leases,alias:le"`

	Sandbox string `bun:",pk"`
	Turn    string `bun:",pk"`
	Since   int64
}

// DueSandboxes implements store.TimerReader.
func (r *reader) DueSandboxes(ctx context.Context, host string, until time.Time, limit int) ([]store.DueSandbox, error) {
	var rows []struct {
		ID    string
		DueAt int64
	}
	// The statuses are written out so that the partial index serves the query.
	err := r.db.NewSelect().TableExpr("sandboxes AS s").Column("s.id", "s.due_at").
		Where("s.host = ? AND s.due_at IS NOT NULL AND s.due_at <= ?", host, millis(until)).
		Where("NOT EXISTS (SELECT 1 FROM operations AS o WHERE o.sandbox = s.id AND o.status IN ('pending', 'running'))").
		OrderExpr("s.due_at, s.id").Limit(int64(limit)).Scan(ctx, &rows)
	if err != nil {
		return nil, r.fail(err, "read the timers")
	}
	out := make([]store.DueSandbox, len(rows))
	for i, row := range rows {
		out[i] = store.DueSandbox{Sandbox: row.ID, Due: instant(row.DueAt)}
	}
	return out, nil
}

// Leases implements store.TimerReader.
func (r *reader) Leases(ctx context.Context, host string) (map[string][]string, error) {
	var rows []leaseRow
	err := r.db.NewSelect().Model(&rows).Join("JOIN sandboxes AS s ON s.id = le.sandbox").Where("s.host = ?", host).
		OrderExpr("le.sandbox, le.turn").Scan(ctx)
	if err != nil {
		return nil, r.fail(err, "read the leases")
	}
	out := map[string][]string{}
	for _, row := range rows {
		out[row.Sandbox] = append(out[row.Sandbox], row.Turn)
	}
	return out, nil
}

// PutLease implements store.TimerWriter.
func (t *tx) PutLease(ctx context.Context, sandboxID, turn string, since time.Time) error {
	_, err := t.db.NewInsert().Model(&leaseRow{Sandbox: sandboxID, Turn: text(turn), Since: millis(since)}).
		On("CONFLICT (sandbox, turn) DO NOTHING").Exec(ctx)
	return t.fail(err, "write a lease")
}

// DropLeases implements store.TimerWriter.
func (t *tx) DropLeases(ctx context.Context, sandboxID, turn string) error {
	q := t.db.NewDelete().Model((*leaseRow)(nil)).Where("sandbox = ?", sandboxID)
	if turn != "" {
		q = q.Where("turn = ?", text(turn))
	}
	_, err := q.Exec(ctx)
	return t.fail(err, "end leases")
}

type missedRow struct {
	bun.BaseModel `bun:"table:missed_timers,alias:mt"`

	Sandbox string `bun:",pk"`
	Missed  string
}

// Missed implements store.TimerReader.
func (r *reader) Missed(ctx context.Context, sandboxID string) (json.RawMessage, error) {
	row := missedRow{Sandbox: sandboxID}
	err := r.db.NewSelect().Model(&row).WherePK().Scan(ctx)
	if missing(err) {
		return nil, fault.New(fault.NotFound, "nothing is recorded as missed by %s", sandboxID)
	}
	return raw(row.Missed), r.fail(err, "read the missed timers")
}

// PutMissed implements store.TimerWriter.
func (t *tx) PutMissed(ctx context.Context, sandboxID string, missed json.RawMessage) error {
	if missed == nil {
		_, err := t.db.NewDelete().Model((*missedRow)(nil)).Where("sandbox = ?", sandboxID).Exec(ctx)
		return t.fail(err, "forget the missed timers")
	}
	_, err := t.db.NewInsert().Model(&missedRow{Sandbox: sandboxID, Missed: string(missed)}).
		On("CONFLICT (sandbox) DO UPDATE").Set("missed = EXCLUDED.missed").Exec(ctx)
	return t.fail(err, "write the missed timers")
}
