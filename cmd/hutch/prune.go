package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// spare is something that an installation keeps and needs no more.
type spare struct {
	Kind  string `json:"kind"` // template, runtime, agent, backup
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
	Why   string `json:"why"`
	clear func(context.Context) error
}

// pruned is what a prune did, or would do.
type pruned struct {
	DryRun  bool    `json:"dry_run"`
	Removed []spare `json:"removed"` // or what would be
	Kept    []kept  `json:"kept"`    // could not be looked at, or not be removed
	Bytes   int64   `json:"bytes"`
}

type kept struct {
	Name string `json:"name"`
	Why  string `json:"why"`
}

func pruneCommand(env cli.Env) *cobra.Command {
	var (
		at     place
		dry    bool
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove what the installation keeps and needs no more",
		Long: "Remove what the installation on this machine keeps and needs no more: versions of templates that a newer one has replaced and no sandbox, disk or save is on; " +
			"programs of the runtime that nothing runs on and no saved memory needs; layers of the guest agent that no sandbox has; " +
			"and backups older than the settings keep them, never the newest. Nothing that belongs to a sandbox goes. --dry-run only says what would.\n\n" +
			"Events and ended operations that are older than the settings keep them are removed by the server, each hour. What nobody owns is removed by `hutch doctor --clean`.",
		Example: "hutch prune --dry-run\nhutch prune --json",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			done, err := prune(cmd.Context(), l, s, dry, time.Now())
			if err != nil {
				return err
			}
			return done.report(env, asJSON)
		},
	}
	at.flags(cmd)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only say what would be removed")
	addJSON(cmd, &asJSON)
	return cmd
}

func prune(ctx context.Context, l layout, s settings, dry bool, now time.Time) (pruned, error) {
	done := pruned{DryRun: dry, Removed: []spare{}, Kept: []kept{}}
	if os.Geteuid() != 0 {
		return done, fault.New(fault.PermissionDenied, "only root can prune; use `sudo hutch prune`")
	}
	if !l.hasState() {
		return done, fault.New(fault.NotFound, "there is no installation at %s; give its directory with --data", l.data)
	}
	live, err := l.live()
	if err != nil {
		return done, err
	}
	if !live { // none may start meanwhile
		lock, err := l.takeDown()
		if err != nil {
			return done, err
		}
		defer lock.Close()
	}
	p := pruner{layout: l, live: live, now: now, pool: disk.Peek(disk.Config{Dir: l.data, RunDir: l.run()})}
	p.server, _ = l.readServer()
	list := p.backups(s.duration(config.KeepBackups))
	if p.pool.Made() && !live && !mountedBelow(p.pool.Dir()) { // mounted, it may have sandboxes that run on
		if err := p.pool.Show(ctx); err != nil {
			return done, err
		}
		defer func() { _ = p.pool.TakeDown(context.WithoutCancel(ctx)) }()
	}
	for _, look := range []struct {
		what string
		of   func(context.Context) ([]spare, error)
	}{
		{"templates", func(ctx context.Context) ([]spare, error) { return p.templates(ctx, s.text(config.DatabaseURL)) }},
		{"programs of the runtime", p.runtimes},
		{"layers of the guest agent", p.agents},
	} {
		found, err := look.of(ctx)
		if err != nil { // what is not known to be needless is kept
			done.Kept = append(done.Kept, kept{look.what, fault.Of(err).Message})
			continue
		}
		list = append(list, found...)
	}
	for _, it := range list {
		if !dry {
			if err := it.clear(ctx); err != nil {
				done.Kept = append(done.Kept, kept{it.Name, fault.Of(err).Message})
				continue
			}
		}
		done.Removed = append(done.Removed, it)
		done.Bytes += it.Bytes
	}
	return done, nil
}

// pruner looks for what is needless.
type pruner struct {
	layout layout
	live   bool
	now    time.Time
	server serverInfo // of a live server
	pool   *disk.Pool
}

// backups are the archives in the data directory, and the copies from before a migration
// or a restore, that are older than they are kept. The newest archive stays.
func (p pruner) backups(keep time.Duration) (list []spare) {
	archives := p.layout.backupFiles()
	if len(archives) > 0 {
		archives = archives[:len(archives)-1]
	}
	copies, _ := filepath.Glob(p.layout.database() + ".schema-*") // fails for a bad pattern only
	for _, path := range append(append(archives, copies...), p.layout.beforeRestore()) {
		st, err := os.Stat(path)
		if err != nil || p.now.Sub(st.ModTime()) < keep {
			continue
		}
		list = append(list, spare{"backup", path, st.Size(), fmt.Sprintf("%d days old", int(p.now.Sub(st.ModTime()).Hours()/24)), remover(path)})
	}
	return list
}

func remover(path string) func(context.Context) error {
	return func(context.Context) error { return os.RemoveAll(path) }
}

// peekDatabase opens the installation's database to read it, beside its server.
func peekDatabase(ctx context.Context, l layout, url string) (store.Store, error) {
	if _, err := l.readDatabase(); err == nil {
		if url == "" {
			return nil, fault.New(fault.FailedPrecondition, "%s keeps its state in PostgreSQL; give its URL in %s or in the settings", l.data, databaseVariable)
		}
		s, err := postgres.Peek(ctx, url)
		if err != nil {
			return nil, err
		}
		return s, nil
	}
	s, err := sqlite.Peek(ctx, l.database())
	if err != nil {
		return nil, err // not a nil *sqlite.Store in an interface
	}
	return s, nil
}

// templates are the versions that no template is any more, and no sandbox and nothing in
// the pool is on. Templates are written by the same transaction that reads them for a new
// sandbox, so one that no row names now will not be asked for again, unless the same is
// built once more: it is looked at again just before it goes.
func (p pruner) templates(ctx context.Context, url string) ([]spare, error) {
	if !p.pool.Made() {
		return nil, nil
	}
	there, err := p.pool.Templates(ctx)
	if err != nil {
		return nil, err
	}
	needed := func(ctx context.Context, list []disk.Template) (map[string]bool, error) {
		db, err := peekDatabase(ctx, p.layout, url)
		if err != nil {
			return nil, err
		}
		defer db.Close()
		return p.needed(ctx, db, list)
	}
	have, err := needed(ctx, there)
	if err != nil {
		return nil, err
	}
	var list []spare
	for _, t := range there {
		if have[t.Digest] {
			continue
		}
		list = append(list, spare{"template", t.Digest, t.Bytes, "replaced by a newer version, and nothing is on it", func(ctx context.Context) error {
			now, err := needed(ctx, []disk.Template{t})
			if err == nil && now[t.Digest] {
				err = fault.New(fault.Conflict, "it is needed again")
			}
			if err != nil {
				return err
			}
			return p.pool.DeleteTemplate(ctx, t.Digest)
		}})
	}
	return list, nil
}

// needed says which templates something is on, or will be.
func (p pruner) needed(ctx context.Context, db store.Store, list []disk.Template) (map[string]bool, error) {
	out := map[string]bool{}
	err := db.View(ctx, func(ctx context.Context, r store.Reader) error {
		active, err := r.ActiveOperations(ctx)
		if err != nil {
			return err
		}
		for _, op := range active {
			if op.Sandbox == "" {
				return fault.New(fault.FailedPrecondition, "a template is being built; try again after it")
			}
		}
		for _, t := range list {
			named, err := r.TemplatesByDigest(ctx, t.Digest)
			if err != nil {
				return err
			}
			pinned, err := r.Sandboxes(ctx, store.SandboxFilter{Version: t.Digest, Page: store.Page{Limit: 1}})
			if err != nil {
				return err
			}
			out[t.Digest] = len(named)+len(pinned) > 0 || p.pool.WrittenOn(t.Digest) != ""
		}
		return nil
	})
	return out, err
}

// runtimes are the kept programs of the runtime that are neither the server's own, nor run,
// nor needed by a saved memory (R8). Where anything saved cannot be read, all stay.
func (p pruner) runtimes(ctx context.Context) ([]spare, error) {
	if p.live && p.server.Runtime == "" {
		return nil, fault.New(fault.FailedPrecondition, "the server is of a version that does not say which it uses; start it anew with this one")
	}
	folders, err := os.ReadDir(p.layout.binaries())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	before, _, err := p.saved()
	if err != nil {
		return nil, err
	}
	var idle []string
	for _, folder := range folders {
		path := filepath.Join(p.layout.binaries(), folder.Name(), "hutch-runsc")
		st, err := os.Stat(path)
		if err != nil || p.live && path == p.server.Runtime || !p.live && p.now.Sub(st.ModTime()) < youth {
			continue
		}
		runs, err := runsFrom(path)
		if err != nil {
			return nil, err
		}
		if !runs {
			idle = append(idle, path)
		}
	}
	// A sandbox that wakes or falls asleep at this moment is seen before, between or after.
	after, _, err := p.saved()
	if err != nil {
		return nil, err
	}
	var list []spare
	for _, path := range idle {
		said, err := versionOf(ctx, path)
		if err != nil {
			return nil, err
		}
		if before[said] || after[said] {
			continue
		}
		bytes := int64(0)
		if st, err := os.Stat(path); err == nil {
			bytes = st.Size()
		}
		list = append(list, spare{"runtime", path, bytes, "nothing runs on version " + said + " and no saved memory needs it", remover(filepath.Dir(path))})
	}
	return list, nil
}

// saved are the versions of the runtime and the layers of the agent that saves need.
func (p pruner) saved() (versions, layers map[string]bool, err error) {
	manifests, err := p.pool.Manifests()
	if err != nil {
		return nil, nil, err
	}
	versions, layers = map[string]bool{}, map[string]bool{}
	for _, text := range manifests {
		v, layer, err := hostagent.Needs(text)
		if err != nil {
			return nil, nil, err
		}
		versions[v], layers[layer] = true, true
	}
	return versions, layers, nil
}

// runsFrom says whether a process has a program as its own.
func runsFrom(path string) (bool, error) {
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil || len(links) == 0 {
		return true, fault.Wrap(err, fault.Unavailable, "what runs cannot be read in /proc")
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && strings.TrimSuffix(to, " (deleted)") == path {
			return true, nil
		}
	}
	return false, nil
}

// agents are the layers of the guest agent that no journal names and no mount has.
func (p pruner) agents(ctx context.Context) ([]spare, error) {
	if p.live && p.server.Agent == "" {
		return nil, fault.New(fault.FailedPrecondition, "the server is of a version that does not say which it uses; start it anew with this one")
	}
	inv, err := p.pool.Inventory(ctx)
	if err != nil {
		return nil, err
	}
	needed, err := hostagent.Holdings{Dir: p.layout.journals()}.Layers()
	if err != nil {
		return nil, err
	}
	_, saved, err := p.saved()
	if err != nil {
		return nil, err
	}
	var list []spare
	for _, digest := range inv.Agents {
		if needed[digest] || saved[digest] || p.live && digest == p.server.Agent {
			continue
		}
		list = append(list, spare{"agent", digest, 0, "no sandbox has it", func(ctx context.Context) error { return p.pool.DeleteAgent(ctx, digest) }})
	}
	return list, nil
}

func (d pruned) report(env cli.Env, asJSON bool) error {
	if asJSON {
		return printJSON(env, d)
	}
	word := map[bool]string{true: "would remove", false: "removed"}[d.DryRun]
	for _, it := range d.Removed {
		fmt.Fprintf(env.Stdout, "%s %-8s %s (%s)\n", word, it.Kind, it.Name, it.Why)
	}
	for _, k := range d.Kept {
		fmt.Fprintf(env.Stdout, "kept %s: %s\n", k.Name, k.Why)
	}
	fmt.Fprintf(env.Stdout, "%s %s, %s MB; everything with an owner stays\n", word, strconv.Itoa(len(d.Removed))+plural(len(d.Removed), " thing", " things"),
		strconv.FormatFloat(float64(d.Bytes)/1e6, 'f', 1, 64))
	return nil
}
