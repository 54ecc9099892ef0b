package control

import (
	"context"
	"fmt"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// The most that a project's settings may say.
const (
	maxQuota = 1 << 50
	maxRate  = 10_000 // calls a second, and of a burst ten times that
)

// ProjectSettings are what the operator sets for a project. Nil leaves it as it is.
type ProjectSettings struct {
	Idempotency Idempotency
	Plan        *string
	Quotas      *store.Quotas // replaces all of them
	Rate        *store.Rate
	TTL         *time.Duration // of sandboxes where nobody names one; 0 is the installation's
	Budget      *string        // a decimal; "" is none
	BudgetFrom  *time.Time     // what was metered before does not count; zero is the beginning
}

// ProjectView is a project with what it has and spends.
type ProjectView struct {
	Project
	Use   store.Use
	Spent metering.Amount // of its budget, up to now
	Due   time.Time       // when the budget is reached as things are; zero is not foreseen
}

// ProjectPage is one page of projects.
type ProjectPage struct {
	Projects   []ProjectView
	NextCursor string
}

// project finds a project that the actor may see: its own, and every one for the
// operator. "" is its own. One that it may not see is as unknown as one that never was.
func project(ctx context.Context, r store.Reader, a Actor, id string) (Project, error) {
	if id == "" {
		id = a.Project
	}
	none := fault.New(fault.NotFound, "there is no project %s; `hutch projects ls` lists those that are", shown(id)).Because("project")
	if id != a.Project && !a.Operator() || !nameSyntax.MatchString(id) {
		return Project{}, none
	}
	p, err := r.Project(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return Project{}, none
	}
	return p, err
}

// EnsureProject makes the project when it is not there. The id is its name.
func (c *Control) EnsureProject(ctx context.Context, id string) error {
	if err := validName("project", id); err != nil {
		return err
	}
	return c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		_, err := tx.Project(ctx, id)
		if !fault.Is(err, fault.NotFound) {
			return err
		}
		return tx.InsertProject(ctx, store.Project{ID: id, Name: id, CreatedAt: c.instant()})
	})
}

// CreateProject makes a project, which is for the operator. It begins with the templates of
// the operator's own project.
func (c *Control) CreateProject(ctx context.Context, a Actor, name string, r ProjectSettings) (ProjectView, error) {
	check := func() error {
		if err := a.Need(ScopeOperator); err != nil {
			return err
		}
		return validName("project", name)
	}
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (ProjectView, error) {
		return c.viewProject(ctx, rd, seen.Resource)
	}
	v, _, err := once(ctx, c, a, r.Idempotency, check, again, func(ctx context.Context, w *writer) (ProjectView, error) {
		w.memo.Outcome, w.memo.Resource = string(sandbox.Done), name
		p := store.Project{ID: name, Name: name, CreatedAt: w.at, Plan: sandbox.PlanStandard, Version: 1}
		if err := c.configure(ctx, w, &p, r); err != nil {
			return ProjectView{}, err
		}
		_, err := w.Project(ctx, name)
		if err == nil {
			err = fault.New(fault.Conflict, "the project %s is there already; `hutch projects edit %s` changes it", name, name).Because(store.ReasonExists)
		}
		if !fault.Is(err, fault.NotFound) {
			return ProjectView{}, err
		}
		if err := w.InsertProject(ctx, p); err != nil {
			return ProjectView{}, err
		}
		templates, err := w.Templates(ctx, a.Project, store.Page{})
		if err != nil {
			return ProjectView{}, err
		}
		for _, t := range templates {
			t.Project = name
			if err := w.PutTemplate(ctx, t); err != nil {
				return ProjectView{}, err
			}
		}
		w.project = name
		if err := w.event(ctx, "project.created", "", "", map[string]any{"project": name, "plan": p.Plan}); err != nil {
			return ProjectView{}, err
		}
		return c.viewProject(ctx, w, name)
	})
	return v, err
}

// EditProject changes what the operator has set for a project. A change of plan applies at
// the next boot; a budget that is raised or lifted lets go of what the one before held.
func (c *Control) EditProject(ctx context.Context, a Actor, id string, r ProjectSettings) (ProjectView, error) {
	again := func(ctx context.Context, rd store.Reader, seen store.Request) (ProjectView, error) {
		return c.viewProject(ctx, rd, seen.Resource)
	}
	v, _, err := once(ctx, c, a, r.Idempotency, nil, again, func(ctx context.Context, w *writer) (ProjectView, error) {
		p, err := project(ctx, w, a, id)
		if err == nil {
			err = a.Need(ScopeOperator)
		}
		if err == nil {
			err = w.Lock(ctx, projectLock(p.ID))
		}
		if err == nil {
			p, err = w.Project(ctx, p.ID) // as it is under the lock
		}
		if err != nil {
			return ProjectView{}, err
		}
		w.memo.Outcome, w.memo.Resource, w.project = string(sandbox.Done), p.ID, p.ID
		if err := c.configure(ctx, w, &p, r); err != nil {
			return ProjectView{}, err
		}
		if err := w.UpdateProject(ctx, &p); err != nil {
			return ProjectView{}, err
		}
		changed := map[string]any{"project": p.ID, "plan": p.Plan, "budget": p.Budget.Limit}
		if err := w.event(ctx, "project.updated", "", "", changed); err != nil {
			return ProjectView{}, err
		}
		return c.viewProject(ctx, w, p.ID)
	})
	if err == nil && r.Budget != nil {
		c.budgets.wake()
		if v.Budget.Exhausted.IsZero() {
			err = c.liftBudget(ctx, v.ID)
		}
	}
	return v, err
}

// configure puts settings into a project's row, or says which of them cannot be.
func (c *Control) configure(ctx context.Context, w *writer, p *Project, r ProjectSettings) error {
	if r.Plan != nil {
		if p.Plan = sandbox.Plan(*r.Plan); p.Plan != sandbox.PlanStandard && p.Plan != sandbox.PlanTrial {
			return invalid("plan", "%s is no plan: use %v", shown(*r.Plan), sandbox.Plans)
		}
	}
	if r.Quotas != nil {
		p.Quotas = *r.Quotas
		for name, n := range quotaNames(p.Quotas) {
			if n < 0 || n > maxQuota {
				return invalid("quotas", "a quota of %d %s is not possible: it is from 1, or none", n, name)
			}
		}
	}
	if r.Rate != nil {
		p.Rate = *r.Rate
		if p.Rate.PerSecond < 0 || p.Rate.PerSecond > maxRate || p.Rate.Burst < 0 || p.Rate.Burst > 10*maxRate {
			return invalid("rate", "%d calls a second, %d at once, is not possible: a rate is from 1 to %d and a burst up to %d, or none",
				p.Rate.PerSecond, p.Rate.Burst, maxRate, 10*maxRate)
		}
	}
	if r.TTL != nil {
		p.TTL = *r.TTL
	}
	if p.TTL != 0 {
		policy := c.limits.Policy
		policy.TTL = p.TTL
		if err := policy.Check(sandbox.SleepManual, p.Plan, c.limits.Bounds); err != nil {
			return err
		}
	}
	if r.Budget == nil && r.BudgetFrom == nil {
		return nil
	}
	return w.setBudget(ctx, p, r)
}

// quotaNames gives each quota by its name, as messages say it.
func quotaNames(q store.Quotas) map[string]int64 {
	return map[string]int64{
		"sandboxes": q.Sandboxes, "running sandboxes": q.Running, "vCPUs": q.VCPUs, "bytes of memory": q.MemoryBytes,
		"bytes of disk": q.DiskBytes, "forks a call": q.Forks,
	}
}

// GetProject gives a project that the actor may see; "" is its own.
func (c *Control) GetProject(ctx context.Context, a Actor, id string) (ProjectView, error) {
	var v ProjectView
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		p, err := project(ctx, r, a, id)
		if err != nil {
			return err
		}
		v, err = c.viewProject(ctx, r, p.ID)
		return err
	})
	return v, err
}

// Projects gives a page of the projects that the actor may see, in the order of their
// making.
func (c *Control) Projects(ctx context.Context, a Actor, q PageQuery) (ProjectPage, error) {
	var out ProjectPage
	page, err := c.page(q.Limit, q.Cursor)
	if err != nil {
		return out, err
	}
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		rows := []Project{}
		if a.Operator() {
			rows, err = r.Projects(ctx, page)
		} else if p, perr := r.Project(ctx, a.Project); perr != nil {
			err = perr
		} else if q.Cursor == "" {
			rows = append(rows, p)
		}
		if err != nil {
			return err
		}
		rows, out.NextCursor = cut(page, rows, func(p Project) store.Cursor { return store.Cursor{At: p.CreatedAt, ID: p.ID} })
		for _, p := range rows {
			v, err := c.viewProject(ctx, r, p.ID)
			if err != nil {
				return err
			}
			out.Projects = append(out.Projects, v)
		}
		return nil
	})
	return out, err
}

// viewProject reads a project with what it has and spends.
func (c *Control) viewProject(ctx context.Context, r store.Reader, id string) (ProjectView, error) {
	p, err := r.Project(ctx, id)
	v := ProjectView{Project: p}
	if err == nil {
		v.Use, err = r.ProjectUse(ctx, id)
	}
	if err != nil || p.Budget.Limit == "" {
		return v, err
	}
	prices, err := r.Prices(ctx)
	if err != nil {
		return v, err
	}
	if v.Spent, err = spent(ctx, r, p, prices, c.instant()); err != nil {
		return v, err
	}
	if !p.Budget.Exhausted.IsZero() {
		v.Due = p.Budget.Exhausted
		return v, nil
	}
	due, reached, err := budgetDue(ctx, r, p, prices, c.instant())
	if reached {
		v.Due = due
	}
	return v, err
}

// projectLock is the lock of what is decided on all that a project has: its quotas and its
// budget. It is taken after the rows of sandboxes, never before.
func projectLock(id string) string { return "project " + id }

// more is what an admitted verb adds to what its project has.
type more struct {
	verb   sandbox.Verb
	name   string // of the sandbox, for messages
	add    store.Use
	forks  int64 // of one call
	spec   sandbox.Spec
	policy *sandbox.Policy // that the plan has to allow; nil is asked elsewhere
	free   bool            // it costs nothing: no budget refuses it (B4)
}

// one is what one running sandbox takes.
func one(s sandbox.Spec) store.Use {
	return store.Use{Running: 1, VCPUs: int64(s.CPUs), MemoryBytes: s.Memory}
}

// another is what n new sandboxes take.
func another(s sandbox.Spec, n int64) store.Use {
	return store.Use{Sandboxes: n, Running: n, VCPUs: n * int64(s.CPUs), MemoryBytes: n * s.Memory, DiskBytes: n * s.Disk}
}

// within refuses what the project's plan, budget or quotas do not allow. Whatever passes
// together with the commit counts for the next one: none that come at a time pass together
// what one of them would.
func (w *writer) within(ctx context.Context, c *Control, m more) error {
	p, err := w.Project(ctx, w.project)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("cannot %s %s", m.verb, m.name)
	if m.name == "" {
		what = fmt.Sprintf("cannot %s a sandbox", m.verb)
	}
	if m.policy != nil { // A5
		if err := m.policy.Check(m.spec.Sleep, p.Plan, c.limits.Bounds); err != nil {
			return err
		}
	}
	if p.Quotas == (store.Quotas{}) && p.Budget.Limit == "" {
		return nil
	}
	if err := w.Lock(ctx, projectLock(p.ID)); err != nil {
		return err
	}
	if p, err = w.Project(ctx, w.project); err != nil {
		return err
	}
	if !m.free {
		if err := w.affordable(ctx, p, what); err != nil {
			return err
		}
	}
	if p.Quotas == (store.Quotas{}) {
		return nil
	}
	if q := p.Quotas.Forks; q > 0 && m.forks > q {
		return quotaExceeded(what, "forks_per_call", fmt.Sprintf("the project %s makes at most %d forks with one call, not %d; make fewer at a time", p.ID, q, m.forks))
	}
	use, err := w.ProjectUse(ctx, p.ID)
	if err != nil {
		return err
	}
	for _, q := range []struct {
		reason, unit    string
		most, has, adds int64
		free            string
	}{
		{"sandboxes", "sandboxes", p.Quotas.Sandboxes, use.Sandboxes, m.add.Sandboxes, "delete one that you do not need"},
		{"running", "running sandboxes", p.Quotas.Running, use.Running, m.add.Running, "sleep or stop one"},
		{"vcpus", "vCPUs of running sandboxes", p.Quotas.VCPUs, use.VCPUs, m.add.VCPUs, "sleep or stop a sandbox"},
		{"memory", "bytes of memory of running sandboxes", p.Quotas.MemoryBytes, use.MemoryBytes, m.add.MemoryBytes, "sleep or stop a sandbox"},
		{"disk", "bytes of disk", p.Quotas.DiskBytes, use.DiskBytes, m.add.DiskBytes, "delete a sandbox that you do not need"},
	} {
		if q.most > 0 && q.adds > 0 && q.has+q.adds > q.most {
			return quotaExceeded(what, q.reason, fmt.Sprintf("the project %s has %d of at most %d %s, and this takes %d more; %s, or have the operator raise it (`hutch projects edit`)",
				p.ID, q.has, q.most, q.unit, q.adds, q.free))
		}
	}
	return nil
}

func quotaExceeded(what, reason, why string) error {
	return fault.New(fault.QuotaExceeded, "%s: %s", what, why).Because(reason)
}

// planAllows refuses a policy that the project's plan does not allow (A5).
func (w *writer) planAllows(ctx context.Context, c *Control, s sandbox.Sandbox, p sandbox.Policy) error {
	owner, err := w.Project(ctx, s.Project)
	if err != nil {
		return err
	}
	return p.Check(s.Spec.Sleep, owner.Plan, c.limits.Bounds)
}
