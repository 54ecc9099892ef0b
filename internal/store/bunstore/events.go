package bunstore

import (
	"context"
	"strings"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// Events implements store.Store.
func (s *Store) Events(ctx context.Context, f store.EventFilter) ([]store.Event, error) {
	var out []store.Event
	if err := s.alone(ctx); err != nil {
		return nil, err
	}
	btx, err := s.read.BeginTx(ctx, s.engine.ReadOptions)
	if err != nil {
		return nil, s.engine.wrap(err, "begin")
	}
	defer btx.Rollback() // nothing was written
	if f.After > 0 {
		// The oldest that is kept, or the next one where none is.
		var oldest int64
		err := btx.NewRaw("SELECT COALESCE((SELECT MIN(seq) FROM events), (SELECT last + 1 FROM event_numbers))").Scan(ctx, &oldest)
		if err != nil {
			return nil, s.engine.wrap(err, "read the oldest event")
		}
		if f.After < oldest-1 {
			return nil, fault.New(fault.FailedPrecondition,
				"cannot give the events after %d: they are no longer kept; the oldest is %d, begin there", f.After, oldest).
				Because(store.ReasonPruned)
		}
	}
	var rows []EventRow
	q := selected(btx.NewSelect().Model(&rows), f).Where("seq > ?", f.After).OrderExpr("seq")
	if f.Limit > 0 {
		q = q.Limit(int64(f.Limit))
	}
	if err := q.Scan(ctx); err != nil {
		return nil, s.engine.wrap(err, "read events")
	}
	for i := range rows {
		out = append(out, rows[i].event())
	}
	return out, nil
}

// selected restricts a query of events to those that a filter selects.
func selected(q *bun.SelectQuery, f store.EventFilter) *bun.SelectQuery {
	if f.Project != "" {
		q = q.Where("project = ?", f.Project)
	}
	if f.Sandbox != "" {
		q = q.Where("sandbox = ?", text(f.Sandbox))
	}
	if len(f.Types) == 0 {
		return q
	}
	return q.WhereGroup(" AND ", func(q *bun.SelectQuery) *bun.SelectQuery {
		for _, t := range f.Types {
			if kind, all := strings.CutSuffix(t, "*"); all {
				q = q.WhereOr("substr(type, 1, ?) = ?", len([]rune(kind)), text(kind))
			} else {
				q = q.WhereOr("type = ?", text(t))
			}
		}
		return q
	})
}

// EventStart implements store.Store.
func (s *Store) EventStart(ctx context.Context, f store.EventFilter, since time.Time, tail int) (int64, error) {
	if err := s.alone(ctx); err != nil {
		return 0, err
	}
	var after int64
	if !since.IsZero() {
		err := s.read.NewRaw("SELECT COALESCE((SELECT MIN(seq) - 1 FROM events WHERE at >= ?), (SELECT last FROM event_numbers))", millis(since)).Scan(ctx, &after)
		return after, s.engine.wrap(err, "read the first event of a time")
	}
	if tail <= 0 {
		return s.LastEvent(ctx)
	}
	err := selected(s.read.NewSelect().Model((*EventRow)(nil)).ColumnExpr("seq - 1"), f).OrderExpr("seq DESC").Offset(int64(tail)-1).Limit(1).Scan(ctx, &after)
	if missing(err) {
		return 0, nil // there are fewer: from the oldest on
	}
	return after, s.engine.wrap(err, "read the last events")
}

// LastEvent implements store.Store.
func (s *Store) LastEvent(ctx context.Context) (int64, error) {
	if err := s.alone(ctx); err != nil {
		return 0, err
	}
	var last int64
	err := s.read.NewRaw("SELECT last FROM event_numbers").Scan(ctx, &last)
	return last, s.engine.wrap(err, "read the last event number")
}
