package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// named checks that a command has exactly the arguments that it names.
func named(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == len(names) {
			return nil
		}
		what := strings.Join(names, " ")
		if what == "" {
			what = "no arguments"
		}
		return fault.New(fault.InvalidArgument, "%s takes %s; `%s --help` shows an example", cmd.CommandPath(), what, cmd.CommandPath())
	}
}

// atMostOne checks that a command has its one argument or none.
func atMostOne(name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) <= 1 {
			return nil
		}
		return fault.New(fault.InvalidArgument, "%s takes at most one %s; `%s --help` shows an example", cmd.CommandPath(), name, cmd.CommandPath())
	}
}

func (a *app) getCommand() *cobra.Command {
	var asJSON, wait, timings bool
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Show a sandbox",
		Long: "Show all about one sandbox. This never wakes it. With --wait it is shown once no operation is at work on it. " +
			"With --timings it is shown how long each step of the last operation of each kind took.",
		Example:           "hutch get demo\nhutch get demo --wait --json\nhutch get demo --timings",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until no operation is at work on it")
	cmd.Flags().BoolVar(&timings, "timings", false, "show how long the steps of its operations took")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		sb, err := a.getSandbox(ctx, c, args[0], wait)
		if err != nil {
			return err
		}
		if timings {
			return a.printTimings(ctx, c, sb.V.ID, asJSON)
		}
		if asJSON {
			return a.printJSON(sb)
		}
		return a.printFields(sandboxFields(sb.V))
	})
	return cmd
}

// getSandbox gives a sandbox; with wait, once no operation is at work on it, however
// that ended.
func (a *app) getSandbox(ctx context.Context, c *client, ref string, wait bool) (doc[api.Sandbox], error) {
	defer a.progress.spin()()
	for {
		sb, err := read[doc[api.Sandbox]](c.GetSandbox(ctx, ref, &api.GetSandboxParams{}))
		if err != nil || !wait || sb.V.Operation == nil {
			return sb, err
		}
		op, err := a.await(ctx, c, sb.V.Name, doc[api.Operation]{V: *sb.V.Operation}, a.progress.set)
		if active(op.V) {
			return sb, err
		}
	}
}

// sandboxFields are a sandbox's facts for people; what does not apply is left out.
func sandboxFields(s api.Sandbox) [][2]string {
	fields := [][2]string{{"name", s.Name}, {"id", s.ID}, {"state", stateText(s)}}
	add := func(name, value string) {
		if value != "" {
			fields = append(fields, [2]string{name, value})
		}
	}
	add("reason", s.Reason)
	add("message", s.Message)
	if op := s.Operation; op != nil {
		add("operation", op.ID+"  "+stepText(s.Name, *op))
	}
	for _, c := range s.Conditions {
		add("condition", fmt.Sprintf("%s (%s) since %s: %s", c.Type, c.Reason, formatTime(c.Since.Time), c.Message))
	}
	add("template", s.Template+"  "+s.TemplateVersion)
	add("origin", originText(s.Origin))
	add("runtime", s.Runtime)
	add("host", s.Host)
	add("cpus", fmt.Sprint(s.CPUs))
	add("memory", formatMemory(s.MemoryBytes))
	add("disk", formatDisk(s.DiskBytes))
	add("labels", labelText(s.Labels))
	add("sleep", sleepText(s.Sleep, s.OnIdle))
	add("auto-stop", ttlText(s))
	if at := s.Deadline.At; at != nil {
		add("deadline", formatTime(at.Time))
	}
	add("archive", archiveText(s))
	add("delete", deleteText(s))
	add("generation", fmt.Sprint(s.Generation))
	add("created", formatTime(s.CreatedAt.Time))
	add("in this state since", formatTime(s.StateSince.Time))
	if s.Workspace.SavedAt != nil {
		add("disk saved", formatTime(s.Workspace.SavedAt.Time))
	}
	if s.DeletedAt != nil {
		add("deleted", formatTime(s.DeletedAt.Time))
	}
	if s.UndeleteUntil != nil {
		add("can be brought back until", formatTime(s.UndeleteUntil.Time))
	}
	return fields
}

// ttlText is the auto-stop, what comes of it, and whether its host knows of it.
func ttlText(s api.Sandbox) string {
	text := "none"
	if n := s.TTLSeconds; n != nil {
		text = (time.Duration(*n) * time.Second).String()
		switch s.OnDeadline {
		case api.OnDeadlineSleep:
			text += ", then it sleeps"
		case api.OnDeadlineDelete:
			text += ", then it is deleted"
		}
		if s.Sleep.Deadline == api.SleepDeadlinePaused {
			text += ", paused while it sleeps"
		}
	}
	if s.Deadline.Pending {
		text += " (on its way to the host; the deadline before it holds until then)"
	}
	return text
}

// archiveText is when it goes to cold storage; "" is nothing to say.
func archiveText(s api.Sandbox) string {
	switch at := s.Archive.At; {
	case s.Archive.Waiting != "":
		return "due since " + formatTime(at.Time) + "; it waits for cold storage, which this installation does not have, and is free"
	case at != nil:
		return formatTime(at.Time)
	case s.ArchiveAfter == nil:
		return "never"
	case *s.ArchiveAfter != defaultArchive:
		return afterText(s.ArchiveAfter) + " after a stop"
	}
	return ""
}

// defaultArchive is what holds where nobody says otherwise: 14 days.
const defaultArchive = 14 * 24 * 60 * 60

// deleteText is when it is deleted by itself; "" is never.
func deleteText(s api.Sandbox) string {
	switch {
	case s.DeleteAt != nil:
		return formatTime(s.DeleteAt.Time)
	case s.DeleteAfter != nil:
		return afterText(s.DeleteAfter) + " after a stop"
	}
	return ""
}

// whenText says when something is done; nil is never.
func whenText(what string, seconds *int64) string {
	if seconds == nil {
		return "never " + what
	}
	return what + " after " + afterText(seconds)
}

// afterText is a length of time, in days where it is of whole ones.
func afterText(seconds *int64) string {
	const day = 24 * 60 * 60
	if *seconds%day == 0 {
		return fmt.Sprintf("%dd", *seconds/day)
	}
	return (time.Duration(*seconds) * time.Second).String()
}

func originText(o api.Origin) string {
	if o.Source == "" {
		return string(o.Kind)
	}
	return fmt.Sprintf("%s of %s (%s)", o.Kind, o.Source, o.Mode)
}

func labelText(labels map[string]string) string {
	pairs := make([]string, 0, len(labels))
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		pairs = append(pairs, key+"="+labels[key])
	}
	return strings.Join(pairs, ", ")
}
