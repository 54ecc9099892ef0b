package apiserver

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
)

// ListOperations gives a page of operations.
func (s *server) ListOperations(ctx context.Context, r ListOperationsRequestObject) (ListOperationsResponseObject, error) {
	page, err := s.control.Operations(ctx, callOf(ctx).caller, control.OperationQuery{
		Limit: r.Params.Limit, Cursor: r.Params.Cursor, Sandbox: r.Params.Sandbox,
	})
	if err != nil {
		return nil, err
	}
	out := ListOperations200JSONResponse{Operations: []api.Operation{}, NextCursor: page.NextCursor}
	for i := range page.Operations {
		out.Operations = append(out.Operations, *operationOf(&page.Operations[i]))
	}
	return out, nil
}

// GetOperation describes an operation, on wish once it has ended.
func (s *server) GetOperation(ctx context.Context, r GetOperationRequestObject) (GetOperationResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	op, err := s.control.Operation(ctx, callOf(ctx).caller, r.ID)
	if err != nil {
		return nil, err
	}
	now, err := s.await(ctx, &op, time.Now().Add(wait))
	if err != nil {
		return nil, err
	}
	return GetOperation200JSONResponse(*operationOf(now)), nil
}

// CancelOperation asks that an operation end early.
func (s *server) CancelOperation(ctx context.Context, r CancelOperationRequestObject) (CancelOperationResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	op, err := s.control.Cancel(durable(ctx), callOf(ctx).caller, r.ID)
	if err != nil {
		return nil, err
	}
	now, err := s.await(ctx, &op, time.Now().Add(wait))
	if err != nil {
		return nil, err
	}
	if active(now) {
		return CancelOperation202JSONResponse(*operationOf(now)), nil
	}
	return CancelOperation200JSONResponse(*operationOf(now)), nil
}

// ListKeys gives a page of keys, without secrets.
func (s *server) ListKeys(ctx context.Context, r ListKeysRequestObject) (ListKeysResponseObject, error) {
	page, err := s.control.Keys(ctx, callOf(ctx).caller, control.KeyQuery{
		PageQuery: control.PageQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor}, Project: r.Params.Project,
	})
	if err != nil {
		return nil, err
	}
	out := ListKeys200JSONResponse{Keys: []api.Key{}, NextCursor: page.NextCursor}
	for _, k := range page.APIKeys {
		out.Keys = append(out.Keys, keyOf(k))
	}
	return out, nil
}

// CreateKey makes a key and shows its secret once.
func (s *server) CreateKey(ctx context.Context, r CreateKeyRequestObject) (CreateKeyResponseObject, error) {
	req := control.CreateKeyRequest{Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Name: r.Body.Name, Project: r.Body.Project}
	for _, scope := range r.Body.Scopes {
		req.Scopes = append(req.Scopes, string(scope))
	}
	var err error
	if req.Expires, err = parseInstant("expires_at", r.Body.ExpiresAt); err != nil {
		return nil, err
	}
	k, secret, err := s.control.CreateKey(durable(ctx), callOf(ctx).caller, req)
	if err != nil {
		return nil, err
	}
	return CreateKey201JSONResponse{Key: keyOf(k), Secret: secret}, nil
}

// RotateKey gives a key another secret and shows it once.
func (s *server) RotateKey(ctx context.Context, r RotateKeyRequestObject) (RotateKeyResponseObject, error) {
	k, secret, err := s.control.RotateKey(durable(ctx), callOf(ctx).caller, r.ID, idempotency(ctx, r.Params.IdempotencyKey))
	if err != nil {
		return nil, err
	}
	return RotateKey200JSONResponse{Key: keyOf(k), Secret: secret}, nil
}

// DeleteKey revokes a key.
func (s *server) DeleteKey(ctx context.Context, r DeleteKeyRequestObject) (DeleteKeyResponseObject, error) {
	err := s.control.DeleteKey(durable(ctx), callOf(ctx).caller, r.ID, idempotency(ctx, r.Params.IdempotencyKey))
	return DeleteKey204Response{}, err
}

// ListHosts lists hosts. There are few, so that the page is cut here.
func (s *server) ListHosts(ctx context.Context, r ListHostsRequestObject) (ListHostsResponseObject, error) {
	after, err := decodeCursor(r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	hosts, err := s.control.HostInfo(ctx)
	if err != nil {
		return nil, err
	}
	out := ListHosts200JSONResponse{Hosts: []api.Host{}}
	for _, h := range hosts {
		if h.ID <= after {
			continue
		}
		if len(out.Hosts) == limitOf(r.Params.Limit) {
			out.NextCursor = encodeCursor(out.Hosts[len(out.Hosts)-1].ID)
			break
		}
		out.Hosts = append(out.Hosts, hostOf(h))
	}
	return out, nil
}

// GetDiskUsage says what takes the space of the hosts' pools.
func (s *server) GetDiskUsage(ctx context.Context, r GetDiskUsageRequestObject) (GetDiskUsageResponseObject, error) {
	hosts, err := s.control.DiskUsage(ctx, callOf(ctx).caller, r.Params.Sandbox)
	if err != nil {
		return nil, err
	}
	out := GetDiskUsage200JSONResponse{Hosts: []api.HostDisk{}}
	for _, h := range hosts {
		out.Hosts = append(out.Hosts, hostDiskOf(h))
	}
	return out, nil
}

// hostCacheFor is how long what hosts can do is believed.
const hostCacheFor = 10 * time.Second

// hostCache keeps what is shown of hosts, so that a list asks no host for each line.
type hostCache struct {
	mu   sync.Mutex
	at   time.Time
	byID map[string]hostView
}

// hostViews gives what is shown of each host, as far as is known: a host that does not
// answer must not keep a sandbox from being read.
func (s *server) hostViews(ctx context.Context) map[string]hostView {
	s.known.mu.Lock()
	byID, fresh := s.known.byID, time.Since(s.known.at) < hostCacheFor
	s.known.mu.Unlock()
	if fresh {
		return byID
	}
	infos, err := s.control.HostInfo(ctx)
	if err != nil {
		s.log.DebugContext(ctx, "hosts not read", "err", err)
	}
	now := map[string]hostView{}
	for id, c := range byID {
		now[id] = c
	}
	for _, h := range infos {
		now[h.ID] = hostView{capable: capabilitiesOf(h), ahead: h.Ahead}
	}
	s.known.mu.Lock()
	defer s.known.mu.Unlock()
	s.known.byID, s.known.at = now, time.Now()
	return now
}

// GetVersion gives the server's version.
func (s *server) GetVersion(context.Context, GetVersionRequestObject) (GetVersionResponseObject, error) {
	return GetVersion200JSONResponse{Version: s.version, API: api.VersionAPIV1}, nil
}

// GetSpec gives the description of the API.
func (s *server) GetSpec(context.Context, GetSpecRequestObject) (GetSpecResponseObject, error) {
	return GetSpec200ApplicationVndOaiOpenapiResponse{Body: bytes.NewReader(api.Spec), ContentLength: int64(len(api.Spec))}, nil
}
