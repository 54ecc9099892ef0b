package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/fault"
)

// exitExec is what exec ends with when hutch itself failed, so that it differs from
// what commands usually end with.
const exitExec = 125

// exitCodes is the one map from error kinds to exit codes. The numbers are part of
// the command line's contract (docs/cli.md) and never change meaning. 1 and 2 are the
// customary codes of an error and of wrong usage, 124 is that of timeout(1), 130 that
// of a program that ctrl-C ended.
var exitCodes = map[fault.Kind]int{
	fault.Internal:           1,
	fault.InvalidArgument:    2,
	fault.Unauthenticated:    10,
	fault.PermissionDenied:   11,
	fault.NotFound:           12,
	fault.Conflict:           13,
	fault.FailedPrecondition: 14,
	fault.QuotaExceeded:      15,
	fault.RateLimited:        16,
	fault.BudgetExhausted:    17,
	fault.TooLarge:           18,
	fault.NoCapacity:         19,
	fault.Unsupported:        20,
	fault.Unavailable:        21,
	fault.DataCorrupt:        22,
	fault.DeadlineExceeded:   124,
	fault.Cancelled:          130,
}

// ExitCode gives the exit code of an error; 0 for nil.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	if code, ok := exitCodes[fault.Of(err).Kind]; ok {
		return code
	}
	return exitCodes[fault.Internal]
}

// exitCodesTopic is `hutch help exit-codes`.
func exitCodesTopic() *cobra.Command {
	return &cobra.Command{Use: "exit-codes", Short: "What the exit codes mean", Long: exitStatusText()}
}

// exitStatusText describes the exit codes, for help and the manual page.
func exitStatusText() string {
	kinds := slices.SortedFunc(maps.Keys(exitCodes), func(a, b fault.Kind) int { return exitCodes[a] - exitCodes[b] })
	var text strings.Builder
	text.WriteString("0 success, also where the goal was reached already\n")
	for _, kind := range kinds {
		fmt.Fprintf(&text, "%d %s\n", exitCodes[kind], kind)
	}
	fmt.Fprintf(&text, "exec ends with the command's own code (128 + n after signal n), and with %d where hutch itself failed\n", exitExec)
	return text.String()
}
