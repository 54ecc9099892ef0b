package metering

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// ms is an instant so many milliseconds after t0.
func ms(n int) time.Time { return t0.Add(time.Duration(n) * time.Millisecond) }

// tester is a *testing.T or a *rapid.T.
type tester interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func price(t tester, version int64, from time.Time, cpu, gib, archive string) Price {
	t.Helper()
	p, err := ParsePrice(version, from, cpu, gib, archive)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func prices(t tester, list ...Price) Prices {
	t.Helper()
	ps, err := NewPrices(list...)
	if err != nil {
		t.Fatal(err)
	}
	return ps
}

func onePrice(t tester) Prices {
	return prices(t, price(t, 1, time.Time{}, "0.000012", "0.0000035", DefaultArchivePrice))
}

// ledger applies facts as control does: the meter goes through its stored form between
// any two, and entries are only ever appended.
type ledger struct {
	t       tester
	prices  Prices
	meter   Meter
	facts   []Fact
	entries []Entry
}

func newLedger(t tester, ps Prices) *ledger {
	return &ledger{t: t, prices: ps, meter: Meter{Project: "p", Sandbox: "sbx_1"}}
}

func (l *ledger) try(f Fact) error {
	if f.Event == "" {
		f.Event = fmt.Sprintf("ev%d", len(l.facts)+1)
	}
	next, entries, err := l.meter.Next(f, l.prices)
	if err != nil {
		return err
	}
	stored, err := json.Marshal(next)
	if err != nil {
		l.t.Fatal(err)
	}
	l.meter = Meter{}
	if err := json.Unmarshal(stored, &l.meter); err != nil {
		l.t.Fatal(err)
	}
	l.facts, l.entries = append(l.facts, f), append(l.entries, entries...)
	return nil
}

func (l *ledger) apply(facts ...Fact) *ledger {
	for _, f := range facts {
		if err := l.try(f); err != nil {
			l.t.Fatalf("%s at %s: %v", f.Kind, stamp(f.At), err)
		}
	}
	return l
}

// text is the ledger, and what is open at an instant, in milliseconds after t0.
func (l *ledger) text(now int) string {
	var out []string
	for _, e := range append(slices.Clone(l.entries), l.meter.Open(ms(now), l.prices)...) {
		out = append(out, fmt.Sprintf("%s %d-%d %s", e.Reason, e.From.Sub(t0).Milliseconds(), e.To.Sub(t0).Milliseconds(), e.End))
	}
	return strings.Join(out, ", ")
}

func (l *ledger) account() Account {
	return Account{Facts: l.facts, Entries: l.entries, Meter: l.meter}
}

var small = Rate{VCPUs: 2, MemoryBytes: 1 << 30}

// The facts, short.
func assigned(at int) Fact           { return Fact{Kind: Assigned, At: ms(at), Rate: small} }
func unstarted(at int) Fact          { return Fact{Kind: Unstarted, At: ms(at)} }
func ready(at int) Fact              { return Fact{Kind: Ready, At: ms(at), Generation: 1} }
func woken(at int) Fact              { return Fact{Kind: Woken, At: ms(at), Generation: 2} }
func rebooted(at int) Fact           { return Fact{Kind: Rebooted, At: ms(at), Generation: 3} }
func slept(op string, at int) Fact   { return Fact{Kind: Slept, At: ms(at), Operation: op} }
func ended(at int, why End) Fact     { return Fact{Kind: Ended, At: ms(at), End: why} }
func kept(at int) Fact               { return Fact{Kind: Kept, At: ms(at)} }
func failed(op string, at int) Fact  { return Fact{Kind: SaveFailed, At: ms(at), Operation: op} }
func refused(op string, at int) Fact { return Fact{Kind: Refused, At: ms(at), Operation: op} }
func released(op string, at int) Fact {
	return Fact{Kind: Released, At: ms(at), Operation: op}
}
func archived(at int, bytes int64) Fact { return Fact{Kind: Archived, At: ms(at), DiskBytes: bytes} }
func found(at int, as Reason) Fact {
	return Fact{Kind: Found, At: ms(at), Reason: as, Rate: small, Generation: 1}
}
func halted(op string, at int, verb sandbox.Verb, why End) Fact {
	return Fact{Kind: Halted, At: ms(at), Operation: op, Verb: verb, End: why}
}
func sleep(op string, at int) Fact { return halted(op, at, sandbox.Sleep, BySleep) }
func stop(op string, at int) Fact  { return halted(op, at, sandbox.Stop, ByStop) }
func del(op string, at int) Fact   { return halted(op, at, sandbox.Delete, ByDelete) }
func due(op string, at int, why End) Fact {
	return halted(op, at, sandbox.Stop, why)
}

// booted is a life that is ready at 100, metered from 0.
func booted(more ...Fact) []Fact { return append([]Fact{assigned(0), ready(100)}, more...) }

func TestLives(t *testing.T) {
	for _, c := range []struct {
		name  string
		facts []Fact
		want  string // at 9000
	}{
		{"B1 nothing happened", nil, ""},
		{"B1 a boot that is not ready is not metered yet", []Fact{assigned(0)}, ""},
		{"B1 a boot that is ready counts from the assignment", booted(), "starting 0-100 ready, running 100-9000 open"},
		{"B1 a failed boot costs nothing", []Fact{assigned(0), unstarted(50)}, ""},
		{"B1 a boot on a host that is lost costs nothing", []Fact{assigned(0), ended(50, ByHostLost)}, ""},
		{"B1 a boot after a failed one", []Fact{assigned(0), unstarted(50), assigned(200), ready(300)}, "starting 200-300 ready, running 300-9000 open"},
		{"B1 deleted before it was ready", []Fact{assigned(0), del("d", 50), ready(100), ended(120, ByDelete)}, ""},
		{"B1 deleted before it was ready, which is told late", []Fact{assigned(0), del("d", 150), ready(100), ended(170, ByDelete)},
			"starting 0-100 ready, running 100-150 delete"},
		{"B1 deleted and never ready", []Fact{assigned(0), del("d", 50), ended(120, ByDelete)}, ""},
		{"B1 B4 the deadline falls due before it is ready", []Fact{assigned(0), due("a", 60, ByAutoStop), ready(100), ended(110, ByAutoStop)},
			"starting 0-60 auto_stop"},
		{"B1 a deadline taken back during the boot", []Fact{assigned(0), due("a", 60, ByAutoStop), released("a", 70), ready(100)},
			"starting 0-100 ready, running 100-9000 open"},

		{"B2 a sleep is not metered from acceptance to end", booted(sleep("s", 500), slept("s", 800)),
			"starting 0-100 ready, running 100-500 sleep, sleeping 800-9000 open"},
		{"B2 while a save runs nothing is open", booted(sleep("s", 500)), "starting 0-100 ready, running 100-500 open"},
		{"B2 a wake leaves no gap", booted(sleep("s", 500), slept("s", 800), woken(1200)),
			"starting 0-100 ready, running 100-500 sleep, sleeping 800-1200 woken, running 1200-9000 open"},
		{"B2 a refused save pauses nothing", booted(sleep("s", 500), refused("s", 600)), "starting 0-100 ready, running 100-9000 open"},
		{"B2 a cancelled save", booted(sleep("s", 500), released("s", 600)),
			"starting 0-100 ready, running 100-500 sleep, running 600-9000 open"},
		{"B2 a sandbox that the host slept by itself", booted(slept("h", 800)),
			"starting 0-100 ready, running 100-800 sleep, sleeping 800-9000 open"},
		{"B2 a reboot goes on", booted(rebooted(300)), "starting 0-100 ready, running 100-300 rebooted, running 300-9000 open"},
		{"B2 it crashed while it was saved", booted(sleep("s", 500), ended(700, ByCrash)), "starting 0-100 ready, running 100-500 sleep"},

		{"B3 a stop ends at its acceptance", booted(stop("s", 500), ended(900, ByStop)), "starting 0-100 ready, running 100-500 stop"},
		{"B3 of a sleeping one", booted(sleep("s", 500), slept("s", 800), stop("x", 1000), ended(1100, ByStop)),
			"starting 0-100 ready, running 100-500 sleep, sleeping 800-1000 stop"},
		{"B3 a deletion", booted(del("d", 500), ended(900, ByDelete)), "starting 0-100 ready, running 100-500 delete"},
		{"B3 a deletion that failed is not taken back", booted(del("d", 500), failed("d", 600), kept(700), released("d", 800), refused("d", 900)),
			"starting 0-100 ready, running 100-500 open"},
		{"B3 a deletion that cancels a save", booted(sleep("s", 500), del("d", 600), ended(650, ByDelete)), "starting 0-100 ready, running 100-500 sleep"},

		{"B4 the due time counts, not the act", booted(due("a", 3000, ByAutoStop), ended(5000, ByAutoStop)),
			"starting 0-100 ready, running 100-3000 auto_stop"},
		{"B4 told of after a stop was accepted", booted(stop("s", 4000), due("a", 3000, ByAutoStop), ended(5000, ByAutoStop)),
			"starting 0-100 ready, running 100-3000 auto_stop"},
		{"B4 falls due after a stop was accepted", booted(stop("s", 2000), due("a", 3000, ByAutoStop), ended(5000, ByAutoStop)),
			"starting 0-100 ready, running 100-2000 stop"},
		{"A4 Z7 the memory window ends", booted(sleep("s", 500), slept("s", 800), due("m", 4000, ByMemoryWindow), ended(6000, ByMemoryWindow)),
			"starting 0-100 ready, running 100-500 sleep, sleeping 800-4000 memory_window"},
		{"B4 a budget", booted(due("b", 777, ByBudget), ended(1000, ByBudget)), "starting 0-100 ready, running 100-777 budget"},
		{"A8 a deadline that sleeps", booted(halted("a", 3000, sandbox.Sleep, ByAutoStop), slept("a", 3500)),
			"starting 0-100 ready, running 100-3000 auto_stop, sleeping 3500-9000 open"},

		{"B5 paused from the beginning of a failed save", booted(sleep("s", 500), failed("s", 700)), "starting 0-100 ready, running 100-500 open"},
		{"B5 until a retry succeeds", booted(sleep("s", 500), failed("s", 700), sleep("r", 2000), slept("r", 2500)),
			"starting 0-100 ready, running 100-500 sleep, sleeping 2500-9000 open"},
		{"B5 until keep", booted(sleep("s", 500), failed("s", 700), kept(1500)),
			"starting 0-100 ready, running 100-500 sleep, running 1500-9000 open"},
		{"B5 keep with nothing to keep", booted(kept(1500)), "starting 0-100 ready, running 100-9000 open"},
		{"B5 a retry that is cancelled changes nothing", booted(sleep("s", 500), failed("s", 700), sleep("r", 2000), released("r", 2500)),
			"starting 0-100 ready, running 100-500 sleep"},
		{"B5 a reboot does not end the pause", booted(sleep("s", 500), failed("s", 700), rebooted(900)), "starting 0-100 ready, running 100-500 open"},
		{"Z10 an automatic stop keeps its due time", booted(due("a", 500, ByAutoStop), failed("a", 700), ended(4000, ByAutoStop)),
			"starting 0-100 ready, running 100-500 auto_stop"},
		{"Z11 a failed stop is not made up for by a sleep", booted(stop("s", 500), failed("s", 700), sleep("r", 800), slept("r", 900), ended(4000, ByStop)),
			"starting 0-100 ready, running 100-500 stop"},
		{"Z11 but by a wake", booted(stop("s", 500), failed("s", 700), sleep("r", 800), slept("r", 900), woken(2000)),
			"starting 0-100 ready, running 100-500 stop, running 2000-9000 open"},

		{"B6 stopped is free, archived is not", booted(stop("s", 500), ended(900, ByStop), archived(2000, 5e9)),
			"starting 0-100 ready, running 100-500 stop, archived 2000-9000 open"},
		{"B6 until it is ready again", booted(stop("s", 500), ended(900, ByStop), archived(2000, 5e9), assigned(3000), ready(3400)),
			"starting 0-100 ready, running 100-500 stop, archived 2000-3400 ready, starting 3000-3400 ready, running 3400-9000 open"},
		{"B6 a failed resume", booted(stop("s", 500), ended(900, ByStop), archived(2000, 5e9), assigned(3000), unstarted(3400)),
			"starting 0-100 ready, running 100-500 stop, archived 2000-9000 open"},
		{"B6 until the deletion is accepted", booted(stop("s", 500), ended(900, ByStop), archived(2000, 5e9), del("d", 4000), ended(4500, ByDelete)),
			"starting 0-100 ready, running 100-500 stop, archived 2000-4000 delete"},
		{"B6 also where it is never done", booted(stop("s", 500), ended(900, ByStop), archived(2000, 5e9), del("d", 4000)),
			"starting 0-100 ready, running 100-500 stop, archived 2000-4000 open"},

		{"D8 lost, found, stopped", booted(ended(500, ByHostLost), found(1500, Running), stop("s", 2000), ended(2100, ByStop)),
			"starting 0-100 ready, running 100-500 host_lost, running 1500-2000 stop"},
		{"D8 a stop accepted after the last contact", booted(stop("s", 800), ended(500, ByHostLost)), "starting 0-100 ready, running 100-500 host_lost"},
		{"D8 found asleep", booted(ended(500, ByHostLost), found(1500, Sleeping)),
			"starting 0-100 ready, running 100-500 host_lost, sleeping 1500-9000 open"},
		{"D8 found after its deletion was accepted", booted(del("d", 400), ended(500, ByHostLost), found(1500, Running)),
			"starting 0-100 ready, running 100-400 delete"},
		{"S8 a crash", booted(ended(444, ByCrash)), "starting 0-100 ready, running 100-444 crashed"},
		{"S8 told of after a sleep was accepted", booted(sleep("s", 600), ended(444, ByOOM)), "starting 0-100 ready, running 100-444 oom_killed"},
		{"DESIGN 4 the host slept it, then a pending stop is carried out",
			booted(stop("s", 2000), halted("h", 500, sandbox.Sleep, ByIdle), slept("h", 700), ended(3000, ByStop)),
			"starting 0-100 ready, running 100-500 idle, sleeping 700-2000 stop"},
		{"DESIGN 4 a pending sleep that finds it asleep",
			booted(sleep("s", 2000), halted("h", 500, sandbox.Sleep, ByIdle), slept("h", 700), released("s", 2500)),
			"starting 0-100 ready, running 100-500 idle, sleeping 700-2000 sleep, sleeping 2500-9000 open"},
		{"late B4 due during the boot and told of after it", []Fact{assigned(0), ready(100), due("a", 60, ByAutoStop), ended(110, ByAutoStop)},
			"starting 0-100 ready"},
		{"late a fact never reaches behind what was entered", booted(sleep("s", 500), slept("s", 800), ended(300, ByHostLost), assigned(400), ready(900)),
			"starting 0-100 ready, running 100-500 sleep, starting 500-900 ready, running 900-9000 open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLedger(t, onePrice(t)).apply(c.facts...)
			if got := l.text(9000); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			diff := Verify(l.account(), l.prices, ms(9000))
			if late := strings.HasPrefix(c.name, "late "); late != (len(diff) > 0) {
				t.Errorf("verify: %q", diff)
			}
		})
	}
}

// B7: a price change splits an interval, of a boot, a life and a stored disk alike.
func TestPriceChangeSplits(t *testing.T) {
	ps := prices(t, price(t, 1, time.Time{}, "1", "1", "1"), price(t, 2, ms(50), "2", "1", "1"), price(t, 5, ms(3000), "3", "1", "1"))
	l := newLedger(t, ps).apply(booted(stop("s", 3500), ended(3600, ByStop))...)
	want := "starting 0-50 price_changed, starting 50-100 ready, running 100-3000 price_changed, running 3000-3500 stop"
	if got := l.text(9000); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	var versions []int64
	for i, e := range l.entries {
		versions = append(versions, e.Price)
		if e.N != int64(i+1) || e.Event == "" || e.Project != "p" || e.Sandbox != "sbx_1" || e.Kind != Compute || e.Generation != 1 || e.Rate != small {
			t.Errorf("entry %d: %+v", i, e)
		}
	}
	if !slices.Equal(versions, []int64{1, 2, 2, 5}) {
		t.Fatalf("the versions are %v", versions)
	}
	if l.entries[0].Event != "ev2" || l.entries[3].Event != "ev4" {
		t.Errorf("the entries name the events %s and %s", l.entries[0].Event, l.entries[3].Event)
	}
	l = newLedger(t, ps).apply(found(2000, Running))
	if got := l.text(4000); got != "running 2000-3000 price_changed, running 3000-4000 open" {
		t.Errorf("open: %s", got)
	}
}

// B7: instants are whole milliseconds, whatever the clock gives.
func TestMilliseconds(t *testing.T) {
	f := ready(100)
	f.At = f.At.Add(999 * time.Microsecond).In(time.FixedZone("there", 3600))
	l := newLedger(t, onePrice(t)).apply(assigned(0), f)
	if len(l.entries) != 1 {
		t.Fatalf("entries: %+v", l.entries)
	}
	if e := l.entries[0]; !e.To.Equal(ms(100)) || e.To.Location() != time.UTC {
		t.Errorf("the entry ends at %v", e.To)
	}
}

func TestFactsThatCannotBe(t *testing.T) {
	ok := onePrice(t)
	for _, c := range []struct {
		name   string
		before []Fact
		fact   Fact
		prices Prices
	}{
		{"no instant", nil, Fact{Kind: Kept, Event: "e"}, ok},
		{"no such kind", nil, Fact{Kind: "eaten", At: t0, Event: "e"}, ok},
		{"no machine", nil, Fact{Kind: Assigned, At: t0, Event: "e"}, ok},
		{"found as archived", nil, found(0, Stored), ok},
		{"halted by nothing", nil, halted("o", 0, sandbox.Sleep, ByCrash), ok},
		{"halted by a wake", nil, halted("o", 0, sandbox.Wake, ByStop), ok},
		{"halted without an operation", nil, sleep("", 0), ok},
		{"released without an operation", nil, released("", 0), ok},
		{"ended by a wake", nil, ended(0, ByWake), ok},
		{"a negative disk", nil, archived(0, -1), ok},
		{"no prices", nil, assigned(0), Prices{}},
		{"ready without a boot", nil, ready(0), ok},
		{"asleep while off", nil, slept("s", 0), ok},
		{"two boots at a time", booted(), assigned(200), ok},
		{"a boot of what is deleted", []Fact{del("d", 0)}, assigned(200), ok},
		{"archived twice", []Fact{archived(0, 1)}, archived(1, 1), ok},
	} {
		l := newLedger(t, ok).apply(c.before...)
		c.fact.Event = "e"
		before := fmt.Sprintf("%+v", l.meter)
		next, entries, err := l.meter.Next(c.fact, c.prices)
		if !fault.Is(err, fault.Internal) || entries != nil || fmt.Sprintf("%+v", next) != before {
			t.Errorf("%s: %v, %v, %+v", c.name, err, entries, next)
		}
	}
	f := kept(0)
	if err := f.valid(); !fault.Is(err, fault.Internal) {
		t.Errorf("no event: %v", err)
	}
}

func TestPaused(t *testing.T) {
	l := newLedger(t, onePrice(t)).apply(booted()...)
	if h, ok := l.meter.Paused(); ok {
		t.Errorf("paused by %+v", h)
	}
	l.apply(sleep("s", 500), failed("s", 700))
	if h, ok := l.meter.Paused(); !ok || !h.At.Equal(ms(500)) || !h.Failed || h.End != BySleep {
		t.Errorf("%v, %+v", ok, h)
	}
	l.apply(ended(800, ByCrash))
	if h, ok := l.meter.Paused(); ok || len(l.meter.Halts) != 0 {
		t.Errorf("off and paused by %+v", h)
	}
}

// Z10: a save that is retried for days leaves one halt in the row, of its beginning.
func TestRetriesDoNotFillTheRow(t *testing.T) {
	l := newLedger(t, onePrice(t)).apply(booted()...)
	for i := range 50 {
		op := fmt.Sprint("s", i)
		l.apply(sleep(op, 500+10*i), sleep(op, 500+10*i), failed(op, 505+10*i), due("auto", 2000, ByAutoStop))
	}
	if len(l.meter.Halts) != 2 {
		t.Errorf("halts: %+v", l.meter.Halts)
	}
	if h, ok := l.meter.Paused(); !ok || !h.At.Equal(ms(500)) {
		t.Errorf("%+v", h)
	}
	if diff := Verify(l.account(), l.prices, ms(9000)); diff != nil {
		t.Errorf("verify: %q", diff)
	}
}
