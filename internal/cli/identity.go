package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
)

func (a *app) identityCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "identity NAME",
		Short: "Show what was made anew so that a copy shares nothing with its source",
		Long: "Show each thing that a fork must not share with its source, and whether it was made anew: done, failed, or impossible " +
			"where the runtime cannot.",
		Example:           "hutch identity demo-1\nhutch identity demo-1 --json",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		identity, err := read[doc[api.Identity]](c.GetIdentity(ctx, args[0]))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(identity)
		}
		rows := make([][]string, 0, len(identity.V.Items))
		for _, item := range identity.V.Items {
			rows = append(rows, []string{clean(item.Item), clean(string(item.Status)), clean(item.Message)})
		}
		return a.printTable([]string{"ITEM", "STATUS", "MESSAGE"}, rows)
	})
	return cmd
}
