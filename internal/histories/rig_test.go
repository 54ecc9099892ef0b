package histories

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fakehost"
	"github.com/hutchrun/hutch/internal/fakehost/fakeserver"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
)

func TestMain(m *testing.M) {
	fakeserver.Main()
	os.Exit(m.Run())
}

// patience is how long anything may take on a machine that has much else to do.
const patience = 2 * time.Minute

var me = control.Actor{Project: fakeserver.Project, KeyID: "key_test", Scopes: control.ScopeOperator}

// newSeed gives the seed of a test: another one in each run, or HUTCH_SEED.
func newSeed(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("HUTCH_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("HUTCH_SEED=%d", seed)
	return seed
}

// diceOf gives the random numbers of one client.
func diceOf(seed uint64, who ...any) *rand.Rand {
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, seed)
	fmt.Fprint(h, who...)
	return rand.New(rand.NewPCG(seed, h.Sum64()))
}

// quickDir is a directory in memory where the machine has one: what a power cut leaves is
// no matter here.
func quickDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "hutch-histories-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// databases runs a test on each.
func databases(t *testing.T, f func(t *testing.T, url string)) {
	t.Run("sqlite", func(t *testing.T) { f(t, "") })
	t.Run("postgres", func(t *testing.T) { f(t, pgtest.URL(t)) })
}

// rig is a machine and what serves it, in this process: on PostgreSQL two servers, one
// of which has the machine.
type rig struct {
	t       *testing.T
	dir     string
	servers []*fakeserver.Server
}

func newRig(t *testing.T, url string) *rig {
	t.Helper()
	r := &rig{t: t, dir: quickDir(t)}
	for i := range 2 {
		if i == 1 && url == "" {
			break
		}
		s, err := fakeserver.Start(t.Context(), fakeserver.Config{Dir: r.dir, Database: url, NoHost: i == 1, Log: filepath.Join(r.dir, fmt.Sprint("log-", i))})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Close)
		r.servers = append(r.servers, s)
	}
	return r
}

func (r *rig) server(dice *rand.Rand) *control.Control {
	return r.servers[dice.IntN(len(r.servers))].Control
}

// ready makes sandboxes, which are ready.
func (r *rig) ready(n int) []string {
	r.t.Helper()
	ids := make([]string, n)
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() {
			res, err := r.servers[0].Control.Create(r.t.Context(), me, control.CreateRequest{})
			if err != nil {
				r.t.Error(err)
				return
			}
			ids[i] = res.Sandbox.ID
			if a := r.ended(r.servers[0].Control, res); a.word != ok {
				r.t.Errorf("a creation: %+v", a)
			}
		})
	}
	all.Wait()
	if r.t.Failed() {
		r.t.FailNow()
	}
	return ids
}

// do carries out a call at the real system.
func (r *rig) do(dice *rand.Rand, c call) answer {
	at := r.server(dice)
	ctx := r.t.Context()
	var res control.Result
	var err error
	switch c.verb {
	case look:
		v, err := at.Get(ctx, me, c.sandbox)
		if err != nil {
			return r.failed(c, err).as(ok)
		}
		return answer{word: ok, state: v.Sandbox.State, generation: v.Sandbox.Generation}
	case put, get, write, read:
		return r.command(ctx, c)
	case string(sandbox.Sleep):
		res, err = at.Sleep(ctx, me, c.sandbox, control.Idempotency{})
	case string(sandbox.Wake):
		res, err = at.Wake(ctx, me, c.sandbox, control.Idempotency{})
	case string(sandbox.Stop):
		res, err = at.Stop(ctx, me, c.sandbox, control.Idempotency{})
	case string(sandbox.Resume):
		res, err = at.Resume(ctx, me, c.sandbox, control.Idempotency{})
	case string(sandbox.Delete):
		res, err = at.Delete(ctx, me, c.sandbox, control.DeleteRequest{Permanent: true})
	case string(sandbox.Fork):
		if res, err = at.Fork(ctx, me, c.sandbox, control.ForkRequest{Mode: c.mode}); err == nil {
			return r.forked(ctx, at, res)
		}
	}
	if err != nil {
		return r.failed(c, err)
	}
	return r.ended(at, res)
}

// as gives a refusal another word, where it names a state.
func (a answer) as(w word) answer {
	if a.word == refused {
		a.word = w
	}
	return a
}

// failed says what an error tells of the sandbox. Errors that no caller should see fail
// the test.
func (r *rig) failed(c call, err error) answer {
	f := fault.Of(err)
	switch {
	case f.Kind == fault.NotFound:
		return answer{word: refused, state: sandbox.Deleted}
	case f.Kind == fault.FailedPrecondition && len(f.Reason) > len("state_") && f.Reason[:len("state_")] == "state_":
		return answer{word: refused, state: sandbox.State(f.Reason[len("state_"):])}
	case f.Kind == fault.Conflict && len(f.Reason) > 3 && f.Reason[:3] == "op_":
		return answer{word: nothing}
	}
	r.t.Errorf("%s of %s: %v (%s, %s)", c.verb, c.sandbox, err, f.Kind, f.Reason)
	return answer{word: unknown}
}

// ended waits for the end of what a verb has begun.
func (r *rig) ended(at *control.Control, res control.Result) answer {
	if res.Operation == nil {
		return answer{word: ok}
	}
	op, err := at.Wait(r.t.Context(), me, res.Operation.ID, patience)
	switch {
	case err != nil:
		r.t.Errorf("wait for %s: %v", res.Operation.ID, err)
	case op.Status == sandbox.Succeeded:
		return answer{word: ok}
	case op.Status == sandbox.Cancelled:
		// By a deletion, which does not wait for the host: what had been committed there
		// is seen until the sandbox is gone.
		return answer{word: unknown}
	case op.Error != nil && op.Error.Reason == "overtaken":
		return answer{word: nothing}
	default:
		r.t.Errorf("%s %s is %s (%+v)", op.Kind, op.ID, op.Status, op.Error)
	}
	return answer{word: unknown}
}

// forked waits for a fork and looks into the copy, which then goes away.
func (r *rig) forked(ctx context.Context, at *control.Control, res control.Result) answer {
	a := r.ended(at, res)
	child := res.Children[0]
	born := r.ended(at, control.Result{Operation: child.Operation})
	if a.word == ok && born.word == ok {
		cell := r.command(ctx, call{sandbox: child.Sandbox.ID, verb: get})
		disk := r.command(ctx, call{sandbox: child.Sandbox.ID, verb: read})
		a.cell, a.disk = cell.cell, disk.disk
		if cell.word != ok || disk.word != ok {
			r.t.Errorf("a copy does not answer: %+v, %+v", cell, disk)
		}
	} else if a.word == ok {
		r.t.Errorf("a fork succeeded and its copy is not born: %+v", born)
	}
	if gone, err := at.Delete(ctx, me, child.Sandbox.ID, control.DeleteRequest{Permanent: true}); err != nil {
		r.t.Errorf("the deletion of a copy: %v", err)
	} else if end := r.ended(at, gone); end.word != ok {
		r.t.Errorf("the deletion of a copy: %+v", end)
	}
	return a
}

var commands = map[string]string{put: fakehost.Put, get: fakehost.Get, write: fakehost.Write, read: fakehost.Read}

// command runs a command in a sandbox, which wakes it.
func (r *rig) command(ctx context.Context, c call) answer {
	access, err := r.servers[0].Control.Guest(ctx, me, c.sandbox, hostproto.UseCommand)
	if err != nil {
		return r.failed(c, err)
	}
	defer access.Guest.Done()
	client := guestproto.NewClient(access.Guest.Dial, access.Guest.Token)
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	stream, err := client.Commands.Start(ctx, &guestproto.StartRequest{Args: []string{commands[c.verb], c.value}})
	if err != nil {
		return answer{word: unknown}
	}
	defer stream.Close()
	var out string
	for {
		event, err := stream.Receive()
		if err != nil {
			if err != io.EOF && ctx.Err() != nil {
				r.t.Errorf("a command in %s hangs: %v", c.sandbox, err)
			}
			return answer{word: unknown} // it broke at a sleep, a stop or a deletion
		}
		out += string(event.GetOutput().GetData())
		if event.GetExit() != nil {
			break
		}
	}
	if c.verb == get {
		return answer{word: ok, cell: out}
	}
	if c.verb == read {
		return answer{word: ok, disk: out}
	}
	return answer{word: ok}
}

// record carries out a call and writes it down. A command may wake the sandbox on its
// way, as often as something puts it to sleep again.
func (r *rig) record(h *history, client int, dice *rand.Rand, c call) answer {
	from := time.Since(h.began).Nanoseconds()
	a := h.record(client, c, func() answer { return r.do(dice, c) })
	if _, is := commands[c.verb]; is {
		to := time.Since(h.began).Nanoseconds()
		for range 2 {
			h.add(client, call{sandbox: c.sandbox, verb: stir}, answer{word: ok}, from, to)
		}
	}
	return a
}

// empty checks that nothing of deleted sandboxes is left on the machine.
func (r *rig) empty() {
	r.t.Helper()
	h, err := fakehost.Look(filepath.Join(r.dir, "host"))
	for end := time.Now().Add(patience); err == nil && !bare(h) && time.Now().Before(end); h, err = fakehost.Look(filepath.Join(r.dir, "host")) {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil || !bare(h) {
		r.t.Errorf("the machine has something of sandboxes that are gone: %+v, %v", h, err)
	}
}

func bare(h fakehost.Holdings) bool {
	return len(h.Running)+len(h.Mounted)+len(h.Disks)+len(h.Saves)+len(h.Networks)+len(h.Journals)+len(h.Unfinished) == 0
}

// honest checks the ledger: every figure is what happened (B7).
func (r *rig) honest() {
	r.t.Helper()
	bill, err := r.servers[0].Control.Bill(r.t.Context(), me, control.BillQuery{Verify: true})
	if err != nil || !bill.Verified || len(bill.Differences) > 0 {
		r.t.Errorf("the ledger: %v, verified %v: %q", err, bill.Verified, bill.Differences)
	}
}
