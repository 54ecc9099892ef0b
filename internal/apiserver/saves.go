package apiserver

import (
	"context"
	"net/http"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
)

// KeepSandbox lets a sandbox run on that could not be saved.
func (s *server) KeepSandbox(ctx context.Context, r KeepSandboxRequestObject) (KeepSandboxResponseObject, error) {
	return s.verb(ctx, r.Ref, "", r.Params.IdempotencyKey, s.control.Keep)
}

// UndeleteSandbox brings a deleted sandbox back.
func (s *server) UndeleteSandbox(ctx context.Context, r UndeleteSandboxRequestObject) (UndeleteSandboxResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	req := control.UndeleteRequest{Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Name: r.Params.Name}
	res, err := s.control.Undelete(durable(ctx), callOf(ctx).caller, r.Ref, req)
	if err != nil {
		return nil, err
	}
	return s.change(ctx, res, wait, http.StatusAccepted)
}

// ListReceipts gives a page of a sandbox's receipts.
func (s *server) ListReceipts(ctx context.Context, r ListReceiptsRequestObject) (ListReceiptsResponseObject, error) {
	page, err := s.control.Receipts(ctx, callOf(ctx).caller, r.Ref, control.PageQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor})
	if err != nil {
		return nil, err
	}
	out := ListReceipts200JSONResponse{Receipts: []api.Receipt{}, NextCursor: page.NextCursor}
	for _, rc := range page.Receipts {
		out.Receipts = append(out.Receipts, api.Receipt{Operation: rc.Operation, At: api.At(rc.At), Document: rc.Document})
	}
	return out, nil
}

// ListReceiptKeys gives the public keys of receipts.
func (s *server) ListReceiptKeys(ctx context.Context, _ ListReceiptKeysRequestObject) (ListReceiptKeysResponseObject, error) {
	keys, err := s.control.ReceiptKeys(ctx)
	if err != nil {
		return nil, err
	}
	out := ListReceiptKeys200JSONResponse{Keys: []api.ReceiptKey{}}
	for _, k := range keys {
		out.Keys = append(out.Keys, api.ReceiptKey{ID: k.ID, PublicKey: k.Text, CreatedAt: api.At(k.CreatedAt)})
	}
	return out, nil
}
