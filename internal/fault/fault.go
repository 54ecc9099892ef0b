// Package fault is the one list of error kinds. An error that crosses a package
// border towards a user is a *Fault: a kind that programs act on, a message that
// people read, and a private cause that only logs see.
package fault

import (
	"errors"
	"fmt"
	"time"
)

// Kind says what went wrong in a word that programs may rely on. The words are
// part of the API and never change meaning.
type Kind string

// The kinds, each with one HTTP status (apiserver) and one exit code (cli).
const (
	InvalidArgument    Kind = "invalid_argument"
	Unauthenticated    Kind = "unauthenticated"
	PermissionDenied   Kind = "permission_denied"
	NotFound           Kind = "not_found"
	Conflict           Kind = "conflict"
	FailedPrecondition Kind = "failed_precondition"
	QuotaExceeded      Kind = "quota_exceeded"
	RateLimited        Kind = "rate_limited"
	BudgetExhausted    Kind = "budget_exhausted"
	TooLarge           Kind = "too_large"
	NoCapacity         Kind = "no_capacity"
	Unsupported        Kind = "unsupported"
	Unavailable        Kind = "unavailable"
	Cancelled          Kind = "cancelled"
	DeadlineExceeded   Kind = "deadline_exceeded"
	DataCorrupt        Kind = "data_corrupt"
	Internal           Kind = "internal"
)

// Kinds lists every kind, for tests that prove a table complete.
var Kinds = []Kind{
	InvalidArgument, Unauthenticated, PermissionDenied, NotFound, Conflict, FailedPrecondition,
	QuotaExceeded, RateLimited, BudgetExhausted, TooLarge, NoCapacity, Unsupported, Unavailable,
	Cancelled, DeadlineExceeded, DataCorrupt, Internal,
}

// Fault is an error with a kind. Message is public: it says what was asked, why
// not, and what to do next. Reason narrows the kind from a closed list (the
// precondition that failed, the capability that is missing, the operation in the
// way). Err is private.
type Fault struct {
	Kind       Kind
	Message    string
	Reason     string
	RetryAfter time.Duration // Unavailable and RateLimited: when to try again; 0 is unknown
	Err        error
}

// Error gives the public message, and the cause behind it where there is one.
func (f *Fault) Error() string {
	if f.Err != nil {
		return f.Message + ": " + f.Err.Error()
	}
	return f.Message
}

// Unwrap gives the private cause.
func (f *Fault) Unwrap() error { return f.Err }

// New makes a fault with a public message.
func New(kind Kind, format string, args ...any) *Fault {
	return &Fault{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// Wrap makes a fault with a public message and a private cause.
func Wrap(err error, kind Kind, format string, args ...any) *Fault {
	return &Fault{Kind: kind, Message: fmt.Sprintf(format, args...), Err: err}
}

// Because sets the reason and returns the fault.
func (f *Fault) Because(reason string) *Fault { f.Reason = reason; return f }

// After sets the time after which to try again and returns the fault.
func (f *Fault) After(d time.Duration) *Fault { f.RetryAfter = d; return f }

// Of finds the fault in a chain. An error that has none is Internal with a
// message that tells nothing of its cause; nil gives nil.
func Of(err error) *Fault {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*Fault](err); ok {
		return f
	}
	return &Fault{Kind: Internal, Message: "an internal error; the server's log has its cause", Err: err}
}

// Is says whether the chain has a fault of this kind. Errors without a kind are
// Internal.
func Is(err error, kind Kind) bool { return err != nil && Of(err).Kind == kind }
