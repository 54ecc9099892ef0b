package postgres

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"time"

	"github.com/pressly/goose/v3"

	"github.com/hutchrun/hutch/internal/fault"
)

//go:embed migrations/*.sql
var embedded embed.FS

// migrations is the schema's history: only ever added to, only ever upwards.
func migrations() fs.FS {
	sub, err := fs.Sub(embedded, "migrations")
	if err != nil {
		panic(err) // the directory is compiled in
	}
	return sub
}

// The numbers of the advisory locks. A database has one space of them for all its
// users, so they are large and odd.
const (
	lockSpace    = 7316289041137 // begins the hash of names that transactions lock
	lockMigrate  = 7316289041138
	lockSequence = 7316289041139
)

// migrate brings the schema up to date, each step in a transaction of its own. Servers
// that start together do it one after the other: conn holds the lock.
func migrate(ctx context.Context, db *sql.DB, conn *sql.Conn, where string, history fs.FS) (err error) {
	// Asked for again and again, because a wait for it would end with the lock timeout.
	for locked := false; !locked; {
		err := conn.QueryRowContext(ctx, fmt.Sprintf("SELECT pg_try_advisory_lock(%d)", lockMigrate)).Scan(&locked)
		if err != nil {
			return wrap(err, "lock the schema")
		}
		if !locked {
			select {
			case <-ctx.Done():
				return wrap(ctx.Err(), "lock the schema")
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	defer func() {
		_, e := conn.ExecContext(context.WithoutCancel(ctx), fmt.Sprintf("SELECT pg_advisory_unlock(%d)", lockMigrate))
		if err == nil {
			err = wrap(e, "unlock the schema")
		}
	}()
	p, err := goose.NewProvider(goose.DialectPostgres, db, history,
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return fmt.Errorf("postgres: read the migrations: %w", err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return wrap(err, "read the schema version")
	}
	if have > want {
		return fault.New(fault.FailedPrecondition,
			"cannot open the database %s: a newer hutch wrote it (schema %d, this one knows %d); "+
				"run that version, or restore a backup from before the upgrade", where, have, want).Because("newer_schema")
	}
	if have == want {
		return nil
	}
	if _, err := p.Up(ctx); err != nil {
		return fault.Wrap(err, fault.Internal, "the database %s could not be brought to schema %d; it is as it was", where, want)
	}
	return nil
}
