package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	hutchguest "github.com/hutchrun/hutch/internal/guest"
	"github.com/hutchrun/hutch/internal/guest/guesttest"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store/sqlite"
	"github.com/hutchrun/hutch/internal/webhook"
)

// rig is a whole server: HTTP on a loopback port, the real control on a SQLite file, a
// host that does at once what it is told, and the real guest agent for all sandboxes.
// Every answer that goes through client is checked against openapi.yaml.
type rig struct {
	t       *testing.T
	url     string
	key     string
	client  *http.Client
	api     *api.ClientWithResponses
	server  *server
	http    *http.Server
	control *control.Control
	db      *sqlite.Store
	host    *scriptedHost
	log     *syncBuffer
	seen    *sync.Map // operation ids of the description that were answered
}

const deadline = 20 * time.Second // of what a test waits for

// hereToo lets webhooks go to receivers on this machine.
var hereToo = webhook.Policy{HTTP: true, Inside: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}

func newRig(t *testing.T) *rig {
	t.Helper()
	return newRigWith(t, hereToo)
}

func newRigWith(t *testing.T, policy webhook.Policy) *rig {
	t.Helper()
	r := &rig{t: t, log: &syncBuffer{}, seen: &sync.Map{}}
	st, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "hutch.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	r.db = st
	r.host = newScriptedHost(guesttest.Boot(t, hutchguest.Config{}))
	log := debugLog(r.log)
	r.control = control.New(control.Config{
		Store: st, Hosts: map[string]hostproto.Host{"local": r.host}, Log: log,
		Webhooks: webhook.Config{Policy: policy},
	})
	r.host.reporter = r.control
	if err := r.control.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.control.Close(); r.host.done.Wait() })
	if err := r.control.EnsureProject(t.Context(), "default"); err != nil {
		t.Fatal(err)
	}
	_, r.key, err = r.control.CreateKey(t.Context(), control.Actor{Project: "default", KeyID: "setup", Scopes: control.ScopeOperator},
		control.CreateKeyRequest{Name: "test", Scopes: []string{"operator"}})
	if err != nil {
		t.Fatal(err)
	}
	handler, err := New(Config{Control: r.control, Log: log, Version: "v0.0.0-test", AllowedHosts: []string{"Hutch.Test"},
		Metrics: func() ([]byte, string, error) { return []byte("hutch_sandboxes 1\n"), "text/plain; version=0.0.4", nil }})
	if err != nil {
		t.Fatal(err)
	}
	var ok bool
	if r.server, ok = handler.(*server); !ok {
		t.Fatalf("the handler is a %T", handler)
	}
	r.http = HTTPServer(handler, log)
	ts := httptest.NewUnstartedServer(nil)
	ts.Config = r.http
	ts.Start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), deadline)
		defer cancel()
		if err := r.http.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		ts.Close()
	})
	r.url = ts.URL
	r.client = &http.Client{Transport: &checked{rig: r, doc: mustLoad(t), next: ts.Client().Transport}}
	r.api, err = api.NewClientWithResponses(r.url, api.WithHTTPClient(r.client), api.WithRequestEditorFn(
		func(_ context.Context, req *http.Request) error {
			req.Header.Set("Authorization", "Bearer "+r.key)
			return nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	r.template("base")
	return r
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// do calls the server with the rig's key. A header is "Name: value"; an empty value
// takes the header away.
func (r *rig) do(method, path, body string, headers ...string) answer {
	r.t.Helper()
	res := r.open(method, path, strings.NewReader(body), headers...)
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return answer{status: res.StatusCode, header: res.Header, body: b}
}

// open is do for a stream.
func (r *rig) open(method, path string, body io.Reader, headers ...string) *http.Response {
	r.t.Helper()
	res, err := r.client.Do(r.request(method, path, body, headers...))
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return res
}

func (r *rig) request(method, path string, body io.Reader, headers ...string) *http.Request {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.url+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+r.key)
	if s, ok := body.(*strings.Reader); ok && s.Len() > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		switch {
		case name == "Host":
			req.Host = value
		case value == "":
			req.Header.Del(strings.TrimSuffix(name, ":"))
		default:
			req.Header.Set(name, value)
		}
	}
	return req
}

// decode reads a JSON body, and fails where the status is another.
func decode[T any](t *testing.T, a answer, status int) T {
	t.Helper()
	var out T
	if a.status != status {
		t.Fatalf("status %d, want %d: %s", a.status, status, a.body)
	}
	if err := json.Unmarshal(a.body, &out); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
	return out
}

// refused checks an error body and gives it.
func refused(t *testing.T, a answer, kind fault.Kind) api.ErrorDetail {
	t.Helper()
	e := decode[api.Error](t, a, statuses[kind]).Error
	if e.Code != api.ErrorCode(kind) || e.Message == "" || e.RequestID == "" || e.RequestID != a.header.Get("X-Request-Id") {
		t.Errorf("the error is %+v, want %s", e, kind)
	}
	return e
}

func (r *rig) template(name string) {
	r.t.Helper()
	a := r.do("POST", "/v1/templates?wait=20s", fmt.Sprintf(`{"name":%q,"source":{"debian":true}}`, name))
	if out := decode[api.TemplateChange](r.t, a, 200); out.Template == nil || out.Operation.Status != api.OperationStatusSucceeded {
		r.t.Fatalf("template %s: %s", name, a.body)
	}
}

// create makes a ready sandbox.
func (r *rig) create(name string) api.Sandbox {
	r.t.Helper()
	out := decode[api.Change](r.t, r.do("POST", "/v1/sandboxes?wait=20s", fmt.Sprintf(`{"name":%q}`, name)), 200)
	if out.Sandbox.State != api.StateReady {
		r.t.Fatalf("%s is %s: %+v", name, out.Sandbox.State, out.Operation)
	}
	return out.Sandbox
}

// verb carries a verb out to its end.
func (r *rig) verb(ref, verb string) api.Change {
	r.t.Helper()
	return decode[api.Change](r.t, r.do("POST", "/v1/sandboxes/"+ref+"/"+verb+"?wait=20s", ""), 200)
}

// checked is a transport that holds every answer against the description.
type checked struct {
	rig  *rig
	doc  *openapi3.T
	next http.RoundTripper
}

func (c *checked) RoundTrip(req *http.Request) (*http.Response, error) {
	probe := req.Clone(req.Context())
	_, pattern := c.rig.server.mux.Handler(probe)
	res, err := c.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	t := c.rig.t
	if res.Header.Get("X-Request-Id") == "" {
		t.Errorf("%s %s: no request id", req.Method, req.URL.Path)
	}
	method, path, ok := cutPattern(pattern)
	if !ok || req.Method == http.MethodHead {
		return res, nil // not a call of the API
	}
	op := c.doc.Paths.Find(path).GetOperation(method)
	ref := op.Responses.Value(strconv.Itoa(res.StatusCode))
	if ref == nil {
		if ref = op.Responses.Default(); ref == nil || res.StatusCode < 400 {
			t.Errorf("%s answers %d, which is not described", pattern, res.StatusCode)
			return res, nil
		}
	} else if res.StatusCode < 400 {
		c.rig.seen.Store(op.OperationID, true)
	}
	media, _, err := mime.ParseMediaType(res.Header.Get("Content-Type"))
	if len(ref.Value.Content) == 0 {
		if err == nil {
			t.Errorf("%s answers %d with a body of %s", pattern, res.StatusCode, media)
		}
		return res, nil
	}
	content := ref.Value.Content.Get(media)
	if err != nil || content == nil {
		t.Errorf("%s answers %d with %q, which is not described", pattern, res.StatusCode, res.Header.Get("Content-Type"))
		return res, nil
	}
	switch media {
	case "application/json":
		b, err := io.ReadAll(res.Body)
		if err != nil {
			return nil, err
		}
		_ = res.Body.Close()
		res.Body = io.NopCloser(bytes.NewReader(b))
		validate(t, pattern, content.Schema.Value, b)
	case ndjson:
		res.Body = &checkedLines{ReadCloser: res.Body, check: func(line string) {
			validate(t, pattern, content.Schema.Value, []byte(line))
		}}
	case "text/event-stream":
		event := c.doc.Components.Schemas["Event"].Value
		res.Body = &checkedLines{ReadCloser: res.Body, check: func(line string) {
			if data, ok := strings.CutPrefix(line, "data: "); ok {
				validate(t, pattern, event, []byte(data))
			}
		}}
	}
	return res, nil
}

func validate(t *testing.T, pattern string, schema *openapi3.Schema, b []byte) {
	t.Helper()
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Errorf("%s: %v: %s", pattern, err, b)
	} else if err := schema.VisitJSON(v, openapi3.MultiErrors()); err != nil {
		t.Errorf("%s answers what openapi.yaml does not describe: %v\n%s", pattern, err, b)
	}
}

// checkedLines checks each whole line that is read through it.
type checkedLines struct {
	io.ReadCloser
	rest  string
	check func(string)
}

func (c *checkedLines) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.rest += string(p[:n])
	for {
		line, rest, ok := strings.Cut(c.rest, "\n")
		if !ok {
			return n, err
		}
		c.rest = rest
		if line != "" && line != ":" {
			c.check(line)
		}
	}
}

func debugLog(b *syncBuffer) *slog.Logger {
	return slog.New(slog.NewJSONHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// syncBuffer is a buffer for the log.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// scriptedHost does what it is told at once, unless a test holds or fails a verb.
type scriptedHost struct {
	agent    *guesttest.Agent
	reporter hostproto.Reporter
	done     sync.WaitGroup

	mu        sync.Mutex
	held      map[sandbox.Verb]chan struct{}
	failing   map[sandbox.Verb]*hostproto.Failure
	given     map[string]bool // operations
	submitted []hostproto.Command
	seq       map[string]int64
	running   map[string]int64 // generation
	building  func() error
	upset     func() // in a disk report
	dial      func(context.Context) (net.Conn, error)
	idle      hostproto.Idleness
	uses      []hostproto.Use // of Guest
	inUse     int             // those that are not done
}

func newScriptedHost(agent *guesttest.Agent) *scriptedHost {
	return &scriptedHost{
		agent: agent, held: map[sandbox.Verb]chan struct{}{}, failing: map[sandbox.Verb]*hostproto.Failure{},
		given: map[string]bool{}, seq: map[string]int64{}, running: map[string]int64{},
		idle: hostproto.Idleness{Mode: sandbox.SleepManual, OnIdle: sandbox.Sleep},
	}
}

// hold keeps a verb from ending until the function that it gives is called.
func (h *scriptedHost) hold(v sandbox.Verb) (release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ch := make(chan struct{})
	h.held[v] = ch
	return sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.held, v)
		close(ch)
	})
}

func (h *scriptedHost) fail(v sandbox.Verb, f *hostproto.Failure) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.failing[v] = f
}

func (h *scriptedHost) Submit(_ context.Context, c hostproto.Command) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.given[c.Operation] {
		return nil
	}
	h.given[c.Operation] = true
	h.submitted = append(h.submitted, c)
	held, failure := h.held[c.Verb], h.failing[c.Verb]
	h.done.Go(func() {
		if held != nil {
			<-held
		}
		h.carryOut(c, failure)
	})
	return nil
}

var ends = map[sandbox.Verb]sandbox.Event{
	sandbox.Create: sandbox.EventCreated, sandbox.Sleep: sandbox.EventSlept, sandbox.Wake: sandbox.EventWoken,
	sandbox.Stop: sandbox.EventStopped, sandbox.Resume: sandbox.EventResumed, sandbox.Delete: sandbox.EventDeleted,
	sandbox.Undelete: sandbox.EventUndeleted,
}

func (h *scriptedHost) carryOut(c hostproto.Command, failure *hostproto.Failure) {
	report := hostproto.Report{
		Sandbox: c.Sandbox, Generation: c.Generation, Operation: c.Operation, Verb: c.Verb, Ended: true, Event: ends[c.Verb], At: time.Now(),
		Saved: c.Verb == sandbox.Sleep || c.Verb == sandbox.Stop,
	}
	if c.UndeleteFor > 0 {
		report.EraseAt = report.At.Add(c.UndeleteFor)
	}
	if failure != nil {
		report.Failure, report.Event = failure, ""
		if c.Verb == sandbox.Create {
			report.Event = sandbox.EventCreateFailed
		}
		h.report(report)
		return
	}
	if c.Verb == sandbox.Fork {
		for _, child := range c.Children {
			h.report(hostproto.Report{
				Sandbox: child.Sandbox, Generation: 1, Operation: child.Operation, Verb: sandbox.Create, Ended: true,
				Event: sandbox.EventCreated, At: time.Now(), Identity: identity,
			})
		}
	}
	if report.Event.Boots() {
		report.Generation++
		report.Identity = identity
	}
	h.report(report)
}

var identity = []hostproto.IdentityItem{{Item: "machine_id", Status: "done"}, {Item: "boot_id", Status: "impossible", Message: "already read"}}

func (h *scriptedHost) report(r hostproto.Report) {
	h.mu.Lock()
	h.seq[r.Sandbox]++
	r.Seq = h.seq[r.Sandbox]
	switch {
	case r.Event.Boots():
		h.running[r.Sandbox] = r.Generation
	case r.Event != "":
		delete(h.running, r.Sandbox)
	}
	h.mu.Unlock()
	if err := h.reporter.Report(context.Background(), r); err != nil {
		panic(fmt.Sprintf("report %+v: %v", r, err))
	}
}

func (h *scriptedHost) Cancel(context.Context, string, string) error { return nil }

func (h *scriptedHost) Renew(context.Context, map[string][]string) error { return nil }

func (h *scriptedHost) SetPolicy(_ context.Context, c hostproto.PolicyChange) error {
	h.mu.Lock()
	generation := h.running[c.Sandbox]
	h.mu.Unlock()
	r := hostproto.Report{Sandbox: c.Sandbox, Generation: generation, PolicyChange: c.Change, At: time.Now()}
	if c.Policy.TTL != 0 {
		r.Deadline = r.At.Add(c.Policy.TTL)
	}
	go h.report(r)
	return nil
}

func (h *scriptedHost) Idleness(_ context.Context, id string) (hostproto.Idleness, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.running[id]; !ok {
		return hostproto.Idleness{}, fault.New(fault.FailedPrecondition, "%s does not run", id)
	}
	return h.idle, nil
}

func (h *scriptedHost) Guest(_ context.Context, id string, use hostproto.Use) (hostproto.Guest, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	generation, ok := h.running[id]
	if !ok {
		return hostproto.Guest{}, fault.New(fault.FailedPrecondition, "%s does not run", id)
	}
	dial := h.dial
	if dial == nil {
		dial = h.agent.Conn
	}
	h.uses, h.inUse = append(h.uses, use), h.inUse+1
	done := sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.inUse--
	})
	return hostproto.Guest{Dial: dial, Token: h.agent.Token, Generation: generation, Done: done}, nil
}

func (h *scriptedHost) Usage(context.Context, string) (hostproto.Usage, error) {
	return hostproto.Usage{}, nil
}

func (h *scriptedHost) BuildTemplate(ctx context.Context, _ hostproto.TemplateSource, progress func(string, float64)) (hostproto.Template, error) {
	progress("unpack", 0.5)
	h.mu.Lock()
	building := h.building
	h.mu.Unlock()
	if building != nil {
		if err := building(); err != nil {
			return hostproto.Template{}, err
		}
	}
	return hostproto.Template{Digest: "sha256:" + strings.Repeat("ab", 32), Bytes: 1e8, User: "user", Workdir: "/workspace"}, ctx.Err()
}

func (h *scriptedHost) DeleteTemplate(context.Context, string) error { return nil }

func (h *scriptedHost) Info(context.Context) (hostproto.HostInfo, error) {
	return hostproto.HostInfo{
		ID: "local", Runtimes: []string{"gvisor"}, HeldRestore: true, Memory: true, PoolBytes: 1e12, PoolFree: 9e11,
		CPUs: 8, MemoryBytes: 32e9, DiskMaxBytes: 8e9,
	}, nil
}

func (h *scriptedHost) DiskReport(context.Context) (hostproto.DiskReport, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.upset != nil {
		h.upset()
	}
	r := hostproto.DiskReport{PoolBytes: 1e12, PoolFree: 9e10, LowMark: 1e11, StopMark: 3e10, Templates: hostproto.Share{Count: 1, Bytes: 7}}
	for id := range h.running {
		r.Sandboxes = append(r.Sandboxes, hostproto.SandboxDisk{Sandbox: id, Owned: true, Size: 4e9, Allocated: 2e9, Unique: -1, Memory: 5})
	}
	return r, nil
}

func (h *scriptedHost) Inventory(context.Context) ([]string, error) { return nil, nil }

func (h *scriptedHost) Facts(context.Context) ([]hostproto.Fact, error) { return nil, nil }
