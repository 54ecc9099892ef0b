package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// backupFormat is the form of an archive; one with a higher number is refused.
const backupFormat = 1

// The entries of an archive, in their order.
const (
	backupManifestName = "manifest.json"
	backupDatabaseName = "hutch.db"
	backupSettingsName = "hutch.toml" // only where there is a file of settings
)

// backupManifest is the first entry of an archive: it says what the others must be.
type backupManifest struct {
	Format   int               `json:"format"`
	MadeAt   time.Time         `json:"made_at"`
	Version  string            `json:"version"` // of the hutch that made it
	Schema   int64             `json:"schema"`
	Data     string            `json:"data"`
	Settings string            `json:"settings,omitempty"` // where the file of settings lay
	Bytes    map[string]int64  `json:"bytes"`
	SHA256   map[string]string `json:"sha256"`
}

func (l layout) backups() string { return filepath.Join(l.data, "backups") }

func backupCommand(env cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "backup",
		Short: "Back up what the server knows, and put it back",
		Long: "Back up what the server on this machine knows: its database (sandboxes, templates' names, keys, events, the ledger) and the file of settings. " +
			"It does not hold disks and saved memory, which are in the disk pool. A PostgreSQL database is backed up by its own tools.",
		Example: "hutch backup create\nhutch backup ls\nhutch backup restore /var/lib/hutch/backups/hutch-20260301T100000.000Z.tar",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(backupCreateCommand(env), backupLsCommand(env), backupRestoreCommand(env))
	return cmd
}

func backupCreateCommand(env cli.Env) *cobra.Command {
	var (
		at     place
		to     string
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Write a backup, beside a running server too",
		Long: "Write a backup of the database, as it is at one instant, and of the file of settings, into one file that only root may read: it holds what the settings hold. " +
			"The server goes on meanwhile.",
		Example: "hutch backup create\nhutch backup create --to /mnt/safe/hutch.tar",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			m, path, err := createBackup(cmd.Context(), l, s.path, to, time.Now())
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(env, shownBackup{Path: path, Manifest: &m})
			}
			fmt.Fprintf(env.Stdout, "%s has the database of %s (schema %d, %.1f MB)%s\n", path, l.data, m.Schema, float64(m.Bytes[backupDatabaseName])/1e6,
				map[bool]string{true: " and the settings"}[m.Settings != ""])
			return nil
		},
	}
	at.flags(cmd)
	cmd.Flags().StringVar(&to, "to", "", "file to write, which must not be there (default: a new one in DATA/backups)")
	addJSON(cmd, &asJSON)
	return cmd
}

// ofPostgres refuses what only a database of SQLite can have done.
func ofPostgres(l layout) error {
	record, err := l.readDatabase()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return fault.New(fault.Unsupported, "%s keeps its state in the PostgreSQL database %s, which is backed up by its own tools; use `pg_dump -Fc`, and keep %s with it. "+
		"After `pg_restore`, `hutch backup restore --postgres` on each machine makes the next start agree with what its sandboxes did since",
		l.data, record.Place, l.databaseFile()).Because("postgres_backup")
}

// createBackup writes an archive. A file that is not whole has no name.
func createBackup(ctx context.Context, l layout, settingsPath, to string, now time.Time) (m backupManifest, path string, err error) {
	if err := ofPostgres(l); err != nil {
		return m, "", err
	}
	if _, err := os.Stat(l.database()); err != nil {
		return m, "", fault.New(fault.NotFound, "there is no installation at %s to back up; name its directory with --data", l.data)
	}
	path = to
	if to == "" {
		path = filepath.Join(l.backups(), "hutch-"+now.UTC().Format("20060102T150405.000Z")+".tar")
		if err := os.MkdirAll(l.backups(), 0o700); err != nil {
			return m, "", err
		}
	}
	if path, err = filepath.Abs(path); err != nil {
		return m, "", err
	}
	if _, err := os.Lstat(path); err == nil {
		return m, "", fault.New(fault.Conflict, "%s is there already; give another file with --to", path)
	}
	work, err := os.MkdirTemp(l.data, ".backup-")
	if err != nil {
		return m, "", fault.Wrap(err, fault.PermissionDenied, "%s cannot be written; use sudo", l.data)
	}
	defer os.RemoveAll(work)
	copied := filepath.Join(work, backupDatabaseName)
	if err := sqlite.Copy(ctx, l.database(), copied); err != nil {
		return m, "", err
	}
	m = backupManifest{Format: backupFormat, MadeAt: now.UTC().Truncate(time.Millisecond), Version: version, Data: l.data, Bytes: map[string]int64{}, SHA256: map[string]string{}}
	if m.Schema, _, err = sqlite.Schema(ctx, copied); err != nil {
		return m, "", err
	}
	files := map[string]string{backupDatabaseName: copied}
	if st, err := os.Stat(settingsPath); err == nil && st.Mode().IsRegular() {
		files[backupSettingsName], m.Settings = settingsPath, settingsPath
	}
	temp, err := os.CreateTemp(filepath.Dir(path), ".backup-*") // made with mode 0600
	if err != nil {
		return m, "", fault.Wrap(err, fault.InvalidArgument, "the backup cannot be written into %s; check that the directory is there", filepath.Dir(path))
	}
	defer os.Remove(temp.Name()) // fails after the rename, as it should
	err = writeArchive(temp, &m, files)
	if err = errors.Join(err, temp.Sync(), temp.Close()); err != nil {
		return m, "", fault.Wrap(err, fault.Unavailable, "the backup %s could not be written; is the disk full?", path)
	}
	if err := os.Link(temp.Name(), path); err != nil { // a rename would replace what came in between
		return m, "", fault.Wrap(err, fault.Conflict, "the backup %s could not be written; give another file with --to", path)
	}
	return m, path, syncDir(filepath.Dir(path))
}

func writeArchive(to io.Writer, m *backupManifest, files map[string]string) error {
	for name, path := range files {
		var err error
		if m.SHA256[name], m.Bytes[name], err = digestOf(path); err != nil {
			return err
		}
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	w := tar.NewWriter(to)
	if err := w.WriteHeader(&tar.Header{Name: backupManifestName, Mode: 0o600, Size: int64(len(text)), ModTime: m.MadeAt}); err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	for _, name := range []string{backupDatabaseName, backupSettingsName} {
		path, there := files[name]
		if !there {
			continue
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: m.Bytes[name], ModTime: m.MadeAt}); err != nil {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		_, err = io.Copy(w, f)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return w.Close()
}

func digestOf(path string) (sum string, size int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	h := sha256.New()
	size, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), size, err
}

// openArchive unpacks an archive into a directory and checks all of it. What is not in
// the list of entries, and more bytes than the manifest says, are refused.
func openArchive(path, into string) (m backupManifest, err error) {
	damaged := func(cause error) error {
		return fault.Wrap(cause, fault.DataCorrupt, "%s is no whole backup of hutch; take another one", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return m, fault.Wrap(err, fault.NotFound, "the backup %s cannot be read; `hutch backup ls` lists those in the data directory", path)
	}
	defer f.Close()
	r := tar.NewReader(f)
	h, err := r.Next()
	if err != nil || h.Name != backupManifestName || h.Size > 1<<20 {
		return m, damaged(err)
	}
	if err := json.NewDecoder(r).Decode(&m); err != nil {
		return m, damaged(err)
	}
	if m.Format > backupFormat || m.Format < 1 {
		return m, fault.New(fault.FailedPrecondition, "a newer hutch (%s) wrote the backup %s; restore it with that version", m.Version, path).Because("newer_backup")
	}
	seen := map[string]bool{}
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || seen[h.Name] || h.Name != backupDatabaseName && h.Name != backupSettingsName || h.Size != m.Bytes[h.Name] {
			return m, damaged(err)
		}
		seen[h.Name] = true
		out, err := os.OpenFile(filepath.Join(into, h.Name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return m, err
		}
		sum := sha256.New()
		_, err = io.Copy(io.MultiWriter(out, sum), r)
		if err = errors.Join(err, out.Sync(), out.Close()); err != nil {
			return m, damaged(err)
		}
		if hex.EncodeToString(sum.Sum(nil)) != m.SHA256[h.Name] {
			return m, damaged(fmt.Errorf("%s differs from its digest", h.Name))
		}
	}
	if !seen[backupDatabaseName] || len(seen) != len(m.SHA256) {
		return m, damaged(errors.New("a part is missing"))
	}
	return m, nil
}

// shownBackup is a backup in the data directory.
type shownBackup struct {
	Path     string          `json:"path"`
	Bytes    int64           `json:"bytes,omitempty"`
	Manifest *backupManifest `json:"manifest"` // null where it cannot be read
}

func backupLsCommand(env cli.Env) *cobra.Command {
	var (
		at     place
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List the backups in the data directory",
		Example: "hutch backup ls\nhutch backup ls --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, _, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			list := []shownBackup{}
			for _, path := range l.backupFiles() {
				b := shownBackup{Path: path}
				if st, err := os.Stat(path); err == nil {
					b.Bytes = st.Size()
				}
				if m, err := readManifest(path); err == nil {
					b.Manifest = &m
				}
				list = append(list, b)
			}
			if asJSON {
				return printJSON(env, map[string]any{"backups": list})
			}
			for _, b := range list {
				what := "damaged"
				if m := b.Manifest; m != nil {
					what = fmt.Sprintf("%s  schema %d, by hutch %s", m.MadeAt.Local().Format("2006-01-02 15:04:05 MST"), m.Schema, m.Version)
				}
				fmt.Fprintf(env.Stdout, "%s  %.1f MB  %s\n", b.Path, float64(b.Bytes)/1e6, what)
			}
			if len(list) == 0 {
				fmt.Fprintf(env.Stdout, "there are no backups in %s; `hutch backup create` writes one\n", l.backups())
			}
			return nil
		},
	}
	at.flags(cmd)
	addJSON(cmd, &asJSON)
	return cmd
}

// backupFiles are the backups in the data directory, oldest first.
func (l layout) backupFiles() []string {
	list, _ := filepath.Glob(filepath.Join(l.backups(), "hutch-*.tar")) // fails for a bad pattern only
	slices.Sort(list)
	return list
}

func readManifest(path string) (m backupManifest, err error) {
	f, err := os.Open(path)
	if err != nil {
		return m, err
	}
	defer f.Close()
	r := tar.NewReader(f)
	if _, err := r.Next(); err != nil {
		return m, err
	}
	return m, json.NewDecoder(io.LimitReader(r, 1<<20)).Decode(&m)
}
