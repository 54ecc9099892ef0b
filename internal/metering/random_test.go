package metering

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// drawPrices gives one to four versions that change at random instants.
func drawPrices(t *rapid.T) Prices {
	figure := rapid.SampledFrom([]string{"0", "0.000012", "1", "0.0000000000000001", "0.33", "999999999.999999999999999999"})
	var list []Price
	version, at := int64(0), 0
	for range rapid.IntRange(1, 4).Draw(t, "versions") {
		version += int64(rapid.IntRange(1, 3).Draw(t, "version"))
		at += rapid.IntRange(1, 700).Draw(t, "valid from")
		list = append(list, price(t, version, ms(at), figure.Draw(t, "cpu"), figure.Draw(t, "gib"), figure.Draw(t, "archive")))
	}
	return prices(t, list...)
}

func drawRate(t *rapid.T) Rate {
	return Rate{VCPUs: rapid.Int64Range(1, 8).Draw(t, "vcpus"), MemoryBytes: rapid.Int64Range(1, 1<<36).Draw(t, "memory")}
}

// drawFact gives any fact at any instant: late, early and senseless ones too.
func drawFact(t *rapid.T, events int) Fact {
	f := Fact{
		Kind: rapid.SampledFrom([]FactKind{Assigned, Unstarted, Ready, Halted, Refused, Released, SaveFailed, Kept, Slept, Woken,
			Rebooted, Ended, Archived, Found, Assigned, Ready, Halted, Halted, SaveFailed}).Draw(t, "kind"),
		At:         ms(rapid.IntRange(0, 2000).Draw(t, "at")),
		Event:      fmt.Sprintf("ev%d", events),
		Operation:  rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "op"),
		Generation: int64(events) + 1, // they only grow
		Rate:       drawRate(t),
		DiskBytes:  rapid.Int64Range(0, 8e9).Draw(t, "disk"),
	}
	f.Verb = rapid.SampledFrom([]sandbox.Verb{sandbox.Sleep, sandbox.Sleep, sandbox.Stop, sandbox.Stop, sandbox.Delete}).Draw(t, "verb")
	f.End = rapid.SampledFrom(haltEnds).Draw(t, "end")
	f.Reason = rapid.SampledFrom([]Reason{Running, Sleeping}).Draw(t, "reason")
	if f.Kind == Ended {
		f.End = rapid.SampledFrom(finalEnds).Draw(t, "final")
	}
	return f
}

// drawLedger applies random facts; those that cannot be are refused and forgotten.
func drawLedger(t *rapid.T) *ledger {
	l := newLedger(t, drawPrices(t))
	for i := range rapid.IntRange(1, 40).Draw(t, "facts") {
		before, n := l.meter, len(l.entries)
		f := drawFact(t, i)
		err := l.try(f)
		if err != nil && !reflect.DeepEqual(before, l.meter) {
			t.Fatalf("a fact that was refused changed the meter: %+v", l.meter)
		}
		if err == nil && l.meter.Entries != int64(len(l.entries)) || len(l.entries) < n {
			t.Fatalf("the meter counts %d of %d entries", l.meter.Entries, len(l.entries))
		}
	}
	return l
}

// apartFromLate leaves out what Verify says of the order of the facts, which is at random
// here.
func apartFromLate(diff []string) []string {
	return slices.DeleteFunc(diff, func(d string) bool { return strings.Contains(d, "that was told (event") })
}

// B7: whatever the facts and their instants are, the intervals of a kind are positive,
// in order and apart, and the recomputation finds nothing.
func TestAnyFacts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLedger(t)
		last := map[Kind]Entry{}
		for i, e := range append(slices.Clone(l.entries), l.meter.Open(ms(2500), l.prices)...) {
			if !e.To.After(e.From) {
				t.Fatalf("entry %d is not positive: %+v", i, e)
			}
			if before, ok := last[e.Kind]; ok && e.From.Before(before.To) {
				t.Fatalf("entry %d begins before the one before it ends: %+v, %+v", i, before, e)
			}
			last[e.Kind] = e
			if p, ok := l.prices.At(e.From); !ok || p.Version != e.Price || len(l.prices.changes(e.From, e.To)) > 0 {
				t.Fatalf("entry %d is at price version %d, %+v", i, e.Price, e)
			}
		}
		if diff := apartFromLate(Verify(l.account(), l.prices, ms(2500))); len(diff) > 0 {
			t.Fatalf("facts %+v\nentries %+v\nmeter %+v\n%q", l.facts, l.entries, l.meter, diff)
		}
	})
}

// B7: Verify fails loudly on any difference in the ledger, the meter or the facts.
func TestVerifyFindsDamage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLedger(t)
		if len(l.entries) == 0 {
			t.Skip("nothing to damage")
		}
		a := l.account()
		a.Entries = slices.Clone(a.Entries)
		i := rapid.IntRange(0, len(a.Entries)-1).Draw(t, "which")
		e := &a.Entries[i]
		how := rapid.SampledFrom([]string{"from", "to", "both", "negative", "cpus", "memory", "price", "known price", "event", "other event", "reason",
			"end", "kind", "generation", "sandbox", "drop", "drop last", "twice", "again", "meter", "open", "micros"}).Draw(t, "how")
		switch how {
		case "from":
			e.From = e.From.Add(-time.Millisecond)
		case "to":
			e.To = e.To.Add(time.Millisecond)
		case "both":
			e.From, e.To = e.From.Add(time.Millisecond), e.To.Add(time.Millisecond)
		case "negative":
			e.From, e.To = e.To, e.From
		case "cpus":
			e.Rate.VCPUs++
		case "memory":
			e.Rate.MemoryBytes--
		case "price":
			e.Price = 99
		case "known price":
			list := l.prices.List()
			if len(list) == 1 {
				t.Skip("one price")
			}
			e.Price = list[(slices.IndexFunc(list, func(p Price) bool { return p.Version == e.Price })+1)%len(list)].Version
		case "event":
			e.Event = ""
		case "other event":
			e.Event = l.facts[0].Event // the first fact completes nothing
		case "reason":
			e.Reason = Reasons[(slices.Index(Reasons, e.Reason)+1)%4]
		case "end":
			e.End = Ends[(slices.Index(Ends, e.End)+1)%len(Ends)]
		case "kind":
			e.Kind = Kinds[(slices.Index(Kinds, e.Kind)+1)%2]
		case "generation":
			if e.Kind == Archive {
				t.Skip("a disk")
			}
			e.Generation += 1000
		case "sandbox":
			e.Sandbox = "sbx_2"
		case "drop":
			a.Entries = slices.Delete(a.Entries, i, i+1)
		case "drop last":
			a.Entries = a.Entries[:len(a.Entries)-1]
		case "twice":
			a.Entries = append(a.Entries, *e)
		case "again":
			again := *e
			a.Meter.Entries++
			again.N = a.Meter.Entries
			a.Entries = append(a.Entries, again)
		case "meter":
			a.Meter.Entries--
		case "open":
			if len(a.Meter.Open(ms(2500), l.prices)) == 0 {
				t.Skip("nothing is open")
			}
			a.Meter.Since, a.Meter.StoredSince = a.Meter.Since.Add(-time.Millisecond), a.Meter.StoredSince.Add(-time.Millisecond)
		case "micros":
			e.To = e.To.Add(time.Microsecond)
		}
		if diff := apartFromLate(Verify(a, l.prices, ms(2500))); len(diff) == 0 {
			t.Fatalf("%s of %+v is not found", how, l.entries[i])
		}
	})
}

// B7: where a price changes, and into how many pieces an interval is split, changes no
// quantity.
func TestPriceChangesLeaveQuantities(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLedger(t)
		other := newLedger(t, drawPrices(t)).apply(l.facts...)
		sum := func(l *ledger) map[Reason]string {
			s, err := Bill(append(slices.Clone(l.entries), l.meter.Open(ms(2500), l.prices)...), l.prices, ms(0), ms(2500))
			if err != nil {
				t.Fatal(err)
			}
			merged := map[Reason]Line{}
			for _, x := range s.Lines {
				m := merged[x.Reason]
				m.Time += x.Time
				m.VCPUMillis = m.VCPUMillis.Add(x.VCPUMillis)
				m.MemoryByteMillis = m.MemoryByteMillis.Add(x.MemoryByteMillis)
				m.DiskByteMillis = m.DiskByteMillis.Add(x.DiskByteMillis)
				merged[x.Reason] = m
			}
			out := map[Reason]string{}
			for r, m := range merged {
				out[r] = fmt.Sprintf("%s %s %s %s", m.Time, m.VCPUMillis, m.MemoryByteMillis, m.DiskByteMillis)
			}
			return out
		}
		if a, b := sum(l), sum(other); !reflect.DeepEqual(a, b) {
			t.Fatalf("quantities differ: %v and %v", a, b)
		}
	})
}

// B7: a bill of [a, b) and one of [b, c) make that of [a, c), to the last part.
func TestBillsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := drawLedger(t)
		entries := append(slices.Clone(l.entries), l.meter.Open(ms(2500), l.prices)...)
		at := []int{rapid.IntRange(0, 2500).Draw(t, "a"), rapid.IntRange(0, 2500).Draw(t, "b"), rapid.IntRange(0, 2500).Draw(t, "c")}
		slices.Sort(at)
		bill := func(from, to int) Statement {
			s, err := Bill(entries, l.prices, ms(from), ms(to))
			if err != nil {
				t.Fatal(err)
			}
			if sum := s.Sum(func(Line) bool { return true }); sum.Cmp(s.Total) != 0 {
				t.Fatalf("the lines come to %s, the total to %s", sum, s.Total)
			}
			return s
		}
		ab, bc, ac := bill(at[0], at[1]), bill(at[1], at[2]), bill(at[0], at[2])
		if sum := ab.Total.Plus(bc.Total); sum.Cmp(ac.Total) != 0 {
			t.Fatalf("%s and %s make %s", ab.Total, bc.Total, ac.Total)
		}
		for _, r := range Reasons {
			of := func(l Line) bool { return l.Reason == r }
			if ab.Sum(of).Plus(bc.Sum(of)).Cmp(ac.Sum(of)) != 0 {
				t.Fatalf("%s does not add up", r)
			}
		}
	})
}
