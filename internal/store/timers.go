package store

import (
	"context"
	"encoding/json"
	"time"
)

// TimerReader is what a transaction can read of what falls due by itself.
type TimerReader interface {
	// DueSandboxes gives the sandboxes of a host whose first timer at rest
	// (sandbox.RestDue) comes at an instant or before, and that no operation is at work
	// on, the first to fall due first.
	DueSandboxes(ctx context.Context, host string, until time.Time, limit int) ([]DueSandbox, error)
	// Leases gives the active harness turns of all sandboxes of a host, by sandbox.
	Leases(ctx context.Context, host string) (map[string][]string, error)
	// Missed gives what the last sleep of a sandbox missed of the timers inside; NotFound
	// where nothing.
	Missed(ctx context.Context, sandboxID string) (json.RawMessage, error)
}

// TimerWriter is what a write transaction can change of it.
type TimerWriter interface {
	// PutLease says that a harness turn is active; one that is there stays as it is.
	PutLease(ctx context.Context, sandboxID, turn string, since time.Time) error
	// DropLeases says that a turn, or with "" all turns of the sandbox, are not active
	// any more. It is no error when there are none.
	DropLeases(ctx context.Context, sandboxID, turn string) error
	// PutMissed writes what a sleep missed; nil is nothing.
	PutMissed(ctx context.Context, sandboxID string, missed json.RawMessage) error
}

// DueSandbox is a sandbox and when its first timer at rest falls due.
type DueSandbox struct {
	Sandbox string
	Due     time.Time
}
