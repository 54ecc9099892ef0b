package cli

import (
	"context"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
)

// lifecycle describes a verb that moves sandboxes from one state to another.
type lifecycle struct {
	use, short, long string
	aliases          []string
	ask              bool // ask before it is done
	// tell says what came of it, "" as other verbs do; nil is as they do.
	tell func(ch change) string
	call func(ctx context.Context, c *client, name, key string) (*http.Response, error)
}

func (a *app) lifecycleCommand(l lifecycle, flags ...func(*cobra.Command)) *cobra.Command {
	var f changeFlags
	var s selection
	cmd := &cobra.Command{
		Use:     l.use + " NAME...",
		Aliases: l.aliases,
		Short:   l.short,
		Long:    l.long,
		Example: "hutch " + l.use + " demo" + map[bool]string{true: " --yes"}[l.ask] + "\nhutch " + l.use + " --label team=web --yes --json",
		Args:    s.args,
	}
	f.add(cmd)
	s.add(cmd)
	for _, add := range flags {
		add(cmd)
	}
	cmd.ValidArgsFunction = a.completeNames
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		names, err := a.resolve(ctx, c, &s, l.use, args, l.ask)
		if err != nil {
			return err
		}
		several := len(names) != 1 || len(s.labels) > 0
		start := a.env.Now()
		outcomes := a.each(ctx, names, func(ctx context.Context, name string, show func(string)) (change, error) {
			ch, err := read[change](l.call(ctx, c, name, f.key(name, several)))
			if err != nil {
				return ch, err
			}
			return a.finish(ctx, c, ch, &f, show)
		})
		if len(names) == 0 && !f.json {
			a.note("no sandbox has these labels")
		}
		return a.report(outcomes, several, f.json, func(ch change) {
			name, state := clean(ch.Sandbox.V.Name), ch.Sandbox.V.State
			text := ""
			if l.tell != nil {
				text = l.tell(ch)
			}
			switch {
			case text != "":
				a.say("%s", text)
			case ch.Outcome == api.OutcomeDone:
				a.say("%s is %s already", name, state)
			case f.noWait && ch.Operation != nil:
				a.say("%s: operation %s (%s) goes on", name, ch.Operation.V.ID, ch.Operation.V.Kind)
			default:
				a.say("%s is %s (%s)", name, state, formatTook(a.env.Now().Sub(start)))
			}
		})
	})
	return cmd
}

func (a *app) sleepCommand() *cobra.Command {
	return a.lifecycleCommand(lifecycle{
		use:   "sleep",
		short: "Save memory and disk, and give the RAM back",
		long: "Save the memory and the disk of sandboxes and give their RAM back. `hutch wake`, or any command or request, " +
			"goes on where they were.",
		call: func(ctx context.Context, c *client, name, key string) (*http.Response, error) {
			return c.SleepSandbox(ctx, name, &api.SleepSandboxParams{IdempotencyKey: key})
		},
	})
}

// boot gives the body of a verb that begins an auto-stop.
func (t *ttlFlags) boot() (api.Boot, error) {
	seconds, err := t.seconds()
	return api.Boot{TTLSeconds: seconds}, err
}

// addAnew makes the flags of such a verb.
func (t *ttlFlags) addAnew(cmd *cobra.Command) { t.add(cmd, " (the one that it has where not given)") }

func (a *app) wakeCommand() *cobra.Command {
	var ttl ttlFlags
	return a.lifecycleCommand(lifecycle{
		use:   "wake",
		short: "Go on from the saved memory",
		long: "Bring sleeping sandboxes back with their programs as they were. A stopped one has no saved memory: `hutch resume` boots it. " +
			"A wake begins a full auto-stop.",
		call: func(ctx context.Context, c *client, name, key string) (*http.Response, error) {
			body, err := ttl.boot()
			if err != nil {
				return nil, err
			}
			return c.WakeSandbox(ctx, name, &api.WakeSandboxParams{IdempotencyKey: key}, body)
		},
	}, ttl.addAnew)
}

func (a *app) stopCommand() *cobra.Command {
	return a.lifecycleCommand(lifecycle{
		use:   "stop",
		short: "End the programs and keep the disk",
		long:  "End the programs of sandboxes and keep their disks. `hutch resume` boots them again.",
		call: func(ctx context.Context, c *client, name, key string) (*http.Response, error) {
			return c.StopSandbox(ctx, name, &api.StopSandboxParams{IdempotencyKey: key})
		},
	})
}

func (a *app) resumeCommand() *cobra.Command {
	var ttl ttlFlags
	return a.lifecycleCommand(lifecycle{
		use:   "resume",
		short: "Boot from the kept disk",
		long:  "Boot stopped, archived or failed sandboxes from their disks. A sleeping one is woken. A resume begins a full auto-stop.",
		call: func(ctx context.Context, c *client, name, key string) (*http.Response, error) {
			body, err := ttl.boot()
			if err != nil {
				return nil, err
			}
			return c.ResumeSandbox(ctx, name, &api.ResumeSandboxParams{IdempotencyKey: key}, body)
		},
	}, ttl.addAnew)
}

func (a *app) deleteCommand() *cobra.Command {
	var permanent bool
	return a.lifecycleCommand(lifecycle{
		use:     "delete",
		aliases: []string{"rm"},
		short:   "Delete sandboxes",
		long: "Delete sandboxes, whatever state they are in and whatever is at work on them. Memory is gone, and the name is free, at once. " +
			"The disk is kept for a time (a day, where the server sets nothing else), in which `hutch undelete` brings the sandbox back; " +
			"it costs nothing meanwhile, and `hutch ls --deleted` lists it. A disk pool that runs short erases it earlier. " +
			"--permanent erases at once, with no way back, also what is deleted already.\n\n" +
			"At a terminal it is asked first; " +
			"what --label chooses always needs an answer or --yes.",
		ask: true,
		call: func(ctx context.Context, c *client, name, key string) (*http.Response, error) {
			return c.DeleteSandbox(ctx, name, &api.DeleteSandboxParams{IdempotencyKey: key, Permanent: permanent})
		},
	}, func(cmd *cobra.Command) {
		cmd.Flags().BoolVar(&permanent, "permanent", false, "erase the disk at once, with no way back")
	})
}
