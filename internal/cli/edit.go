package cli

import (
	"context"
	"maps"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) renameCommand() *cobra.Command {
	var asJSON bool
	var key string
	cmd := &cobra.Command{
		Use:               "rename NAME NEW-NAME",
		Short:             "Give a sandbox another name",
		Long:              "Give a sandbox another name. Its id and its URLs stay.",
		Example:           "hutch rename demo demo-old",
		Args:              named("NAME", "NEW-NAME"),
		ValidArgsFunction: a.completeNames,
	}
	addRequestKey(cmd, &key)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		return a.update(ctx, c, args[0], key, api.UpdateSandbox{Name: &args[1]}, asJSON)
	})
	return cmd
}

func (a *app) editCommand() *cobra.Command {
	var asJSON bool
	var key string
	var life lifeFlags
	var sleep sleepFlags
	cmd := &cobra.Command{
		Use:   "edit NAME",
		Short: "Change when a sandbox ends or falls asleep by itself, and how",
		Long: "Change when a sandbox ends or falls asleep by itself, and how. What is not given stays. An auto-stop that is given begins " +
			"anew from now, also with the value that it has. While its host does not answer, what was before holds.",
		Example:           "hutch edit demo --ttl 2h\nhutch edit demo --no-auto-stop\nhutch edit demo --on-deadline sleep --delete-after 30d\nhutch edit demo --sleep auto --idle-after 10m",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	life.add(cmd, "")
	sleep.add(cmd)
	cmd.MarkFlagsOneRequired("ttl", "no-auto-stop", "on-deadline", "sleep-deadline", "archive-after", "delete-after", "sleep", "idle-after", "on-idle")
	addRequestKey(cmd, &key)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		seconds, err := life.seconds()
		if err != nil {
			return err
		}
		body := api.UpdateSandbox{TTLSeconds: seconds, OnIdle: api.OnIdle(sleep.onIdle), OnDeadline: api.OnDeadline(life.onDeadline)}
		if body.ArchiveAfter, body.DeleteAfter, err = life.afters(); err != nil {
			return err
		}
		if body.Sleep, err = life.settings(&sleep); err != nil {
			return err
		}
		return a.update(ctx, c, args[0], key, body, asJSON)
	})
	return cmd
}

func (a *app) labelCommand() *cobra.Command {
	var asJSON bool
	var key string
	cmd := &cobra.Command{
		Use:   "label NAME KEY=VALUE|KEY-...",
		Short: "Set labels of a sandbox, or take them away",
		Long:  "Set labels with KEY=VALUE and take them away with KEY-. Labels that are not named stay.",
		Example: "hutch label demo team=web tier=test\n" +
			"hutch label demo tier-",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return fault.New(fault.InvalidArgument, "hutch label takes a NAME and labels; write KEY=VALUE to set one, KEY- to take it away")
			}
			return nil
		},
		ValidArgsFunction: a.completeNames,
	}
	addRequestKey(cmd, &key)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		edits, err := parseLabelEdits(args[1:])
		if err != nil {
			return err
		}
		sb, err := read[api.Sandbox](c.GetSandbox(ctx, args[0], &api.GetSandboxParams{}))
		if err != nil {
			return err
		}
		labels := maps.Clone(sb.Labels)
		if labels == nil {
			labels = map[string]string{}
		}
		for name, value := range edits {
			if value != nil {
				labels[name] = *value
			} else {
				delete(labels, name)
			}
		}
		return a.update(ctx, c, sb.ID, key, api.UpdateSandbox{Labels: &labels}, asJSON)
	})
	return cmd
}

// parseLabelEdits reads KEY=VALUE and KEY-; nil is a label to take away.
func parseLabelEdits(edits []string) (map[string]*string, error) {
	labels := make(map[string]*string, len(edits))
	for _, edit := range edits {
		if key, value, ok := strings.Cut(edit, "="); ok && key != "" {
			labels[key] = &value
		} else if key, ok := strings.CutSuffix(edit, "-"); ok && key != "" {
			labels[key] = nil
		} else {
			return nil, fault.New(fault.InvalidArgument, "%q is no label; write KEY=VALUE to set one, KEY- to take it away", edit)
		}
	}
	return labels, nil
}

func (a *app) update(ctx context.Context, c *client, name, key string, body api.UpdateSandbox, asJSON bool) error {
	sb, err := read[doc[api.Sandbox]](c.UpdateSandbox(ctx, name, &api.UpdateSandboxParams{IdempotencyKey: keyOr(key)}, body))
	if err != nil {
		return err
	}
	if asJSON {
		return a.printJSON(sb)
	}
	switch labels := labelText(sb.V.Labels); {
	case body.Sleep != nil && body.Sleep.Deadline == "", body.OnIdle != "":
		a.say("%s has the sleep mode %s", clean(sb.V.Name), sleepText(sb.V.Sleep, sb.V.OnIdle))
	case body.Name != nil:
		a.say("%s", clean(sb.V.Name))
	case body.Labels == nil:
		a.say("%s has the auto-stop %s", clean(sb.V.Name), ttlText(sb.V))
		if body.ArchiveAfter != "" || body.DeleteAfter != "" {
			a.say("once stopped it is %s and %s", whenText("archived", sb.V.ArchiveAfter), whenText("deleted", sb.V.DeleteAfter))
		}
	case labels == "":
		a.say("%s has no labels", clean(sb.V.Name))
	default:
		a.say("%s has the labels %s", clean(sb.V.Name), clean(labels))
	}
	return nil
}
