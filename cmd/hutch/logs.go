package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/fault"
)

// oldLog is the log's nth file before the present one.
func (l layout) oldLog(n int) string { return l.log() + "." + strconv.Itoa(n) }

// logFile bounds the log that this process's stderr is. It begins a new file when the
// present one is full, and puts it in the place of stderr itself, so that a panic and
// what an outside program says are in it too.
type logFile struct {
	layout layout
	most   int64 // bytes of a file
	files  int   // how many are kept beside the present one

	mu   sync.Mutex // guards size
	size int64
}

// boundLog gives a writer for the log in place of stderr, where stderr is the
// installation's log; elsewhere (a terminal, a journal) it is stderr.
func boundLog(stderr io.Writer, l layout, s settings) io.Writer {
	var here, log unix.Stat_t
	if unix.Fstat(2, &here) != nil || unix.Stat(l.log(), &log) != nil || here.Ino != log.Ino || here.Dev != log.Dev {
		return stderr
	}
	return &logFile{layout: l, most: s.size(config.LogSize), files: s.count(config.LogFiles), size: here.Size}
}

// Write writes one record. A log that cannot be begun anew goes on in the file that it
// has: what is to be said is worth more than the bound.
func (f *logFile) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.size > 0 && f.size+int64(len(p)) > f.most {
		if err := f.turn(); err == nil {
			f.size = 0
		}
	}
	n, err := os.Stderr.Write(p)
	f.size += int64(n)
	return n, err
}

func (f *logFile) turn() error {
	next, err := os.OpenFile(f.layout.log()+".new", os.O_CREATE|os.O_TRUNC|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer next.Close()
	for n := f.files; n >= 1; n-- {
		from := f.layout.log()
		if n > 1 {
			from = f.layout.oldLog(n - 1)
		}
		if err := os.Rename(from, f.layout.oldLog(n)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(next.Name(), f.layout.log()); err != nil {
		return err
	}
	for _, fd := range []int{1, 2} {
		if err := unix.Dup3(int(next.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return nil
}

func logsCommand(env cli.Env) *cobra.Command {
	var (
		at     place
		follow bool
		since  string
		lines  int
	)
	cmd := &cobra.Command{
		Use:   "logs",
		Short: "Show the log of the server on this machine",
		Long: "Show the log of the server on this machine, as it was written, oldest first, over the files that it is in. --since takes a time before now (30m, 2h, 7d) " +
			"or an instant (2026-03-01T10:00:00Z). What a command in a sandbox has written is in `hutch commands logs`.",
		Example: "hutch logs --since 1h\nhutch logs --tail 50 --follow",
		GroupID: "server",
		Args:    serverLogOnly,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, _, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			if lines < 0 {
				return fault.New(fault.InvalidArgument, "--tail %d is less than none; write --tail 50", lines)
			}
			from, err := parseSince(since, time.Now())
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return showLog(ctx, env.Stdout, l, from, lines, follow)
		},
	}
	at.flags(cmd)
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes, until ctrl-C")
	cmd.Flags().StringVar(&since, "since", "", "only what was written since")
	cmd.Flags().IntVarP(&lines, "tail", "n", 0, "only the last lines, 0 for all")
	return cmd
}

// serverLogOnly refuses a sandbox's name, which is known and not there yet (R10).
func serverLogOnly(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fault.New(fault.Unsupported, "the log of a sandbox (%s) is not supported by this version of hutch; `hutch logs` shows the server's", args[0]).Because("sandbox_logs")
	}
	return nil
}

// parseSince reads --since; the zero time for "".
func parseSince(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := config.ParseDuration(text); err == nil {
		return now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		return t, nil
	}
	return time.Time{}, fault.New(fault.InvalidArgument, "--since %q is neither a time before now nor an instant; write --since 1h, or --since 2026-03-01T10:00:00Z", text)
}

// recordTime finds the time of a record, in the log's text form or as JSON.
var recordTime = regexp.MustCompile(`^(?:time=|\{"time":")([0-9T:.+Z-]+)`)

// sieve lets lines through that are of a record since an instant. A line without a time
// of its own (a panic) goes with the record before it.
type sieve struct {
	since time.Time
	open  bool
}

func (s *sieve) takes(line string) bool {
	if s.since.IsZero() {
		return true
	}
	if m := recordTime.FindStringSubmatch(line); m != nil {
		if at, err := time.Parse(time.RFC3339Nano, m[1]); err == nil {
			s.open = !at.Before(s.since)
		}
	}
	return s.open
}

// logPoll is how often a log is looked at that is followed.
const logPoll = 200 * time.Millisecond

// showLog prints the log's files, oldest first.
func showLog(ctx context.Context, out io.Writer, l layout, since time.Time, last int, follow bool) error {
	current, err := os.Open(l.log())
	if errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.NotFound, "there is no log %s; a server in the foreground logs to its stderr, and another installation is named with --data", l.log())
	}
	if err != nil {
		return fault.Wrap(err, fault.PermissionDenied, "the log %s cannot be read; use sudo", l.log())
	}
	defer func() { _ = current.Close() }()
	tail := newTail(out, last)
	s := &sieve{since: since}
	for n := 100; n >= 1; n-- {
		old, err := os.Open(l.oldLog(n))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil && !same(old, current) { // it was turned just now, and is read below
			err = copyLines(bufio.NewReader(old), s, tail)
		}
		if old != nil {
			err = errors.Join(err, old.Close())
		}
		if err != nil {
			return err
		}
	}
	reader := bufio.NewReader(current)
	if err := copyLines(reader, s, tail); err != nil {
		return err
	}
	if err := tail.flush(); err != nil || !follow {
		return err
	}
	tail = newTail(out, 0)
	ticker := time.NewTicker(logPoll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		next, err := os.Open(l.log())
		turned := err == nil && !same(next, current)
		if err := copyLines(reader, s, tail); err != nil { // what was written up to the turn
			return err
		}
		if err == nil && !turned {
			err = next.Close()
		}
		if turned {
			_ = current.Close()
			current, reader = next, bufio.NewReader(next)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
}

func same(a, b *os.File) bool {
	x, err := a.Stat()
	if err != nil {
		return false
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y)
}

// copyLines reads what is there. A line that has no end yet is given as it is.
func copyLines(r *bufio.Reader, s *sieve, to *tail) error {
	for {
		line, err := r.ReadString('\n')
		if line != "" && s.takes(line) {
			if err := to.add(line); err != nil {
				return err
			}
		}
		if err != nil {
			return ignore(err, io.EOF)
		}
	}
}

func ignore(err, what error) error {
	if errors.Is(err, what) {
		return nil
	}
	return err
}

// tail writes lines, or keeps the last ones until flush.
type tail struct {
	out  io.Writer
	last int // 0 is all, at once
	kept []string
}

func newTail(out io.Writer, last int) *tail { return &tail{out: out, last: last} }

func (t *tail) add(line string) error {
	if t.last == 0 {
		_, err := fmt.Fprint(t.out, line)
		return err
	}
	if t.kept = append(t.kept, line); len(t.kept) > t.last {
		t.kept = t.kept[1:]
	}
	return nil
}

func (t *tail) flush() error {
	for _, line := range t.kept {
		if _, err := fmt.Fprint(t.out, line); err != nil {
			return err
		}
	}
	t.kept = nil
	return nil
}
