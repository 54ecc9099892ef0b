package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/fault"
)

func walk(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, sub := range cmd.Commands() {
		walk(sub, visit)
	}
}

// pages are the verbs that print a page, or speak a protocol.
var pages = []string{"man", "skill", "mcp"}

// README: every verb that speaks to a server prints JSON for programs.
func TestEveryVerbHasJSON(t *testing.T) {
	t.Parallel()
	without := append([]string{"help", "completion", "exit-codes"}, pages...)
	walk(New(Env{Getenv: func(string) string { return "" }}), func(cmd *cobra.Command) {
		if cmd.HasSubCommands() || !cmd.Runnable() || slices.Contains(without, cmd.Name()) || cmd.Flags().Lookup("json") != nil {
			return
		}
		t.Errorf("%s has no --json", cmd.CommandPath())
	})
}

// Every verb has a summary and an example that names it.
func TestEveryVerbHasAnExample(t *testing.T) {
	t.Parallel()
	walk(New(Env{Getenv: func(string) string { return "" }}), func(cmd *cobra.Command) {
		if cmd.Short == "" {
			t.Errorf("%s has no summary", cmd.CommandPath())
		}
		if cmd.Runnable() && !strings.Contains(cmd.Example, cmd.CommandPath()) {
			t.Errorf("the example of %s is %q", cmd.CommandPath(), cmd.Example)
		}
		holds := cmd.HasSubCommands() || slices.Contains(pages, cmd.Name()) || !cmd.Runnable()
		if !holds && cmd.Flags().Lookup("json") == nil {
			t.Errorf("%s has no --json", cmd.CommandPath())
		}
	})
}

// Errors of commands that others add are reported like those of the verbs.
func TestRunReportsErrorsOfAddedCommands(t *testing.T) {
	t.Parallel()
	var stderr bytes.Buffer
	root := New(Env{Stdout: &bytes.Buffer{}, Stderr: &stderr, Getenv: func(string) string { return "" }})
	var asJSON bool
	up := &cobra.Command{Use: "up", RunE: func(*cobra.Command, []string) error {
		return fault.New(fault.NoCapacity, "no room; make some").Because("pool_full")
	}}
	up.Flags().BoolVar(&asJSON, "json", false, "")
	root.AddCommand(up)
	if code := Run(context.Background(), root, []string{"up", "--json"}); code != exitCodes[fault.NoCapacity] {
		t.Errorf("exit code %d", code)
	}
	var got errorDocument
	want := errorBody{Code: "no_capacity", Message: "no room; make some", Reason: "pool_full", ExitCode: 19}
	if err := json.Unmarshal(stderr.Bytes(), &got); err != nil || got.Error != want {
		t.Errorf("%+v, %v: %s", got, err, stderr.String())
	}
}

// What comes from elsewhere cannot steer the terminal.
func TestErrorsAreSafeForTerminals(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	reportError(&out, fault.New(fault.Internal, "bad \x1b]0;title\a name\r\nnext; do\u009b2J this"))
	if strings.ContainsAny(out.String(), "\x1b\a\r\u009b") || strings.Count(out.String(), "\n") != 2 {
		t.Errorf("%q", out.String())
	}
}
