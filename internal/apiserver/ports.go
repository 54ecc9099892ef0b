package apiserver

import (
	"context"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/store"
)

// ListPorts lists who may reach a sandbox's ports without a key.
func (s *server) ListPorts(ctx context.Context, r ListPortsRequestObject) (ListPortsResponseObject, error) {
	grants, box, err := s.control.PortGrants(ctx, callOf(ctx).caller, r.Ref)
	if err != nil {
		return nil, err
	}
	out := ListPorts200JSONResponse{Ports: []api.PortGrant{}}
	for _, g := range grants {
		out.Ports = append(out.Ports, s.grantOf(ctx, g, box.ID))
	}
	return out, nil
}

// OpenPort opens a port to callers without a key.
func (s *server) OpenPort(ctx context.Context, r OpenPortRequestObject) (OpenPortResponseObject, error) {
	req := control.GrantPortRequest{Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Port: int(r.Body.Port), Public: r.Body.Public}
	var err error
	if req.Expires, err = parseInstant("expires_at", r.Body.ExpiresAt); err != nil {
		return nil, err
	}
	g, box, token, err := s.control.GrantPort(durable(ctx), callOf(ctx).caller, r.Ref, req)
	if err != nil {
		return nil, err
	}
	return OpenPort201JSONResponse{Grant: s.grantOf(ctx, g, box.ID), Token: token}, nil
}

// RevokePort ends a grant.
func (s *server) RevokePort(ctx context.Context, r RevokePortRequestObject) (RevokePortResponseObject, error) {
	err := s.control.RevokePort(durable(ctx), callOf(ctx).caller, r.Ref, r.ID, idempotency(ctx, r.Params.IdempotencyKey))
	return RevokePort204Response{}, err
}

func (s *server) grantOf(ctx context.Context, g store.PortGrant, sandboxID string) api.PortGrant {
	out := api.PortGrant{ID: g.ID, Port: int64(g.Port), Public: g.Public(), CreatedAt: api.At(g.CreatedAt), ExpiresAt: api.AtOrNil(g.ExpiresAt)}
	if g.Port != 0 {
		out.URL = s.portURL(callOf(ctx).host, sandboxID, g.Port)
	}
	return out
}
