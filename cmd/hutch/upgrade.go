package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

func upgradeCommand(env cli.Env) *cobra.Command {
	var (
		at            place
		check, asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "Put this version of hutch in the place of the server that runs",
		Long: "Put this version of hutch, the one that is called, in the place of the server that runs on this machine, with the same flags. Sandboxes that run go on meanwhile, " +
			"and those that sleep wake with the program of the runtime that saved them. The database is backed up first, and brought up to date where it has to be. " +
			"A version older than the server's, or than the database, is refused. Where hutch is a service, the programs in /usr/local/bin are replaced by those beside this one.\n\n" +
			"--check only says what would be done, and fails where it could not.",
		Example: "./hutch upgrade --check\n./hutch upgrade",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			return upgrade(cmd.Context(), env, l, s, check, asJSON)
		},
	}
	at.flags(cmd)
	cmd.Flags().BoolVar(&check, "check", false, "only say what would be done")
	addJSON(cmd, &asJSON)
	return cmd
}

// upgradePlan is what an upgrade finds before it begins.
type upgradePlan struct {
	Checks []finding  `json:"checks"`
	From   string     `json:"from"` // version of the server that runs, "" for none
	To     string     `json:"to"`
	Schema [2]int64   `json:"schema"` // of the database, and of this version
	server serverInfo // that runs
	live   bool
}

func upgrade(ctx context.Context, env cli.Env, l layout, s settings, check, asJSON bool) error {
	if os.Geteuid() != 0 {
		return fault.New(fault.PermissionDenied, "only root can upgrade; use `sudo hutch upgrade`")
	}
	if !l.hasState() {
		return fault.New(fault.NotFound, "there is no installation at %s; `hutch up%s` makes one", l.data, l.dataFlag())
	}
	plan, err := planUpgrade(ctx, l, s)
	if err != nil {
		return err
	}
	if err := plan.report(env, asJSON && check, check); err != nil || check {
		return err
	}
	if plan.Schema[0] == plan.Schema[1] && plan.From == version && plan.sameProgram() {
		fmt.Fprintln(env.Stdout, "the server runs this version already")
		return nil
	}
	saved := ""
	if _, err := l.readDatabase(); errors.Is(err, fs.ErrNotExist) {
		if _, saved, err = createBackup(ctx, l, s.path, "", time.Now()); err != nil && !fault.Is(err, fault.Conflict) {
			return err
		}
		if err == nil {
			fmt.Fprintf(env.Stderr, "backed up to %s\n", saved)
		}
	}
	info, err := replaceServer(ctx, env, l, s, plan)
	if err != nil {
		f := fault.Of(err)
		back := "start it by the version before"
		if saved != "" && plan.Schema[0] != plan.Schema[1] {
			back = "with the version before: `hutch backup restore " + saved + "`, then `hutch up`"
		}
		return fault.Wrap(err, f.Kind, "%s\nsandboxes go on; to go back, %s", f.Message, back)
	}
	if asJSON {
		return printJSON(env, map[string]any{"from": plan.From, "to": version, "schema": plan.Schema, "backup": saved, "pid": info.PID, "url": info.URL})
	}
	fmt.Fprintf(env.Stdout, "hutch %s serves %s (pid %d); it was %s, and sandboxes went on\n", version, info.URL, info.PID, cmp.Or(plan.From, "down"))
	return nil
}

func planUpgrade(ctx context.Context, l layout, s settings) (p upgradePlan, err error) {
	p = upgradePlan{To: version, Checks: []finding{}}
	if p.live, err = l.live(); err != nil {
		return p, err
	}
	server := finding{"server", statusOK, "none runs on " + l.data + ": `hutch up" + l.dataFlag() + "` starts this version", ""}
	if p.live {
		if p.server, err = l.readServer(); err != nil {
			return p, fault.New(fault.Unavailable, "a process uses %s but does not answer yet; try again in a moment", l.data)
		}
		p.From = cmp.Or(p.server.Version, "unknown")
		server.Detail = fmt.Sprintf("version %s runs (pid %d); this is %s", p.From, p.server.PID, version)
		if older(version, p.From) {
			server.Status, server.Do = statusMissing, "use version "+p.From+" or a newer one: an older one may not read what it has written"
		}
	}
	p.Checks = append(p.Checks, server)
	schema, err := p.schema(ctx, l, s)
	if err != nil {
		return p, err
	}
	p.Checks = append(p.Checks, schema)
	for _, name := range programs[1:] {
		f := finding{name, statusOK, "", ""}
		if f.Detail, err = findBinary(name); err != nil {
			f.Status, f.Detail, f.Do = statusMissing, "not found", "put it beside this hutch"
		}
		p.Checks = append(p.Checks, f)
	}
	p.Checks = append(p.Checks, roomForCopy(l))
	return p, nil
}

// schema says what becomes of the database.
func (p *upgradePlan) schema(ctx context.Context, l layout, s settings) (finding, error) {
	f := finding{Check: "database", Status: statusOK}
	_, err := l.readDatabase()
	inPostgres := err == nil
	if inPostgres {
		p.Schema[0], p.Schema[1], err = postgres.Schema(ctx, p.databaseURL(s))
	} else {
		p.Schema[0], p.Schema[1], err = sqlite.Schema(ctx, l.database())
	}
	if err != nil {
		return f, err
	}
	have, want := p.Schema[0], p.Schema[1]
	switch {
	case have > want:
		f.Status, f.Detail = statusMissing, fmt.Sprintf("a newer hutch wrote it (schema %d, this one knows %d)", have, want)
		f.Do = "use that version, or restore a backup from before its upgrade"
	case have == want:
		f.Detail = fmt.Sprintf("has schema %d, and keeps it", have)
	case inPostgres:
		f.Status, f.Detail, f.Do = statusWarning, fmt.Sprintf("is brought from schema %d to %d, and the version before does not read it then", have, want), "`pg_dump` it first"
	default:
		f.Detail = fmt.Sprintf("is backed up, and brought from schema %d to %d", have, want)
	}
	return f, nil
}

// databaseURL is that of the server that runs, or of the settings.
func (p *upgradePlan) databaseURL(s settings) string {
	for _, v := range environOf(p.server.PID) {
		if url, ok := strings.CutPrefix(v, databaseVariable+"="); ok && p.live {
			return url
		}
	}
	return s.text(config.DatabaseURL)
}

func roomForCopy(l layout) finding {
	f := finding{"space", statusOK, "", ""}
	free, err := freeBytes(l.data)
	st, statErr := os.Stat(l.database())
	if err != nil || statErr != nil {
		f.Detail = "no copy of the database is made"
		return f
	}
	f.Detail = fmt.Sprintf("%.1f GB are free for copies of the database (%.1f MB)", float64(free)/1e9, float64(st.Size())/1e6)
	if free < 4*st.Size() {
		f.Status, f.Do = statusMissing, "free some space in "+l.data
	}
	return f
}

func (p upgradePlan) report(env cli.Env, asJSON, aloud bool) error {
	missing := slices.DeleteFunc(slices.Clone(p.Checks), func(f finding) bool { return f.Status != statusMissing })
	if asJSON {
		if err := printJSON(env, map[string]any{"from": p.From, "to": p.To, "schema": p.Schema, "checks": p.Checks, "ok": len(missing) == 0}); err != nil {
			return err
		}
	} else if aloud {
		for _, f := range p.Checks {
			fmt.Fprintf(env.Stdout, "%-8s %-12s %s\n", f.Status, f.Check, f.Detail)
			if f.Do != "" {
				fmt.Fprintf(env.Stdout, "%-8s %-12s → %s\n", "", "", f.Do)
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "cannot upgrade to %s: %s: %s; %s", version, missing[0].Check, missing[0].Detail, missing[0].Do).Because("upgrade")
}

// sameProgram says whether the server runs from the very program that is called.
func (p upgradePlan) sameProgram() bool {
	a, err := os.Stat("/proc/self/exe")
	b, otherErr := os.Stat(fmt.Sprintf("/proc/%d/exe", p.server.PID))
	return p.live && err == nil && otherErr == nil && os.SameFile(a, b)
}

// replaceServer ends the server and starts this version in its place.
func replaceServer(ctx context.Context, env cli.Env, l layout, s settings, p upgradePlan) (serverInfo, error) {
	quiet := env
	quiet.Stdout = env.Stderr
	ours, err := machineRoot("").unitOf(s.path)
	if err != nil {
		return serverInfo{}, err
	}
	if ours && hasSystemd() {
		if err := installPrograms(quiet, ""); err != nil {
			return serverInfo{}, err
		}
		if err := systemctl(ctx, "restart", unitName); err != nil {
			return serverInfo{}, err
		}
		if err := waitUp(ctx, l); err != nil {
			return serverInfo{}, err
		}
		return l.readServer()
	}
	if !p.live {
		return serverInfo{}, fault.New(fault.FailedPrecondition, "no server runs on %s; `hutch up%s` starts this version", l.data, l.dataFlag())
	}
	args, environ := argsOf(p.server.PID), environOf(p.server.PID)
	if len(args) < 2 || args[1] != "up" {
		return serverInfo{}, fault.New(fault.Unavailable, "how the server (pid %d) was started cannot be read; `hutch down`, then `hutch up` with its flags", p.server.PID)
	}
	if err := down(ctx, quiet, l, s, false); err != nil {
		return serverInfo{}, err
	}
	return launch(ctx, quiet, l, withoutFlag(args[1:], "--adopt"), environ) // that was for once
}

// argsOf and environOf read what a process was started with.
func argsOf(pid int) []string    { return words(pid, "cmdline") }
func environOf(pid int) []string { return words(pid, "environ") }

func words(pid int, file string) (list []string) {
	if pid <= 0 {
		return nil
	}
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), file))
	if err != nil {
		return nil
	}
	for word := range bytes.SplitSeq(bytes.TrimSuffix(text, []byte{0}), []byte{0}) {
		list = append(list, string(word))
	}
	return list
}

// older says whether a version comes before another, by their numbers. What has none is
// not compared.
func older(a, b string) bool {
	x, y := numbers(a), numbers(b)
	return x != nil && y != nil && slices.Compare(x, y) < 0
}

// numbers reads MAJOR.MINOR.PATCH; what follows a - is left out, as a version that is
// not out yet writes what that one will.
func numbers(v string) (out []int) {
	v, _, _ = strings.Cut(strings.TrimPrefix(v, "v"), "-")
	for part := range strings.SplitSeq(v, ".") {
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil
		}
		out = append(out, n)
	}
	return out
}
