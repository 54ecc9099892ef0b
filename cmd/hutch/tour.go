package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/cli"
	"github.com/hutchrun/hutch/internal/fault"
)

// hasTemplate says whether the default template is there.
func hasTemplate(ctx context.Context, url, key string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/v1/templates/base", nil)
	if err != nil {
		return false, err
	}
	req.Header.Set("Authorization", "Bearer "+key)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, fault.Wrap(err, fault.Unavailable, "the server does not say whether it has the template base; try again")
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusOK && res.StatusCode != http.StatusNotFound {
		return false, fault.New(fault.Unavailable, "the server does not say whether it has the template base (HTTP status %d); try again", res.StatusCode)
	}
	return res.StatusCode == http.StatusOK, nil
}

// makeTemplate makes the default template, unless somebody else has just done so.
func makeTemplate(ctx context.Context, env cli.Env) error {
	fmt.Fprintln(env.Stdout, "making the template base, a Debian with git, python3 and curl: this takes some minutes, once")
	return hutch(ctx, env, "templates", "build", "base", "--debian", "--if-missing")
}

// ticking is a program that outlives the command that starts it, and tells by a file
// that it runs.
const ticking = `(while :; do date +%s.%N > /tmp/tick; sleep 0.1; done) > /dev/null 2>&1 & echo hello from $(hostname)`

const stillTicking = `a=$(cat /tmp/tick); sleep 0.3; b=$(cat /tmp/tick); test "$a" != "$b" && echo the program from before the sleep still runs`

// tour takes one sandbox through its life before the user's eyes. Whatever happens,
// it leaves no sandbox behind.
func tour(ctx context.Context, env cli.Env) error {
	name := fmt.Sprintf("tour-%d", os.Getpid())
	mark := "tour=" + name
	fmt.Fprintln(env.Stdout, "\nOne sandbox through its life:")
	var failed error
	for _, args := range [][]string{
		{"new", "--name", name, "--label", mark},
		{"exec", name, "--", "sh", "-c", ticking},
		{"sleep", name},
		{"wake", name},
		{"exec", name, "--", "sh", "-c", stillTicking},
		{"fork", name},
		{"stop", name},
		{"resume", name},
		{"exec", name, "--", "cat", "/etc/hostname"},
	} {
		if failed = show(ctx, env, args...); failed != nil {
			break
		}
	}
	if err := show(ctx, env, "delete", "--label", mark, "--yes"); failed == nil {
		failed = err
	}
	return failed
}

// show prints a line as a user types it, runs it, and says how long it took.
func show(ctx context.Context, env cli.Env, args ...string) error {
	fmt.Fprintf(env.Stdout, "\n$ hutch %s\n", shellQuote(args))
	begin := time.Now()
	if err := hutch(ctx, env, args...); err != nil {
		return err
	}
	fmt.Fprintf(env.Stdout, "  took %s\n", time.Since(begin).Round(time.Millisecond))
	return nil
}

// hutch runs one of the client's verbs in this process.
func hutch(ctx context.Context, env cli.Env, args ...string) error {
	if code := cli.Run(ctx, cli.New(env), args); code != 0 {
		return fault.New(fault.Internal, "`hutch %s` ended with exit code %d; `hutch doctor` says what this machine lacks", strings.Join(args, " "), code)
	}
	return nil
}

func shellQuote(args []string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		if strings.ContainsAny(a, " $;()'\"&><") {
			a = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
		}
		quoted[i] = a
	}
	return strings.Join(quoted, " ")
}
