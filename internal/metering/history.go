package metering

import (
	"math"
	"slices"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// This file works out from all facts of a sandbox at once what its ledger has to say. It
// shares no code with Meter: it looks at the facts with hindsight, finds for each halt
// from which fact to which it stood, and cuts lives into spans.

// open is the index of what has not come.
const open = math.MaxInt

// span is one interval that has to be metered.
type span struct {
	reason    Reason
	end       End
	from, to  int64 // Unix ms
	rate      Rate
	disk      int64
	oldest    int64 // generations that it may carry
	newest    int64
	by        int // index of the fact that enters it; open for what is not entered yet
	openEnded bool
}

// standing is a halt with the facts between which it counts: it bears on a fact with an
// index above since and up to until.
type standing struct {
	since, until int
	at           int64
	end          End
	verb         sandbox.Verb
	op           string
}

func (s standing) bears(i int) bool { return s.since < i && i <= s.until }

// history is the facts of one sandbox, in their order.
type history struct {
	facts []Fact
	halts []standing
}

// newHistory finds how long each halt stood. Instants are cut to the millisecond.
func newHistory(facts []Fact) history {
	h := history{facts: facts}
	for i, f := range facts {
		if f.Kind == Halted {
			h.halts = append(h.halts, standing{since: i, until: h.lifted(i), at: f.At.UnixMilli(), end: f.End, verb: f.Verb, op: f.Operation})
		}
	}
	return h
}

// lifted finds the fact that takes a halt away.
func (h history) lifted(i int) int {
	halt, failed := h.facts[i], false
	for j := i + 1; j < len(h.facts); j++ {
		f := h.facts[j]
		same := f.Operation == halt.Operation
		if halt.Verb == sandbox.Delete { // nothing else takes it away
			if f.Kind == Ended && f.End == ByDelete {
				return j
			}
			continue
		}
		switch f.Kind {
		case SaveFailed:
			failed = failed || same
		case Refused, Released:
			if same && !failed {
				return j
			}
		case Slept:
			if same && !failed || failed && halt.Verb == sandbox.Sleep {
				return j
			}
		case Kept, Woken:
			if failed {
				return j
			}
		case Ended, Unstarted:
			return j
		}
	}
	return open
}

// halted gives the earliest halt that bears on fact i, of several the one whose End is
// first in the list; nil for none.
func (h history) halted(i int, verbs ...sandbox.Verb) *standing {
	var first *standing
	for _, end := range haltEnds {
		for k := range h.halts {
			s := &h.halts[k]
			if s.end == end && s.bears(i) && (len(verbs) == 0 || slices.Contains(verbs, s.verb)) && (first == nil || s.at < first.at) {
				first = s
			}
		}
	}
	return first
}

// lifts says whether fact i is the one that takes a halt of its kind away.
func (h history) lifts(i int) bool {
	return slices.ContainsFunc(h.halts, func(s standing) bool { return s.until == i })
}

// spans gives what is metered, compute first; what is open ends at now.
func (h history) spans(now int64) []span {
	return append(h.compute(now), h.archive(now)...)
}

func (h history) compute(now int64) []span {
	var out []span
	done := int64(0) // the end of the last one
	for i := 0; i < len(h.facts); i++ {
		if k := h.facts[i].Kind; k != Assigned && k != Found {
			continue
		}
		end := i + 1
		for end < len(h.facts) && h.facts[end].Kind != Ended && h.facts[end].Kind != Unstarted {
			end++
		}
		for _, s := range h.life(i, end, done, now) {
			out, done = append(out, s), s.to
		}
		i = end
	}
	return out
}

// life cuts one life, from its boot (or its being found) to its end, into spans.
func (h history) life(begin, end int, notBefore, now int64) []span {
	first := h.facts[begin]
	cur := span{reason: Starting, from: max(first.At.UnixMilli(), notBefore), rate: first.Rate}
	if first.Kind == Found {
		cur.reason, cur.oldest, cur.newest = first.Reason, first.Generation, first.Generation
	}
	var out []span
	closing := func(i int, at int64, why End, next Reason) {
		at = max(at, cur.from)
		s := cur
		s.to, s.end, s.by = at, why, i
		bar := h.halted(i)
		if bar != nil && (bar.at <= at || why == "") {
			s.to, s.end = max(min(bar.at, at), s.from), bar.end
		}
		if s.reason == Starting {
			if d := h.halted(i, sandbox.Delete); d != nil && d.at <= at {
				s.to = s.from
			}
		}
		if s.to > s.from {
			out = append(out, s)
		}
		cur.reason, cur.from = next, at
	}
	for i := begin + 1; i < end; i++ {
		f, at := h.facts[i], h.facts[i].At.UnixMilli()
		switch f.Kind {
		case Ready:
			cur.oldest, cur.newest = f.Generation, f.Generation
			closing(i, at, ByReady, Running)
		case Slept:
			closing(i, at, BySleep, Sleeping)
			cur.oldest = cur.newest
		case Woken:
			closing(i, at, ByWake, Running)
			cur.oldest, cur.newest = f.Generation, f.Generation
		case Rebooted:
			if h.halted(i) == nil {
				closing(i, at, ByReboot, Running)
				cur.oldest = f.Generation
			}
			cur.newest = f.Generation
		case Released, Kept:
			if cur.reason != Starting && h.lifts(i) {
				closing(i, at, "", cur.reason)
			}
		}
	}
	switch {
	case cur.reason == Starting: // not ready: costs nothing
	case end < len(h.facts):
		closing(end, h.facts[end].At.UnixMilli(), h.facts[end].End, "")
	default:
		cur.openEnded = true
		closing(open, now, StillOpen, "")
	}
	return out
}

func (h history) archive(now int64) []span {
	var out []span
	done := int64(0)
	for i, f := range h.facts {
		if f.Kind != Archived {
			continue
		}
		s := span{reason: Stored, from: max(f.At.UnixMilli(), done), to: now, end: StillOpen, disk: f.DiskBytes, newest: math.MaxInt64, by: open, openEnded: true}
		for j := i + 1; j < len(h.facts) && s.openEnded; j++ {
			if g := h.facts[j]; g.Kind == Ready || g.Kind == Ended && g.End == ByDelete {
				s.by, s.to, s.end, s.openEnded = j, g.At.UnixMilli(), ByReady, false
				if g.Kind == Ended {
					s.end = ByDelete
				}
			}
		}
		if d := h.halted(s.by, sandbox.Delete); d != nil && d.at < s.to {
			s.to, s.end = d.at, d.end
		}
		if s.to > s.from {
			out, done = append(out, s), s.to
		}
	}
	return out
}
