// Package telemetrytest is a collector of traces in the test's process.
package telemetrytest

import (
	"compress/gzip"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	wire "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Span is one that came in.
type Span struct {
	Trace, ID, Parent string // hexadecimal; Parent is "" for a root
	Name              string
	Server, Failed    bool
	Begin, End        time.Time
	Attrs             map[string]string
}

// Collector takes what a server sends.
type Collector struct {
	URL string

	mu    sync.Mutex
	spans []Span
	more  chan struct{} // closed when spans come in
}

// New gives a collector that lasts as long as the test.
func New(t testing.TB) *Collector {
	c := &Collector{more: make(chan struct{})}
	s := httptest.NewServer(http.HandlerFunc(c.take))
	t.Cleanup(s.Close)
	c.URL = s.URL
	return c
}

func (c *Collector) take(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		body = z
	}
	b, err := io.ReadAll(body)
	var req collector.ExportTraceServiceRequest
	if err == nil {
		err = proto.Unmarshal(b, &req)
	}
	if err != nil || r.URL.Path != "/v1/traces" {
		http.Error(w, "no traces", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, res := range req.GetResourceSpans() {
		for _, scope := range res.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, spanOf(s))
			}
		}
	}
	close(c.more)
	c.more = make(chan struct{})
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func spanOf(s *wire.Span) Span {
	out := Span{
		Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
		Name: s.GetName(), Server: s.GetKind() == wire.Span_SPAN_KIND_SERVER, Failed: s.GetStatus().GetCode() == wire.Status_STATUS_CODE_ERROR,
		Begin: time.Unix(0, int64(s.GetStartTimeUnixNano())), End: time.Unix(0, int64(s.GetEndTimeUnixNano())), Attrs: map[string]string{},
	}
	for _, a := range s.GetAttributes() {
		out.Attrs[a.GetKey()] = a.GetValue().GetStringValue()
	}
	return out
}

// Spans gives what has come in.
func (c *Collector) Spans() []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans)
}

// Wait waits until enough has come in, and gives it.
func (c *Collector) Wait(t testing.TB, enough func([]Span) bool) []Span {
	t.Helper()
	limit := time.After(time.Minute)
	for {
		c.mu.Lock()
		more := c.more
		c.mu.Unlock()
		spans := c.Spans()
		if enough(spans) {
			return spans
		}
		select {
		case <-more:
		case <-limit:
			t.Fatalf("the spans that came are not enough: %+v", spans)
		}
	}
}
