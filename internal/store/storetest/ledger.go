package storetest

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// lived gives a meter that has seen facts, the facts, and the entries that they made.
func lived(t *testing.T, b *bundle, s sandbox.Sandbox, prices metering.Prices) (metering.Meter, []metering.Fact, [][]metering.Entry) {
	t.Helper()
	at := func(seconds int) time.Time { return b.at.Add(time.Duration(seconds) * time.Second) }
	m := metering.Meter{Project: s.Project, Sandbox: s.ID}
	facts := []metering.Fact{
		{Kind: metering.Assigned, At: at(0), Event: "ev_1", Rate: metering.Rate{VCPUs: 2, MemoryBytes: 1 << 30}},
		{Kind: metering.Ready, At: at(10), Event: "ev_2", Generation: 1},
		{Kind: metering.Halted, At: at(60), Event: "ev_3", Operation: "op_1", Verb: sandbox.Stop, End: metering.ByStop},
		{Kind: metering.Ended, At: at(70), Event: "ev_4", Operation: "op_1", End: metering.ByStop},
	}
	var entries [][]metering.Entry
	for _, f := range facts {
		next, made, err := m.Next(f, prices)
		if err != nil {
			t.Fatal(err)
		}
		m, entries = next, append(entries, made)
	}
	return m, facts, entries
}

func (b *bundle) prices(t *testing.T) metering.Prices {
	t.Helper()
	var out metering.Prices
	b.view(t, func(ctx context.Context, r store.Reader) (err error) { out, err = r.Prices(ctx); return err })
	return out
}

// entries reads a project's part of the ledger.
func (b *bundle) entries(t *testing.T, f store.EntryFilter) []metering.Entry {
	t.Helper()
	var out []metering.Entry
	b.view(t, func(ctx context.Context, r store.Reader) (err error) { out, err = r.MeterEntries(ctx, f); return err })
	return out
}

func ledger(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	first := b.prices(t)
	if list := first.List(); len(list) != 1 || list[0].ArchiveGBMonth.String() != metering.DefaultArchivePrice || !list[0].VCPUSecond.IsZero() {
		t.Fatalf("the first prices: %+v", list)
	}
	second, err := metering.ParsePrice(2, b.at.Add(30*time.Second), "0.000012", "0.0000035", "0.02")
	if err != nil {
		t.Fatal(err)
	}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddPrice(ctx, second) })
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.AddPrice(ctx, second) }), fault.Conflict, store.ReasonExists)
	prices := b.prices(t)
	if p, _ := prices.At(second.ValidFrom); p.Version != 2 || !p.Same(second) || !p.ValidFrom.Equal(second.ValidFrom) {
		t.Fatalf("the second price became %+v", p)
	}

	none := b.s.View(t.Context(), func(ctx context.Context, r store.Reader) error { _, err := r.Meter(ctx, s.ID); return err })
	is(t, none, fault.NotFound, "")
	m, facts, entries := lived(t, b, s, prices)
	var all []metering.Entry
	for i, f := range facts {
		b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.EnterFact(ctx, m, f, entries[i]) })
		all = append(all, entries[i]...)
	}
	if len(all) != 3 { // starting, running before and after the price change
		t.Fatalf("the life made %d entries", len(all))
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		got, err := r.Meter(ctx, s.ID)
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("the meter is\n%+v, want\n%+v (%v)", got, m, err)
		}
		list, err := r.Meters(ctx, "p1")
		if err != nil || len(list) != 1 || !reflect.DeepEqual(list[0], m) {
			t.Errorf("the project's meters: %+v, %v", list, err)
		}
		if others, err := r.Meters(ctx, "p2"); err != nil || len(others) != 0 {
			t.Errorf("another project's meters: %+v, %v", others, err)
		}
		told, err := r.MeterFacts(ctx, s.ID)
		if err != nil || !reflect.DeepEqual(told, facts) {
			t.Errorf("the facts are\n%+v, want\n%+v (%v)", told, facts, err)
		}
		of, err := r.MeterFactsOf(ctx, manyIDs(s.ID))
		if err != nil || len(of) != 1 || !reflect.DeepEqual(of[s.ID], facts) {
			t.Errorf("the facts of many are\n%+v, want\n%+v (%v)", of, facts, err)
		}
		return nil
	})
	begin := b.at
	for _, c := range []struct {
		name   string
		filter store.EntryFilter
		want   []metering.Entry
	}{
		{"all", store.EntryFilter{Project: "p1"}, all},
		{"of the sandbox", store.EntryFilter{Project: "p1", Sandbox: s.ID}, all},
		{"of another sandbox", store.EntryFilter{Project: "p1", Sandbox: "sbx_none"}, nil},
		{"of another project", store.EntryFilter{Project: "p2"}, nil},
		{"up to the first's end", store.EntryFilter{Project: "p1", To: begin.Add(10 * time.Second)}, all[:1]},
		{"from the first's end", store.EntryFilter{Project: "p1", From: begin.Add(10 * time.Second)}, all[1:]},
		{"a part of one", store.EntryFilter{Project: "p1", From: begin.Add(40 * time.Second), To: begin.Add(41 * time.Second)}, all[2:]},
	} {
		if got := b.entries(t, c.filter); len(got) != len(c.want) || len(got) > 0 && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n%+v, want\n%+v", c.name, got, c.want)
		}
	}
	// A fact that is applied twice is not charged twice.
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.EnterFact(ctx, m, facts[3], entries[3]) }),
		fault.Conflict, store.ReasonExists)
	if got := b.entries(t, store.EntryFilter{Project: "p1"}); len(got) != len(all) {
		t.Errorf("%d entries after a second application, want %d", len(got), len(all))
	}
}

func noHalfEntry(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	m, facts, entries := lived(t, b, s, b.prices(t))
	err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		if err := tx.EnterFact(ctx, m, facts[3], entries[3]); err != nil {
			t.Errorf("enter: %v", err)
		}
		return errTest
	})
	if !errors.Is(err, errTest) {
		t.Errorf("the function's error became %v", err)
	}
	if got := b.entries(t, store.EntryFilter{Project: "p1"}); len(got) != 0 {
		t.Errorf("a failed transaction left %+v", got)
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		if told, err := r.MeterFacts(ctx, s.ID); err != nil || len(told) != 0 {
			t.Errorf("a failed transaction left the facts %+v, %v", told, err)
		}
		_, err := r.Meter(ctx, s.ID)
		is(t, err, fault.NotFound, "")
		return nil
	})
}

func unmetered(t *testing.T, b *bundle) {
	s, old := b.sandbox("new"), b.sandbox("old")
	b.insert(t, s, old)
	m, facts, entries := lived(t, b, s, b.prices(t))
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.EnterFact(ctx, m, facts[0], entries[0]) })
	if got := b.list(t, store.SandboxFilter{Unmetered: true}); !reflect.DeepEqual(got, []string{"old"}) {
		t.Errorf("without a meter: %v", got)
	}
}
