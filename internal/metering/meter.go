package metering

import (
	"cmp"
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// Meter is what of a sandbox's metering is not in the ledger yet. It is kept with the
// sandbox's row and written in the same transaction as the entries. One of a sandbox
// that nothing happened to yet has only Project and Sandbox.
type Meter struct {
	Project string `json:"project"`
	Sandbox string `json:"sandbox"`
	Entries int64  `json:"entries"` // how many are in the ledger

	// Entered and StoredEntered are the latest ends among them, of Compute and of Archive:
	// no later interval of the kind begins before.
	Entered       time.Time `json:"entered,omitzero"`
	StoredEntered time.Time `json:"stored_entered,omitzero"`

	Reason     Reason    `json:"reason,omitempty"` // why the open interval is metered; "" is not at all
	Since      time.Time `json:"since,omitzero"`   // its beginning
	Rate       Rate      `json:"rate,omitzero"`
	Generation int64     `json:"generation,omitempty"`
	Halts      []Halt    `json:"halts,omitempty"` // what keeps it from being metered further

	StoredSince time.Time `json:"stored_since,omitzero"` // of an archived disk; zero is none
	DiskBytes   int64     `json:"disk_bytes,omitempty"`

	Facts int64  `json:"facts,omitempty"` // how many are under the seal
	Seal  string `json:"seal,omitempty"`  // of those facts and of their entries, see seal
}

// Halt is an instant from which nothing is metered, until it is taken away.
type Halt struct {
	Operation string       `json:"operation"`
	Verb      sandbox.Verb `json:"verb"`
	End       End          `json:"end"`
	At        time.Time    `json:"at"`
	Failed    bool         `json:"failed,omitempty"` // the save failed: paused until a retry or `keep`
}

// compare puts the halt first that counts: the earlier one, and at one instant the one
// whose End is first in the list.
func (h Halt) compare(g Halt) int {
	return cmp.Or(h.At.Compare(g.At), cmp.Compare(slices.Index(Ends, h.End), slices.Index(Ends, g.End)))
}

// Paused says since when the sandbox is not metered although it runs or sleeps, and why.
func (m Meter) Paused() (Halt, bool) {
	if m.Reason == "" {
		return Halt{}, false
	}
	return m.earliest()
}

// Metering says whether something is metered, or may yet be: a boot, or what is paused.
func (m Meter) Metering() bool { return m.Reason != "" || !m.StoredSince.IsZero() }

// expects lists in which reasons a fact can happen; what is not in it always can.
var expects = map[FactKind][]Reason{
	Assigned:  {""},
	Unstarted: {Starting},
	Ready:     {Starting},
	Kept:      {Running, Sleeping},
	Slept:     {Running},
	Woken:     {Sleeping},
	Rebooted:  {Running},
	Archived:  {""},
	Found:     {""},
}

// Next gives the meter after a fact, and the entries that the fact completes. An error
// is Internal: the fact lacks something or cannot happen now; the meter is unchanged and
// the caller may go on without the fact.
func (m Meter) Next(f Fact, prices Prices) (Meter, []Entry, error) {
	if err := f.valid(); err != nil {
		return m, nil, err
	}
	if len(prices.list) == 0 {
		return m, nil, fault.New(fault.Internal, "the fact %s of %s cannot be entered: there are no prices", f.Kind, m.Sandbox).Because("prices")
	}
	if in, listed := expects[f.Kind]; listed && !slices.Contains(in, m.Reason) {
		return m, nil, fault.New(fault.Internal, "the fact %s cannot be while the meter of %s says %q", f.Kind, m.Sandbox, m.Reason).Because("fact")
	}
	if f.Kind == Archived && !m.StoredSince.IsZero() {
		return m, nil, fault.New(fault.Internal, "the fact archived cannot be: %s is in cold storage already", m.Sandbox).Because("fact")
	}
	if _, deleted := m.deletion(); deleted && f.Kind == Assigned {
		return m, nil, fault.New(fault.Internal, "the fact assigned cannot be: the deletion of %s was accepted", m.Sandbox).Because("fact")
	}
	f.At = instant(f.At)
	t := turn{m: m, f: f, prices: prices}
	t.m.Halts = slices.Clone(m.Halts)
	t.apply()
	t.m.Facts, t.m.Seal = m.Facts+1, seal(m.Seal, f, t.entries)
	return t.m, t.entries, nil
}

// turn is one call of Next at work.
type turn struct {
	m       Meter
	f       Fact
	prices  Prices
	entries []Entry
}

func (t *turn) apply() {
	f := t.f
	switch f.Kind {
	case Assigned, Found:
		t.m.Reason, t.m.Since, t.m.Rate = Starting, latest(f.At, t.m.Entered), f.Rate
		if f.Kind == Found {
			t.m.Reason, t.m.Generation = f.Reason, f.Generation
		}
	case Unstarted:
		t.off()
	case Ready:
		t.ready()
	case Halted:
		t.halt(Halt{Operation: f.Operation, Verb: f.Verb, End: f.End, At: f.At})
	case Refused:
		t.drop(pendingOf(f.Operation))
	case Released:
		if slices.ContainsFunc(t.m.Halts, pendingOf(f.Operation)) {
			if t.m.Reason == Running || t.m.Reason == Sleeping {
				t.cut(t.m.Reason, "")
			}
			t.drop(pendingOf(f.Operation))
		}
	case SaveFailed:
		t.failed()
	case Kept:
		if slices.ContainsFunc(t.m.Halts, func(h Halt) bool { return h.Failed }) {
			t.cut(t.m.Reason, "")
			t.drop(func(h Halt) bool { return h.Failed })
		}
	case Slept:
		t.cut(Sleeping, BySleep)
		t.drop(pendingOf(f.Operation))
		t.drop(func(h Halt) bool { return h.Failed && h.Verb == sandbox.Sleep })
	case Woken:
		t.cut(Running, ByWake)
		t.drop(func(h Halt) bool { return h.Failed })
		t.m.Generation = f.Generation
	case Rebooted:
		// While something halts it nothing is entered: the halt may yet be taken away as if
		// it had never been.
		if len(t.m.Halts) == 0 {
			t.cut(Running, ByReboot)
		}
		t.m.Generation = f.Generation
	case Ended:
		t.ended()
	case Archived:
		t.m.StoredSince, t.m.DiskBytes = latest(f.At, t.m.StoredEntered), f.DiskBytes
	}
}

// ready ends a boot. It ends the time in cold storage too, and the one does not wait for
// the other: they are of two kinds.
func (t *turn) ready() {
	t.unstore(ByReady)
	t.m.Generation = t.f.Generation
	if d, ok := t.m.deletion(); ok && !d.At.After(t.at()) {
		t.m.Since = t.at() // deleted before it was ready: it costs nothing
	}
	t.cut(Running, ByReady)
}

// ended puts the meter off. A deletion that was accepted stands until it is done.
func (t *turn) ended() {
	if t.m.Reason != "" && t.m.Reason != Starting {
		t.cut("", t.f.End)
	}
	if t.f.End == ByDelete {
		t.unstore(ByDelete)
		t.m.Halts = nil
	}
	t.off()
}

func (t *turn) off() {
	t.m.Reason, t.m.Since, t.m.Rate = "", time.Time{}, Rate{}
	t.drop(func(h Halt) bool { return h.Verb != sandbox.Delete })
}

// at is the fact's instant, which never lies before what was entered.
func (t *turn) at() time.Time { return latest(t.f.At, t.m.Since) }

// cut enters what was metered until the fact, or until the first halt before it, and
// opens the next interval at the fact. end is why, unless a halt came first; "" leaves
// it to the halt in any case.
func (t *turn) cut(next Reason, end End) {
	at := t.at()
	to := at
	if h, ok := t.m.earliest(); ok && (end == "" || !h.At.After(at)) {
		end = h.End
		if h.At.Before(at) {
			to = h.At
		}
	}
	t.enter(Entry{Reason: t.m.Reason, End: end, From: t.m.Since, To: to, Rate: t.m.Rate, Generation: t.m.Generation})
	t.m.Reason, t.m.Since = next, at
}

// unstore enters the time in cold storage, where there was any.
func (t *turn) unstore(end End) {
	if t.m.StoredSince.IsZero() {
		return
	}
	to := t.f.At
	if d, ok := t.m.deletion(); ok && d.At.Before(to) {
		to, end = d.At, d.End
	}
	t.enter(Entry{Reason: Stored, End: end, From: t.m.StoredSince, To: to, DiskBytes: t.m.DiskBytes, Generation: t.m.Generation})
	t.m.StoredSince, t.m.DiskBytes = time.Time{}, 0
}

// enter appends an interval to the ledger, split where the price changes. An empty one
// leaves no trace.
func (t *turn) enter(e Entry) {
	for _, piece := range t.m.pieces(e, t.prices) {
		t.m.Entries++
		if piece.Kind == Archive {
			t.m.StoredEntered = piece.To
		} else {
			t.m.Entered = piece.To
		}
		piece.N, piece.Event = t.m.Entries, t.f.Event
		t.entries = append(t.entries, piece)
	}
}

// pieces splits an interval where the price changes and fills in what every entry has.
func (m Meter) pieces(e Entry, prices Prices) []Entry {
	if !e.To.After(e.From) {
		return nil
	}
	e.Project, e.Sandbox, e.Kind = m.Project, m.Sandbox, e.Reason.kind()
	var out []Entry
	for _, change := range prices.changes(e.From, e.To) {
		before := e
		before.To, before.End = change, ByPrice
		out = append(out, before)
		e.From = change
	}
	out = append(out, e)
	for i := range out {
		p, _ := prices.At(out[i].From)
		out[i].Price = p.Version
	}
	return out
}

// halt adds a halt, or, where the same stands already, makes it the earlier of both: what
// is retried for days does not fill the row.
func (t *turn) halt(h Halt) {
	for i, old := range t.m.Halts {
		deletions := h.Verb == sandbox.Delete && old.Verb == sandbox.Delete
		if deletions || old.Verb == h.Verb && old.Failed == h.Failed && (h.Failed || old.Operation == h.Operation) {
			if h.compare(old) < 0 {
				t.m.Halts[i] = h
			}
			return
		}
	}
	t.m.Halts = append(t.m.Halts, h)
}

// failed turns what an operation halted into a pause that the operation's end does not end.
func (t *turn) failed() {
	pending := pendingOf(t.f.Operation)
	for _, h := range slices.Clone(t.m.Halts) {
		if pending(h) {
			h.Failed = true
			t.halt(h)
		}
	}
	t.drop(pending)
}

// pendingOf chooses what an operation halts while it runs. A deletion is not among it.
func pendingOf(operation string) func(Halt) bool {
	return func(h Halt) bool { return h.Operation == operation && !h.Failed && h.Verb != sandbox.Delete }
}

func (t *turn) drop(which func(Halt) bool) {
	t.m.Halts = slices.DeleteFunc(t.m.Halts, which)
	if len(t.m.Halts) == 0 {
		t.m.Halts = nil
	}
}

// earliest is the halt that counts.
func (m Meter) earliest() (Halt, bool) {
	if len(m.Halts) == 0 {
		return Halt{}, false
	}
	return slices.MinFunc(m.Halts, Halt.compare), true
}

// deletion is the accepted deletion.
func (m Meter) deletion() (Halt, bool) {
	i := slices.IndexFunc(m.Halts, func(h Halt) bool { return h.Verb == sandbox.Delete })
	if i < 0 {
		return Halt{}, false
	}
	return m.Halts[i], true
}

// Open gives what is metered and not in the ledger yet, up to an instant: entries
// without a number and an event, for bills of the present. A boot that is not ready is
// not among them (B1).
func (m Meter) Open(to time.Time, prices Prices) []Entry {
	var out []Entry
	for _, e := range m.open() {
		if e.To.IsZero() || e.To.After(to) {
			e.To = instant(to)
		}
		out = append(out, m.pieces(e, prices)...)
	}
	return out
}

// open gives the open intervals; one whose end is not known has a zero To.
func (m Meter) open() []Entry {
	var out []Entry
	if m.Reason == Running || m.Reason == Sleeping {
		e := Entry{Kind: Compute, Reason: m.Reason, End: StillOpen, From: m.Since, Rate: m.Rate, Generation: m.Generation}
		if h, ok := m.earliest(); ok {
			e.To = latest(h.At, m.Since)
		}
		out = append(out, e)
	}
	if !m.StoredSince.IsZero() {
		e := Entry{Kind: Archive, Reason: Stored, End: StillOpen, From: m.StoredSince, DiskBytes: m.DiskBytes, Generation: m.Generation}
		if d, ok := m.deletion(); ok {
			e.To = latest(d.At, m.StoredSince)
		}
		out = append(out, e)
	}
	return out
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
