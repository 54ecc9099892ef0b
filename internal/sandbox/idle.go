package sandbox

import "time"

// Whether a sandbox is idle has two witnesses, and X4 says what each is worth: what is
// said inside can only shorten, what the host and the control plane see themselves can
// extend. So the host's view of each criterion is a ceiling, and the guest's word
// counts where it is lower:
//
//   - cpu: the host sees the cgroup, which holds the kernel of the sandbox and hutch's
//     agent too. The guest's count leaves the agent out. The lower rate counts.
//   - network: the same with the bytes on the host's interface.
//   - sessions, turns, llm_streams: the host and the control plane carry them. The guest
//     is not asked.
//   - output, foreground: only inside is it seen what a command does, but none counts
//     that was not started through hutch. The guest says how many of those are in
//     front (a shell at its prompt is not) and when one wrote.
//   - nested: only where the sandbox was given virtualisation, and there a lie gains
//     nothing, as a sleep would be refused (Z9).
//
// A guest that says nothing, or whose counters go back (it lies, or its agent began
// anew), has no word: the ceiling counts. One that tells too little sleeps sooner, and
// harms itself only. None moves a deadline: the longest that any lie about idleness
// buys is what the auto-stop allows. Where the host does not know what it started
// (its agent began anew) the guest's word stands alone.
//
// Sleeping is never decided from silence: where a sample is missing, the host's own
// counters go back, or the sandbox booted, the window begins anew (Z1).

// Sample is one look at a running sandbox, every 10 s.
type Sample struct {
	At         time.Time // host time
	Generation int64

	// What the host and the control plane see. Counters count from the boot.
	CPU      time.Duration // of the sandbox's cgroup
	Network  int64         // bytes in and out
	Sessions Seen          // attached SSH, desktop and exec sessions
	Turns    Seen          // harness turns, queued or running
	Streams  Seen          // LLM streams through the proxy
	Commands *Commands     // started through hutch; nil is not known

	Guest *GuestSample // nil: it did not answer in time
}

// Seen is how many of a kind there are, and how many there have been. The second
// number shows those that began and ended between two samples.
type Seen struct {
	Open  int
	Begun int64
}

// Commands are those that were started through hutch since the boot and of which the
// guest has not said that they have ended.
type Commands struct {
	Running    int // detached ones included
	Foreground int // those that are not detached
}

// Below gives what is known of them after the guest has said how many run. It can only
// make them fewer; where nothing was known, its word stands alone.
func (c *Commands) Below(running, foreground int) *Commands {
	if running < 0 || foreground < 0 {
		return c
	}
	said := Commands{Running: running, Foreground: min(foreground, running)}
	if c != nil {
		said = Commands{Running: min(c.Running, said.Running), Foreground: min(c.Foreground, said.Foreground)}
	}
	return &said
}

// GuestSample is what the guest agent says. Counters count from the boot, the agent's
// own work left out.
type GuestSample struct {
	CPU        time.Duration
	Network    int64
	Foreground int
	LastOutput int64 // changes whenever a command writes; the guest's clock is not believed
	Nested     int   // virtual machines that run inside
}

// credible says whether the guest's word can be true at all.
func (g *GuestSample) credible() bool {
	return g != nil && g.CPU >= 0 && g.Network >= 0 && g.Foreground >= 0 && g.Nested >= 0
}

// IdlePolicy is what idleness is measured by.
type IdlePolicy struct {
	Mode   SleepMode
	Window time.Duration // Policy.IdleAfter
	Every  time.Duration // between two samples
	CPUs   int
	Nested bool // the sandbox was given virtualisation
}

// SampleEvery is the time between two samples (Z1).
const SampleEvery = 10 * time.Second

// The limits of Z1: readings have to be below them.
const (
	idleCPU     = 2.0    // per cent of the sandbox's vCPUs
	idleNetwork = 1024.0 // bytes a second
)

// Criterion is one of the conditions that all have to hold.
type Criterion struct {
	Name    string    `json:"name"`
	Reading float64   `json:"reading"`
	Limit   float64   `json:"limit"` // the reading has to be below it
	Unit    string    `json:"unit"`
	OK      bool      `json:"ok"`
	Since   time.Time `json:"since,omitzero"` // it has held since then; zero where it does not
}

// The names of the criteria, in the order in which they are shown. "samples" is that
// there are readings; its own is how old the last one is.
const (
	IdleSamples    = "samples"
	IdleTurns      = "turns"
	IdleStreams    = "llm_streams"
	IdleSessions   = "sessions"
	IdleForeground = "foreground"
	IdleOutput     = "output"
	IdleCPU        = "cpu"
	IdleNetwork    = "network"
	IdleNested     = "nested"
)

// The blockers that are no readings.
const (
	IdleMode      = "sleep_mode" // the sleep mode is not auto
	IdleOperation = "operation"  // one is at work on it
	IdleHeld      = "held"       // the host's disk pool is full, so that nothing in it runs
	IdleState     = "state"      // it does not run
)

// Idleness is what `hutch why` shows (Z3).
type Idleness struct {
	Idle     bool        `json:"idle"`              // all held in every sample of the window, and the mode is auto
	Due      time.Time   `json:"due,omitzero"`      // of Idle: when the window was full
	Blocker  string      `json:"blocker,omitempty"` // what stands in the way, or did last
	Next     time.Time   `json:"next,omitzero"`     // when it can be idle at the earliest, if nothing happens; zero is not by itself
	Criteria []Criterion `json:"criteria"`
}

// Watch sums up the samples of one sandbox, the newest last, in a size that does not
// grow with the window. The zero Watch has seen none. It is not kept over a restart
// of the agent: then samples are missing.
type Watch struct {
	last     Sample
	readings []Criterion // in the order of show; Since is the last sample that it did not hold in
}

// show is the order of the readings.
var show = []Criterion{
	{Name: IdleSamples, Unit: "s"}, {Name: IdleTurns, Limit: 1}, {Name: IdleStreams, Limit: 1},
	{Name: IdleSessions, Limit: 1}, {Name: IdleForeground, Limit: 1}, {Name: IdleOutput, Limit: 1},
	{Name: IdleCPU, Limit: idleCPU, Unit: "%"}, {Name: IdleNetwork, Limit: idleNetwork, Unit: "B/s"}, {Name: IdleNested, Limit: 1},
}

// Add gives the watch after a sample. One that is not newer than the last changes
// nothing.
func (w Watch) Add(s Sample, p IdlePolicy) Watch {
	first := w.readings == nil
	if !first && !s.At.After(w.last.At) {
		return w
	}
	broken := first || w.breaks(s, p)
	before := w.readings
	w.readings = make([]Criterion, len(show))
	for i, c := range show {
		c.Reading = reading(c.Name, w.last, s, p, broken)
		c.OK = c.Name == IdleSamples || c.Reading < c.Limit
		c.Since = s.At
		if !broken && c.OK {
			c.Since = before[i].Since
		}
		w.readings[i] = c
	}
	w.last = s
	return w
}

// Asks says whether the guest's word could change what a sample comes to that has none:
// it can only lower readings. A sandbox in which nothing happens need not be woken up to
// say so.
func (w Watch) Asks(s Sample, p IdlePolicy) bool {
	s.Guest = nil
	for _, c := range w.Add(s, p).readings {
		if !c.OK {
			return true
		}
	}
	return false
}

// Over gives the watch after a time in which hutch itself was at work on the sandbox, as
// in a save that failed: what that took is not held against it, so that what fell due
// stays due (Z10). Uses that began meanwhile are seen with the next sample.
func (w Watch) Over(s Sample) Watch {
	if w.readings == nil || s.Generation != w.last.Generation || s.At.Before(w.last.At) {
		return w
	}
	s.Sessions, s.Turns, s.Streams = w.last.Sessions, w.last.Turns, w.last.Streams
	w.last = s
	return w
}

// breaks says whether nothing is known of the time between the last sample and s.
func (w Watch) breaks(s Sample, p IdlePolicy) bool {
	l := w.last
	return s.At.Sub(l.At) >= 2*p.Every || s.Generation != l.Generation || s.CPU < l.CPU || s.Network < l.Network ||
		s.Sessions.Begun < l.Sessions.Begun || s.Turns.Begun < l.Turns.Begun || s.Streams.Begun < l.Streams.Begun
}

// reading is what a criterion showed from the sample before to s. Over a break only
// what is open now is known.
func reading(name string, before, s Sample, p IdlePolicy, broken bool) float64 {
	switch name {
	case IdleTurns:
		return seen(before.Turns, s.Turns, broken)
	case IdleStreams:
		return seen(before.Streams, s.Streams, broken)
	case IdleSessions:
		return seen(before.Sessions, s.Sessions, broken)
	case IdleForeground:
		return foreground(s)
	case IdleNested:
		switch {
		case !p.Nested:
			return 0
		case s.Guest.credible():
			return float64(s.Guest.Nested)
		}
		return 1
	}
	if broken {
		return 0
	}
	// A last look (Z4) comes a moment after a sample. It is given what a whole interval
	// may use, or it would find nothing but the cost of its own reading.
	span := float64(max(s.At.Sub(before.At), p.Every))
	word := before.Guest.credible() && s.Guest.credible()
	switch name {
	case IdleOutput:
		return output(before, s, word)
	case IdleCPU:
		used := s.CPU - before.CPU
		if word && s.Guest.CPU >= before.Guest.CPU {
			used = min(used, s.Guest.CPU-before.Guest.CPU)
		}
		return 100 * float64(used) / (span * float64(max(p.CPUs, 1)))
	case IdleNetwork:
		moved := s.Network - before.Network
		if word && s.Guest.Network >= before.Guest.Network {
			moved = min(moved, s.Guest.Network-before.Guest.Network)
		}
		return float64(moved) * float64(time.Second) / span
	}
	return 0
}

func seen(before, now Seen, broken bool) float64 {
	if broken {
		return float64(now.Open)
	}
	return float64(max(int64(now.Open), now.Begun-before.Begun))
}

func foreground(s Sample) float64 {
	switch word := s.Guest.credible(); {
	case word && s.Commands != nil:
		return float64(min(s.Guest.Foreground, s.Commands.Foreground))
	case word:
		return float64(s.Guest.Foreground)
	case s.Commands != nil:
		return float64(s.Commands.Foreground)
	}
	return 1 // nobody knows
}

// output is 1 where a command that was started through hutch wrote since the sample
// before, or may have. A command that ended in between may have written before it did.
func output(before, s Sample, word bool) float64 {
	running := func(c *Commands) bool { return c == nil || c.Running > 0 }
	if !running(before.Commands) && !running(s.Commands) || word && s.Guest.LastOutput == before.Guest.LastOutput {
		return 0
	}
	return 1
}

// Idleness decides and explains.
func (w Watch) Idleness(p IdlePolicy, now time.Time) Idleness {
	out := Idleness{Criteria: make([]Criterion, len(show))}
	if w.readings == nil {
		copy(out.Criteria, show)
		out.Blocker = IdleSamples
		return out.under(p, now.Add(p.Window))
	}
	copy(out.Criteria, w.readings)
	age := now.Sub(w.last.At)
	samples := &out.Criteria[0]
	samples.Reading, samples.Limit = age.Seconds(), (2 * p.Every).Seconds()
	samples.OK = age < 2*p.Every

	quiet, holds, clear := time.Time{}, true, w.last.At
	for i := range out.Criteria {
		c := &out.Criteria[i]
		switch {
		case holds && !c.OK:
			holds, out.Blocker = false, c.Name
		case holds && c.Since.After(quiet):
			out.Blocker = c.Name
		}
		quiet = later(quiet, c.Since)
		if !c.OK {
			c.Since = time.Time{}
		}
	}
	if !samples.OK {
		clear = now
	}
	if !holds {
		return out.under(p, clear.Add(p.Window))
	}
	full := quiet.Add(p.Window)
	if p.Mode == SleepAuto && !w.last.At.Before(full) {
		return Idleness{Idle: true, Due: full, Criteria: out.Criteria}
	}
	return out.under(p, full)
}

// under is a decision that is not to sleep, under the sleep mode.
func (r Idleness) under(p IdlePolicy, next time.Time) Idleness {
	if p.Mode != SleepAuto {
		r.Blocker, r.Next = IdleMode, time.Time{}
		return r
	}
	r.Next = next
	return r
}

// Idle decides from samples, the oldest first.
func Idle(samples []Sample, p IdlePolicy, now time.Time) Idleness {
	var w Watch
	for _, s := range samples {
		w = w.Add(s, p)
	}
	return w.Idleness(p, now)
}

// DueIdle decides what idleness asks for beside the timers. A Run of it goes before
// what Due says: it fell due first. It is to be asked again, with one more sample,
// while nothing else can reach the sandbox, directly before it is acted on (Z4).
func (t Timers) DueIdle(r Idleness, now time.Time) Verdict {
	at, until := instant(later(r.Due, t.Changed)), t.Retries[CauseIdle].Until
	switch {
	case t.State != Ready:
		return Verdict{Act: Wait}
	case !r.Idle:
		return Verdict{Act: Wait, Next: r.Next}
	case !t.Deadline.IsZero() && !t.Deadline.After(at):
		return Verdict{Act: Wait}
	case at.After(now):
		return Verdict{Act: Wait, Next: at}
	case until.After(now):
		return Verdict{Act: Wait, Next: until}
	}
	return t.run(due{cause: CauseIdle, at: at, verb: t.Policy.OnIdle})
}
