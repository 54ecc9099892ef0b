package cli

import (
	"context"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
)

func (a *app) versionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show the version of this command line and of the server",
		Long:    "Show the version of this command line, and that of the server where one answers within two seconds.",
		Example: "hutch version\nhutch version --json",
		Args:    named(),
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		server := a.serverVersion(cmd)
		if asJSON {
			document := map[string]any{
				"version": a.env.Version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH, "server": nil,
			}
			if server != nil {
				document["server"] = server
			}
			return a.printJSON(document)
		}
		a.say("hutch %s (%s, %s/%s)", a.env.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		if server != nil {
			a.say("server %s (api %s)", clean(server.V.Version), clean(string(server.V.API)))
		} else {
			a.say("server: none answers")
		}
		return nil
	}
	return cmd
}

// serverVersion gives the server's version, nil where none answers.
func (a *app) serverVersion(cmd *cobra.Command) *doc[api.Version] {
	c, err := a.newClient(cmd)
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second)
	defer cancel()
	version, err := read[doc[api.Version]](c.GetVersion(ctx))
	if err != nil {
		return nil
	}
	return &version
}
