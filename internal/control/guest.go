package control

import (
	"context"
	"errors"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// errGuestWait is the cause of the context that Guest gives up with.
var errGuestWait = errors.New("control: the sandbox did not run in time")

// The pauses between two tries to reach a guest that is frozen for a capture.
const (
	guestRetryFirst = 20 * time.Millisecond
	guestRetryMost  = time.Second
)

// Guest gives the way to the programs in a sandbox. A ready one is reached at once; one
// that is being made or put to sleep is waited for. A sleeping one is woken for a use
// that wakes, once for any number of callers at a time, and is FailedPrecondition with
// reason "state_sleeping" for another (Z5). What does not run and cannot be woken is
// FailedPrecondition with the command that starts it. What takes longer than
// Limits.GuestWait is Unavailable with a time to try again. The caller ends the use with
// Access.Guest.Done.
func (c *Control) Guest(ctx context.Context, a Actor, ref string, use Use) (Access, error) {
	limited, cancel := context.WithTimeoutCause(ctx, c.limits.GuestWait, errGuestWait)
	defer cancel()
	pause := guestRetryFirst
	for {
		v, err := c.Get(limited, a, ref)
		if err != nil {
			return Access{}, guestFault(limited, ref, err)
		}
		if _, err := c.host(v.Sandbox.Host); err != nil {
			return Access{}, err
		}
		next, err := towardsGuest(v, use.Wakes())
		if err != nil {
			return Access{}, err
		}
		switch next {
		case guestNow:
			g, err := c.reach(limited, v.Sandbox, use)
			if err == nil {
				return g, nil
			}
			// Frozen for a capture, or its end has not been reported yet.
			if !fault.Is(err, fault.Unavailable) && !fault.Is(err, fault.FailedPrecondition) {
				return Access{}, err
			}
			select {
			case <-limited.Done():
				return Access{}, guestFault(limited, ref, err)
			case <-time.After(pause):
			}
			pause = min(2*pause, guestRetryMost)
			continue
		case guestWake:
			r, err := c.Wake(limited, a, v.Sandbox.ID, Idempotency{})
			if fault.Is(err, fault.Conflict) || fault.Is(err, fault.FailedPrecondition) {
				continue // something was quicker: look again
			}
			if err != nil {
				return Access{}, guestFault(limited, ref, err)
			}
			v.Operation = r.Operation
		}
		if v.Operation == nil {
			continue // a wake that found it awake
		}
		op, err := c.Wait(limited, a, v.Operation.ID, min(c.limits.GuestWait, c.limits.WaitMax))
		if err != nil {
			return Access{}, guestFault(limited, ref, err)
		}
		if op.Status == sandbox.Errored && op.Kind == sandbox.Wake {
			return Access{}, fault.New(fault.Unavailable, "cannot reach %s: it did not wake: %s; try again", v.Sandbox.Name, op.Error.Message).
				Because("wake_failed").After(5 * time.Second)
		}
	}
}

// guestStep is what brings a caller nearer to a guest.
type guestStep int

const (
	guestNow  guestStep = iota // reach it
	guestWait                  // wait for the active operation
	guestWake                  // start or join a wake
)

// towardsGuest decides on the next step to a sandbox's guest.
func towardsGuest(v View, wake bool) (guestStep, error) {
	s, op := v.Sandbox, v.Operation
	if op != nil && (op.Kind == sandbox.Stop || op.Kind == sandbox.Delete) {
		return 0, fault.New(fault.Conflict, "cannot reach %s: the operation %s (%s) is at work on it; wait for it with `hutch get %s --wait`", s.Name, op.ID, op.Kind, s.Name).Because(op.ID)
	}
	switch {
	case s.State == sandbox.Creating && op != nil, s.State == sandbox.Ready && op != nil && op.Kind == sandbox.Sleep:
		return guestWait, nil
	case s.State == sandbox.Ready:
		return guestNow, nil
	case s.State == sandbox.Sleeping && !wake:
		return 0, fault.New(fault.FailedPrecondition, "cannot reach %s: it is sleeping; wake it with `hutch wake %s`", s.Name, s.Name).Because("state_sleeping")
	case s.State == sandbox.Sleeping && op != nil:
		return guestWait, nil // a wake, or a fork of the saved memory
	case s.State == sandbox.Sleeping:
		return guestWake, nil
	case op != nil && op.Kind == sandbox.Resume:
		return guestWait, nil
	}
	state := string(s.State)
	if s.State == sandbox.Failed && s.Reason != "" {
		state += " (" + s.Reason + ")"
	}
	return 0, fault.New(fault.FailedPrecondition, "cannot reach %s: it is %s; start it with `hutch resume %s`", s.Name, state, s.Name).
		Because("state_" + string(s.State))
}

// reach asks the sandbox's host for the way to its guest.
func (c *Control) reach(ctx context.Context, s sandbox.Sandbox, use Use) (Access, error) {
	h, err := c.host(s.Host)
	if err != nil {
		return Access{}, err
	}
	g, err := h.Guest(ctx, s.ID, use)
	return Access{Guest: g, Sandbox: s}, err
}

// guestFault says that the time to reach a guest is over, where that is why a step
// failed.
func guestFault(ctx context.Context, ref string, err error) error {
	if errors.Is(context.Cause(ctx), errGuestWait) {
		return fault.Wrap(err, fault.Unavailable, "cannot reach %s: it did not run in time; try again", shown(ref)).
			Because("not_running_yet").After(5 * time.Second)
	}
	if ctx.Err() != nil {
		return fault.Wrap(err, fault.Cancelled, "the call to %s was cancelled", shown(ref))
	}
	return err
}

// Usage gives what a running sandbox uses.
func (c *Control) Usage(ctx context.Context, a Actor, ref string) (Usage, error) {
	v, err := c.Get(ctx, a, ref)
	if err != nil {
		return Usage{}, err
	}
	h, err := c.host(v.Sandbox.Host)
	if err != nil {
		return Usage{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	return h.Usage(ctx, v.Sandbox.ID)
}
