package metering

import (
	"cmp"
	"slices"
	"time"

	"github.com/shopspring/decimal"

	"github.com/hutchrun/hutch/internal/fault"
)

// Line is what one sandbox used for one reason at one price.
type Line struct {
	Project string
	Sandbox string
	Reason  Reason
	Price   int64 // the version

	Time             time.Duration   // metered, whole milliseconds
	VCPUMillis       decimal.Decimal // vCPUs × ms
	MemoryByteMillis decimal.Decimal // bytes × ms
	DiskByteMillis   decimal.Decimal // bytes × ms
	Amount           Amount
}

// Kind is what the line meters.
func (l Line) Kind() Kind { return l.Reason.kind() }

// Statement is what was used in [From, To), line by line in the order of project,
// sandbox, reason, price version.
type Statement struct {
	From  time.Time
	To    time.Time
	Lines []Line
	Total Amount
}

// Sum adds up the lines that the choice takes, exactly.
func (s Statement) Sum(choose func(Line) bool) Amount {
	var sum Amount
	for _, l := range s.Lines {
		if choose(l) {
			sum = sum.Plus(l.Amount)
		}
	}
	return sum
}

// Bill adds up entries over [from, to). A zero from is the beginning, a zero to is no
// end. For a bill up to the present the entries of Meter.Open are given with those of
// the ledger. The sums are exact: those of [a, b) and [b, c) make that of [a, c). An
// entry that cannot be is DataCorrupt, not left out.
func Bill(entries []Entry, prices Prices, from, to time.Time) (Statement, error) {
	from, to = instant(from), instant(to)
	if !to.IsZero() && to.Before(from) {
		return Statement{}, fault.New(fault.InvalidArgument, "cannot make a bill from %s to %s: it ends before it begins", stamp(from), stamp(to))
	}
	type key struct {
		project, sandbox string
		reason           Reason
		price            int64
	}
	lines := map[key]*Line{}
	out := Statement{From: from, To: to}
	for _, e := range entries {
		p, err := e.check(prices)
		if err != nil {
			return Statement{}, err
		}
		e = e.within(from, to)
		if e.millis() <= 0 {
			continue
		}
		k := key{e.Project, e.Sandbox, e.Reason, e.Price}
		l := lines[k]
		if l == nil {
			l = &Line{Project: e.Project, Sandbox: e.Sandbox, Reason: e.Reason, Price: e.Price}
			lines[k] = l
		}
		l.add(e, p)
	}
	for _, l := range lines {
		out.Lines = append(out.Lines, *l)
		out.Total = out.Total.Plus(l.Amount)
	}
	slices.SortFunc(out.Lines, func(a, b Line) int {
		return cmp.Or(cmp.Compare(a.Project, b.Project), cmp.Compare(a.Sandbox, b.Sandbox),
			cmp.Compare(slices.Index(Reasons, a.Reason), slices.Index(Reasons, b.Reason)), cmp.Compare(a.Price, b.Price))
	})
	return out, nil
}

func (l *Line) add(e Entry, p Price) {
	ms := decimal.NewFromInt(e.millis())
	l.Time += time.Duration(e.millis()) * time.Millisecond
	if e.Kind == Archive {
		l.DiskByteMillis = l.DiskByteMillis.Add(decimal.NewFromInt(e.DiskBytes).Mul(ms))
	} else {
		l.VCPUMillis = l.VCPUMillis.Add(decimal.NewFromInt(e.Rate.VCPUs).Mul(ms))
		l.MemoryByteMillis = l.MemoryByteMillis.Add(decimal.NewFromInt(e.Rate.MemoryBytes).Mul(ms))
	}
	l.Amount = l.Amount.Plus(Amount{e.rate(p).Mul(ms)})
}

// check refuses what no meter makes and gives the entry's price.
func (e Entry) check(prices Prices) (Price, error) {
	corrupt := func(what string) error {
		return fault.New(fault.DataCorrupt, "entry %d of %s in the ledger cannot be: %s; check it with `hutch bill --verify`", e.N, e.Sandbox, what)
	}
	switch {
	case !slices.Contains(Reasons, e.Reason) || e.Kind != e.Reason.kind():
		return Price{}, corrupt("its kind and reason are " + string(e.Kind) + " and " + string(e.Reason))
	case e.From.IsZero() || !e.To.After(e.From):
		return Price{}, corrupt("it goes from " + stamp(e.From) + " to " + stamp(e.To))
	case e.Rate.VCPUs < 0 || e.Rate.MemoryBytes < 0 || e.DiskBytes < 0:
		return Price{}, corrupt("it is of less than nothing")
	}
	return prices.version(e.Price)
}

// within is the part of an entry in [from, to).
func (e Entry) within(from, to time.Time) Entry {
	e.From = latest(e.From, from)
	if !to.IsZero() && e.To.After(to) {
		e.To = to
	}
	return e
}
