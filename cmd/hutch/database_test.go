package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
)

// TestDatabaseOfAnInstallation: it stays with the one that it began with, under one name
// of its host, and what it remembers has no password.
func TestDatabaseOfAnInstallation(t *testing.T) {
	url := pgtest.URL(t)
	open := func(data, url string) (host string, err error) {
		l, err := layoutOf(data)
		if err != nil {
			t.Fatal(err)
		}
		db, host, err := openDatabase(t.Context(), serverConfig{layout: l, databaseURL: url, log: slog.New(slog.DiscardHandler)})
		if err == nil {
			err = db.Close()
		}
		return host, err
	}
	first, second, third := t.TempDir(), t.TempDir(), t.TempDir()
	host, err := open(first, url+"&password=hunter2")
	if err != nil || host == "" || host == hostID {
		t.Fatalf("the host is %q, %v", host, err)
	}
	if again, err := open(first, url); again != host || err != nil {
		t.Errorf("the host is %q, then %q, %v", host, again, err)
	}
	if other, err := open(second, url); other == host || err != nil {
		t.Errorf("the host of another installation is %q, %v", other, err)
	}
	if _, err := open(first, ""); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("SQLite after PostgreSQL: %v", err)
	}
	if _, err := os.Stat(filepath.Join(first, "hutch.db")); err == nil {
		t.Error("a refused start made a database")
	}
	if host, err := open(third, ""); host != hostID || err != nil {
		t.Errorf("SQLite: %q, %v", host, err)
	}
	if _, err := open(third, url); !fault.Is(err, fault.FailedPrecondition) {
		t.Errorf("PostgreSQL after SQLite: %v", err)
	}
	record, err := os.ReadFile(filepath.Join(first, "database.json"))
	if err != nil || strings.Contains(string(record), "hunter2") {
		t.Errorf("the record is %s, %v", record, err)
	}
}

// TestServerWithoutHost: it answers from the database alone, and nobody reads the URL's
// password off the process list.
func TestServerWithoutHost_R6(t *testing.T) {
	url := pgtest.URL(t)
	db, err := postgres.Open(t.Context(), url, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ctl := control.New(control.Config{Store: db, Shared: true})
	if err := ctl.EnsureProject(t.Context(), defaultProject); err != nil {
		t.Fatal(err)
	}
	_, secret, err := ctl.CreateKey(t.Context(), control.Actor{Project: defaultProject, Scopes: control.ScopesProject}, control.CreateKeyRequest{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	free.Close()
	cmd := exec.Command(binary, "server", "--listen", addr, "--database-url", url+"&password=hunter2")
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	stop := func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		return <-ended
	}
	for end := time.Now().Add(time.Minute); !answers(context.Background(), "http://"+addr); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it does not answer, %v: %s", stop(), log.String())
		}
	}
	shown, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", cmd.Process.Pid))
	if err != nil || strings.Contains(string(shown), "hunter2") || !strings.Contains(string(shown), addr) {
		t.Errorf("the process list shows %q, %v", shown, err)
	}
	run := func(args ...string) (string, error) {
		c := exec.Command(binary, args...)
		c.Env = append(os.Environ(), "HUTCH_URL=http://"+addr, "HUTCH_API_KEY="+secret)
		out, err := c.CombinedOutput()
		return string(out), err
	}
	if out, err := run("ls", "--json"); err != nil {
		t.Errorf("ls: %v: %s", err, out)
	}
	if out, err := run("new"); err == nil || !strings.Contains(out, "no host answers") {
		t.Errorf("new without a host: %v: %s", err, out)
	}
	if err := stop(); err != nil {
		t.Errorf("it ended with %v: %s", err, log.String())
	}
}

func TestFlagIsTakenAway(t *testing.T) {
	for _, args := range [][]string{
		{"hutch", "server", "--database-url", "secret", "--listen", "a"},
		{"hutch", "server", "--listen", "a", "--database-url=secret"},
		{"hutch", "server", "--database-url=x", "--listen", "a", "--database-url", "secret"},
		{"hutch", "server", "--listen", "a", "--database-url"},
	} {
		if got := withoutFlag(args, "--database-url"); !slices.Equal(got, []string{"hutch", "server", "--listen", "a"}) {
			t.Errorf("%q became %q", args, got)
		}
	}
}
