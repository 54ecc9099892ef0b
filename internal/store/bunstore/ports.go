package bunstore

import (
	"context"
	"encoding/hex"
	"fmt"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

type portGrantRow struct {
	bun.BaseModel `bun:"table:port_grants,alias:pg"`

	ID        string `bun:",pk"`
	Project   string
	Sandbox   string
	Port      int64
	Hash      string // hexadecimal; "" is public
	CreatedAt int64
	ExpiresAt int64 `bun:",nullzero"`
}

// PortGrants implements store.PortReader.
func (r *reader) PortGrants(ctx context.Context, sandboxID string) ([]store.PortGrant, error) {
	var rows []portGrantRow
	if err := r.db.NewSelect().Model(&rows).Where("sandbox = ?", text(sandboxID)).OrderExpr("created_at, id").Scan(ctx); err != nil {
		return nil, r.fail(err, "read the grants of ports")
	}
	out := make([]store.PortGrant, len(rows))
	for i, row := range rows {
		hash, err := hex.DecodeString(row.Hash)
		if err != nil {
			return nil, fmt.Errorf("bunstore: the grant %s: %w", row.ID, err)
		}
		out[i] = store.PortGrant{
			ID: row.ID, Project: row.Project, Sandbox: row.Sandbox, Port: int(row.Port), Hash: hash,
			CreatedAt: instant(row.CreatedAt), ExpiresAt: instant(row.ExpiresAt),
		}
		if len(hash) == 0 {
			out[i].Hash = nil
		}
	}
	return out, nil
}

// InsertPortGrant implements store.PortWriter.
func (t *tx) InsertPortGrant(ctx context.Context, g store.PortGrant) error {
	row := portGrantRow{
		ID: g.ID, Project: g.Project, Sandbox: g.Sandbox, Port: int64(g.Port), Hash: hex.EncodeToString(g.Hash),
		CreatedAt: millis(g.CreatedAt), ExpiresAt: millis(g.ExpiresAt),
	}
	clash := fault.New(fault.Conflict, "the port %d of %s is public already", g.Port, g.Sandbox).Because(store.ReasonExists)
	return t.insert(ctx, &row, "grant of a port", clash)
}

// DeletePortGrant implements store.PortWriter.
func (t *tx) DeletePortGrant(ctx context.Context, sandboxID, id string) error {
	return t.delete(ctx, t.db.NewDelete().Model((*portGrantRow)(nil)).Where("sandbox = ? AND id = ?", text(sandboxID), text(id)), "grant of a port", id)
}

// EndPortGrants implements store.PortWriter.
func (t *tx) EndPortGrants(ctx context.Context, sandboxID string, all bool) error {
	q := t.db.NewDelete().Model((*portGrantRow)(nil)).Where("sandbox = ?", text(sandboxID))
	if !all {
		q = q.Where("hash <> ''")
	}
	_, err := q.Exec(ctx)
	return t.fail(err, "end the grants of ports")
}
