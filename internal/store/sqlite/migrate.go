package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"os"

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

// migrate brings the schema up to date, each step in a transaction of its own.
func migrate(ctx context.Context, db *sql.DB, path string, history fs.FS) error {
	p, err := goose.NewProvider(goose.DialectSQLite3, db, history,
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(goose.NopLogger()))
	if err != nil {
		return fmt.Errorf("sqlite: read the migrations: %w", err)
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return wrap(err, "read the schema version")
	}
	if have > want {
		return fault.New(fault.FailedPrecondition,
			"cannot open the database %s: a newer hutch wrote it (schema %d, this one knows %d); "+
				"run that version, or restore a backup from before the upgrade", path, have, want).Because("newer_schema")
	}
	if have == want {
		return nil
	}
	if have > 0 {
		if err := backup(ctx, db, fmt.Sprintf("%s.schema-%d", path, have)); err != nil {
			return err
		}
	}
	if _, err := p.Up(ctx); err != nil {
		return fault.Wrap(err, fault.Internal, "the database %s could not be brought to schema %d; it is as it was", path, want)
	}
	return nil
}

// backup writes a whole copy of the database into a file of its own. A copy that is
// there already comes from an upgrade that failed after it: the database has not
// changed since, so it is made anew.
func backup(ctx context.Context, db *sql.DB, to string) error {
	staging := to + ".partial"
	if err := os.RemoveAll(staging); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, "VACUUM INTO ?", staging); err != nil {
		return wrap(err, "back the database up before a migration")
	}
	if err := os.Chmod(staging, 0o600); err != nil {
		return err
	}
	f, err := os.Open(staging)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return os.Rename(staging, to)
}
