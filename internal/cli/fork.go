package cli

import (
	"context"
	"slices"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// forkResult is the answer to a fork.
type forkResult struct {
	Sandbox   doc[api.Sandbox]   `json:"sandbox"`
	Operation doc[api.Operation] `json:"operation"`
	Forks     []forked           `json:"forks"`
}

// forked is one copy, with the operation that starts it.
type forked struct {
	Sandbox   doc[api.Sandbox]    `json:"sandbox"`
	Operation *doc[api.Operation] `json:"operation"`
}

func (a *app) forkCommand() *cobra.Command {
	var f changeFlags
	var body api.ForkSandbox
	var mode string
	var count int64
	var ttl ttlFlags
	cmd := &cobra.Command{
		Use:   "fork NAME",
		Short: "Make copies of a sandbox",
		Long: "Make copies of a sandbox, all from one instant, and wait until they are ready. Their names go to stdout, one a line. " +
			"Mode live copies memory and disk; mode disk copies the disk and boots it.",
		Example:           "hutch fork demo\nhutch fork demo --count 5 --name try\nhutch fork demo --mode disk --json",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().StringVarP(&body.Name, "name", "n", "", "the copy's name; several get -1, -2 … after it (made up where not given)")
	cmd.Flags().Int64VarP(&count, "count", "c", 1, "how many copies")
	cmd.Flags().StringVarP(&mode, "mode", "m", "live", "what is copied: live (memory and disk) or disk (the disk alone, which boots)")
	cmd.Flags().BoolP("yes", "y", false, "accepted, as nothing is asked")
	ttl.add(cmd, " (its source's where not given)")
	f.add(cmd)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		body.Mode, body.Count = api.ForkSandboxMode(mode), &count
		var err error
		if body.TTLSeconds, err = ttl.seconds(); err != nil {
			return err
		}
		start := a.env.Now()
		res, err := read[forkResult](c.ForkSandbox(ctx, args[0], &api.ForkSandboxParams{IdempotencyKey: f.key("", false)}, body))
		if err != nil {
			return err
		}
		outcomes := make([]outcome, len(res.Forks))
		if !f.noWait {
			if outcomes, err = a.finishFork(ctx, c, &res, &f); err != nil {
				return err
			}
		}
		if err := a.reportForks(res, outcomes, f.json); err != nil {
			return err
		}
		if !f.json && !f.noWait {
			a.note("%d of %s in %s", len(res.Forks), clean(res.Sandbox.V.Name), formatTook(a.env.Now().Sub(start)))
		} else if !f.json {
			a.note("operation %s (fork) goes on", res.Operation.V.ID)
		}
		return nil
	})
	return cmd
}

// finishFork waits for the capture and then for every copy's start. The error is the
// capture's; each outcome has that of a copy.
func (a *app) finishFork(ctx context.Context, c *client, res *forkResult, f *changeFlags) ([]outcome, error) {
	stop := a.progress.spin()
	op, err := a.await(ctx, c, res.Sandbox.V.Name, res.Operation, a.progress.set)
	stop()
	res.Operation = op
	// A fork that was cancelled after its capture, as by a delete of its source, still
	// makes its copies.
	cancelled := err
	if err != nil && !fault.Is(err, fault.Cancelled) {
		return nil, err
	}
	names := make([]string, len(res.Forks))
	byName := make(map[string]*forked, len(res.Forks))
	for i := range res.Forks {
		names[i] = res.Forks[i].Sandbox.V.ID
		byName[names[i]] = &res.Forks[i]
	}
	outcomes := a.each(ctx, names, func(ctx context.Context, id string, show func(string)) (change, error) {
		copied := byName[id]
		if copied.Operation == nil {
			sb, err := read[doc[api.Sandbox]](c.GetSandbox(ctx, id, &api.GetSandboxParams{}))
			if err != nil {
				return change{}, err
			}
			copied.Sandbox = sb
			if sb.V.Operation != nil {
				copied.Operation = &doc[api.Operation]{V: *sb.V.Operation}
			}
		}
		ch, err := a.finish(ctx, c, change{Sandbox: copied.Sandbox, Operation: copied.Operation}, f, show)
		copied.Sandbox, copied.Operation = ch.Sandbox, ch.Operation
		return ch, err
	})
	if cancelled != nil && !slices.ContainsFunc(outcomes, func(o outcome) bool { return o.err == nil }) {
		return nil, cancelled
	}
	return outcomes, nil
}

// reportForks prints the copies. The error is that of the first one that failed.
func (a *app) reportForks(res forkResult, outcomes []outcome, asJSON bool) error {
	var failures []error
	for _, o := range outcomes {
		if o.err != nil {
			failures = append(failures, o.err)
		}
	}
	if asJSON {
		if err := a.printJSON(res); err != nil {
			return err
		}
	} else {
		for i, copied := range res.Forks {
			if outcomes[i].err == nil {
				a.say("%s", clean(copied.Sandbox.V.Name))
			}
		}
		for _, err := range failures[min(1, len(failures)):] {
			reportError(a.env.Stderr, err)
		}
	}
	if len(failures) > 0 {
		return failures[0]
	}
	return nil
}
