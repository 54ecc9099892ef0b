// Command hutch is the whole of hutch in one binary: the client's verbs, the server
// with its host agent (`up`) and without one (`server`), and the care of the machine
// (`doctor`).
package main

import (
	"context"
	"os"

	"github.com/hutchrun/hutch/internal/cli"
)

// version is set by the build.
var version = "devel"

func main() {
	env := cli.Env{
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		Getenv: os.Getenv, Version: version,
	}
	root := cli.New(env)
	root.AddCommand(upCommand(env), downCommand(env), serverCommand(env), doctorCommand(env), logsCommand(env), backupCommand(env), pruneCommand(env),
		upgradeCommand(env), uninstallCommand(env))
	addConfig(root, env)
	os.Exit(cli.Run(context.Background(), root, os.Args[1:]))
}
