package sandbox

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// machine is a host whose true time is known, with a wall clock that is set at will.
type machine struct {
	real time.Duration // true time since epoch
	set  time.Duration // by how much the wall clock is off
	up   time.Duration
	boot int
}

func (m *machine) pass(d time.Duration)   { m.real += d; m.up += d }
func (m *machine) reboot(d time.Duration) { m.real += d; m.up, m.boot = 0, m.boot+1 }
func (m *machine) read() Reading {
	return Reading{Wall: epoch.Add(m.real + m.set), Up: m.up, Boot: fmt.Sprint(m.boot)}
}

// through is a value after it has been on the disk.
func through[T any](t interface{ Fatal(...any) }, v T) T {
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var out T
	if err := json.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestClock_A7 sets the wall clock to and fro by days, restarts the agent and the
// machine, and finds that host time has passed as true time has.
func TestClock_A7(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{up: time.Hour}
		c := NewClock(m.read())
		stepped := time.Duration(0)
		duration := func(name string, most time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(0, int64(most)).Draw(t, name))
		}
		read := func() {
			var step time.Duration
			if c, step = c.Read(m.read()); step != stepped {
				t.Fatalf("a step of %s is seen as %s", stepped, step)
			}
			stepped = 0
		}
		t.Repeat(map[string]func(*rapid.T){
			"pass": func(*rapid.T) { m.pass(duration("passes", 3*day)) },
			"step": func(*rapid.T) {
				d := time.Duration(rapid.Int64Range(-int64(2*day), int64(2*day)).Draw(t, "step"))
				m.set, stepped = m.set+d, stepped+d
			},
			"read":    func(*rapid.T) { read() },
			"restart": func(t *rapid.T) { c = through(t, c) },
			"reboot": func(*rapid.T) {
				read() // once a minute, and after each step
				m.reboot(time.Second + duration("down", 3*day))
				m.pass(duration("boots", time.Minute))
				read()
			},
			"": func(t *rapid.T) {
				now, _ := c.Read(m.read())
				if want := epoch.Add(m.real); !now.Now.Equal(want) {
					t.Fatalf("host time is %s, true time %s", now.Now, want)
				}
				if now.Ahead() != -m.set || !now.Shown(now.Now).Equal(now.Wall) {
					t.Fatalf("host time is %s ahead, want %s", now.Ahead(), -m.set)
				}
				if again, _ := now.Read(Reading{Wall: epoch, Up: now.Up - 1, Boot: now.Boot}); again != now {
					t.Fatal("an older reading moves the clock")
				}
			},
		})
	})
}

// TestClockImpossibleWall_A7 boots with a dead battery: what has surely passed counts,
// and the rest when the wall clock is right again.
func TestClockImpossibleWall_A7(t *testing.T) {
	m := &machine{}
	c := NewClock(m.read())
	m.pass(day)
	c, _ = c.Read(m.read())
	m.reboot(5 * time.Hour)
	m.set = -20 * 365 * day
	m.pass(10 * time.Second)
	look := func(what string, want time.Duration) {
		t.Helper()
		c = through(t, c)
		if c, _ = c.Read(m.read()); !c.Now.Equal(epoch.Add(want)) {
			t.Fatalf("%s: host time is %s, want %s", what, c.Now.Sub(epoch), want)
		}
	}
	look("after the boot", day+10*time.Second)
	m.pass(time.Minute)
	look("a minute later", day+70*time.Second)
	m.reboot(time.Hour)
	m.pass(5 * time.Second)
	look("after a second boot, still without a time", day+75*time.Second)
	m.set = -6*time.Hour - 2*time.Second
	look("a time after the last reading, and still too little", day+75*time.Second)
	m.set = 0
	look("after the first NTP answer", day+6*time.Hour+75*time.Second)
	m.set = day
	look("a later step is one", day+6*time.Hour+75*time.Second)

	dead := &machine{}
	c = NewClock(dead.read())
	dead.reboot(time.Hour)
	dead.set = -day
	c, _ = c.Read(dead.read())
	if !c.Now.Equal(epoch) {
		t.Errorf("host time goes back to %s", c.Now)
	}
}
