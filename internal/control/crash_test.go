package control

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/crashmatrix"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// proofs is this package's part of docs/crash-matrix.md.
var proofs = crashmatrix.New("control", "../../docs/crash-matrix.md")

const (
	colBefore = "killed before"
	colAfter  = "killed after"
)

var commitTable = proofs.Table("The server killed at each commit", "", "commit", colBefore, colAfter)

func TestMain(m *testing.M) { os.Exit(proofs.Main(m.Run())) }

// doomed is a server that dies at one of its commits, before it or after it. From then
// on it reads nothing, writes nothing, hears nothing and says nothing.
type doomed struct {
	store.Store
	hostproto.Host

	mu    sync.Mutex
	names []string // of the commits
	armed bool
	at    int // the commit to die at, from 0; -1 for none
	after bool
	dead  bool
	died  chan struct{}
	grave chan struct{}
}

var errDead = errors.New("the server is dead")

func newDoomed(db store.Store, h hostproto.Host) *doomed {
	return &doomed{Store: db, Host: h, at: -1, died: make(chan struct{}), grave: make(chan struct{})}
}

func (d *doomed) arm(at int, after bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.names, d.armed, d.at, d.after = nil, true, at, after
}

// alive lets a living server go on; a dead one hangs until the test ends.
func (d *doomed) alive() error {
	d.mu.Lock()
	dead := d.dead
	d.mu.Unlock()
	if !dead {
		return nil
	}
	<-d.grave
	return errDead
}

func (d *doomed) die() {
	if !d.dead {
		d.dead = true
		close(d.died)
	}
}

func (d *doomed) Update(ctx context.Context, fn func(context.Context, store.Tx) error) error {
	if err := d.alive(); err != nil {
		return err
	}
	last := false
	err := d.Store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		named := &namedTx{Tx: tx}
		if err := fn(ctx, named); err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if !d.armed || named.name == "" {
			return nil
		}
		n := len(d.names)
		d.names = append(d.names, named.name)
		if n == d.at && !d.after {
			d.die()
			return errDead
		}
		last = n == d.at
		return nil
	})
	if last && err == nil {
		d.mu.Lock()
		d.die()
		d.mu.Unlock()
	}
	if gone := d.alive(); gone != nil {
		return gone
	}
	return err
}

func (d *doomed) View(ctx context.Context, fn func(context.Context, store.Reader) error) error {
	if err := d.alive(); err != nil {
		return err
	}
	return d.Store.View(ctx, fn)
}

func (d *doomed) Events(ctx context.Context, f store.EventFilter) ([]store.Event, error) {
	if err := d.alive(); err != nil {
		return nil, err
	}
	return d.Store.Events(ctx, f)
}

func (d *doomed) Submit(ctx context.Context, c hostproto.Command) error {
	if err := d.alive(); err != nil {
		return err
	}
	return d.Host.Submit(ctx, c)
}

func (d *doomed) Cancel(ctx context.Context, id, op string) error {
	if err := d.alive(); err != nil {
		return err
	}
	return d.Host.Cancel(ctx, id, op)
}

func (d *doomed) Close() error { return nil } // of the store; the bench closes it

// line is the connection of a host to a server; it breaks when the server dies.
type line struct {
	d  *doomed
	to hostproto.Reporter
}

func (l line) Report(ctx context.Context, r hostproto.Report) error {
	select {
	case <-l.d.died:
		return errDead
	default:
	}
	answer := make(chan error, 1)
	go func() { answer <- l.to.Report(ctx, r) }()
	select {
	case err := <-answer:
		return err
	case <-l.d.died:
		return errDead
	}
}

// namedTx says what a transaction was about.
type namedTx struct {
	store.Tx
	name string
}

func (t *namedTx) InsertOperation(ctx context.Context, op sandbox.Operation) error {
	t.name = "the admission"
	return t.Tx.InsertOperation(ctx, op)
}

func (t *namedTx) UpdateSandbox(ctx context.Context, s *sandbox.Sandbox) error {
	if t.name == "" {
		t.name = "a report"
	}
	return t.Tx.UpdateSandbox(ctx, s)
}

// crashBench is a bench whose server can be killed.
type crashBench struct {
	*bench
	path   string
	doomed *doomed
	graves []func()
	told   map[string]int // how often each event of the sandbox was before the deed
}

func newCrashBench(t *testing.T) *crashBench {
	c := &crashBench{path: filepath.Join(t.TempDir(), "hutch.db")}
	b := &bench{t: t, host: newFakeHost(), log: &logBook{}}
	c.bench = b
	c.begin()
	t.Cleanup(func() {
		for _, g := range c.graves {
			g()
		}
		b.Close()
		b.host.close()
		if err := b.db.Close(); err != nil {
			t.Error(err)
		}
	})
	must0(t, b.EnsureProject(t.Context(), "default"))
	must0(t, b.putTemplate("base", "sha256:base"))
	return c
}

// begin starts a server on the database as it lies on the disk.
func (c *crashBench) begin() {
	c.t.Helper()
	db, err := sqlite.Open(context.Background(), c.path)
	must0(c.t, err)
	c.db = db
	c.doomed = newDoomed(db, c.host)
	c.Control = New(Config{Store: c.doomed, Hosts: map[string]hostproto.Host{"local": c.doomed},
		Limits: Limits{FlushEvery: time.Hour, ReconcileEvery: 20 * time.Millisecond}})
	c.host.reportTo(line{c.doomed, c.Control})
	must0(c.t, c.Start(context.Background()))
}

// bury leaves the dead server behind and starts another.
func (c *crashBench) bury() {
	c.t.Helper()
	old, grave := c.Control, c.doomed.grave
	c.graves = append(c.graves, func() { close(grave); old.Close() })
	must0(c.t, c.db.Close())
	c.begin()
}

// deed is a verb with where it begins and ends.
type deed struct {
	name  string
	from  sandbox.State // "" for nothing
	to    sandbox.State
	verb  sandbox.Verb
	call  func(b *bench, ctx context.Context, key Idempotency) (Result, error)
	forks int
}

var deeds = []deed{
	{"create", "", sandbox.Ready, sandbox.Create, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Create(ctx, me, CreateRequest{Name: "otter", Idempotency: k})
	}, 0},
	{"sleep", sandbox.Ready, sandbox.Sleeping, sandbox.Sleep, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Sleep(ctx, me, "otter", k)
	}, 0},
	{"wake", sandbox.Sleeping, sandbox.Ready, sandbox.Wake, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Wake(ctx, me, "otter", k)
	}, 0},
	{"stop", sandbox.Ready, sandbox.Stopped, sandbox.Stop, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Stop(ctx, me, "otter", k)
	}, 0},
	{"resume", sandbox.Stopped, sandbox.Ready, sandbox.Resume, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Resume(ctx, me, "otter", k)
	}, 0},
	{"fork", sandbox.Ready, sandbox.Ready, sandbox.Fork, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Fork(ctx, me, "otter", ForkRequest{Count: new(int64(2)), Names: []string{"kit"}, Idempotency: k})
	}, 2},
	{"delete", sandbox.Ready, sandbox.Deleted, sandbox.Delete, func(b *bench, ctx context.Context, k Idempotency) (Result, error) {
		return b.Delete(ctx, me, "otter", DeleteRequest{Idempotency: k})
	}, 0},
}

// carry does the deed to its end: its client asks until it gets an answer, with one
// request key, and dies is called after each try that got none.
func (d deed) carry(c *crashBench, id string, again func()) {
	c.t.Helper()
	key := keyed("POST "+d.name, "key", "")
	var r Result
	for tries := 0; ; tries++ {
		got, dead := make(chan error, 1), c.doomed.died
		go func(b bench) {
			res, err := d.call(&b, context.Background(), key)
			if err == nil {
				r = res
			}
			got <- err
		}(*c.bench)
		var err error
		select {
		case err = <-got:
		case <-dead:
			err = errDead
		}
		if err == nil {
			break
		}
		if !errors.Is(err, errDead) || tries > 2 {
			c.t.Fatalf("%s: %v", d.name, err)
		}
		again()
	}
	over := func() bool {
		var op sandbox.Operation
		err := c.db.View(context.Background(), func(ctx context.Context, rd store.Reader) (err error) {
			op, err = rd.Operation(ctx, r.Operation.ID)
			return err
		})
		must0(c.t, err)
		return !op.Status.Active()
	}
	for deadline := time.Now().Add(patience); !over(); time.Sleep(time.Millisecond) {
		select {
		case <-c.doomed.died:
			again()
		default:
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s does not end", d.name)
		}
	}
	if c.doomed.at >= 0 { // the kill right after the last commit, which may be on its way
		<-c.doomed.died
		again()
	}
	c.ended(r.Operation, sandbox.Succeeded)
	if id == "" {
		id = r.Sandbox.ID
	}
	if got := c.row(id); got.State != d.to {
		c.t.Errorf("it is %s", got.State)
	}
	if ids, _ := c.host.operations(d.verb); len(ids) != 1 {
		c.t.Errorf("the host was handed %v", ids)
	}
	list := must(c.List(c.t.Context(), me, ListQuery{}))(c.t)
	want := 1 + d.forks
	if d.to == sandbox.Deleted {
		want = 0
	}
	if len(list.Sandboxes) != want {
		c.t.Errorf("there are %d sandboxes", len(list.Sandboxes))
	}
	for _, v := range list.Sandboxes {
		wantState := d.to
		if v.Sandbox.ID != id {
			wantState = sandbox.Ready // a fork
		}
		if v.Sandbox.State != wantState || v.Operation != nil {
			c.t.Errorf("%s is %s with %+v", v.Sandbox.Name, v.Sandbox.State, v.Operation)
		}
	}
	events := c.events(id)
	for _, typ := range []string{"operation.started", "operation.succeeded"} {
		n := 0
		for _, e := range events {
			if e == typ {
				n++
			}
		}
		if n != c.told[typ]+1 {
			c.t.Errorf("%s is told %d times, and was %d times before: %v", typ, n, c.told[typ], events)
		}
	}
}

// prepare brings a bench to where the deed begins.
func (d deed) prepare(t *testing.T) (c *crashBench, id string) {
	c = newCrashBench(t)
	c.told = map[string]int{}
	if d.from == "" {
		return c, ""
	}
	id = c.reaches("otter", d.from).ID
	for _, e := range c.events(id) {
		c.told[e]++
	}
	return c, id
}

// TestServerDiesAtEachCommit: the server is killed before and after each commit of
// each verb, over a real database. Its client asks again with the same request key, the
// host reports again, and the deed is done once; database and host agree.
func TestServerDiesAtEachCommit(t *testing.T) {
	for first, d := range deeds {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			c, id := d.prepare(t)
			c.doomed.arm(-1, false)
			d.carry(c, id, func() { t.Fatal("it died") })
			c.doomed.mu.Lock()
			names := slices.Clone(c.doomed.names)
			c.doomed.mu.Unlock()
			if len(names) < 2+d.forks {
				t.Fatalf("the commits are %v", names)
			}
			for n, name := range names {
				label := fmt.Sprintf("%s: %s", d.name, name)
				if n > 1 {
					label = fmt.Sprintf("%s no. %d", label, n)
				}
				for _, column := range []string{colBefore, colAfter} {
					t.Run(label+" "+column, func(t *testing.T) {
						c, id := d.prepare(t)
						c.doomed.arm(n, column == colAfter)
						deaths := 0
						d.carry(c, id, func() { deaths++; c.bury() })
						if deaths != 1 {
							t.Fatalf("it died %d times", deaths)
						}
						if !t.Failed() {
							commitTable.Prove(100*first+n, label, column, "done: "+string(d.to))
						}
					})
				}
			}
		})
	}
}
