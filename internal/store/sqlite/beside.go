package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/pressly/goose/v3"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/sqlitedialect"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/bunstore"
)

// What is done to a database beside the server that uses it: nothing here changes it.

// Schema gives the number of the schema that the file has, and that of this version of
// hutch. NotFound where there is no file.
func Schema(ctx context.Context, path string) (have, want int64, err error) {
	db, err := existing(path, true)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	want, err = newest()
	if err != nil {
		return 0, 0, err
	}
	err = db.QueryRowContext(ctx, "SELECT coalesce(max(version_id), 0) FROM goose_db_version WHERE is_applied").Scan(&have)
	if err != nil {
		return 0, want, wrap(err, "read the schema version")
	}
	return have, want, nil
}

// newest is the number of the last migration.
func newest() (int64, error) {
	sources, err := fs.Glob(migrations(), "*.sql")
	if err != nil || len(sources) == 0 {
		return 0, fmt.Errorf("sqlite: there are no migrations: %w", err)
	}
	return goose.NumericComponent(sources[len(sources)-1])
}

// existing opens a database that is there already.
func existing(path string, readOnly bool) (*sql.DB, error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "there is no database %s", path)
	}
	return connect(path, readOnly)
}

// Peek opens a database to read it, beside the server that uses it. FailedPrecondition
// where its schema is not that of this version of hutch: nothing is brought up to date.
func Peek(ctx context.Context, path string) (*Store, error) {
	have, want, err := Schema(ctx, path)
	if err != nil {
		return nil, err
	}
	if have != want {
		return nil, fault.New(fault.FailedPrecondition, "the database %s has schema %d and this version of hutch reads %d; use the version that serves it", path, have, want).Because("other_schema")
	}
	read, err := existing(path, true)
	if err != nil {
		return nil, err
	}
	write, err := existing(path, true) // a Store has two; this one cannot write either
	if err != nil {
		return nil, errors.Join(err, read.Close())
	}
	s := &Store{write: bun.NewDB(write, sqlitedialect.New()), read: bun.NewDB(read, sqlitedialect.New())}
	s.Store = bunstore.New(bunstore.Engine{
		Name:        "sqlite",
		ReadOptions: &sql.TxOptions{ReadOnly: true},
		Judge:       judge,
		Fault:       faultOf,
		WriteEvents: numberEvents,
		Committed:   func() {},
	}, s.write, s.read)
	return s, nil
}

// Copy writes a whole copy of the database, as it is at one instant, into a new file,
// beside the server that uses it. The copy is on the disk when Copy returns.
func Copy(ctx context.Context, path, to string) (err error) {
	db, err := existing(path, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return backup(ctx, db, to)
}

// Check reads all of a database file that nobody uses. DataCorrupt where it is damaged.
func Check(ctx context.Context, path string) (err error) {
	db, err := existing(path, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	var answer string
	if err := db.QueryRowContext(ctx, "PRAGMA integrity_check(1)").Scan(&answer); err != nil {
		return wrap(err, "check the database")
	}
	if answer != "ok" {
		return fault.New(fault.DataCorrupt, "the database %s is damaged (%s); take another backup", path, answer)
	}
	return nil
}
