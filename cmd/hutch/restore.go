package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// restoredFile says that the database was put back to an earlier time, and that the next
// start has to make it agree with what the host did since.
func (l layout) restoredFile() string { return filepath.Join(l.data, "restored.json") }

// restoredMark is what is in it.
type restoredMark struct {
	At   time.Time `json:"at"`
	From string    `json:"from"` // the backup, "" for a PostgreSQL database
}

func backupRestoreCommand(env cli.Env) *cobra.Command {
	var (
		at            place
		postgres, yes bool
		asJSON        bool
	)
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Put the database back to a backup",
		Long: "Put the database of the installation on this machine back to a backup, in place of the one that is there, which is kept beside it. The server must be down. " +
			"Disks and saved memory are not touched, and sandboxes that run go on.\n\n" +
			"What the sandboxes did since the backup counts: the next start makes the database agree with it. Those that were made since are listed as unknown, and nothing of them is removed: " +
			"`hutch up --adopt all` takes them in. Those that were deleted since become failed (`host_lost`). What only the database knew is as it was then: keys, names, labels, prices, and the ledger.\n\n" +
			"A PostgreSQL database is put back by pg_restore; --postgres then says so to this machine.",
		Example: "hutch down && hutch backup restore /var/lib/hutch/backups/hutch-20260301T100000.000Z.tar && hutch up",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			if postgres == (len(args) == 1) {
				return fault.New(fault.InvalidArgument, "`hutch backup restore` takes a backup's file, or --postgres after a pg_restore; `hutch backup ls` lists the files in the data directory")
			}
			if postgres {
				return markRestored(env, l, asJSON)
			}
			return restoreBackup(cmd.Context(), env, l, s.path, args[0], yes, asJSON)
		},
	}
	at.flags(cmd)
	cmd.Flags().BoolVar(&postgres, "postgres", false, "the PostgreSQL database was put back already; take no file")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addJSON(cmd, &asJSON)
	return cmd
}

// takeDown holds the installation, so that no server uses it.
func (l layout) takeDown() (*os.File, error) {
	lock, err := l.lock()
	if errors.Is(err, errLocked) {
		return nil, fault.New(fault.FailedPrecondition, "a server uses %s; `hutch down%s` first, sandboxes go on meanwhile", l.data, l.dataFlag()).Because("running")
	}
	return lock, err
}

func markRestored(env cli.Env, l layout, asJSON bool) error {
	if _, err := l.readDatabase(); err != nil {
		return fault.New(fault.FailedPrecondition, "%s does not keep its state in PostgreSQL; give the file of a backup", l.data)
	}
	lock, err := l.takeDown()
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := writeDurably(l.restoredFile(), restoredMark{At: time.Now().UTC()}); err != nil {
		return err
	}
	if asJSON {
		return printJSON(env, map[string]any{"data": l.data, "from": nil})
	}
	fmt.Fprintf(env.Stdout, "the next `hutch up%s` makes the database agree with what the sandboxes here did since\n", l.dataFlag())
	return nil
}

// restoreBackup puts the database back. It may be called again after it died anywhere.
func restoreBackup(ctx context.Context, env cli.Env, l layout, settingsPath, from string, yes, asJSON bool) error {
	if err := ofPostgres(l); err != nil {
		return err
	}
	if live, err := l.live(); err == nil && live {
		_, err := l.takeDown()
		return err // without making anything
	}
	if err := l.prepare(); err != nil {
		return err
	}
	lock, err := l.takeDown()
	if err != nil {
		return err
	}
	defer lock.Close()
	work, err := os.MkdirTemp(l.data, ".restore-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	m, err := openArchive(from, work)
	if err != nil {
		return err
	}
	staged := filepath.Join(work, backupDatabaseName)
	have, want, err := sqlite.Schema(ctx, staged)
	if err != nil {
		return err
	}
	if have > want {
		return fault.New(fault.FailedPrecondition, "a newer hutch (%s) wrote the backup %s (schema %d, this one knows %d); restore it with that version", m.Version, from, have, want).Because("newer_schema")
	}
	if err := sqlite.Check(ctx, staged); err != nil {
		return err
	}
	there := false
	if _, err := os.Stat(l.database()); err == nil {
		there = true
		if !yes {
			what := fmt.Sprintf("put the database of %s back to %s: what it learned since is kept in %s only", l.data, m.MadeAt.Local().Format("2006-01-02 15:04:05 MST"), l.beforeRestore())
			if err := cli.Confirm(ctx, env, what); err != nil {
				return err
			}
		}
	}
	// The mark is first: where this dies, the next start asks the host once too often.
	if err := writeDurably(l.restoredFile(), restoredMark{At: time.Now().UTC(), From: from}); err != nil {
		return err
	}
	if there {
		// The last that closes a database takes its log in, so that none is left beside it.
		if err := sqlite.Copy(ctx, l.database(), l.beforeRestore()); err != nil && !fault.Is(err, fault.DataCorrupt) {
			return err
		}
	}
	for _, suffix := range []string{"-wal", "-shm"} {
		if err := os.Remove(l.database() + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := os.Rename(staged, l.database()); err != nil {
		return err
	}
	if err := syncDir(l.data); err != nil {
		return err
	}
	return tellRestored(ctx, env, l, m, work, settingsPath, there, asJSON)
}

func (l layout) beforeRestore() string { return l.database() + ".before-restore" }

func tellRestored(ctx context.Context, env cli.Env, l layout, m backupManifest, work, settingsPath string, there, asJSON bool) error {
	notes := []string{}
	if m.Settings != "" {
		note, err := restoreSettings(filepath.Join(work, backupSettingsName), settingsPath)
		if err != nil {
			return err
		}
		notes = append(notes, note...)
	}
	unknown, err := madeSince(ctx, l)
	if err != nil && !fault.Is(err, fault.FailedPrecondition) { // of another schema: the server tells
		return err
	}
	if asJSON {
		document := map[string]any{"data": l.data, "from": m, "before": nil, "unknown": unknown, "notes": notes}
		if there {
			document["before"] = l.beforeRestore()
		}
		return printJSON(env, document)
	}
	fmt.Fprintf(env.Stdout, "the database of %s is as it was at %s\n", l.data, m.MadeAt.Local().Format("2006-01-02 15:04:05 MST"))
	if there {
		fmt.Fprintf(env.Stdout, "the one that was there is %s\n", l.beforeRestore())
	}
	for _, n := range notes {
		fmt.Fprintln(env.Stdout, n)
	}
	if len(unknown) > 0 {
		fmt.Fprintf(env.Stdout, "made since, and not in the database: %s; `hutch up%s --adopt all` takes %s in\n", strings.Join(unknown, ", "), l.dataFlag(), plural(len(unknown), "it", "them"))
	}
	fmt.Fprintf(env.Stdout, "`hutch up%s` starts the server, and makes the database agree with what the sandboxes did since\n", l.dataFlag())
	return nil
}

// restoreSettings puts the settings of a backup where there are none. Others that are
// there are left: they say what this machine is now.
func restoreSettings(from, to string) ([]string, error) {
	text, err := os.ReadFile(from)
	if err != nil {
		return nil, err
	}
	now, err := os.ReadFile(to)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return nil, err
		}
		return []string{"the settings are put back into " + to}, replaceFile(to, text, 0o600)
	case err != nil:
		return nil, err
	case !bytes.Equal(text, now):
		return []string{"the settings in " + to + " differ from those of the backup and are left as they are"}, nil
	}
	return nil, nil
}

// madeSince are the sandboxes that the journals have and the database does not.
func madeSince(ctx context.Context, l layout) ([]string, error) {
	unknown := []string{}
	facts, err := hostagent.Holdings{Dir: l.journals()}.Facts()
	if err != nil || len(facts) == 0 {
		return unknown, err
	}
	db, err := sqlite.Peek(ctx, l.database())
	if err != nil {
		return unknown, err
	}
	defer db.Close()
	err = db.View(ctx, func(ctx context.Context, r store.Reader) error {
		for _, f := range facts {
			_, err := r.Sandbox(ctx, f.Sandbox)
			if fault.Is(err, fault.NotFound) && f.State != "" {
				unknown = append(unknown, f.Name)
				err = nil
			}
			if err != nil && !fault.Is(err, fault.NotFound) {
				return err
			}
		}
		return nil
	})
	return unknown, err
}

// agree makes a database that was put back agree with what the host did since. It comes
// before the server acts on anything.
func agree(ctx context.Context, log *slog.Logger, l layout, ctl *control.Control) error {
	text, err := os.ReadFile(l.restoredFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var mark restoredMark
	if err == nil {
		err = json.Unmarshal(text, &mark)
	}
	if err != nil {
		return err
	}
	settled, err := ctl.AfterRestore(ctx)
	if err != nil {
		return err
	}
	log.Info("the database was put back and agrees with the host now", "from", mark.From, "count", len(settled.Advanced))
	for _, id := range settled.Lost {
		log.Warn("the host has nothing of a sandbox that the restored database knows; it is failed", "sandbox", id)
	}
	for _, id := range settled.Cancelled {
		log.Info("an operation from before the backup is at work no longer and is cancelled", "op", id)
	}
	for _, f := range settled.Unknown {
		log.Warn("the host has a sandbox that the restored database does not know; `hutch up --adopt` takes it in", "sandbox", f.Sandbox, "state", f.State)
	}
	return os.Remove(l.restoredFile())
}

// adopt takes in the sandboxes that `up --adopt` names.
func adopt(ctx context.Context, log *slog.Logger, ctl *control.Control, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	if err := ctl.EnsureProject(ctx, defaultProject); err != nil {
		return err
	}
	taken, err := ctl.Adopt(ctx, defaultProject, ids...)
	for _, id := range taken {
		log.Info("a sandbox that only the host knew was taken in", "sandbox", id)
	}
	return err
}
