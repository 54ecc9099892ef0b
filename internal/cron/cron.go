// Package cron reads crontabs (crontab(5)) and tells when their lines fire. It does no
// I/O and reads no clock.
package cron

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"time"
)

// Line is one entry of a crontab.
type Line struct {
	Number   int    // in its file, from 1
	Schedule string // as it is written
	User     string // of a system crontab; "" otherwise
	Command  string
	Zone     string // of a CRON_TZ above it; "" is the system's

	minute, hour, day, month, weekday set
	anyDay, anyWeekday                bool // the field begins with *
}

// set holds the values of a field, one bit each.
type set uint64

func (s set) has(n int) bool { return s>>n&1 == 1 }

// names of schedules; @reboot fires at no time and is left out.
var names = map[string]string{
	"@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
	"@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}

// MostLines bounds what is read of one crontab.
const MostLines = 1000

// Parse reads a crontab. system says that its lines name a user. What is no entry and
// cannot be read as anything else is counted in bad, and passed over, as cron does.
func Parse(text []byte, system bool) (lines []Line, bad int) {
	zone := ""
	number := 0
	for raw := range bytes.Lines(text) {
		if number++; number > MostLines {
			break
		}
		line := strings.TrimSpace(string(raw))
		if line == "" || line[0] == '#' {
			continue
		}
		if name, value, ok := assignment(line); ok {
			if name == "CRON_TZ" {
				zone = value
			}
			continue
		}
		l, err := entry(line, system)
		switch {
		case errors.Is(err, errNoTime):
		case err != nil:
			bad++
		default:
			l.Number, l.Zone = number, zone
			lines = append(lines, l)
		}
	}
	return lines, bad
}

// assignment reads NAME=VALUE, with spaces around = and quotes around VALUE or not.
func assignment(line string) (name, value string, ok bool) {
	name, value, ok = strings.Cut(line, "=")
	name = strings.TrimSpace(name)
	if !ok || name == "" || strings.ContainsAny(name, " \t*@,/") || name[0] >= '0' && name[0] <= '9' {
		return "", "", false
	}
	return name, strings.Trim(strings.TrimSpace(value), `"'`), true
}

var (
	errNoTime = errors.New("it fires at no time of its own")
	errForm   = errors.New("it is no entry of a crontab")
)

func entry(line string, system bool) (Line, error) {
	fields, rest := 5, line
	if line[0] == '@' {
		fields = 1
	}
	var when []string
	for range fields {
		word, after := cutWord(rest)
		when, rest = append(when, word), after
	}
	l := Line{Schedule: strings.Join(when, " ")}
	if system {
		l.User, rest = cutWord(rest)
	}
	l.Command = rest
	if l.Command == "" || system && l.User == "" {
		return l, errForm
	}
	if fields == 1 {
		if when[0] == "@reboot" {
			return l, errNoTime
		}
		if when = strings.Fields(names[when[0]]); len(when) == 0 {
			return l, errForm
		}
	}
	return l, l.schedule(when)
}

func cutWord(s string) (word, rest string) {
	s = strings.TrimLeft(s, " \t")
	if i := strings.IndexAny(s, " \t"); i >= 0 {
		return s[:i], strings.TrimLeft(s[i:], " \t")
	}
	return s, ""
}

var (
	monthNames = []string{"jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"}
	dayNames   = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}
)

func (l *Line) schedule(when []string) error {
	for i, f := range []struct {
		to          *set
		least, most int
		names       []string
		first       int // the value of the first name
	}{
		{&l.minute, 0, 59, nil, 0}, {&l.hour, 0, 23, nil, 0}, {&l.day, 1, 31, nil, 0}, {&l.month, 1, 12, monthNames, 1},
		{&l.weekday, 0, 7, dayNames, 0},
	} {
		var err error
		if *f.to, err = field(when[i], f.least, f.most, f.names, f.first); err != nil {
			return err
		}
	}
	if l.weekday.has(7) { // Sunday too
		l.weekday |= 1
	}
	l.anyDay, l.anyWeekday = when[2][0] == '*', when[4][0] == '*'
	return nil
}

// field reads a list of values, ranges and steps.
func field(text string, least, most int, names []string, first int) (set, error) {
	value := func(s string) (int, bool) {
		for i, name := range names {
			if strings.EqualFold(s, name) {
				return first + i, true
			}
		}
		n, err := strconv.Atoi(s)
		return n, err == nil && n >= least && n <= most
	}
	var out set
	for part := range strings.SplitSeq(text, ",") {
		span, stepText, stepped := strings.Cut(part, "/")
		step := 1
		if stepped {
			n, err := strconv.Atoi(stepText)
			if err != nil || n < 1 {
				return 0, errForm
			}
			step = min(n, 60) // beyond every value
		}
		from, to := least, most
		if span != "*" {
			a, b, ranged := strings.Cut(span, "-")
			var ok bool
			if from, ok = value(a); !ok {
				return 0, errForm
			}
			switch {
			case ranged:
				if to, ok = value(b); !ok || to < from {
					return 0, errForm
				}
			case !stepped:
				to = from
			}
		}
		for n := from; n <= to; n += step {
			out |= 1 << n
		}
	}
	return out, nil
}

// at says whether the line fires in the minute that a clock shows.
func (l Line) at(t time.Time) bool {
	if !l.minute.has(t.Minute()) || !l.hour.has(t.Hour()) || !l.month.has(int(t.Month())) {
		return false
	}
	day, weekday := l.day.has(t.Day()), l.weekday.has(int(t.Weekday()))
	if l.anyDay || l.anyWeekday {
		return day && weekday
	}
	return day || weekday
}

// Between counts the firings after an instant, up to another and including it, as a
// clock of a time zone shows them, and gives the last one.
func (l Line) Between(from, to time.Time, zone *time.Location) (count int, last time.Time) {
	for t := from.Truncate(time.Minute).Add(time.Minute); !t.After(to); t = t.Add(time.Minute) {
		if l.at(t.In(zone)) {
			count, last = count+1, t
		}
	}
	return count, last
}
