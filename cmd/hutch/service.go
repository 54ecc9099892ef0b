package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/fault"
)

// unitName is the service of systemd.
const unitName = "hutch.service"

// programs are the three that hutch is made of, as they are installed.
var programs = []string{"hutch", "hutch-guest", "hutch-runsc"}

// machineRoot is where the service's files lie on a machine: "" for this one, or the
// root of another's tree.
type machineRoot string

func (r machineRoot) programs() string { return filepath.Join(string(r), "/usr/local/bin") }
func (r machineRoot) unit() string     { return filepath.Join(string(r), "/etc/systemd/system", unitName) }
func (r machineRoot) wanted() string {
	return filepath.Join(string(r), "/etc/systemd/system/multi-user.target.wants", unitName)
}

// unitSettings are what a unit says of one installation.
type unitSettings struct {
	config string // the file of settings
	data   string
	home   string // of the user whose command line gets the key
	stop   time.Duration
}

// unitText is the unit. KillMode=process leaves the sandboxes alone when the server ends or
// is started anew. ExecStop asks systemd whether the machine goes down: only then are
// sandboxes put away (R7). Restart=on-failure leaves a server down that `hutch down` ended.
func unitText(s unitSettings) string {
	program := filepath.Join(machineRoot("").programs(), "hutch")
	return `# Written by "hutch up --install"; "hutch uninstall" removes it.
[Unit]
Description=hutch: computers for AI agents
Documentation=https://github.com/hutchrun/hutch
Wants=network-online.target
After=network-online.target local-fs.target postgresql.service
RequiresMountsFor=` + escapeUnit(s.data) + `

[Service]
Type=exec
Environment=HOME=` + escapeUnit(s.home) + `
ExecStart=` + program + ` up --foreground --config ` + escapeUnit(s.config) + `
ExecStop=` + program + ` down --sleep=` + sleepMachine + ` --config ` + escapeUnit(s.config) + `
KillMode=process
Restart=on-failure
RestartSec=2
TimeoutStopSec=` + fmt.Sprint(int((s.stop + 2*downLimit).Seconds())) + `
LimitNOFILE=1048576
TasksMax=infinity
StandardOutput=append:` + escapeUnit(filepath.Join(s.data, "hutch.log")) + `
StandardError=inherit

[Install]
WantedBy=multi-user.target
`
}

// escapeUnit writes a path so that systemd reads just that: % begins a specifier, and a
// space a new word.
func escapeUnit(path string) string {
	return strings.NewReplacer("%", "%%", " ", `\x20`, "\"", `\x22`, "\\", `\x5c`, "$", "$$").Replace(path)
}

// hasSystemd says whether systemd runs this machine (sd_booted(3) looks at the same).
func hasSystemd() bool {
	st, err := os.Stat("/run/systemd/system")
	return err == nil && st.IsDir()
}

// systemctl runs it, with what it said in the error.
func systemctl(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fault.Wrap(err, fault.FailedPrecondition, "`systemctl %s` failed: %s; `journalctl -u %s` says more", strings.Join(args, " "), strings.TrimSpace(string(out)), unitName)
	}
	return nil
}

// install makes hutch a service of this machine, or writes its files below a root. It may
// be called again: programs and the unit are written anew, settings that are there stay.
func install(ctx context.Context, env cli.Env, f upFlags, l layout) error {
	root := machineRoot(f.root)
	if os.Geteuid() != 0 {
		return fault.New(fault.PermissionDenied, "only root can install a service; use `sudo hutch up --install`")
	}
	if root == "" && !hasSystemd() {
		return fault.New(fault.Unsupported, "this machine is not run by systemd, so there is nothing to install a service in; "+
			"`hutch up` starts the server until the machine goes down, and `hutch down --sleep` before that puts its sandboxes to sleep").Because("systemd")
	}
	path, err := filepath.Abs(f.settings.path)
	if err != nil {
		return err
	}
	at := filepath.Join(string(root), path)
	set := f.settings.fromFlags(l)
	if _, err := os.Stat(at); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := replaceFile(at, []byte(config.Sample(set)), 0o600); err != nil {
			return err
		}
		fmt.Fprintf(env.Stdout, "wrote %s\n", at)
	} else if err != nil {
		return err
	} else if err := sameSettings(at, set); err != nil {
		return err
	}
	if err := installPrograms(env, root); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(root.wanted()), 0o755); err != nil {
		return err
	}
	u := unitSettings{config: path, data: l.data, home: home(env), stop: f.settings.duration(config.StopLimit)}
	if err := replaceFile(root.unit(), []byte(unitText(u)), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(env.Stdout, "wrote %s\n", root.unit())
	if root != "" {
		if err := os.Symlink("../"+unitName, root.wanted()); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		fmt.Fprintf(env.Stdout, "the service begins when a machine starts from %s\n", root)
		return nil
	}
	if err := systemctl(ctx, "daemon-reload"); err != nil {
		return err
	}
	if live, err := l.live(); err != nil {
		return err
	} else if live && systemctl(ctx, "is-active", "--quiet", unitName) != nil {
		// One that was started by hand gives way to the service; sandboxes go on.
		if err := down(ctx, env, l, f.settings, false); err != nil {
			return err
		}
	}
	if err := l.prepare(); err != nil { // the unit's log lies in the directory
		return err
	}
	if err := systemctl(ctx, "enable", unitName); err != nil {
		return err
	}
	if err := systemctl(ctx, "restart", unitName); err != nil {
		return err
	}
	fmt.Fprintf(env.Stdout, "the service %s is enabled: it starts with the machine\n", unitName)
	return waitUp(ctx, l)
}

// waitUp waits until a server answers that was started by somebody else.
func waitUp(ctx context.Context, l layout) error {
	deadline := time.Now().Add(startTimeout)
	for time.Now().Before(deadline) {
		if info, err := l.readServer(); err == nil && answers(ctx, info.URL) {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
	return fault.New(fault.DeadlineExceeded, "the server does not answer after %s; its log is %s, and `systemctl status %s` says more", startTimeout, l.log(), unitName)
}

// fromFlags are the settings that flags gave, for a file that is written with them.
func (s settings) fromFlags(l layout) map[string]string {
	set := map[string]string{}
	for key, v := range s.values {
		if strings.HasPrefix(v.Source, "--") || v.Source == databaseVariable {
			set[key] = v.Value
		}
	}
	if _, given := set[config.Data]; given {
		set[config.Data] = l.data // absolute
	}
	return set
}

// sameSettings refuses flags that a file of settings contradicts: the service reads the
// file only.
func sameSettings(path string, set map[string]string) error {
	file, problems, err := readConfig(path)
	if err != nil {
		return configUnread(path, err)
	}
	if len(problems) > 0 {
		return refuse(path, problems)
	}
	for _, k := range config.Keys {
		if v, given := set[k.Name]; given && v != cmp.Or(file[k.Name].Text, k.Default) {
			return fault.New(fault.Conflict, "%s is there already and says something else of %s; the service reads that file only: change it there, or leave the flag out", path, k.Name)
		}
	}
	return nil
}

func home(env cli.Env) string {
	if h := env.Getenv("HOME"); filepath.IsAbs(h) {
		return h
	}
	if u, err := user.Current(); err == nil && filepath.IsAbs(u.HomeDir) {
		return u.HomeDir
	}
	return "/root"
}

// installPrograms copies the three programs to where the service expects them. Those that
// run from there already are left.
func installPrograms(env cli.Env, root machineRoot) error {
	if err := os.MkdirAll(root.programs(), 0o755); err != nil {
		return err
	}
	for _, name := range programs {
		from, err := programPath(name)
		if err != nil {
			return err
		}
		to := filepath.Join(root.programs(), name)
		a, errA := os.Stat(from)
		b, errB := os.Lstat(to)
		if errA == nil && errB == nil && os.SameFile(a, b) {
			continue
		}
		if err := copyProgram(from, to); err != nil {
			return fault.Wrap(err, fault.Unavailable, "%s could not be installed; is the disk full?", to)
		}
		fmt.Fprintf(env.Stdout, "wrote %s\n", to)
	}
	return nil
}

func programPath(name string) (string, error) {
	if name == "hutch" {
		return os.Executable()
	}
	return findBinary(name)
}

// copyProgram replaces a program as a whole: one that runs goes on with its own.
func copyProgram(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	temp, err := os.CreateTemp(filepath.Dir(to), "."+filepath.Base(to)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(temp.Name()) // fails after the rename, as it should
	_, err = io.Copy(temp, src)
	if err == nil {
		err = temp.Chmod(0o755)
	}
	if err = errors.Join(err, temp.Sync(), temp.Close()); err != nil {
		return err
	}
	return os.Rename(temp.Name(), to)
}
