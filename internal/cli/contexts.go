package cli

import (
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) contextCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "context",
		Aliases: []string{"contexts"},
		Short:   "List and choose the servers that hutch speaks to",
		Long: "List and choose the servers that hutch speaks to. A context is a server's address and an API key under a name, " +
			"in the context file. `hutch up` writes one for its server and makes it the current one.",
		Example: "hutch context ls\nhutch context use local\nhutch context rm old --yes",
	}, a.contextLsCommand(), a.contextUseCommand(), a.contextRmCommand())
}

// shownContext is a context without its key.
type shownContext struct {
	Name      string `json:"name"`
	URL       string `json:"url"`
	Current   bool   `json:"current"`
	HasAPIKey bool   `json:"has_api_key"`
}

func (a *app) contextLsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List contexts; the current one is marked",
		Example: "hutch context ls\nhutch context ls --json",
		Args:    named(),
		RunE: func(*cobra.Command, []string) error {
			path := ConfigPath(a.env.Getenv)
			file, err := readContextFile(path)
			if err != nil {
				return err
			}
			list := []shownContext{}
			var rows [][]string
			for _, name := range slices.Sorted(maps.Keys(file.Contexts)) {
				c := file.Contexts[name]
				list = append(list, shownContext{Name: name, URL: c.URL, Current: name == file.Current, HasAPIKey: c.APIKey != ""})
				rows = append(rows, []string{
					map[bool]string{true: "*"}[name == file.Current], clean(name), orDash(c.URL),
					map[bool]string{true: "set", false: "none"}[c.APIKey != ""],
				})
			}
			if asJSON {
				return a.printJSON(map[string]any{"contexts": list, "path": path})
			}
			if err := a.printTable([]string{"", "NAME", "URL", "API KEY"}, rows); err != nil {
				return err
			}
			for _, name := range []string{"HUTCH_URL", "HUTCH_API_KEY"} {
				if a.env.Getenv(name) != "" {
					a.note("%s is set and wins over the current context; `hutch config` shows what is in force", name)
				}
			}
			return nil
		},
	}
	addJSON(cmd, &asJSON)
	return cmd
}

func (a *app) contextUseCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "use NAME",
		Aliases:           []string{"switch"},
		Short:             "Make a context the current one",
		Example:           "hutch context use local",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeContexts,
		RunE: func(_ *cobra.Command, args []string) error {
			path := ConfigPath(a.env.Getenv)
			file, err := readContextFile(path)
			if err != nil {
				return err
			}
			chosen, ok := file.Contexts[args[0]]
			if !ok {
				return noContext(args[0], path)
			}
			if file.Current != args[0] {
				file.Current = args[0]
				if err := writeContextFile(path, file); err != nil {
					return err
				}
			}
			if asJSON {
				return a.printJSON(shownContext{Name: args[0], URL: chosen.URL, Current: true, HasAPIKey: chosen.APIKey != ""})
			}
			a.say("%s is the current context, of the server at %s", clean(args[0]), clean(chosen.URL))
			if url := a.env.Getenv("HUTCH_URL"); url != "" && !sameServer(url, chosen.URL) {
				a.note("HUTCH_URL is set to %s and wins over it; unset it to use the context", clean(url))
			}
			return nil
		},
	}
	addJSON(cmd, &asJSON)
	return cmd
}

func (a *app) contextRmCommand() *cobra.Command {
	var yes, asJSON bool
	cmd := &cobra.Command{
		Use:     "rm NAME",
		Aliases: []string{"delete"},
		Short:   "Remove a context with its API key",
		Long: "Remove a context with its API key from the context file. The server and the key itself stay: `hutch keys rm ID` revokes it. " +
			"It is asked first; where there is no terminal to ask on, --yes is needed.",
		Example:           "hutch context rm old --yes",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeContexts,
		RunE: func(cmd *cobra.Command, args []string) error {
			path := ConfigPath(a.env.Getenv)
			file, err := readContextFile(path)
			if err != nil {
				return err
			}
			if _, ok := file.Contexts[args[0]]; !ok {
				return noContext(args[0], path)
			}
			if !yes {
				if err := a.confirmUntilSignal(cmd.Context(), "remove the context "+args[0]+" and its API key"); err != nil {
					return err
				}
			}
			delete(file.Contexts, args[0])
			wasCurrent := file.Current == args[0]
			if wasCurrent {
				file.Current = ""
			}
			if err := writeContextFile(path, file); err != nil {
				return err
			}
			if asJSON {
				return a.printJSON(map[string]string{"context": args[0]})
			}
			a.note("removed %s", clean(args[0]))
			if wasCurrent && len(file.Contexts) > 0 {
				a.note("no context is the current one now; `hutch context use NAME` chooses one")
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addJSON(cmd, &asJSON)
	return cmd
}

func noContext(name, path string) error {
	return fault.New(fault.NotFound, "there is no context %q in %s; `hutch context ls` lists those that are", name, path)
}

// completeContexts completes the names of contexts in a shell.
func (a *app) completeContexts(_ *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	file, err := readContextFile(ConfigPath(a.env.Getenv))
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names := slices.Sorted(maps.Keys(file.Contexts))
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, prefix) })
	return names, cobra.ShellCompDirectiveNoFileComp
}
