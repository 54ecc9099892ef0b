package bunstore

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// tx is a write transaction.
type tx struct {
	reader
	events []EventRow // added so far; they are written at the commit
}

var _ store.Tx = (*tx)(nil)

// insert writes one row; clash says what a unique index's refusal means.
func (t *tx) insert(ctx context.Context, model any, what string, clash error) error {
	_, err := t.db.NewInsert().Model(model).Exec(ctx)
	switch failed := t.fail(err, "write the "+what); t.judge(err) {
	case Taken:
		return clash
	case TakenKey:
		return fault.Wrap(err, fault.Conflict, "cannot write the %s: one with its id is there already", what).Because(store.ReasonExists)
	default:
		return failed
	}
}

// judge is the engine's verdict on an error; nil is Final.
func (t *tx) judge(err error) Verdict {
	if err == nil {
		return Final
	}
	return t.engine.Judge(err)
}

// update writes a row where its version is still the one that was read.
func (t *tx) update(ctx context.Context, model any, version int64, what, id string, clash error) error {
	res, err := t.db.NewUpdate().Model(model).WherePK().Where("version = ?", version).Exec(ctx)
	if err != nil {
		failed := t.fail(err, "write the "+what)
		if t.judge(err) == Taken {
			return clash
		}
		return failed
	}
	n, err := res.RowsAffected()
	if err != nil {
		return t.fail(err, "write the "+what)
	}
	if n == 1 {
		return nil
	}
	there, err := t.db.NewSelect().Model(model).WherePK().Exists(ctx)
	if err != nil {
		return t.fail(err, "read the "+what)
	}
	if !there {
		return fault.New(fault.NotFound, "there is no %s %s", what, id)
	}
	return fault.New(fault.Conflict, "the %s %s has changed meanwhile; read it again, then try again", what, id).Because(store.ReasonStale)
}

func nameTaken(name string) *fault.Fault {
	return fault.New(fault.Conflict, "the name %s is in use; choose another, or delete the sandbox that has it", name).Because(store.ReasonName)
}

// InsertSandbox implements store.Tx.
func (t *tx) InsertSandbox(ctx context.Context, s sandbox.Sandbox) error {
	if err := t.insert(ctx, rowOfSandbox(s), "sandbox", nameTaken(s.Name)); err != nil {
		return err
	}
	return t.insertLabels(ctx, s)
}

// UpdateSandbox implements store.Tx.
func (t *tx) UpdateSandbox(ctx context.Context, s *sandbox.Sandbox) error {
	row := rowOfSandbox(*s)
	row.Version++
	if err := t.update(ctx, row, s.Version, "sandbox", s.ID, nameTaken(s.Name)); err != nil {
		return err
	}
	if _, err := t.db.NewDelete().Model((*labelRow)(nil)).Where("sandbox = ?", s.ID).Exec(ctx); err != nil {
		return t.fail(err, "write labels")
	}
	if err := t.insertLabels(ctx, *s); err != nil {
		return err
	}
	s.Version++
	return nil
}

func (t *tx) insertLabels(ctx context.Context, s sandbox.Sandbox) error {
	if len(s.Labels) == 0 {
		return nil
	}
	var rows []labelRow
	for _, key := range slices.Sorted(maps.Keys(s.Labels)) {
		rows = append(rows, labelRow{Sandbox: s.ID, Key: text(key), Value: text(s.Labels[key])})
	}
	_, err := t.db.NewInsert().Model(&rows).Exec(ctx)
	return t.fail(err, "write labels")
}

func operationActive(op sandbox.Operation) *fault.Fault {
	return fault.New(fault.Conflict, "cannot %s %s: another operation is at work on it; wait for it, then try again", op.Kind, op.Sandbox).
		Because(store.ReasonActive)
}

// InsertOperation implements store.Tx.
func (t *tx) InsertOperation(ctx context.Context, op sandbox.Operation) error {
	return t.insert(ctx, rowOfOperation(op), "operation", operationActive(op))
}

// UpdateOperation implements store.Tx.
func (t *tx) UpdateOperation(ctx context.Context, op *sandbox.Operation) error {
	row := rowOfOperation(*op)
	row.Version++
	if err := t.update(ctx, row, op.Version, "operation", op.ID, operationActive(*op)); err != nil {
		return err
	}
	op.Version++
	return nil
}

// AddEvent implements store.Tx.
func (t *tx) AddEvent(_ context.Context, e store.Event) error {
	t.events = append(t.events, rowOfEvent(e))
	return nil
}

// Lock implements store.Tx.
func (t *tx) Lock(ctx context.Context, name string) error {
	if t.engine.Lock == nil {
		return nil
	}
	return t.fail(t.engine.Lock(ctx, t.db, name), "lock")
}

// PutTemplate implements store.Tx.
func (t *tx) PutTemplate(ctx context.Context, tp store.Template) error {
	_, err := t.db.NewInsert().Model(rowOfTemplate(tp)).On("CONFLICT (project, name) DO UPDATE").
		Set("digest = EXCLUDED.digest, source = EXCLUDED.source, bytes = EXCLUDED.bytes, user_name = EXCLUDED.user_name").
		Set("workdir = EXCLUDED.workdir, env = EXCLUDED.env, created_at = EXCLUDED.created_at").Exec(ctx)
	return t.fail(err, "write the template")
}

// DeleteTemplate implements store.Tx.
func (t *tx) DeleteTemplate(ctx context.Context, project, name string) error {
	return t.delete(ctx, t.db.NewDelete().Model((*templateRow)(nil)).Where("project = ? AND name = ?", project, text(name)), "template", name)
}

// DeleteAPIKey implements store.Tx.
func (t *tx) DeleteAPIKey(ctx context.Context, project, id string) error {
	return t.delete(ctx, t.db.NewDelete().Model((*keyRow)(nil)).Where("project = ? AND id = ?", project, text(id)), "API key", id)
}

func (t *tx) delete(ctx context.Context, q *bun.DeleteQuery, what, id string) error {
	res, err := q.Exec(ctx)
	if err != nil {
		return t.fail(err, "delete the "+what)
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		return fault.New(fault.NotFound, "there is no %s %s", what, id)
	}
	return t.fail(err, "delete the "+what)
}

// PutIdentity implements store.Tx.
func (t *tx) PutIdentity(ctx context.Context, sandboxID string, items json.RawMessage) error {
	_, err := t.db.NewInsert().Model(&identityRow{Sandbox: sandboxID, Items: string(items)}).
		On("CONFLICT (sandbox) DO UPDATE").Set("items = EXCLUDED.items").Exec(ctx)
	return t.fail(err, "write the identity")
}

// InsertAPIKey implements store.Tx.
func (t *tx) InsertAPIKey(ctx context.Context, k store.APIKey) error {
	clash := fault.New(fault.Conflict, "an API key with this secret is there already; make another").Because(store.ReasonExists)
	return t.insert(ctx, rowOfKey(k), "API key", clash)
}

// TouchAPIKey implements store.Tx.
func (t *tx) TouchAPIKey(ctx context.Context, id string, at time.Time) error {
	_, err := t.db.NewUpdate().Model((*keyRow)(nil)).Set("last_used = ?", millis(at)).Where("id = ?", id).Exec(ctx)
	return t.fail(err, "write an API key's last use")
}

// UpdateAPIKey implements store.Tx.
func (t *tx) UpdateAPIKey(ctx context.Context, k store.APIKey) error {
	clash := fault.New(fault.Conflict, "an API key with this secret is there already; make another").Because(store.ReasonExists)
	res, err := t.db.NewUpdate().Model(rowOfKey(k)).Column("hash", "prefix", "rotated_at").WherePK().Exec(ctx)
	if t.judge(err) == Taken {
		_ = t.fail(err, "write the API key")
		return clash
	}
	if err != nil {
		return t.fail(err, "write the API key")
	}
	if n, err := res.RowsAffected(); err == nil && n == 0 {
		return fault.New(fault.NotFound, "there is no API key %s", k.ID)
	}
	return nil
}

// PutRequest implements store.Tx.
func (t *tx) PutRequest(ctx context.Context, r store.Request) error {
	_, err := t.db.NewInsert().Model(rowOfRequest(r)).Exec(ctx)
	failed := t.fail(err, "write a request key")
	if t.judge(err) == TakenKey {
		return fault.New(fault.Conflict, "the request key %s is in use", r.Key).Because(store.ReasonKey)
	}
	return failed
}

// PruneRequests implements store.Tx.
func (t *tx) PruneRequests(ctx context.Context, before time.Time) error {
	_, err := t.db.NewDelete().Model((*requestRow)(nil)).Where("created_at < ?", millis(before)).Exec(ctx)
	return t.fail(err, "prune request keys")
}

// PruneHistory implements store.Tx. Events go up to the newest that is too old, by
// number: what is kept has no holes even where the clock was set back.
func (t *tx) PruneHistory(ctx context.Context, before time.Time) error {
	_, err := t.db.NewDelete().Model((*EventRow)(nil)).
		Where("seq < (SELECT COALESCE(MIN(seq), 0) FROM events WHERE at >= ?) OR NOT EXISTS (SELECT 1 FROM events WHERE at >= ?)",
			millis(before), millis(before)).Exec(ctx)
	if err != nil {
		return t.fail(err, "prune events")
	}
	_, err = t.db.NewDelete().Model((*operationRow)(nil)).
		Where("ended_at < ?", millis(before)).Where("status NOT IN (?)", bun.List(active)).Exec(ctx)
	if err != nil {
		return t.fail(err, "prune operations")
	}
	_, err = t.db.NewDelete().Model((*deliveryRow)(nil)).Where("ended_at < ?", millis(before)).Where("status <> 'pending'").Exec(ctx)
	if err != nil {
		return t.fail(err, "prune deliveries")
	}
	_, err = t.db.NewDelete().Model((*receiptRow)(nil)).Where("at < ?", millis(before)).
		Where("EXISTS (SELECT 1 FROM receipts AS later WHERE later.sandbox = ?TableAlias.sandbox AND later.at > ?TableAlias.at)").Exec(ctx)
	return t.fail(err, "prune receipts")
}
