package cli

import (
	"os"
	"sync"

	"golang.org/x/term"
)

// rawMode puts the terminal of f into raw mode. restore gives it back; it may be
// called from any path, also twice.
func rawMode(f *os.File) (restore func(), err error) {
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() { _ = term.Restore(int(f.Fd()), state) }), nil // a terminal that is gone needs no mode
}

// windowSize gives columns and rows of the terminal of f; zeros where it has none.
func windowSize(f *os.File) (cols, rows int) {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0, 0
	}
	return cols, rows
}
