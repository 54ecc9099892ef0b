package control

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// budgeted is a life at one unit of currency a second, with a budget that was set so many
// seconds after the beginning.
func budgeted(t *testing.T, seconds int, budget string) *life {
	t.Helper()
	l := newLife(t)
	l.priced(-100, "1", "0")
	l.clock.set(l.at(seconds))
	l.edit("default", ProjectSettings{Budget: &budget})
	return l
}

func (l *life) at(seconds int) time.Time { return l.t0.Add(time.Duration(seconds) * time.Second) }

// look has the budgets looked at, so many seconds after the beginning.
func (l *life) look(seconds int) {
	l.t.Helper()
	l.clock.set(l.at(seconds))
	must(l.lookAtBudgets(l.t.Context()))(l.t)
}

// stopping gives the stop that the budget has begun, nil for none.
func (b *bench) stopping(id string) *sandbox.Operation {
	b.t.Helper()
	op := must(b.Get(b.t.Context(), me, id))(b.t).Operation
	if op == nil || op.Actor != budgetActor {
		return nil
	}
	return op
}

// exhaustions counts how often a project was told that its budget is reached.
func (b *bench) exhaustions() int {
	b.t.Helper()
	n := 0
	for _, e := range must(b.Events(b.t.Context(), me, EventQuery{Limit: 1000}))(b.t).Events {
		if e.Type == "budget.exhausted" {
			n++
		}
	}
	return n
}

// TestBudget_B4: it falls due at the computed instant; what runs is stopped, however late,
// and metered to then; nothing new is begun until it is raised.
func TestBudget_B4(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	ctx := t.Context()
	l.priced(-100, "1", "0")
	l.told(10, sandbox.EventCreated)
	l.clock.set(l.at(20))
	hundred, more := "100.00", "250"
	v := l.edit("default", ProjectSettings{Budget: &hundred})
	if v.Budget.Limit != "100" || v.Spent.String() != "20.000000" || !v.Due.Equal(l.at(100)) {
		t.Errorf("of %s is spent %s, due %s", v.Budget.Limit, v.Spent, v.Due)
	}
	l.clock.set(l.at(100).Add(-time.Millisecond))
	if next := must(l.lookAtBudgets(ctx))(t); !next.Equal(l.at(100)) || l.exhaustions() != 0 {
		t.Errorf("a millisecond before: next %s, %d times told", next, l.exhaustions())
	}
	l.look(103) // three seconds late
	op := l.stopping(l.id)
	if op == nil || op.Kind != sandbox.Stop || l.exhaustions() != 1 {
		t.Fatalf("a budget that is reached begins %+v, told %d times", op, l.exhaustions())
	}
	refused := func(err error) {
		t.Helper()
		f := wantFault(t, err, fault.BudgetExhausted, "budget")
		if !strings.Contains(f.Message, "hutch projects edit default --budget") {
			t.Errorf("it does not say what to do: %s", f.Message)
		}
	}
	_, err := l.Create(ctx, me, CreateRequest{})
	refused(err)
	if got := l.ledger(105); got != "starting 0-10 ready, running 10-100 open" {
		t.Errorf("while it is being stopped: %s", got)
	}
	l.op = op
	l.told(110, sandbox.EventStopped)
	if got := l.ledger(1000); got != "starting 0-10 ready, running 10-100 budget" {
		t.Errorf("after it was stopped: %s", got)
	}
	if s := l.get(l.id); s.Reason != "budget" || s.Message == "" {
		t.Errorf("it is %s for %q: %s", s.State, s.Reason, s.Message)
	}
	_, err = l.Resume(ctx, me, l.id, Idempotency{})
	refused(err)
	_, err = l.Fork(ctx, me, l.id, ForkRequest{Mode: sandbox.ForkDisk})
	refused(err)
	l.look(1000)
	if v := must(l.GetProject(ctx, boss, ""))(t); v.Spent.String() != "100.000000" || !v.Budget.Exhausted.Equal(l.at(100)) || l.exhaustions() != 1 {
		t.Errorf("spent %s, reached %s, told %d times", v.Spent, v.Budget.Exhausted, l.exhaustions())
	}
	l.edit("default", ProjectSettings{Budget: &more})
	l.ask(1000, l.Resume)
	l.told(1010, sandbox.EventResumed)
	if v := must(l.GetProject(ctx, boss, ""))(t); !v.Due.Equal(l.at(1150)) || v.Spent.String() != "110.000000" {
		t.Errorf("after it was raised: spent %s, due %s", v.Spent, v.Due)
	}
}

// TestBudgetMeetsWork_B4: what is at work on a sandbox at the instant ends, and is metered
// to that instant all the same; a budget that is raised meanwhile lets the meter go on.
func TestBudgetMeetsWork_B4(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		live func(*life)
		want string // at 1000
		end  sandbox.State
	}{
		{"a wake", func(l *life) {
			l.ask(90, l.Sleep)
			l.told(95, sandbox.EventSlept) // five seconds that cost nothing: due at 105
			l.ask(104, l.Wake)
			l.clock.set(l.at(108))
			l.told(108, sandbox.EventWoken)
		}, "starting 0-10 ready, running 10-90 sleep, sleeping 95-105 budget", sandbox.Ready},
		{"a sleep", func(l *life) {
			l.ask(90, l.Sleep)
			l.look(102)
			l.told(110, sandbox.EventSlept)
			l.look(121)
		}, "starting 0-10 ready, running 10-90 sleep, sleeping 110-120 open", sandbox.Sleeping},
		{"a crash that is told late", func(l *life) {
			l.look(101)
			l.report(99, sandbox.EventCrashed, nil, false)
		}, "starting 0-10 ready, running 10-99 crashed", sandbox.Failed},
		{"raised before the stop", func(l *life) {
			l.ask(90, l.Sleep)
			l.told(95, sandbox.EventSlept)
			l.ask(104, l.Wake)
			l.look(106) // halted, and the wake is in the way of a stop
			more := "1000000"
			l.clock.set(l.at(107))
			l.edit("default", ProjectSettings{Budget: &more})
			l.told(108, sandbox.EventWoken)
		}, "starting 0-10 ready, running 10-90 sleep, sleeping 95-105 budget, sleeping 107-108 woken, running 108-1000 open", sandbox.Ready},
		{"taken away after it", func(l *life) {
			l.look(103)
			none := ""
			l.clock.set(l.at(110))
			l.edit("default", ProjectSettings{Budget: &none})
			l.op = l.stopping(l.id)
			l.failed(120, fault.Internal, true)
			l.ask(130, l.Sleep)
			l.told(131, sandbox.EventSlept)
		}, "starting 0-10 ready, running 10-100 budget, running 110-130 sleep, sleeping 131-1000 open", sandbox.Sleeping},
		{"a deletion", func(l *life) {
			l.look(103)
			l.op = must(l.Delete(l.t.Context(), me, l.id, DeleteRequest{}))(l.t).Operation
			l.told(110, sandbox.EventDeleted)
		}, "starting 0-10 ready, running 10-100 budget", sandbox.Deleted},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := budgeted(t, 0, "100")
			l.told(10, sandbox.EventCreated)
			c.live(l)
			if got := l.ledger(1000); got != c.want {
				t.Errorf("%s\nwant %s", got, c.want)
			}
			if s := l.row(l.id); s.State != c.end {
				t.Errorf("it is %s, want %s", s.State, c.end)
			}
			l.spentIsKept()
		})
	}
}

// spentIsKept fails where what is kept of the spending is not what the ledger says.
func (b *bench) spentIsKept() {
	b.t.Helper()
	must0(b.t, b.db.Update(context.Background(), func(ctx context.Context, tx store.Tx) error {
		p, err := tx.Project(ctx, me.Project)
		if err != nil {
			return err
		}
		kept := p.Budget.Spent
		if err := b.writer(tx, p.ID, "", b.instant()).resum(ctx, &p); err != nil {
			return err
		}
		before, after := must(metering.ParseAmount(kept))(b.t), must(metering.ParseAmount(p.Budget.Spent))(b.t)
		if before.Cmp(after) != 0 {
			b.t.Errorf("B4: %s is kept as spent, and the ledger says %s", before, after)
		}
		return nil
	}))
}

// TestBudgetFrom_B4: what was metered before its beginning does not count, and it never
// falls due before it was set.
func TestBudgetFrom_B4(t *testing.T) {
	t.Parallel()
	l := budgeted(t, 0, "1000000")
	l.told(10, sandbox.EventCreated)
	l.clock.set(l.at(200))
	fifty, from := "50", l.at(160)
	if v := l.edit("default", ProjectSettings{Budget: &fifty, BudgetFrom: &from}); v.Spent.String() != "40.000000" || !v.Due.Equal(l.at(210)) {
		t.Errorf("from a later beginning: spent %s, due %s", v.Spent, v.Due)
	}
	thirty := "30"
	l.edit("default", ProjectSettings{Budget: &thirty})
	l.look(205)
	if got := l.ledger(206); got != "starting 0-10 ready, running 10-200 open" { // not to 190
		t.Errorf("a budget that was reached before it was set: %s", got)
	}
}

// TestBudgetOfMany_B4: all that runs spends, at all rates, and all of it stops at one instant.
func TestBudgetOfMany_B4(t *testing.T) {
	t.Parallel()
	l := budgeted(t, 0, "100")
	second := must(l.Create(t.Context(), me, CreateRequest{Name: "second", CPUs: new(int64(4))}))(t)
	l.told(10, sandbox.EventCreated)
	one := *l
	two := &life{bench: l.bench, t0: l.t0, clock: l.clock, id: second.Sandbox.ID, op: second.Operation}
	// Both count from 0, at one and at four a second: at 20 it is 100, the budget exactly.
	two.told(19, sandbox.EventCreated)
	l.look(40)
	for _, l := range []*life{&one, two} {
		l.op = l.stopping(l.id)
		if l.op == nil {
			t.Fatalf("%s is not stopped", l.id)
		}
		l.told(41, sandbox.EventStopped)
	}
	if got := one.ledger(100) + " | " + two.ledger(100); got != "starting 0-10 ready, running 10-20 budget | starting 0-19 ready, running 19-20 budget" {
		t.Errorf("they are metered as %s", got)
	}
	l.spentIsKept()
}

// TestBudgetAtTwoServers_B4: with two servers it is told of once, and each sandbox is
// stopped once.
func TestBudgetAtTwoServers_B4(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	must0(t, a.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		p, err := metering.ParsePrice(2, a.instant().Add(-time.Hour), "1", "0", "0.012")
		if err != nil {
			return err
		}
		return tx.AddPrice(ctx, p)
	}))
	var ids []string
	for i := range 5 {
		ids = append(ids, a.ready(fmt.Sprintf("otter-%d", i)).ID)
	}
	ids = append(ids, b.reaches("sleeper", sandbox.Sleeping).ID)
	budget := "3"
	b.edit("default", ProjectSettings{Budget: &budget})
	for _, id := range ids {
		until(t, "it is stopped", func() bool { return a.get(id).State == sandbox.Stopped })
	}
	if n := a.exhaustions(); n != 1 {
		t.Errorf("it was told of %d times", n)
	}
	if ops, _ := host.operations(sandbox.Stop); len(ops) != len(ids) {
		t.Errorf("%d stops of %d sandboxes", len(ops), len(ids))
	}
	due := must(a.GetProject(t.Context(), boss, ""))(t).Budget.Exhausted
	for _, id := range ids {
		for _, e := range a.clean(id).Entries {
			if e.To.After(due) {
				t.Errorf("%s is metered to %s, past %s", id, e.To, due)
			}
		}
	}
	_, err := b.Create(t.Context(), me, CreateRequest{})
	wantFault(t, err, fault.BudgetExhausted, "budget")
	a.spentIsKept()
}
