package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
)

// fakeKey is the API key that the fake server knows.
const fakeKey = "hutch_test_key"

// fake is a server that speaks the API's shapes: sandboxes are rows in memory,
// commands are real processes of this machine. Tests tell it to be slow, to fail and
// to cut connections.
type fake struct {
	server *httptest.Server

	mu        sync.Mutex
	cond      *sync.Cond // of every change
	sandboxes []*api.Sandbox
	ops       []*fakeOp
	commands  map[string]*fakeCommand
	firewalls map[string]api.Firewall
	files     map[string][]byte
	events    []api.Event
	webhooks  []api.Webhook
	ports     []api.PortGrant
	sentSeq   int            // the last event that went out
	byKey     map[string]any // what a call with this key made
	calls     []string       // "METHOD PATH key"
	rules     []*rule
	held      bool // operations do not end before release
	failing   map[string]api.OperationError
	cutEvery  int // bytes of output after which a stream is cut off; 0 is never
}

type fakeOp struct {
	api.Operation
	end func()
}

// rule is a mishap for calls that match, as often as Times says.
type rule struct {
	method, prefix string
	times          int
	what           string // before, after: cut the connection; else an error code
	message        string
}

func newFake(t testing.TB) *fake {
	f := &fake{
		commands: map[string]*fakeCommand{}, files: map[string][]byte{}, byKey: map[string]any{},
		failing: map[string]api.OperationError{},
	}
	f.cond = sync.NewCond(&f.mu)
	f.server = httptest.NewServer(http.HandlerFunc(f.serve))
	t.Cleanup(func() {
		f.mu.Lock()
		for _, c := range f.commands {
			c.kill()
		}
		f.mu.Unlock()
		f.server.CloseClientConnections()
		f.server.Close()
	})
	return f
}

// addSandbox makes a sandbox that was there all along.
func (f *fake) addSandbox(name string, state api.State) *api.Sandbox {
	at := time.Now().Add(-5*time.Minute - 20*time.Second)
	s := &api.Sandbox{
		ID: fmt.Sprintf("sbx_%026d", len(f.sandboxes)+1), Name: name, State: state, Template: "base", TemplateVersion: "sha256:0123",
		Runtime: "gvisor", Host: "local", CPUs: 2, MemoryBytes: 512 << 20, DiskBytes: 4e9, Generation: 1,
		Labels: map[string]string{}, Conditions: []api.Condition{}, Origin: api.Origin{Kind: api.OriginKindTemplate},
		Sleep: api.Sleep{Mode: api.SleepModeManual, IdleSeconds: 120, Deadline: api.SleepDeadlineRun}, OnIdle: api.OnIdleSleep,
		OnDeadline: api.OnDeadlineStop, ArchiveAfter: &fortnight,
		CreatedAt: api.At(at), UpdatedAt: api.At(at), StateSince: api.At(at),
	}
	f.sandboxes = append(f.sandboxes, s)
	return s
}

// add is addSandbox for tests, which do not hold the lock.
func (f *fake) add(name string, state api.State) *api.Sandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.addSandbox(name, state)
}

// state gives the state of a sandbox.
func (f *fake) state(s *api.Sandbox) api.State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return s.State
}

func (f *fake) find(ref string) *api.Sandbox {
	for _, s := range f.sandboxes {
		if (s.ID == ref || s.Name == ref) && s.State != api.StateDeleted {
			return s
		}
	}
	return nil
}

// serve records the call, lets the rules have their way, and answers.
func (f *fake) serve(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.calls = append(f.calls, r.Method+" "+r.URL.Path+" "+r.Header.Get(headerKey))
	var hit *rule
	for _, rule := range f.rules {
		if rule.times > 0 && rule.method == r.Method && strings.HasPrefix(r.URL.Path, rule.prefix) {
			rule.times--
			hit = rule
			break
		}
	}
	f.mu.Unlock()
	switch {
	case hit == nil:
	case hit.what == "before":
		panic(http.ErrAbortHandler)
	case hit.what == "after":
		f.handle(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	default:
		fail(w, hit.what, hit.message)
		return
	}
	f.handle(w, r)
}

func (f *fake) handle(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer "+fakeKey {
		fail(w, "unauthenticated", "no API key was given; send `Authorization: Bearer hutch_…` or `X-API-Key`")
		return
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sandboxes", f.createSandbox)
	mux.HandleFunc("GET /v1/sandboxes", f.listSandboxes)
	mux.HandleFunc("GET /v1/sandboxes/{ref}", f.with(func(s *api.Sandbox, w http.ResponseWriter, _ *http.Request) { answer(w, 200, s) }))
	mux.HandleFunc("PATCH /v1/sandboxes/{ref}", f.with(f.updateSandbox))
	mux.HandleFunc("DELETE /v1/sandboxes/{ref}", f.verb("delete", api.StateDeleted))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/sleep", f.verb("sleep", api.StateSleeping))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/wake", f.verb("wake", api.StateReady))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/stop", f.verb("stop", api.StateStopped))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/resume", f.verb("resume", api.StateReady))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/fork", f.with(f.forkSandbox))
	mux.HandleFunc("GET /v1/sandboxes/{ref}/identity", f.with(func(s *api.Sandbox, w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, api.Identity{Sandbox: s.ID, Items: []api.IdentityItem{
			{Item: "machine_id", Status: "done"}, {Item: "boot_id", Status: "impossible", Message: "it was read already"},
		}})
	}))
	mux.HandleFunc("GET /v1/sandboxes/{ref}/firewall", f.with(f.firewall))
	mux.HandleFunc("PUT /v1/sandboxes/{ref}/firewall", f.with(f.firewall))
	mux.HandleFunc("GET /v1/sandboxes/{ref}/idle", f.with(f.idleness))
	mux.HandleFunc("GET /v1/operations", f.listOperations)
	mux.HandleFunc("GET /v1/operations/{id}", f.getOperation)
	mux.HandleFunc("GET /v1/events", f.listEvents)
	f.serveWebhooks(mux)
	f.servePorts(mux)
	mux.HandleFunc("GET /v1/version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, api.Version{Version: "9.9.9", API: "v1"})
	})
	mux.HandleFunc("GET /v1/df", f.diskUsage)
	mux.HandleFunc("GET /v1/bill", f.bill)
	f.projectRoutes(mux)
	f.templateRoutes(mux)
	f.commandRoutes(mux)
	f.fileRoutes(mux)
	mux.ServeHTTP(w, r)
}

// diskUsage is a pool that is low, with one disk that shares nothing and one that
// cannot be counted.
func (f *fake) diskUsage(w http.ResponseWriter, r *http.Request) {
	own := int64(1.5e9)
	host := api.HostDisk{
		ID: "local", State: "low", PoolBytes: 10e9, PoolFreeBytes: 0.9e9, PoolInFile: true, LowMarkBytes: 1e9, StopMarkBytes: 0.3e9,
		ReserveBytes: 0.5e9, DataBytes: 100e9, DataFreeBytes: 50e9, DisksBytes: 3e9, SavedMemoryBytes: 2e9, MemoryQuotaBytes: 5e9,
		Templates: api.Share{Count: 2, Bytes: 0.2e9}, Unowned: api.Share{Count: 1, Bytes: 0.1e9},
		Sandboxes: []api.SandboxDisk{
			{Sandbox: "sbx_1", Name: "big", State: "ready", SizeBytes: 4e9, AllocatedBytes: 2e9, UniqueBytes: &own},
			{Sandbox: "sbx_2", Name: "torn", State: "sleeping", SizeBytes: 4e9, AllocatedBytes: 1e9, SavedMemoryBytes: 2e9},
		},
	}
	if ref := r.URL.Query().Get("sandbox"); ref != "" {
		host.Sandboxes = host.Sandboxes[1:]
		if ref != host.Sandboxes[0].Name {
			fail(w, "not_found", "there is no sandbox "+ref)
			return
		}
	}
	answer(w, 200, api.DiskUsage{Hosts: []api.HostDisk{host}})
}

// bill has one sandbox with a name and one without, nothing in March, and a ledger that
// is damaged from April on.
func (f *fake) bill(w http.ResponseWriter, r *http.Request) {
	line := func(reason api.BillLineReason, ms int64, used, amount string) api.BillLine {
		return api.BillLine{
			Kind: "compute", Reason: reason, PriceVersion: 1, Milliseconds: ms, VcpuSeconds: used, MemoryGibSeconds: used, DiskGbHours: "0.000000", Amount: amount,
		}
	}
	out := api.Bill{
		To: api.At(time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC)), Total: "0.077930", Verified: r.URL.Query().Get("verify") == "true", Differences: []string{},
		Sandboxes: []api.SandboxBill{
			{ID: "sbx_1", Name: "demo", Total: "0.077914", Lines: []api.BillLine{
				line("starting", 1500, "1.500000", "0.000023"), line("running", 5025250, "5025.250000", "0.077891"),
			}},
			{ID: "sbx_2", Total: "0.000016", Lines: []api.BillLine{line("sleeping", 1000, "1.000000", "0.000016")}},
		},
	}
	switch r.URL.Query().Get("from") {
	case "yesterday":
		fail(w, "invalid_argument", "from takes an instant")
		return
	case "2026-03-01":
		out.Sandboxes, out.Total = []api.SandboxBill{}, "0.000000"
	case "2026-04-01":
		out.Differences = []string{"sbx_1: entry 2 is missing: after 1 comes 3", "sbx_1: the entries come to 1, the facts to 2"}
	}
	answer(w, 200, out)
}

// with hands the sandbox of a call to a handler, under the lock.
func (f *fake) with(h func(*api.Sandbox, http.ResponseWriter, *http.Request)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		s := f.find(r.PathValue("ref"))
		if s == nil {
			refuse(w, "not_found", "sandbox", "there is no sandbox "+r.PathValue("ref"))
			return
		}
		h(s, w, r)
	}
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

var statuses = map[string]int{
	"unauthenticated": 401, "not_found": 404, "conflict": 409, "failed_precondition": 409, "unsupported": 422,
	"unavailable": 503, "invalid_argument": 400, "no_capacity": 503,
}

func fail(w http.ResponseWriter, code, message string) {
	reason := ""
	if code == "unavailable" {
		w.Header().Set("Retry-After", "7")
	}
	if code == "failed_precondition" {
		reason = "state_stopped"
		if strings.Contains(message, "sleeping") {
			reason = "state_sleeping"
		}
	}
	refuse(w, code, reason, message)
}

func refuse(w http.ResponseWriter, code, reason, message string) {
	answer(w, statuses[code], api.Error{Error: api.ErrorDetail{
		Code: api.ErrorCode(code), Message: message, Reason: reason, RequestID: "req_1",
	}})
}

// start makes an operation. It ends at once, or at release.
func (f *fake) start(s *api.Sandbox, kind string, end func()) *fakeOp {
	op := &fakeOp{Operation: api.Operation{
		ID: fmt.Sprintf("op_%026d", len(f.ops)+1), Sandbox: s.ID, Kind: kind, Status: api.OperationStatusRunning,
		Step: "capture", Progress: 0.5, Actor: "key_1", CreatedAt: api.At(time.Now()),
	}}
	op.end = func() {
		now := api.At(time.Now())
		op.EndedAt, op.Status, s.Operation = &now, api.OperationStatusSucceeded, nil
		op.Timings = []api.StepTime{{Step: "disk", Milliseconds: 3.5}, {Step: "boot", Milliseconds: 150}}
		if failure, bad := f.failing[kind]; bad {
			op.Status, op.Error = api.OperationStatusFailed, &failure
			return
		}
		op.Progress = 1
		end()
	}
	f.ops = append(f.ops, op)
	running := op.Operation
	s.Operation = &running
	if !f.held {
		defer op.end()
	}
	copied := *op // as it is when the call is answered
	return &copied
}

// release ends all operations.
func (f *fake) release() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held = false
	for _, op := range f.ops {
		if op.EndedAt == nil {
			op.end()
		}
	}
	f.cond.Broadcast()
}

func (f *fake) createSandbox(w http.ResponseWriter, r *http.Request) {
	var body api.CreateSandbox
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&body); err != nil {
		fail(w, "invalid_argument", err.Error())
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if before, ok := f.byKey[r.Header.Get(headerKey)]; ok {
		answer(w, 201, before)
		return
	}
	s := f.addSandbox(body.Name, api.StateCreating)
	if body.Name == "" {
		s.Name = "quiet-otter"
	}
	setTTL(s, body.TTLSeconds)
	if body.Firewall != nil {
		f.setFirewall(s.ID, *body.Firewall)
	}
	setSleep(s, body.Sleep, body.OnIdle)
	s.OnDeadline = cmp.Or(body.OnDeadline, s.OnDeadline)
	if body.MemoryBytes != nil {
		s.MemoryBytes = *body.MemoryBytes
	}
	if body.DiskBytes != nil {
		s.DiskBytes = *body.DiskBytes
	}
	if body.CPUs != nil {
		s.CPUs = int(*body.CPUs)
	}
	if body.Labels != nil {
		s.Labels = body.Labels
	}
	op := f.start(s, "create", func() { s.State = api.StateReady })
	ch := map[string]any{"sandbox": s, "operation": op.Operation, "outcome": "started"}
	f.byKey[r.Header.Get(headerKey)] = ch
	answer(w, 201, ch)
}

func (f *fake) verb(kind string, goal api.State) http.HandlerFunc {
	return f.with(func(s *api.Sandbox, w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(headerKey) == "" {
			fail(w, "invalid_argument", "no idempotency key")
			return
		}
		var body api.Boot
		_ = json.NewDecoder(r.Body).Decode(&body)
		setTTL(s, body.TTLSeconds)
		switch {
		case s.State == goal:
			answer(w, 200, map[string]any{"sandbox": s, "operation": nil, "outcome": "done"})
		case kind == "sleep" && s.State == api.StateStopped:
			fail(w, "failed_precondition", "cannot sleep "+s.Name+": it is stopped; `resume` it first")
		default:
			op := f.start(s, kind, func() { s.State = goal })
			answer(w, 202, map[string]any{"sandbox": s, "operation": op.Operation, "outcome": "started"})
		}
	})
}

func (f *fake) forkSandbox(s *api.Sandbox, w http.ResponseWriter, r *http.Request) {
	var body api.ForkSandbox
	_ = json.NewDecoder(r.Body).Decode(&body)
	var forks []map[string]any
	for i := range *body.Count {
		child := f.addSandbox(fmt.Sprintf("%s-%d", s.Name, i+1), api.StateCreating)
		setTTL(child, body.TTLSeconds)
		op := f.start(child, "create", func() { child.State = api.StateReady })
		forks = append(forks, map[string]any{"sandbox": child, "operation": op.Operation})
	}
	op := f.start(s, "fork", func() {})
	answer(w, 202, map[string]any{"sandbox": s, "operation": op.Operation, "forks": forks})
}

func (f *fake) updateSandbox(s *api.Sandbox, w http.ResponseWriter, r *http.Request) {
	var body api.UpdateSandbox
	_ = json.NewDecoder(r.Body).Decode(&body)
	if body.Name != nil {
		s.Name = *body.Name
	}
	if body.Labels != nil {
		s.Labels = *body.Labels
	}
	setTTL(s, body.TTLSeconds)
	setSleep(s, body.Sleep, body.OnIdle)
	s.OnDeadline = cmp.Or(body.OnDeadline, s.OnDeadline)
	s.ArchiveAfter, s.DeleteAfter = changed(s.ArchiveAfter, body.ArchiveAfter), changed(s.DeleteAfter, body.DeleteAfter)
	answer(w, 200, s)
}

func setSleep(s *api.Sandbox, settings *api.SleepSettings, onIdle api.OnIdle) {
	s.OnIdle = cmp.Or(onIdle, s.OnIdle)
	if settings == nil {
		return
	}
	s.Sleep.Mode, s.Sleep.Deadline = cmp.Or(settings.Mode, s.Sleep.Mode), cmp.Or(settings.Deadline, s.Sleep.Deadline)
	if settings.IdleSeconds != nil {
		s.Sleep.IdleSeconds = *settings.IdleSeconds
	}
}

// idleness is a sandbox that a command in front keeps awake.
func (f *fake) idleness(s *api.Sandbox, w http.ResponseWriter, _ *http.Request) {
	at := api.At(time.Now())
	answer(w, 200, api.Idleness{
		Sandbox: s.ID, State: s.State, Sleep: s.Sleep, OnIdle: s.OnIdle, Blocker: "foreground", Message: "it stays awake: a command runs in front",
		NextDecisionAt: &at, SampledAt: &at, SampleSeconds: 10, FailedTries: 2, Criteria: []api.Criterion{
			{Name: api.CriterionNameForeground, Reading: 1, Limit: 1}, {Name: api.CriterionNameCPU, Reading: 0.31, Limit: 2, Unit: "%", Ok: true, Since: &at},
			{Name: api.CriterionNameNetwork, Reading: 12.4, Limit: 1024, Unit: "B/s", Ok: true, Since: &at},
		},
	})
}

var fortnight int64 = 14 * 24 * 60 * 60

func setTTL(s *api.Sandbox, ttl api.Seconds) { s.TTLSeconds = changed(s.TTLSeconds, ttl) }

// changed is a length of time after a call that may give another.
func changed(before *int64, asked api.Seconds) *int64 {
	switch n := asked.Int64(); {
	case asked == "":
		return before
	case asked.None():
		return nil
	default:
		return &n
	}
}

// page cuts a list: the cursor is the index of the next row.
func page[T any](r *http.Request, name string, rows []T) map[string]any {
	limit := 100
	if n, err := strconv.Atoi(r.URL.Query().Get("limit")); err == nil {
		limit = n
	}
	from, _ := strconv.Atoi(r.URL.Query().Get("cursor"))
	to := min(from+limit, len(rows))
	document := map[string]any{name: append([]T{}, rows[from:to]...), "next_cursor": nil}
	if to < len(rows) {
		document["next_cursor"] = strconv.Itoa(to)
	}
	return document
}

func (f *fake) listSandboxes(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var rows []*api.Sandbox
	states := r.URL.Query()["state"]
	for _, s := range f.sandboxes {
		keep := s.State != api.StateDeleted
		if len(states) > 0 {
			keep = slices.Contains(states, string(s.State))
		}
		for _, label := range r.URL.Query()["label"] {
			key, value, _ := strings.Cut(label, "=")
			keep = keep && s.Labels[key] == value
		}
		if keep {
			rows = append(rows, s)
		}
	}
	answer(w, 200, page(r, "sandboxes", rows))
}

func (f *fake) listOperations(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var rows []api.Operation
	for _, op := range f.ops {
		rows = append(rows, op.Operation)
	}
	answer(w, 200, page(r, "operations", rows))
}

func (f *fake) getOperation(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, op := range f.ops {
		if op.ID != r.PathValue("id") {
			continue
		}
		stop := f.wakeOn(r)
		defer stop()
		for r.URL.Query().Get("wait") != "" && op.EndedAt == nil && r.Context().Err() == nil && slices.Contains(f.ops, op) {
			f.cond.Wait()
		}
		if !slices.Contains(f.ops, op) {
			break
		}
		answer(w, 200, op.Operation)
		return
	}
	refuse(w, "not_found", "operation", "there is no operation "+r.PathValue("id"))
}

// wakeOn makes waiting handlers look again when their client goes away.
func (f *fake) wakeOn(r *http.Request) (stop func() bool) {
	return afterContext(r, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.cond.Broadcast()
	})
}

func (f *fake) addEvent(kind, sandbox string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, api.Event{
		Seq: int64(len(f.events) + 1), Type: kind, Sandbox: sandbox, Actor: "key_1",
		Data: json.RawMessage("null"), At: api.At(time.Now()),
	})
	f.cond.Broadcast()
}

func (f *fake) listEvents(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	after, _ := strconv.Atoi(cmp.Or(r.Header.Get("Last-Event-ID"), r.URL.Query().Get("after")))
	if r.Header.Get("Accept") != "text/event-stream" {
		answer(w, 200, page(r, "events", f.events[min(after, len(f.events)):]))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	defer f.wakeOn(r)()
	for sent := 0; r.Context().Err() == nil; {
		for _, e := range f.events[min(after, len(f.events)):] {
			if sent++; f.cutEvery > 0 && sent > f.cutEvery {
				panic(http.ErrAbortHandler)
			}
			text, _ := json.Marshal(e)
			fmt.Fprintf(w, ": still here\n\nid: %d\nevent: %s\ndata: %s\n\n", e.Seq, e.Type, text)
			after = int(e.Seq)
			w.(http.Flusher).Flush()
			f.sentSeq = max(f.sentSeq, after)
			f.cond.Broadcast()
		}
		f.cond.Wait()
	}
}

// countCalls gives how many calls begin with a prefix.
func (f *fake) countCalls(prefix string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, call := range f.calls {
		if strings.HasPrefix(call, prefix) {
			n++
		}
	}
	return n
}
