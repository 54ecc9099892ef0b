package cli

import (
	"fmt"
	"regexp"

	mango "github.com/muesli/mango-cobra"
	"github.com/muesli/roff"
	"github.com/spf13/cobra"
)

// shortFlag finds one-letter flags, which the generator writes with two dashes.
var shortFlag = regexp.MustCompile(`\\fB--(\w) --`)

func (a *app) manCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "man",
		Short:   "Print the manual page, in roff",
		Example: "hutch man | man -l -\nhutch man > /usr/local/share/man/man1/hutch.1",
		Args:    named(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			page, err := mango.NewManPage(1, cmd.Root())
			if err != nil {
				return fmt.Errorf("make the manual page: %w", err)
			}
			page = page.WithSection("Exit status", exitStatusText())
			text := shortFlag.ReplaceAllString(page.Build(roff.NewDocument()), `\fB-$1 --`)
			_, err = fmt.Fprint(a.env.Stdout, text)
			return err
		},
	}
}
