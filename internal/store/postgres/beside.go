package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/bunstore"
)

// What is done to a database beside the servers that use it: nothing here changes it.

// Schema gives the number of the schema that the database has, 0 for none, and that of
// this version of hutch.
func Schema(ctx context.Context, url string) (have, want int64, err error) {
	config, err := parse(url)
	if err != nil {
		return 0, 0, err
	}
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
	sources, err := fs.Glob(migrations(), "*.sql")
	if err != nil || len(sources) == 0 {
		return 0, 0, fmt.Errorf("postgres: there are no migrations: %w", err)
	}
	if want, err = goose.NumericComponent(sources[len(sources)-1]); err != nil {
		return 0, 0, err
	}
	var table sql.NullString
	if err := db.QueryRowContext(ctx, "SELECT to_regclass('goose_db_version')::text").Scan(&table); err != nil {
		return 0, want, unreachable(err, place(config), config.User)
	}
	if !table.Valid {
		return 0, want, nil
	}
	err = db.QueryRowContext(ctx, "SELECT coalesce(max(version_id), 0) FROM goose_db_version WHERE is_applied").Scan(&have)
	return have, want, wrap(err, "read the schema version")
}

// Reader is a database that is only read.
type Reader struct {
	*bunstore.Store
	db *bun.DB
}

// Close ends the connections.
func (r *Reader) Close() error { return r.db.Close() }

// Peek opens a database to read it, beside the servers that use it. FailedPrecondition
// where its schema is not that of this version of hutch: nothing is brought up to date.
func Peek(ctx context.Context, url string) (*Reader, error) {
	have, want, err := Schema(ctx, url)
	if err != nil {
		return nil, err
	}
	if have != want {
		return nil, fault.New(fault.FailedPrecondition, "the database has schema %d and this version of hutch reads %d; use the version that serves it", have, want).Because("other_schema")
	}
	config, err := parse(url)
	if err != nil {
		return nil, err
	}
	config.RuntimeParams["default_transaction_read_only"] = "on"
	db := bun.NewDB(stdlib.OpenDB(*config), pgdialect.New())
	return &Reader{Store: bunstore.New(bunstore.Engine{
		Name:        "postgres",
		ReadOptions: &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true},
		Judge:       judge,
		Fault:       faultOf,
		WriteEvents: writeEvents,
		Committed:   func() {},
	}, db, db), db: db}, nil
}
