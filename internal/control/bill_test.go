package control

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// priced adds a price that is valid from so many seconds after the beginning on.
func (l *life) priced(seconds int, vcpu, gib string) {
	l.t.Helper()
	must0(l.t, l.db.Update(l.t.Context(), func(ctx context.Context, tx store.Tx) error {
		prices, err := tx.Prices(ctx)
		if err != nil {
			return err
		}
		last := prices.List()[len(prices.List())-1].Version
		p, err := metering.ParsePrice(last+1, l.t0.Add(time.Duration(seconds)*time.Second), vcpu, gib, "0.012")
		if err != nil {
			return err
		}
		return tx.AddPrice(ctx, p)
	}))
}

// bill gives the lines and the total of a bill.
func (l *life) bill(q BillQuery) string {
	l.t.Helper()
	b := must(l.Bill(l.t.Context(), me, q))(l.t)
	var out []string
	for _, line := range b.Lines {
		out = append(out, fmt.Sprintf("%s %s v%d %v %s", b.Names[line.Sandbox], line.Reason, line.Price, line.Time.Seconds(), line.Amount))
	}
	return strings.Join(append(out, b.Total.String()), ", ")
}

// TestBill_B7B8: closed and open intervals, at the prices that held, cut to what was
// asked for; the parts make the whole.
func TestBill_B7B8(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	at := func(seconds int) time.Time { return l.t0.Add(time.Duration(seconds) * time.Second) }
	l.priced(-100, "1", "0.5") // one vCPU and one GiB: 1.5 a second
	l.priced(60, "2", "1")     // 3 a second
	if got := l.bill(BillQuery{}); got != "0.000000" {
		t.Errorf("before anything is ready: %s", got)
	}
	l.told(10, sandbox.EventCreated)
	l.ask(100, l.Sleep)
	l.told(110, sandbox.EventSlept)
	l.clock.set(at(200))
	for _, c := range []struct {
		name string
		q    BillQuery
		want string
	}{
		{"all, up to now", BillQuery{}, "otter starting v2 10 15.000000, otter running v2 50 75.000000, otter running v3 40 120.000000, otter sleeping v3 90 270.000000, 480.000000"},
		{"a future end is now", BillQuery{To: at(9000)}, "otter starting v2 10 15.000000, otter running v2 50 75.000000, otter running v3 40 120.000000, otter sleeping v3 90 270.000000, 480.000000"},
		{"the first part", BillQuery{To: at(50)}, "otter starting v2 10 15.000000, otter running v2 40 60.000000, 75.000000"},
		{"the rest", BillQuery{From: at(50)}, "otter running v2 10 15.000000, otter running v3 40 120.000000, otter sleeping v3 90 270.000000, 405.000000"},
		{"while it was saved", BillQuery{From: at(101), To: at(109)}, "0.000000"},
	} {
		if got := l.bill(c.q); got != c.want {
			t.Errorf("%s:\n%s, want\n%s", c.name, got, c.want)
		}
	}
	if b := must(l.Bill(t.Context(), Actor{Project: "other"}, BillQuery{Verify: true}))(t); len(b.Lines) != 0 || !b.Verified {
		t.Errorf("another project's bill: %+v", b)
	}
	_, err := l.Bill(t.Context(), me, BillQuery{From: at(50), To: at(40)})
	wantFault(t, err, fault.InvalidArgument, "")

	// A sandbox that is deleted stays on the bill, under its name.
	l.clock.set(at(300))
	l.op = must(l.Delete(t.Context(), me, l.id, DeleteRequest{}))(t).Operation
	l.told(310, sandbox.EventDeleted)
	l.clock.set(at(400))
	if got, want := l.bill(BillQuery{From: at(110)}), "otter sleeping v3 190 570.000000, 570.000000"; got != want {
		t.Errorf("after the deletion: %s, want %s", got, want)
	}
}

// TestPrices_B8: prices hold from a minute after they were set, the same ones make no new
// version, and what was metered before keeps its own.
func TestPrices_B8(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.told(10, sandbox.EventCreated)
	set := func(vcpu string) metering.Price {
		t.Helper()
		p := must(metering.ParsePrice(1, time.Time{}, vcpu, "0", "0.012"))(t)
		return must(l.SetPrices(t.Context(), p))(t)
	}
	if p := set("0"); p.Version != 1 {
		t.Errorf("the prices of the beginning again are version %d", p.Version)
	}
	l.clock.set(l.t0.Add(40 * time.Second))
	first := set("1")
	if again := set("1.0"); first.Version != 2 || again.Version != 2 || !first.ValidFrom.Equal(l.t0.Add(100*time.Second)) {
		t.Errorf("the prices are %+v, then %+v", first, again)
	}
	if p := set("2"); p.Version != 3 || !p.ValidFrom.After(first.ValidFrom) {
		t.Errorf("prices that are set at the same instant: %+v", p)
	}
	l.clock.set(l.t0.Add(200 * time.Second))
	if got, want := l.bill(BillQuery{}), "otter starting v1 10 0.000000, otter running v1 90 0.000000, otter running v2 0.001 0.001000, otter running v3 99.999 199.998000, 199.999000"; got != want {
		t.Errorf("the bill is\n%s, want\n%s", got, want)
	}
	if b := must(l.Bill(t.Context(), me, BillQuery{Verify: true}))(t); len(b.Differences) != 0 {
		t.Errorf("differences: %q", b.Differences)
	}
}

// TestVerify_B7: a ledger that says otherwise than the facts is told of, line by line,
// whatever is wrong with it.
func TestVerify_B7(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		damage func(l *life, m metering.Meter) metering.Entry
		want   string
	}{
		"an entry too many": {func(l *life, m metering.Meter) metering.Entry {
			return metering.Entry{
				Project: m.Project, Sandbox: m.Sandbox, N: 2, Kind: metering.Compute, Reason: metering.Running, End: metering.ByStop,
				From: l.t0.Add(2 * time.Hour), To: l.t0.Add(3 * time.Hour), Rate: m.Rate, Price: 1, Generation: 1, Event: "ev_none",
			}
		}, "no fact is of the event"},
		"an entry of a sandbox that never was": {func(l *life, m metering.Meter) metering.Entry {
			return metering.Entry{
				Project: m.Project, Sandbox: "sbx_none", N: 1, Kind: metering.Compute, Reason: metering.Running, End: metering.ByStop,
				From: l.t0, To: l.t0.Add(time.Hour), Rate: m.Rate, Price: 1, Generation: 1, Event: "ev_none",
			}
		}, "sbx_none: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			l.told(10, sandbox.EventCreated)
			l.clock.set(l.t0.Add(time.Minute))
			if b := must(l.Bill(t.Context(), me, BillQuery{Verify: true}))(t); !b.Verified || len(b.Differences) != 0 {
				t.Fatalf("before the damage: %+v", b)
			}
			l.damaged = true
			a, _ := l.account(l.id)
			entry := c.damage(l, a.Meter)
			must0(t, l.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
				return tx.EnterFact(ctx, a.Meter, a.Facts[1], []metering.Entry{entry})
			}))
			b := must(l.Bill(t.Context(), me, BillQuery{Verify: true}))(t)
			if !slices.ContainsFunc(b.Differences, func(d string) bool { return strings.Contains(d, c.want) }) {
				t.Errorf("the differences are %q", b.Differences)
			}
			if b := must(l.Bill(t.Context(), me, BillQuery{}))(t); b.Verified || b.Differences != nil {
				t.Errorf("without being asked: %+v", b)
			}
		})
	}
	t.Run("an entry that cannot be", func(t *testing.T) {
		t.Parallel()
		l := newLife(t)
		l.told(10, sandbox.EventCreated)
		l.damaged = true
		a, _ := l.account(l.id)
		bad := metering.Entry{
			Project: a.Meter.Project, Sandbox: l.id, N: 2, Kind: metering.Archive, Reason: metering.Running, From: l.t0, To: l.t0.Add(time.Second), Price: 1,
		}
		must0(t, l.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			return tx.EnterFact(ctx, a.Meter, a.Facts[1], []metering.Entry{bad})
		}))
		l.clock.set(l.t0.Add(time.Minute))
		_, err := l.Bill(t.Context(), me, BillQuery{})
		wantFault(t, err, fault.DataCorrupt, "")
		_, err = l.Bill(t.Context(), me, BillQuery{Verify: true})
		if f := wantFault(t, err, fault.DataCorrupt, "ledger"); !strings.Contains(f.Message, l.id+": entry 2") {
			t.Errorf("the differences are not named: %s", f.Message)
		}
	})
}
