package bunstore

import (
	"context"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

type sshKeyRow struct {
	bun.BaseModel `bun:"table:ssh_keys,alias:sk"`

	ID          string `bun:",pk"`
	Project     string
	Name        string
	Fingerprint string
	PublicKey   string
	CreatedAt   int64
}

// SSHKey implements store.SSHKeyReader.
func (r *reader) SSHKey(ctx context.Context, project, id string) (store.SSHKey, error) {
	list, err := r.sshKeys(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		if project != "" {
			q = q.Where("project = ?", text(project))
		}
		return q.Where("id = ?", text(id))
	})
	if err == nil && len(list) == 0 {
		err = fault.New(fault.NotFound, "there is no SSH key %s", id)
	}
	if err != nil {
		return store.SSHKey{}, err
	}
	return list[0], nil
}

// SSHKeys implements store.SSHKeyReader.
func (r *reader) SSHKeys(ctx context.Context, project string, p store.Page) ([]store.SSHKey, error) {
	return r.sshKeys(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return after(q.Where("project = ?", text(project)), p) })
}

// SSHKeysByFingerprint implements store.SSHKeyReader.
func (r *reader) SSHKeysByFingerprint(ctx context.Context, fingerprint string) ([]store.SSHKey, error) {
	return r.sshKeys(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		return q.Where("fingerprint = ?", text(fingerprint)).OrderExpr("created_at, id")
	})
}

func (r *reader) sshKeys(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]store.SSHKey, error) {
	var rows []sshKeyRow
	if err := where(r.db.NewSelect().Model(&rows)).Scan(ctx); err != nil {
		return nil, r.fail(err, "read SSH keys")
	}
	out := make([]store.SSHKey, len(rows))
	for i, k := range rows {
		out[i] = store.SSHKey{ID: k.ID, Project: k.Project, Name: k.Name, Fingerprint: k.Fingerprint, PublicKey: k.PublicKey, CreatedAt: instant(k.CreatedAt)}
	}
	return out, nil
}

// InsertSSHKey implements store.SSHKeyWriter.
func (t *tx) InsertSSHKey(ctx context.Context, k store.SSHKey) error {
	clash := fault.New(fault.Conflict, "the SSH key %s is there already", k.Fingerprint).Because(store.ReasonExists)
	return t.insert(ctx, &sshKeyRow{
		ID: k.ID, Project: k.Project, Name: text(k.Name), Fingerprint: k.Fingerprint, PublicKey: k.PublicKey, CreatedAt: millis(k.CreatedAt),
	}, "SSH key", clash)
}

// DeleteSSHKey implements store.SSHKeyWriter.
func (t *tx) DeleteSSHKey(ctx context.Context, project, id string) error {
	return t.delete(ctx, t.db.NewDelete().Model((*sshKeyRow)(nil)).Where("project = ? AND id = ?", project, text(id)), "SSH key", id)
}
