package bunstore

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

type projectRow struct {
	bun.BaseModel `bun:"table:projects,alias:p"`

	ID          string `bun:",pk"`
	Name        string
	CreatedAt   int64
	Plan        string
	Settings    string
	Budget      string
	BudgetFrom  int64 `bun:",nullzero"`
	BudgetSetAt int64 `bun:",nullzero"`
	BudgetSpent string
	ExhaustedAt int64 `bun:",nullzero"`
	Version     int64
}

func rowOfProject(p store.Project) *projectRow {
	return &projectRow{
		ID: p.ID, Name: text(p.Name), CreatedAt: millis(p.CreatedAt), Plan: string(p.Plan), Settings: encode(p.Settings),
		Budget: p.Budget.Limit, BudgetFrom: millis(p.Budget.From), BudgetSetAt: millis(p.Budget.Set), BudgetSpent: p.Budget.Spent,
		ExhaustedAt: millis(p.Budget.Exhausted), Version: p.Version,
	}
}

func (r *projectRow) project() (store.Project, error) {
	p := store.Project{
		ID: r.ID, Name: r.Name, CreatedAt: instant(r.CreatedAt), Plan: sandbox.Plan(r.Plan), Version: r.Version,
		Budget: store.Budget{
			Limit: r.Budget, From: instant(r.BudgetFrom), Set: instant(r.BudgetSetAt), Spent: r.BudgetSpent, Exhausted: instant(r.ExhaustedAt),
		},
	}
	if err := json.Unmarshal([]byte(r.Settings), &p.Settings); err != nil {
		return p, fmt.Errorf("bunstore: the settings of the project %s: %w", r.ID, err)
	}
	return p, nil
}

// Project implements store.ProjectReader.
func (r *reader) Project(ctx context.Context, id string) (store.Project, error) {
	list, err := r.projects(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return q.Where("id = ?", text(id)) })
	if err != nil {
		return store.Project{}, err
	}
	if len(list) == 0 {
		return store.Project{}, fault.New(fault.NotFound, "there is no project %s", id)
	}
	return list[0], nil
}

// Projects implements store.ProjectReader.
func (r *reader) Projects(ctx context.Context, p store.Page) ([]store.Project, error) {
	return r.projects(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return after(q, p) })
}

// Budgeted implements store.ProjectReader.
func (r *reader) Budgeted(ctx context.Context) ([]store.Project, error) {
	return r.projects(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return q.Where("budget <> ''").OrderExpr("id") })
}

func (r *reader) projects(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]store.Project, error) {
	var rows []projectRow
	if err := where(r.db.NewSelect().Model(&rows)).Scan(ctx); err != nil {
		return nil, r.fail(err, "read projects")
	}
	out := make([]store.Project, len(rows))
	for i := range rows {
		var err error
		if out[i], err = rows[i].project(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// ProjectUse implements store.ProjectReader.
func (r *reader) ProjectUse(ctx context.Context, project string) (store.Use, error) {
	var rows []struct {
		Runs        bool
		Sandboxes   int64
		CPUs        int64 `bun:"cpus"`
		MemoryBytes int64
		DiskBytes   int64
	}
	runs := r.db.NewSelect().TableExpr("sandboxes AS s").ColumnExpr("s.cpus, s.memory_bytes, s.disk_bytes").
		ColumnExpr("(s.state IN ('creating', 'ready') OR EXISTS (SELECT 1 FROM operations AS o WHERE o.sandbox = s.id "+
			"AND o.status IN ('pending', 'running') AND o.kind IN ('wake', 'resume'))) AS runs").
		Where("s.project = ?", text(project)).Where("s.state <> 'deleted'")
	err := r.db.NewSelect().TableExpr("(?) AS u", runs).ColumnExpr("runs, COUNT(*) AS sandboxes").
		ColumnExpr("CAST(SUM(cpus) AS bigint) AS cpus, CAST(SUM(memory_bytes) AS bigint) AS memory_bytes, CAST(SUM(disk_bytes) AS bigint) AS disk_bytes").
		GroupExpr("runs").Scan(ctx, &rows)
	if err != nil {
		return store.Use{}, r.fail(err, "add up what a project has")
	}
	var out store.Use
	for _, row := range rows {
		out.Sandboxes += row.Sandboxes
		out.DiskBytes += row.DiskBytes
		if row.Runs {
			out.Running, out.VCPUs, out.MemoryBytes = row.Sandboxes, row.CPUs, row.MemoryBytes
		}
	}
	return out, nil
}

// InsertProject implements store.ProjectWriter.
func (t *tx) InsertProject(ctx context.Context, p store.Project) error {
	clash := fault.New(fault.Conflict, "the project %s is there already", p.ID).Because(store.ReasonExists)
	row := rowOfProject(p)
	if row.Plan == "" {
		row.Plan = string(sandbox.PlanStandard)
	}
	if row.BudgetSpent == "" {
		row.BudgetSpent = "0"
	}
	row.Version = max(row.Version, 1)
	return t.insert(ctx, row, "project", clash)
}

// UpdateProject implements store.ProjectWriter.
func (t *tx) UpdateProject(ctx context.Context, p *store.Project) error {
	row := rowOfProject(*p)
	row.Version++
	if err := t.update(ctx, row, p.Version, "project", p.ID, nil); err != nil {
		return err
	}
	p.Version++
	return nil
}
