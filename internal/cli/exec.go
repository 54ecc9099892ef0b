package cli

import (
	"context"
	"errors"
	"math"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// execFlags are the flags of exec.
type execFlags struct {
	tty, detach, json bool
	stdin             string
	user, cwd         string
	env               []string
	timeout           string
	requestKey        string
}

func (a *app) execCommand() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use:   "exec NAME -- CMD...",
		Short: "Run a command in a sandbox",
		Long: "Run a command in a sandbox, with its output and input passed through, and end with its exit code (128 + n after signal n). " +
			"Where hutch itself fails, or the sandbox ends under the command, the exit code is 125 and stderr says why. " +
			"SIGINT, SIGTERM, SIGHUP and SIGQUIT go to the command; a third ctrl-C leaves it running. A sleeping sandbox is woken.\n\n" +
			"A terminal (--tty) outlives hutch: ctrl-] and then d leaves it, as does a window that is closed or a connection that breaks, " +
			"and `hutch attach` comes back to it.\n\n" +
			"What is piped or redirected into hutch is the command's input; where nothing is, the keyboard is. " +
			"In a loop that reads a file, as `while read`, write --stdin=never, or the command eats the rest of the file. " +
			"The command is run as it stands, without a shell: for pipes and variables write sh -c '…'.",
		Example: "hutch exec demo -- uname -a\nhutch exec demo -t -- bash\ntar c . | hutch exec demo -- tar x -C /workspace\n" +
			"hutch exec demo --detach --json -- ./server",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 {
				return fault.New(fault.InvalidArgument, "hutch exec takes a NAME and a command; write hutch exec NAME -- CMD …")
			}
			return nil
		},
		Annotations:       map[string]string{annotationExec: "true"},
		ValidArgsFunction: a.completeNames,
	}
	flags := cmd.Flags()
	flags.BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal, as a shell or an editor needs")
	flags.StringVarP(&f.stdin, "stdin", "i", "auto", "pass hutch's input on to the command: always (-i alone), never (--stdin=never), or auto: unless --detach or the input is /dev/null; with --detach, always leaves it open for `hutch commands stdin`")
	flags.Lookup("stdin").NoOptDefVal = "always"
	flags.StringVarP(&f.user, "user", "u", "", "who it runs as (the template's user where not given)")
	flags.StringVarP(&f.cwd, "cwd", "w", "", "where it starts (the sandbox's directory where not given)")
	flags.StringArrayVarP(&f.env, "env", "e", nil, "a variable, as KEY=VALUE")
	flags.BoolVarP(&f.detach, "detach", "d", false, "print the command's id and leave it running")
	flags.StringVar(&f.timeout, "timeout", "", "kill it after this time, as seconds or a duration (1800, 30m)")
	addRequestKey(cmd, &f.requestKey)
	flags.BoolVar(&f.json, "json", false, "with --detach, print the command as one JSON document; errors as JSON on stderr")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.newClient(cmd)
		if err != nil {
			return err
		}
		body, err := a.startBody(f, args[1:])
		if err != nil {
			return err
		}
		f.requestKey = keyOr(f.requestKey)
		if f.detach {
			return a.execDetached(cmd.Context(), c, args[0], f, body)
		}
		return a.execAttached(cmd.Context(), c, args[0], f.requestKey, body)
	}
	return cmd
}

// startBody makes the call's body of the flags.
func (a *app) startBody(f execFlags, argv []string) (api.StartCommand, error) {
	body := api.StartCommand{Command: api.CommandLine{Args: argv}, User: f.user, Cwd: f.cwd, Detach: f.detach, Lossless: !f.detach}
	var err error
	if body.Env, err = parsePairs("env", f.env); err != nil {
		return body, err
	}
	if f.timeout != "" {
		limit, err := parseDuration("timeout", f.timeout)
		if err != nil {
			return body, err
		}
		if limit == 0 {
			return body, fault.New(fault.InvalidArgument, "--timeout %q leaves no time to run; leave it out for no limit", f.timeout)
		}
		body.TimeoutSeconds = int(math.Ceil(limit.Seconds()))
	}
	switch f.stdin {
	case "auto":
		body.Stdin = !f.detach && a.env.Stdin != nil && (f.tty || !isNullDevice(a.env.Stdin))
	case "always":
		body.Stdin = f.detach || a.env.Stdin != nil
	case "never":
	default:
		return body, fault.New(fault.InvalidArgument, "--stdin %q is none of always, never and auto; write --stdin=always", f.stdin)
	}
	if !f.tty {
		return body, nil
	}
	body.Pty = a.terminalSize()
	if name := a.env.Getenv("TERM"); name != "" && body.Env["TERM"] == "" {
		if body.Env == nil {
			body.Env = map[string]string{}
		}
		body.Env["TERM"] = name
	}
	return body, nil
}

// isNullDevice says whether a stream is a device without a terminal, as /dev/null,
// of which nothing comes.
func isNullDevice(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	if _, terminal := terminalFile(f); terminal {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// terminalSize is the size of the terminal that the user sees, 80 by 24 without one.
func (a *app) terminalSize() *api.WindowSize {
	for _, stream := range []any{a.env.Stdout, a.env.Stdin, a.env.Stderr} {
		if f, ok := terminalFile(stream); ok {
			if cols, rows := windowSize(f); cols > 0 && rows > 0 {
				return &api.WindowSize{Cols: cols, Rows: rows}
			}
		}
	}
	return &api.WindowSize{Cols: 80, Rows: 24}
}

func (a *app) execDetached(ctx context.Context, c *client, ref string, f execFlags, body api.StartCommand) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	command, err := read[doc[api.Command]](c.StartCommand(ctx, ref, &api.StartCommandParams{IdempotencyKey: f.requestKey}, body))
	if err != nil {
		return err
	}
	if f.json {
		return a.printJSON(command)
	}
	a.say("%s", clean(command.V.ID))
	return nil
}

// errDetached is the cause of a context of a terminal that was left to come back to.
var errDetached = errors.New("detached")

// errLeft is the cause of a context that a third ctrl-C ended.
var errLeft = errors.New("left")

// session is one attached command.
type session struct {
	follower
	key     string
	body    api.StartCommand
	running chan struct{} // closed when the command is known to run
	leave   context.CancelCauseFunc
	signals chan string // names of signals for the command, in order
	offset  int64       // bytes of input that the command has
}

func (a *app) execAttached(ctx context.Context, c *client, ref, key string, body api.StartCommand) error {
	ctx, leave := context.WithCancelCause(ctx)
	defer leave(nil)
	s := &session{
		follower: follower{a: a, c: c, ref: ref}, key: key, body: body,
		running: make(chan struct{}), leave: leave, signals: make(chan string, 64),
	}
	s.started = func(string) { close(s.running) }
	return s.attend(ctx, func() error { return s.run(ctx) })
}

// attend passes signals and input on while run writes the output.
func (s *session) attend(ctx context.Context, run func() error) error {
	a, body := s.a, s.body
	s.broken = func() { s.signal("PIPE") } // as it would get from a pipe without a reader

	// Without this, writing to a pipe that nobody reads would end hutch at once.
	signal.Ignore(syscall.SIGPIPE)
	defer signal.Reset(syscall.SIGPIPE)
	restore := func() {}
	if body.Pty != nil {
		a.progress = &progress{} // the screen is the command's
		if f, ok := terminalFile(a.env.Stdin); ok {
			var err error
			if restore, err = rawMode(f); err != nil {
				return fault.Wrap(err, fault.Internal, "the terminal cannot be put into raw mode; leave out --tty")
			}
		}
	}
	defer restore()

	stopSignals := s.watchSignals(ctx)
	stopInput := func() {}
	if body.Stdin {
		stopInput = s.pumpInput(ctx)
	}
	err := run()
	s.leave(nil)
	stopInput()
	stopSignals()
	restore()
	a.progress.hide()
	return s.end(ctx, err)
}

// run starts the command and writes its output until its end. A start whose answer
// was cut off is repeated with the same key, which finds the command if it runs.
func (s *session) run(ctx context.Context) error {
	for attempt := 0; ; attempt++ {
		_, err := s.stream(s.c.StartCommand(ctx, s.ref,
			&api.StartCommandParams{Follow: true, IdempotencyKey: s.key}, s.body, accept(jsonLines)))
		switch {
		case err == nil:
			return nil
		case s.id != "" && retryable(err) && ctx.Err() == nil:
			return s.resume(ctx, true)
		case s.id != "" || !errors.Is(err, errCut) || attempt >= len(retryDelays) || sleepFor(ctx, retryDelays[attempt]) != nil:
			return err
		}
	}
}

// end makes the result of a session: the command's exit code, and no other.
func (s *session) end(ctx context.Context, err error) error {
	left := errors.Is(context.Cause(ctx), errLeft)
	switch {
	case s.exit == nil && s.id != "" && errors.Is(context.Cause(ctx), errDetached):
		s.a.note("hutch: left the terminal %s in %s; `hutch attach %s %s` comes back to it", s.id, s.ref, s.ref, s.id)
		return nil
	case s.exit != nil && s.exit.Reason == "lost":
		return s.endedWith(ctx, fault.New(fault.Internal,
			"the command %s in %s has ended, but its exit code was lost; `hutch get %s` shows the sandbox", s.id, s.ref, s.ref))
	case s.exit != nil:
		s.explain(ctx)
		if code := s.exit.Code & 0xff; code != 0 {
			return exitStatus(code)
		}
		return nil
	case left && s.id != "":
		return fault.New(fault.Cancelled, "left the command %s in %s; it goes on: `%s` shows it, `hutch commands kill %s %s` ends it",
			s.id, s.ref, s.logsLine(), s.ref, s.id)
	case left:
		return fault.New(fault.Cancelled, "gave up before the command in %s was known to run; `hutch commands ls %s` shows whether it does", s.ref, s.ref)
	case err == nil || retryable(err) && s.id != "":
		return s.endedWith(ctx, fault.Wrap(err, fault.Unavailable, "lost the command %s in %s, so how it ends is not known; `%s` goes on",
			s.id, s.ref, s.logsLine()))
	case errors.Is(err, errCut):
		return fault.Wrap(err, fault.Unavailable, "the server cut the connection before the command in %s was known to run; `hutch commands ls %s` shows whether it does", s.ref, s.ref)
	}
	return s.endedWith(ctx, err)
}

// explain says why a command has ended where that was not its own doing.
func (s *session) explain(ctx context.Context) {
	switch {
	case s.exit.Reason == "timeout":
		s.a.note("hutch: the command's time was over (--timeout %ds), and it was killed", s.body.TimeoutSeconds)
	case s.exit.Reason != "":
		s.a.note("hutch: the sandbox ended the command: %s", clean(s.exit.Reason))
	case s.exit.Signal != "":
		if end := s.sandboxEnding(ctx); end.what != "" {
			s.a.note("hutch: the command was ended by a signal, as %s", clean(end.what))
		}
	}
}

// forwarded are the signals that go to the command.
var forwarded = map[os.Signal]string{
	syscall.SIGINT: "INT", syscall.SIGTERM: "TERM", syscall.SIGHUP: "HUP", syscall.SIGQUIT: "QUIT",
}

// signal hands a signal to the command, once it runs. A flood of them is thinned.
func (s *session) signal(name string) {
	select {
	case s.signals <- name:
	default:
	}
}

// watchSignals passes signals and window sizes on until the returned function is
// called.
func (s *session) watchSignals(ctx context.Context) (stop func()) {
	incoming := make(chan os.Signal, 16)
	signal.Notify(incoming, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	if s.body.Pty != nil {
		signal.Notify(incoming, syscall.SIGWINCH)
	}
	sorted, sent := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sorted)
		s.sortSignals(ctx, incoming)
	}()
	go func() {
		defer close(sent)
		s.sendSignals(ctx)
	}()
	return func() {
		signal.Stop(incoming)
		<-sorted
		<-sent
	}
}

// sortSignals takes signals as they come and counts the ctrl-C among them.
func (s *session) sortSignals(ctx context.Context, incoming <-chan os.Signal) {
	interrupts := 0
	for {
		select {
		case <-ctx.Done():
			return
		case sig := <-incoming:
			if sig == syscall.SIGWINCH {
				s.signal("")
				continue
			}
			if sig == syscall.SIGHUP && s.body.Pty != nil { // the window is gone, not the terminal inside
				s.leave(errDetached)
				continue
			}
			s.signal(forwarded[sig])
			if sig != syscall.SIGINT {
				continue
			}
			switch interrupts++; interrupts {
			case 2:
				s.a.note("hutch: ctrl-C once more leaves the command running")
			case 3:
				s.leave(errLeft)
			}
		}
	}
}

// sendSignals sends what signal was called with, in order; "" is a new window size.
func (s *session) sendSignals(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-s.running:
	}
	for {
		select {
		case <-ctx.Done():
			return
		case name := <-s.signals:
			call, cancel := context.WithTimeout(ctx, 10*time.Second)
			var err error
			if name == "" {
				err = done(s.c.ResizeCommand(call, s.ref, s.id, *s.a.terminalSize()))
			} else {
				err = done(s.c.SignalCommand(call, s.ref, s.id, api.SignalCommand{Signal: name}))
			}
			cancel()
			if err != nil && name != "" && ctx.Err() == nil {
				// Whoever sent it wants an end, so this does not wait on for one.
				s.a.note("hutch: the signal %s did not reach the command: %s", name, clean(fault.Of(err).Message))
				s.leave(errLeft)
			}
		}
	}
}
