package control

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/sqlite"
	"github.com/hutchrun/hutch/internal/webhook"
)

const patience = 30 * time.Second

var me = Actor{Project: "default", KeyID: "key_test", Scopes: ScopesProject}

// bench is a Control on a database of its own with one scripted host.
type bench struct {
	*Control
	t    *testing.T
	db   store.Store
	host *fakeHost
	log  *logBook
	cfg  Config
	// damaged says that the test has spoilt the ledger.
	damaged bool
	path    string // of the database
}

// newBench gives a bench that runs, with the template base.
func newBench(t *testing.T, change ...func(*Config)) *bench {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hutch.db")
	db, err := sqlite.Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, db: db, path: path, host: newFakeHost(), log: &logBook{}}
	b.cfg = Config{Store: db, Hosts: map[string]hostproto.Host{"local": b.host}, Log: slog.New(b.log)}
	// Commits wake the deliverer; nobody waits for more over days of virtual time.
	b.cfg.Webhooks.Limits = webhook.Limits{Poll: 24 * time.Hour, Tend: 24 * time.Hour}
	for _, c := range change {
		c(&b.cfg)
	}
	b.Control = New(b.cfg)
	b.host.reportTo(b.Control)
	t.Cleanup(func() {
		b.Close()
		b.host.close()
		if !b.damaged {
			b.allClean()
		}
		if err := db.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	must0(t, b.EnsureProject(t.Context(), "default"))
	must0(t, b.EnsureProject(t.Context(), "other"))
	must0(t, b.putTemplate("base", "sha256:base"))
	must0(t, b.Start(context.Background()))
	return b
}

func (b *bench) putTemplate(name, digest string) error {
	return b.db.Update(b.t.Context(), func(ctx context.Context, tx store.Tx) error {
		return tx.PutTemplate(ctx, store.Template{Project: "default", Name: name, Digest: digest, Source: "debian", CreatedAt: time.Now()})
	})
}

// restart ends the Control and begins another on the same database and host.
func (b *bench) restart() {
	b.t.Helper()
	b.Close()
	b.Control = New(b.cfg)
	b.host.reportTo(b.Control)
	must0(b.t, b.Start(context.Background()))
}

func must0(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		must0(t, err)
		return v
	}
}

// wantFault fails unless err is a fault of the kind and reason ("" for any).
func wantFault(t *testing.T, err error, kind fault.Kind, reason string) *fault.Fault {
	t.Helper()
	f := fault.Of(err)
	if f == nil || f.Kind != kind || reason != "" && f.Reason != reason {
		t.Fatalf("got %v, want %s (%s)", err, kind, reason)
	}
	return f
}

// ready makes a sandbox and waits until it is ready.
func (b *bench) ready(name string) sandbox.Sandbox {
	b.t.Helper()
	r := must(b.Create(b.t.Context(), me, CreateRequest{Name: name}))(b.t)
	b.ended(r.Operation, sandbox.Succeeded)
	return b.get(r.Sandbox.ID)
}

// reaches makes a sandbox and brings it into a state.
func (b *bench) reaches(name string, state sandbox.State) sandbox.Sandbox {
	b.t.Helper()
	s := b.ready(name)
	switch state {
	case sandbox.Sleeping:
		b.ended(must(b.Sleep(b.t.Context(), me, name, Idempotency{}))(b.t).Operation, sandbox.Succeeded)
	case sandbox.Stopped:
		b.ended(must(b.Stop(b.t.Context(), me, name, Idempotency{}))(b.t).Operation, sandbox.Succeeded)
	case sandbox.Failed:
		must0(b.t, b.host.befall(s.ID, sandbox.EventCrashed))
	case sandbox.Archived:
		must0(b.t, b.host.befall(s.ID, sandbox.EventStopped))
		must0(b.t, b.host.befall(s.ID, sandbox.EventArchived))
	}
	if s = b.get(s.ID); s.State != state {
		b.t.Fatalf("%s is %s, want %s", name, s.State, state)
	}
	return s
}

func (b *bench) get(ref string) sandbox.Sandbox {
	b.t.Helper()
	return must(b.Get(b.t.Context(), me, ref))(b.t).Sandbox
}

// row reads a sandbox as it is stored, also a deleted one.
func (b *bench) row(id string) sandbox.Sandbox {
	b.t.Helper()
	var s sandbox.Sandbox
	must0(b.t, b.db.View(b.t.Context(), func(ctx context.Context, r store.Reader) (err error) { s, err = r.Sandbox(ctx, id); return err }))
	return s
}

// ended waits for an operation's end and checks how it ended.
func (b *bench) ended(op *sandbox.Operation, status sandbox.OperationStatus) sandbox.Operation {
	b.t.Helper()
	if op == nil {
		b.t.Fatal("there is no operation")
	}
	got := must(b.Wait(b.t.Context(), me, op.ID, patience))(b.t)
	if got.Status != status {
		b.t.Fatalf("operation %s (%s) is %s (%+v), want %s", got.ID, got.Kind, got.Status, got.Error, status)
	}
	return got
}

// events gives the types of a sandbox's events so far, without those of entries of the
// ledger: what takes less than a millisecond makes none.
func (b *bench) events(id string) []string {
	b.t.Helper()
	var out []string
	for _, e := range must(b.Events(b.t.Context(), me, EventQuery{Sandbox: id, Limit: 1000}))(b.t).Events {
		if e.Type != "meter.entry" {
			out = append(out, e.Type)
		}
	}
	return out
}

// until waits for something that happens without anyone telling.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not happen: %s", what)
		}
	}
}

// fakeHost is a host that does as its script says. By default it carries out every
// command at once and without failure.
type fakeHost struct {
	mu       sync.Mutex
	to       hostproto.Reporter
	submits  []hostproto.Command // every call, repeats too
	calls    []string            // "submit VERB ID", "cancel OP"
	seen     map[string][]hostproto.Report
	has      map[string]*fakeSandbox
	deleted  []string                 // digests of templates
	policies []hostproto.PolicyChange // that were taken
	turns    []map[string][]string    // that it was told to be active, each time
	away     error                    // of SetPolicy and Renew
	builds   int
	info     hostproto.HostInfo
	disks    hostproto.DiskReport
	idle     *hostproto.Idleness // nil: nothing runs
	infoErr  error
	stranger []string // ids in the inventory that nobody knows
	facts    []hostproto.Fact

	refuse  func(hostproto.Command) error                      // of Submit
	hold    func(hostproto.Command) bool                       // take the command and do nothing
	fail    func(hostproto.Command) *hostproto.Failure         // the operation ends so
	deliver func(r hostproto.Report, send func() error) error  // how a report travels; nil sends it
	guest   func(id string) (hostproto.Guest, error)           // nil is a guest that cannot be dialled
	build   func(context.Context, func(string, float64)) error // nil builds at once

	run  context.Context
	stop context.CancelFunc
	done sync.WaitGroup
}

type fakeSandbox struct {
	seq, generation int64
	kept            bool // it is deleted and can be brought back
}

var _ hostproto.Host = (*fakeHost)(nil)

func newFakeHost() *fakeHost {
	h := &fakeHost{
		seen: map[string][]hostproto.Report{}, has: map[string]*fakeSandbox{},
		info: hostproto.HostInfo{Runtimes: []string{"fake"}, Memory: true, HeldRestore: true, PoolBytes: 100, PoolFree: 50},
	}
	h.run, h.stop = context.WithCancel(context.Background())
	return h
}

func (h *fakeHost) reportTo(to hostproto.Reporter) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.to = to
}

func (h *fakeHost) close() {
	h.stop()
	h.done.Wait()
}

// script changes the host's behaviour.
func (h *fakeHost) script(fn func(h *fakeHost)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	fn(h)
}

// Submit implements hostproto.Host.
func (h *fakeHost) Submit(_ context.Context, c hostproto.Command) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.submits = append(h.submits, c)
	h.calls = append(h.calls, fmt.Sprintf("submit %s %s", c.Verb, c.Sandbox))
	if h.refuse != nil {
		if err := h.refuse(c); err != nil {
			return err
		}
	}
	reports, known := h.seen[c.Operation]
	if !known {
		if h.hold == nil || !h.hold(c) {
			reports = h.obey(c)
		}
		h.seen[c.Operation] = reports
	}
	h.send(reports)
	return nil
}

// proceed carries out a command that was held.
func (h *fakeHost) proceed(op string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.submits, func(c hostproto.Command) bool { return c.Operation == op })
	h.seen[op] = h.obey(h.submits[i])
	h.send(h.seen[op])
}

// send delivers reports in the background, in their order, each until it is taken.
func (h *fakeHost) send(reports []hostproto.Report) {
	deliver := h.deliver
	h.done.Go(func() {
		for _, r := range reports {
			send := func() error {
				h.mu.Lock()
				to := h.to
				h.mu.Unlock()
				return to.Report(h.run, r)
			}
			for h.run.Err() == nil {
				var err error
				if deliver != nil {
					err = deliver(r, send)
				} else {
					err = send()
				}
				if err == nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
		}
	})
}

func (h *fakeHost) at(id string) *fakeSandbox {
	if h.has[id] == nil {
		h.has[id] = &fakeSandbox{}
	}
	return h.has[id]
}

// fact gives the next report on a sandbox.
func (h *fakeHost) fact(id, op string, verb sandbox.Verb, e sandbox.Event) hostproto.Report {
	s := h.at(id)
	s.seq++
	if e.Boots() {
		s.generation++
	}
	return hostproto.Report{Sandbox: id, Seq: s.seq, Generation: s.generation, Operation: op, Verb: verb, Event: e, At: time.Now().UTC().Truncate(time.Millisecond)}
}

var endsWith = map[sandbox.Verb]sandbox.Event{
	sandbox.Create: sandbox.EventCreated, sandbox.Sleep: sandbox.EventSlept, sandbox.Wake: sandbox.EventWoken,
	sandbox.Stop: sandbox.EventStopped, sandbox.Resume: sandbox.EventResumed, sandbox.Delete: sandbox.EventDeleted,
	sandbox.Undelete: sandbox.EventUndeleted,
}

// obey gives the reports of a command that is carried out.
func (h *fakeHost) obey(c hostproto.Command) []hostproto.Report {
	var failure *hostproto.Failure
	if h.fail != nil {
		failure = h.fail(c)
	}
	if c.Cancelled {
		failure = &hostproto.Failure{Kind: string(fault.Cancelled), Message: "as asked"}
	}
	var out []hostproto.Report
	for _, child := range c.Children {
		out = append(out, h.obey(hostproto.Command{Operation: child.Operation, Verb: sandbox.Create, Sandbox: child.Sandbox})...)
	}
	event := endsWith[c.Verb]
	erase := c.Verb == sandbox.Delete && h.at(c.Sandbox).kept
	if erase {
		event = ""
	}
	if failure != nil {
		event = ""
		if c.Verb == sandbox.Create {
			event = sandbox.EventCreateFailed
		}
	}
	r := h.fact(c.Sandbox, c.Operation, c.Verb, event)
	r.Ended, r.Failure, r.Erased = true, failure, erase
	if event == sandbox.EventDeleted && c.UndeleteFor > 0 {
		r.EraseAt = r.At.Add(c.UndeleteFor)
	}
	h.at(c.Sandbox).kept = !r.EraseAt.IsZero()
	if event == sandbox.EventSlept {
		r.Save = &hostproto.Save{At: r.At, MemoryRoot: "bb", MemoryBytes: 7, Runtime: "fake", Version: "1"}
	}
	r.Saved = failure == nil && (c.Verb == sandbox.Sleep || c.Verb == sandbox.Stop)
	if event.Boots() {
		r.Identity = []hostproto.IdentityItem{{Item: "hostname", Status: "done"}}
	}
	return append(out, r)
}

// befall reports an event that no verb caused.
func (h *fakeHost) befall(id string, e sandbox.Event) error {
	h.mu.Lock()
	r, to := h.fact(id, "", "", e), h.to
	h.mu.Unlock()
	for {
		// A fact that comes before those it follows on is sent again, as a host does: one
		// that was lost would hold up all that come after it.
		err := to.Report(h.run, r)
		if !fault.Is(err, fault.Unavailable) || h.run.Err() != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

// Cancel implements hostproto.Host.
func (h *fakeHost) Cancel(_ context.Context, _, op string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, "cancel "+op)
	return nil
}

// SetPolicy implements hostproto.Host: it takes each change once and reports on it.
func (h *fakeHost) SetPolicy(_ context.Context, c hostproto.PolicyChange) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.away != nil {
		return h.away
	}
	h.policies = append(h.policies, c)
	h.calls = append(h.calls, "policy "+c.Sandbox)
	r := h.fact(c.Sandbox, "", "", "")
	r.PolicyChange = c.Change
	if c.Policy.TTL != 0 {
		r.Deadline = r.At.Add(c.Policy.TTL)
	}
	h.send([]hostproto.Report{r})
	return nil
}

// Idleness implements hostproto.Host.
func (h *fakeHost) Idleness(_ context.Context, id string) (hostproto.Idleness, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.idle == nil {
		return hostproto.Idleness{}, fault.New(fault.FailedPrecondition, "%s does not run", id)
	}
	return *h.idle, nil
}

// Renew implements hostproto.Host.
func (h *fakeHost) Renew(_ context.Context, turns map[string][]string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.away != nil {
		return h.away
	}
	h.turns = append(h.turns, turns)
	return nil
}

// Guest implements hostproto.Host.
func (h *fakeHost) Guest(_ context.Context, id string, _ hostproto.Use) (hostproto.Guest, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.guest != nil {
		return h.guest(id)
	}
	dial := func(context.Context) (net.Conn, error) { return nil, net.ErrClosed }
	return hostproto.Guest{Dial: dial, Token: "token-" + id, Generation: h.at(id).generation, Done: func() {}}, nil
}

// Usage implements hostproto.Host.
func (h *fakeHost) Usage(context.Context, string) (hostproto.Usage, error) {
	return hostproto.Usage{MemoryBytes: 7}, nil
}

// BuildTemplate implements hostproto.Host.
func (h *fakeHost) BuildTemplate(ctx context.Context, _ hostproto.TemplateSource, progress func(string, float64)) (hostproto.Template, error) {
	h.mu.Lock()
	h.builds++
	n, build := h.builds, h.build
	h.mu.Unlock()
	progress("unpack", 0.5)
	if build != nil {
		if err := build(ctx, progress); err != nil {
			return hostproto.Template{}, err
		}
	}
	return hostproto.Template{Digest: fmt.Sprintf("sha256:build-%d", n), Bytes: 12, User: "agent", Workdir: "/workspace"}, nil
}

// DeleteTemplate implements hostproto.Host.
func (h *fakeHost) DeleteTemplate(_ context.Context, digest string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deleted = append(h.deleted, digest)
	return nil
}

// DiskReport implements hostproto.Host.
func (h *fakeHost) DiskReport(context.Context) (hostproto.DiskReport, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.disks, h.infoErr
}

// Info implements hostproto.Host.
func (h *fakeHost) Info(context.Context) (hostproto.HostInfo, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.info, h.infoErr
}

// Inventory implements hostproto.Host.
func (h *fakeHost) Inventory(context.Context) ([]string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append(slices.Sorted(maps.Keys(h.has)), h.stranger...), nil
}

// Facts implements hostproto.Host: what the test has set.
func (h *fakeHost) Facts(context.Context) ([]hostproto.Fact, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.facts), nil
}

// operations gives the different operations of a verb that were handed in, and how
// often in all.
func (h *fakeHost) operations(verb sandbox.Verb) (ids []string, calls int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.submits {
		if c.Verb == verb {
			calls++
			if !slices.Contains(ids, c.Operation) {
				ids = append(ids, c.Operation)
			}
		}
	}
	return ids, calls
}

func (h *fakeHost) callList() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.calls)
}

// removed gives the digests of the templates that were deleted.
func (h *fakeHost) removed() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.deleted)
}

// only holds the commands of one verb.
func only(verb sandbox.Verb) func(hostproto.Command) bool {
	return func(c hostproto.Command) bool { return c.Verb == verb }
}

// logBook keeps what was logged.
type logBook struct {
	mu    sync.Mutex
	lines []string
}

func (l *logBook) Enabled(context.Context, slog.Level) bool { return true }
func (l *logBook) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logBook) WithGroup(string) slog.Handler            { return l }
func (l *logBook) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool { line += " " + a.String(); return true })
	l.lines = append(l.lines, line)
	return nil
}

func (l *logBook) count(match func(string) bool) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		if match(line) {
			n++
		}
	}
	return n
}

// cutStore is a store whose transactions can be cut: before the nth call inside a
// transaction, cut runs. It also counts.
type cutStore struct {
	store.Store
	mu      sync.Mutex
	updates int
	n       int // calls until cut; 0 is never
	cut     func() error
}

func (s *cutStore) Update(ctx context.Context, fn func(context.Context, store.Tx) error) error {
	s.mu.Lock()
	s.updates++
	s.mu.Unlock()
	return s.Store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		if err := fn(ctx, &cutTx{Tx: tx, s: s}); err != nil {
			return err
		}
		return s.step() // before the commit
	})
}

func (s *cutStore) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.updates
}

func (s *cutStore) step() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n == 0 {
		return nil
	}
	if s.n--; s.n == 0 {
		return s.cut()
	}
	return nil
}

func (s *cutStore) arm(n int, cut func() error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n, s.cut = n, cut
}

// armed says whether the cut has not come yet.
func (s *cutStore) armed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	armed := s.n > 0
	s.n = 0
	return armed
}

// cutTx counts the writes of a transaction.
type cutTx struct {
	store.Tx
	s *cutStore
}

func (t *cutTx) InsertSandbox(ctx context.Context, s sandbox.Sandbox) error {
	if err := t.s.step(); err != nil {
		return err
	}
	return t.Tx.InsertSandbox(ctx, s)
}

func (t *cutTx) UpdateSandbox(ctx context.Context, s *sandbox.Sandbox) error {
	if err := t.s.step(); err != nil {
		return err
	}
	return t.Tx.UpdateSandbox(ctx, s)
}

func (t *cutTx) InsertOperation(ctx context.Context, op sandbox.Operation) error {
	if err := t.s.step(); err != nil {
		return err
	}
	return t.Tx.InsertOperation(ctx, op)
}

func (t *cutTx) UpdateOperation(ctx context.Context, op *sandbox.Operation) error {
	if err := t.s.step(); err != nil {
		return err
	}
	return t.Tx.UpdateOperation(ctx, op)
}

func (t *cutTx) AddEvent(ctx context.Context, e store.Event) error {
	if err := t.s.step(); err != nil {
		return err
	}
	return t.Tx.AddEvent(ctx, e)
}

func (t *cutTx) PutRequest(ctx context.Context, r store.Request) error {
	if err := t.s.step(); err != nil {
		return err
	}
	return t.Tx.PutRequest(ctx, r)
}
