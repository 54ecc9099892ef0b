package metering

import (
	"fmt"
	"math/big"
	"slices"
	"testing"

	"github.com/shopspring/decimal"
	"pgregory.net/rapid"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// world is a sandbox, its host and its user, told from outside. Beside the facts, which
// go to the meter as control would learn of them, it notes what the rules say of each
// moment, straight from what really happened: that is the truth that the ledger is
// compared with, millisecond by millisecond.
type world struct {
	t   *rapid.T
	l   *ledger
	now int

	state      string // "" off, "running", "sleeping", "archived", "deleted"
	held       int    // since when a failed sleep pauses the meter; -1 not
	owed       int    // since when a failed stop does; -1 not
	rate       Rate
	disk       int64
	generation int64
	ops        int
	stored     int // since when it is archived

	compute [horizon]*Rate // what is metered in a millisecond
	archive [horizon]int64 // the archived bytes that are
	life    int            // beginning of what is painted of the present life
}

const horizon = 4000

func newWorld(t *rapid.T) *world {
	return &world{t: t, l: newLedger(t, drawPrices(t)), held: -1, owed: -1}
}

func (w *world) wait(what string) int {
	w.now += rapid.IntRange(1, 25).Draw(w.t, what)
	return w.now
}

func (w *world) choose(what string, of ...string) string {
	return rapid.SampledFrom(of).Draw(w.t, what)
}

func (w *world) op() string { w.ops++; return fmt.Sprintf("op%d", w.ops) }

func (w *world) tell(facts ...Fact) { w.l.apply(facts...) }

// meter paints that [from, to) is metered; of two paints the last one counts.
func (w *world) meter(from, to int, r *Rate) {
	for i := from; i < to; i++ {
		w.compute[i] = r
	}
}

// runs paints that it is metered from an instant on, as far as is known.
func (w *world) runs(from int) { r := w.rate; w.meter(from, horizon, &r) }

// pauses paints that nothing is metered from an instant on.
func (w *world) pauses(from int) { w.meter(from, horizon, nil) }

// boot is create, resume and fork (B1).
func (w *world) boot() {
	if w.state == "deleted" {
		return
	}
	w.rate = drawRate(w.t)
	begin := w.wait("assign")
	w.tell(Fact{Kind: Assigned, At: ms(begin), Rate: w.rate})
	outcome := w.choose("boot", "ready", "ready", "ready", "failed", "lost", "deleted", "deleted late", "due")
	deadline := w.wait("a moment in it")
	end := w.wait("the boot's end")
	switch outcome {
	case "failed":
		w.tell(unstarted(end))
		return
	case "lost":
		if w.state != "archived" {
			w.tell(ended(begin, ByHostLost))
			return
		}
		w.tell(unstarted(end))
		return
	case "deleted": // before it is ready
		w.tell(del(w.op(), deadline))
		if w.choose("told", "ready", "never") == "ready" {
			w.tell(Fact{Kind: Ready, At: ms(end), Generation: w.generation + 1})
		}
		w.unstore(deadline)
		w.tell(ended(w.wait("erased"), ByDelete))
		w.state = "deleted"
		return
	case "deleted late": // it was ready before, and that is told after
		accepted := w.wait("deleted")
		w.tell(del(w.op(), accepted), Fact{Kind: Ready, At: ms(end), Generation: w.generation + 1})
		w.runs(begin)
		w.pauses(accepted)
		w.unstore(end)
		w.tell(ended(w.wait("erased"), ByDelete))
		w.state = "deleted"
		return
	}
	w.generation++
	if outcome == "due" { // the deadline fell due meanwhile (B4)
		w.tell(due(w.op(), deadline, ByAutoStop))
	}
	w.tell(Fact{Kind: Ready, At: ms(end), Generation: w.generation})
	w.unstore(end)
	w.runs(begin)
	w.state, w.held, w.owed = "running", -1, -1
	if outcome == "due" {
		w.pauses(deadline)
		w.tell(ended(w.wait("stopped"), ByAutoStop))
		w.state = ""
	}
}

func (w *world) unstore(at int) {
	if w.state == "archived" {
		for i := w.stored; i < at; i++ {
			w.archive[i] = w.disk
		}
		w.state = ""
	}
}

// save is an accepted sleep or stop and what may become of it.
func (w *world) save() {
	op, from := w.op(), w.wait("accepted")
	verb := w.choose("verb", "sleep", "stop")
	if w.state == "sleeping" {
		verb = "stop"
	}
	fact, what := sleep(op, from), BySleep
	if verb == "stop" {
		fact, what = stop(op, from), ByStop
	}
	w.tell(fact)
	meanwhile, end := w.wait("meanwhile"), w.wait("its end")
	free := w.held < 0 && w.owed < 0 // nothing pauses the meter but this
	switch w.choose("outcome", "done", "done", "done", "failed", "failed", "failed", "cancelled", "refused", "crashed", "lost before", "deleted", "due before") {
	case "done":
		w.done(verb, op, from, end, what)
	case "failed":
		w.pauses(from)
		w.tell(failed(op, end))
		if verb == "sleep" && w.held < 0 {
			w.held = from
		} else if verb == "stop" && w.owed < 0 {
			w.owed = from
		}
	case "cancelled":
		w.pauses(from)
		if free {
			w.runs(end)
		}
		w.life = end
		w.tell(released(op, end))
	case "refused": // it never began
		w.tell(refused(op, end))
	case "crashed":
		w.pauses(from)
		w.tell(ended(meanwhile, ByCrash))
		w.state = ""
	case "lost before": // the last contact was before the acceptance
		last := rapid.IntRange(w.life, from).Draw(w.t, "last contact")
		w.pauses(last)
		w.tell(ended(last, ByHostLost))
		w.state = ""
		w.perhapsFound()
	case "deleted":
		w.pauses(from)
		w.tell(del(w.op(), meanwhile), ended(end, ByDelete))
		w.state = "deleted"
	case "due before": // it fell due before the acceptance, which is told after
		at := rapid.IntRange(w.life, from).Draw(w.t, "due")
		w.pauses(at)
		w.tell(due(w.op(), at, ByAutoStop), ended(end, ByAutoStop))
		w.state = ""
	}
}

func (w *world) done(verb, op string, from, end int, what End) {
	w.pauses(from)
	if verb == "stop" {
		w.tell(ended(end, what))
		w.state = ""
		return
	}
	w.tell(slept(op, end))
	w.state, w.held, w.life = "sleeping", -1, end
	if w.owed < 0 { // a failed stop stays owed
		w.runs(end)
	}
}

func (w *world) perhapsFound() {
	if w.choose("found", "yes", "no") == "no" {
		return
	}
	at := w.wait("back")
	w.state = w.choose("as", "running", "sleeping")
	w.tell(Fact{Kind: Found, At: ms(at), Reason: Reason(w.state), Rate: w.rate, Generation: w.generation})
	w.runs(at)
	w.life, w.held, w.owed = at, -1, -1
}

// alone is a host out of reach: it acts by itself, its user's verb waits, and all is
// told in its order when it is back (DESIGN section 4).
func (w *world) alone() {
	asleep := w.state == "sleeping"
	acts := w.choose("alone", "due", "crash", "nothing", "idle")
	first, second := w.wait("first"), w.wait("second")
	if asleep && acts != "nothing" {
		acts = "due"
	}
	if (w.held >= 0 || w.owed >= 0) && acts == "idle" {
		acts = "nothing"
	}
	accepted := rapid.IntRange(w.life, second+30).Draw(w.t, "the user's verb")
	w.now = max(w.now, accepted)
	op := w.op()
	verb := "stop"
	if !asleep {
		verb = w.choose("verb", "sleep", "stop")
	}
	what := stop(op, accepted)
	if verb == "sleep" {
		what = sleep(op, accepted)
	}
	back := w.wait("back")
	switch acts {
	case "due":
		w.pauses(min(first, accepted))
		w.tell(what, due("h"+op, first, ByMemoryWindow), ended(second, ByMemoryWindow))
		w.tell(released(op, back)) // it finds its goal reached, or is overtaken
		w.state = ""
	case "crash":
		w.pauses(min(first, accepted))
		w.tell(what, ended(first, ByCrash), released(op, back))
		w.state = ""
	case "idle": // asleep from second on
		w.tell(what, halted("h"+op, first, sandbox.Sleep, ByIdle), slept("h"+op, second))
		w.pauses(first)
		w.runs(second)
		w.pauses(max(accepted, second))
		w.meter(min(accepted, first), first, nil)
		w.state, w.life, w.held = "sleeping", second, -1
		if verb == "sleep" { // it finds its goal reached
			w.runs(back)
			w.tell(released(op, back))
			w.life = back
			return
		}
		w.tell(ended(w.wait("stopped"), ByStop))
		w.state = ""
	case "nothing":
		w.tell(what)
		w.done(verb, op, accepted, back, ByStop)
	}
}

func (w *world) step() {
	switch w.state {
	case "":
		switch w.choose("off", "boot", "boot", "archive", "delete") {
		case "boot":
			w.boot()
			w.life = w.now
		case "archive":
			w.disk = rapid.Int64Range(0, 8e9).Draw(w.t, "disk")
			w.stored = w.wait("archived")
			w.tell(archived(w.stored, w.disk))
			w.state = "archived"
		case "delete":
			w.tell(del(w.op(), w.wait("deleted")), ended(w.wait("erased"), ByDelete))
			w.state = "deleted"
		}
	case "archived":
		if w.choose("archived", "boot", "delete") == "boot" {
			w.boot()
			w.life = w.now
			return
		}
		at := w.wait("deleted")
		w.unstore(at)
		w.tell(del(w.op(), at), ended(w.wait("erased"), ByDelete))
		w.state = "deleted"
	case "running", "sleeping":
		w.live()
	}
}

func (w *world) live() {
	switch w.choose("live", "save", "save", "save", "save", "alone", "wake", "due", "crash", "keep", "reboot") {
	case "save":
		w.save()
	case "alone":
		w.alone()
	case "wake":
		if w.state != "sleeping" {
			return
		}
		at := w.wait("woken")
		w.generation++
		w.tell(Fact{Kind: Woken, At: ms(at), Generation: w.generation})
		w.runs(at)
		w.state, w.life, w.held, w.owed = "running", at, -1, -1
	case "due": // acted on late
		at := w.wait("due")
		w.pauses(at)
		w.tell(due(w.op(), at, ByBudget), ended(w.wait("stopped"), ByBudget))
		w.state = ""
	case "crash":
		if w.state != "running" {
			return
		}
		at := w.wait("crash")
		w.pauses(at)
		w.tell(ended(at, ByCrash))
		w.state = ""
	case "keep":
		at := w.wait("keep")
		w.tell(kept(at))
		if w.held >= 0 || w.owed >= 0 {
			w.runs(at)
			w.held, w.owed, w.life = -1, -1, at
		}
	case "reboot":
		if w.state != "running" {
			return
		}
		at := w.wait("reboot")
		w.generation++
		w.tell(Fact{Kind: Rebooted, At: ms(at), Generation: w.generation})
		if w.held < 0 && w.owed < 0 {
			w.life = at
		}
	}
}

// drawWorld lives one or more lives.
func drawWorld(t *rapid.T) *world {
	w := newWorld(t)
	for range rapid.IntRange(1, 20).Draw(t, "steps") {
		w.step()
	}
	w.wait("the present")
	if w.state == "archived" {
		for i := w.stored; i < horizon; i++ {
			w.archive[i] = w.disk
		}
	}
	return w
}

func (w *world) entries() []Entry {
	return append(slices.Clone(w.l.entries), w.l.meter.Open(ms(w.now), w.l.prices)...)
}

// B1-B6, Z10, Z11, D8: over random lives with failures anywhere, and with what is acted
// on and told of late, the ledger says of every millisecond what really was. In
// particular a stop is never metered past its beginning, and a failed boot costs nothing.
func TestLedgerIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		var compute [horizon]*Rate
		var archive [horizon]int64
		for _, e := range w.entries() {
			for i := int(e.From.Sub(t0).Milliseconds()); i < int(e.To.Sub(t0).Milliseconds()); i++ {
				if e.Kind == Archive {
					archive[i] += e.DiskBytes
					continue
				}
				if compute[i] != nil {
					t.Fatalf("millisecond %d is metered twice: %s", i, w.l.text(w.now))
				}
				compute[i] = &e.Rate
			}
		}
		for i := range w.now {
			want, have := w.compute[i], compute[i]
			if (want == nil) != (have == nil) || want != nil && *want != *have || w.archive[i] != archive[i] {
				t.Fatalf("millisecond %d: %v, %d is true, the ledger says %v, %d\nfacts %+v\nledger %s",
					i, want, w.archive[i], have, archive[i], w.l.facts, w.l.text(w.now))
			}
		}
		if diff := Verify(w.l.account(), w.l.prices, ms(w.now)); diff != nil {
			t.Fatalf("verify: %q\nfacts %+v\nledger %s", diff, w.l.facts, w.l.text(w.now))
		}
	})
}

// truth is what the true milliseconds of [from, to) cost.
func (w *world) truth(from, to int) *big.Rat {
	type use struct {
		price int
		rate  Rate
		disk  int64
	}
	count := map[use]int64{}
	price := 0
	for i := from; i < to; i++ {
		for price+1 < len(w.l.prices.list) && !w.l.prices.list[price+1].ValidFrom.After(ms(i)) {
			price++
		}
		u := use{price: price, disk: w.archive[i]}
		if r := w.compute[i]; r != nil {
			u.rate = *r
		}
		count[u]++
	}
	sum := new(big.Rat)
	for u, n := range count {
		p := w.l.prices.list[u.price]
		per := func(price *big.Rat, amount, unit, ms int64) {
			x := new(big.Rat).Mul(price, big.NewRat(amount, unit))
			sum.Add(sum, x.Mul(x, big.NewRat(n, ms)))
		}
		per(p.VCPUSecond.Rat(), u.rate.VCPUs, 1, 1000)
		per(p.GiBSecond.Rat(), u.rate.MemoryBytes, 1<<30, 1000)
		per(p.ArchiveGBMonth.Rat(), u.disk, 1e9, 730*3600*1000)
	}
	return sum
}

// B7: the sum of a bill is that of the true milliseconds, exactly, whatever it is from
// and to.
func TestBillIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		from := rapid.IntRange(0, w.now).Draw(t, "from")
		to := rapid.IntRange(from, w.now).Draw(t, "to")
		s, err := Bill(w.entries(), w.l.prices, ms(from), ms(to))
		if err != nil {
			t.Fatal(err)
		}
		if want := w.truth(from, to); s.Total.rat().Cmp(want) != 0 {
			t.Fatalf("%d to %d: the bill is %s, the truth %s", from, to, s.Total.rat(), want)
		}
	})
}

// B4: a budget falls due in the millisecond in which the spending reaches it.
func TestBudgetIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		from := rapid.IntRange(0, w.now).Draw(t, "from")
		target := rapid.IntRange(from, horizon).Draw(t, "the instant")
		limit := decimal.NewFromBigRat(w.truth(from, target), 40) // a little above or below, or just it
		b := Budget{Limit: limit, From: ms(from)}
		at, reached, err := b.Due(w.l.entries, []Meter{w.l.meter}, w.l.prices)
		if err != nil {
			t.Fatal(err)
		}
		if !reached {
			if w.truth(from, horizon).Cmp(limit.Rat()) >= 0 {
				t.Fatalf("%s is not reached, the truth is %s", limit, w.truth(from, horizon).FloatString(30))
			}
			return
		}
		i := int(at.Sub(t0).Milliseconds())
		if i > horizon {
			if w.truth(from, horizon).Cmp(limit.Rat()) >= 0 {
				t.Fatalf("%s is reached at %d only", limit, i)
			}
			return
		}
		if w.truth(from, i).Cmp(limit.Rat()) < 0 || i > from && w.truth(from, i-1).Cmp(limit.Rat()) >= 0 {
			t.Fatalf("%s is reached at %d, where the truth is %s", limit, i, w.truth(from, i).FloatString(30))
		}
	})
}
