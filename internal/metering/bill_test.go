package metering

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shopspring/decimal"

	"github.com/hutchrun/hutch/internal/fault"
)

func dec(t *testing.T, s string) decimal.Decimal {
	t.Helper()
	d, err := decimal.NewFromString(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestParsePrice(t *testing.T) {
	p, err := ParsePrice(3, t0.Add(time.Microsecond), "0.000012", "3", DefaultArchivePrice)
	if err != nil || p.Version != 3 || !p.ValidFrom.Equal(t0) || p.VCPUSecond.String() != "0.000012" || p.GiBSecond.String() != "3" ||
		p.ArchiveGBMonth.String() != "0.012" {
		t.Fatalf("%+v, %v", p, err)
	}
	for _, bad := range []string{"", "-1", "+1", "1e9", "1e1000000000", "0x10", ".5", "5.", "1,5", " 1", "1\n", "NaN", "Inf", "1234567890",
		"0.1234567890123456789", strings.Repeat("9", 1000)} {
		for i, field := range []string{"vcpu_second", "gib_second", "archive_gb_month"} {
			text := []string{"1", "1", "1"}
			text[i] = bad
			_, err := ParsePrice(1, t0, text[0], text[1], text[2])
			if !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Reason != field || !strings.Contains(err.Error(), field) {
				t.Errorf("%q as %s: %v", bad, field, err)
			}
		}
	}
	if _, err := ParsePrice(0, t0, "1", "1", "1"); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("version 0: %v", err)
	}
}

func TestPrices(t *testing.T) {
	p1, p2, p3 := price(t, 1, t0, "1", "1", "1"), price(t, 2, ms(100), "2", "1", "1"), price(t, 7, ms(200), "3", "1", "1")
	ps := prices(t, p1, p2, p3)
	for at, want := range map[int]int64{-1e6: 1, 0: 1, 99: 1, 100: 2, 199: 2, 200: 7, 1e6: 7} {
		if p, ok := ps.At(ms(at)); !ok || p.Version != want {
			t.Errorf("at %d: version %d, %v", at, p.Version, ok)
		}
	}
	if _, ok := (Prices{}).At(t0); ok {
		t.Error("no prices have a price")
	}
	negative := p1
	negative.GiBSecond = negative.GiBSecond.Neg()
	for name, list := range map[string][]Price{
		"none": {}, "same version": {p1, p1}, "older version": {p2, p1}, "same instant": {p1, p2, price(t, 3, ms(100), "1", "1", "1")},
		"earlier": {p1, p3, price(t, 8, ms(150), "1", "1", "1")}, "negative": {negative}, "unnumbered": {{}},
	} {
		if _, err := NewPrices(list...); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !p1.Same(price(t, 4, ms(5), "1.0", "1.00", "1")) || p1.Same(p2) {
		t.Error("Same")
	}
}

// B7: a price never changes what is in the ledger.
func TestPriceChangesNowAtTheEarliest(t *testing.T) {
	ps := onePrice(t)
	if _, err := ps.With(price(t, 2, ms(99), "1", "1", "1"), ms(100)); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("valid from before now: %v", err)
	}
	more, err := ps.With(price(t, 2, ms(100), "1", "1", "1"), ms(100))
	if err != nil || len(more.List()) != 2 || len(ps.List()) != 1 {
		t.Errorf("%v, %v", more, err)
	}
	if _, err := more.With(price(t, 2, ms(300), "1", "1", "1"), ms(200)); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("the same version again: %v", err)
	}
	if first, err := (Prices{}).With(price(t, 1, time.Time{}, "1", "1", "1"), ms(100)); err != nil || len(first.List()) != 1 {
		t.Errorf("the first: %v", err)
	}
}

// hours is an entry of so many hours from t0.
func hours(n int, e Entry) Entry {
	e.Project, e.From, e.To, e.Price = "p", t0, t0.Add(time.Duration(n)*time.Hour), 1
	return e
}

// B6, B8: what the three prices mean.
func TestWhatThingsCost(t *testing.T) {
	ps := onePrice(t)
	for name, c := range map[string]struct {
		entry Entry
		want  string // to 12 places
	}{
		"two vCPUs for an hour":     {hours(1, Entry{Kind: Compute, Reason: Running, Rate: Rate{VCPUs: 2}}), "0.086400000000"},
		"half a GiB for an hour":    {hours(1, Entry{Kind: Compute, Reason: Sleeping, Rate: Rate{MemoryBytes: 1 << 29}}), "0.006300000000"},
		"5 GB archived for a month": {hours(730, Entry{Kind: Archive, Reason: Stored, DiskBytes: 5e9}), "0.060000000000"},
		"5 GB archived for an hour": {hours(1, Entry{Kind: Archive, Reason: Stored, DiskBytes: 5e9}), "0.000082191781"},
	} {
		s, err := Bill([]Entry{c.entry}, ps, time.Time{}, time.Time{})
		if err != nil || s.Total.Round(12).StringFixed(12) != c.want {
			t.Errorf("%s: %s, %v, want %s", name, s.Total.Round(20), err, c.want)
		}
	}
}

// B7: rounding is in totals only: 730 lines of a third of nothing each make the whole.
func TestOnlyTotalsAreRounded(t *testing.T) {
	ps := onePrice(t)
	var entries []Entry
	for i := range 730 {
		e := hours(1, Entry{Kind: Archive, Reason: Stored, DiskBytes: 1e9})
		e.From, e.To = e.From.Add(time.Duration(i)*time.Hour), e.To.Add(time.Duration(i)*time.Hour)
		entries = append(entries, e)
	}
	s, err := Bill(entries, ps, time.Time{}, time.Time{})
	if err != nil || s.Total.Cmp(NewAmount(dec(t, "0.012"))) != 0 {
		t.Fatalf("%s, %v", s.Total.Round(30), err)
	}
	if one := (Amount{}).Plus(NewAmount(dec(t, "0.0000005"))); one.String() != "0.000001" || one.Round(7).String() != "0.0000005" {
		t.Errorf("rounded: %s, %s", one, one.Round(7))
	}
}

func TestBillLines(t *testing.T) {
	ps := prices(t, price(t, 1, t0, "1", "0", "0"), price(t, 2, t0.Add(time.Hour), "2", "0", "0"))
	line := func(project, sandbox string, reason Reason, version int64) Entry {
		e := hours(1, Entry{Kind: reason.kind(), Reason: reason, Rate: Rate{VCPUs: 1}})
		e.Project, e.Sandbox, e.Price = project, sandbox, version
		return e
	}
	entries := []Entry{
		line("q", "a", Running, 1), line("p", "b", Sleeping, 1), line("p", "b", Running, 2), line("p", "b", Running, 1), line("p", "b", Running, 1),
		line("p", "a", Stored, 1), line("p", "a", Starting, 1),
	}
	s, err := Bill(entries, ps, t0.Add(30*time.Minute), t0.Add(2*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range s.Lines {
		got = append(got, strings.Join([]string{l.Project, l.Sandbox, string(l.Reason), l.Time.String(), l.Amount.String()}, " "))
	}
	want := []string{
		"p a starting 30m0s 1800.000000", "p a archived 30m0s 0.000000", "p b running 1h0m0s 3600.000000", "p b running 30m0s 3600.000000",
		"p b sleeping 30m0s 1800.000000", "q a running 30m0s 1800.000000",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if of := s.Sum(func(l Line) bool { return l.Project == "q" }); of.String() != "1800.000000" || s.Total.String() != "12600.000000" {
		t.Errorf("%s of %s", of, s.Total)
	}
	if s, err := Bill(entries, ps, t0.Add(time.Hour), t0.Add(2*time.Hour)); err != nil || len(s.Lines) != 0 {
		t.Errorf("after all: %+v, %v", s, err)
	}
	if _, err := Bill(nil, ps, ms(2), ms(1)); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("ends before it begins: %v", err)
	}
}

// A damaged ledger gives no bill rather than a wrong one.
func TestBillRefusesDamage(t *testing.T) {
	ok := hours(1, Entry{Kind: Compute, Reason: Running, Rate: small})
	for name, damage := range map[string]func(*Entry){
		"unknown price":   func(e *Entry) { e.Price = 9 },
		"negative":        func(e *Entry) { e.From, e.To = e.To, e.From },
		"empty":           func(e *Entry) { e.To = e.From },
		"endless":         func(e *Entry) { e.To = time.Time{} },
		"no reason":       func(e *Entry) { e.Reason = "" },
		"another kind":    func(e *Entry) { e.Kind = Archive },
		"negative vCPUs":  func(e *Entry) { e.Rate.VCPUs = -1 },
		"negative memory": func(e *Entry) { e.Rate.MemoryBytes = -1 },
		"negative disk":   func(e *Entry) { e.DiskBytes = -1 },
	} {
		e := ok
		damage(&e)
		if _, err := Bill([]Entry{ok, e}, onePrice(t), time.Time{}, time.Time{}); !fault.Is(err, fault.DataCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := (Budget{Limit: dec(t, "100")}).Due([]Entry{e}, nil, onePrice(t)); !fault.Is(err, fault.DataCorrupt) {
			t.Errorf("budget, %s: %v", name, err)
		}
	}
}

func TestBudget(t *testing.T) {
	ps := prices(t, price(t, 1, time.Time{}, "1", "0", "0"), price(t, 2, ms(2000), "4", "0", "0"))
	running := newLedger(t, ps).apply(found(0, Running)).meter // 2 vCPUs: 2 a second, from 2000 on 8
	paused := newLedger(t, ps).apply(found(0, Running), sleep("s", 500)).meter
	boots := newLedger(t, ps).apply(assigned(0)).meter
	old := newLedger(t, ps).apply(found(0, Running), ended(1000, ByCrash)).entries // 2 in the first second
	for _, c := range []struct {
		name    string
		budget  Budget
		entries []Entry
		meters  []Meter
		want    int // -1: never
	}{
		{"a second", Budget{Limit: dec(t, "2")}, nil, []Meter{running}, 1000},
		{"a part of a millisecond more", Budget{Limit: dec(t, "2.0000001")}, nil, []Meter{running}, 1001},
		{"a price change on the way", Budget{Limit: dec(t, "12")}, nil, []Meter{running}, 3000},
		{"exactly at the price change", Budget{Limit: dec(t, "4")}, nil, []Meter{running}, 2000},
		{"two sandboxes", Budget{Limit: dec(t, "2")}, nil, []Meter{running, running}, 500},
		{"what is in the ledger", Budget{Limit: dec(t, "3")}, old, []Meter{running}, 750},
		{"reached within the ledger", Budget{Limit: dec(t, "1")}, old, nil, 500},
		{"counted from later on", Budget{Limit: dec(t, "1"), From: ms(600)}, old, []Meter{running}, 850},
		{"with what was spent", Budget{Limit: dec(t, "3"), Spent: NewAmount(dec(t, "1"))}, nil, []Meter{running}, 1000},
		{"spent already", Budget{Limit: dec(t, "3"), From: ms(7), Spent: NewAmount(dec(t, "3"))}, nil, []Meter{running}, 7},
		{"of nothing", Budget{Limit: dec(t, "0"), From: ms(7)}, nil, nil, 7},
		{"nothing runs", Budget{Limit: dec(t, "1")}, nil, nil, -1},
		{"what is paused never spends more", Budget{Limit: dec(t, "1.01")}, nil, []Meter{paused}, -1},
		{"until it paused", Budget{Limit: dec(t, "1")}, nil, []Meter{paused}, 500},
		{"a boot that is not ready", Budget{Limit: dec(t, "0.001")}, nil, []Meter{boots}, -1},
		{"in a thousand years", Budget{Limit: dec(t, "1000000000000")}, nil, []Meter{running}, -1},
	} {
		at, reached, err := c.budget.Due(c.entries, c.meters, ps)
		if err != nil || reached != (c.want >= 0) || reached && !at.Equal(ms(c.want)) {
			t.Errorf("%s: %s, %v, %v", c.name, stamp(at), reached, err)
		}
	}
}
