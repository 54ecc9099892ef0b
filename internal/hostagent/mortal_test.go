package hostagent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
)

// mortal stands between an agent and its machine: journal, disks, network, runtime,
// control plane. It kills the agent as kill -9 does, at an instant between two things
// that the machine sees: whatever the agent calls from then on, in any goroutine, does
// not happen and does not return.
type mortal struct {
	mu     sync.Mutex
	counts map[string]int
	trace  []instant
	aim    *instant
	fails  *instant // the call that fails without doing anything
	hit    bool     // it has failed
	dead   bool
	died   chan struct{} // closed when it is dead
	grave  chan struct{} // closed when what hangs in it may end
	calls  int           // that run
}

// instant is before or after the nth call of a name about a sandbox.
type instant struct {
	sandbox, name string
	nth           int
	after         bool
}

func (i instant) String() string {
	when := "before"
	if i.after {
		when = "after"
	}
	return fmt.Sprintf("%s %s %s %d", when, i.sandbox, i.name, i.nth)
}

// captured stands for the fork operation that owns a capture.
const captured = "capture"

var (
	errDead = errors.New("the agent is dead")
	errMade = errors.New("made to fail")
)

func newMortal() *mortal {
	return &mortal{counts: map[string]int{}, died: make(chan struct{}), grave: make(chan struct{})}
}

// arm counts anew and kills the agent at an instant; nil for none.
func (m *mortal) arm(at *instant) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts, m.trace, m.aim = map[string]int{}, nil, at
}

// spoil counts anew and makes one call fail.
func (m *mortal) spoil(at instant) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts, m.fails = map[string]int{}, &at
}

func (m *mortal) spoilt() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hit
}

func (m *mortal) instants() []instant {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]instant(nil), m.trace...)
}

func (m *mortal) busy() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.calls > 0
}

// kill kills the agent wherever it is.
func (m *mortal) kill() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.die()
}

func (m *mortal) die() {
	if !m.dead {
		m.dead = true
		close(m.died)
	}
}

// pass lets a living agent go on, with n more calls at work.
func (m *mortal) pass(at instant, n int) error {
	m.mu.Lock()
	if !m.dead && m.aim != nil && *m.aim == at {
		m.die()
	}
	if !m.dead {
		m.calls += n
		m.trace = append(m.trace, at)
		m.mu.Unlock()
		return nil
	}
	m.mu.Unlock()
	<-m.grave
	return errDead
}

// around makes instants of the begin and the end of something in which n calls are
// at work.
func (m *mortal) around(sandbox, name string, n int, do func() error) error {
	if isCapture(sandbox) {
		sandbox = captured // its id is another one in each run
	}
	m.mu.Lock()
	key := sandbox + " " + name
	m.counts[key]++
	at := instant{sandbox, name, m.counts[key], false}
	fails := m.fails != nil && *m.fails == at
	m.mu.Unlock()
	if err := m.pass(at, n); err != nil {
		return err
	}
	err := errMade
	if !fails {
		err = do()
	}
	m.mu.Lock()
	m.calls -= n
	m.hit = m.hit || fails
	m.mu.Unlock()
	at.after = true
	if gone := m.pass(at, 0); gone != nil {
		return gone
	}
	return err
}

// call is around for one call to the machine, which ends also for a dead agent.
func (m *mortal) call(sandbox, name string, do func() error) error {
	return m.around(sandbox, name, 1, do)
}

func result[T any](m *mortal, sandbox, name string, do func() (T, error)) (out T, err error) {
	err = m.call(sandbox, name, func() (err error) { out, err = do(); return err })
	return out, err
}

// recordName says what a record of a journal is about.
func recordName(r *record) string {
	switch {
	case r == nil:
		return "journal removed"
	case r.Job != nil && r.Job.Committed:
		return "journal: committed"
	case r.Job != nil:
		return "journal: begun"
	case len(r.Unacked) > 0:
		return "journal: ended"
	}
	return "journal: reported"
}

type mortalReporter struct {
	m  *mortal
	to hostproto.Reporter
}

func (r mortalReporter) Report(ctx context.Context, rep hostproto.Report) error {
	name := "report"
	if rep.Seq == 0 {
		name = "progress"
	}
	return r.m.call(rep.Sandbox, name, func() error { return r.to.Report(ctx, rep) })
}

type mortalNetwork struct {
	m *mortal
	Network
}

func (n mortalNetwork) Attach(ctx context.Context, id string, rules Rules) (string, error) {
	return result(n.m, id, "network attach", func() (string, error) { return n.Network.Attach(ctx, id, rules) })
}

func (n mortalNetwork) Detach(ctx context.Context, id string) error {
	return n.m.call(id, "network detach", func() error { return n.Network.Detach(ctx, id) })
}

type mortalDisks struct {
	m *mortal
	Disks
}

func (d mortalDisks) Create(ctx context.Context, id string, size int64) error {
	return d.m.call(id, "disk create", func() error { return d.Disks.Create(ctx, id, size) })
}

func (d mortalDisks) Mount(ctx context.Context, id, template, agent string) (string, error) {
	return result(d.m, id, "disk mount", func() (string, error) { return d.Disks.Mount(ctx, id, template, agent) })
}

func (d mortalDisks) Unmount(ctx context.Context, id string) error {
	return d.m.call(id, "disk unmount", func() error { return d.Disks.Unmount(ctx, id) })
}

func (d mortalDisks) Sync(ctx context.Context, id string) error {
	return d.m.call(id, "disk sync", func() error { return d.Disks.Sync(ctx, id) })
}

func (d mortalDisks) Delete(ctx context.Context, id string) error {
	return d.m.call(id, "disk delete", func() error { return d.Disks.Delete(ctx, id) })
}

func (d mortalDisks) Has(ctx context.Context, id string) (bool, error) {
	return result(d.m, id, "disk look", func() (bool, error) { return d.Disks.Has(ctx, id) })
}

func (d mortalDisks) Erase(ctx context.Context, id string) error {
	return d.m.call(id, "disk erase", func() error { return d.Disks.Erase(ctx, id) })
}

func (d mortalDisks) Stage(ctx context.Context, owner string, generation, need int64) (Staging, error) {
	s, err := result(d.m, owner, "save stage", func() (Staging, error) { return d.Disks.Stage(ctx, owner, generation, need) })
	if err != nil {
		return nil, err
	}
	return mortalStaging{d.m, owner, s}, nil
}

func (d mortalDisks) Saved(ctx context.Context, owner string, generation int64) (disk.Saved, error) {
	return result(d.m, owner, "save open", func() (disk.Saved, error) { return d.Disks.Saved(ctx, owner, generation) })
}

func (d mortalDisks) CloneSaved(ctx context.Context, owner string, generation int64, id string) error {
	return d.m.call(id, "disk from save", func() error { return d.Disks.CloneSaved(ctx, owner, generation, id) })
}

func (d mortalDisks) CopySaved(ctx context.Context, owner string, generation int64, to string, toGeneration int64) error {
	return d.m.call(to, "save copy", func() error { return d.Disks.CopySaved(ctx, owner, generation, to, toGeneration) })
}

func (d mortalDisks) DropSaved(ctx context.Context, owner string, generation int64) error {
	return d.m.call(owner, "save drop", func() error { return d.Disks.DropSaved(ctx, owner, generation) })
}

type mortalStaging struct {
	m     *mortal
	owner string
	Staging
}

func (s mortalStaging) CloneDisk(ctx context.Context, id string) error {
	return s.m.call(s.owner, "save clone disk", func() error { return s.Staging.CloneDisk(ctx, id) })
}

func (s mortalStaging) Commit(ctx context.Context, manifest []byte) error {
	return s.m.call(s.owner, "save commit", func() error { return s.Staging.Commit(ctx, manifest) })
}

func (s mortalStaging) Abort() error {
	return s.m.call(s.owner, "save abort", s.Staging.Abort)
}

type mortalDriver struct {
	m *mortal
	runtime.Driver
}

func (d mortalDriver) Start(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	h, err := result(d.m, spec.ID, "runtime start", func() (runtime.Handle, error) { return d.Driver.Start(ctx, spec) })
	if err != nil {
		return nil, err
	}
	return mortalHandle{d.m, spec.ID, h}, nil
}

func (d mortalDriver) Restore(ctx context.Context, spec runtime.Spec, image string) (runtime.Held, error) {
	h, err := result(d.m, spec.ID, "runtime restore", func() (runtime.Held, error) { return d.Driver.Restore(ctx, spec, image) })
	if err != nil {
		return nil, err
	}
	return mortalHeld{mortalHandle{d.m, spec.ID, h}, h}, nil
}

func (d mortalDriver) Adopt(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	h, err := result(d.m, spec.ID, "runtime adopt", func() (runtime.Handle, error) { return d.Driver.Adopt(ctx, spec) })
	if err != nil {
		return nil, err
	}
	return mortalHandle{d.m, spec.ID, h}, nil
}

type mortalHandle struct {
	m  *mortal
	id string
	runtime.Handle
}

func (h mortalHandle) Pause(ctx context.Context) (runtime.Paused, error) {
	p, err := result(h.m, h.id, "runtime pause", func() (runtime.Paused, error) { return h.Handle.Pause(ctx) })
	if err != nil {
		return nil, err
	}
	return mortalPaused{h.m, h.id, p}, nil
}

func (h mortalHandle) Thaw(ctx context.Context) error {
	return h.m.call(h.id, "runtime thaw", func() error { return h.Handle.Thaw(ctx) })
}

func (h mortalHandle) Kill(ctx context.Context) error {
	return h.m.call(h.id, "runtime kill", func() error { return h.Handle.Kill(ctx) })
}

func (h mortalHandle) DialGuest(ctx context.Context, port int) (net.Conn, error) {
	return result(h.m, h.id, "guest dial", func() (net.Conn, error) { return h.Handle.DialGuest(ctx, port) })
}

type mortalHeld struct {
	mortalHandle
	held runtime.Held
}

func (h mortalHeld) Release(ctx context.Context) error {
	return h.m.call(h.id, "runtime release", func() error { return h.held.Release(ctx) })
}

type mortalPaused struct {
	m  *mortal
	id string
	runtime.Paused
}

func (p mortalPaused) Capture(ctx context.Context, dir string) error {
	return p.m.call(p.id, "runtime capture", func() error { return p.Paused.Capture(ctx, dir) })
}

// grave is an agent that was killed. What it left behind in this process ends with
// the test.
type grave struct {
	m     *mortal
	agent *Agent
}

func (g *grave) open() {
	close(g.m.grave)
	g.agent.Stop()
}

// bury kills the agent where it is not dead yet, and waits for what the machine was
// doing for it.
func (w *world) bury() {
	w.t.Helper()
	w.mortal.kill()
	m := w.mortal
	eventually(w.t, "the calls of the dead agent to end", func() bool { return !m.busy() })
	if n := len(w.graves); n == 0 || w.graves[n-1].m != m {
		w.graves = append(w.graves, &grave{m, w.agent})
	}
}
