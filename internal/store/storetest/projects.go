package storetest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// limits: everything that a project's row says comes back, and a stale write is refused.
func limits(t *testing.T, b *bundle) {
	p := store.Project{
		ID: "p3", Name: "third", CreatedAt: b.at.Add(time.Second), Plan: sandbox.PlanTrial, Version: 1,
		Settings: store.Settings{
			Quotas: store.Quotas{Sandboxes: 1, Running: 2, VCPUs: 3, MemoryBytes: 4, DiskBytes: 5, Forks: 6},
			Rate:   store.Rate{PerSecond: 7, Burst: 8}, TTL: time.Hour,
		},
		Budget: store.Budget{Spent: "0"},
	}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.InsertProject(ctx, p) })
	read := func() (got store.Project) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) (err error) { got, err = r.Project(ctx, "p3"); return err })
		return got
	}
	if got := read(); got != p {
		t.Errorf("read %+v, wrote %+v", got, p)
	}
	stale := p
	p.Plan, p.Quotas, p.Rate, p.TTL = sandbox.PlanStandard, store.Quotas{}, store.Rate{}, 0
	p.Budget = store.Budget{Limit: "10.5", From: b.at, Set: b.at.Add(time.Minute), Spent: "123.456", Exhausted: b.at.Add(time.Hour)}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateProject(ctx, &p) })
	if got := read(); got != p || p.Version != 2 {
		t.Errorf("read %+v, wrote %+v", got, p)
	}
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateProject(ctx, &stale) }), fault.Conflict, store.ReasonStale)
	stale.ID = "p9"
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateProject(ctx, &stale) }), fault.NotFound, "")
	b.view(t, func(ctx context.Context, r store.Reader) error {
		all, err := r.Projects(ctx, store.Page{})
		rest, err2 := r.Projects(ctx, store.Page{Limit: 1, After: store.Cursor{At: b.at, ID: "p2"}})
		paying, err3 := r.Budgeted(ctx)
		if len(all) != 3 || all[0].ID != "p1" || all[2] != p || len(rest) != 1 || rest[0] != p || len(paying) != 1 || paying[0] != p {
			t.Errorf("all %+v, after the second %+v, with a budget %+v", all, rest, paying)
		}
		return errorsOf(err, err2, err3)
	})
}

// use: what a project has is added up by state, and what is on its way to running counts.
func use(t *testing.T, b *bundle) {
	states := []sandbox.State{
		sandbox.Creating, sandbox.Ready, sandbox.Sleeping, sandbox.Sleeping, sandbox.Stopped, sandbox.Stopped, sandbox.Failed, sandbox.Archived, sandbox.Deleted,
	}
	for i, state := range states {
		s := b.sandbox("box-" + string(rune('a'+i)))
		s.State = state
		s.Spec.CPUs, s.Spec.Memory, s.Spec.Disk = 2, 1<<30, 4e9
		b.insert(t, s)
		verb := map[int]sandbox.Verb{3: sandbox.Wake, 5: sandbox.Resume, 1: sandbox.Stop, 6: sandbox.Delete}[i]
		if verb != "" {
			b.update(t, func(ctx context.Context, tx store.Tx) error {
				return tx.InsertOperation(ctx, sandbox.Operation{
					ID: "op_" + s.ID, Project: "p1", Sandbox: s.ID, Kind: verb, Status: sandbox.Pending, CreatedAt: b.at, Version: 1,
				})
			})
		}
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		got, err := r.ProjectUse(ctx, "p1")
		if want := (store.Use{Sandboxes: 8, Running: 4, VCPUs: 8, MemoryBytes: 4 << 30, DiskBytes: 32e9}); got != want {
			t.Errorf("it has %+v, want %+v", got, want)
		}
		none, err2 := r.ProjectUse(ctx, "p2")
		if none != (store.Use{}) {
			t.Errorf("another project has %+v", none)
		}
		return errorsOf(err, err2)
	})
}

// runningMeters: those by which nothing is metered any more are left out.
func runningMeters(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	prices := b.prices(t)
	m := metering.Meter{Project: "p1", Sandbox: s.ID}
	_, facts, _ := lived(t, b, s, prices)
	for i, f := range facts {
		next, made, err := m.Next(f, prices)
		if err != nil {
			t.Fatal(err)
		}
		m = next
		b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.EnterFact(ctx, m, f, made) })
		b.view(t, func(ctx context.Context, r store.Reader) error {
			got, err := r.RunningMeters(ctx, "p1")
			if runs := i < len(facts)-1; runs != (len(got) == 1) || runs && !reflect.DeepEqual(got[0], m) {
				t.Errorf("after %s: %+v", f.Kind, got)
			}
			others, err2 := r.RunningMeters(ctx, "p2")
			if len(others) != 0 {
				t.Errorf("another project's: %+v", others)
			}
			return errorsOf(err, err2)
		})
	}
}
