package disk

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// wrap gives an error a kind by its cause. A fault keeps its own kind and message: it
// was made where more was known.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	switch kind := kindOf(err); kind {
	case fault.NoCapacity:
		return fault.Wrap(err, kind, format+": no space is left; free some and try again", args...)
	case fault.DeadlineExceeded:
		return fault.Wrap(err, kind, format+" in time; try again", args...)
	case fault.Cancelled:
		return fault.Wrap(err, kind, format+": it was cancelled", args...)
	default:
		return fault.Wrap(err, kind, format+"; the log of the host has the cause", args...)
	}
}

// kindOf tells what went wrong by the cause.
func kindOf(err error) fault.Kind {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return fault.NoCapacity
	case errors.Is(err, context.DeadlineExceeded):
		return fault.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return fault.Cancelled
	}
	return fault.Internal
}

// damaged says whether a mount failed because of what is in the image.
func damaged(err error) bool {
	return errors.Is(err, unix.EUCLEAN) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EIO)
}
