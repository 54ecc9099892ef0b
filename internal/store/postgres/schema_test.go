package postgres

import (
	"database/sql"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// pool gives plain connections to a database.
func pool(t *testing.T, url string) *sql.DB {
	t.Helper()
	config, err := parse(url)
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { db.Close() })
	return db
}

// column gives the strings of a query's only column.
func column(t *testing.T, db *sql.DB, query string) []string {
	t.Helper()
	rows, err := db.Query(query)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var out []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		out = append(out, s)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestSameTables: both engines make the same tables from nothing, with the same columns
// of the same types, and the same indexes.
func TestSameTables(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	opened(t, url)
	here := pool(t, url)
	path := filepath.Join(t.TempDir(), "hutch.db")
	s, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	there, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	columns := [2][]string{
		column(t, here, `SELECT table_name || '.' || column_name || ' ' || data_type || CASE is_nullable WHEN 'NO' THEN ' NOT NULL' ELSE '' END
			FROM information_schema.columns WHERE table_schema = current_schema()`),
		// A primary key of text may be NULL in SQLite, and is not declared NOT NULL.
		column(t, there, `SELECT m.name || '.' || c.name || ' ' || lower(c.type) || CASE WHEN c."notnull" OR c.pk > 0 THEN ' NOT NULL' ELSE '' END
			FROM sqlite_master AS m, pragma_table_info(m.name) AS c WHERE m.type = 'table'`),
	}
	indexes := [2][]string{
		column(t, here, `SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()`),
		column(t, there, `SELECT name FROM sqlite_master WHERE type = 'index'`),
	}
	for what, lists := range map[string][2][]string{"column": columns, "index": indexes} {
		var sets [2]map[string]bool
		for i, list := range lists {
			sets[i] = map[string]bool{}
			for _, name := range list {
				switch {
				case strings.HasPrefix(name, "goose_"), strings.HasPrefix(name, "event_inbox"): // what is PostgreSQL's own
				case strings.HasPrefix(name, "sqlite_"), strings.HasSuffix(name, "_pkey"), strings.HasSuffix(name, "_key"): // made for a key
				default:
					sets[i][name] = true
				}
			}
		}
		if len(sets[0]) < 10 {
			t.Errorf("only %d of %s were found", len(sets[0]), what)
		}
		for _, name := range slices.Sorted(maps.Keys(sets[0])) {
			if !sets[1][name] {
				t.Errorf("SQLite has no %s %s", what, name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(sets[1])) {
			if !sets[0][name] {
				t.Errorf("PostgreSQL has no %s %s", what, name)
			}
		}
	}
}

// history gives this version's migrations and further ones.
func history(t *testing.T, more map[string]string) fstest.MapFS {
	t.Helper()
	out := fstest.MapFS{}
	names, err := embedded.ReadDir("migrations")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range names {
		data, err := embedded.ReadFile("migrations/" + entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		out[entry.Name()] = &fstest.MapFile{Data: data}
	}
	for name, text := range more {
		out[name] = &fstest.MapFile{Data: []byte("-- +goose Up\n" + text)}
	}
	return out
}

// TestNewerSchemaIsRefused proves R8; an older one is brought up, and a migration that
// fails leaves it as it was.
func TestNewerSchemaIsRefused_R8(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := pool(t, url)
	s := opened(t, url)
	addProject(t, s, "kept")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := open(t.Context(), url, nil, history(t, map[string]string{"9001_broken.sql": "CREATE TABLE half (a text);\nNONSENSE;\n"}))
	if err == nil || !strings.Contains(err.Error(), "it is as it was") {
		t.Errorf("a broken migration: %v", err)
	}
	if got := column(t, db, "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() AND table_name = 'half'"); len(got) != 0 {
		t.Error("a broken migration left a table")
	}
	s, err = open(t.Context(), url, nil, history(t, map[string]string{"9001_later.sql": "CREATE TABLE later (a text);\n"}))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err = Open(t.Context(), url, nil)
		f := fault.Of(err)
		if f == nil || f.Kind != fault.FailedPrecondition || f.Reason != "newer_schema" || !strings.Contains(f.Message, "schema 9001") {
			t.Fatalf("a newer schema: %v", err)
		}
	}
	if got := column(t, db, "SELECT id FROM projects"); len(got) != 1 || got[0] != "kept" {
		t.Errorf("after all that the projects are %v", got)
	}
}

// TestServersThatStartTogether: each finds the schema made, by one of them.
func TestServersThatStartTogether_R8(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			s, err := Open(t.Context(), url, nil)
			if err != nil {
				t.Errorf("open: %v", err)
				return
			}
			if err := s.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
	}
	all.Wait()
}

// TestDatabasesThatAreNone: what is wrong is said, and the password is not.
func TestDatabasesThatAreNone(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	config, err := parse(url)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		url  string
		kind fault.Kind
		says string
	}{
		"no URL":      {"postgres://u:hunter2@[", fault.InvalidArgument, "postgres://USER"},
		"no database": {fmt.Sprintf("postgres:///none?host=%s&user=hutch&password=hunter2", config.Host), fault.FailedPrecondition, "there is no database none"},
		"nobody":      {fmt.Sprintf("postgres:///%s?host=%s&user=nobody&password=hunter2", config.Database, config.Host), fault.FailedPrecondition, "let the user nobody in"},
		"no server":   {"postgres://u:hunter2@127.0.0.1:1/d?connect_timeout=2", fault.Unavailable, "d (127.0.0.1:1) does not answer"},
	} {
		_, err := Open(t.Context(), c.url, nil)
		f := fault.Of(err)
		if f == nil || f.Kind != c.kind || !strings.Contains(f.Message, c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the password is told", name)
		}
	}
	latin := "latin_" + config.RuntimeParams["search_path"] // goes with the server
	if _, err := pool(t, url).Exec("CREATE DATABASE " + latin + " ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), fmt.Sprintf("postgres:///%s?host=%s&user=hutch", latin, config.Host), nil)
	if f := fault.Of(err); f == nil || f.Kind != fault.FailedPrecondition || !strings.Contains(f.Message, "LATIN1") {
		t.Errorf("a database that is not UTF-8: %v", err)
	}
}

// TestQueriesUseIndexes: the queries of every day do not read whole tables once those
// are large.
func TestQueriesUseIndexes(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	opened(t, url)
	config, err := parse(url)
	if err != nil {
		t.Fatal(err)
	}
	config.RuntimeParams["enable_seqscan"] = "off" // small tables are read whole with reason
	db := stdlib.OpenDB(*config)
	defer db.Close()
	for name, query := range map[string]string{
		"page":    "SELECT * FROM sandboxes s WHERE project = 'p' AND state <> 'deleted' AND (created_at > 1 OR (created_at = 1 AND id > 'a')) ORDER BY created_at, id LIMIT 10",
		"name":    "SELECT * FROM sandboxes s WHERE project = 'p' AND name = 'n' AND deleted_at IS NULL FOR NO KEY UPDATE",
		"active":  "SELECT * FROM operations o WHERE status IN ('pending', 'running') AND sandbox = 'a' FOR NO KEY UPDATE",
		"actives": "SELECT * FROM operations o WHERE status IN ('pending', 'running') ORDER BY created_at, id",
		"events":  "SELECT * FROM events e WHERE seq > 5 AND project = 'p' ORDER BY seq LIMIT 10",
		"version": "SELECT * FROM sandboxes s WHERE state <> 'deleted' AND template_version = 'v' LIMIT 1",
		"hash":    "SELECT * FROM api_keys k WHERE hash = 'h'",
		"due":     "SELECT webhook FROM webhook_deliveries d WHERE head AND claim_at <= 5 GROUP BY webhook ORDER BY MIN(next_at), MIN(seq) LIMIT 10",
		"claim":   "SELECT * FROM webhook_deliveries d WHERE head AND webhook = 'w' AND claim_at <= 5 ORDER BY next_at, seq LIMIT 10",
		"lane":    "SELECT id FROM webhook_deliveries d WHERE webhook = 'w' AND lane = 'l' AND status = 'pending' ORDER BY seq, id LIMIT 1",
		"log":     "SELECT * FROM webhook_deliveries d WHERE webhook = 'w' AND (seq < 5 OR (seq = 5 AND id < 'i')) ORDER BY seq DESC, id DESC LIMIT 10",
		"timers": "SELECT s.id, s.due_at FROM sandboxes AS s WHERE s.host = 'h' AND s.due_at IS NOT NULL AND s.due_at <= 5 AND NOT EXISTS " +
			"(SELECT 1 FROM operations AS o WHERE o.sandbox = s.id AND o.status IN ('pending', 'running')) ORDER BY s.due_at, s.id LIMIT 9",
	} {
		plan := strings.Join(column(t, db, "EXPLAIN "+query), "\n")
		if strings.Contains(plan, "Seq Scan") {
			t.Errorf("%s:\n%s", name, plan)
		}
	}
}

// TestLedgerIsAppendOnly_B7: the database itself refuses to change an entry or a fact.
func TestLedgerIsAppendOnly_B7(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	opened(t, url)
	db := pool(t, url)
	for _, add := range []string{
		"INSERT INTO meter_facts (sandbox, n, fact) VALUES ('a', 1, '{}')",
		"INSERT INTO meter_entries VALUES ('a', 1, 'p', 'compute', 'running', 'stop', 1, 2, 1, 1, 0, 1, 1, 'ev_1')",
	} {
		if _, err := db.ExecContext(t.Context(), add); err != nil {
			t.Fatal(err)
		}
	}
	for _, change := range []string{
		"UPDATE meter_entries SET ended_at = 3", "DELETE FROM meter_entries", "UPDATE meter_facts SET fact = ''", "DELETE FROM meter_facts",
	} {
		if _, err := db.ExecContext(t.Context(), change); err == nil || !strings.Contains(err.Error(), "append-only") {
			t.Errorf("%s: %v", change, err)
		}
	}
}
