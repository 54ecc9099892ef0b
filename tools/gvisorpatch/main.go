// Command gvisorpatch writes build/gvisor: the pinned gVisor module with the
// changes of this folder. docs/gvisor.md says what they are and why.
//
// It runs from the root of the repository, before cmd/hutch-runsc is built. It is
// quick when build/gvisor is up to date, and leaves build/gvisor alone when it
// fails.
package main

import (
	"flag"
	"fmt"
	"os"
	"time"
)

func main() {
	out := flag.String("out", "build/gvisor", "folder to write")
	stock := flag.Bool("stock", false, "leave the changes out, to compare with")
	flag.Parse()
	begin := time.Now()
	fresh, err := build(*out, *stock, moduleFolder)
	if err != nil {
		fmt.Fprintf(os.Stderr, "gvisorpatch: %v\n", err)
		os.Exit(1)
	}
	if !fresh {
		fmt.Printf("gvisorpatch: wrote %s from %s in %.1fs\n", *out, version, time.Since(begin).Seconds())
	}
}
