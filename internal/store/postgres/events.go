package postgres

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/store/bunstore"
)

// channel is what servers listen on for each other's numbered events.
const channel = "hutch_events"

// lookEvery is how often a server looks for events that another one left without a
// number when it died, and for numbers that it did not hear of.
const lookEvery = time.Second

// writeEvents puts a transaction's events where they wait for their numbers. A number
// taken here would be visible only after the commit, behind the back of a reader who
// has seen a higher one.
func writeEvents(ctx context.Context, tx bun.Tx, events []bunstore.EventRow) error {
	_, err := tx.NewInsert().Model(&events).ModelTableExpr("event_inbox").ExcludeColumn("seq").Returning("").Exec(ctx)
	return err
}

// number moves committed events to where they are read, with numbers in the order of
// the inbox; those of one transaction stay together, where its first one lies. A
// transaction that saw another's commit lies behind it, because events are written at
// a transaction's end. All is sent at once and is one transaction, so that no server
// can stall while it holds the lock; the statement after the lock sees what the last
// holder did.
var number = fmt.Sprintf(`
SELECT pg_advisory_xact_lock(%d);
WITH fresh AS (DELETE FROM event_inbox RETURNING *),
grouped AS (SELECT *, min(id) OVER (PARTITION BY batch) AS first FROM fresh),
ordered AS (SELECT *, row_number() OVER (ORDER BY first, id) AS place FROM grouped),
numbers AS (
	UPDATE event_numbers SET last = last + n.count FROM (SELECT count(*) AS count FROM fresh) AS n
	WHERE n.count > 0 RETURNING last - n.count AS base
)
INSERT INTO events (seq, uid, project, sandbox, operation, type, actor, key, data, at)
SELECT base + place, uid, project, sandbox, operation, type, actor, key, data, at FROM ordered, numbers;
NOTIFY %s`, lockSequence, channel)

// nudge has the sequencer look, soon. It does not wait.
func (s *Store) nudge() {
	select {
	case s.fresh <- struct{}{}:
	default:
	}
}

// sequence numbers events until ctx ends. Each server does it for itself and for
// those that cannot; the lock lets one at a time.
func (s *Store) sequence(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var seen int64
	failed := false
	for {
		last, err := s.pass(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !failed {
			s.log.Error("events cannot be numbered; nobody hears of them until they can", "err", err)
		}
		failed = err != nil
		if last > seen {
			seen = last
			s.Announce()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.fresh:
		}
	}
}

// pass numbers what waits for it and gives the last number.
func (s *Store) pass(ctx context.Context) (last int64, err error) {
	var waiting bool
	look := func() error {
		return s.db.NewRaw("SELECT last, EXISTS (SELECT 1 FROM event_inbox) FROM event_numbers").Scan(ctx, &last, &waiting)
	}
	if err := look(); err != nil || !waiting {
		return last, err
	}
	if _, err := s.db.ExecContext(ctx, number); err != nil {
		return last, err
	}
	return last, look()
}

// listen hears of the numbers that other servers give, on a connection of its own.
// While there is none, the sequencer's looks stand in.
func (s *Store) listen(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.hear(ctx)
		if ctx.Err() != nil {
			return
		}
		s.log.Warn("the connection that listens to the database has ended; another is made", "err", err)
		timer := time.NewTimer(lookEvery)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (s *Store) hear(ctx context.Context) error {
	conn, err := pgx.ConnectConfig(ctx, s.config)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil {
		return err
	}
	for {
		s.nudge()
		if _, err := conn.WaitForNotification(ctx); err != nil {
			return err
		}
	}
}
