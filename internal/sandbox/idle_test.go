package sandbox

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var auto = IdlePolicy{Mode: SleepAuto, Window: 2 * time.Minute, Every: SampleEvery, CPUs: 2}

// samples are n quiet samples, 10 s apart, of a sandbox with an answering guest.
func samples(n int) []Sample {
	var list []Sample
	for i := range n {
		d := time.Duration(i)
		list = append(list, Sample{
			At: at(d * SampleEvery), Generation: 1,
			CPU: d * 300 * time.Millisecond, Network: int64(i) * 5000, // 1.5 % of two, 500 B/s
			Sessions: Seen{Begun: 3}, Commands: &Commands{Running: 2, Foreground: 1}, // a shell at its prompt, a silent server
			Guest: &GuestSample{CPU: d * 10 * time.Millisecond, Network: int64(i) * 100, LastOutput: 77},
		})
	}
	return list
}

func blocker(t *testing.T, r Idleness, name string, next time.Duration) {
	t.Helper()
	if r.Idle || r.Blocker != name || !r.Next.Equal(at(next)) {
		t.Fatalf("idle %v, blocker %s, next after %s; want %s, %s", r.Idle, r.Blocker, r.Next.Sub(epoch), name, next)
	}
}

func TestIdleWindow_Z1(t *testing.T) {
	s := samples(14)
	for n := 1; n < 13; n++ {
		r := Idle(s[:n], auto, s[n-1].At)
		blocker(t, r, IdleSamples, 2*time.Minute)
	}
	for n := 13; n <= 14; n++ {
		r := Idle(s[:n], auto, s[n-1].At.Add(3*time.Second))
		if !r.Idle || !r.Due.Equal(at(2*time.Minute)) || r.Blocker != "" {
			t.Fatalf("after %d samples: %+v", n, r)
		}
	}
	for _, mode := range []SleepMode{SleepManual, SleepNever} {
		p := auto
		p.Mode = mode
		r := Idle(s, p, s[13].At)
		if r.Idle || r.Blocker != IdleMode || !r.Next.IsZero() || len(r.Criteria) != 9 || !r.Criteria[1].OK {
			t.Errorf("sleep mode %s: %+v", mode, r)
		}
	}
	blocker(t, Idle(nil, auto, at(time.Minute)), IdleSamples, 3*time.Minute)
}

// TestIdleCriteria_Z1_Z2_X4 changes one thing in the sixth of 16 quiet samples, or from
// there on, and sees whether it blocks and until when.
func TestIdleCriteria_Z1_Z2_X4(t *testing.T) {
	const long, never = time.Duration(-1), time.Duration(0)
	tests := map[string]struct {
		change func(i int, s *Sample)
		block  string
		quiet  time.Duration // since then; long: not at all; never: all the time
	}{
		"nothing (Z2: reads, lists, scrapes and probes are in no sample)": {func(int, *Sample) {}, "", never},
		"a session, as long as it is there":                               {func(_ int, s *Sample) { s.Sessions.Open = 1 }, IdleSessions, long},
		"a session between two samples":                                   {func(_ int, s *Sample) { s.Sessions.Begun++ }, IdleSessions, 60 * time.Second},
		"a turn":                                                          {func(_ int, s *Sample) { s.Turns.Open = 2 }, IdleTurns, long},
		"a turn between two samples":                                      {func(_ int, s *Sample) { s.Turns.Begun++ }, IdleTurns, 60 * time.Second},
		"an LLM stream":                                                   {func(_ int, s *Sample) { s.Streams.Open = 1 }, IdleStreams, long},
		"a short LLM stream":                                              {func(_ int, s *Sample) { s.Streams.Begun++ }, IdleStreams, 60 * time.Second},
		"a silent foreground command":                                     {func(_ int, s *Sample) { s.Guest.Foreground = 1 }, IdleForeground, long},
		"X4: one that was not started through hutch":                      {func(_ int, s *Sample) { s.Guest.Foreground, s.Commands.Foreground = 9, 0 }, "", never},
		"one that nobody knows the start of":                              {func(_ int, s *Sample) { s.Guest.Foreground, s.Commands = 1, nil }, IdleForeground, long},
		"output":                                                          {func(_ int, s *Sample) { s.Guest.LastOutput = 78 }, IdleOutput, 60 * time.Second},
		"output that is dated back":                                       {func(_ int, s *Sample) { s.Guest.LastOutput = 5 }, IdleOutput, 60 * time.Second},
		"output all the time":                                             {func(i int, s *Sample) { s.Guest.LastOutput += int64(i) }, IdleOutput, long},
		"X4: output of nothing that hutch started":                        {func(i int, s *Sample) { s.Guest.LastOutput += int64(i) * 9; s.Commands = &Commands{} }, IdleOutput, 60 * time.Second},
		"work":                                {func(_ int, s *Sample) { s.CPU += time.Second; s.Guest.CPU += time.Second }, IdleCPU, 60 * time.Second},
		"work just below 2 %":                 {func(_ int, s *Sample) { s.CPU += 99 * time.Millisecond; s.Guest.CPU += time.Second }, "", never},
		"work at 2 %":                         {func(_ int, s *Sample) { s.CPU += 100 * time.Millisecond; s.Guest.CPU += time.Second }, IdleCPU, 60 * time.Second},
		"X4: work that the host does not see": {func(_ int, s *Sample) { s.Guest.CPU += time.Hour }, "", never},
		"work of hutch's agent, which the guest leaves out": {func(_ int, s *Sample) { s.CPU += time.Second }, "", never},
		"traffic":                                           {func(_ int, s *Sample) { s.Network += 1 << 20; s.Guest.Network += 1 << 20 }, IdleNetwork, 60 * time.Second},
		"traffic of 1 KiB/s":                                {func(_ int, s *Sample) { s.Network += 5240; s.Guest.Network += 1 << 20 }, IdleNetwork, 60 * time.Second},
		"traffic just below it":                             {func(_ int, s *Sample) { s.Network += 5239; s.Guest.Network += 1 << 20 }, "", never},
		"hutch's own traffic":                               {func(_ int, s *Sample) { s.Network += 1 << 20 }, "", never},
		"X4: nested guests where there cannot be":           {func(_ int, s *Sample) { s.Guest.Nested = 1 }, "", never},
		"a guest that says nothing: a shell may be at work": {func(_ int, s *Sample) { s.Guest = nil }, IdleForeground, long},
		"a guest that says nothing, and nothing runs":       {func(_ int, s *Sample) { s.Guest, s.Commands = nil, &Commands{} }, IdleOutput, 60 * time.Second},
		"a guest that says nothing, and nothing is known":   {func(_ int, s *Sample) { s.Guest, s.Commands = nil, nil }, IdleForeground, long},
		"a guest that says what cannot be":                  {func(_ int, s *Sample) { s.Guest.Nested = -1 }, IdleForeground, long},
		"X4: the guest's counters go back":                  {func(_ int, s *Sample) { s.Guest.CPU -= 55 * time.Millisecond; s.CPU += time.Second }, IdleCPU, 60 * time.Second},
		"the host's counters go back":                       {func(_ int, s *Sample) { s.CPU -= time.Second }, IdleSamples, 60 * time.Second},
		"the host's bytes go back":                          {func(_ int, s *Sample) { s.Network = 0 }, IdleSamples, 60 * time.Second},
		"the sessions' count goes back":                     {func(_ int, s *Sample) { s.Sessions.Begun = 0 }, IdleSamples, 60 * time.Second},
		"X4: the guest's bytes go back":                     {func(_ int, s *Sample) { s.Guest.Network -= 150; s.Network += 1 << 20 }, IdleNetwork, 60 * time.Second},
		"the turns' count goes back":                        {func(_ int, s *Sample) { s.Turns.Begun = -1 }, IdleSamples, 60 * time.Second},
		"the streams' count goes back":                      {func(_ int, s *Sample) { s.Streams.Begun = -1 }, IdleSamples, 60 * time.Second},
		"a boot":                                            {func(_ int, s *Sample) { s.Generation = 2 }, IdleSamples, 60 * time.Second},
		"missing samples":                                   {func(_ int, s *Sample) { s.At = s.At.Add(SampleEvery) }, IdleSamples, 70 * time.Second},
		"a late sample":                                     {func(_ int, s *Sample) { s.At = s.At.Add(SampleEvery - 1) }, "", never},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := samples(16)
			for i := 6; i < len(s); i++ {
				tt.change(i, &s[i])
			}
			p := auto
			p.Window = 150 * time.Second
			last := s[len(s)-1].At
			r := Idle(s, p, last)
			switch tt.quiet {
			case never:
				if !r.Idle || !r.Due.Equal(at(p.Window)) {
					t.Fatalf("got %+v, want it to be idle", r)
				}
			case long:
				blocker(t, r, tt.block, last.Sub(epoch)+p.Window)
			default:
				blocker(t, r, tt.block, tt.quiet+p.Window)
			}
		})
	}
	p := auto
	p.Nested = true
	s := samples(13)
	s[12].Guest.Nested = 1
	blocker(t, Idle(s, p, s[12].At), IdleNested, 4*time.Minute)
	s[12].Guest = nil
	if r := Idle(s, p, s[12].At); r.Criteria[8].OK {
		t.Error("a guest that may run nested guests and says nothing has none")
	}
}

func TestIdleFromSilence_Z1(t *testing.T) {
	s := samples(13)
	r := Idle(s, auto, s[12].At.Add(20*time.Second-1))
	if !r.Idle {
		t.Errorf("the next sample is late: %+v", r)
	}
	blocker(t, Idle(s, auto, s[12].At.Add(20*time.Second)), IdleSamples, 260*time.Second)
	s[5].Sessions.Open = 1 // long over, and not what stands in the way now
	blocker(t, Idle(s, auto, s[12].At.Add(20*time.Second)), IdleSamples, 260*time.Second)
}

// TestLastLook_Z4 takes one more sample a moment after the last.
func TestLastLook_Z4(t *testing.T) {
	s := samples(13)
	var w Watch
	for _, one := range s {
		w = w.Add(one, auto)
	}
	look := s[12]
	look.At = look.At.Add(50 * time.Millisecond)
	look.CPU += 150 * time.Millisecond // of the look itself
	look.Guest = &GuestSample{CPU: s[12].Guest.CPU, Network: s[12].Guest.Network, LastOutput: 77}
	if r := w.Add(look, auto).Idleness(auto, look.At); !r.Idle || !r.Due.Equal(at(2*time.Minute)) {
		t.Errorf("the look itself keeps it awake: %+v", r)
	}
	busy := look
	busy.Sessions.Begun++
	blocker(t, w.Add(busy, auto).Idleness(auto, look.At), IdleSessions, 240*time.Second+50*time.Millisecond)
	after := w.Add(busy, auto)
	if !reflect.DeepEqual(after.Add(look, auto), after) {
		t.Error("a sample that is not newer takes another's place")
	}
	if r := w.Idleness(auto, look.At); !r.Idle {
		t.Error("Add changes the watch that it was asked of")
	}
}

func TestWhy_Z3(t *testing.T) {
	s := samples(4)
	s[3].CPU, s[3].Guest.CPU = s[3].CPU+5*time.Second, s[3].Guest.CPU+4990*time.Millisecond
	s[2].Sessions.Open = 1
	s[3].Sessions.Open = 1
	r := Idle(s, auto, s[3].At.Add(4*time.Second))
	blocker(t, r, IdleSessions, 150*time.Second)
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{
		`{"name":"samples","reading":4,"limit":20,"unit":"s","ok":true,"since":"2026-03-01T12:00:00Z"}`,
		`{"name":"sessions","reading":1,"limit":1,"unit":"","ok":false}`,
		`{"name":"cpu","reading":25,"limit":2,"unit":"%","ok":false}`,
		`{"name":"network","reading":10,"limit":1024,"unit":"B/s","ok":true,"since":"2026-03-01T12:00:00Z"}`,
		`"idle":false,"blocker":"sessions","next":"2026-03-01T12:02:30Z"`,
	} {
		if !strings.Contains(string(text), part) {
			t.Errorf("%s lacks %s", text, part)
		}
	}
}

// quietBetween says of two samples whether nothing spoke against sleep from the first
// to the second: the contract's sentences one by one, in whole numbers.
func quietBetween(a, b Sample, p IdlePolicy) bool {
	span := b.At.Sub(a.At)
	if span >= 2*p.Every || a.Generation != b.Generation || b.CPU < a.CPU || b.Network < a.Network {
		return false
	}
	for _, s := range [][2]Seen{{a.Sessions, b.Sessions}, {a.Turns, b.Turns}, {a.Streams, b.Streams}} {
		if s[1].Open > 0 || s[1].Begun != s[0].Begun {
			return false
		}
	}
	if span < p.Every {
		span = p.Every
	}
	cpu, bytes := int64(b.CPU-a.CPU), b.Network-a.Network
	if a.Guest != nil && b.Guest != nil {
		if c := int64(b.Guest.CPU - a.Guest.CPU); c >= 0 && c < cpu {
			cpu = c
		}
		if n := b.Guest.Network - a.Guest.Network; n >= 0 && n < bytes {
			bytes = n
		}
	}
	if cpu*100 >= 2*int64(span)*int64(p.CPUs) || bytes*int64(time.Second) >= 1024*int64(span) {
		return false
	}
	started := a.Commands == nil || b.Commands == nil || a.Commands.Running+b.Commands.Running > 0
	if started && (a.Guest == nil || b.Guest == nil || a.Guest.LastOutput != b.Guest.LastOutput) {
		return false
	}
	front := 1
	if b.Commands != nil {
		front = b.Commands.Foreground
	}
	if b.Guest != nil && (b.Commands == nil || b.Guest.Foreground < front) {
		front = b.Guest.Foreground
	}
	nested := p.Nested && (b.Guest == nil || b.Guest.Nested > 0)
	return front == 0 && !nested
}

// slowIdle looks at every pair of samples of every window that may have been full.
func slowIdle(list []Sample, p IdlePolicy, now time.Time) (bool, time.Time) {
	n := len(list)
	if p.Mode != SleepAuto || n == 0 || now.Sub(list[n-1].At) >= 2*p.Every {
		return false, time.Time{}
	}
	for first := range list { // the longest quiet end
		quiet := true
		for i := first + 1; i < n; i++ {
			quiet = quiet && quietBetween(list[i-1], list[i], p)
		}
		if !quiet {
			continue
		}
		// A last sample with something open is not quiet, even as the first of a window.
		if l := list[n-1]; first == n-1 && !quietBetween(l, l, p) {
			return false, time.Time{}
		}
		due := list[first].At.Add(p.Window)
		return !due.After(list[n-1].At), due
	}
	return false, time.Time{}
}

// TestIdle_Z1_X4 compares random histories with the slow oracle.
func TestIdle_Z1_X4(t *testing.T) {
	idle := 0
	lives := func(t *rapid.T) {
		p := IdlePolicy{Mode: rapid.SampledFrom([]SleepMode{SleepAuto, SleepAuto, SleepAuto, SleepManual}).Draw(t, "mode"),
			Window: time.Duration(rapid.IntRange(30, 90).Draw(t, "window")) * time.Second,
			Every:  SampleEvery, CPUs: rapid.IntRange(1, 4).Draw(t, "cpus"), Nested: rapid.Bool().Draw(t, "nested")}
		rarely := func(name string) bool { return rapid.IntRange(0, 40).Draw(t, name) == 40 }
		s := Sample{At: epoch, Generation: 1, CPU: time.Hour, Network: 1 << 30, Commands: &Commands{}, Guest: &GuestSample{CPU: time.Minute, Network: 1 << 20}}
		guest := *s.Guest
		list := []Sample{s}
		for range rapid.IntRange(3, 20).Draw(t, "samples") {
			s.At = s.At.Add(rapid.SampledFrom([]time.Duration{10 * time.Second, 10 * time.Second, 10 * time.Second, 50 * time.Millisecond, 12 * time.Second}).Draw(t, "after"))
			used := time.Duration(rapid.SampledFrom([]int64{0, 10, 100, 199, 200}).Draw(t, "cpu")) * time.Millisecond
			s.CPU, guest.CPU = s.CPU+used, guest.CPU+used
			moved := rapid.SampledFrom([]int64{0, 100, 10_239}).Draw(t, "bytes")
			s.Network, guest.Network = s.Network+moved, guest.Network+moved
			s.Sessions.Open, s.Turns.Open, s.Streams.Open = 0, 0, 0
			commands := Commands{Running: rapid.IntRange(0, 2).Draw(t, "running")}
			guest.Foreground, guest.Nested = 0, 0
			s.Commands = &commands
			befalls := map[string]func(){
				"busy": func() { s.CPU += time.Second; guest.CPU += time.Second }, "host busy": func() { s.CPU += time.Second },
				"traffic": func() { s.Network += 1 << 20; guest.Network += 1 << 20 },
				"session": func() { s.Sessions = Seen{1, s.Sessions.Begun + 1} }, "short session": func() { s.Sessions.Begun++ },
				"turn": func() { s.Turns = Seen{1, s.Turns.Begun + 1} }, "stream": func() { s.Streams.Begun++ },
				"output": func() { guest.LastOutput++ }, "front": func() { commands = Commands{1, 1}; guest.Foreground = 1 },
				"lie": func() { guest.Foreground = 5; guest.CPU += time.Hour }, "back": func() { guest.CPU = 0 },
				"nested": func() { guest.Nested = 1 }, "unknown": func() { s.Commands = nil },
				"boot": func() { s.Generation++ }, "host back": func() { s.CPU = 0 }, "late": func() { s.At = s.At.Add(10 * time.Second) },
			}
			for _, name := range slices.Sorted(maps.Keys(befalls)) {
				if rarely(name) {
					befalls[name]()
				}
			}
			word := guest
			if s.Guest = &word; rarely("silent") {
				s.Guest = nil
			}
			list = append(list, s)
		}
		now := s.At.Add(rapid.SampledFrom([]time.Duration{0, 5 * time.Second, 20 * time.Second}).Draw(t, "now"))
		r := Idle(list, p, now)
		want, due := slowIdle(list, p, now)
		if r.Idle != want || want && !r.Due.Equal(due) {
			t.Fatalf("idle %v, due %s; the oracle says %v, %s", r.Idle, r.Due, want, due)
		}
		if r.Idle {
			idle++
		} else if r.Blocker == "" || p.Mode == SleepAuto && !r.Next.After(list[len(list)-1].At) {
			t.Fatalf("Z3: not idle, and not said why: %+v", r)
		}
		if !r.Idle && p.Mode == SleepAuto && !due.IsZero() && !r.Next.Equal(due) {
			t.Fatalf("Z3: the next decision is said to fall at %s, the oracle says %s", r.Next, due)
		}
	}
	// Some hundred histories may all be busy ones, which would prove too little.
	for range 50 {
		if rapid.Check(t, lives); idle > 0 {
			return
		}
	}
	t.Error("no history was idle")
}
