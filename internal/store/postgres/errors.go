package postgres

import (
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/bunstore"
)

// The states of https://www.postgresql.org/docs/current/errcodes-appendix.html that
// mean something here.
const (
	stateUnique        = "23505"
	stateSerialization = "40001"
	stateDeadlock      = "40P01"
	stateLockTimeout   = "55P03"
	stateBadText       = "22021"
	stateReadOnly      = "25006"
	stateIdle          = "25P03" // idle_in_transaction_session_timeout
	stateAdminShutdown = "57P01"
	stateCrashShutdown = "57P02"
	stateStarting      = "57P03"
	stateTooMany       = "53300"
	stateDiskFull      = "53100"
	stateCorrupt       = "XX001"
	stateIndexCorrupt  = "XX002"
)

// state gives the server's word for an error, "" for one that did not come from it.
func state(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}

// judge implements bunstore.Engine.
func judge(err error) bunstore.Verdict {
	switch code := state(err); code {
	case stateSerialization, stateDeadlock:
		return bunstore.Beaten
	case stateUnique:
		if e, _ := errors.AsType[*pgconn.PgError](err); strings.HasSuffix(e.ConstraintName, "_pkey") {
			return bunstore.TakenKey
		}
		return bunstore.Taken
	default:
		if gone(err, code) {
			return bunstore.Lost
		}
	}
	return bunstore.Final
}

// gone says whether the connection has ended, or none could be made.
func gone(err error, code string) bool {
	switch code {
	case stateAdminShutdown, stateCrashShutdown, stateStarting, stateTooMany, stateIdle, stateReadOnly:
		return true // read-only: a standby, until the new primary is found
	case "":
	default:
		return strings.HasPrefix(code, "08")
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF, driver.ErrBadConn, pgconn.ErrConnClosed} {
		if errors.Is(err, end) {
			return true
		}
	}
	return false
}

// faultOf implements bunstore.Engine.
func faultOf(err error) *fault.Fault {
	switch code := state(err); {
	case code == stateDiskFull:
		return fault.Wrap(err, fault.Unavailable, "the disk of the database is full; free space on it, then try again").After(10 * time.Second)
	case code == stateLockTimeout, code == stateDeadlock, code == stateSerialization:
		return fault.Wrap(err, fault.Unavailable, "other calls are at work on the same rows of the database; try again").After(time.Second)
	case code == stateBadText:
		return fault.Wrap(err, fault.InvalidArgument, "what was asked has text in it that is not UTF-8")
	case code == stateCorrupt, code == stateIndexCorrupt:
		return fault.Wrap(err, fault.DataCorrupt, "the database is damaged; restore a backup")
	case gone(err, code):
		return fault.Wrap(err, fault.Unavailable, "the database does not answer; try again").After(time.Second)
	}
	return nil
}

// wrap is an error of the set-up, as a fault where its kind is known.
func wrap(err error, what string) error {
	if err == nil {
		return nil
	}
	if f := faultOf(err); f != nil {
		return f
	}
	return fmt.Errorf("postgres: %s: %w", what, err)
}

// unreachable says why no first connection came about.
func unreachable(err error, where, user string) error {
	switch code := state(err); {
	case strings.HasPrefix(code, "28"):
		return fault.Wrap(err, fault.FailedPrecondition, "the database %s does not let the user %s in; check the URL's user and password", where, user)
	case code == "3D000":
		return fault.Wrap(err, fault.FailedPrecondition, "there is no database %s; make it with `createdb -T template0 -E UTF8`", where)
	}
	return fault.Wrap(err, fault.Unavailable, "the database %s does not answer; check that PostgreSQL runs there and that the URL is right", where).
		After(time.Second)
}
