package cli

import (
	"context"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/hutchrun/hutch/api"
)

// TestMain makes this test binary the command hutch too, for the scripts.
func TestMain(m *testing.M) {
	// Whoever runs the tests in the background may have these ignored, and a shell
	// cannot trap what was ignored when it began. A handler here gives children the
	// default.
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	testscript.Main(m, map[string]func(){"hutch": func() {
		root := New(Env{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv, Version: "1.2.3"})
		os.Exit(Run(context.Background(), root, os.Args[1:]))
	}})
}

// TestScripts runs testdata/script/*.txtar, each with a fake server of its own. The
// scripts name the rules that they prove.
func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("UPDATE") != "",
		Setup: func(env *testscript.Env) error {
			f := newFake(env.T().(testing.TB))
			env.Values["fake"] = f
			env.Setenv("HUTCH_URL", f.server.URL)
			env.Setenv("HUTCH_API_KEY", fakeKey)
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("TZ", "UTC")
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"fake": fakeScript, "status": statusScript},
	})
}

// statusScript runs a program and checks its exit code: status CODE PROGRAM ARGS.
func statusScript(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status CODE PROGRAM ARGS")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := err.(interface{ ExitCode() int })
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// fakeScript tells the script's server what to do.
func fakeScript(ts *testscript.TestScript, neg bool, args []string) {
	f := ts.Value("fake").(*fake)
	number := func(s string) int {
		n, err := strconv.Atoi(s)
		ts.Check(err)
		return n
	}
	if args[0] == "release" { // locks by itself
		f.release()
		return
	}
	if args[0] == "calls" { // fake calls N PREFIX
		if got := f.countCalls(strings.Join(args[2:], " ")); got != number(args[1]) {
			ts.Fatalf("%d calls, want %s: %q", got, args[1], f.calls)
		}
		return
	}
	if args[0] == "context" { // fake context FILE [localhost|wrong]: of this server, with its key
		address, key := f.server.URL, fakeKey
		switch strings.Join(args[2:], "") {
		case "localhost":
			address = strings.Replace(address, "127.0.0.1", "LocalHost", 1) + "/"
		case "wrong":
			key = "hutch_wrong"
		}
		ts.Check(WriteContext(ts.MkAbs(args[1]), "local", address, key))
		return
	}
	if args[0] == "event" { // fake event TYPE SANDBOX
		f.addEvent(args[1], args[2])
		return
	}
	until := func(what string, ok func() bool) {
		for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				ts.Fatalf("never: %s: %q", what, f.calls)
			}
		}
	}
	if args[0] == "await" { // fake await PREFIX: until such a call has come
		until("a call "+args[1], func() bool { return f.countCalls(strings.Join(args[1:], " ")) > 0 })
		return
	}
	if args[0] == "output" { // fake output ID BYTES: until a command has written as much
		until("output of "+args[1], func() bool {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.commands[args[1]].OutputBytes >= int64(number(args[2]))
		})
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch args[0] {
	case "sandbox": // fake sandbox NAME STATE [KEY=VALUE]
		s := f.addSandbox(args[1], api.State(args[2]))
		for _, label := range args[3:] {
			key, value, _ := strings.Cut(label, "=")
			s.Labels[key] = value
		}
	case "forget": // the server has lost all operations
		f.ops = nil
		f.cond.Broadcast()
	case "end": // fake end NAME STATE [REASON]: nobody asked for it; streams break
		s := f.find(args[1])
		s.State = api.State(args[2])
		if len(args) > 3 {
			s.Reason = args[3]
		}
		go f.server.CloseClientConnections() // waits for handlers, which take the lock
	case "op": // fake op NAME KIND: at work on it
		f.held = true
		f.start(f.find(args[1]), args[2], func() {})
	case "hold": // operations do not end
		f.held = true
	case "failing": // fake failing KIND CODE MESSAGE
		f.failing[args[1]] = api.OperationError{Code: api.ErrorCode(args[2]), Message: args[3]}
	case "well": // fake well KIND: it does not fail any more
		delete(f.failing, args[1])
	case "rule": // fake rule TIMES WHAT METHOD PREFIX [MESSAGE]
		r := &rule{times: number(args[1]), what: args[2], method: args[3], prefix: args[4]}
		if len(args) > 5 {
			r.message = args[5]
		}
		f.rules = append(f.rules, r)
	case "cut":
		f.cutEvery = number(args[1])
	case "file": // fake file PATH CONTENTS
		f.files[args[1]] = []byte(args[2])
	case "filed": // fake filed PATH FILE: the sandbox has what FILE has
		if got, ok := f.files[args[1]]; !ok || string(got) != ts.ReadFile(args[2]) {
			ts.Fatalf("%s holds %q", args[1], got)
		}
	default:
		ts.Fatalf("unknown: fake %s", args[0])
	}
}
