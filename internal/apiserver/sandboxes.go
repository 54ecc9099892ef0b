package apiserver

import (
	"context"
	"net/http"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// idempotency is the request key of the present call.
func idempotency(ctx context.Context, key api.IdempotencyKey) control.Idempotency {
	c := callOf(ctx)
	return control.Idempotency{Route: c.route, Key: key, BodyHash: c.bodyHash}
}

// durable is the context of a use case that changes something: a client that goes away
// does not end it (V3).
func durable(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// CreateSandbox makes a sandbox.
func (s *server) CreateSandbox(ctx context.Context, r CreateSandboxRequestObject) (CreateSandboxResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	b := r.Body
	req := control.CreateRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Name: b.Name, Template: b.Template,
		CPUs: b.CPUs, MemoryBytes: b.MemoryBytes, DiskBytes: b.DiskBytes, Env: b.Env, Labels: b.Labels, User: b.User, Workdir: b.Workdir,
	}
	req.TTL = ttlOf(b.TTLSeconds)
	req.Sleep = sleepOf(b.Sleep, b.OnIdle)
	req.Policy = control.PolicyRequest{OnDeadline: string(b.OnDeadline), ArchiveAfter: ttlOf(b.ArchiveAfter), DeleteAfter: ttlOf(b.DeleteAfter)}
	if b.Sleep != nil {
		req.Policy.SleepDeadline = string(b.Sleep.Deadline)
	}
	if b.Firewall != nil {
		f := firewallOf(*b.Firewall)
		req.Firewall = &f
	}
	res, err := s.control.Create(durable(ctx), callOf(ctx).caller, req)
	if err != nil {
		return nil, err
	}
	return s.change(ctx, res, wait, http.StatusCreated)
}

// ListSandboxes gives a page of sandboxes.
func (s *server) ListSandboxes(ctx context.Context, r ListSandboxesRequestObject) (ListSandboxesResponseObject, error) {
	labels, err := parseLabels(r.Params.Label)
	if err != nil {
		return nil, err
	}
	q := control.ListQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor, Labels: labels, Template: r.Params.Template, Deleted: r.Params.Undeletable}
	for _, state := range r.Params.State {
		if state != "" {
			q.States = append(q.States, sandbox.State(state))
		}
	}
	page, err := s.control.List(ctx, callOf(ctx).caller, q)
	if err != nil {
		return nil, err
	}
	out := ListSandboxes200JSONResponse{Sandboxes: []api.Sandbox{}, NextCursor: page.NextCursor}
	hosts := s.hostViews(ctx)
	for _, v := range page.Sandboxes {
		out.Sandboxes = append(out.Sandboxes, sandboxOf(v, hosts))
	}
	return out, nil
}

// GetSandbox describes a sandbox, on wish once it has come to rest.
func (s *server) GetSandbox(ctx context.Context, r GetSandboxRequestObject) (GetSandboxResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	view, err := s.control.Get(ctx, callOf(ctx).caller, r.Ref)
	if err == nil && wait > 0 && view.Operation != nil {
		if _, err = s.await(ctx, view.Operation, time.Now().Add(wait)); err == nil {
			view, err = s.control.Get(ctx, callOf(ctx).caller, view.Sandbox.ID)
		}
	}
	if err != nil {
		return nil, err
	}
	return GetSandbox200JSONResponse(sandboxOf(view, s.hostViews(ctx))), nil
}

// ttlOf is a length of time as a body gives it.
func ttlOf(s api.Seconds) control.TTL {
	return control.TTL{Given: s != "", None: s.None(), Seconds: s.Int64()}
}

// UpdateSandbox renames or labels a sandbox, or changes when it ends by itself.
func (s *server) UpdateSandbox(ctx context.Context, r UpdateSandboxRequestObject) (UpdateSandboxResponseObject, error) {
	b := r.Body
	req := control.UpdateRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Name: b.Name, Labels: b.Labels, TTL: ttlOf(b.TTLSeconds), Sleep: sleepOf(b.Sleep, b.OnIdle),
		Policy: control.PolicyRequest{OnDeadline: string(b.OnDeadline), ArchiveAfter: ttlOf(b.ArchiveAfter), DeleteAfter: ttlOf(b.DeleteAfter)},
	}
	if b.Sleep != nil {
		req.Policy.SleepDeadline = string(b.Sleep.Deadline)
	}
	res, err := s.control.Update(durable(ctx), callOf(ctx).caller, r.Ref, req)
	if err != nil {
		return nil, err
	}
	view, err := s.again(ctx, viewOf(res))
	if err != nil {
		return nil, err
	}
	return UpdateSandbox200JSONResponse(sandboxOf(view, s.hostViews(ctx))), nil
}

// DeleteSandbox deletes a sandbox.
func (s *server) DeleteSandbox(ctx context.Context, r DeleteSandboxRequestObject) (DeleteSandboxResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	req := control.DeleteRequest{Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Permanent: r.Params.Permanent}
	res, err := s.control.Delete(durable(ctx), callOf(ctx).caller, r.Ref, req)
	if err != nil {
		return nil, err
	}
	return s.change(ctx, res, wait, http.StatusAccepted)
}

// bootFor is a verb that begins an auto-stop, with what its body says of that; nil where
// it has none.
func bootFor(do func(context.Context, control.Actor, string, control.TTL, control.Idempotency) (control.Result, error), b *api.Boot) func(context.Context, control.Actor, string, control.Idempotency) (control.Result, error) {
	var ttl control.TTL
	if b != nil {
		ttl = ttlOf(b.TTLSeconds)
	}
	return func(ctx context.Context, a control.Actor, ref string, idem control.Idempotency) (control.Result, error) {
		return do(ctx, a, ref, ttl, idem)
	}
}

// verb is what the verbs that move one sandbox have in common.
func (s *server) verb(ctx context.Context, ref string, wait string, key string,
	do func(context.Context, control.Actor, string, control.Idempotency) (control.Result, error)) (*change, error) {
	d, err := parseWait(wait)
	if err != nil {
		return nil, err
	}
	res, err := do(durable(ctx), callOf(ctx).caller, ref, idempotency(ctx, key))
	if err != nil {
		return nil, err
	}
	return s.change(ctx, res, d, http.StatusAccepted)
}

// SleepSandbox puts a sandbox to sleep.
func (s *server) SleepSandbox(ctx context.Context, r SleepSandboxRequestObject) (SleepSandboxResponseObject, error) {
	return s.verb(ctx, r.Ref, r.Params.Wait, r.Params.IdempotencyKey, s.control.Sleep)
}

// WakeSandbox wakes a sandbox.
func (s *server) WakeSandbox(ctx context.Context, r WakeSandboxRequestObject) (WakeSandboxResponseObject, error) {
	return s.verb(ctx, r.Ref, r.Params.Wait, r.Params.IdempotencyKey, bootFor(s.control.WakeFor, r.Body))
}

// StopSandbox stops a sandbox.
func (s *server) StopSandbox(ctx context.Context, r StopSandboxRequestObject) (StopSandboxResponseObject, error) {
	return s.verb(ctx, r.Ref, r.Params.Wait, r.Params.IdempotencyKey, s.control.Stop)
}

// ResumeSandbox resumes a sandbox.
func (s *server) ResumeSandbox(ctx context.Context, r ResumeSandboxRequestObject) (ResumeSandboxResponseObject, error) {
	return s.verb(ctx, r.Ref, r.Params.Wait, r.Params.IdempotencyKey, bootFor(s.control.ResumeFor, r.Body))
}

// ForkSandbox makes copies, and waits on wish for the capture and every copy.
func (s *server) ForkSandbox(ctx context.Context, r ForkSandboxRequestObject) (ForkSandboxResponseObject, error) {
	wait, err := parseWait(r.Params.Wait)
	if err != nil {
		return nil, err
	}
	req := control.ForkRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Mode: sandbox.ForkMode(r.Body.Mode), Count: r.Body.Count,
		TTL: ttlOf(r.Body.TTLSeconds),
	}
	if r.Body.Name != "" {
		req.Names = []string{r.Body.Name}
	}
	res, err := s.control.Fork(durable(ctx), callOf(ctx).caller, r.Ref, req)
	if err != nil {
		return nil, err
	}
	until := time.Now().Add(wait)
	if res.Operation, err = s.await(ctx, res.Operation, until); err != nil {
		return nil, err
	}
	ended := !active(res.Operation)
	for i := range res.Children {
		child := &res.Children[i]
		if child.Operation, err = s.await(ctx, child.Operation, until); err != nil {
			return nil, err
		}
		ended = ended && !active(child.Operation)
	}
	body, err := s.forkResult(ctx, res, wait > 0)
	if err != nil {
		return nil, err
	}
	if ended {
		return ForkSandbox200JSONResponse(body), nil
	}
	return ForkSandbox202JSONResponse(body), nil
}

// forkResult reads the sandboxes again where time has gone by.
func (s *server) forkResult(ctx context.Context, res control.Result, again bool) (api.ForkResult, error) {
	hosts := s.hostViews(ctx)
	source := viewOf(res)
	if again {
		var err error
		if source, err = s.again(ctx, source); err != nil {
			return api.ForkResult{}, err
		}
	}
	out := api.ForkResult{Sandbox: sandboxOf(source, hosts), Operation: *operationOf(res.Operation), Forks: []api.Fork{}}
	for _, child := range res.Children {
		op := operationOf(child.Operation)
		if again {
			var err error
			if child, err = s.again(ctx, child); err != nil {
				return api.ForkResult{}, err
			}
		}
		out.Forks = append(out.Forks, api.Fork{Sandbox: sandboxOf(child, hosts), Operation: op})
	}
	return out, nil
}

// GetIdentity lists what was made anew.
func (s *server) GetIdentity(ctx context.Context, r GetIdentityRequestObject) (GetIdentityResponseObject, error) {
	view, err := s.control.Get(ctx, callOf(ctx).caller, r.Ref)
	if err != nil {
		return nil, err
	}
	items, err := s.control.Identity(ctx, callOf(ctx).caller, view.Sandbox.ID)
	if err != nil {
		return nil, err
	}
	out := GetIdentity200JSONResponse{Sandbox: view.Sandbox.ID, Items: []api.IdentityItem{}}
	for _, i := range items {
		out.Items = append(out.Items, api.IdentityItem{Item: i.Item, Status: api.IdentityItemStatus(i.Status), Message: i.Message})
	}
	return out, nil
}

// GetMissedTimers lists what the last sleep missed.
func (s *server) GetMissedTimers(ctx context.Context, r GetMissedTimersRequestObject) (GetMissedTimersResponseObject, error) {
	id, missed, err := s.control.Missed(ctx, callOf(ctx).caller, r.Ref)
	if err != nil {
		return nil, err
	}
	out := GetMissedTimers200JSONResponse{
		Sandbox: id, From: api.AtOrNil(missed.From), To: api.AtOrNil(missed.To), Zone: missed.Zone,
		Timers: []api.MissedTimer{}, Omitted: missed.Omitted,
	}
	for _, t := range missed.Timers {
		out.Timers = append(out.Timers, api.MissedTimer{
			Source: t.Source, Line: t.Line, Schedule: t.Schedule, User: t.User, Command: t.Command, Count: t.Count, Last: api.At(t.Last),
		})
	}
	return out, nil
}
