package metering

import (
	"cmp"
	"slices"
	"time"

	"github.com/shopspring/decimal"
)

// Budget is a sum that may be spent from an instant on.
type Budget struct {
	Limit decimal.Decimal
	From  time.Time // what is metered before does not count
	// Spent counts in addition: what a closed part of the period came to, so that its
	// entries need not be given.
	Spent Amount
}

// never is how far ahead a budget is looked for. What lasts longer is not reached.
const never = 100 * 365 * 24 * time.Hour

// Due computes the first instant at which the spending reaches the budget (B4): of the
// entries since From, and of what the meters have open at its present rate, with the
// prices that are known to come. It may lie in the past. It is exact: spending is
// below the limit a millisecond earlier. Boots that are not ready do not count yet.
// false: it is not reached as things are; ask again when a fact changes the meters.
func (b Budget) Due(entries []Entry, meters []Meter, prices Prices) (time.Time, bool, error) {
	from := instant(b.From)
	limit := NewAmount(b.Limit).n
	if !b.Spent.n.LessThan(limit) {
		return from, true, nil
	}
	steps, err := rates(entries, meters, prices, from)
	if err != nil {
		return time.Time{}, false, err
	}
	spent, rate := b.Spent.n, decimal.Zero // in parts; rate by the millisecond
	for i, s := range steps {
		rate = rate.Add(s.change)
		if !rate.IsPositive() {
			continue
		}
		n, left := limit.Sub(spent).QuoRem(rate, 0) // whole milliseconds until the limit
		if left.IsPositive() {
			n = n.Add(decimal.NewFromInt(1))
		}
		if i+1 < len(steps) {
			if ms := decimal.NewFromInt(steps[i+1].at - s.at); ms.LessThan(n) {
				spent = spent.Add(rate.Mul(ms))
				continue
			}
		} else if n.GreaterThan(decimal.NewFromInt(never.Milliseconds())) {
			continue
		}
		return time.UnixMilli(s.at + n.IntPart()).UTC(), true, nil
	}
	return time.Time{}, false, nil
}

// step is a change of the rate at which is spent.
type step struct {
	at     int64 // Unix ms
	change decimal.Decimal
}

// rates gives every change of the rate of spending from an instant on, in order.
func rates(entries []Entry, meters []Meter, prices Prices, from time.Time) ([]step, error) {
	var out []step
	add := func(e Entry, p Price) {
		rate := e.rate(p)
		out = append(out, step{latest(e.From, from).UnixMilli(), rate})
		if !e.To.IsZero() {
			out = append(out, step{latest(e.To, from).UnixMilli(), rate.Neg()})
		}
	}
	for _, e := range entries {
		p, err := e.check(prices)
		if err != nil {
			return nil, err
		}
		add(e, p)
	}
	for _, m := range meters {
		for _, e := range m.open() {
			end := e.To
			for _, change := range prices.changes(e.From, end) {
				e.To = change
				p, _ := prices.At(e.From)
				add(e, p)
				e.From = change
			}
			e.To = end
			p, _ := prices.At(e.From)
			add(e, p)
		}
	}
	slices.SortFunc(out, func(a, b step) int { return cmp.Compare(a.at, b.at) })
	return out, nil
}
