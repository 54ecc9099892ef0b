// Package bunstore is what the databases have in common: the rows, the queries and
// the course of a transaction. An engine (store/sqlite, store/postgres) sets up
// connections and schema, and says in an Engine what is its own.
package bunstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// Verdict says what a driver's error means for the transaction that it came in.
type Verdict int

// The verdicts. Before the commit was asked for, all but Final leave nothing behind
// and the transaction may run again.
const (
	Final    Verdict = iota
	Beaten           // it lost against another transaction: a deadlock, a serialisation failure
	Lost             // the connection is gone
	Taken            // a unique index has another row
	TakenKey         // a row with this primary key is there
)

// Engine is what one database does its own way.
type Engine struct {
	Name         string // begins the text of errors without a kind
	WriteOptions *sql.TxOptions
	ReadOptions  *sql.TxOptions // of one consistent snapshot
	// RowLocks says that writers run at a time, so that a row that a transaction
	// decides on is locked when it is read.
	RowLocks bool
	// Lock keeps out, to the end of the transaction, others that lock the same name.
	// nil where there is one writer.
	Lock func(ctx context.Context, tx bun.Tx, name string) error
	// Judge reads a driver's error.
	Judge func(error) Verdict
	// Fault gives an error whose kind is known, nil for others.
	Fault func(error) *fault.Fault
	// WriteEvents writes a transaction's events at its end.
	WriteEvents func(ctx context.Context, tx bun.Tx, events []EventRow) error
	// Committed is told of each commit with events, also of one whose end is unknown.
	Committed func()
}

// What happens to a transaction that may run again.
const (
	tries      = 10
	firstPause = 2 * time.Millisecond
	mostPause  = 250 * time.Millisecond
)

// commitTimeout bounds a commit, which no caller's going away cuts short: what was
// half committed would have an unknown end.
const commitTimeout = 30 * time.Second

// Store is a store.Store but for Close, on connections that an engine has made.
type Store struct {
	engine Engine
	write  *bun.DB
	read   *bun.DB // may be the same

	mu        sync.Mutex
	committed chan struct{} // closed when events have got numbers
}

// New makes a Store. The connections stay their engine's.
func New(engine Engine, write, read *bun.DB) *Store {
	return &Store{engine: engine, write: write, read: read, committed: make(chan struct{})}
}

// inTransaction marks the context that Update hands to its function.
type inTransaction struct{}

// alone refuses a call from inside a write transaction, which would wait for itself.
func (s *Store) alone(ctx context.Context) error {
	if ctx.Value(inTransaction{}) != nil {
		return errors.New(s.engine.Name + ": the store was called inside a write transaction; use the transaction")
	}
	return nil
}

// Update implements store.Store.
func (s *Store) Update(ctx context.Context, fn func(context.Context, store.Tx) error) error {
	if err := s.alone(ctx); err != nil {
		return err
	}
	refused := false
	for try, pause := 1, firstPause; ; try, pause = try+1, min(2*pause, mostPause) {
		verdict, err := s.attempt(ctx, fn)
		switch {
		case err == nil || verdict == Final || ctx.Err() != nil || try == tries:
			return err
		case verdict == Taken || verdict == TakenKey:
			// Another transaction may have written the row after this one looked. The
			// second time the function sees it, and what is refused then is refused.
			if refused || !s.engine.RowLocks {
				return err
			}
			refused = true
		}
		if !sleep(ctx, pause/2+rand.N(pause)) {
			return err
		}
	}
}

// attempt runs a write transaction once.
func (s *Store) attempt(ctx context.Context, fn func(context.Context, store.Tx) error) (Verdict, error) {
	if err := ctx.Err(); err != nil {
		return Final, s.engine.wrap(err, "begin")
	}
	// The caller's end ends the transaction up to its commit, and not after.
	run, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	unhook := context.AfterFunc(ctx, end)
	btx, err := s.write.BeginTx(run, s.engine.WriteOptions)
	if err != nil {
		return s.engine.Judge(err), s.ended(ctx, s.engine.wrap(err, "begin"))
	}
	defer btx.Rollback() // does nothing after the commit; a panic in fn leaves nothing behind
	t := &tx{reader: reader{db: btx, engine: &s.engine, lock: s.engine.RowLocks}}
	err = fn(context.WithValue(ctx, inTransaction{}, true), t)
	if err == nil && len(t.events) > 0 {
		err = t.fail(s.engine.WriteEvents(ctx, btx, t.events), "write events")
	}
	if err != nil {
		return t.verdict, s.ended(ctx, err)
	}
	if !unhook() {
		return Final, s.engine.wrap(ctx.Err(), "commit")
	}
	timer := time.AfterFunc(commitTimeout, end)
	defer timer.Stop()
	err = btx.Commit()
	unknown := err != nil && (run.Err() != nil || s.engine.Judge(err) == Lost)
	if (err == nil || unknown) && len(t.events) > 0 {
		s.engine.Committed()
	}
	switch {
	case err == nil:
		return Final, nil
	case unknown:
		return Final, fault.Wrap(err, fault.Unavailable, "the connection to the database was lost during the commit, and it is not known "+
			"whether the change was made; look, or ask again with the same request key").Because(store.ReasonUnknown).After(time.Second)
	}
	return s.engine.Judge(err), s.engine.wrap(err, "commit")
}

// ended says that the caller went away, where that is why a transaction failed.
func (s *Store) ended(ctx context.Context, err error) error {
	if ctx.Err() == nil || !errors.Is(err, sql.ErrTxDone) && s.engine.Judge(err) != Lost {
		return err
	}
	return s.engine.wrap(ctx.Err(), "write")
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// View implements store.Store.
func (s *Store) View(ctx context.Context, fn func(context.Context, store.Reader) error) error {
	if err := s.alone(ctx); err != nil {
		return err
	}
	btx, err := s.read.BeginTx(ctx, s.engine.ReadOptions)
	if err != nil {
		return s.engine.wrap(err, "begin")
	}
	defer btx.Rollback() // nothing was written
	return fn(ctx, &reader{db: btx, engine: &s.engine})
}

// Committed implements store.Store.
func (s *Store) Committed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.committed
}

// Announce wakes who waits for events. An engine calls it when events have got their
// numbers.
func (s *Store) Announce() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.committed)
	s.committed = make(chan struct{})
}

// wrap turns a driver's error into a fault where the kind is known.
func (e *Engine) wrap(err error, what string) error {
	if err == nil {
		return nil
	}
	switch {
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Cancelled, "the call was cancelled; nothing was changed")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.DeadlineExceeded, "the call took too long; nothing was changed")
	}
	if f := e.Fault(err); f != nil {
		return f
	}
	return fmt.Errorf("%s: %s: %w", e.Name, what, err)
}
