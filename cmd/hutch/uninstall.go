package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

func uninstallCommand(env cli.Env) *cobra.Command {
	var (
		at              place
		root            string
		purge, keepData bool
		yes, asJSON     bool
	)
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove hutch from this machine, with --purge its data too",
		Long: "Remove what hutch put on this machine: the service, the programs in /usr/local/bin, the file of settings, the context of this user's command line, and all that the installation has in the kernel. " +
			"Sandboxes that run are put to sleep first. The data directory stays, with every disk and saved memory, and a `hutch up` goes on from it.\n\n" +
			"With --purge the data directory goes too: all sandboxes, disks, saved memory, templates, the database and its backups. It is asked first, with what is lost; " +
			"where there is no terminal to ask on, --yes is needed. Programs, settings and the service stay while another installation on the machine uses them.",
		Example: "hutch uninstall\nhutch uninstall --purge\nhutch uninstall --data /srv/hutch --purge --yes",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if purge && keepData {
				return fault.New(fault.InvalidArgument, "--purge and --keep-data do not go together; leave one out")
			}
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			return uninstall(cmd.Context(), env, l, s, removal{root: machineRoot(root), purge: purge, yes: yes, asJSON: asJSON})
		},
	}
	at.flags(cmd)
	cmd.Flags().StringVar(&root, "install-root", "", "root of the tree that `up --install --install-root` wrote into")
	cmd.Flags().BoolVar(&purge, "purge", false, "remove the data directory too")
	cmd.Flags().BoolVar(&keepData, "keep-data", false, "keep the data directory, as without --purge")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addJSON(cmd, &asJSON)
	return cmd
}

type removal struct {
	root               machineRoot
	purge, yes, asJSON bool
}

// removed is what an uninstall did.
type removed struct {
	Removed []string `json:"removed"`
	Kept    []kept   `json:"kept"`
	Data    string   `json:"data"`
	Purged  bool     `json:"purged"`
}

func uninstall(ctx context.Context, env cli.Env, l layout, s settings, how removal) error {
	if os.Geteuid() != 0 {
		return fault.New(fault.PermissionDenied, "only root can uninstall; use `sudo hutch uninstall`")
	}
	if err := notSomebodyElses(l); err != nil {
		return err
	}
	if !how.yes {
		what, err := losses(ctx, l, s, how)
		if err != nil {
			return err
		}
		if err := cli.Confirm(ctx, env, what); err != nil {
			return err
		}
	}
	done := removed{Removed: []string{}, Kept: []kept{}, Data: l.data, Purged: how.purge}
	quiet := env
	quiet.Stdout = env.Stderr // what the steps say is not the document
	ours, err := how.root.unitOf(s.path)
	if err != nil {
		return err
	}
	if ours && how.root == "" && hasSystemd() {
		// The service must not start the server again.
		if err := systemctl(ctx, "disable", unitName); err != nil {
			return err
		}
	}
	live, err := l.live()
	if err != nil {
		return err
	}
	if live {
		if err := down(ctx, quiet, l, s, !how.purge); err != nil {
			return err
		}
	}
	if l.hasState() {
		if err := cleanUp(ctx, quiet, l, cleaning{yes: true}); err != nil {
			return err
		}
		done.Removed = append(done.Removed, "what the installation had in the kernel")
	}
	if how.purge {
		if mountedBelow(l.data) {
			return fault.New(fault.Unavailable, "something is still mounted below %s; unmount it and try again", l.data)
		}
		if err := removeData(l); err != nil {
			return err
		}
		done.Removed = append(done.Removed, l.data)
	}
	if err := removeFiles(ctx, s, l, how.root, ours, &done); err != nil {
		return err
	}
	path := cli.ConfigPath(env.Getenv)
	if gone, err := cli.RemoveContext(path, l.contextName()); err != nil {
		return err
	} else if gone {
		done.Removed = append(done.Removed, "the context "+l.contextName()+" in "+path)
	}
	_ = os.Remove(runRoot) // unless another installation has something in it
	return done.report(env, how.asJSON)
}

// notSomebodyElses refuses a directory that is no installation's: --purge removes it.
func notSomebodyElses(l layout) error {
	entries, err := os.ReadDir(l.data)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 || l.made() {
		return nil
	}
	if err != nil {
		return err
	}
	return fault.New(fault.InvalidArgument, "%s is no hutch installation; give its directory with --data", l.data)
}

// losses says what an uninstall takes away, for the question.
func losses(ctx context.Context, l layout, s settings, how removal) (string, error) {
	if !l.hasState() {
		return "remove hutch from this machine (there is no data in " + l.data + ")", nil
	}
	var names []string
	ready := 0
	db, err := peekDatabase(ctx, l, s.text(config.DatabaseURL))
	if err == nil {
		err = db.View(ctx, func(ctx context.Context, r store.Reader) error {
			list, err := r.Sandboxes(ctx, store.SandboxFilter{})
			for _, b := range list {
				names = append(names, b.Name)
				if b.State == sandbox.Ready {
					ready++
				}
			}
			return err
		})
		err = errors.Join(err, db.Close())
	}
	who := fmt.Sprintf("%d %s", len(names), plural(len(names), "sandbox", "sandboxes"))
	if err != nil {
		who = "its sandboxes (the database cannot be read: " + fault.Of(err).Message + ")"
	} else if len(names) > 0 {
		shown := names[:min(len(names), 10)]
		who += " (" + strings.Join(shown, ", ") + map[bool]string{true: " …"}[len(names) > len(shown)] + ")"
	}
	if !how.purge {
		return fmt.Sprintf("remove hutch from this machine (%s and all data stay in %s, and %d that run are put to sleep)", who, l.data, ready), nil
	}
	return fmt.Sprintf("remove hutch from this machine and lose for good %s with their disks and saved memory, %d templates, the keys, the ledger and %d backups, all in %s",
		who, templatesIn(ctx, l), len(l.backupFiles()), l.data), nil
}

func templatesIn(ctx context.Context, l layout) int {
	list, err := disk.Peek(disk.Config{Dir: l.data, RunDir: l.run()}).Templates(ctx)
	if err != nil {
		return 0
	}
	return len(list)
}

// removeData removes the data directory. Where it is a mount point itself, it stays, empty.
func removeData(l layout) error {
	entries, err := os.ReadDir(l.data)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(l.data, e.Name())))
	}
	if err != nil {
		return fault.Wrap(err, fault.Unavailable, "%s could not be removed; end what uses it and try again", l.data)
	}
	_ = os.Remove(l.data)
	return nil
}

// unitOf says whether the service is that of the installation with these settings.
func (r machineRoot) unitOf(settingsPath string) (bool, error) {
	text, err := os.ReadFile(r.unit())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	path, absErr := filepath.Abs(settingsPath)
	return bytes.Contains(text, []byte(" --config "+escapeUnit(path)+"\n")), errors.Join(err, absErr)
}

// removeFiles removes the service, the settings and the programs, but for those that
// another installation uses.
func removeFiles(ctx context.Context, s settings, l layout, root machineRoot, ours bool, done *removed) error {
	others := slices.DeleteFunc(runningServers(), func(o runningServer) bool { return o.Data == l.data })
	unit := func() bool { _, err := os.Lstat(root.unit()); return err == nil }
	var paths []string
	if ours {
		paths = append(paths, root.wanted(), root.unit(), filepath.Join(string(root), s.path))
	} else if s.found(root) && root == "" && s.text(config.Data) == l.data && !unit() {
		paths = append(paths, s.path)
	}
	switch {
	case unit() && !ours:
		done.Kept = append(done.Kept, kept{root.programs(), "the service of another installation uses the programs there"})
	case len(others) > 0 && root == "":
		done.Kept = append(done.Kept, kept{root.programs(), "the installation in " + others[0].Data + " runs and may use the programs there"})
	case root == "" && l.data != defaultData && layout{data: defaultData}.hasState():
		done.Kept = append(done.Kept, kept{root.programs(), "the installation in " + defaultData + " may use the programs there"})
	default:
		for _, name := range programs {
			paths = append(paths, filepath.Join(root.programs(), name))
		}
	}
	for _, path := range paths {
		err := os.Remove(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fault.Wrap(err, fault.PermissionDenied, "%s could not be removed", path)
		}
		done.Removed = append(done.Removed, path)
	}
	if dir := filepath.Dir(filepath.Join(string(root), s.path)); filepath.Base(dir) == "hutch" {
		_ = os.Remove(dir) // where it is empty
	}
	if ours && root == "" && hasSystemd() {
		return systemctl(ctx, "daemon-reload")
	}
	return nil
}

// found says whether the file of settings is there.
func (s settings) found(root machineRoot) bool {
	st, err := os.Stat(filepath.Join(string(root), s.path))
	return err == nil && st.Mode().IsRegular()
}

func (d removed) report(env cli.Env, asJSON bool) error {
	if asJSON {
		return printJSON(env, d)
	}
	for _, path := range d.Removed {
		fmt.Fprintf(env.Stdout, "removed %s\n", path)
	}
	for _, k := range d.Kept {
		fmt.Fprintf(env.Stdout, "kept %s: %s\n", k.Name, k.Why)
	}
	if d.Purged {
		fmt.Fprintln(env.Stdout, "hutch is gone from this machine")
	} else {
		fmt.Fprintf(env.Stdout, "hutch is gone from this machine, but for %s: `hutch up%s` goes on from it, `hutch uninstall --purge%s` removes it\n", d.Data, layout{data: d.Data}.dataFlag(), layout{data: d.Data}.dataFlag())
	}
	return nil
}
