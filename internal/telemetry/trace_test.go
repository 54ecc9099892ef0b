package telemetry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/telemetry/telemetrytest"
)

// traces are on, with a collector at url.
func traces(t *testing.T, url string, log *slog.Logger) *Traces {
	t.Helper()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20") // ms
	tr, err := NewTraces(t.Context(), os.Getenv, "", "v1", log)
	if err != nil || tr == nil {
		t.Fatalf("%v, %v", tr, err)
	}
	return tr
}

func shut(t *testing.T, tr *Traces) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	tr.Close(ctx)
}

// Traces are off where nothing names a collector; what cannot be spoken is refused.
func TestTracesAreOffByDefault(t *testing.T) {
	for _, env := range []map[string]string{
		{},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
	} {
		tr, err := NewTraces(t.Context(), func(k string) string { return env[k] }, "", "v1", slog.New(slog.DiscardHandler))
		if tr != nil || err != nil {
			t.Errorf("%v: %v, %v", env, tr, err)
		}
	}
	for _, env := range []map[string]string{
		{"OTEL_TRACES_EXPORTER": "zipkin"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
	} {
		if tr, err := NewTraces(t.Context(), func(k string) string { return env[k] }, "", "v1", nil); tr != nil || !fault.Is(err, fault.Unsupported) {
			t.Errorf("%v: %v, %v", env, tr, err)
		}
	}
	var off *Traces
	ctx, s := off.Start().Begin(t.Context(), "", "nothing")
	s.End(errors.New("x"))
	if ctx != t.Context() || s.Traceparent() != "" {
		t.Error("tracing that is off made a span")
	}
	off.Past("00-1", "", "x", time.Now(), time.Now(), "")
	off.Close(t.Context())
}

// A span goes on with the caller's trace; one whose id was fixed before it had begun
// bears that id, and others lie beneath it although they ended first.
func TestTraceGoesOn(t *testing.T) {
	c := telemetrytest.New(t)
	tr := traces(t, c.URL, slog.New(slog.DiscardHandler))
	const caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	ctx, call := tr.Start().Begin(t.Context(), caller, "POST /v1/sandboxes", "http.route", "/v1/sandboxes")
	parent := call.Traceparent()
	own := strings.Replace(parent, parent[36:52], "00f067aa0ba902b7", 1)
	_, inner := tr.Start().Begin(ctx, "", "inner")
	inner.End(fault.New(fault.Internal, "it broke"))
	call.End(nil, "http.response.status_code", "200")
	_, step := tr.Start().Begin(context.Background(), own, "step boot")
	step.End(nil)
	from := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	tr.Past(own, parent, "operation create", from, from.Add(time.Minute), "", "hutch.verb", "create")
	tr.Past("", parent, "nothing", from, from, "")
	tr.Past("rubbish", parent, "nothing", from, from, "")
	shut(t, tr)

	by := map[string]telemetrytest.Span{}
	for _, s := range c.Spans() {
		by[s.Name] = s
		if s.Trace != "0af7651916cd43dd8448eb211c80319c" {
			t.Errorf("%s is in the trace %s", s.Name, s.Trace)
		}
	}
	api, op := by["POST /v1/sandboxes"], by["operation create"]
	switch {
	case len(by) != 4:
		t.Errorf("%d spans: %+v", len(by), by)
	case api.Parent != "b7ad6b7169203331" || !api.Server || api.Attrs["http.response.status_code"] != "200":
		t.Errorf("the call is %+v", api)
	case op.ID != "00f067aa0ba902b7" || op.Parent != api.ID || !op.Begin.Equal(from) || op.End.Sub(op.Begin) != time.Minute || op.Server:
		t.Errorf("the operation is %+v", op)
	case by["step boot"].Parent != op.ID || by["inner"].Parent != api.ID || !by["inner"].Failed || by["step boot"].Failed:
		t.Errorf("beneath are %+v", by)
	}
}

// The settings name a collector where no variable does.
func TestEndpointOfTheSettings(t *testing.T) {
	set, variable := telemetrytest.New(t), telemetrytest.New(t)
	send := func(endpoint string) {
		tr, err := NewTraces(t.Context(), os.Getenv, endpoint, "v1", slog.New(slog.DiscardHandler))
		if err != nil || tr == nil {
			t.Fatalf("%v, %v", tr, err)
		}
		_, s := tr.Start().Begin(t.Context(), "", "work")
		s.End(nil)
		shut(t, tr)
	}
	send(set.URL)
	send(set.URL + "/")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", variable.URL)
	send(set.URL)
	if a, b := len(set.Spans()), len(variable.Spans()); a != 2 || b != 1 {
		t.Errorf("the collector of the settings has %d spans, that of the variable %d", a, b)
	}
}

// A caller that wants no trace gets none.
func TestUnsampledCallerIsNotTraced(t *testing.T) {
	c := telemetrytest.New(t)
	tr := traces(t, c.URL, slog.New(slog.DiscardHandler))
	const caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
	_, s := tr.Start().Begin(t.Context(), caller, "GET /v1/sandboxes")
	parent := s.Traceparent()
	s.End(nil)
	tr.Past(strings.Replace(parent, parent[36:52], "00f067aa0ba902b7", 1), parent, "operation", time.Now(), time.Now(), "")
	shut(t, tr)
	if spans := c.Spans(); len(spans) != 0 || !strings.HasSuffix(parent, "-00") {
		t.Errorf("%q: %+v", parent, spans)
	}
}

// A collector that hangs, and one that is gone, hold nobody up: the spans of more work
// than the queue takes end while it hangs, and so does the server.
func TestCollectorMayHang(t *testing.T) {
	release, came := make(chan struct{}), make(chan struct{}, 1000)
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { came <- struct{}{}; <-release }))
	defer s.Close()
	defer close(release)
	log := &buffer{}
	tr := traces(t, s.URL, slog.New(slog.NewTextHandler(log, nil)))
	for range 20_000 { // the queue takes 2,048
		_, s := tr.Start().Begin(t.Context(), "", "work")
		s.End(nil)
	}
	<-came // it has taken something, and answers nothing
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	tr.Close(ctx)

	s2 := httptest.NewServer(nil)
	s2.Close() // nothing listens there now
	tr = traces(t, s2.URL, slog.New(slog.NewTextHandler(log, nil)))
	for range 3000 {
		_, s := tr.Start().Begin(t.Context(), "", "work")
		s.End(nil)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	tr.Close(ctx)
	if n := strings.Count(log.String(), "traces could not be sent"); n > 2 { // once a minute and collector
		t.Errorf("the log complains %d times: %s", n, log)
	}
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
