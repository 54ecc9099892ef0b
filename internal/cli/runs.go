package cli

import (
	"strings"

	"github.com/spf13/cobra"
)

// runsCommand is the same verbs below `hutch runs`, for people who know them so.
func (a *app) runsCommand() *cobra.Command {
	cmd := group(&cobra.Command{
		Use:     "runs",
		Short:   "The same verbs, as `runs stop`, `runs get` …",
		Example: "hutch runs stop demo --wait --json\nhutch runs delete demo --yes",
	}, a.lsCommand(), a.getCommand(), a.stopCommand(), a.resumeCommand(), a.forkCommand(), a.deleteCommand())
	for _, sub := range cmd.Commands() {
		sub.Example = strings.ReplaceAll(sub.Example, "hutch "+sub.Name(), "hutch runs "+sub.Name())
	}
	return cmd
}
