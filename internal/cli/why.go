package cli

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// sleepFlags are the flags of when a sandbox falls asleep by itself.
type sleepFlags struct {
	mode, idleAfter, onIdle string
}

func (s *sleepFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&s.mode, "sleep", "", "who may put it to sleep: nobody (never), whoever types it (manual, the default), or also its host when it is idle (auto)")
	flags.StringVar(&s.idleAfter, "idle-after", "", "with --sleep auto, how long it has to be idle, such as 90 or 10m, 30s to 24h (2m where not given)")
	flags.StringVar(&s.onIdle, "on-idle", "", "with --sleep auto, what is done with an idle one: sleep (the default) or stop")
}

// settings are the mode and the window as the API takes them, nil where none is given.
func (s *sleepFlags) settings() (*api.SleepSettings, error) {
	if s.mode == "" && s.idleAfter == "" {
		return nil, nil
	}
	out := &api.SleepSettings{Mode: api.SleepMode(s.mode)}
	if s.idleAfter == "" {
		return out, nil
	}
	d, err := parseDuration("idle-after", s.idleAfter)
	if err != nil {
		return nil, err
	}
	if d%time.Second != 0 {
		return nil, fault.New(fault.InvalidArgument, "--idle-after %s is not a number of whole seconds; write it as --idle-after 2m", s.idleAfter)
	}
	seconds := int64(d / time.Second)
	out.IdleSeconds = &seconds
	return out, nil
}

// sleepText is the sleep mode with what belongs to it.
func sleepText(s api.Sleep, onIdle api.OnIdle) string {
	if s.Mode != api.SleepModeAuto {
		return string(s.Mode)
	}
	does := "sleeps"
	if onIdle == api.OnIdleStop {
		does = "is stopped"
	}
	return fmt.Sprintf("auto: it %s after %s of idleness", does, time.Duration(s.IdleSeconds)*time.Second)
}

func (a *app) whyCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "why NAME",
		Short: "Show why a sandbox is awake, and when it falls asleep by itself",
		Long: "Show each thing that keeps a sandbox awake, with its reading: with sleep mode auto it falls asleep when all of them have been " +
			"below their limit for the idle window. Asking keeps nothing awake and wakes nothing. A sandbox with another sleep mode is not " +
			"watched, so it is looked at for a second.",
		Example:           "hutch why demo\nhutch why demo --json\nhutch edit demo --sleep auto --idle-after 10m",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		why, err := read[doc[api.Idleness]](c.GetIdleness(ctx, args[0]))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(why)
		}
		return a.printWhy(args[0], why.V)
	})
	return cmd
}

func (a *app) printWhy(name string, w api.Idleness) error {
	a.say("%s: %s", clean(name), clean(w.Message))
	a.say("sleep mode     %s", clean(sleepText(w.Sleep, w.OnIdle)))
	if w.NextDecisionAt != nil {
		a.say("next decision  %s, if nothing happens until then", formatTime(w.NextDecisionAt.Time))
	}
	if w.FailedTries > 0 {
		a.say("failed tries   %d", w.FailedTries)
	}
	if len(w.Criteria) == 0 {
		return nil
	}
	a.say("")
	rows := make([][]string, 0, len(w.Criteria))
	for _, c := range w.Criteria {
		verdict := "quiet"
		switch {
		case !c.Ok:
			verdict = "keeps it awake"
		case c.Since != nil:
			verdict += " since " + formatTime(c.Since.Time)
		}
		rows = append(rows, []string{clean(criteria[string(c.Name)]), measured(c.Reading, c.Unit), "below " + measured(c.Limit, c.Unit), verdict})
	}
	return a.printTable([]string{"WHAT", "READING", "LIMIT", "NOW"}, rows)
}

// criteria are what a criterion is about, in words.
var criteria = map[string]string{
	"samples": "age of the last sample", "turns": "harness turns", "llm_streams": "LLM streams", "sessions": "sessions and calls",
	"foreground": "commands in front", "output": "output of commands", "cpu": "CPU", "network": "network", "nested": "virtual machines inside",
}

// measured is a reading with its unit.
func measured(n float64, unit string) string {
	text := strconv.FormatFloat(n, 'f', -1, 64)
	switch unit {
	case "":
		return text
	case "%":
		return strconv.FormatFloat(n, 'f', 1, 64) + " %"
	}
	return strconv.FormatFloat(n, 'f', 0, 64) + " " + clean(unit)
}
