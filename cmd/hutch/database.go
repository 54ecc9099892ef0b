package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"go.jetify.com/typeid"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// databaseVariable has the URL of the database where --database-url does not.
const databaseVariable = "HUTCH_DATABASE_URL"

const databaseFlagHelp = "PostgreSQL database, postgres://USER:PASSWORD@HOST/DATABASE (better in " + databaseVariable + ", which others cannot see)"

// databaseRecord is what an installation remembers of a database that is not in its
// directory. The URL is not in it, because a password may be in that.
type databaseRecord struct {
	Place string `json:"place"` // for people
	// Host is this installation's name in the database, which other installations may
	// share: their sandboxes are never taken for its own.
	Host string `json:"host"`
}

func (l layout) databaseFile() string { return filepath.Join(l.data, "database.json") }

// hasState says whether an installation has ever begun to keep its state.
func (l layout) hasState() bool {
	for _, path := range []string{l.database(), l.databaseFile()} {
		if _, err := os.Stat(path); err == nil {
			return true
		}
	}
	return false
}

func (l layout) readDatabase() (databaseRecord, error) {
	var r databaseRecord
	data, err := os.ReadFile(l.databaseFile())
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	return r, err
}

// writeDatabase is durable when it returns: the host's name must not be forgotten once
// it is in the database.
func (l layout) writeDatabase(r databaseRecord) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temp := l.databaseFile() + ".tmp"
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp, l.databaseFile()); err != nil {
		return err
	}
	dir, err := os.Open(l.data)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// openDatabase opens what an installation keeps its state in, and gives its host's name
// there. An installation stays with the database that it began with: with another its
// sandboxes would be unknown.
func openDatabase(ctx context.Context, cfg serverConfig) (db store.Store, host string, err error) {
	l := cfg.layout
	record, err := l.readDatabase()
	began := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, "", err
	}
	if cfg.databaseURL == "" {
		if began {
			return nil, "", fault.New(fault.FailedPrecondition, "%s keeps its state in the PostgreSQL database %s; give its URL with --database-url or %s",
				l.data, record.Place, databaseVariable)
		}
		s, err := sqlite.Open(ctx, l.database())
		if err != nil {
			return nil, "", err // not a nil *sqlite.Store in an interface
		}
		return s, hostID, nil
	}
	if _, err := os.Stat(l.database()); err == nil && !began {
		return nil, "", fault.New(fault.FailedPrecondition, "%s keeps its state in SQLite, which is not moved to PostgreSQL; leave the database URL out, or give another --data", l.data)
	}
	place, err := postgres.Place(cfg.databaseURL)
	if err != nil {
		return nil, "", err
	}
	s, err := postgres.Open(ctx, cfg.databaseURL, cfg.log)
	if err != nil {
		return nil, "", err
	}
	if !began {
		record.Host = typeid.Must(typeid.WithPrefix("host")).String()
	}
	if record.Place != place {
		if began {
			cfg.log.Warn("the database is at another place than before", "place", place, "from", record.Place)
		}
		record.Place = place
		if err := l.writeDatabase(record); err != nil {
			return nil, "", errors.Join(err, s.Close())
		}
	}
	return s, record.Host, nil
}

// hideDatabaseURL makes this process begin anew with the URL of --database-url in its
// environment, which only its user and root can read, when it was on the command line,
// which all users of the machine can. It returns only when it fails or has nothing to do.
func hideDatabaseURL(flag string) error {
	if flag == "" {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, databaseVariable+"=") })
	return syscall.Exec(self, withoutFlag(os.Args, "--database-url"), append(env, databaseVariable+"="+flag))
}

// withoutFlag gives a command line without a flag and its value.
func withoutFlag(args []string, flag string) []string {
	var out []string
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == flag:
			i++ // its value
		case strings.HasPrefix(args[i], flag+"="):
		default:
			out = append(out, args[i])
		}
	}
	return out
}
