package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

// configVariable names the file of settings where --config does not.
const configVariable = "HUTCH_SERVER_CONFIG"

const (
	configFlagHelp = "file of settings (default: " + config.DefaultPath + " where it is there, or " + configVariable + ")"
	dataFlagHelp   = "directory of everything that hutch keeps"
)

// setting is the value of a key that is in force, and where it was said.
type setting struct {
	Value  string `json:"value"`  // "" for none
	Source string `json:"source"` // default, FILE:LINE, --FLAG or a variable
}

// settings are what is in force, by the keys' names.
type settings struct {
	path   string // of the file, which need not be there
	values map[string]setting
}

// readSettings reads the file that the flag --config names, and what the environment
// says. A file with anything wrong in it is refused.
func readSettings(env cli.Env, flag string) (settings, error) {
	s := settings{path: settingsPath(env, flag), values: map[string]setting{}}
	file, problems, err := readConfig(s.path)
	if errors.Is(err, fs.ErrNotExist) && s.path == config.DefaultPath {
		err = nil
	}
	if err != nil {
		return s, configUnread(s.path, err)
	}
	if len(problems) > 0 {
		return s, refuse(s.path, problems)
	}
	for _, k := range config.Keys {
		s.values[k.Name] = setting{k.Default, "default"}
		if v, ok := file[k.Name]; ok {
			s.values[k.Name] = setting{v.Text, fmt.Sprintf("%s:%d", s.path, v.Line)}
		}
		if v := env.Getenv(k.Env); k.Env != "" && v != "" {
			s.values[k.Name] = setting{v, k.Env}
		}
	}
	return s, nil
}

func settingsPath(env cli.Env, flag string) string {
	for _, path := range []string{flag, env.Getenv(configVariable)} {
		if path != "" {
			return path
		}
	}
	return config.DefaultPath
}

// readConfig reads a file of settings, with what is wrong in it.
func readConfig(path string) (config.File, []config.Problem, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	file, problems := config.Parse(text)
	if v, ok := file[config.DatabaseURL]; ok {
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o077 != 0 {
			problems = append(problems, config.Problem{Line: v.Line, Key: config.DatabaseURL,
				Message: fmt.Sprintf("database_url may hold a password, and others can read the file (mode %04o); `chmod 600 %s`", st.Mode().Perm(), path)})
		}
	}
	if v, ok := file[config.Listen]; ok {
		if err := apiserver.CheckListen(v.Text, false); err != nil {
			problems = append(problems, config.Problem{Line: v.Line, Key: config.Listen, Message: fault.Of(err).Message})
		}
	}
	if v, ok := file[config.MetricsListen]; ok {
		if err := apiserver.CheckListen(v.Text, false); err != nil {
			problems = append(problems, config.Problem{Line: v.Line, Key: config.MetricsListen, Message: fault.Of(err).Message})
		}
	}
	if v, ok := file[config.Drain]; ok {
		if d, err := config.ParseDuration(v.Text); err == nil && d > drainMost {
			problems = append(problems, config.Problem{Line: v.Line, Key: config.Drain, Message: fmt.Sprintf("drain is longer than %s; give at most that", drainMost)})
		}
	}
	_, hasCPU := file[config.VCPUSecond]
	_, hasMemory := file[config.GiBSecond]
	if v := file[config.VCPUSecond]; hasCPU && !hasMemory {
		problems = append(problems, config.Problem{Line: v.Line, Key: config.GiBSecond,
			Message: "prices.vcpu_second is set and prices.gib_second is not; give it, as \"0\" if memory is to cost nothing"})
	}
	for _, key := range []string{config.GiBSecond, config.ArchiveGB} {
		if v, ok := file[key]; ok && !hasCPU {
			problems = append(problems, config.Problem{Line: v.Line, Key: config.VCPUSecond,
				Message: key + " is set and prices.vcpu_second is not; give it, as \"0\" if compute is to cost nothing"})
			break
		}
	}
	slices.SortStableFunc(problems, func(a, b config.Problem) int { return a.Line - b.Line })
	return file, problems, nil
}

func configUnread(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.NotFound, "there is no file of settings %s; `hutch config sample > %s` writes one", path, path)
	}
	return fault.Wrap(err, fault.InvalidArgument, "the file of settings %s cannot be read; correct --config, or its rights", path)
}

// refuse makes a fault of what is wrong in a file.
func refuse(path string, problems []config.Problem) error {
	f := fault.New(fault.InvalidArgument, "%s, %s", path, problems[0]).Because("config")
	if n := len(problems) - 1; n > 0 {
		f.Message += fmt.Sprintf(" (and %d more: `hutch config check --config %s` lists them)", n, path)
	}
	return f
}

func (s settings) text(key string) string { return s.values[key].Value }

// flags lets the flags of a verb win, those that were given. The prices of --prices are
// read where they are used.
func (s settings) flags(cmd *cobra.Command) {
	for _, k := range config.Keys {
		if f := cmd.Flags().Lookup(k.Flag); k.Flag != "" && k.Flag != "prices" && f != nil && f.Changed {
			s.values[k.Name] = setting{f.Value.String(), "--" + k.Flag}
		}
	}
}

// prices is what --prices would be.
func (s settings) prices() string {
	if s.text(config.VCPUSecond) == "" {
		return ""
	}
	text := "vcpu-second=" + s.text(config.VCPUSecond) + ",gib-second=" + s.text(config.GiBSecond)
	if v := s.text(config.ArchiveGB); v != "" {
		text += ",archive-gb-month=" + v
	}
	return text
}

// limits are what the settings alone say of control's limits.
func (s settings) limits() control.Limits {
	return control.Limits{RequestKeep: s.duration(config.KeepKeys)}
}

// duration and size are of keys whose text was looked at when it was read.
func (s settings) duration(key string) time.Duration {
	d, err := config.ParseDuration(s.text(key))
	if err != nil {
		panic(key + ": " + err.Error())
	}
	return d
}

func (s settings) size(key string) int64 {
	n, err := config.ParseSize(s.text(key))
	if err != nil {
		panic(key + ": " + err.Error())
	}
	return n
}

func (s settings) count(key string) int {
	var n int
	if _, err := fmt.Sscan(s.text(key), &n); err != nil {
		panic(key + ": " + err.Error())
	}
	return n
}

// shown are the settings without what is secret.
func (s settings) shown() map[string]setting {
	out := map[string]setting{}
	for _, k := range config.Keys {
		v := s.values[k.Name]
		if k.Secret && v.Value != "" {
			v.Value = "(set, not shown)"
		}
		out[k.Name] = v
	}
	return out
}

// place is how a verb of the machine is told which installation it is about.
type place struct{ data, config string }

// flags adds the flags that name an installation.
func (p *place) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.data, "data", defaultData, dataFlagHelp)
	cmd.Flags().StringVar(&p.config, "config", "", configFlagHelp)
}

// find reads the settings and gives the installation that they, or --data, name.
func (p *place) find(cmd *cobra.Command, env cli.Env) (layout, settings, error) {
	s, err := readSettings(env, p.config)
	if err != nil {
		return layout{}, s, err
	}
	s.flags(cmd)
	l, err := layoutOf(s.text(config.Data))
	return l, s, err
}

// addConfig adds to the client's `config` what is about the settings of the machine.
func addConfig(root *cobra.Command, env cli.Env) {
	for _, cmd := range root.Commands() {
		if cmd.Name() == "config" {
			cmd.Short = "Show which server hutch speaks to, and look at the settings of this machine"
			cmd.AddCommand(configCheckCommand(env), configShowCommand(env), configSampleCommand(env))
		}
	}
}

func configCheckCommand(env cli.Env) *cobra.Command {
	var (
		path   string
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:     "check",
		Short:   "Say what is wrong in the file of settings",
		Long:    "Read the file of settings of the installation on this machine and say what in it cannot be, each with its line and what to do. Nothing is started or changed. It fails where anything is wrong.",
		Example: "hutch config check\nhutch config check --config ./hutch.toml --json",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			path := settingsPath(env, path)
			file, problems, err := readConfig(path)
			if err != nil {
				return configUnread(path, err)
			}
			if asJSON {
				document := map[string]any{"path": path, "ok": len(problems) == 0, "settings": len(file), "problems": append([]config.Problem{}, problems...)}
				if err := printJSON(env, document); err != nil {
					return err
				}
			} else {
				for _, p := range problems {
					fmt.Fprintf(env.Stdout, "%s: %s\n", path, p)
				}
				if len(problems) == 0 {
					fmt.Fprintf(env.Stdout, "%s is right: it sets %d of %d keys\n", path, len(file), len(config.Keys))
				}
			}
			if n := len(problems); n > 0 {
				return fault.New(fault.InvalidArgument, "%d %s wrong in %s; do what the lines say", n, plural(n, "thing is", "things are"), path).Because("config")
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&path, "config", "", configFlagHelp)
	addJSON(cmd, &asJSON)
	return cmd
}

func configShowCommand(env cli.Env) *cobra.Command {
	var (
		at     place
		asJSON bool
	)
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the settings of the installation and where each comes from",
		Long: "Show every setting of the installation on this machine with where it was said: the file of settings, a variable, or the default. " +
			"Where a server runs, what it was started with is shown, flags included, and what has changed since, which counts at its next start. " +
			"`hutch config` alone shows which server the command line speaks to.",
		Example: "hutch config show\nhutch config show --config ./hutch.toml --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, s, err := at.find(cmd, env)
			if err != nil {
				return err
			}
			now, next := s.shown(), map[string]setting(nil)
			live, _ := l.live() // who may not look sees the file's
			if info, err := l.readServer(); err == nil && live && info.Settings != nil {
				now, next = info.Settings, now
			}
			if asJSON {
				return printJSON(env, showSettings(s.path, l, live, now, next))
			}
			for _, k := range config.Keys {
				v, value := now[k.Name], now[k.Name].Value
				if value == "" {
					value = "(" + k.Unset + ")"
				}
				fmt.Fprintf(env.Stdout, "%-24s %-32s %s\n", k.Name, value, v.Source)
				if after := next[k.Name]; next != nil && after.Value != v.Value && !strings.HasPrefix(v.Source, "--") {
					fmt.Fprintf(env.Stdout, "%-24s → %q at the next start, by %s\n", "", after.Value, after.Source)
				}
			}
			return nil
		},
	}
	at.flags(cmd)
	addJSON(cmd, &asJSON)
	return cmd
}

// shownKey is a key in the document of `config show`.
type shownKey struct {
	Key string `json:"key"`
	setting
	Next *setting `json:"next,omitempty"` // what it is at the next start, where that is another
}

func showSettings(path string, l layout, live bool, now, next map[string]setting) map[string]any {
	list := []shownKey{}
	for _, k := range config.Keys {
		v := shownKey{Key: k.Name, setting: now[k.Name]}
		if after, ok := next[k.Name]; ok && after.Value != v.Value && !strings.HasPrefix(v.Source, "--") {
			v.Next = &after
		}
		list = append(list, v)
	}
	return map[string]any{"path": path, "data": l.data, "running": live, "settings": list}
}

func configSampleCommand(env cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "sample",
		Short:   "Print a file of settings with every key in it",
		Long:    "Print a file of settings in which every key is a comment, with what it is and its default.",
		Example: "hutch config sample > " + config.DefaultPath,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprint(env.Stdout, config.Sample(nil))
			return err
		},
	}
}

func addJSON(cmd *cobra.Command, asJSON *bool) {
	cmd.Flags().BoolVar(asJSON, "json", false, "print one JSON document; errors as JSON on stderr")
}

func printJSON(env cli.Env, document any) error {
	enc := json.NewEncoder(env.Stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(document)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}
