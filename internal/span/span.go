// Package span is what a part of hutch needs to tell a trace what it does and how long
// that took. It knows no library for traces: internal/telemetry makes the spans.
package span

import "context"

// Start begins spans. A nil Start is tracing that is off: it costs a comparison.
//
// The span is beneath the one in ctx, or, where parent is given, beneath that one, which
// may be another process's; parent is in the form of the header traceparent. attrs are
// keys and values in turn. What is started with the context that Start gives is beneath
// the new span.
type Start func(ctx context.Context, parent, name string, attrs ...string) (context.Context, Span)

// Span is a piece of work that goes on.
type Span interface {
	// Traceparent names the span to others, as the header of that name; "" for one that
	// nobody keeps.
	Traceparent() string
	// End tells of its end, and of the error that it ended with.
	End(err error, attrs ...string)
}

// Begin is the call of Start, also of a nil one.
func (s Start) Begin(ctx context.Context, parent, name string, attrs ...string) (context.Context, Span) {
	if s == nil {
		return ctx, none{}
	}
	return s(ctx, parent, name, attrs...)
}

type none struct{}

func (none) Traceparent() string  { return "" }
func (none) End(error, ...string) {}
