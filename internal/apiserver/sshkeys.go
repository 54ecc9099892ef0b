package apiserver

import (
	"context"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
)

// ListSSHKeys gives a page of a project's public keys.
func (s *server) ListSSHKeys(ctx context.Context, r ListSSHKeysRequestObject) (ListSSHKeysResponseObject, error) {
	page, err := s.control.SSHKeys(ctx, callOf(ctx).caller, control.KeyQuery{
		PageQuery: control.PageQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor}, Project: r.Params.Project,
	})
	if err != nil {
		return nil, err
	}
	out := ListSSHKeys200JSONResponse{SSHKeys: []api.SSHKey{}, NextCursor: page.NextCursor}
	for _, k := range page.SSHKeys {
		out.SSHKeys = append(out.SSHKeys, sshKeyOf(k))
	}
	return out, nil
}

// AddSSHKey registers a public key.
func (s *server) AddSSHKey(ctx context.Context, r AddSSHKeyRequestObject) (AddSSHKeyResponseObject, error) {
	k, err := s.control.AddSSHKey(durable(ctx), callOf(ctx).caller, control.AddSSHKeyRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Name: r.Body.Name, Project: r.Body.Project, PublicKey: r.Body.PublicKey,
	})
	if err != nil {
		return nil, err
	}
	return AddSSHKey201JSONResponse(sshKeyOf(k)), nil
}

// DeleteSSHKey revokes a public key.
func (s *server) DeleteSSHKey(ctx context.Context, r DeleteSSHKeyRequestObject) (DeleteSSHKeyResponseObject, error) {
	err := s.control.DeleteSSHKey(durable(ctx), callOf(ctx).caller, r.ID, idempotency(ctx, r.Params.IdempotencyKey))
	return DeleteSSHKey204Response{}, err
}

func sshKeyOf(k control.SSHKey) api.SSHKey {
	return api.SSHKey{ID: k.ID, Project: k.Project, Name: k.Name, Fingerprint: k.Fingerprint, PublicKey: k.PublicKey, CreatedAt: api.At(k.CreatedAt)}
}
