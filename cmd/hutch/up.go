package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
)

// defaultProject owns everything until projects are made.
const defaultProject = "default"

// startTimeout bounds the way from the start of a background server to its first
// answer. The first start allocates the pool.
const startTimeout = 2 * time.Minute

type upFlags struct {
	place
	listen, poolSize       string
	sshListen              string
	databaseURL, prices    string
	foreground, noTemplate bool
	idle                   idleSettings
	events                 eventFlags
	observing
	tour, install bool
	root          string   // with install: of another machine's tree
	adopt         []string // sandboxes that only the host knows
	settings      settings // all that is in force, the flags included
	given         []string // the flags of the settings that were given, for the process in the background
	saves         savesFlags
}

func upCommand(env cli.Env) *cobra.Command {
	f := upFlags{observing: observing{getenv: env.Getenv}}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start hutch on this machine",
		Long: "Start hutch on this machine: the API server and the host agent in one process, on SQLite (or PostgreSQL, --database-url) and a directory. " +
			"It goes on in the background until `hutch down`; sandboxes outlive it, and the next `hutch up` finds them again. " +
			"The first start makes the disk pool, an API key with a context for this user's command line, and the template `base`.\n\n" +
			"Flags win over the file of settings (`hutch config show`). With --install the server becomes a service of the machine: it starts with it, and when the machine goes down " +
			"sandboxes that run are put to sleep, and are back after the boot.",
		Example: "hutch up\nhutch up --tour\nhutch up --data /srv/hutch --listen 127.0.0.1:4881 --foreground",
		GroupID: "server",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.root != "" && !f.install || f.install && f.foreground {
				return fault.New(fault.InvalidArgument, "--install-root goes with --install, and --install does not go with --foreground")
			}
			if f.install && len(f.adopt) > 0 {
				return fault.New(fault.InvalidArgument, "--adopt and --install do not go together; install the service first, and take the sandboxes in by `hutch down && hutch up --adopt`")
			}
			if f.foreground {
				if err := hideDatabaseURL(f.databaseURL); err != nil {
					return err
				}
			}
			if err := f.settle(cmd, env); err != nil {
				return err
			}
			if f.foreground {
				_ = os.Unsetenv(databaseVariable) // the programs that this one starts do not find it
				return runForeground(cmd.Context(), env, f)
			}
			return runBackground(cmd.Context(), env, f)
		},
	}
	f.place.flags(cmd)
	cmd.Flags().StringVar(&f.listen, "listen", defaultListen, "address of the API; without TLS a loopback one only")
	cmd.Flags().StringVar(&f.databaseURL, "database-url", "", databaseFlagHelp)
	cmd.Flags().StringVar(&f.poolSize, "pool-size", "", "size of the disk pool's file, such as 100GB, when it is first made (default: half of the free space)")
	cmd.Flags().StringVar(&f.prices, "prices", "", pricesFlagHelp)
	f.events.add(cmd)
	f.saves.add(cmd)
	cmd.Flags().BoolVar(&f.foreground, "foreground", false, "stay in the foreground and log to stderr")
	f.observing.flags(cmd)
	cmd.Flags().StringVar(&f.sshListen, "ssh-listen", "", "address of the SSH gateway, such as 127.0.0.1:4822 (default: no SSH is served)")
	cmd.Flags().BoolVar(&f.noTemplate, "no-template", false, "do not make the template `base`")
	f.idle.add(cmd)
	cmd.Flags().StringSliceVar(&f.adopt, "adopt", nil, "take in these sandboxes, by id, that the disks and journals here have and a restored database does not; `all` takes all")
	cmd.Flags().BoolVar(&f.install, "install", false, "make hutch a service of this machine, which starts with it")
	cmd.Flags().StringVar(&f.root, "install-root", "", "with --install: only write the service's files below this root, for an image of a machine")
	cmd.Flags().BoolVar(&f.tour, "tour", false, "then take one sandbox through its life, with the times that it took")
	return cmd
}

// settle takes from the settings what no flag says.
func (f *upFlags) settle(cmd *cobra.Command, env cli.Env) (err error) {
	if f.settings, err = readSettings(env, f.place.config); err != nil {
		return err
	}
	f.settings.flags(cmd)
	s := f.settings
	f.data, f.listen, f.databaseURL = s.text(config.Data), s.text(config.Listen), s.text(config.DatabaseURL)
	f.poolSize, f.sshListen = s.text(config.PoolSize), s.text(config.SSHListen)
	if f.prices == "" {
		f.prices = s.prices()
	}
	f.observing.settle(cmd, s)
	f.idle.settle(cmd, s)
	f.events.settle(cmd, s)
	f.saves.settle(cmd, s)
	for _, name := range []string{"listen", "pool-size", "prices", "idle-sample", "idle-min", "metrics-listen", "domain", "drain", "keep-events", "webhook-http", "webhook-allow", "undelete-for", "save-retry", "ssh-listen"} {
		if flag := cmd.Flags().Lookup(name); flag.Changed {
			f.given = append(f.given, "--"+name+"="+flag.Value.String())
		}
	}
	for _, id := range f.adopt {
		f.given = append(f.given, "--adopt", id)
	}
	return nil
}

// gave says whether a flag of the settings was given.
func (f upFlags) gave(name string) bool {
	return slices.ContainsFunc(f.given, func(arg string) bool { return strings.HasPrefix(arg, "--"+name+"=") })
}

func (f upFlags) config(log *slog.Logger) (serverConfig, error) {
	l, err := layoutOf(f.data)
	if err != nil {
		return serverConfig{}, err
	}
	s := f.settings
	cfg := serverConfig{
		layout: l, listen: f.listen, sshListen: f.sshListen, databaseURL: f.databaseURL, log: log, spares: s.count(config.Spares), limits: s.limits(),
		machineStop: s.text(config.MachineStop), stopLimit: s.duration(config.StopLimit), settings: s.shown(), adopt: f.adopt, idle: f.idle, events: f.events, observing: f.observing,
	}
	cfg.limits.Bounds = f.idle.bounds()
	if cfg.prices, err = parsePrices(f.prices); err != nil {
		return cfg, err
	}
	if err := f.idle.check(); err != nil {
		return cfg, err
	}
	if err := f.events.apply(&control.Config{}); err != nil {
		return cfg, err
	}
	if err := f.saves.read(&cfg); err != nil {
		return cfg, err
	}
	free, err := freeBytes(l.data)
	if err != nil {
		return cfg, err
	}
	if f.poolSize == "" {
		cfg.poolBytes = free / poolShare
		return cfg, nil
	}
	if cfg.poolBytes, err = cli.ParseDisk("pool-size", f.poolSize); err != nil || poolMade(l) {
		return cfg, err
	}
	return cfg, disk.CheckPoolSize(l.data, cfg.poolBytes, free)
}

// poolMade says whether the installation has its pool already.
func poolMade(l layout) bool {
	return disk.Peek(disk.Config{Dir: l.data, RunDir: l.run()}).Made()
}

// runForeground is the server itself.
func runForeground(ctx context.Context, env cli.Env, f upFlags) error {
	l, err := layoutOf(f.data)
	if err != nil {
		return err
	}
	env.Stderr = boundLog(env.Stderr, l, f.settings)
	cfg, err := f.config(newLog(env))
	if err != nil {
		return err
	}
	// SIGPWR says that the machine goes down: `hutch down --sleep` sends it.
	power := make(chan os.Signal, 1)
	signal.Notify(power, syscall.SIGPWR)
	defer signal.Stop(power)
	cfg.power = power
	if f.gave("pool-size") && poolMade(cfg.layout) {
		cfg.log.Info("--pool-size counts at the first start only: the pool stays as it is", "data", cfg.layout.data)
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	return serve(ctx, cfg, func(ctl *control.Control, url string) error {
		return greet(ctx, env, cfg, ctl, url)
	})
}

// greet makes what a first start needs: the project, and a key with a context for
// the command line of the user who started the server.
func greet(ctx context.Context, env cli.Env, cfg serverConfig, ctl *control.Control, url string) error {
	if err := ctl.EnsureProject(ctx, defaultProject); err != nil {
		return err
	}
	path := cli.ConfigPath(env.Getenv)
	if key, _ := cli.ContextKey(path, cfg.layout.contextName()); key != "" {
		if _, err := ctl.Authenticate(ctx, key); err == nil {
			return cli.WriteContext(path, cfg.layout.contextName(), url, key)
		}
	}
	_, secret, err := ctl.CreateKey(ctx, control.Actor{Project: defaultProject, Scopes: control.ScopeOperator},
		control.CreateKeyRequest{Name: "command line", Scopes: []string{"operator"}})
	if err != nil {
		return err
	}
	return cli.WriteContext(path, cfg.layout.contextName(), url, secret)
}

// runBackground starts the server as a process of its own, waits until it answers,
// and makes what the first use needs.
func runBackground(ctx context.Context, env cli.Env, f upFlags) error {
	cfg, err := f.config(nil)
	if err != nil {
		return err
	}
	l := cfg.layout
	if err := apiserver.CheckListen(f.listen, false); err != nil {
		return err
	}
	hadPool := poolMade(l)
	if f.install {
		if err := install(ctx, env, f, l); err != nil || f.root != "" {
			return err
		}
		f.given, f.adopt = nil, nil // the service has them
	}
	if hadPool && f.gave("pool-size") {
		fmt.Fprintf(env.Stderr, "--pool-size counts at the first start only: the pool in %s stays as it is\n", l.data)
	}
	if err := l.prepare(); err != nil {
		return err
	}
	path := cli.ConfigPath(env.Getenv)
	_, before := cli.ContextKey(path, l.contextName())
	info, err := l.readServer()
	if live, lerr := l.live(); lerr == nil && live && err == nil {
		if f.gave("prices") || len(f.adopt) > 0 {
			return fault.New(fault.FailedPrecondition, "hutch is up already (pid %d), and prices and sandboxes to take in are given at its start; `hutch down --data %s`, then again; "+
				"sandboxes go on meanwhile", info.PID, l.data)
		}
		if f.gave("webhook-allow") || f.gave("webhook-http") || f.gave("keep-events") {
			return fault.New(fault.FailedPrecondition, "hutch is up already (pid %d), and --webhook-allow, --webhook-http and --keep-events are given at its start; "+
				"`hutch down --data %s`, then again; sandboxes go on meanwhile", info.PID, l.data)
		}
		fmt.Fprintf(env.Stdout, "hutch is up already at %s (pid %d)\n", info.URL, info.PID)
		if info.Version != version {
			fmt.Fprintf(env.Stdout, "it is version %s, and this is %s: `hutch upgrade%s` puts this one in its place\n", cmp.Or(info.Version, "unknown"), version, l.dataFlag())
		}
	} else if info, err = startServer(ctx, env, f, l); err != nil {
		return err
	}
	key, _ := cli.ContextKey(path, l.contextName())
	if key == "" {
		return fault.New(fault.FailedPrecondition, "%s has no key for this server; `hutch down --data %s`, then `hutch up` again, makes one", path, l.data)
	}
	if err := cli.WriteContext(path, l.contextName(), info.URL, key); err != nil {
		return err
	}
	if before != "" && before != l.contextName() {
		fmt.Fprintf(env.Stdout, "the command line speaks to this server now (context %s; it was %s)\n", l.contextName(), before)
	}
	env.Getenv = speakTo(env.Getenv, info.URL, key)
	if st, err := os.Stat(l.poolFile()); err == nil && !hadPool {
		fmt.Fprintln(env.Stdout, madePool(l, st.Size(), f.poolSize != ""))
	}
	there, err := hasTemplate(ctx, info.URL, key)
	if err != nil {
		return err
	}
	if !there && !f.noTemplate {
		if err := makeTemplate(ctx, env); err != nil {
			return err
		}
	}
	if f.tour {
		if err := tour(ctx, env); err != nil {
			return err
		}
	}
	fmt.Fprint(env.Stdout, firstSteps(hadPool, there, f.noTemplate))
	return nil
}

// madePool tells what a first start took of the disk.
func madePool(l layout, bytes int64, chosen bool) string {
	why := "half of the free space; --pool-size at the first start chooses"
	if chosen {
		why = "as --pool-size says"
	}
	return fmt.Sprintf("made a pool of %.1f GB in %s (%s)", float64(bytes)/1e9, l.poolFile(), why)
}

// firstSteps are the lines that a first start ends with: where there was no pool, or no
// template. Later ones say nothing more.
func firstSteps(hadPool, hadTemplate, noTemplate bool) string {
	if hadPool && (hadTemplate || noTemplate) {
		return ""
	}
	first := ""
	if !hadTemplate && noTemplate {
		first = "hutch templates build base --debian\n      "
	}
	return "\nTry:  " + first + "hutch new --name demo\n      hutch exec demo -t -- bash\n      hutch sleep demo\n      hutch --help\n\n`hutch down` ends the server; sandboxes stay.\n"
}

// speakTo is an environment in which the command line speaks to one server.
func speakTo(getenv func(string) string, url, key string) func(string) string {
	return func(name string) string {
		switch name {
		case "HUTCH_URL":
			return url
		case "HUTCH_API_KEY":
			return key
		}
		return getenv(name)
	}
}

func startServer(ctx context.Context, env cli.Env, f upFlags, l layout) (serverInfo, error) {
	environ := os.Environ()
	if f.databaseURL != "" {
		environ = append(environ, databaseVariable+"="+f.databaseURL)
	}
	args := []string{"up", "--foreground", "--data", l.data}
	if path, err := filepath.Abs(f.settings.path); err == nil {
		environ = append(environ, configVariable+"="+path) // which need not be there
	}
	return launch(ctx, env, l, append(args, f.given...), environ)
}

// launch starts this program as a server in the background and waits until it answers.
func launch(ctx context.Context, env cli.Env, l layout, args, environ []string) (serverInfo, error) {
	self, err := os.Executable()
	if err != nil {
		return serverInfo{}, err
	}
	logFile, err := os.OpenFile(l.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return serverInfo{}, err
	}
	defer logFile.Close()
	from, err := logFile.Seek(0, 2)
	if err != nil {
		return serverInfo{}, err
	}
	cmd := exec.Command(self, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = environ, logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	if err := cmd.Start(); err != nil {
		return serverInfo{}, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	deadline := time.After(startTimeout)
	for {
		select {
		case <-ended:
			return serverInfo{}, fault.New(fault.FailedPrecondition, "the server did not start; it said: %s", lastWords(l.log(), from))
		case <-deadline:
			return serverInfo{}, fault.New(fault.DeadlineExceeded, "the server does not answer after %s; its log is %s", startTimeout, l.log())
		case <-ctx.Done():
			return serverInfo{}, context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
		info, err := l.readServer()
		if err == nil && info.PID == cmd.Process.Pid && answers(ctx, info.URL) {
			fmt.Fprintf(env.Stdout, "hutch is up at %s (pid %d, data %s)\n", info.URL, info.PID, l.data)
			return info, nil
		}
	}
}

func answers(ctx context.Context, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/readyz", nil)
	if err != nil {
		return false
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_ = res.Body.Close()
	return res.StatusCode == http.StatusOK
}

// lastWords is the end of a log from an offset on: what a server said before it died.
func lastWords(path string, from int64) string {
	data, err := os.ReadFile(path)
	if err != nil || int64(len(data)) < from {
		return "its log " + path + " cannot be read"
	}
	text := forPeople(string(data[from:]))
	if text == "" {
		return "it said nothing; its log is " + path
	}
	if lines := strings.Split(text, "\n"); len(lines) > 8 {
		text = strings.Join(lines[len(lines)-8:], "\n")
	}
	return "\n" + text
}

// forPeople leaves a log's records away, where it has other lines: what a server says
// at its end is written for people.
func forPeople(text string) string {
	var words strings.Builder
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "time=") && !strings.HasPrefix(line, `{"time":`) {
			words.WriteString(line)
		}
	}
	return strings.TrimSpace(cmp.Or(strings.TrimSpace(words.String()), text))
}
