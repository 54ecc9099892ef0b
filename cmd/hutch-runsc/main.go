// Command hutch-runsc is gVisor's runsc with the changes of docs/gvisor.md. It is a
// module of its own, so that gVisor's dependencies stay out of hutch's.
//
// Beside runsc's verbs it has two. The first,
//
//	hutch-runsc join FILE... -- ARGS...
//
// puts the process into the control groups whose cgroup.procs files are named, and
// goes on as `runsc ARGS...`. So everything that runsc starts is in the groups from
// its first instruction, on cgroup v1 as on v2, and whoever made the groups can find
// and kill it whatever happened in between. A second,
//
//	hutch-runsc idle
//
// does nothing for ever: it is PID 1 of the sandbox by which hutch finds out whether
// gVisor works on a machine.
//
// gVisor starts this binary again as runsc-sandbox, runsc-gofer and "/proc/self/exe
// umount", with an empty environment and inside a chroot: hence no flag parsing and
// no look at the environment before maincli, and CGO_ENABLED=0 in the build.
package main

import (
	"fmt"
	"os"
	"time"

	"gvisor.dev/gvisor/runsc/cli/maincli"
	"gvisor.dev/gvisor/runsc/version"
)

// The linker sets the version string in this package; without a reference it would
// be left out.
var _ = version.Version

func main() {
	verb := ""
	if len(os.Args) > 1 {
		verb = os.Args[1]
	}
	switch verb {
	case "join":
		args, err := join(os.Args[2:])
		if err != nil {
			fmt.Fprintf(os.Stderr, "hutch-runsc: %v\n", err)
			os.Exit(128)
		}
		os.Args = append([]string{"runsc"}, args...)
	case "idle":
		for {
			time.Sleep(time.Hour)
		}
	}
	maincli.Main()
}

// join moves this process into the groups named before "--" and gives what follows.
func join(args []string) ([]string, error) {
	for i, arg := range args {
		if arg == "--" {
			return args[i+1:], nil
		}
		if err := os.WriteFile(arg, []byte("0"), 0); err != nil {
			return nil, fmt.Errorf("joining a control group: %w", err)
		}
	}
	return nil, fmt.Errorf("join: no -- in %q", args)
}
