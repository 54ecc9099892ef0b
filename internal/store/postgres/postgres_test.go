package postgres

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
	"github.com/hutchrun/hutch/internal/store/storetest"
)

// patience is how long a test waits for what has to happen.
const patience = 30 * time.Second

func TestSuite(t *testing.T) {
	t.Parallel()
	var urls sync.Map // by directory: opening one again finds the same database
	storetest.Run(t, storetest.Engine{Concurrent: true, Open: func(t *testing.T, dir string) store.Store {
		t.Helper()
		url, there := urls.Load(dir)
		if !there {
			url = pgtest.URL(t)
			urls.Store(dir, url)
		}
		return opened(t, url.(string))
	}})
}

func opened(t testing.TB, url string) *Store {
	t.Helper()
	s, err := Open(t.Context(), url, nil)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// made is a use case with a request key, as control does it: the first call makes a
// sandbox, a repeat finds it.
func made(ctx context.Context, s *Store, key string) (id string, runs int, err error) {
	err = s.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		runs++
		seen, err := tx.Request(ctx, "p", "r", key)
		if !fault.Is(err, fault.NotFound) {
			id = seen.Resource
			return err
		}
		id = fmt.Sprintf("sbx_%s_%d", key, runs)
		row := sandbox.Sandbox{ID: id, Project: "p", Name: key, State: sandbox.Creating, CreatedAt: time.Now(), Version: 1}
		if err := tx.InsertSandbox(ctx, row); err != nil {
			return err
		}
		if err := tx.AddEvent(ctx, store.Event{Project: "p", Sandbox: id, Type: "sandbox.creating", At: time.Now()}); err != nil {
			return err
		}
		return tx.PutRequest(ctx, store.Request{Project: "p", Route: "r", Key: key, Resource: id, CreatedAt: time.Now()})
	})
	return id, runs, err
}

func addProject(t testing.TB, s *Store, id string) {
	t.Helper()
	err := s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		return tx.InsertProject(ctx, store.Project{ID: id, CreatedAt: time.Now()})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func sandboxes(t testing.TB, s *Store) int {
	t.Helper()
	var rows []sandbox.Sandbox
	err := s.View(t.Context(), func(ctx context.Context, r store.Reader) (err error) {
		rows, err = r.Sandboxes(ctx, store.SandboxFilter{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return len(rows)
}

// events waits until n events have numbers, and gives all that have.
func events(t testing.TB, s *Store, n int) []store.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		next := s.Committed()
		got, err := s.Events(ctx, store.EventFilter{})
		if err != nil {
			t.Fatal(err)
		}
		if len(got) >= n {
			return got
		}
		select {
		case <-next:
		case <-ctx.Done():
			t.Fatalf("%d of %d events have numbers", len(got), n)
		}
	}
}

// TestCutConnections_V1: a connection that breaks in mid-transaction costs a repeat; one
// that breaks at the commit leaves its end unknown, says so, and the request key finds
// what was done.
func TestCutConnections_V1(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		when moment
		mark string
		runs int
		kept bool // what the caller was told nothing of was committed
	}{
		{"first statement", statement, `FROM "requests"`, 2, true},
		{"insert", statement, `INSERT INTO "sandboxes"`, 2, true},
		{"last statement", statement, "event_inbox (", 2, true},
		{"before the commit", commit, `INSERT INTO "requests"`, 1, false},
		{"after the commit", answer, `INSERT INTO "requests"`, 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p, url := newProxy(t)
			s := opened(t, url)
			addProject(t, s, "p")
			p.cut(c.when, c.mark)
			id, runs, err := made(t.Context(), s, "k")
			if p.cutOff() != 1 || runs != c.runs {
				t.Errorf("%d connections were cut, the function ran %d times, want %d", p.cutOff(), runs, c.runs)
			}
			if c.when == statement && err != nil {
				t.Errorf("a connection that broke before the commit: %v", err)
			}
			if c.when != statement {
				if f := fault.Of(err); f == nil || f.Kind != fault.Unavailable || f.Reason != store.ReasonUnknown {
					t.Errorf("a commit without an answer: %v", err)
				}
			}
			if got := sandboxes(t, s) == 1; got != c.kept {
				t.Errorf("the sandbox is there: %t, want %t", got, c.kept)
			}
			again, _, err := made(t.Context(), s, "k")
			if err != nil || c.kept && again != id {
				t.Errorf("the repeat gives %s, %v, the first call made %s", again, err, id)
			}
			if n := sandboxes(t, s); n != 1 {
				t.Errorf("a call and its repeat made %d sandboxes", n)
			}
			if got := events(t, s, 1); len(got) != 1 {
				t.Errorf("a call and its repeat made %d events", len(got))
			}
		})
	}
}

// TestDatabaseAway: while the database cannot be reached calls say so, soon, and when
// it is back they succeed and what was committed is followed again.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	p, url := newProxy(t)
	s := opened(t, url)
	addProject(t, s, "p")
	p.cut(all, "")
	if _, _, err := made(t.Context(), s, "k"); !fault.Is(err, fault.Unavailable) || fault.Of(err).Reason == store.ReasonUnknown {
		t.Errorf("a write to a database that is away: %v", err)
	}
	err := s.View(t.Context(), func(ctx context.Context, r store.Reader) error { return nil })
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("a read from a database that is away: %v", err)
	}
	p.cut(never, "")
	if _, _, err := made(t.Context(), s, "k"); err != nil {
		t.Errorf("a write after the database came back: %v", err)
	}
	if got := events(t, s, 1); len(got) != 1 || got[0].Seq != 1 {
		t.Errorf("events after the database came back: %+v", got)
	}
}

// TestDeadlock: two transactions that lock the same rows the other way round both
// succeed, because the one that is chosen to lose runs again.
func TestDeadlock(t *testing.T) {
	t.Parallel()
	s := opened(t, pgtest.URL(t)+"&deadlock_timeout=20ms")
	addProject(t, s, "p")
	var ids [2]string
	for i := range ids {
		var err error
		if ids[i], _, err = made(t.Context(), s, fmt.Sprint("k", i)); err != nil {
			t.Fatal(err)
		}
	}
	var first, all sync.WaitGroup
	first.Add(2)
	var runs atomic.Int64
	for i := range 2 {
		once := sync.OnceFunc(func() { first.Done(); first.Wait() }) // both hold one row
		all.Go(func() {
			err := s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
				runs.Add(1)
				for _, id := range []string{ids[i], ids[1-i]} {
					row, err := tx.Sandbox(ctx, id)
					if err != nil {
						return err
					}
					row.HostSeq++
					if err := tx.UpdateSandbox(ctx, &row); err != nil {
						return err
					}
					once()
				}
				return nil
			})
			if err != nil {
				t.Errorf("transaction %d: %v", i, err)
			}
		})
	}
	all.Wait()
	if runs.Load() < 3 {
		t.Errorf("the functions ran %d times: nothing was in the way", runs.Load())
	}
	err := s.View(t.Context(), func(ctx context.Context, r store.Reader) error {
		for _, id := range ids {
			row, err := r.Sandbox(ctx, id)
			if err != nil || row.HostSeq != 2 {
				t.Errorf("%s was counted up %d times, %v", id, row.HostSeq, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestHeldRow: who waits for a row that another holds stops when its caller goes away,
// and gives up by itself after the lock timeout.
func TestHeldRow_V3(t *testing.T) {
	t.Parallel()
	s := opened(t, pgtest.URL(t)+"&lock_timeout=200ms")
	addProject(t, s, "p")
	id, _, err := made(t.Context(), s, "k")
	if err != nil {
		t.Fatal(err)
	}
	held, release := make(chan struct{}), make(chan struct{})
	var holder sync.WaitGroup
	holder.Go(func() {
		err := s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			_, err := tx.Sandbox(ctx, id)
			close(held)
			<-release
			return err
		})
		if err != nil {
			t.Errorf("the holder: %v", err)
		}
	})
	<-held
	touch := func(ctx context.Context) error {
		return s.Update(ctx, func(ctx context.Context, tx store.Tx) error { _, err := tx.Sandbox(ctx, id); return err })
	}
	if err := touch(t.Context()); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a wait that was too long: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := touch(ctx); !fault.Is(err, fault.DeadlineExceeded) {
		t.Errorf("a caller with little time: %v", err)
	}
	close(release)
	holder.Wait()
	if err := touch(t.Context()); err != nil {
		t.Errorf("after the holder: %v", err)
	}
}

// TestNumbersOfTheDead_H1: a server that dies between its commit and the numbering
// leaves the numbering to another, which hears of nothing.
func TestNumbersOfTheDead_H1(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	s := opened(t, url)
	events(t, s, 0)
	_, err := s.db.ExecContext(t.Context(), `INSERT INTO event_inbox (project, sandbox, operation, type, actor, key, at) VALUES ('p', '', '', 'left', '', '', 1)`)
	if err != nil {
		t.Fatal(err)
	}
	if got := events(t, s, 1); len(got) != 1 || got[0].Type != "left" || got[0].Seq != 1 {
		t.Errorf("what a dead server left reads %+v", got)
	}
}

// TestTwoServers_H1: two servers number events of one database without gap or repeat,
// and each hears of the other's.
func TestTwoServers_H1(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	stores := []*Store{opened(t, url), opened(t, url)}
	addProject(t, stores[0], "p")
	const writers, each = 4, 25
	var all sync.WaitGroup
	for _, s := range stores {
		for w := range writers {
			all.Go(func() {
				for i := range each {
					err := s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
						return tx.AddEvent(ctx, store.Event{Project: "p", Type: fmt.Sprint(w, i), At: time.Now()})
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Go(func() {
			for i, e := range events(t, s, len(stores)*writers*each) {
				if e.Seq != int64(i+1) {
					t.Errorf("event %d has number %d", i+1, e.Seq)
					return
				}
			}
		})
	}
	all.Wait()
}

// BenchmarkCreateAndGet is on a server that syncs nothing: its numbers compare with
// themselves.
func BenchmarkCreateAndGet(b *testing.B) { storetest.Bench(b, opened(b, pgtest.URL(b))) }
