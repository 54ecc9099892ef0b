package cli

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
)

func (a *app) missedCommand() *cobra.Command {
	var asJSON, run bool
	var key string
	cmd := &cobra.Command{
		Use:   "missed NAME",
		Short: "Show the cron jobs that a sandbox's last sleep missed",
		Long: "Show which lines of the crontabs inside would have fired while the sandbox slept, how often, and when last. " +
			"It is known soon after a wake, where a cron daemon runs inside. Debian's cron catches up by itself with what fell " +
			"into the last three hours. Timers that programs set for themselves cannot be seen from outside. " +
			"With --run each job that is listed is started once, as its user; it goes on in the background.",
		Example:           "hutch missed demo\nhutch missed demo --run",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().BoolVar(&run, "run", false, "start each of them once")
	addRequestKey(cmd, &key)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		missed, err := read[doc[api.MissedTimers]](c.GetMissedTimers(ctx, args[0]))
		if err != nil {
			return err
		}
		if run {
			return a.runMissed(ctx, c, missed.V, keyOr(key), asJSON)
		}
		if asJSON {
			return a.printJSON(missed)
		}
		return a.printMissed(missed.V)
	})
	return cmd
}

func (a *app) printMissed(m api.MissedTimers) error {
	if len(m.Timers) == 0 || m.From == nil || m.To == nil {
		a.note("no cron job is known to be missed")
		return nil
	}
	a.note("it slept from %s to %s", formatTime(m.From.Time), formatTime(m.To.Time))
	rows := make([][]string, 0, len(m.Timers))
	for _, t := range m.Timers {
		rows = append(rows, []string{
			formatTime(t.Last.Time), strconv.Itoa(t.Count), clean(t.Schedule), clean(t.User), clean(t.Command), clean(t.Source),
		})
	}
	if m.Omitted > 0 {
		a.note("%d more are not listed", m.Omitted)
	}
	return a.printTable([]string{"LAST", "TIMES", "SCHEDULE", "USER", "COMMAND", "CRONTAB"}, rows)
}

// runMissed starts each job once. Each has a request key of its own, so that a repeat
// with the same --request-key starts none twice.
func (a *app) runMissed(ctx context.Context, c *client, m api.MissedTimers, key string, asJSON bool) error {
	started := make([]doc[api.Command], 0, len(m.Timers))
	for i, t := range m.Timers {
		command, err := read[doc[api.Command]](c.StartCommand(ctx, m.Sandbox, &api.StartCommandParams{IdempotencyKey: key + "-" + strconv.Itoa(i)}, api.StartCommand{
			Command: api.CommandLine{Shell: t.Command}, User: t.User, Detach: true,
		}))
		if err != nil {
			return err
		}
		started = append(started, command)
		if !asJSON {
			a.say("%s  %s", clean(command.V.ID), clean(t.Command))
		}
	}
	switch {
	case asJSON:
		return a.printJSON(map[string]any{"commands": started})
	case len(started) == 0:
		a.note("no cron job is known to be missed")
	}
	return nil
}
