// Package cli is the command line's client verbs. It speaks to a server through the
// package api and knows nothing of how a server works. Data goes to stdout, all else
// to stderr; with --json stdout carries exactly one document (docs/cli.md).
package cli

import (
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// Env is what the command line sees of its process.
type Env struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Getenv         func(string) string
	Now            func() time.Time // nil is time.Now
	Version        string           // of this build; "" is "devel"
}

// app is one run of the command line.
type app struct {
	env      Env
	progress *progress
	patience time.Duration // how long a server that is gone is asked for what goes on by itself
}

// New makes the root command with all client verbs. The caller may add commands of
// its own, whose errors Run reports like those of the verbs.
func New(env Env) *cobra.Command {
	if env.Now == nil {
		env.Now = time.Now
	}
	if env.Version == "" {
		env.Version = "devel"
	}
	a := &app{env: env, progress: &progress{}, patience: patience}
	if f, ok := terminalFile(env.Stderr); ok && env.Getenv("TERM") != "dumb" {
		a.progress.out = f
	}
	root := &cobra.Command{
		Use:   "hutch",
		Short: "Computers for AI agents, on machines you own",
		Long: "hutch runs computers for AI agents (sandboxes) on machines you own. " +
			"`hutch up` starts a server on this machine; `hutch new` makes a sandbox on it.\n\n" +
			"A sandbox is named by its name or its id. Verbs wait until the work is done and show its progress; " +
			"--no-wait returns at once. --json prints one JSON document. `hutch help exit-codes` lists the exit codes.",
		Example:       "hutch up\nhutch new --name demo\nhutch exec demo -- uname -a\nhutch sleep demo\nhutch delete demo --yes",
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetIn(env.Stdin)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	root.AddGroup(
		&cobra.Group{ID: groupSandbox, Title: "sandboxes"},
		&cobra.Group{ID: groupInside, Title: "inside a sandbox"},
		&cobra.Group{ID: groupServer, Title: "the server"},
		&cobra.Group{ID: groupLocal, Title: "this command line"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, cmd := range cmds {
			cmd.GroupID = group
			root.AddCommand(cmd)
		}
	}
	add(groupSandbox, a.newCommand(), a.lsCommand(), a.getCommand(), a.sleepCommand(), a.wakeCommand(),
		a.stopCommand(), a.resumeCommand(), a.forkCommand(), a.deleteCommand(), a.undeleteCommand(), a.keepCommand(), a.receiptCommand(), a.renameCommand(), a.editCommand(),
		a.labelCommand(), a.whyCommand(), a.firewallCommand(), a.identityCommand(), a.missedCommand(), a.runsCommand())
	add(groupInside, a.execCommand(), a.attachCommand(), a.commandsCommand(), a.cpCommand(), a.watchCommand(), a.portsCommand())
	add(groupServer, a.dfCommand(), a.billCommand(), a.templatesCommand(), a.eventsCommand(), a.webhooksCommand(), a.operationsCommand(), a.receiptsCommand(), a.projectsCommand(), a.sshKeysCommand(), a.keysCommand())
	add(groupLocal, a.mcpCommand(), a.skillCommand(), a.contextCommand(), a.configCommand(), a.versionCommand(), a.manCommand(), exitCodesTopic())
	root.SetCompletionCommandGroupID(groupLocal)
	root.SetHelpCommand(helpCommand())
	root.SetHelpCommandGroupID(groupLocal)
	return root
}

// helpCommand is cobra's own, except that a word which is no verb is an error.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "help [VERB]",
		Short:   "Show help for a verb, or for `exit-codes`",
		Example: "hutch help exec\nhutch help templates build\nhutch help exit-codes",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) (names []string, _ cobra.ShellCompDirective) {
			if above, rest, err := cmd.Root().Find(args); err == nil && len(rest) == 0 {
				for _, sub := range above.Commands() {
					if strings.HasPrefix(sub.Name(), prefix) && !sub.Hidden {
						names = append(names, sub.Name())
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			asked, rest, err := cmd.Root().Find(args)
			if err != nil {
				return usageFault(cmd.Root(), err, args)
			}
			if len(rest) > 0 {
				return unknownCommand(asked, rest[0])
			}
			asked.InitDefaultHelpFlag()
			return asked.Help()
		},
	}
}

// The groups that help lists commands in.
const (
	groupSandbox = "sandbox"
	groupInside  = "inside"
	groupServer  = "server"
	groupLocal   = "local"
)

// group makes a command of one that only holds others: without one it shows its
// help, with an unknown one it fails.
func group(cmd *cobra.Command, subs ...*cobra.Command) *cobra.Command {
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.AddCommand(subs...)
	return cmd
}

func addJSON(cmd *cobra.Command, asJSON *bool) {
	cmd.Flags().BoolVar(asJSON, "json", false, "print one JSON document; errors as JSON on stderr")
}
