package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) operationsCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "operations",
		Aliases: []string{"ops"},
		Short:   "See, wait for and cancel the work on sandboxes and templates",
		Example: "hutch operations ls demo\nhutch operations wait op_01k3c9a6xwe8htz0s6h1j2k3m4",
	}, a.operationsLsCommand(), a.operationsGetCommand(), a.operationsWaitCommand(), a.operationsCancelCommand())
}

func (a *app) operationsLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "ls [NAME]",
		Short:             "List operations, oldest first",
		Example:           "hutch operations ls\nhutch operations ls demo --all --json",
		Args:              atMostOne("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		params := api.ListOperationsParams{}
		if len(args) > 0 {
			params.Sandbox = args[0]
		}
		var list []doc[api.Operation]
		next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
			params.Limit, params.Cursor = &limit, cursor
			page, err := read[struct {
				Operations []doc[api.Operation] `json:"operations"`
				NextCursor string               `json:"next_cursor"`
			}](c.ListOperations(ctx, &params))
			list = append(list, page.Operations...)
			return len(page.Operations), page.NextCursor, err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("operations", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, op := range list {
			o := op.V
			rows = append(rows, []string{
				clean(o.ID), orDash(o.Sandbox), clean(o.Kind), clean(string(o.Status)), orDash(o.Step),
				formatAge(a.env.Now().Sub(o.CreatedAt.Time)), operationTook(o),
			})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"ID", "SANDBOX", "KIND", "STATUS", "STEP", "AGE", "TOOK"}, rows)
	})
	return cmd
}

// operationTook is how long an operation took, "-" while it is at work.
func operationTook(o api.Operation) string {
	if o.EndedAt == nil {
		return "-"
	}
	return formatTook(o.EndedAt.Sub(o.CreatedAt.Time))
}

func (a *app) operationsGetCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "get ID",
		Short:   "Show an operation",
		Example: "hutch operations get op_01k3c9a6xwe8htz0s6h1j2k3m4 --json",
		Args:    named("ID"),
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		op, err := read[doc[api.Operation]](c.GetOperation(ctx, args[0], &api.GetOperationParams{}))
		if err != nil {
			return err
		}
		return a.printOperation(op, asJSON)
	})
	return cmd
}

func (a *app) operationsWaitCommand() *cobra.Command {
	var asJSON bool
	var timeout string
	cmd := &cobra.Command{
		Use:   "wait ID",
		Short: "Wait for the end of an operation",
		Long: "Wait for the end of an operation and show it. The exit code is 0 when it succeeded, that of its error otherwise, " +
			"and 124 when --timeout ran out.",
		Example: "hutch operations wait op_01k3c9a6xwe8htz0s6h1j2k3m4 --timeout 5m",
		Args:    named("ID"),
	}
	cmd.Flags().StringVar(&timeout, "timeout", "", "wait at most this long, as seconds or a duration (1800, 30m)")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if timeout != "" {
			d, err := parseDuration("timeout", timeout)
			if err != nil {
				return err
			}
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, d)
			defer cancel()
		}
		op, err := read[doc[api.Operation]](c.GetOperation(ctx, args[0], &api.GetOperationParams{}))
		if err != nil {
			return err
		}
		stop := a.progress.spin()
		op, err = a.await(ctx, c, op.V.Sandbox, op, a.progress.set)
		stop()
		if fault.Is(err, fault.DeadlineExceeded) && active(op.V) {
			return fault.Wrap(&waitError{op.V.ID, op.V.Sandbox}, fault.DeadlineExceeded,
				"operation %s (%s) has not ended within %s; it goes on, wait again", op.V.ID, op.V.Kind, timeout)
		}
		if err != nil {
			return err
		}
		return a.printOperation(op, asJSON)
	})
	return cmd
}

func (a *app) operationsCancelCommand() *cobra.Command {
	var asJSON, noWait bool
	cmd := &cobra.Command{
		Use:   "cancel ID",
		Short: "End an operation early, undone",
		Long: "End an operation early. Up to its point of no return it is undone: the sandbox is as it was before, and one that was being " +
			"created is failed and costs nothing. After it the operation goes through, and the exit code says that it was too late " +
			"(failed_precondition). docs/state-machine.md lists the steps up to which each can be cancelled; a deletion never can, " +
			"`hutch undelete` brings its sandbox back.",
		Example: "hutch operations cancel op_01k3c9a6xwe8htz0s6h1j2k3m4",
		Args:    named("ID"),
	}
	cmd.Flags().BoolVar(&noWait, "no-wait", false, "return as soon as its end is asked for")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		op, err := read[doc[api.Operation]](c.CancelOperation(ctx, args[0], &api.CancelOperationParams{}))
		if err != nil {
			return err
		}
		if !noWait {
			stop := a.progress.spin()
			op, err = a.await(ctx, c, op.V.Sandbox, op, a.progress.set)
			stop()
			if active(op.V) {
				return err
			}
		}
		if !active(op.V) && op.V.Status != api.OperationStatusCancelled {
			return fault.Wrap(&waitError{op.V.ID, op.V.Sandbox}, fault.FailedPrecondition,
				"cannot cancel %s: it was too late, the %s had ended (%s); `hutch operations get %s` shows it", op.V.ID, op.V.Kind, op.V.Status, op.V.ID).
				Because("too_late")
		}
		if asJSON {
			return a.printJSON(op)
		}
		if active(op.V) {
			a.say("%s (%s) is asked to end", clean(op.V.ID), clean(op.V.Kind))
		} else {
			a.say("%s (%s) is cancelled", clean(op.V.ID), clean(op.V.Kind))
		}
		return nil
	})
	return cmd
}

func (a *app) printOperation(op doc[api.Operation], asJSON bool) error {
	if asJSON {
		return a.printJSON(op)
	}
	o := op.V
	fields := [][2]string{
		{"id", o.ID}, {"sandbox", orDash(o.Sandbox)}, {"kind", o.Kind}, {"status", string(o.Status)},
		{"step", orDash(o.Step)}, {"progress", fmt.Sprintf("%d%%", int(o.Progress*100))},
		{"actor", o.Actor}, {"request", orDash(o.RequestID)}, {"created", formatTime(o.CreatedAt.Time)},
	}
	if o.CancelRequestedAt != nil {
		fields = append(fields, [2]string{"cancel requested", formatTime(o.CancelRequestedAt.Time)})
	}
	if o.EndedAt != nil {
		fields = append(fields, [2]string{"ended", formatTime(o.EndedAt.Time)}, [2]string{"took", operationTook(o)})
	}
	if o.Error != nil {
		fields = append(fields, [2]string{"error", string(o.Error.Code) + ": " + o.Error.Message})
	}
	return a.printFields(fields)
}
