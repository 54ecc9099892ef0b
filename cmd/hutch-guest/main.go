// Command hutch-guest is the agent inside every sandbox. It runs as PID 1.
package main

import (
	"os"

	"github.com/hutchrun/hutch/internal/guest"
)

// version is set by the build.
var version = "dev"

func main() { os.Exit(guest.Main(os.Args, version)) }
