package guestproto

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"

	"github.com/hutchrun/hutch/internal/fault"
)

// codes maps each kind to the nearest Connect code; FaultDetail carries the kind
// itself.
var codes = map[fault.Kind]connect.Code{
	fault.InvalidArgument:    connect.CodeInvalidArgument,
	fault.Unauthenticated:    connect.CodeUnauthenticated,
	fault.PermissionDenied:   connect.CodePermissionDenied,
	fault.NotFound:           connect.CodeNotFound,
	fault.Conflict:           connect.CodeAborted,
	fault.FailedPrecondition: connect.CodeFailedPrecondition,
	fault.QuotaExceeded:      connect.CodeResourceExhausted,
	fault.RateLimited:        connect.CodeResourceExhausted,
	fault.BudgetExhausted:    connect.CodeResourceExhausted,
	fault.TooLarge:           connect.CodeResourceExhausted,
	fault.NoCapacity:         connect.CodeResourceExhausted,
	fault.Unsupported:        connect.CodeUnimplemented,
	fault.Unavailable:        connect.CodeUnavailable,
	fault.Cancelled:          connect.CodeCanceled,
	fault.DeadlineExceeded:   connect.CodeDeadlineExceeded,
	fault.DataCorrupt:        connect.CodeDataLoss,
	fault.Internal:           connect.CodeInternal,
}

// kinds maps the Connect codes that come without a FaultDetail: those that the
// transport makes itself.
var kinds = map[connect.Code]fault.Kind{
	connect.CodeCanceled:           fault.Cancelled,
	connect.CodeInvalidArgument:    fault.InvalidArgument,
	connect.CodeDeadlineExceeded:   fault.DeadlineExceeded,
	connect.CodeNotFound:           fault.NotFound,
	connect.CodeAlreadyExists:      fault.Conflict,
	connect.CodePermissionDenied:   fault.PermissionDenied,
	connect.CodeResourceExhausted:  fault.TooLarge,
	connect.CodeFailedPrecondition: fault.FailedPrecondition,
	connect.CodeAborted:            fault.Conflict,
	connect.CodeOutOfRange:         fault.InvalidArgument,
	connect.CodeUnimplemented:      fault.Unsupported,
	connect.CodeInternal:           fault.Internal,
	connect.CodeUnavailable:        fault.Unavailable,
	connect.CodeDataLoss:           fault.DataCorrupt,
	connect.CodeUnauthenticated:    fault.Unauthenticated,
}

// ToWire makes the Connect error that carries err's fault: kind, public message,
// reason and retry time, never the cause. A Connect error and nil pass unchanged.
func ToWire(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*connect.Error](err); ok {
		return err
	}
	if errors.Is(err, context.Canceled) {
		err = fault.Wrap(err, fault.Cancelled, "the call was cancelled")
	} else if errors.Is(err, context.DeadlineExceeded) {
		err = fault.Wrap(err, fault.DeadlineExceeded, "the call's time is over")
	}
	f := fault.Of(err)
	wire := connect.NewError(codes[f.Kind], strings.ToValidUTF8(f.Message, "\uFFFD")).WithCause(err)
	detail, derr := connectproto.NewErrorDetail(&FaultDetail{
		Kind: string(f.Kind), Reason: f.Reason, RetryAfterNanos: int64(f.RetryAfter),
	})
	if derr != nil {
		return wire
	}
	return wire.WithDetail(detail)
}

// FromWire makes the fault of a Connect error. What a guest says is not believed
// blindly: an unknown kind is replaced by the one that the code stands for, and
// texts are cut. io.EOF and nil pass unchanged. A guest that cannot be reached is
// Unavailable.
func FromWire(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	if _, ok := errors.AsType[*fault.Fault](err); ok {
		return err
	}
	ce, ok := errors.AsType[*connect.Error](err)
	switch {
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Cancelled, "the call to the guest agent was cancelled")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.DeadlineExceeded, "the guest agent did not answer in time")
	case !ok || !ce.IsRemote():
		return fault.Wrap(err, localKind(ce), "the guest agent could not be reached or did not speak its protocol")
	}
	f := &fault.Fault{Kind: kinds[ce.Code()], Message: clip(ce.Message(), maxPublicMessage), Err: err}
	if f.Kind == "" {
		f.Kind = fault.Internal
	}
	for _, d := range ce.Details() {
		msg, err := connectproto.UnmarshalErrorDetail(d)
		if err != nil {
			continue
		}
		if fd, ok := msg.(*FaultDetail); ok {
			if _, known := codes[fault.Kind(fd.Kind)]; known {
				f.Kind = fault.Kind(fd.Kind)
			}
			f.Reason = clip(fd.Reason, 64)
			f.RetryAfter = min(max(time.Duration(fd.RetryAfterNanos), 0), time.Hour)
		}
	}
	if f.Message == "" {
		f.Message = "the guest agent refused the call without a message"
	}
	return f
}

// localKind is the kind of an error that this side's transport made: too large, or
// else the guest is out of reach.
func localKind(ce *connect.Error) fault.Kind {
	if ce != nil && (ce.Code() == connect.CodeResourceExhausted || ce.Code() == connect.CodeInvalidArgument) {
		return kinds[ce.Code()]
	}
	return fault.Unavailable
}

func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
