package cli

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

// SPEC section 16: each kind has one exit code, no two share one, none is one that
// exec keeps for itself, and docs/cli.md tells the same.
func TestExitCodesAreComplete(t *testing.T) {
	t.Parallel()
	docs, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[int]fault.Kind{}
	for _, kind := range fault.Kinds {
		code, ok := exitCodes[kind]
		if !ok {
			t.Errorf("%s has no exit code", kind)
			continue
		}
		if other, twice := seen[code]; twice {
			t.Errorf("%s and %s share the exit code %d", kind, other, code)
		}
		seen[code] = kind
		if code <= 0 || code == exitExec || code == 126 || code == 127 || code > 130 {
			t.Errorf("%s has the exit code %d, which means something else", kind, code)
		}
		if row := fmt.Sprintf("| %d | `%s` |", code, kind); !strings.Contains(string(docs), row) {
			t.Errorf("docs/cli.md has no row %q", row)
		}
	}
	if len(exitCodes) != len(fault.Kinds) {
		t.Errorf("%d exit codes for %d kinds", len(exitCodes), len(fault.Kinds))
	}
}

func TestExitCode(t *testing.T) {
	t.Parallel()
	for want, err := range map[int]error{
		0: nil, 12: fmt.Errorf("get: %w", fault.New(fault.NotFound, "no")), 1: errors.New("plain"),
	} {
		if got := ExitCode(err); got != want {
			t.Errorf("ExitCode(%v) = %d, want %d", err, got, want)
		}
	}
}
