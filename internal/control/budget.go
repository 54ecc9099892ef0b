package control

import (
	"context"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shopspring/decimal"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// budgetActor is the actor of what a budget brings about.
const budgetActor = "budget"

// budgetHalt begins the names under which meters are halted for a budget. The rest is the
// instant at which it was reached.
const budgetHalt = "budget_"

// budgetSyntax is a budget as it is written.
var budgetSyntax = regexp.MustCompile(`^[0-9]{1,9}(\.[0-9]{1,6})?$`)

// setBudget puts a budget into a project's row, with what of it is spent already.
func (w *writer) setBudget(ctx context.Context, p *Project, r ProjectSettings) error {
	b := store.Budget{Limit: p.Budget.Limit, From: p.Budget.From, Set: w.at, Spent: "0"}
	if r.Budget != nil {
		b.Limit = *r.Budget
	}
	if r.BudgetFrom != nil {
		b.From = r.BudgetFrom.UTC().Truncate(time.Millisecond)
	}
	if b.Limit != "" {
		if !budgetSyntax.MatchString(b.Limit) {
			return invalid("budget", "%s is no budget: write a decimal number with up to 9 digits before the point and 6 after it, such as 10.00", shown(b.Limit))
		}
		limit, err := decimal.NewFromString(b.Limit)
		if err != nil {
			return invalid("budget", "%s is no budget: write a decimal number such as 10.00", shown(b.Limit))
		}
		b.Limit = limit.String()
	}
	p.Budget = b
	return w.resum(ctx, p)
}

// resum adds up what of a project's budget is in the ledger.
func (w *writer) resum(ctx context.Context, p *Project) error {
	if p.Budget.Limit == "" {
		return nil
	}
	entries, err := w.MeterEntries(ctx, store.EntryFilter{Project: p.ID, From: p.Budget.From})
	if err != nil {
		return err
	}
	p.Budget.Spent = "0"
	return w.spend(ctx, p, entries)
}

// spend adds what entries cost to what of a project's budget is in the ledger.
func (w *writer) spend(ctx context.Context, p *Project, entries []metering.Entry) error {
	prices, err := w.Prices(ctx)
	if err != nil {
		return err
	}
	before, err := metering.ParseAmount(p.Budget.Spent)
	if err != nil {
		return err
	}
	bill, err := metering.Bill(entries, prices, p.Budget.From, time.Time{})
	if err != nil {
		return err
	}
	p.Budget.Spent = before.Plus(bill.Total).Text()
	return nil
}

// spent is what of a project's budget is spent up to an instant.
func spent(ctx context.Context, r store.Reader, p Project, prices metering.Prices, now time.Time) (metering.Amount, error) {
	sum, err := metering.ParseAmount(p.Budget.Spent)
	if err != nil {
		return sum, err
	}
	meters, err := r.RunningMeters(ctx, p.ID)
	if err != nil {
		return sum, err
	}
	var open []metering.Entry
	for _, m := range meters {
		open = append(open, m.Open(now, prices)...)
	}
	bill, err := metering.Bill(open, prices, p.Budget.From, time.Time{})
	return sum.Plus(bill.Total), err
}

// budgetDue computes the instant at which a project's spending reaches its budget (B4). It
// never lies before the budget was set.
func budgetDue(ctx context.Context, r store.Reader, p Project, prices metering.Prices, now time.Time) (time.Time, bool, error) {
	limit, err := decimal.NewFromString(p.Budget.Limit)
	if err != nil {
		return time.Time{}, false, fault.Wrap(err, fault.DataCorrupt, "the budget of the project %s cannot be read; set it again with `hutch projects edit`", p.ID)
	}
	sum, err := metering.ParseAmount(p.Budget.Spent)
	if err != nil {
		return time.Time{}, false, err
	}
	meters, err := r.RunningMeters(ctx, p.ID)
	if err != nil {
		return time.Time{}, false, err
	}
	b := metering.Budget{Limit: limit, From: p.Budget.From, Spent: sum}
	due, reached, err := b.Due(nil, meters, prices)
	if err != nil || !reached {
		return time.Time{}, false, err
	}
	if !due.After(now) {
		// It was reached before now, and entries that lie beside the open intervals had their
		// part in when: with all of them the instant is exact.
		entries, err := r.MeterEntries(ctx, store.EntryFilter{Project: p.ID, From: p.Budget.From})
		if err != nil {
			return time.Time{}, false, err
		}
		b.Spent = metering.Amount{}
		if due, reached, err = b.Due(entries, meters, prices); err != nil || !reached {
			return time.Time{}, false, err
		}
	}
	if due.Before(p.Budget.Set) {
		due = p.Budget.Set
	}
	return due, true, nil
}

// affordable refuses what a project's budget has nothing left for. The project's lock is
// held.
func (w *writer) affordable(ctx context.Context, p Project, what string) error {
	if p.Budget.Limit == "" {
		return nil
	}
	at := p.Budget.Exhausted
	if at.IsZero() {
		prices, err := w.Prices(ctx)
		if err != nil {
			return err
		}
		due, reached, err := budgetDue(ctx, w, p, prices, w.at)
		if err != nil || !reached || due.After(w.at) {
			return err
		}
		at = due
	}
	return fault.New(fault.BudgetExhausted, "%s: the project %s reached its budget of %s at %s, and what runs is stopped; nothing is deleted. "+
		"Have the operator raise it (`hutch projects edit %s --budget …`), then try again", what, p.ID, p.Budget.Limit, at.UTC().Format(time.RFC3339), p.ID).
		Because("budget")
}

// exhaust writes that a project's budget is reached, where it is at an instant, with its
// event: once, whoever sees it first. The project's lock is held.
func (w *writer) exhaust(ctx context.Context, p *Project, now time.Time) error {
	if p.Budget.Limit == "" || !p.Budget.Exhausted.IsZero() {
		return nil
	}
	prices, err := w.Prices(ctx)
	if err != nil {
		return err
	}
	due, reached, err := budgetDue(ctx, w, *p, prices, now)
	if err != nil || !reached || due.After(now) {
		return err
	}
	p.Budget.Exhausted = due
	if err := w.UpdateProject(ctx, p); err != nil {
		return err
	}
	return w.event(ctx, "budget.exhausted", "", "", map[string]any{"project": p.ID, "budget": p.Budget.Limit, "at": due})
}

// budgeted halts a sandbox's meter at the instant at which the project's budget was
// reached, or lets go of it where the budget was raised. It comes before every other fact,
// so that nothing is entered past that instant. m is the meter, which it gives back.
func (w *writer) budgeted(ctx context.Context, c *Control, p *Project, m metering.Meter, prices metering.Prices) (metering.Meter, error) {
	held := slices.IndexFunc(m.Halts, func(h metering.Halt) bool { return strings.HasPrefix(h.Operation, budgetHalt) && !h.Failed })
	over := p.Budget.Exhausted
	switch {
	case over.IsZero() && held >= 0:
		if err := w.event(ctx, "budget.lifted", m.Sandbox, "", map[string]any{"at": p.Budget.Set}); err != nil {
			return m, err
		}
		return w.enter(ctx, c, p, m, metering.Fact{Kind: metering.Released, At: p.Budget.Set, Event: w.told, Operation: m.Halts[held].Operation}, prices)
	case !over.IsZero() && held < 0 && m.Reason != "":
		if err := w.event(ctx, "budget.reached", m.Sandbox, "", map[string]any{"at": over}); err != nil {
			return m, err
		}
		return w.enter(ctx, c, p, m, metering.Fact{
			Kind: metering.Halted, At: over, Event: w.told, Operation: budgetHalt + strconv.FormatInt(over.UnixMilli(), 10),
			Verb: sandbox.Stop, End: metering.ByBudget,
		}, prices)
	}
	return m, nil
}

// budgets is the watch over all projects' budgets.
type budgets struct {
	nudge chan struct{}

	mu    sync.Mutex
	tried map[string]time.Time // by sandbox: when its stop was begun last
}

func newBudgets() *budgets {
	return &budgets{nudge: make(chan struct{}, 1), tried: map[string]time.Time{}}
}

// wake has the budgets looked at soon.
func (b *budgets) wake() {
	select {
	case b.nudge <- struct{}{}:
	default:
	}
}

// budgetPause is the least time between two looks, and budgetRetry that between two stops of
// one sandbox, where the first has failed.
const (
	budgetPause = 100 * time.Millisecond
	budgetRetry = 30 * time.Second
)

// budgetSettles is how long after a budget was set the ledger is added up at each look: a
// transaction that began before knew nothing of the budget. It is longer than one can take.
const budgetSettles = time.Minute

// budgetLoop stops what a budget has nothing left for, at the instant at which it falls due.
// Every server does, on the same rows: each step is done once whoever comes first.
func (c *Control) budgetLoop(ctx context.Context) {
	for {
		wait := c.limits.ReconcileEvery
		next, err := c.lookAtBudgets(ctx)
		switch {
		case err != nil && ctx.Err() == nil:
			c.log.Error("the budgets cannot be looked at; it will be tried again", "err", err)
			wait = c.limits.FlushEvery
		case !next.IsZero():
			wait = min(wait, max(next.Sub(c.now()), budgetPause))
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-c.budgets.nudge:
			timer.Stop()
			pause := time.NewTimer(budgetPause) // what comes together is looked at together
			select {
			case <-ctx.Done():
				pause.Stop()
				return
			case <-pause.C:
			}
		}
	}
}

// lookAtBudgets does what is due, and gives when the next budget is.
func (c *Control) lookAtBudgets(ctx context.Context) (next time.Time, err error) {
	var list []Project
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		list, err = r.Budgeted(ctx)
		return err
	})
	for _, p := range list {
		due, perr := c.lookAtBudget(ctx, p)
		if perr != nil {
			err = perr
			continue
		}
		if !due.IsZero() && (next.IsZero() || due.Before(next)) {
			next = due
		}
	}
	return next, err
}

// lookAtBudget does what is due for one project, and gives when its budget is.
func (c *Control) lookAtBudget(ctx context.Context, p Project) (due time.Time, err error) {
	if p.Budget.Exhausted.IsZero() {
		now := c.instant()
		p, due, err = c.budgetOf(ctx, p.ID, now)
		fresh := now.Sub(p.Budget.Set) < budgetSettles && p.Budget.Limit != ""
		if err != nil || !fresh && (due.IsZero() || due.After(now)) {
			return due, err
		}
		err = c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
			if err := tx.Lock(ctx, projectLock(p.ID)); err != nil {
				return err
			}
			var err error
			if p, err = tx.Project(ctx, p.ID); err != nil {
				return err
			}
			w := c.writer(tx, p.ID, budgetActor, now)
			before := p.Budget.Spent
			if err := w.resum(ctx, &p); err != nil {
				return err
			}
			if p.Budget.Spent != before {
				if err := w.UpdateProject(ctx, &p); err != nil {
					return err
				}
			}
			return w.exhaust(ctx, &p, now)
		})
		if err != nil || p.Budget.Exhausted.IsZero() {
			return due, err
		}
		c.log.Info("a budget is reached: what runs is stopped", "project", p.ID, "due", p.Budget.Exhausted)
	}
	return time.Time{}, c.stopForBudget(ctx, p.ID)
}

// budgetOf reads a project and when its budget is reached; zero is not foreseen.
func (c *Control) budgetOf(ctx context.Context, id string, now time.Time) (p Project, due time.Time, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		prices, err := r.Prices(ctx)
		if err != nil {
			return err
		}
		if p, err = r.Project(ctx, id); err != nil || p.Budget.Limit == "" {
			return err
		}
		at, reached, err := budgetDue(ctx, r, p, prices, now)
		if reached {
			due = at
		}
		return err
	})
	return p, due, err
}

// stopForBudget halts and stops everything of a project whose budget is reached. What is
// at work on a sandbox is left to end; its meter is halted at once.
func (c *Control) stopForBudget(ctx context.Context, id string) error {
	var list []sandbox.Sandbox
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		list, err = r.Sandboxes(ctx, store.SandboxFilter{Project: id, States: []sandbox.State{sandbox.Creating, sandbox.Ready, sandbox.Sleeping}})
		return err
	})
	for _, s := range list {
		if serr := c.stopOneForBudget(ctx, s.ID); serr != nil {
			err = serr
		}
	}
	return err
}

func (c *Control) stopOneForBudget(ctx context.Context, id string) error {
	var stopped *sandbox.Sandbox
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		stopped = nil
		s, err := tx.Sandbox(ctx, id)
		if err != nil {
			return err
		}
		active, err := tx.ActiveOperation(ctx, id)
		if err != nil {
			return err
		}
		w := c.writer(tx, s.Project, budgetActor, c.instant())
		p, err := w.meterBudget(ctx, c, s)
		if err != nil || p.Budget.Exhausted.IsZero() || !c.budgets.mayTry(id, w.at) {
			return err
		}
		if d := sandbox.Admit(s, active, sandbox.Request{Verb: sandbox.Stop}); d.Outcome != sandbox.Accept {
			return nil // something is at work on it: at its end it is looked at again
		}
		stopped = &s
		return w.begin(ctx, sandbox.Operation{
			ID: c.newID("op"), Project: s.Project, Sandbox: s.ID, Kind: sandbox.Stop, Status: sandbox.Pending,
			Generation: s.Generation, Actor: w.actor, CreatedAt: w.at, Version: 1,
		})
	})
	if err == nil && stopped != nil {
		c.budgets.began(id, c.instant())
		c.lanes.nudge(*stopped)
	}
	return err
}

// mayTry says whether a sandbox's stop may be begun: a stop that has failed is not begun
// again at once.
func (b *budgets) mayTry(id string, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return now.Sub(b.tried[id]) >= budgetRetry
}

func (b *budgets) began(id string, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for other, at := range b.tried {
		if now.Sub(at) >= budgetRetry {
			delete(b.tried, other)
		}
	}
	b.tried[id] = now
}

// liftBudget lets go of the meters that a budget held which is raised or gone. What is not
// reached here is let go of before its next fact.
func (c *Control) liftBudget(ctx context.Context, id string) error {
	var meters []metering.Meter
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		meters, err = r.RunningMeters(ctx, id)
		return err
	})
	for _, m := range meters {
		if !slices.ContainsFunc(m.Halts, func(h metering.Halt) bool { return strings.HasPrefix(h.Operation, budgetHalt) }) {
			continue
		}
		merr := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
			s, err := tx.Sandbox(ctx, m.Sandbox)
			if err != nil {
				return err
			}
			_, err = c.writer(tx, s.Project, budgetActor, c.instant()).meterBudget(ctx, c, s)
			return err
		})
		if merr != nil {
			err = merr
		}
	}
	return err
}
