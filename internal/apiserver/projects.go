package apiserver

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

// ListProjects gives a page of the projects that the caller may see.
func (s *server) ListProjects(ctx context.Context, r ListProjectsRequestObject) (ListProjectsResponseObject, error) {
	page, err := s.control.Projects(ctx, callOf(ctx).caller, control.PageQuery{Limit: r.Params.Limit, Cursor: r.Params.Cursor})
	if err != nil {
		return nil, err
	}
	out := ListProjects200JSONResponse{Projects: []api.Project{}, NextCursor: page.NextCursor}
	for _, p := range page.Projects {
		out.Projects = append(out.Projects, projectOf(p))
	}
	return out, nil
}

// CreateProject makes a project.
func (s *server) CreateProject(ctx context.Context, r CreateProjectRequestObject) (CreateProjectResponseObject, error) {
	b := r.Body
	set, err := settingsOf(api.UpdateProject{
		Plan: b.Plan, Quotas: b.Quotas, Rate: b.Rate, TTLSeconds: b.TTLSeconds, Budget: b.Budget, BudgetFrom: b.BudgetFrom,
	})
	if err != nil {
		return nil, err
	}
	set.Idempotency = idempotency(ctx, r.Params.IdempotencyKey)
	v, err := s.control.CreateProject(durable(ctx), callOf(ctx).caller, b.Name, set)
	if err != nil {
		return nil, err
	}
	return CreateProject201JSONResponse(projectOf(v)), nil
}

// GetProject describes a project.
func (s *server) GetProject(ctx context.Context, r GetProjectRequestObject) (GetProjectResponseObject, error) {
	v, err := s.control.GetProject(ctx, callOf(ctx).caller, r.ID)
	if err != nil {
		return nil, err
	}
	return GetProject200JSONResponse(projectOf(v)), nil
}

// UpdateProject changes a project's plan and limits.
func (s *server) UpdateProject(ctx context.Context, r UpdateProjectRequestObject) (UpdateProjectResponseObject, error) {
	set, err := settingsOf(*r.Body)
	if err != nil {
		return nil, err
	}
	set.Idempotency = idempotency(ctx, r.Params.IdempotencyKey)
	v, err := s.control.EditProject(durable(ctx), callOf(ctx).caller, r.ID, set)
	if err != nil {
		return nil, err
	}
	return UpdateProject200JSONResponse(projectOf(v)), nil
}

func settingsOf(b api.UpdateProject) (control.ProjectSettings, error) {
	out := control.ProjectSettings{Budget: b.Budget}
	if b.Plan != nil {
		plan := string(*b.Plan)
		out.Plan = &plan
	}
	if q := b.Quotas; q != nil {
		out.Quotas = &control.Quotas{
			Sandboxes: q.Sandboxes, Running: q.Running, VCPUs: q.VCPUs, MemoryBytes: q.MemoryBytes, DiskBytes: q.DiskBytes, Forks: q.Forks,
		}
	}
	if b.Rate != nil {
		out.Rate = &control.Rate{PerSecond: b.Rate.PerSecond, Burst: b.Rate.Burst}
	}
	if b.TTLSeconds != nil {
		ttl, err := durationOf("ttl_seconds", *b.TTLSeconds)
		if err != nil {
			return out, err
		}
		out.TTL = &ttl
	}
	if b.BudgetFrom != nil {
		from, err := parseInstant("budget_from", *b.BudgetFrom)
		if err != nil {
			return out, err
		}
		out.BudgetFrom = &from
	}
	return out, nil
}

// durationOf is a number of seconds as a duration.
func durationOf(name string, n int64) (time.Duration, error) {
	const most = int64(1<<63-1) / int64(time.Second)
	if n < 0 || n > most {
		return 0, fault.New(fault.InvalidArgument, "%s takes a number of seconds from 0, not %d", name, n).Because(name)
	}
	return time.Duration(n) * time.Second, nil
}

func projectOf(v control.ProjectView) api.Project {
	q := v.Quotas
	out := api.Project{
		ID: v.ID, Plan: api.Plan(v.Plan), TTLSeconds: int64(v.TTL / time.Second), CreatedAt: api.At(v.CreatedAt),
		Quotas: api.Quotas{
			Sandboxes: q.Sandboxes, Running: q.Running, VCPUs: q.VCPUs, MemoryBytes: q.MemoryBytes, DiskBytes: q.DiskBytes, Forks: q.Forks,
		},
		Rate: api.Rate{PerSecond: v.Rate.PerSecond, Burst: v.Rate.Burst},
		Use: api.Use{
			Sandboxes: v.Use.Sandboxes, Running: v.Use.Running, VCPUs: v.Use.VCPUs, MemoryBytes: v.Use.MemoryBytes, DiskBytes: v.Use.DiskBytes,
		},
	}
	if b := v.Budget; b.Limit != "" {
		out.Budget = &api.Budget{
			Limit: b.Limit, From: api.AtOrNil(b.From), Spent: amount(v.Spent), DueAt: api.AtOrNil(v.Due), ExhaustedAt: api.AtOrNil(b.Exhausted),
		}
	}
	return out
}
