package sqlite

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

func projects(t *testing.T, s *Store, ids ...string) (there int) {
	t.Helper()
	err := s.View(t.Context(), func(ctx context.Context, r store.Reader) error {
		for _, id := range ids {
			_, err := r.Project(ctx, id)
			if err == nil {
				there++
			} else if !fault.Is(err, fault.NotFound) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return there
}

func makeProject(t *testing.T, s *Store, id string) {
	t.Helper()
	err := s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		return tx.InsertProject(ctx, store.Project{ID: id, Name: id, CreatedAt: time.Now()})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// R9: a copy is one instant of the database, made beside the server that writes it, and
// nothing of what is only in its log is missing.
func TestCopyBesideTheServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, to := filepath.Join(dir, "hutch.db"), filepath.Join(dir, "copy.db")
	s, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	makeProject(t, s, "before")
	stop, written := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for ; ; n++ {
			select {
			case <-stop:
				written <- n
				return
			default:
			}
			err := s.Update(context.Background(), func(ctx context.Context, tx store.Tx) error {
				// Both rows or none.
				for _, id := range []string{"a", "b"} {
					id += time.Now().Format(time.RFC3339Nano)
					if err := tx.InsertProject(ctx, store.Project{ID: id, Name: "pair", CreatedAt: time.Now()}); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		}
	}()
	if err := Copy(t.Context(), path, to); err != nil {
		t.Fatal(err)
	}
	close(stop)
	if n := <-written; n == 0 {
		t.Error("nothing was written meanwhile")
	}
	makeProject(t, s, "after")
	if err := Check(t.Context(), to); err != nil {
		t.Error(err)
	}
	c, err := Peek(t.Context(), to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if projects(t, c, "before") != 1 || projects(t, c, "after") != 0 {
		t.Error("the copy is not what the database was")
	}
	var pairs int
	if err := c.read.NewRaw("SELECT count(*) FROM projects WHERE name = 'pair'").Scan(t.Context(), &pairs); err != nil || pairs%2 != 0 {
		t.Errorf("%d rows of pairs, %v", pairs, err)
	}
	if st, err := os.Stat(to); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
}

// R8: what looks beside the server reads and cannot write, and brings no schema up to date.
func TestPeek(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.db")
	if _, err := Peek(t.Context(), path); !fault.Is(err, fault.NotFound) {
		t.Errorf("of no file: %v", err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a look made a database")
	}
	s, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	makeProject(t, s, "p")
	look := func() {
		t.Helper()
		p, err := Peek(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		if projects(t, p, "p") != 1 {
			t.Error("what was written does not show")
		}
		err = p.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			return tx.InsertProject(ctx, store.Project{ID: "q", Name: "q", CreatedAt: time.Now()})
		})
		if err == nil {
			t.Error("it can write")
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	look()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	look() // without a server, and without its log
	have, want, err := Schema(t.Context(), path)
	if err != nil || have != want || have < 4 {
		t.Errorf("schema %d of %d, %v", have, want, err)
	}
	s, err = Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.write.ExecContext(t.Context(), "INSERT INTO goose_db_version (version_id, is_applied) VALUES (?, 1)", want+1); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if have, _, err := Schema(t.Context(), path); err != nil || have != want+1 {
		t.Errorf("schema %d, %v", have, err)
	}
	if _, err := Peek(t.Context(), path); fault.Of(err).Reason != "other_schema" {
		t.Errorf("of another schema: %v", err)
	}
}

// R9: a damaged copy is told from a whole one.
func TestCheck(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.db")
	s, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := 4096; i < len(data); i += 64 {
		data[i] ^= 0x5a
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(t.Context(), path); !fault.Is(err, fault.DataCorrupt) {
		t.Errorf("a damaged file: %v", err)
	}
}
