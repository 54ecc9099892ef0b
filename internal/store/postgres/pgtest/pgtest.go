// Package pgtest gives tests a PostgreSQL server of their own: made in a temporary
// directory, on a socket that nobody else reaches, started once in a test binary and
// gone with it, however it ends.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// startTimeout is how long a server may take to be made and to answer, on a machine
// that has much else to do.
const startTimeout = 2 * time.Minute

type server struct {
	dir   string   // has the socket
	end   *os.File // its closing ends the server
	ended chan struct{}
	n     atomic.Int64
}

// port names the socket; nothing listens on TCP.
const port = 5432

// once makes the server of this test binary.
var once = sync.OnceValues(func() (*server, error) { return start("-c fsync=off -c full_page_writes=off -c shared_buffers=32MB") })

// Durable starts a server as an operator has it, whose commits reach the disk, for
// benches. It ends with end, and with this process at the latest.
func Durable() (url string, end func(), err error) {
	s, err := start("-c shared_buffers=128MB")
	if err != nil {
		return "", nil, err
	}
	return s.url(), s.stop, nil
}

// errMissing says that PostgreSQL is not installed.
var errMissing = errors.New("PostgreSQL's server is not installed; scripts/deps.sh installs it")

// URL gives what is to a test a database of its own, and empty: a schema, which is made
// in a hundredth of the time. It goes with the server. Without PostgreSQL's programs the
// test is skipped, and says so.
func URL(t testing.TB) string {
	t.Helper()
	s, err := once()
	if errors.Is(err, errMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatalf("start PostgreSQL: %v", err)
	}
	name := fmt.Sprintf("test_%d", s.n.Add(1))
	if err := s.run("CREATE SCHEMA " + name); err != nil {
		t.Fatalf("make a schema: %v", err)
	}
	return s.url() + "&search_path=" + name
}

// Socket gives the path of the server's socket, for a test that puts something between.
func Socket(t testing.TB) string {
	t.Helper()
	s, err := once()
	if errors.Is(err, errMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatalf("start PostgreSQL: %v", err)
	}
	return filepath.Join(s.dir, fmt.Sprintf(".s.PGSQL.%d", port))
}

func (s *server) url() string {
	return fmt.Sprintf("postgres:///postgres?host=%s&port=%d&user=hutch&sslmode=disable", s.dir, port)
}

func (s *server) run(statement string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.url())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, statement)
	return err
}

// script runs the server until its standard input ends, which it does when the test
// binary dies, by whatever cause. Then it removes the directory.
const script = `
set -e
trap '' INT TERM HUP
bin=$1 dir=$2
finish() { rm -rf "$dir"; }
trap finish EXIT
"$bin/initdb" --pgdata="$dir/data" --username=hutch --auth=trust --encoding=UTF8 --no-locale --no-sync --no-instructions
"$bin/postgres" -D "$dir/data" -k "$dir" -c listen_addresses= -c port=$3 $4 \
	-c max_connections=300 -c log_min_messages=fatal </dev/null &
server=$!
cat >/dev/null || true
kill -QUIT $server || true
wait $server || true
`

// stop ends a server, and waits until its directory is gone.
func (s *server) stop() {
	_ = s.end.Close()
	<-s.ended
}

func start(settings string) (*server, error) {
	bin, err := programs()
	if err != nil {
		return nil, err
	}
	// The socket's path is short wherever TMPDIR points: 107 bytes are its most.
	dir, err := os.MkdirTemp("/tmp", "hutch-pg-")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/bin/sh", "-c", script, "sh", bin, dir, strconv.Itoa(port), settings)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // an interrupt is not for it
	if os.Geteuid() == 0 {                               // the server refuses to be root
		id, err := unprivileged()
		if err != nil {
			return nil, err
		}
		if err := os.Chown(dir, int(id.Uid), int(id.Gid)); err != nil {
			return nil, err
		}
		cmd.SysProcAttr.Credential = id
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log // not ours: who waits for our output would wait for it
	input, end, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdin = input
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	input.Close()
	s := &server{dir: dir, end: end, ended: make(chan struct{})}
	go func() { _ = cmd.Wait(); close(s.ended) }()
	deadline := time.After(startTimeout)
	for {
		err := s.run("SELECT 1")
		if err == nil {
			return s, nil
		}
		said, _ := io.ReadAll(io.NewSectionReader(log, 0, 1<<16)) // also once it is unlinked
		select {
		case <-s.ended:
			return nil, fmt.Errorf("it ended: %s", said)
		case <-deadline:
			end.Close()
			return nil, fmt.Errorf("it does not answer after %s: %w; it said: %s", startTimeout, err, said)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// programs finds the newest server on the machine.
func programs() (string, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/postgres")
	if err != nil {
		return "", err
	}
	version := func(path string) int {
		n, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
		return n
	}
	if len(found) > 0 {
		newest := slices.MaxFunc(found, func(a, b string) int { return version(a) - version(b) })
		return filepath.Dir(newest), nil
	}
	path, err := exec.LookPath("postgres")
	if err != nil {
		return "", errMissing
	}
	return filepath.Dir(path), nil
}

// unprivileged is a user that may run the server: Debian's for it, or nobody.
func unprivileged() (*syscall.Credential, error) {
	var failed []error
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, errors.Join(err1, err2)
	}
	return nil, errors.Join(failed...)
}
