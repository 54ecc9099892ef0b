package telemetry

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/span"
)

// Traces sends spans to a collector. It never holds anybody up: what a collector does
// not take in time is dropped. A nil *Traces is tracing that is off.
type Traces struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
}

// The standard variables that turn traces on, and off again. The others (headers,
// timeout, certificate, sampler, queue) are read by the library.
const (
	envEndpoint       = "OTEL_EXPORTER_OTLP_ENDPOINT"
	envTracesEndpoint = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	envProtocol       = "OTEL_EXPORTER_OTLP_PROTOCOL"
	envTracesProtocol = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
	envExporter       = "OTEL_TRACES_EXPORTER"
	envDisabled       = "OTEL_SDK_DISABLED"
)

// NewTraces starts to send spans where the standard OTEL_* variables, or else endpoint,
// name a collector, and gives nil where neither does.
func NewTraces(ctx context.Context, getenv func(string) string, endpoint, version string, log *slog.Logger) (*Traces, error) {
	exporter := getenv(envExporter)
	named := getenv(envEndpoint) != "" || getenv(envTracesEndpoint) != ""
	var options []otlptracehttp.Option // they win over the variables
	if !named && endpoint != "" {
		named = true
		options = append(options, otlptracehttp.WithEndpointURL(strings.TrimRight(endpoint, "/")+"/v1/traces"))
	}
	if strings.EqualFold(getenv(envDisabled), "true") || exporter == "none" || exporter == "" && !named {
		return nil, nil
	}
	if exporter != "" && exporter != "otlp" {
		return nil, fault.New(fault.Unsupported, "cannot export traces as %s=%.40q says; hutch takes otlp and none", envExporter, exporter).Because("otlp")
	}
	for _, name := range []string{envTracesProtocol, envProtocol} {
		if p := getenv(name); p != "" && p != "http/protobuf" {
			return nil, fault.New(fault.Unsupported, "cannot export traces as %s=%.40q says; hutch takes http/protobuf (a collector's port 4318)", name, p).Because("otlp")
		}
	}
	client, err := otlptracehttp.New(ctx, options...)
	if err != nil {
		return nil, fault.Wrap(err, fault.InvalidArgument, "the OTEL_* variables cannot be used; check %s", envEndpoint)
	}
	otel.SetErrorHandler(&complaint{log: log})
	return newTraces(client, version)
}

func newTraces(exporter sdk.SpanExporter, version string) (*Traces, error) {
	res, err := resource.New(context.Background(),
		resource.WithAttributes(attribute.String("service.name", "hutch"), attribute.String("service.version", version)),
		resource.WithFromEnv(), resource.WithHost(), resource.WithProcessPID())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fault.Wrap(err, fault.InvalidArgument, "OTEL_RESOURCE_ATTRIBUTES cannot be read")
	}
	p := sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(res), sdk.WithIDGenerator(chosen{}))
	return &Traces{provider: p, tracer: p.Tracer("github.com/hutchrun/hutch", trace.WithInstrumentationVersion(version))}, nil
}

// Close sends what is waiting, for as long as ctx lasts.
func (t *Traces) Close(ctx context.Context) {
	if t != nil {
		_ = t.provider.Shutdown(ctx) // what could not be sent is lost, as it may be
	}
}

// Start gives what begins spans; nil for a nil *Traces.
func (t *Traces) Start() span.Start {
	if t == nil {
		return nil
	}
	return t.start
}

func (t *Traces) start(ctx context.Context, parent, name string, attrs ...string) (context.Context, span.Span) {
	kind := trace.SpanKindInternal
	if parent != "" {
		ctx = beneath(ctx, parent)
	}
	if strings.Contains(name, " /") { // a call of the API: METHOD and path
		kind = trace.SpanKindServer
	}
	ctx, s := t.tracer.Start(ctx, name, trace.WithSpanKind(kind), trace.WithAttributes(pairs(attrs)...))
	return ctx, live{s}
}

// Past tells of a span that has ended, whose name to others was fixed when it began.
// Where self is "" nothing is told.
func (t *Traces) Past(self, parent, name string, from, to time.Time, failed string, attrs ...string) {
	if t == nil || self == "" {
		return
	}
	own := trace.SpanContextFromContext(beneath(context.Background(), self))
	if !own.IsValid() {
		return
	}
	ctx := context.WithValue(beneath(context.Background(), parent), chosenKey{}, own.SpanID())
	_, s := t.tracer.Start(ctx, name, trace.WithTimestamp(from), trace.WithAttributes(pairs(attrs)...))
	if failed != "" {
		s.SetStatus(codes.Error, failed)
	}
	s.End(trace.WithTimestamp(to))
}

// beneath puts a span of elsewhere into a context.
func beneath(ctx context.Context, traceparent string) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": traceparent})
}

func pairs(attrs []string) []attribute.KeyValue {
	out := make([]attribute.KeyValue, 0, len(attrs)/2)
	for i := 0; i+1 < len(attrs); i += 2 {
		out = append(out, attribute.String(attrs[i], attrs[i+1]))
	}
	return out
}

// live is a span that goes on.
type live struct{ s trace.Span }

// Traceparent implements span.Span.
func (l live) Traceparent() string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpan(context.Background(), l.s), carrier)
	return carrier["traceparent"]
}

// End implements span.Span.
func (l live) End(err error, attrs ...string) {
	if !l.s.IsRecording() {
		return
	}
	l.s.SetAttributes(pairs(attrs)...)
	if err != nil {
		f := fault.Of(err)
		l.s.SetAttributes(attribute.String("error.type", string(f.Kind)))
		l.s.SetStatus(codes.Error, f.Message)
	}
	l.s.End()
}

// chosen makes ids at random, but for a span whose id was fixed before.
type chosen struct{}

type chosenKey struct{}

// NewIDs implements sdk.IDGenerator.
func (c chosen) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	var id trace.TraceID
	for !id.IsValid() {
		_, _ = rand.Read(id[:]) // never fails
	}
	return id, c.NewSpanID(ctx, id)
}

// NewSpanID implements sdk.IDGenerator.
func (chosen) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	if id, ok := ctx.Value(chosenKey{}).(trace.SpanID); ok {
		return id
	}
	var id trace.SpanID
	for !id.IsValid() {
		_, _ = rand.Read(id[:])
	}
	return id
}

// complaint logs what the library has to say, once a minute: a collector that is gone is
// no reason to fill the log.
type complaint struct {
	log *slog.Logger

	mu    sync.Mutex
	last  time.Time
	count int
}

const complainEvery = time.Minute

// Handle implements otel.ErrorHandler.
func (c *complaint) Handle(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	if now := time.Now(); now.Sub(c.last) >= complainEvery {
		c.log.Warn("traces could not be sent; those that do not fit into the queue are dropped", "count", c.count, "err", err)
		c.last, c.count = now, 0
	}
}
