package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) commandsCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "commands",
		Short:   "See, feed and end the commands that run in a sandbox",
		Example: "hutch commands ls demo\nhutch commands logs demo CMD --follow\nhutch commands kill demo CMD",
	}, a.commandsLsCommand(), a.commandsLogsCommand(), a.commandsStdinCommand(), a.commandsKillCommand())
}

func (a *app) commandsLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "ls NAME",
		Short:             "List the commands since the last boot",
		Example:           "hutch commands ls demo",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		var list []doc[api.Command]
		next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
			page, err := read[struct {
				Commands   []doc[api.Command] `json:"commands"`
				NextCursor string             `json:"next_cursor"`
			}](c.ListCommands(ctx, args[0], &api.ListCommandsParams{Limit: &limit, Cursor: cursor}))
			list = append(list, page.Commands...)
			return len(page.Commands), page.NextCursor, err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("commands", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, command := range list {
			rows = append(rows, a.commandRow(command.V))
		}
		defer a.noteMore(next)
		return a.printTable([]string{"ID", "STATUS", "PID", "USER", "OUTPUT", "AGE", "COMMAND"}, rows)
	})
	return cmd
}

func (a *app) commandRow(c api.Command) []string {
	status := "running"
	if c.Exit != nil {
		status = fmt.Sprintf("exit %d", c.Exit.Code)
		if c.Exit.Signal != "" {
			status = "SIG" + strings.TrimPrefix(clean(c.Exit.Signal), "SIG")
		}
	}
	return []string{
		clean(c.ID), status, fmt.Sprint(c.PID), orDash(c.User), formatMemory(c.OutputBytes),
		formatAge(a.env.Now().Sub(c.StartedAt.Time)), cut(clean(strings.Join(c.Command, " ")), 60),
	}
}

func (a *app) commandsLogsCommand() *cobra.Command {
	var follow, asJSON bool
	var cursor int64
	cmd := &cobra.Command{
		Use:   "logs NAME CMD",
		Short: "Replay a command's output, and follow it",
		Long: "Replay a command's output from a byte cursor, and with --follow go on until it ends. The exit code is hutch's own: " +
			"0 when the output was shown. NAME may be left out: the command is looked for in the sandboxes that are ready then. " +
			"With --json each event is a JSON object on a line of its own.",
		Example:           "hutch commands logs demo CMD\nhutch commands logs CMD --follow --cursor 4096",
		Args:              commandArgs,
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the command ends")
	cmd.Flags().Int64Var(&cursor, "cursor", 0, "the first byte that is wanted, counted over stdout and stderr together")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the events as JSON, one a line; errors as JSON on stderr")
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		ref, id, err := a.findCommand(ctx, c, cmd, args)
		if err != nil {
			return err
		}
		f := &follower{a: a, c: c, ref: ref, id: id, cursor: cursor}
		if asJSON {
			f.emit = func(event doc[api.CommandEvent]) error { return a.printLine(event) }
		}
		err = f.resume(ctx, follow)
		if interrupted(ctx) {
			return exitStatus(exitCodes[fault.Cancelled])
		}
		if errors.Is(err, errCut) {
			err = fault.Wrap(err, fault.Unavailable, "the output of %s was cut off; `%s` goes on", id, f.logsLine())
		}
		if err != nil && follow {
			return f.endedWith(ctx, err)
		}
		return err
	})
	return cmd
}

func (a *app) commandsKillCommand() *cobra.Command {
	var name string
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "kill NAME CMD",
		Short:             "Send a signal to a command",
		Long:              "Send a signal to a command and its children. NAME may be left out: the command is looked for in the sandboxes that are ready then.",
		Example:           "hutch commands kill demo CMD\nhutch commands kill demo CMD --signal KILL",
		Args:              commandArgs,
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().StringVarP(&name, "signal", "s", "TERM", "the signal: a name or a number")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		ref, id, err := a.findCommand(ctx, c, cmd, args)
		if err != nil {
			return err
		}
		if err := done(c.SignalCommand(ctx, ref, id, api.SignalCommand{Signal: name})); err != nil || !asJSON {
			return err
		}
		return a.printJSON(map[string]string{"sandbox": ref, "command": id, "signal": name})
	})
	return cmd
}

// commandArgs checks for a command's id, after the sandbox's name or alone.
func commandArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 1 || len(args) == 2 {
		return nil
	}
	return fault.New(fault.InvalidArgument, "%s takes the sandbox's NAME and the command's id; `hutch commands ls NAME` lists them", cmd.CommandPath())
}

// findCommand gives the sandbox and the id of a command. One that is named alone is
// looked for where it can be without waking anything.
func (a *app) findCommand(ctx context.Context, c *client, cmd *cobra.Command, args []string) (ref, id string, err error) {
	if len(args) == 2 {
		return args[0], args[1], nil
	}
	list, err := a.listSandboxes(ctx, c, api.ListSandboxesParams{State: []api.State{api.StateReady}}, paging{all: true})
	if err != nil {
		return "", "", err
	}
	found := make([]error, len(list.Sandboxes))
	slots := make(chan struct{}, parallel)
	var wg sync.WaitGroup
	for i, sb := range list.Sandboxes {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			found[i] = done(c.GetCommand(ctx, sb.V.ID, args[0]))
		})
	}
	wg.Wait()
	var refs []string
	var unknown error
	for i, sb := range list.Sandboxes {
		switch {
		case found[i] == nil:
			refs = append(refs, sb.V.Name)
		case !fault.Is(found[i], fault.NotFound): // it may be there
			unknown = found[i]
		}
	}
	switch {
	case len(refs) == 1:
		return refs[0], args[0], nil
	case len(refs) == 0 && unknown != nil:
		return "", "", unknown
	case len(refs) == 0:
		return "", "", fault.New(fault.NotFound, "no sandbox that is ready has a command %s; name the sandbox: `%s NAME %s`", args[0], cmd.CommandPath(), args[0])
	}
	return "", "", fault.New(fault.InvalidArgument, "the sandboxes %s all have a command %s; name one of them before it", strings.Join(refs, ", "), args[0])
}
