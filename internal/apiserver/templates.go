package apiserver

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// ListTemplates gives a page of templates.
func (s *server) ListTemplates(ctx context.Context, r ListTemplatesRequestObject) (ListTemplatesResponseObject, error) {
	page, err := s.control.Templates(ctx, callOf(ctx).caller, control.PageQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor})
	if err != nil {
		return nil, err
	}
	out := ListTemplates200JSONResponse{Templates: []api.Template{}, NextCursor: page.NextCursor}
	for _, t := range page.Templates {
		out.Templates = append(out.Templates, templateOf(t))
	}
	return out, nil
}

// GetTemplate describes a template.
func (s *server) GetTemplate(ctx context.Context, r GetTemplateRequestObject) (GetTemplateResponseObject, error) {
	t, err := s.control.Template(ctx, callOf(ctx).caller, r.Name)
	return GetTemplate200JSONResponse(templateOf(t)), err
}

// CreateTemplate begins to build a template, and follows it where the client asks for a
// stream.
func (s *server) CreateTemplate(ctx context.Context, r CreateTemplateRequestObject) (CreateTemplateResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	op, err := s.control.BuildTemplate(durable(ctx), callOf(ctx).caller, control.BuildRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Name: r.Body.Name,
		Source: control.TemplateSource{Debian: r.Body.Source.Debian, OCI: r.Body.Source.Oci},
	})
	if err != nil {
		return nil, err
	}
	if callOf(ctx).accepts(ndjson) {
		return s.followBuild(ctx, r.Body.Name, op), nil
	}
	now, err := s.await(ctx, &op, time.Now().Add(wait))
	if err != nil {
		return nil, err
	}
	out := api.TemplateChange{Operation: *operationOf(now)}
	if now.Status == sandbox.Succeeded {
		t, err := s.control.Template(ctx, callOf(ctx).caller, r.Body.Name)
		if err != nil {
			return nil, err
		}
		made := templateOf(t)
		out.Template = &made
	}
	if active(now) {
		return CreateTemplate202JSONResponse(out), nil
	}
	return CreateTemplate200JSONResponse(out), nil
}

// buildTick is how often a stream tells of a build's progress.
const buildTick = 500 * time.Millisecond

// followBuild tells of a build until its end. A server that shuts down cuts the stream;
// the build goes on.
func (s *server) followBuild(ctx context.Context, name string, op sandbox.Operation) lines {
	return func(send func(any) error) error {
		ctx, cancel := Lasting(ctx)
		defer cancel()
		for op.Status.Active() {
			if err := send(api.TemplateEvent{Progress: &api.TemplateProgress{Step: op.Step, Fraction: op.Progress}}); err != nil {
				return err
			}
			now, err := s.control.Wait(ctx, callOf(ctx).caller, op.ID, buildTick)
			if ctx.Err() != nil {
				return nil
			}
			if err != nil {
				d := s.fail(ctx, err)
				return send(api.TemplateEvent{Error: &d})
			}
			op = now
		}
		if e := op.Error; e != nil {
			return send(api.TemplateEvent{Error: &api.ErrorDetail{
				Code: api.ErrorCode(e.Code), Message: e.Message, Reason: e.Reason, RequestID: requestID(ctx),
			}})
		}
		t, err := s.control.Template(ctx, callOf(ctx).caller, name)
		if err != nil {
			d := s.fail(ctx, err)
			return send(api.TemplateEvent{Error: &d})
		}
		made := templateOf(t)
		return send(api.TemplateEvent{Template: &made})
	}
}

// DeleteTemplate deletes a template.
func (s *server) DeleteTemplate(ctx context.Context, r DeleteTemplateRequestObject) (DeleteTemplateResponseObject, error) {
	err := s.control.DeleteTemplate(durable(ctx), callOf(ctx).caller, r.Name, idempotency(ctx, r.Params.IdempotencyKey))
	return DeleteTemplate204Response{}, err
}
