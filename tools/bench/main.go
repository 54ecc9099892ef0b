// Command bench measures the first path of a sandbox's life through hutch's API and,
// in the same run and on the same root file system, what the runtime takes alone: the
// difference is hutch's own. It starts a server of its own in a new directory, prints
// a document with one table, and leaves nothing behind. It judges nothing: a figure
// is a ratio, never a pass or a failure.
//
//	go run ./tools/bench [-n ROUNDS] [-o docs/benchmarks.md]
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

	"golang.org/x/sys/unix"
)

// leastRounds is how many rounds make a figure that is worth keeping.
const leastRounds = 10

type options struct {
	rounds        int
	pool          int64 // size of the pool's file, in GB
	out, bin, dir string
}

func main() {
	var o options
	flag.IntVar(&o.rounds, "n", leastRounds, "how often each row is measured; fewer than 10 only try the program out")
	flag.StringVar(&o.out, "o", "", "write the document to this file, too")
	flag.StringVar(&o.bin, "bin", "bin", "directory of hutch, hutch-guest and hutch-runsc")
	flag.StringVar(&o.dir, "dir", "/var/tmp", "where the server's directory is made")
	flag.Int64Var(&o.pool, "pool", 24, "size of the server's pool in GB; the disk that is cloned takes 8")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o)
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case interrupted:
		fmt.Fprintln(os.Stderr, "bench: interrupted:", err)
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run measures, prints, and cleans up whatever happened.
func run(ctx context.Context, o options) (err error) {
	if err := check(&o); err != nil {
		return err
	}
	m, err := readMachine()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(o.dir, "hutch-bench-")
	if err != nil {
		return err
	}
	hutch := filepath.Join(o.bin, "hutch")
	say("everything is in %[1]s; were this program killed (kill -9), end the processes with --root=%[1]s/… and clean up with `umount -R %[1]s/bare; %[2]s doctor --clean --yes --data %[1]s/data`", dir, hutch)
	b := &bench{
		server: &server{hutch: hutch, dir: dir, pool: o.pool},
		bare:   &bare{runsc: filepath.Join(o.bin, "hutch-runsc"), dir: filepath.Join(dir, "bare")},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel() // of what is still running
		err = errors.Join(err, b.close())
	}()
	if err := b.prepare(ctx); err != nil {
		return err
	}
	r, err := b.measure(ctx, o.rounds)
	if r == nil {
		return err
	}
	text := document(o.rounds, m, b.facts, r)
	fmt.Print(text) // also what was measured before it failed
	if err != nil || o.out == "" {
		return err
	}
	return os.WriteFile(o.out, []byte(text), 0o644)
}

// check looks at what would else fail late, and makes the paths absolute.
func check(o *options) error {
	if o.rounds < 1 {
		return fmt.Errorf("-n %d is no number of rounds", o.rounds)
	}
	if os.Geteuid() != 0 {
		return errors.New("sandboxes need root")
	}
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return err
	}
	o.bin = bin
	for _, name := range []string{"hutch", "hutch-guest", "hutch-runsc"} {
		if _, err := os.Stat(filepath.Join(bin, name)); err != nil {
			return fmt.Errorf("%w; `make build` makes it", err)
		}
	}
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(o.dir, &st); err != nil {
		return fmt.Errorf("%s: %w", o.dir, err)
	}
	const spare = 4 // GB, for the images of the bare runtime, and for others
	if free := int64(st.Bavail) * st.Frsize / 1e9; free < o.pool+spare {
		return fmt.Errorf("%s has %d GB free, and the pool with what comes beside it takes %d; name another place with -dir", o.dir, free, o.pool+spare)
	}
	return nil
}

// say tells on stderr how far it is.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}
