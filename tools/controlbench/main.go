// Command controlbench measures the control plane: the real store, control, host agent and
// API in a server process of their own, on a machine of the fake runtime, so that what is
// measured is hutch's own. It does so on SQLite and on PostgreSQL, prints a document with
// one table, and leaves nothing behind. It judges nothing: the aims stand beside the
// figures.
//
//	go run ./tools/controlbench [-quick] [-o docs/benchmarks-control.md]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/internal/fakehost/fakeserver"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
)

// size is how much is measured.
type size struct {
	load    time.Duration // of each load
	workers int           // that load at a time
	streams int           // clients that follow the events
	timers  int           // that fall due
	spread  time.Duration // in which they do
	small   int           // sandboxes in the tables at first
	large   int           // and at last
	gets    int           // measured
	news    int
}

var (
	full  = size{load: 10 * time.Second, workers: 8, streams: 100, timers: 10_000, spread: time.Minute, small: 10_000, large: 100_000, gets: 3000, news: 300}
	quick = size{load: time.Second, workers: 4, streams: 10, timers: 200, spread: 2 * time.Second, small: 200, large: 2000, gets: 200, news: 20}
)

func main() {
	fakeserver.Main()
	out := flag.String("o", "", "write the document to this file, too")
	dir := flag.String("dir", "/var/tmp", "where the servers' directories are made; their database and journals are there")
	trial := flag.Bool("quick", false, "only try the program out")
	flag.IntVar(&quick.timers, "quick-timers", quick.timers, "of -quick: how many timers fall due")
	flag.IntVar(&quick.large, "quick-sandboxes", quick.large, "of -quick: how many sandboxes are in the tables at last")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *dir, *out, *trial)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "controlbench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir, out string, trial bool) error {
	m, err := readMachine()
	if err != nil {
		return err
	}
	s := full
	if trial {
		s = quick
	}
	var all []*figures
	var failed error
	for _, database := range []string{"SQLite", "PostgreSQL"} {
		f, err := measure(ctx, dir, database, s)
		if err != nil {
			failed = fmt.Errorf("%s: %w", database, err)
			break
		}
		all = append(all, f)
	}
	if m.loadEnd, err = load(); err != nil {
		return err
	}
	if len(all) == 0 {
		return failed
	}
	text := document(m, s, trial, all) // also of one database, where the other's failed
	fmt.Print(text)
	if failed != nil || out == "" {
		return failed
	}
	return os.WriteFile(out, []byte(text), 0o644)
}

// bench is a server that is measured.
type bench struct {
	size
	name  string
	cfg   fakeserver.Config
	proc  *fakeserver.Process
	api   *client
	seen  int64 // an event's number, near the newest
	found *figures
}

// measure does everything on one database.
func measure(ctx context.Context, dir, database string, s size) (_ *figures, err error) {
	b := &bench{size: s, name: database, found: &figures{database: database}}
	if b.cfg.Dir, err = os.MkdirTemp(dir, "hutch-controlbench-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.cfg.Dir)) }()
	b.cfg.Log = filepath.Join(b.cfg.Dir, "log")
	if database == "PostgreSQL" {
		url, end, err := pgtest.Durable()
		if err != nil {
			return nil, err
		}
		defer end()
		b.cfg.Database = url
	}
	if err := b.up(); err != nil {
		return nil, err
	}
	defer func() { b.proc.Kill() }()
	if b.found.memoryIdle, err = b.proc.Memory(); err != nil {
		return nil, err
	}
	for _, step := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"lifecycles", b.lifecycles}, {"events to many clients", b.follow}, {"timers", b.timed},
		{"the tables with few sandboxes", func(ctx context.Context) error { return b.tables(ctx, b.small, &b.found.small) }},
		{"the tables with many sandboxes", func(ctx context.Context) error { return b.tables(ctx, b.large, &b.found.large) }},
	} {
		say("%s: %s", database, step.what)
		if err := step.do(ctx); err != nil {
			return nil, fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return b.found, nil
}

// up starts the server.
func (b *bench) up() (err error) {
	if b.proc, err = fakeserver.Launch(b.cfg); err != nil {
		return err
	}
	b.api, err = newClient(b.proc.URL, b.proc.Key)
	return err
}

// say tells on stderr how far it is.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}
