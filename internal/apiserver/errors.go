package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// statuses gives each kind its one HTTP status; docs/status-codes.md says when each
// comes. 499 is nginx's word for a client that went away: nobody reads it but the log.
var statuses = map[fault.Kind]int{
	fault.InvalidArgument:    http.StatusBadRequest,
	fault.Unauthenticated:    http.StatusUnauthorized,
	fault.PermissionDenied:   http.StatusForbidden,
	fault.NotFound:           http.StatusNotFound,
	fault.Conflict:           http.StatusConflict,
	fault.FailedPrecondition: http.StatusConflict,
	fault.QuotaExceeded:      http.StatusForbidden,
	fault.RateLimited:        http.StatusTooManyRequests,
	fault.BudgetExhausted:    http.StatusPaymentRequired,
	fault.TooLarge:           http.StatusRequestEntityTooLarge,
	fault.NoCapacity:         http.StatusServiceUnavailable,
	fault.Unsupported:        http.StatusNotImplemented,
	fault.Unavailable:        http.StatusServiceUnavailable,
	fault.Cancelled:          499,
	fault.DeadlineExceeded:   http.StatusGatewayTimeout,
	fault.DataCorrupt:        http.StatusInternalServerError,
	fault.Internal:           http.StatusInternalServerError,
}

// reasonPruned is the reason of events that are no longer kept, the one refusal
// with a status of its own: 410.
const reasonPruned = "pruned"

// retryDefault is what Retry-After says of an unavailable that knows no better.
const retryDefault = time.Second

// status gives the HTTP status of a fault.
func status(f *fault.Fault) int {
	if f.Kind == fault.FailedPrecondition && f.Reason == reasonPruned {
		return http.StatusGone
	}
	if s, ok := statuses[f.Kind]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// faultOf finds the fault in err, and makes one of what the standard library and the
// generated code say.
func faultOf(err error) *fault.Fault {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	if tooBig, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return tooLarge(tooBig.Limit)
	}
	if param, ok := errors.AsType[*InvalidParamFormatError](err); ok {
		return fault.Wrap(err, fault.InvalidArgument, "the parameter %s cannot be read", param.ParamName)
	}
	if param, ok := errors.AsType[*TooManyValuesForParamError](err); ok {
		return fault.Wrap(err, fault.InvalidArgument, "the parameter %s was given %d times; give it once", param.ParamName, param.Count)
	}
	if param, ok := errors.AsType[*RequiredParamError](err); ok {
		return fault.Wrap(err, fault.InvalidArgument, "the parameter %s is missing", param.ParamName)
	}
	if typ, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fault.Wrap(err, fault.InvalidArgument, "the field %s takes no %s", typ.Field, typ.Value)
	}
	switch {
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Cancelled, "the client went away")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.DeadlineExceeded, "the time for this call is over")
	}
	return fault.Of(err)
}

func tooLarge(limit int64) *fault.Fault {
	return fault.New(fault.TooLarge, "the body is larger than the %d bytes that are allowed here; send less", limit)
}

// detail is the public form of a fault.
func detail(ctx context.Context, f *fault.Fault) api.ErrorDetail {
	return api.ErrorDetail{Code: api.ErrorCode(f.Kind), Message: f.Message, Reason: f.Reason, RequestID: requestID(ctx)}
}

// fail logs what is the server's own fault with its cause, and gives its public form.
// It is for a stream whose status is sent already.
func (s *server) fail(ctx context.Context, err error) api.ErrorDetail {
	f := faultOf(err)
	if status(f) == http.StatusInternalServerError {
		s.log.ErrorContext(ctx, "request failed", "request", requestID(ctx), "kind", f.Kind, "err", err)
	}
	return detail(ctx, f)
}

// writeError answers with err.
func (s *server) writeError(w http.ResponseWriter, r *http.Request, err error) {
	answerFault(w, s.fail(r.Context(), err), faultOf(err))
}

// Fail answers a request that is none of the API's with a fault, as the API would.
func Fail(w http.ResponseWriter, r *http.Request, err error) {
	f := faultOf(err)
	answerFault(w, detail(r.Context(), f), f)
}

func answerFault(w http.ResponseWriter, body api.ErrorDetail, f *fault.Fault) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Del("Content-Length")
	if retry := retryAfter(f); retry > 0 {
		h.Set("Retry-After", strconv.FormatInt(retry, 10))
	}
	if f.Kind == fault.Unauthenticated {
		h.Set("WWW-Authenticate", "Bearer")
	}
	w.WriteHeader(status(f))
	_ = json.NewEncoder(w).Encode(api.Error{Error: body}) // a client that went away reads nothing
}

// retryAfter gives whole seconds, rounded up; 0 is no header.
func retryAfter(f *fault.Fault) int64 {
	d := f.RetryAfter
	if d <= 0 && f.Kind == fault.Unavailable {
		d = retryDefault
	}
	return int64(math.Ceil(d.Seconds()))
}
