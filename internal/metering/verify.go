package metering

import (
	"cmp"
	"fmt"
	"math/big"
	"slices"
	"time"
)

// Account is all that is known of one sandbox's metering.
type Account struct {
	Facts   []Fact  // in the order in which they were applied
	Entries []Entry // in any order
	Meter   Meter
}

// Verify works out from the facts what the ledger and the meter of one sandbox have to
// say, by another way than Meter.Next, and gives each difference as a sentence: what is
// metered twice, without being due, or not at all; entries without a cause, out of
// order, at an unknown or wrong price or size; and a sum that differs. No difference is
// nil. now is the instant up to which open intervals are compared; it lies after every
// fact.
func Verify(a Account, prices Prices, now time.Time) []string {
	v := verifier{account: a, prices: prices, spans: newHistory(a.Facts).spans(now.UnixMilli())}
	entries := slices.Clone(a.Entries)
	slices.SortFunc(entries, func(x, y Entry) int { return cmp.Compare(x.N, y.N) })
	v.numbers(entries)
	for _, e := range entries {
		v.entry(e)
	}
	opened := a.Meter.Open(now, prices)
	for _, e := range opened {
		v.content(e)
	}
	for _, k := range Kinds {
		v.coverage(k, entries, opened)
	}
	v.sum(append(entries, opened...))
	v.late()
	v.replayed(entries)
	return v.found
}

type verifier struct {
	account Account
	prices  Prices
	spans   []span
	found   []string
}

func (v *verifier) say(format string, args ...any) {
	v.found = append(v.found, v.account.Meter.Sandbox+": "+fmt.Sprintf(format, args...))
}

// numbers checks that the entries count from 1 without a gap, up to the meter's count.
func (v *verifier) numbers(entries []Entry) {
	last := int64(0)
	for _, e := range entries {
		switch {
		case e.N == last:
			v.say("there are two entries %d", e.N)
		case e.N != last+1:
			v.say("entry %d is missing: after %d comes %d", last+1, last, e.N)
		}
		last = e.N
	}
	if last != v.account.Meter.Entries {
		v.say("the meter has counted %d entries, the last one is %d", v.account.Meter.Entries, last)
	}
}

// entry checks one entry of the ledger by itself and against the fact that it names.
func (v *verifier) entry(e Entry) {
	if e.Sandbox != v.account.Meter.Sandbox || e.Project != v.account.Meter.Project {
		v.say("entry %d is of %s of the project %s", e.N, e.Sandbox, e.Project)
	}
	if e.End == StillOpen || !slices.Contains(Ends, e.End) {
		v.say("entry %d ended for a reason that is none: %q", e.N, e.End)
	}
	caused := slices.ContainsFunc(v.account.Facts, func(f Fact) bool { return f.Event == e.Event })
	if e.Event == "" || !caused {
		v.say("entry %d has no cause: no fact is of the event %q", e.N, e.Event)
	}
	v.content(e)
}

// content checks what an entry says of its interval against the spans that it lies in.
func (v *verifier) content(e Entry) {
	name := fmt.Sprintf("entry %d (%s to %s)", e.N, stamp(e.From), stamp(e.To))
	if e.N == 0 {
		name = fmt.Sprintf("the open interval (%s to %s)", stamp(e.From), stamp(e.To))
	}
	if !slices.Contains(Reasons, e.Reason) || e.Kind != e.Reason.kind() {
		v.say("%s has the kind %q and the reason %q, which do not go together", name, e.Kind, e.Reason)
	}
	from, to := e.From.UnixMilli(), e.To.UnixMilli()
	if to <= from {
		v.say("%s does not end after it begins", name)
		return
	}
	if !e.From.Equal(e.From.Truncate(time.Millisecond)) || !e.To.Equal(e.To.Truncate(time.Millisecond)) {
		v.say("%s is not of whole milliseconds", name)
	}
	v.price(name, e)
	for _, s := range v.spans {
		if s.reason.kind() != e.Kind || s.to <= from || s.from >= to {
			continue
		}
		if s.reason != e.Reason {
			v.say("%s is entered as %s, but it was %s", name, e.Reason, s.reason)
		}
		if s.rate != e.Rate || s.disk != e.DiskBytes {
			v.say("%s is of %d vCPUs, %d bytes of memory and %d of archived disk, but it had %d, %d and %d", name,
				e.Rate.VCPUs, e.Rate.MemoryBytes, e.DiskBytes, s.rate.VCPUs, s.rate.MemoryBytes, s.disk)
		}
		if e.Generation < s.oldest || e.Generation > s.newest {
			v.say("%s is of generation %d, but it was %d to %d", name, e.Generation, s.oldest, s.newest)
		}
		if want := v.endOf(s, to); e.End != want {
			v.say("%s ended for %q, but it was %q", name, e.End, want)
		}
		if !s.openEnded && e.N != 0 && e.Event != v.account.Facts[s.by].Event {
			v.say("%s names the event %q, but %q completed it", name, e.Event, v.account.Facts[s.by].Event)
		}
	}
}

// endOf is why a piece of a span that ends at an instant ended.
func (v *verifier) endOf(s span, to int64) End {
	switch {
	case to < s.to:
		return ByPrice
	case s.openEnded:
		return StillOpen
	}
	return s.end
}

// price checks that one known version held throughout an entry.
func (v *verifier) price(name string, e Entry) {
	known := false
	for i, p := range v.prices.list {
		if p.Version != e.Price {
			continue
		}
		known = true
		if i > 0 && e.From.Before(p.ValidFrom) {
			v.say("%s is at price version %d, which begins only at %s", name, e.Price, stamp(p.ValidFrom))
		}
		if i+1 < len(v.prices.list) && e.To.After(v.prices.list[i+1].ValidFrom) {
			v.say("%s is at price version %d, which ended at %s", name, e.Price, stamp(v.prices.list[i+1].ValidFrom))
		}
	}
	if !known {
		v.say("%s is at price version %d, which is not known", name, e.Price)
	}
}

// coverage checks that every instant is metered as often as it has to be: once or never.
func (v *verifier) coverage(k Kind, entries, opened []Entry) {
	type edge struct {
		at         int64
		want, have int
	}
	var edges []edge
	for _, s := range v.spans {
		if s.reason.kind() == k {
			edges = append(edges, edge{s.from, 1, 0}, edge{s.to, -1, 0})
		}
	}
	for _, e := range slices.Concat(entries, opened) {
		if e.Kind == k && e.To.After(e.From) {
			edges = append(edges, edge{e.From.UnixMilli(), 0, 1}, edge{e.To.UnixMilli(), 0, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Compare(a.at, b.at) })
	want, have, since := 0, 0, int64(0)
	for i := 0; i < len(edges); {
		at, w, h := edges[i].at, want, have
		for ; i < len(edges) && edges[i].at == at; i++ {
			w, h = w+edges[i].want, h+edges[i].have
		}
		if w != want || h != have {
			v.differ(k, want, have, since, at)
			want, have, since = w, h, at
		}
	}
}

func (v *verifier) differ(k Kind, want, have int, from, to int64) {
	if want == have {
		return
	}
	between := fmt.Sprintf("%s from %s to %s", k, stamp(time.UnixMilli(from)), stamp(time.UnixMilli(to)))
	switch {
	case have > 1:
		v.say("%s is metered %d times", between, have)
	case have == 1:
		v.say("%s is metered and should not be", between)
	default:
		v.say("%s is not metered and should be", between)
	}
}

// late finds ends that were told of only when metering past them had been entered. The
// ledger cannot be blamed for that, whoever gave the facts can: what was known to be due
// has to be told before the fact that is entered past it.
func (v *verifier) late() {
	facts := v.account.Facts
	begin := 0
	for i, f := range facts {
		switch {
		case f.Kind == Assigned || f.Kind == Found:
			begin = i
		case f.Kind == Ended && slices.Contains(lateEnds, f.End), f.Kind == Halted && slices.Contains(lateHalts, f.End):
			for _, s := range v.spans {
				if s.reason != Stored && begin < s.by && s.by < i && f.At.UnixMilli() < s.to {
					v.say("it ended for %q at %s, but that was told (event %q) only after it had been metered until %s",
						f.End, stamp(f.At), f.Event, stamp(time.UnixMilli(s.to)))
					break
				}
			}
		}
	}
}

// lateEnds and lateHalts are the ends whose instants may lie before what was known when
// they are told. A budget is not among them: what is spent can be revised upwards by a
// boot that becomes ready.
var (
	lateEnds  = []End{ByExit, ByCrash, ByOOM, ByHostRestarted, ByHostLost}
	lateHalts = []End{ByAutoStop, ByMemoryWindow, BySpotNotice}
)

// sum compares what the entries cost with what the spans cost, in fractions.
func (v *verifier) sum(entries []Entry) {
	want, have := new(big.Rat), new(big.Rat)
	for _, s := range v.spans {
		want.Add(want, v.cost(s))
	}
	var total Amount
	for _, e := range entries {
		p, err := e.check(v.prices)
		if err != nil {
			return // said already, and there is no sum
		}
		var l Line
		l.add(e, p)
		total = total.Plus(l.Amount)
	}
	if have = total.rat(); have.Cmp(want) != 0 {
		v.say("the entries come to %s, the facts to %s", have.FloatString(9), want.FloatString(9))
	}
}

// cost is what a span costs: the time at each price times what it used.
func (v *verifier) cost(s span) *big.Rat {
	sum := new(big.Rat)
	for i, p := range v.prices.list {
		from, to := s.from, s.to
		if i > 0 {
			from = max(from, p.ValidFrom.UnixMilli())
		}
		if i+1 < len(v.prices.list) {
			to = min(to, v.prices.list[i+1].ValidFrom.UnixMilli())
		}
		if to <= from {
			continue
		}
		each := new(big.Rat)
		if s.reason == Stored {
			each.Mul(p.ArchiveGBMonth.Rat(), big.NewRat(s.disk, 1e9))
			each.Quo(each, big.NewRat(month.Milliseconds(), 1))
		} else {
			memory := new(big.Rat).Mul(p.GiBSecond.Rat(), big.NewRat(s.rate.MemoryBytes, 1<<30))
			each.Mul(p.VCPUSecond.Rat(), big.NewRat(s.rate.VCPUs, 1))
			each.Quo(each.Add(each, memory), big.NewRat(1000, 1))
		}
		sum.Add(sum, each.Mul(each, big.NewRat(to-from, 1)))
	}
	return sum
}
