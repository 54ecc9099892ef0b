package store

import (
	"context"
	"time"
)

// PortReader is what a transaction can read of who may reach ports.
type PortReader interface {
	// PortGrants gives a sandbox's grants, oldest first, those that have expired among them.
	PortGrants(ctx context.Context, sandboxID string) ([]PortGrant, error)
}

// PortWriter is what a write transaction can change.
type PortWriter interface {
	// InsertPortGrant: Conflict with ReasonExists where the port is public already.
	InsertPortGrant(ctx context.Context, g PortGrant) error
	// DeletePortGrant ends one of a sandbox's grants.
	DeletePortGrant(ctx context.Context, sandboxID, id string) error
	// EndPortGrants ends a sandbox's tokens, and where all is set its public ports too.
	EndPortGrants(ctx context.Context, sandboxID string, all bool) error
}

// PortGrant lets callers without an API key reach a port of a sandbox (N1).
type PortGrant struct {
	ID        string
	Project   string
	Sandbox   string
	Port      int    // 0 is every port
	Hash      []byte // SHA-256 of the token; none: the port is public
	CreatedAt time.Time
	ExpiresAt time.Time // zero is never
}

// Public says whether the grant is everybody's.
func (g PortGrant) Public() bool { return len(g.Hash) == 0 }
