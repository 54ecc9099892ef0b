package sqlite

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/storetest"
)

func TestSuite(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Engine{Open: func(t *testing.T, dir string) store.Store {
		t.Helper()
		return opened(t, filepath.Join(dir, "hutch.db"))
	}})
}

func opened(t *testing.T, path string) *Store {
	t.Helper()
	s, err := Open(t.Context(), path)
	if err != nil {
		t.Fatalf("open %s: %v", path, err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// TestPragmas proves that a commit is on the disk when it is reported.
func TestPragmas(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "odd name?&#%.db")
	s := opened(t, path)
	for _, c := range []struct {
		db   interface{ QueryRow(string, ...any) *sql.Row }
		name string
		want string
	}{
		{s.write, "journal_mode", "wal"}, {s.write, "synchronous", "2"}, {s.write, "foreign_keys", "1"},
		{s.write, "busy_timeout", "5000"}, {s.read, "query_only", "1"}, {s.read, "journal_mode", "wal"},
	} {
		var got string
		if err := c.db.QueryRow("PRAGMA " + c.name).Scan(&got); err != nil || got != c.want {
			t.Errorf("%s is %q, %v, want %q", c.name, got, err, c.want)
		}
	}
	if _, err := s.read.Exec("DELETE FROM events"); err == nil {
		t.Error("the readers' pool can write")
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("R6: the file's mode is %v, %v", info.Mode(), err)
	}
}

// history gives this version's migrations, and the number of the last one.
func history(t *testing.T) (fstest.MapFS, int) {
	t.Helper()
	names, err := fs.Glob(embedded, "migrations/*.sql")
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	all, last := fstest.MapFS{}, 0
	for _, name := range names {
		base := filepath.Base(name)
		all[base] = file(t, name)
		if n, err := strconv.Atoi(base[:4]); err != nil {
			t.Fatal(err)
		} else {
			last = max(last, n)
		}
	}
	return all, last
}

// TestNewerSchemaIsRefused proves R8.
func TestNewerSchemaIsRefused_R8(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.db")
	newer, _ := history(t)
	newer["9999_later.sql"] = later()
	s, err := open(t.Context(), path, newer)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), path)
	f := fault.Of(err)
	if f == nil || f.Kind != fault.FailedPrecondition || f.Reason != "newer_schema" || !strings.Contains(f.Message, "schema 9999, this one knows ") {
		t.Fatalf("a newer schema: %v", err)
	}
	after, err := os.ReadFile(path)
	if err != nil || string(before) != string(after) {
		t.Errorf("the refused database was changed (%v)", err)
	}
}

// TestBackupBeforeMigration proves R8: an older database is copied before it is changed,
// and keeps its rows.
func TestBackupBeforeMigration_R8(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.db")
	s := opened(t, path)
	addProject(t, s, "kept")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	history, last := history(t)
	history["9998_broken.sql"] = &fstest.MapFile{Data: []byte("-- +goose Up\nCREATE TABLE half (a text);\nNONSENSE;\n")}
	if _, err := open(t.Context(), path, history); err == nil || !strings.Contains(err.Error(), "it is as it was") {
		t.Fatalf("a broken migration: %v", err)
	}
	s = opened(t, path) // as it was: this version opens it
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	delete(history, "9998_broken.sql")
	history["9999_later.sql"] = later()
	s, err := open(t.Context(), path, history)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, p := range []string{path, fmt.Sprintf("%s.schema-%d", path, last)} {
		db, err := connect(p, true)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		var projects, tables int
		err = db.QueryRow("SELECT (SELECT COUNT(*) FROM projects), (SELECT COUNT(*) FROM sqlite_master WHERE name = 'later')").Scan(&projects, &tables)
		if want := map[bool]int{true: 1, false: 0}[p == path]; err != nil || projects != 1 || tables != want {
			t.Errorf("%s: %d projects, %d new tables, %v", p, projects, tables, err)
		}
	}
	if info, err := os.Stat(fmt.Sprintf("%s.schema-%d", path, last)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the backup's mode: %v, %v", info, err)
	}
}

func file(t *testing.T, name string) *fstest.MapFile {
	t.Helper()
	b, err := embedded.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return &fstest.MapFile{Data: b}
}

func later() *fstest.MapFile {
	return &fstest.MapFile{Data: []byte("-- +goose Up\nCREATE TABLE later (a text);\n")}
}

func addProject(t *testing.T, s *Store, id string) {
	t.Helper()
	err := s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		return tx.InsertProject(ctx, store.Project{ID: id, CreatedAt: time.Now()})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestFilesThatAreNone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := Open(t.Context(), filepath.Join(dir, "none", "hutch.db")); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a directory that is not there: %v", err)
	}
	junk := filepath.Join(dir, "junk.db")
	if err := os.WriteFile(junk, []byte(strings.Repeat("this is no database ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), junk); !fault.Is(err, fault.DataCorrupt) {
		t.Errorf("a file that is no database: %v", err)
	}
}

// TestQueriesUseIndexes proves that the queries of every day do not read whole tables.
func TestQueriesUseIndexes(t *testing.T) {
	t.Parallel()
	s := opened(t, filepath.Join(t.TempDir(), "hutch.db"))
	for name, query := range map[string]string{
		"page":     "SELECT * FROM sandboxes s WHERE project = 'p' AND state <> 'deleted' AND (created_at > 1 OR (created_at = 1 AND id > 'a')) ORDER BY created_at, id LIMIT 10",
		"labels":   "SELECT * FROM sandboxes s WHERE project = 'p' AND EXISTS (SELECT 1 FROM sandbox_labels AS l WHERE l.sandbox = s.id AND l.key = 'a' AND l.value = 'b') ORDER BY created_at, id",
		"name":     "SELECT * FROM sandboxes s WHERE project = 'p' AND name = 'n' AND deleted_at IS NULL",
		"given up": "SELECT * FROM sandboxes s WHERE project = 'p' AND name = 'n' AND deleted_at IS NOT NULL AND state <> 'deleted' ORDER BY deleted_at DESC, id DESC LIMIT 1",
		"active":   "SELECT * FROM operations o WHERE status IN ('pending', 'running') AND sandbox IN ('a') ORDER BY created_at, id",
		"actives":  "SELECT * FROM operations o WHERE status IN ('pending', 'running') ORDER BY created_at, id",
		"events":   "SELECT * FROM events e WHERE seq > 5 AND project = 'p' ORDER BY seq LIMIT 10",
		"version":  "SELECT * FROM sandboxes s WHERE state <> 'deleted' AND template_version = 'v' LIMIT 1",
		"hash":     "SELECT * FROM api_keys k WHERE hash = 'h'",
	} {
		rows, err := s.read.Query("EXPLAIN QUERY PLAN " + query)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for rows.Next() {
			var id, parent, unused int
			var detail string
			if err := rows.Scan(&id, &parent, &unused, &detail); err != nil {
				t.Error(err)
			}
			if strings.HasPrefix(detail, "SCAN") || strings.HasSuffix(detail, "(project=?)") && name != "page" && name != "labels" {
				t.Errorf("%s: %s", name, detail)
			}
		}
		rows.Close()
	}
}

// TestKilledWriter proves that what was reported survives a kill -9 and that the file
// opens again: a child writes until it is killed, and says what it has committed.
func TestKilledWriter(t *testing.T) {
	if path := os.Getenv("HUTCH_TEST_WRITER"); path != "" {
		writeUntilKilled(path)
	}
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.db")
	addProject(t, opened(t, path), "p")
	var last int
	for range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledWriter$")
		cmd.Env = append(os.Environ(), "HUTCH_TEST_WRITER="+path, fmt.Sprintf("HUTCH_TEST_FROM=%d", last+1))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for range 15 {
			if _, err := fmt.Fscanln(out, &last); err != nil {
				t.Fatalf("the writer ended: %v", err)
			}
		}
		if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		var more int
		for { // what it said before it died
			if _, err := fmt.Fscanln(out, &more); err != nil {
				break
			}
			last = more
		}
		_ = cmd.Wait()
		s, err := Open(t.Context(), path)
		if err != nil {
			t.Fatalf("after a kill: %v", err)
		}
		err = s.View(t.Context(), func(ctx context.Context, r store.Reader) error {
			rows, err := r.Sandboxes(ctx, store.SandboxFilter{})
			ops, err2 := r.ActiveOperations(ctx)
			if len(rows) < last || len(rows) > last+1 || len(ops) != len(rows) {
				t.Errorf("%d commits were reported, there are %d sandboxes and %d operations", last, len(rows), len(ops))
			}
			last = len(rows)
			if err == nil {
				err = err2
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if n, err := s.LastEvent(t.Context()); n != int64(last) || err != nil {
			t.Errorf("the last event is %d, %v, want %d", n, err, last)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func writeUntilKilled(path string) {
	ctx := context.Background()
	s, err := Open(ctx, path)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var from int
	fmt.Sscan(os.Getenv("HUTCH_TEST_FROM"), &from)
	for i := from; ; i++ {
		id := fmt.Sprintf("sbx_%08d", i)
		err := s.Update(ctx, func(ctx context.Context, tx store.Tx) error {
			row := sandbox.Sandbox{ID: id, Project: "p", Name: fmt.Sprint(i), State: sandbox.Creating, CreatedAt: time.Now(), Version: 1}
			op := sandbox.Operation{ID: "op_" + id, Project: "p", Sandbox: id, Kind: sandbox.Create, Status: sandbox.Pending, CreatedAt: time.Now(), Version: 1}
			if err := tx.InsertSandbox(ctx, row); err != nil {
				return err
			}
			if err := tx.InsertOperation(ctx, op); err != nil {
				return err
			}
			return tx.AddEvent(ctx, store.Event{Project: "p", Sandbox: id, Type: "sandbox.creating", At: time.Now()})
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(i)
	}
}

func BenchmarkCreateAndGet(b *testing.B) {
	s, err := Open(b.Context(), filepath.Join(b.TempDir(), "hutch.db"))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	storetest.Bench(b, s)
}

// TestLedgerIsAppendOnly_B7: the database itself refuses to change an entry or a fact.
func TestLedgerIsAppendOnly_B7(t *testing.T) {
	t.Parallel()
	s := opened(t, filepath.Join(t.TempDir(), "hutch.db"))
	for _, add := range []string{
		"INSERT INTO meter_facts (sandbox, n, fact) VALUES ('a', 1, '{}')",
		"INSERT INTO meter_entries VALUES ('a', 1, 'p', 'compute', 'running', 'stop', 1, 2, 1, 1, 0, 1, 1, 'ev_1')",
	} {
		if _, err := s.write.ExecContext(t.Context(), add); err != nil {
			t.Fatal(err)
		}
	}
	for _, change := range []string{
		"UPDATE meter_entries SET ended_at = 3", "DELETE FROM meter_entries", "UPDATE meter_facts SET fact = ''", "DELETE FROM meter_facts",
	} {
		if _, err := s.write.ExecContext(t.Context(), change); err == nil || !strings.Contains(err.Error(), "append-only") {
			t.Errorf("%s: %v", change, err)
		}
	}
}

// TestEventsOfBeforeHaveAnID: the upgrade gives those that are there a stable id.
func TestEventsOfBeforeHaveAnID(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.db")
	s, err := open(t.Context(), path, fstest.MapFS{"0001_init.sql": file(t, "migrations/0001_init.sql")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.write.ExecContext(t.Context(), `INSERT INTO events VALUES (7, 'p', 'sbx', '', 'sandbox.ready', 'host', '', NULL, 1)`); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = opened(t, path)
	events, err := s.Events(t.Context(), store.EventFilter{})
	if err != nil || len(events) != 1 || events[0].ID != "ev_7" {
		t.Errorf("%+v, %v", events, err)
	}
}
