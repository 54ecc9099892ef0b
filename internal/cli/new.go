package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) newCommand() *cobra.Command {
	var (
		f            changeFlags
		body         api.CreateSandbox
		memory, disk string
		sleep        sleepFlags
		env, labels  []string
		life         lifeFlags
		cpus         int64
		walls        firewallFlags
	)
	cmd := &cobra.Command{
		Use:     "new",
		Aliases: []string{"create"},
		Short:   "Make a sandbox",
		Long: "Make a sandbox and wait until it is ready. Its name goes to stdout, the time that it took to stderr. " +
			"Template, size and sleep mode that are not given are the server's defaults; user, directory and variables are the template's.",
		Example: "hutch new\nhutch new --name demo --cpus 2 --memory 512MiB --disk 4GB\n" +
			"hutch new --template node --env NODE_ENV=test --label team=web --json",
		Args: named(),
	}
	flags := cmd.Flags()
	flags.StringVarP(&body.Name, "name", "n", "", "a name: a-z, 0-9 and -, at most 40, with no - at either end (made up where not given)")
	flags.StringVarP(&body.Template, "template", "t", "", "the template to make it from (base where not given)")
	flags.Int64Var(&cpus, "cpus", 0, "the number of vCPUs (the server's default, 1, where not given)")
	flags.StringVar(&memory, "memory", "", "the memory, such as 512MiB or 2g (1GiB where not given); a hard limit for all in it together")
	flags.StringVar(&disk, "disk", "", "the disk, such as 4GB (GB are 10^9 bytes), 1 to 8GB (4GB where not given)")
	flags.StringArrayVarP(&env, "env", "e", nil, "a variable for every command, as KEY=VALUE")
	flags.StringArrayVarP(&labels, "label", "l", nil, "a label, as key=value")
	flags.StringVar(&body.User, "user", "", "who commands run as")
	flags.StringVar(&body.Workdir, "workdir", "", "where commands start")
	sleep.add(cmd)
	life.add(cmd, " (1h where not given)")
	walls.add(cmd, "firewall")
	f.add(cmd)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		if cmd.Flags().Changed("cpus") {
			body.CPUs = &cpus
		}
		var err error
		if body.MemoryBytes, err = optionalSize("memory", memory, parseMemory); err != nil {
			return err
		}
		if body.DiskBytes, err = optionalSize("disk", disk, parseDisk); err != nil {
			return err
		}
		if body.Env, err = parsePairs("env", env); err != nil {
			return err
		}
		if body.Labels, err = parsePairs("label", labels); err != nil {
			return err
		}
		if body.TTLSeconds, err = life.seconds(); err != nil {
			return err
		}
		if body.Sleep, err = life.settings(&sleep); err != nil {
			return err
		}
		if body.ArchiveAfter, body.DeleteAfter, err = life.afters(); err != nil {
			return err
		}
		body.Firewall = walls.firewall()
		body.OnIdle, body.OnDeadline = api.OnIdle(sleep.onIdle), api.OnDeadline(life.onDeadline)
		return a.create(ctx, c, body, &f)
	})
	return cmd
}

// ttlFlags are the flags of an auto-stop.
type ttlFlags struct {
	ttl  string
	none bool
}

// add makes them; otherwise says what holds where none is given.
func (t *ttlFlags) add(cmd *cobra.Command, otherwise string) {
	cmd.Flags().StringVar(&t.ttl, "ttl", "", "the auto-stop: how long after its start or wake it is stopped, such as 1800, 30m, 2h or 1d, at most 30d"+otherwise)
	cmd.Flags().BoolVar(&t.none, "no-auto-stop", false, "it is never stopped by itself")
	cmd.MarkFlagsMutuallyExclusive("ttl", "no-auto-stop")
}

// lifeFlags are the flags of when a sandbox ends by itself, and how.
type lifeFlags struct {
	ttlFlags
	onDeadline, sleepDeadline string
	archiveAfter, deleteAfter string
}

func (l *lifeFlags) add(cmd *cobra.Command, otherwise string) {
	l.ttlFlags.add(cmd, otherwise)
	cmd.Flags().StringVar(&l.onDeadline, "on-deadline", "", "what is done at the end of the auto-stop: stop (the default), sleep, or delete (disk and all, with no way back)")
	cmd.Flags().StringVar(&l.sleepDeadline, "sleep-deadline", "", "what the auto-stop does while it sleeps: it runs on (run, the default) or not (paused)")
	cmd.Flags().StringVar(&l.archiveAfter, "archive-after", "", "how long after its stop it goes to cold storage, such as 30d, or never (14d by default)")
	cmd.Flags().StringVar(&l.deleteAfter, "delete-after", "", "how long after its stop it is deleted, such as 30d, or never (the default)")
}

// settings are those of its sleep, with what the deadline does then; nil for none.
func (l *lifeFlags) settings(sleep *sleepFlags) (*api.SleepSettings, error) {
	out, err := sleep.settings()
	if err != nil || l.sleepDeadline == "" {
		return out, err
	}
	if out == nil {
		out = &api.SleepSettings{}
	}
	out.Deadline = api.SleepDeadline(l.sleepDeadline)
	return out, nil
}

// afters are the times after a stop as the API takes them, "" for one that is not given.
func (l *lifeFlags) afters() (archive, remove api.Seconds, err error) {
	if archive, err = secondsOrNever("archive-after", l.archiveAfter); err != nil {
		return "", "", err
	}
	remove, err = secondsOrNever("delete-after", l.deleteAfter)
	return archive, remove, err
}

func secondsOrNever(flag, text string) (api.Seconds, error) {
	switch text {
	case "":
		return "", nil
	case "never":
		return api.SecondsOf(nil), nil
	}
	return wholeSeconds(flag, text)
}

// seconds is the auto-stop as the API takes it, "" where none of the flags is given.
func (t *ttlFlags) seconds() (api.Seconds, error) {
	switch {
	case t.none:
		return api.SecondsOf(nil), nil
	case t.ttl == "":
		return "", nil
	}
	return wholeSeconds("ttl", t.ttl)
}

// wholeSeconds reads a duration of whole seconds.
func wholeSeconds(flag, text string) (api.Seconds, error) {
	d, err := parseDuration(flag, text)
	if err != nil {
		return "", err
	}
	if d%time.Second != 0 {
		return "", fault.New(fault.InvalidArgument, "--%s %s is not a number of whole seconds; write it as --%s %s", flag, text, flag, flagExamples[flag])
	}
	n := int64(d / time.Second)
	return api.SecondsOf(&n), nil
}

// optionalSize reads a size that may be left out.
func optionalSize(flag, s string, parse func(flag, s string) (int64, error)) (*int64, error) {
	if s == "" {
		return nil, nil
	}
	size, err := parse(flag, s)
	return &size, err
}

func (a *app) create(ctx context.Context, c *client, body api.CreateSandbox, f *changeFlags) error {
	start := a.env.Now()
	ch, err := read[change](c.CreateSandbox(ctx, &api.CreateSandboxParams{IdempotencyKey: f.key("", false)}, body))
	if err != nil {
		return err
	}
	stop := a.progress.spin()
	ch, err = a.finish(ctx, c, ch, f, a.progress.set)
	stop()
	if err != nil {
		return err
	}
	if f.json {
		return a.printJSON(ch)
	}
	a.say("%s", clean(ch.Sandbox.V.Name))
	if f.noWait && ch.Operation != nil {
		a.note("operation %s (create) goes on", ch.Operation.V.ID)
	} else {
		a.note("%s in %s", ch.Sandbox.V.State, formatTook(a.env.Now().Sub(start)))
	}
	return nil
}
