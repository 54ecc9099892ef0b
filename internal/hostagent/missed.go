package hostagent

import (
	"context"
	"errors"
	"io"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/cron"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// In a sleeping sandbox no timer fires (Z8). After a wake the host reads the crontabs
// inside and tells which of their lines fell into the sleep (X7), where a cron daemon
// runs. What else waits for a time inside cannot be told: gVisor shows no process's
// timers, and as PID 1 is hutch's, no systemd runs whose timers could be missed.

// asleep is a sleep whose missed timers are still to be told of, in host time.
type asleep struct {
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
}

func (a asleep) is(b asleep) bool { return a.From.Equal(b.From) && a.To.Equal(b.To) }

// Bounds of what is believed of a guest's crontabs.
const (
	missedLimit   = 10 * time.Second // for all of it
	crontabsMost  = 100
	crontabBytes  = 256 << 10
	missedMost    = 50
	missedLongest = 1 << 10 // bytes of a command
)

// daemons are the short names of the programs that read crontabs.
var daemons = map[string]bool{"cron": true, "crond": true}

// tellMissed finds out what the last sleep missed, once after each wake, beside
// everything else. Where nothing is found nothing is written.
func (o *owner) tellMissed() {
	m, l := o.rec.Missed, o.live.Load()
	if m == nil || l == nil || !l.ready.Load() || o.asked.is(*m) {
		return
	}
	o.asked = *m
	o.agent.sender(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, missedLimit)
		defer cancel()
		ahead := o.agent.clock.ahead()
		found, err := missedTimers(ctx, l.guest.Client, m.From.Add(-ahead), m.To.Add(-ahead))
		if err != nil {
			o.log.Debug("what was missed in sleep is not known", "err", err)
			return
		}
		if len(found.Timers) == 0 {
			return
		}
		_ = o.call(ctx, func() error {
			if now := o.rec.Missed; now == nil || !now.is(*m) {
				return nil // something has happened since
			}
			return o.write(func(r *record) {
				r.Missed = nil
				r.addReport(hostproto.Report{Missed: &found, At: o.agent.now()})
			})
		})
	})
}

// missedTimers reads the crontabs of a sandbox and gives the lines that would have fired
// between two instants of its wall clock.
func missedTimers(ctx context.Context, g *guestproto.Client, from, to time.Time) (hostproto.Missed, error) {
	out := hostproto.Missed{From: from, To: to}
	runs, err := g.Agent.Processes(ctx, &guestproto.ProcessesRequest{})
	if err != nil {
		return out, err
	}
	cronRuns := false
	for _, p := range runs.Processes {
		cronRuns = cronRuns || daemons[p.Comm]
	}
	if !cronRuns {
		return out, nil
	}
	zone := zoneOf(ctx, g)
	out.Zone = zone.String()
	tabs, err := crontabs(ctx, g)
	if err != nil {
		return out, err
	}
	for _, tab := range tabs {
		text, err := readSome(ctx, g, tab.path, crontabBytes)
		if err != nil {
			continue // it has gone, or is none
		}
		lines, _ := cron.Parse(text, tab.user == "")
		for _, l := range lines {
			where := zone
			if named, err := time.LoadLocation(l.Zone); l.Zone != "" && err == nil {
				where = named
			}
			count, last := l.Between(from, to, where)
			switch {
			case count == 0:
			case len(out.Timers) == missedMost || len(l.Command) > missedLongest:
				out.Omitted++
			default:
				user := l.User
				if user == "" {
					user = tab.user
				}
				out.Timers = append(out.Timers, hostproto.MissedTimer{
					Source: tab.path, Line: l.Number, Schedule: l.Schedule, User: user, Command: l.Command, Count: count, Last: last,
				})
			}
		}
	}
	return out, ctx.Err()
}

// crontab is one file; user is whose it is, "" for one whose lines name theirs.
type crontab struct{ path, user string }

// cronFile is what Debian's cron takes for a file of /etc/cron.d.
var cronFile = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// crontabs lists those of Debian's and Red Hat's cron, and of Alpine's.
func crontabs(ctx context.Context, g *guestproto.Client) ([]crontab, error) {
	tabs := []crontab{{path: "/etc/crontab"}}
	for _, dir := range []struct {
		path string
		own  bool // each file is its user's
	}{{"/etc/cron.d", false}, {"/var/spool/cron/crontabs", true}, {"/var/spool/cron", true}} {
		stream, err := g.Files.List(ctx, &guestproto.ListFilesRequest{Path: []byte(dir.path), User: "root"})
		if err != nil {
			return nil, err
		}
		for {
			res, err := stream.Receive()
			if err != nil {
				if ctx.Err() != nil {
					return nil, ctx.Err()
				}
				break // its end, or it is not there
			}
			for _, e := range res.Entries {
				name := path.Base(string(e.Path))
				if e.Type != guestproto.FileType_FILE_TYPE_FILE || !cronFile.MatchString(name) || len(tabs) >= crontabsMost {
					continue
				}
				tab := crontab{path: path.Join(dir.path, name)}
				if dir.own {
					tab.user = name
				}
				tabs = append(tabs, tab)
			}
		}
		_ = stream.Close()
	}
	return tabs, nil
}

// zoneOf is the time zone of a sandbox's clock, where it names one that is known here;
// UTC otherwise.
func zoneOf(ctx context.Context, g *guestproto.Client) *time.Location {
	res, err := g.Files.Stat(ctx, &guestproto.StatRequest{Path: []byte("/etc/localtime"), User: "root"})
	if err != nil {
		return time.UTC
	}
	_, name, ok := strings.Cut(string(res.Entry.GetSymlinkTarget()), "zoneinfo/")
	if !ok {
		return time.UTC
	}
	zone, err := time.LoadLocation(name)
	if err != nil {
		return time.UTC
	}
	return zone
}

// readSome reads a file up to a limit.
func readSome(ctx context.Context, g *guestproto.Client, file string, most int64) ([]byte, error) {
	stream, err := g.Files.Read(ctx, &guestproto.ReadRequest{Path: []byte(file), User: "root", Limit: most})
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var text []byte
	for {
		res, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return text, nil
		}
		if err != nil {
			return nil, err
		}
		if text = append(text, res.Data...); int64(len(text)) > most {
			return text[:most], nil
		}
	}
}
