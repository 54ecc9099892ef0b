package hostagent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/runtime/traced"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/span"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/observed"
	"github.com/hutchrun/hutch/internal/store/sqlite"
	"github.com/hutchrun/hutch/internal/telemetry"
	"github.com/hutchrun/hutch/internal/telemetry/telemetrytest"
)

// stack is a whole server on a machine in memory: HTTP, control, database and this agent.
type stack struct {
	t       testing.TB
	db      store.Store
	agent   *Agent
	url     string
	key     string
	metrics *telemetry.Metrics
	traces  *telemetry.Traces

	mu      sync.Mutex
	control *control.Control
	handler http.Handler
	hold    atomic.Pointer[func(step string)] // called at each step
}

// Report passes facts to the control plane that there is now.
func (s *stack) Report(ctx context.Context, r hostproto.Report) error {
	s.mu.Lock()
	c := s.control
	s.mu.Unlock()
	return c.Report(ctx, r)
}

// ServeHTTP passes calls to the server that there is now.
func (s *stack) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	h := s.handler
	s.mu.Unlock()
	h.ServeHTTP(w, r)
}

// ended puts operations into their traces, as the program does.
type ended struct {
	*telemetry.Metrics
	traces *telemetry.Traces
}

func (e ended) Settled(s store.DeliveryStatus) { e.Attempt(string(s)) }

func (e ended) OperationEnded(op sandbox.Operation) {
	e.Metrics.OperationEnded(op)
	o := control.OriginOf(op)
	e.traces.Past(o.Trace, o.Parent, "operation "+string(op.Kind), op.CreatedAt, op.EndedAt, "", "hutch.request", o.Request)
}

func newStack(t testing.TB, watched bool, traces *telemetry.Traces) *stack {
	t.Helper()
	s := &stack{t: t, traces: traces}
	dir := t.TempDir()
	db, err := sqlite.Open(t.Context(), filepath.Join(dir, "hutch.db"))
	fatal(t, err)
	s.db = db
	if watched {
		s.metrics = telemetry.NewMetrics("test", telemetry.Levels{
			Sandboxes: func(ctx context.Context) (n map[sandbox.State]int64, err error) {
				err = db.View(ctx, func(ctx context.Context, r store.Reader) (err error) { n, err = r.SandboxStates(ctx); return err })
				return n, err
			},
		})
		s.db = observed.New(db, ended{s.metrics, traces})
	}
	machine := fake.NewMachine(func(b fake.Boot) (fake.Guest, error) { return newMemGuest(b) })
	disks := &memDisks{dir: filepath.Join(dir, "pool"), disks: map[string]string{}, mounted: map[string]bool{}, saves: map[string]*memSave{}, left: 1 << 50}
	var spans span.Start = traces.Start()
	s.agent, err = New(Config{
		ID: "local", Dir: filepath.Join(dir, "journal"), RunDir: filepath.Join(dir, "run"), BootID: "boot-1",
		Driver:       traced.New(machine.Driver(), spans),
		Capabilities: runtime.Capabilities{Runtime: "fake", Version: fake.Version, MemorySnapshot: true, HeldRestore: true},
		Disks:        disks, Network: &memNetwork{attached: map[string]bool{}}, Agent: "agent-1", Log: slog.New(slog.DiscardHandler), Span: spans,
		points: points{step: func(ctx context.Context, _ string, _ sandbox.Verb, step string, do func(context.Context) error) error {
			if hold := s.hold.Load(); hold != nil {
				(*hold)(step)
			}
			return do(ctx)
		}},
	})
	fatal(t, err)
	s.serve()
	fatal(t, s.control.EnsureProject(t.Context(), "default"))
	fatal(t, db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		return tx.PutTemplate(ctx, store.Template{Project: "default", Name: "base", Digest: "sha256:base", Source: "debian", CreatedAt: time.Now()})
	}))
	_, s.key, err = s.control.CreateKey(t.Context(), control.Actor{Project: "default", Scopes: control.ScopeOperator}, control.CreateKeyRequest{Name: "test", Scopes: []string{"operator"}})
	fatal(t, err)
	fatal(t, s.agent.Start(t.Context(), s))
	fatal(t, s.control.Start(t.Context()))
	server := httptest.NewServer(s)
	s.url = server.URL
	t.Cleanup(func() {
		server.Close()
		s.control.Close()
		s.agent.Stop()
		_ = db.Close()
		for _, id := range machine.Running() {
			machine.Crash(id, runtime.Exit{})
		}
	})
	return s
}

// serve makes the control plane and the API anew, as a restart does.
func (s *stack) serve() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.control = control.New(control.Config{Store: s.db, Hosts: map[string]hostproto.Host{"local": s.agent}})
	cfg := apiserver.Config{Control: s.control, Span: s.traces.Start()}
	if s.metrics != nil {
		cfg.Request, cfg.Metrics = s.metrics.Request, s.metrics.Text
	}
	var err error
	s.handler, err = apiserver.New(cfg)
	fatal(s.t, err)
}

func fatal(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// call calls the API and gives the body of an answer that went well.
func (s *stack) call(method, path, body string, headers ...string) (string, http.Header) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(body))
	fatal(s.t, err)
	req.Header.Set("Authorization", "Bearer "+s.key)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Errorf("%s %s: %v", method, path, err)
		return "", nil
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode >= 300 {
		s.t.Errorf("%s %s: %d %s %v", method, path, res.StatusCode, b, err)
	}
	return string(b), res.Header
}

// collected gives a collector and traces that go to it.
func collected(t *testing.T) (*telemetrytest.Collector, *telemetry.Traces) {
	t.Helper()
	c := telemetrytest.New(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL)
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20") // ms
	traces, err := telemetry.NewTraces(t.Context(), os.Getenv, "", "test", slog.New(slog.DiscardHandler))
	fatal(t, err)
	t.Cleanup(func() { traces.Close(context.Background()) })
	return c, traces
}

const (
	callerTrace = "0af7651916cd43dd8448eb211c80319c"
	callerSpan  = "b7ad6b7169203331"
)

// family are the spans of a trace by name, which have to be there once.
type family map[string]telemetrytest.Span

// trace waits until a trace has these spans, and gives it.
func trace(t *testing.T, c *telemetrytest.Collector, id string, names ...string) family {
	t.Helper()
	var out family
	c.Wait(t, func(spans []telemetrytest.Span) bool {
		out = family{}
		for _, s := range spans {
			if s.Trace == id {
				out[s.Name] = s
			}
		}
		return !slices.ContainsFunc(names, func(n string) bool { return out[n].ID == "" })
	})
	return out
}

// beneath checks that a span is another's child, and lies within its time.
func (f family) beneath(t *testing.T, child, parent string) {
	t.Helper()
	c, p := f[child], f[parent]
	if c.Parent != p.ID {
		t.Errorf("%q is beneath %s, want %q (%s)", child, c.Parent, parent, p.ID)
	}
	// An operation is as old as its row, in whole milliseconds, and its call may not wait for it.
	if slack := 2 * time.Millisecond; c.Begin.Before(p.Begin.Add(-slack)) || c.End.Before(c.Begin) {
		t.Errorf("%q took from %v to %v, and %q began at %v", child, c.Begin, c.End, parent, p.Begin)
	}
}

// One call is one trace: the call, the operation, the host's work, each step with its
// time, and the calls to the runtime; beneath the caller's own.
func TestOneTraceFromTheCallToTheRuntime(t *testing.T) {
	c, traces := collected(t)
	s := newStack(t, true, traces)
	_, header := s.call("POST", "/v1/sandboxes?wait=60s", `{"name":"box"}`, "Traceparent", "00-"+callerTrace+"-"+callerSpan+"-01")
	steps := []string{"step disk", "step network", "step mount", "step boot", "step init"}
	f := trace(t, c, callerTrace, append([]string{"POST /v1/sandboxes", "operation create", "host create", "runtime start"}, steps...)...)
	if f["POST /v1/sandboxes"].Parent != callerSpan || !f["POST /v1/sandboxes"].Server {
		t.Errorf("the call is %+v", f["POST /v1/sandboxes"])
	}
	f.beneath(t, "operation create", "POST /v1/sandboxes")
	f.beneath(t, "host create", "operation create")
	for i, step := range steps {
		f.beneath(t, step, "host create")
		if i > 0 && f[step].Begin.Before(f[steps[i-1]].End) {
			t.Errorf("%q began before %q had ended", step, steps[i-1])
		}
	}
	f.beneath(t, "runtime start", "step boot")
	for _, name := range []string{"POST /v1/sandboxes", "operation create", "host create"} {
		if f[name].Attrs["hutch.request"] != header.Get("X-Request-Id") {
			t.Errorf("%q is of the call %q", name, f[name].Attrs["hutch.request"])
		}
	}

	// A fork's children are operations of their own in the same trace.
	other := strings.Repeat("2", 32)
	s.call("POST", "/v1/sandboxes/box/fork?wait=60s", `{"name":"twin"}`, "Traceparent", "00-"+other+"-"+callerSpan+"-01")
	f = trace(t, c, other, "POST /v1/sandboxes/{ref}/fork", "operation fork", "operation create", "host fork", "host create",
		"step capture", "runtime capture", "runtime thaw", "step restore", "runtime restore", "runtime release")
	f.beneath(t, "operation fork", "POST /v1/sandboxes/{ref}/fork")
	f.beneath(t, "operation create", "POST /v1/sandboxes/{ref}/fork")
	f.beneath(t, "host fork", "operation fork")
	f.beneath(t, "host create", "operation create")
	f.beneath(t, "runtime capture", "step capture")

	// Questions for health and metrics are no traces.
	s.call("GET", "/metrics", "")
	s.call("GET", "/healthz", "")
	s.call("GET", "/v1/version", "", "Traceparent", "00-"+strings.Repeat("3", 32)+"-"+callerSpan+"-01")
	trace(t, c, strings.Repeat("3", 32), "GET /v1/version")
	for _, span := range c.Spans() {
		if strings.HasSuffix(span.Name, "/metrics") || strings.HasSuffix(span.Name, "/healthz") {
			t.Errorf("%q is traced", span.Name)
		}
	}
}

// The end of an operation is in its call's trace although the server that took the call
// is gone by then.
func TestTraceOutlivesItsServer(t *testing.T) {
	c, traces := collected(t)
	s := newStack(t, true, traces)
	held, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	hold := func(step string) {
		if step == sandbox.StepBoot {
			once.Do(func() { close(held); <-release })
		}
	}
	s.hold.Store(&hold)
	s.call("POST", "/v1/sandboxes", `{"name":"box"}`, "Traceparent", "00-"+callerTrace+"-"+callerSpan+"-01")
	<-held
	s.mu.Lock()
	before := s.control
	s.mu.Unlock()
	before.Close()
	s.serve()
	fatal(t, s.control.Start(t.Context()))
	close(release)
	f := trace(t, c, callerTrace, "POST /v1/sandboxes", "operation create", "host create", "step init")
	f.beneath(t, "operation create", "POST /v1/sandboxes")
	f.beneath(t, "host create", "operation create")
}

// series gives the series of a scrape with their values.
func series(t *testing.T, s *stack) map[string]string {
	t.Helper()
	text, _ := s.call("GET", "/metrics", "")
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if name, v, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && !strings.HasPrefix(line, "#") {
			out[name+"}"] = v
		} else if name, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok && !strings.HasPrefix(line, "#") {
			out[name] = v
		}
	}
	return out
}

// lives takes sandboxes through their lives, several at a time.
func (s *stack) lives(from, to int) {
	var wg sync.WaitGroup
	for i := from; i < to; i++ {
		wg.Go(func() {
			name := fmt.Sprintf("box-%d", i)
			box := "/v1/sandboxes/" + name
			s.call("POST", "/v1/sandboxes?wait=60s", fmt.Sprintf(`{"name":%q,"labels":{"team":"team-%d"}}`, name, i))
			for _, verb := range []string{"sleep", "wake", "stop", "resume"} {
				s.call("POST", box+"/"+verb+"?wait=60s", "")
			}
			body, _ := s.call("POST", box+"/fork?wait=60s", `{}`)
			var forked struct {
				Forks []struct{ Sandbox struct{ ID string } }
			}
			if err := json.Unmarshal([]byte(body), &forked); err != nil || len(forked.Forks) != 1 {
				s.t.Errorf("%s: %v", body, err)
				return
			}
			s.call("GET", box, "")
			s.call("DELETE", "/v1/sandboxes/"+forked.Forks[0].Sandbox.ID+"?wait=60s", "")
		})
	}
	wg.Wait()
}

// The number of series does not grow with what runs, and no label tells whose it is.
func TestSeriesDoNotGrowWithSandboxes(t *testing.T) {
	t.Parallel()
	s := newStack(t, true, nil)
	s.lives(0, 3)
	series(t, s) // a scrape is a call that counts, from the second on
	before := series(t, s)
	s.lives(3, 15)
	after := series(t, s)
	for name := range after {
		if _, was := before[name]; !was {
			t.Errorf("there is a new series: %s", name)
		}
		for _, word := range []string{"sbx_", "op_", "key_", "box-", "team", "twin"} {
			if strings.Contains(name, word) {
				t.Errorf("a label tells whose it is: %s", name)
			}
		}
	}
	for name, want := range map[string]string{
		`hutch_operations_total{outcome="succeeded",verb="create"}`:                            "30",
		`hutch_operations_total{outcome="succeeded",verb="fork"}`:                              "15",
		`hutch_operation_duration_seconds_count{outcome="succeeded",verb="wake"}`:              "15",
		`hutch_operation_step_duration_seconds_count{step="capture",verb="sleep"}`:             "15",
		`hutch_wake_duration_seconds_count`:                                                    "15",
		`hutch_sandbox_transitions_total{state="deleted"}`:                                     "15",
		`hutch_http_requests_total{code="200",method="POST",route="/v1/sandboxes/{ref}/stop"}`: "15",
		`hutch_http_requests_in_flight`:                                                        "1",
	} {
		if after[name] != want {
			t.Errorf("%s is %q, want %s", name, after[name], want)
		}
	}
	// Levels are believed for a moment.
	eventually(t, "the levels", func() bool { return series(t, s)[`hutch_sandboxes{state="ready"}`] == "15" })
	if v := after[`hutch_metered_seconds_total{reason="running"}`]; v == "" || v == "0" {
		t.Errorf("%q seconds of running sandboxes were metered", v)
	}
}

// BenchmarkObserved is what metrics and traces cost: a create and a delete through HTTP,
// control, database and host agent, on a machine in memory.
func BenchmarkObserved(b *testing.B) {
	for _, mode := range []string{"off", "metrics", "metrics and traces"} {
		b.Run(mode, func(b *testing.B) {
			var traces *telemetry.Traces
			if strings.Contains(mode, "traces") {
				c := telemetrytest.New(b)
				b.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL)
				var err error
				traces, err = telemetry.NewTraces(b.Context(), os.Getenv, "", "test", slog.New(slog.DiscardHandler))
				fatal(b, err)
				defer traces.Close(context.Background())
			}
			s := newStack(b, mode != "off", traces)
			before := processorTime(b)
			b.ResetTimer()
			for i := range b.N {
				s.call("POST", "/v1/sandboxes?wait=60s", fmt.Sprintf(`{"name":"box-%d"}`, i))
				s.call("DELETE", fmt.Sprintf("/v1/sandboxes/box-%d?wait=60s", i), "")
			}
			// On a machine that has much else to do this says more than the time that passed.
			b.ReportMetric(float64((processorTime(b)-before).Microseconds())/float64(b.N), "cpu-µs/op")
		})
	}
}

// processorTime is what this process has used.
func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	fatal(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// A collector that takes nothing holds up no sandbox: many more spans are made than its
// queue has room for, and every call goes as it does without one.
func TestSandboxesDoNotWaitForTheCollector(t *testing.T) {
	hung := make(chan struct{})
	came := make(chan struct{}, 1000)
	c := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { came <- struct{}{}; <-hung }))
	defer c.Close()
	defer close(hung)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600000") // ms: it is never given up on
	t.Setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
	t.Setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "1") // ms
	traces, err := telemetry.NewTraces(t.Context(), os.Getenv, "", "test", slog.New(slog.DiscardHandler))
	fatal(t, err)
	s := newStack(t, true, traces)
	s.call("GET", "/v1/version", "")
	<-came // it has taken a batch and will never answer
	s.lives(0, 4)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	traces.Close(ctx) // and the server ends
}

// What a host does by itself is a trace of its own.
func TestAutoStopIsATraceOfItsOwn(t *testing.T) {
	c, traces := collected(t)
	s := newStack(t, true, traces)
	s.call("POST", "/v1/sandboxes?wait=60s", `{"name":"box","ttl_seconds":1}`, "Traceparent", "00-"+callerTrace+"-"+callerSpan+"-01")
	var stop telemetrytest.Span
	spans := c.Wait(t, func(spans []telemetrytest.Span) bool {
		i := slices.IndexFunc(spans, func(s telemetrytest.Span) bool { return s.Name == "host stop" })
		if i >= 0 {
			stop = spans[i]
		}
		return i >= 0
	})
	if stop.Parent != "" || stop.Trace == callerTrace || stop.Attrs["hutch.request"] != "" || stop.Attrs["hutch.sandbox"] == "" {
		t.Errorf("the auto-stop is %+v", stop)
	}
	if !slices.ContainsFunc(spans, func(s telemetrytest.Span) bool { return s.Name == "step kill" && s.Parent == stop.ID }) {
		t.Errorf("its steps are not beneath it: %+v", spans)
	}
}
