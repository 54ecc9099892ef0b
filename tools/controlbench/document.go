package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// figures are what was measured on one database.
type figures struct {
	database string

	operations        *series
	perSecond         float64
	followed          *series // delays of events
	streamed          int64   // events that each client got
	perSecondFollowed float64 // operations, while the clients followed
	creations         float64 // a second
	late, heard       *series // of the timers: the stop, and the event of it at a client
	small, large      latencies
	memoryIdle        int64
	memoryRunning     int64 // with all of the timers' sandboxes running
}

// machine is where and when the figures were made.
type machine struct {
	cpu, kernel, system string
	memory              int64
	started             time.Time
	load, loadEnd       string
}

func readMachine() (machine, error) {
	m := machine{started: time.Now(), cpu: value("/proc/cpuinfo", "model name", ":"), system: strings.Trim(value("/etc/os-release", "PRETTY_NAME", "="), `"`)}
	var info unix.Sysinfo_t
	var name unix.Utsname
	if err := unix.Sysinfo(&info); err != nil {
		return m, err
	}
	if err := unix.Uname(&name); err != nil {
		return m, err
	}
	m.memory, m.kernel = int64(info.Totalram)*int64(info.Unit), unix.ByteSliceToString(name.Release[:])
	var err error
	m.load, err = load()
	return m, err
}

// load reads the load averages, which say how much else the machine had to do.
func load() (string, error) {
	text, err := os.ReadFile("/proc/loadavg")
	fields := strings.Fields(string(text))
	if err != nil || len(fields) < 3 {
		return "", fmt.Errorf("/proc/loadavg has %q: %w", text, err)
	}
	return strings.Join(fields[:3], ", "), nil
}

// value finds the first line "key SEPARATOR value" of a file; "unknown" without one.
func value(path, key, separator string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	for l := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(l, separator); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}

// document writes the figures as docs/benchmarks-control.md has them.
func document(m machine, s size, trial bool, all []*figures) string {
	var out strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	p("# Benchmarks of the control plane")
	p("")
	p("What hutch itself costs: the real store, control plane, host agent and API in one process, over HTTP on loopback, on a")
	p("machine of the fake runtime, whose sandboxes are files. Database, journals and client are on the same machine.")
	p("`go run ./tools/controlbench -o docs/benchmarks-control.md` makes this page anew.")
	p("")
	p("- %s; %d cores, %s, %.1f GiB of memory", m.started.Format("2006-01-02 15:04 MST"), runtime.NumCPU(), m.cpu, float64(m.memory)/(1<<30))
	p("- %s, kernel %s; load average %s at the start, %s at the end (its own included)", m.system, m.kernel, m.load, m.loadEnd)
	p("- SQLite with synchronous=FULL; PostgreSQL as Debian installs it, fsync on, over a socket")
	if trial {
		p("")
		p("**This was a trial of the program, its figures mean little.**")
	}
	p("")
	head, rule := "| what | aim |", "|---|---|"
	for _, f := range all {
		head, rule = head+" "+f.database+" |", rule+"---:|"
	}
	p("%s", head)
	p("%s", rule)
	row := func(what, aim string, cell func(*figures) string) {
		line := "| " + what + " | " + aim + " |"
		for _, f := range all {
			line += " " + cell(f) + " |"
		}
		p("%s", line)
	}
	row(fmt.Sprintf("lifecycle operations a second, %d clients (new, sleep, wake, stop, resume, delete, each waited for)", s.workers), "",
		func(f *figures) string { return fmt.Sprintf("%.0f", f.perSecond) })
	row("one of them, p50 / p99", "", func(f *figures) string { return both(f.operations) })
	row(fmt.Sprintf("the same while %d clients follow the events", s.streams), "", func(f *figures) string { return fmt.Sprintf("%.0f", f.perSecondFollowed) })
	row("an event from its instant to a client, p50 / p99", "", func(f *figures) string { return both(f.followed) })
	row("events to each client, each once and in order", "all", func(f *figures) string { return fmt.Sprint(f.streamed) })
	row(fmt.Sprintf("creations a second, %d clients, to `ready`", 2*s.workers), "", func(f *figures) string { return fmt.Sprintf("%.0f", f.creations) })
	row(fmt.Sprintf("%d auto-stops due in %s: stopped after the due time, p50 / p99", s.timers, s.spread), "", func(f *figures) string { return both(f.late) })
	row("the latest, and how many later than 1 s", "0", func(f *figures) string { return fmt.Sprintf("%s, %d", milli(f.late.at(1)), f.late.over(time.Second)) })
	row("their events at a client, p50 / p99", "", func(f *figures) string { return both(f.heard) })
	for _, r := range []struct {
		what string
		of   func(*latencies) *series
	}{
		{"`get` by id", func(l *latencies) *series { return &l.get }}, {"`get` by name", func(l *latencies) *series { return &l.name }},
		{"`new`, accepted", func(l *latencies) *series { return &l.new }}, {"`ls`, a page of 100", func(l *latencies) *series { return &l.list }},
	} {
		row(fmt.Sprintf("%s with %d sandboxes in the tables, p50 / p99", r.what, all[0].small.sandboxes), "", func(f *figures) string { return both(r.of(&f.small)) })
		row(fmt.Sprintf("%s with %d", r.what, all[0].large.sandboxes), "× 1.5", func(f *figures) string {
			small, large := r.of(&f.small), r.of(&f.large)
			return fmt.Sprintf("%s (× %.2f / %.2f)", both(large), ratio(large.at(0.5), small.at(0.5)), ratio(large.at(0.99), small.at(0.99)))
		})
	}
	row("`bill --verify` of all of them", "", func(f *figures) string {
		return fmt.Sprintf("%.1f s, %.1f s", f.small.bill.Seconds(), f.large.bill.Seconds())
	})
	row("the server's start, to its first answer", "", func(f *figures) string {
		return fmt.Sprintf("%.1f s, %.1f s", f.small.start.Seconds(), f.large.start.Seconds())
	})
	row(fmt.Sprintf("memory of the server: empty; with %d sandboxes running, the fake guests among it", s.timers), "", func(f *figures) string {
		return fmt.Sprintf("%s; %s", mega(f.memoryIdle), mega(f.memoryRunning))
	})
	row("and after the calls above with each number in the tables", "", func(f *figures) string { return mega(f.small.memory) + "; " + mega(f.large.memory) })
	return out.String()
}

func both(s *series) string { return milli(s.at(0.5)) + " / " + milli(s.at(0.99)) }

func milli(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

func mega(bytes int64) string { return fmt.Sprintf("%.0f MB", float64(bytes)/1e6) }

func ratio(a, b time.Duration) float64 { return float64(a) / float64(max(b, 1)) }
