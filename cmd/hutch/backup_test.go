package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// installation is one without a server, with a database and settings.
func installation(t *testing.T) (layout, settings, cli.Env) {
	t.Helper()
	l := layout{data: filepath.Join(t.TempDir(), "data"), tag: "test"}
	if err := os.MkdirAll(l.data, 0o700); err != nil {
		t.Fatal(err)
	}
	db, err := sqlite.Open(t.Context(), l.database())
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(filepath.Dir(l.data), "hutch.toml")
	writeFile(t, path, []byte("data = \""+l.data+"\"\n"))
	env := cli.Env{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard, Getenv: func(string) string { return "" }}
	s, err := readSettings(env, path)
	if err != nil {
		t.Fatal(err)
	}
	return l, s, env
}

// newer makes the database one that a newer hutch has written.
func (l layout) newer(t *testing.T) {
	t.Helper()
	db, err := sql.Open("sqlite", l.database())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), "INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, 1)"); err != nil {
		t.Fatal(err)
	}
}

// R9: an archive is whole or refused: cut anywhere, changed anywhere, or from a newer hutch.
func TestArchives(t *testing.T) {
	t.Parallel()
	l, s, _ := installation(t)
	m, path, err := createBackup(t.Context(), l, s.path, "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := createBackup(t.Context(), l, s.path, path, time.Now()); !fault.Is(err, fault.Conflict) {
		t.Errorf("over a backup that is there: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(l.data, ".backup-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := openArchive(path, t.TempDir())
	if err != nil || got.SHA256[backupSettingsName] == "" || got.Schema != m.Schema {
		t.Errorf("%+v, %v", got, err)
	}
	try := func(what string, text []byte, want fault.Kind) {
		t.Helper()
		bad := filepath.Join(t.TempDir(), "bad.tar")
		writeFile(t, bad, text)
		if _, err := openArchive(bad, t.TempDir()); !fault.Is(err, want) {
			t.Errorf("%s: %v, want %s", what, err, want)
		}
	}
	for _, n := range []int{0, 300, 512, 1500, len(whole) / 2, len(whole) - 2000} {
		try("cut", whole[:n], fault.DataCorrupt)
	}
	for _, n := range []int{2000, len(whole) / 2} {
		changed := bytes.Clone(whole)
		changed[n] ^= 1
		try("changed", changed, fault.DataCorrupt)
	}
	try("a later format", bytes.Replace(whole, []byte(`"format": 1`), []byte(`"format": 2`), 1), fault.FailedPrecondition)
	try("another's path", bytes.ReplaceAll(whole, []byte("hutch.toml"), []byte("../../x.tm")), fault.DataCorrupt)
}

// R9: a restore puts all of the database back, keeps the one that was there, and may come
// again; it touches nothing while a server runs, and nothing where the backup cannot be.
func TestRestoreOfAFile(t *testing.T) {
	t.Parallel()
	l, s, env := installation(t)
	add := func(id string) {
		t.Helper()
		db, err := sql.Open("sqlite", l.database())
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		if _, err := db.ExecContext(t.Context(), "INSERT INTO projects (id, name, created_at) VALUES (?, ?, 0)", id, id); err != nil {
			t.Fatal(err)
		}
	}
	has := func(path, id string) bool {
		t.Helper()
		db, err := sql.Open("sqlite", "file:"+path+"?mode=ro")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		var n int
		if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM projects WHERE id = ?", id).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n == 1
	}
	add("before")
	_, path, err := createBackup(t.Context(), l, s.path, "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	add("after")
	lock, err := l.lock()
	if err != nil {
		t.Fatal(err)
	}
	if err := restoreBackup(t.Context(), env, l, s.path, path, true, false); fault.Of(err).Reason != "running" {
		t.Errorf("beside a server: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if err := restoreBackup(t.Context(), env, l, s.path, path, false, false); err == nil {
		t.Error("nobody was asked")
	}
	if !has(l.database(), "after") {
		t.Fatal("a refused restore changed the database")
	}
	for range 2 {
		if err := restoreBackup(t.Context(), env, l, s.path, path, true, false); err != nil {
			t.Fatal(err)
		}
		if !has(l.database(), "before") || has(l.database(), "after") {
			t.Error("the database is not that of the backup")
		}
	}
	if _, err := os.Stat(l.restoredFile()); err != nil {
		t.Errorf("the next start would not ask the host: %v", err)
	}
	if st, err := os.Stat(l.database()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st, err)
	}
	if left, _ := filepath.Glob(filepath.Join(l.data, ".restore-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	l.newer(t)
	_, path, err = createBackup(t.Context(), l, s.path, "", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if err := restoreBackup(t.Context(), env, l, s.path, path, true, false); fault.Of(err).Reason != "newer_schema" {
		t.Errorf("of a newer hutch: %v", err)
	}
}

// A PostgreSQL database is its operator's to back up, and that is said.
func TestBackupOfPostgres(t *testing.T) {
	t.Parallel()
	l, s, env := installation(t)
	if err := os.Remove(l.database()); err != nil {
		t.Fatal(err)
	}
	if err := markRestored(env, l, false); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("of SQLite: %v", err)
	}
	if err := l.writeDatabase(databaseRecord{Place: "hutch (db:5432)", Host: "host_x"}); err != nil {
		t.Fatal(err)
	}
	_, _, err := createBackup(t.Context(), l, s.path, "", time.Now())
	if !fault.Is(err, fault.Unsupported) || !strings.Contains(err.Error(), "pg_dump") || !strings.Contains(err.Error(), "hutch (db:5432)") {
		t.Errorf("a backup: %v", err)
	}
	if err := restoreBackup(t.Context(), env, l, s.path, "x", true, false); !fault.Is(err, fault.Unsupported) {
		t.Errorf("a restore: %v", err)
	}
	if err := markRestored(env, l, false); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(l.restoredFile()); err != nil {
		t.Error(err)
	}
}

// R8: a database that a newer version wrote is refused before anything is touched.
func TestUpgradeRefusesADowngrade(t *testing.T) {
	t.Parallel()
	l, s, env := installation(t)
	lock, err := l.lock()
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	refused := func(want string) {
		t.Helper()
		err := upgrade(context.Background(), env, l, s, false, false)
		if !fault.Is(err, fault.FailedPrecondition) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	// A process of the test's is the server. It must not be ended.
	l.newer(t)
	if err := l.writeServer(serverInfo{PID: os.Getpid(), URL: "http://127.0.0.1:1", Version: version}); err != nil {
		t.Fatal(err)
	}
	refused("a newer hutch wrote it (schema 9999")
	if len(l.backupFiles()) > 0 {
		t.Error("a refused upgrade made a backup")
	}
}

// R7: what was put away is on record before the next is; a record that cannot be read keeps
// no server from starting.
func TestRestRecord(t *testing.T) {
	t.Parallel()
	l := layout{data: t.TempDir()}
	if list, err := l.readRest(); err != nil || len(list) != 0 {
		t.Errorf("of nothing: %v, %v", list, err)
	}
	writeFile(t, l.restFile(), []byte("{"))
	if _, err := l.readRest(); err == nil {
		t.Error("a torn record is read")
	}
	var list []map[string]any
	if err := json.Unmarshal([]byte(`[{"verb":"sleep"},{"verb":"sleep"},{"verb":"stop"}]`), &list); err != nil {
		t.Fatal(err)
	}
	if err := writeDurably(l.restFile(), list); err != nil {
		t.Fatal(err)
	}
	got, err := l.readRest()
	if err != nil || len(got) != 3 || restText(got) != "2 sandboxes sleep, 1 is stopped; the next `hutch up` brings them back" {
		t.Errorf("%q, %v", restText(got), err)
	}
	if restText(nil) != "no sandbox ran" {
		t.Errorf("%q", restText(nil))
	}
}

// A file of settings is refused where others could read a password in it, and where prices
// are given by half.
func TestSettingsThatDoNotGoTogether(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.toml")
	check := func(text, want string, mode os.FileMode) {
		t.Helper()
		writeFile(t, path, []byte(text))
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		_, problems, err := readConfig(path)
		if err != nil || want == "" && len(problems) > 0 || want != "" && (len(problems) != 1 || !strings.Contains(problems[0].String(), want)) {
			t.Errorf("%s: %v, %v; want %q", text, problems, err, want)
		}
	}
	check("database_url = \"postgres://u:p@h/d\"\n", "line 1: database_url may hold a password, and others can read the file (mode 0644); `chmod 600 "+path+"`", 0o644)
	check("database_url = \"postgres://u:p@h/d\"\n", "", 0o600)
	check("\nlisten = \"0.0.0.0:80\"\n", "line 2: will not listen on 0.0.0.0:80 without TLS", 0o600)
	check("[prices]\nvcpu_second = \"1\"\n", "line 2: prices.vcpu_second is set and prices.gib_second is not", 0o600)
	check("[prices]\ngib_second = \"1\"\n", "line 2: prices.gib_second is set and prices.vcpu_second is not", 0o600)
	check("[prices]\ngib_second = \"1\"\nvcpu_second = \"2\"\n", "", 0o600)
}
