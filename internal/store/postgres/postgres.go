// Package postgres keeps the control plane's state in a PostgreSQL database, which
// any number of servers may share. Rows that a transaction decides on are locked,
// events get their numbers from one sequencer at a time, and servers hear of each
// other's commits by LISTEN, and by looking each second where that fails.
package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/bunstore"
)

// connections is how many one server has at most, beside the one that listens. A
// PostgreSQL server allows 100 when nobody says.
const connections = 20

// oldest is the first major version that has all that is used here.
const oldest = 14

// startup are the settings that a connection begins with: those that poolers take too.
var startup = map[string]string{"application_name": "hutch", "client_encoding": "UTF8", "timezone": "UTC"}

// settings of every connection, where the URL does not say else. A transaction whose
// server has stalled gives its rows back; one that waits for such rows gives up before
// its caller does; one whose server has gone stops waiting, where the operating system
// can tell.
var settings = []struct {
	name, value string
	may         bool // the server need not know it
}{
	{"lock_timeout", "10s", false},
	{"idle_in_transaction_session_timeout", "60s", false},
	{"client_connection_check_interval", "5s", true},
}

// Store is a store.Store on one PostgreSQL database.
type Store struct {
	*bunstore.Store
	db     *bun.DB
	config *pgx.ConnConfig
	log    *slog.Logger

	fresh chan struct{} // events may wait for numbers
	stop  context.CancelFunc
	done  sync.WaitGroup
}

var _ store.Store = (*Store)(nil)

// Open connects to the database of a URL (or of key=value words, as libpq takes them)
// and brings its schema up to date. A database with a newer schema is refused as
// FailedPrecondition and left as it is. Several servers may open one at a time. log
// may be nil.
func Open(ctx context.Context, url string, log *slog.Logger) (*Store, error) {
	return open(ctx, url, log, migrations())
}

func open(ctx context.Context, url string, log *slog.Logger, history fs.FS) (*Store, error) {
	config, err := parse(url)
	if err != nil {
		return nil, err
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	db := stdlib.OpenDB(*config)
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	db.SetConnMaxIdleTime(5 * time.Minute)
	if err := prepare(ctx, db, config, history); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &Store{db: bun.NewDB(db, pgdialect.New()), config: config, log: log, fresh: make(chan struct{}, 1), stop: stop}
	s.Store = bunstore.New(bunstore.Engine{
		Name:         "postgres",
		WriteOptions: &sql.TxOptions{Isolation: sql.LevelReadCommitted},
		ReadOptions:  &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true},
		RowLocks:     true,
		Lock:         lock,
		Judge:        judge,
		Fault:        faultOf,
		WriteEvents:  writeEvents,
		Committed:    s.nudge,
	}, s.db, s.db)
	s.done.Go(func() { s.sequence(run) })
	s.done.Go(func() { s.listen(run) })
	return s, nil
}

// Close ends the connections. Events that have no number yet get it from another
// server, or from the next that opens the database.
func (s *Store) Close() error {
	s.stop()
	s.done.Wait()
	return s.db.Close()
}

// Place names the database of a URL for people, without its password.
func Place(url string) (string, error) {
	config, err := parse(url)
	if err != nil {
		return "", err
	}
	return place(config), nil
}

func place(c *pgx.ConnConfig) string {
	if strings.HasPrefix(c.Host, "/") {
		return fmt.Sprintf("%s (%s)", c.Database, c.Host)
	}
	return fmt.Sprintf("%s (%s:%d)", c.Database, c.Host, c.Port)
}

func parse(url string) (*pgx.ConnConfig, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		// The driver's error shows the URL and hides its password only as well as it can.
		return nil, fault.New(fault.InvalidArgument, "the database URL cannot be read; it has the form postgres://USER:PASSWORD@HOST:5432/DATABASE")
	}
	// Queries arrive here with their values written into them, so a prepared statement
	// would serve once.
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	for name, value := range startup {
		if _, set := config.RuntimeParams[name]; !set {
			config.RuntimeParams[name] = value
		}
	}
	config.AfterConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		for _, s := range settings {
			if _, set := config.RuntimeParams[s.name]; set {
				continue
			}
			_, err := conn.Exec(ctx, fmt.Sprintf("SET %s = '%s'", s.name, s.value)).ReadAll()
			if err != nil && (!s.may || state(err) == "") {
				return err
			}
		}
		return nil
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = 10 * time.Second
	}
	return config, nil
}

// prepare checks the server and brings the schema up to date.
func prepare(ctx context.Context, db *sql.DB, config *pgx.ConnConfig, history fs.FS) error {
	where := place(config)
	conn, err := db.Conn(ctx)
	if err != nil {
		return unreachable(err, where, config.User)
	}
	defer conn.Close()
	var version int
	var encoding string
	err = conn.QueryRowContext(ctx, "SELECT current_setting('server_version_num')::int, current_setting('server_encoding')").Scan(&version, &encoding)
	if err != nil {
		return wrap(err, "ask for the version")
	}
	if version < oldest*10000 {
		return fault.New(fault.FailedPrecondition, "the database %s is on PostgreSQL %d; hutch needs %d or newer", where, version/10000, oldest)
	}
	if encoding != "UTF8" {
		return fault.New(fault.FailedPrecondition, "the database %s holds text as %s; make one with `createdb -T template0 -E UTF8`", where, encoding)
	}
	return migrate(ctx, db, conn, where, history)
}

// lock takes an advisory lock to the transaction's end.
func lock(ctx context.Context, tx bun.Tx, name string) error {
	_, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(hashtextextended(?, ?))", name, lockSpace)
	return err
}
