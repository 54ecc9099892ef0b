package sandbox

import "time"

// Reading is one look at a machine's two clocks at one moment.
type Reading struct {
	Wall time.Time     // CLOCK_REALTIME: anyone may set it to anything
	Up   time.Duration // CLOCK_BOOTTIME: since the machine's boot, suspension included; never set (clock_gettime(2))
	Boot string        // names that boot
}

// Clock is host time: the time in which a host keeps its timers, dates its reports and
// has its sandboxes metered. It begins as the wall clock and passes at the true rate
// from then on: a step of the wall clock, in either direction and of any size, does not
// move it (A7). It is plain data. It is kept on the host's disk, anew after each step
// and once a minute, so that it goes on over a restart of the agent and of the machine.
//
// While the machine stays up, CLOCK_BOOTTIME alone tells what has passed. Over a reboot
// only the wall clock can. It is believed unless it is refuted: since the last reading
// of the earlier boot at least the present uptime has passed. A wall clock that says
// less (a dead battery, the time before the first NTP answer) is wrong; host time then
// counts the uptime only, and takes the rest when the wall clock has become possible.
// What cannot be told: a wall clock set wrongly forward while no agent ran to see it
// and the machine was rebooted. Timers then fire as if that time had passed.
type Clock struct {
	Now  time.Time     `json:"now"`  // host time at the last reading
	Wall time.Time     `json:"wall"` // wall clock at the last reading
	Up   time.Duration `json:"up_ns"`
	Boot string        `json:"boot"`
	// Doubt is the last moment of an earlier boot, while the wall clock of this one
	// cannot be right.
	Doubt *Moment `json:"doubt,omitempty"`
}

// Moment is host time and the wall clock at one time.
type Moment struct {
	Now  time.Time `json:"now"`
	Wall time.Time `json:"wall"`
}

// NewClock begins host time where none has been kept.
func NewClock(r Reading) Clock {
	return Clock{Now: bare(r.Wall), Wall: bare(r.Wall), Up: r.Up, Boot: r.Boot}
}

// bare takes off Go's own monotonic reading, which no journal keeps.
func bare(t time.Time) time.Time { return t.Round(0).UTC() }

// Read takes a reading in. It gives the clock after it, and by how much the wall clock
// was set since the reading before, within what two looks at two clocks lie apart. A
// reading that is older than the last changes nothing.
func (c Clock) Read(r Reading) (Clock, time.Duration) {
	wall := bare(r.Wall)
	if r.Boot != c.Boot {
		return c.reboot(r, wall), 0
	}
	passed := r.Up - c.Up
	if passed < 0 {
		return c, 0
	}
	step := wall.Sub(c.Wall) - passed
	c.Now, c.Wall, c.Up = c.Now.Add(passed), wall, r.Up
	if d := c.Doubt; d != nil && wall.Sub(d.Wall) >= r.Up {
		c.Now, c.Doubt = later(c.Now, d.Now.Add(wall.Sub(d.Wall))), nil
	}
	return c, step
}

func (c Clock) reboot(r Reading, wall time.Time) Clock {
	last := c.Doubt
	if last == nil {
		last = &Moment{Now: c.Now, Wall: c.Wall}
	} else {
		// The boot in doubt is over and its true length before the first reading is
		// unknown: what its uptime has shown is kept.
		last = &Moment{Now: c.Now, Wall: last.Wall.Add(c.Now.Sub(last.Now))}
	}
	next := Clock{Wall: wall, Up: r.Up, Boot: r.Boot}
	passed := wall.Sub(last.Wall)
	if passed < r.Up {
		passed, next.Doubt = r.Up, last
	}
	next.Now = last.Now.Add(passed)
	return next
}

// Ahead is by how much host time is ahead of the wall clock: the sum of the wall
// clock's steps back, less those forward.
func (c Clock) Ahead() time.Duration { return c.Now.Sub(c.Wall) }

// Shown is an instant of host time as the wall clock of the last reading would have
// called it, for people.
func (c Clock) Shown(t time.Time) time.Time { return t.Add(-c.Ahead()) }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
