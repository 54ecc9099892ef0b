// Package sqlite keeps the control plane's state in one SQLite file: write-ahead
// log, every commit synced to the disk before it is reported, one connection that
// writes and a pool that only reads beside it.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/sqlitedialect"
	"modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/bunstore"
)

// readers is how many connections read at a time. Reads are short and a machine that
// runs on SQLite is one machine: four keep a slow list from holding up the rest.
const readers = 4

// busyTimeout is how long a statement waits for another process that has the file
// locked (a backup, say). Inside this process nothing waits: there is one writer.
const busyTimeout = 5 * time.Second

// Store is a store.Store on one SQLite file.
type Store struct {
	*bunstore.Store
	write *bun.DB // one connection
	read  *bun.DB // cannot write
}

var _ store.Store = (*Store)(nil)

// Open opens the database in the file, makes it when it is not there, and brings its
// schema up to date. A file with a newer schema is refused as FailedPrecondition and
// left as it is; a file with an older one is copied to FILE.schema-N first.
func Open(ctx context.Context, path string) (*Store, error) {
	return open(ctx, path, migrations())
}

func open(ctx context.Context, path string, migrations fs.FS) (*Store, error) {
	if err := create(path); err != nil {
		return nil, fault.Wrap(err, fault.Unavailable, "cannot open the database %s; check that its directory exists and may be written", path)
	}
	write, err := connect(path, false)
	if err != nil {
		return nil, err
	}
	write.SetMaxOpenConns(1)
	if err := migrate(ctx, write, path, migrations); err != nil {
		return nil, errors.Join(err, write.Close())
	}
	read, err := connect(path, true)
	if err != nil {
		return nil, errors.Join(err, write.Close())
	}
	read.SetMaxOpenConns(readers)
	read.SetMaxIdleConns(readers)
	s := &Store{write: bun.NewDB(write, sqlitedialect.New()), read: bun.NewDB(read, sqlitedialect.New())}
	s.Store = bunstore.New(bunstore.Engine{
		Name:        "sqlite",
		ReadOptions: &sql.TxOptions{ReadOnly: true},
		Judge:       judge,
		Fault:       faultOf,
		WriteEvents: numberEvents,
		Committed:   func() { s.Announce() },
	}, s.write, s.read)
	return s, nil
}

// create makes the file with its owner's rights only, before SQLite would make it
// with the process's. The log and the index beside it take the file's rights.
func create(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

func connect(path string, readOnly bool) (*sql.DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	q := url.Values{}
	q.Add("_pragma", fmt.Sprintf("busy_timeout(%d)", busyTimeout.Milliseconds()))
	q.Add("_pragma", "foreign_keys(1)")
	if readOnly {
		q.Set("mode", "ro")
		q.Add("_pragma", "query_only(1)")
	} else {
		q.Set("_txlock", "immediate")
		q.Add("_pragma", "journal_mode(WAL)")
		q.Add("_pragma", "synchronous(FULL)")
	}
	return sql.Open("sqlite", (&url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}).String())
}

// Close ends the connections. What was committed is on the disk already.
func (s *Store) Close() error {
	return errors.Join(s.read.Close(), s.write.Close())
}

// numberEvents gives a transaction's events their numbers and writes them. There is
// one writer, so numbers appear in the order in which they are given.
func numberEvents(ctx context.Context, tx bun.Tx, events []bunstore.EventRow) error {
	var last int64
	if err := tx.NewRaw("UPDATE event_numbers SET last = last + ? RETURNING last", len(events)).Scan(ctx, &last); err != nil {
		return err
	}
	for i := range events {
		events[i].Seq = last - int64(len(events)-1-i)
	}
	_, err := tx.NewInsert().Model(&events).Exec(ctx)
	return err
}

// faultOf gives the fault of a driver's error whose kind is known.
func faultOf(err error) *fault.Fault {
	switch primary(err) {
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED:
		return fault.Wrap(err, fault.Unavailable, "the database is locked by another process; try again").After(time.Second)
	case lib.SQLITE_FULL:
		return fault.Wrap(err, fault.Unavailable, "the disk of the database is full; free space on it, then try again").After(10 * time.Second)
	case lib.SQLITE_INTERRUPT:
		return fault.Wrap(err, fault.Cancelled, "the call was cancelled; nothing was changed")
	case lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB:
		return fault.Wrap(err, fault.DataCorrupt, "the database is damaged; restore a backup")
	}
	return nil
}

// wrap is an error of the set-up, as a fault where its kind is known.
func wrap(err error, what string) error {
	if f := faultOf(err); f != nil {
		return f
	}
	return fmt.Errorf("sqlite: %s: %w", what, err)
}

// primary gives SQLite's result code without its extension, 0 for other errors.
func primary(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code() & 0xff
	}
	return 0
}

// judge knows the rows that an index refused. One writer is beaten by nobody.
func judge(err error) bunstore.Verdict {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		switch e.Code() {
		case lib.SQLITE_CONSTRAINT_UNIQUE:
			return bunstore.Taken
		case lib.SQLITE_CONSTRAINT_PRIMARYKEY:
			return bunstore.TakenKey
		}
	}
	return bunstore.Final
}
