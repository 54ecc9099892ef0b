package guestproto

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"

	"github.com/hutchrun/hutch/internal/fault"
)

// remote is an error as the other side gets it.
func remote(t *testing.T, err error) error {
	t.Helper()
	ce, ok := errors.AsType[*connect.Error](ToWire(err))
	if !ok {
		t.Fatalf("%v does not go onto the wire", err)
	}
	return ce.WithRemote()
}

// Every kind crosses the wire with its message, reason and time, and without its cause.
func TestFaultsCrossTheWire(t *testing.T) {
	t.Parallel()
	for _, kind := range fault.Kinds {
		sent := fault.Wrap(errors.New("secret"), kind, "what was asked: %s", kind).Because("why").After(3 * time.Second)
		got := fault.Of(FromWire(remote(t, sent)))
		if got.Kind != kind || got.Message != sent.Message || got.Reason != "why" || got.RetryAfter != 3*time.Second {
			t.Errorf("%s: got %+v", kind, got)
		}
		if strings.Contains(remote(t, sent).(*connect.Error).Message(), "secret") { //nolint:errorlint // as the wire has it
			t.Errorf("%s: the cause is public", kind)
		}
	}
	for err, kind := range map[error]fault.Kind{
		errors.New("x"): fault.Internal, fmt.Errorf("x: %w", context.Canceled): fault.Cancelled, context.DeadlineExceeded: fault.DeadlineExceeded,
	} {
		if got := fault.Of(FromWire(remote(t, err))); got.Kind != kind {
			t.Errorf("%v: got %+v", err, got)
		}
	}
	if ToWire(nil) != nil || FromWire(nil) != nil || FromWire(io.EOF) != io.EOF { //nolint:errorlint // itself
		t.Error("nil and io.EOF do not pass")
	}
}

// A hostile guest's error has a known kind, a bounded text and a bounded time.
func TestHostileFaults(t *testing.T) {
	t.Parallel()
	detail, err := connectproto.NewErrorDetail(&FaultDetail{Kind: "root", Reason: strings.Repeat("r", 1000), RetryAfterNanos: -5})
	if err != nil {
		t.Fatal(err)
	}
	got := fault.Of(FromWire(connect.NewError(connect.CodeNotFound, strings.Repeat("\xff", 1<<20)).WithDetail(detail).WithRemote()))
	if got.Kind != fault.NotFound || len(got.Message) > 3*maxPublicMessage || len(got.Reason) > 64 || got.RetryAfter != 0 {
		t.Errorf("got %s, %d bytes, %q, %s", got.Kind, len(got.Message), got.Reason, got.RetryAfter)
	}
	broken := &connect.ErrorDetail{Type: "hutch.guest.v1.FaultDetail", Value: []byte{0xff}}
	if got := fault.Of(FromWire(connect.NewError(connect.Code(99), "").WithDetail(broken).WithRemote())); got.Kind != fault.Internal || got.Message == "" {
		t.Errorf("got %+v", got)
	}
	// What this side's transport says is not the guest's word.
	if got := fault.Of(FromWire(connect.NewError(connect.CodeInternal, "x"))); got.Kind != fault.Unavailable {
		t.Errorf("got %+v", got)
	}
	for _, code := range codes {
		if kinds[code] == "" {
			t.Errorf("the code %s has no kind", code)
		}
	}
}
