package control

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// skewed is a clock that a test sets, and that goes on by itself.
type skewed struct {
	mu sync.Mutex
	by time.Duration
}

func (s *skewed) now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Now().Add(s.by)
}

func (s *skewed) pass(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.by += d
}

// timedBench is a bench whose time a test lets pass, and that looks at its timers when it
// is told to.
func timedBench(t *testing.T) (*bench, *skewed) {
	v := &skewed{}
	return newBench(t, func(c *Config) { c.Now, c.Limits.TimersEvery = v.now, time.Hour }), v
}

// tellings gives how many events of a type a sandbox has.
func (b *bench) tellings(id, typ string) (n int) {
	b.t.Helper()
	for _, e := range b.events(id) {
		if e == typ {
			n++
		}
	}
	return n
}

// D3, A8, B6: 14 days after its stop a sandbox is due to be archived. There is no cold
// storage: that is recorded, once, and it stays stopped; a resume ends the waiting.
func TestArchiveWaits_A8_B6(t *testing.T) {
	t.Parallel()
	b, v := timedBench(t)
	s := b.reaches("old", sandbox.Stopped)
	if want := s.StateSince.Add(14 * 24 * time.Hour); !s.ArchiveAt.Equal(want) || !s.DeleteAt.IsZero() {
		t.Fatalf("it is archived at %s, deleted at %s; want %s and never", s.ArchiveAt, s.DeleteAt, want)
	}
	v.pass(14*24*time.Hour - time.Hour)
	b.look(t.Context(), "local")
	if got := b.get(s.ID); got.ArchiveWaits {
		t.Fatal("an hour early it is due")
	}
	v.pass(time.Hour)
	b.look(t.Context(), "local")
	until(t, "the archiving to be due", func() bool { return b.get(s.ID).ArchiveWaits })
	b.restart()
	b.look(t.Context(), "local")
	got := b.get(s.ID)
	if got.State != sandbox.Stopped || !got.ArchiveWaits || !got.ArchiveAt.Equal(s.ArchiveAt) {
		t.Errorf("it is %s, waits %t since %s", got.State, got.ArchiveWaits, got.ArchiveAt)
	}
	if n := b.tellings(s.ID, "archive.waiting"); n != 1 {
		t.Errorf("that it waits is told in %d events", n)
	}
	b.ended(must(b.Resume(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	if got := b.get(s.ID); got.ArchiveWaits || !got.ArchiveAt.IsZero() || !got.TimersFrom.IsZero() {
		t.Errorf("after a resume: %+v", got)
	}
}

// A8: delete_after counts from the stop, never without its user's word; a change counts
// at once, from the stop; the deletion is one operation whose id follows from the due time.
func TestDeleteAfter_A8_D3(t *testing.T) {
	t.Parallel()
	b, v := timedBench(t)
	kept, s := b.reaches("kept", sandbox.Stopped), b.reaches("old", sandbox.Stopped)
	v.pass(400 * 24 * time.Hour)
	b.look(t.Context(), "local")
	until(t, "both to wait", func() bool { return b.get(s.ID).ArchiveWaits && b.get(kept.ID).ArchiveWaits })
	u := must(b.Update(t.Context(), me, s.ID, UpdateRequest{Policy: PolicyRequest{DeleteAfter: seconds(500 * 86400)}}))(t)
	due := s.StateSince.Add(500 * 24 * time.Hour)
	if !u.Sandbox.DeleteAt.Equal(due) {
		t.Errorf("it is deleted at %s, want %s", u.Sandbox.DeleteAt, due)
	}
	v.pass(100*24*time.Hour - time.Hour)
	b.look(t.Context(), "local")
	if got := b.get(s.ID); got.State != sandbox.Stopped {
		t.Fatalf("an hour early it is %s", got.State)
	}
	v.pass(time.Hour)
	b.look(t.Context(), "local")
	until(t, "its deletion", func() bool { return b.row(s.ID).State == sandbox.Deleted })
	ids, _ := b.host.operations(sandbox.Delete)
	if want := []string{sandbox.OperationID(s.ID, s.Generation, sandbox.CauseDelete, due, 0)}; !slices.Equal(ids, want) {
		t.Errorf("the host was given %v, want %v", ids, want)
	}
	if op := must(b.Operation(t.Context(), me, ids[0]))(t); op.Actor != hostActor || op.Status != sandbox.Succeeded {
		t.Errorf("its operation: %+v", op)
	}
	if got := b.get(kept.ID); got.State != sandbox.Stopped || !got.DeleteAt.IsZero() {
		t.Errorf("the other is %s, deleted at %s", got.State, got.DeleteAt)
	}
	// What a shorter time lets fall due in the past falls due now.
	must(b.Update(t.Context(), me, kept.ID, UpdateRequest{Policy: PolicyRequest{DeleteAfter: seconds(60)}}))(t)
	b.look(t.Context(), "local")
	until(t, "the other's deletion", func() bool { return b.row(kept.ID).State == sandbox.Deleted })
}

// A8: what runs, sleeps or has failed has no timer at rest, and an operation at work has
// its end first: a resume that is under way is not overtaken by a deletion.
func TestRestTimersWait_A8(t *testing.T) {
	t.Parallel()
	b, v := timedBench(t)
	for name, state := range map[string]sandbox.State{"runs": sandbox.Ready, "asleep": sandbox.Sleeping, "lost": sandbox.Failed} {
		s := b.reaches(name, state)
		u := must(b.Update(t.Context(), me, s.ID, UpdateRequest{Policy: PolicyRequest{DeleteAfter: seconds(1)}}))(t)
		if !u.Sandbox.DeleteAt.IsZero() || !u.Sandbox.ArchiveAt.IsZero() {
			t.Errorf("one that is %s is deleted at %s", state, u.Sandbox.DeleteAt)
		}
	}
	s := b.reaches("busy", sandbox.Stopped)
	must(b.Update(t.Context(), me, s.ID, UpdateRequest{Policy: PolicyRequest{DeleteAfter: seconds(86400)}}))(t)
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Resume) })
	op := must(b.Resume(t.Context(), me, s.ID, Idempotency{}))(t).Operation
	v.pass(48 * time.Hour)
	b.look(t.Context(), "local")
	until(t, "the host to have the resume", func() bool { ids, _ := b.host.operations(sandbox.Resume); return len(ids) == 1 })
	b.host.proceed(op.ID)
	b.ended(op, sandbox.Succeeded)
	b.look(t.Context(), "local")
	if got := b.get(s.ID); got.State != sandbox.Ready || !got.DeleteAt.IsZero() {
		t.Errorf("it is %s, deleted at %s", got.State, got.DeleteAt)
	}
}

// A7: the timers are in their host's time. A server's wall clock that is set forward by
// a year, with its host's, deletes nothing.
func TestRestTimersAndTheWallClock_A7(t *testing.T) {
	t.Parallel()
	b, v := timedBench(t)
	s := b.reaches("kept", sandbox.Stopped)
	must(b.Update(t.Context(), me, s.ID, UpdateRequest{Policy: PolicyRequest{DeleteAfter: seconds(86400)}}))(t)
	const year = 365 * 24 * time.Hour
	b.Close()
	v.pass(year)
	b.host.script(func(h *fakeHost) { h.info.Ahead = -year })
	b.restart()
	b.look(t.Context(), "local")
	if got := b.get(s.ID); got.State != sandbox.Stopped || got.ArchiveWaits {
		t.Fatalf("after a step of the clock it is %s", got.State)
	}
	v.pass(24 * time.Hour)
	b.look(t.Context(), "local")
	until(t, "its deletion", func() bool { return b.row(s.ID).State == sandbox.Deleted })
}

// A8: two servers on one database, both with the host, double no timer.
func TestTimersOfTwoServers_A8(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	var names []string
	for i := range 20 {
		s := a.reaches(fmt.Sprintf("old-%d", i), sandbox.Stopped)
		names = append(names, s.ID)
	}
	for i, id := range names {
		ask := PolicyRequest{DeleteAfter: seconds(1)}
		if i%2 == 1 {
			ask = PolicyRequest{ArchiveAfter: seconds(1)}
		}
		must(b.Update(t.Context(), me, id, UpdateRequest{Policy: ask}))(t)
	}
	until(t, "all to have been acted on", func() bool {
		for i, id := range names {
			if s := a.row(id); i%2 == 0 && s.State != sandbox.Deleted || i%2 == 1 && !s.ArchiveWaits {
				return false
			}
		}
		return true
	})
	if ids, _ := host.operations(sandbox.Delete); len(ids) != 10 {
		t.Errorf("the host was given %d deletions, want 10", len(ids))
	}
	for i, id := range names {
		typ := []string{"sandbox.deleted", "archive.waiting"}[i%2]
		until(t, "the event of "+id, func() bool { return a.tellings(id, typ) > 0 })
		if n := a.tellings(id, typ); n != 1 {
			t.Errorf("%s is told of in %d events", typ, n)
		}
	}
}

// A3: turns reach the host as leases, all of them each time; one that ended, and those
// of a sandbox whose programs ended, are not renewed. Two servers and a restart know the same.
func TestLeasesReachTheHost_A3(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Limits.LeaseEvery = 5 * time.Millisecond })
	s, other := b.ready("works"), b.ready("other")
	holds := func(want map[string][]string) {
		t.Helper()
		until(t, fmt.Sprintf("the host to be told %v", want), func() bool {
			var last map[string][]string
			b.host.script(func(h *fakeHost) {
				if len(h.turns) > 0 {
					last = h.turns[len(h.turns)-1]
				}
			})
			return last != nil && maps.EqualFunc(last, want, slices.Equal[[]string])
		})
	}
	must0(t, b.BeginTurn(t.Context(), s.ID, "t1"))
	must0(t, b.BeginTurn(t.Context(), s.ID, "t1"))
	must0(t, b.BeginTurn(t.Context(), s.ID, "t2"))
	must0(t, b.BeginTurn(t.Context(), other.ID, "t3"))
	holds(map[string][]string{s.ID: {"t1", "t2"}, other.ID: {"t3"}})
	b.restart()
	b.host.script(func(h *fakeHost) { h.turns = nil })
	holds(map[string][]string{s.ID: {"t1", "t2"}, other.ID: {"t3"}})
	must0(t, b.EndTurn(t.Context(), s.ID, "t1"))
	holds(map[string][]string{s.ID: {"t2"}, other.ID: {"t3"}})
	b.ended(must(b.Sleep(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	holds(map[string][]string{s.ID: {"t2"}, other.ID: {"t3"}})
	b.ended(must(b.Stop(t.Context(), me, s.ID, Idempotency{}))(t).Operation, sandbox.Succeeded)
	holds(map[string][]string{other.ID: {"t3"}})
	wantFault(t, b.BeginTurn(t.Context(), s.ID, "t4"), fault.FailedPrecondition, "state_stopped")
	wantFault(t, b.BeginTurn(t.Context(), "sbx_none", "t4"), fault.NotFound, "")
	// A host that is away hears of the next renewal.
	b.host.script(func(h *fakeHost) { h.away = fault.New(fault.Unavailable, "no route") })
	must0(t, b.BeginTurn(t.Context(), other.ID, "t5"))
	b.host.script(func(h *fakeHost) { h.away = nil })
	holds(map[string][]string{other.ID: {"t3", "t5"}})
}

// A3: a move is an event, with the turn.
func TestMoveIsAnEvent_A3_H1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("works")
	var r hostproto.Report
	b.host.script(func(h *fakeHost) { r = h.fact(s.ID, "", "", "") })
	r.Deadline, r.Turn = r.At.Add(time.Hour), "t1"
	must0(t, b.Report(t.Context(), r))
	for _, e := range must(b.Events(t.Context(), me, EventQuery{Sandbox: s.ID, Limit: 1000}))(t).Events {
		if e.Type == "deadline.moved" {
			if want := fmt.Sprintf(`{"to":%q,"turn":"t1"}`, r.Deadline.Format(time.RFC3339Nano)); string(e.Data) != want {
				t.Errorf("the move is told as %s, want %s", e.Data, want)
			}
			return
		}
	}
	t.Error("the move is no event")
}

var timersFlag = flag.Int("timers", 300, "how many timers TestTimersOnTime has fall due, 10,000 a minute")

// A8: timers that fall due all the time are acted on when they do, none early. How late
// the latest was is logged: `go test ./internal/control -run TimersOnTime -timers 10000 -v`.
func TestTimersOnTime_A8(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	n := *timersFlag
	begin := time.Now().Add(time.Second).UTC().Truncate(time.Millisecond)
	due := map[string]time.Time{}
	for from := 0; from < n; from += 500 {
		must0(t, b.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			for i := from; i < min(from+500, n); i++ {
				s := sandbox.Sandbox{
					ID: fmt.Sprintf("sbx_%026d", i), Project: "default", Name: fmt.Sprintf("old-%d", i), State: sandbox.Stopped, Host: "local",
					Spec: sandbox.Spec{Template: "base", CPUs: 1, Memory: 1 << 30}, Policy: sandbox.DefaultPolicy(), Started: true,
					CreatedAt: begin, UpdatedAt: begin, StateSince: begin, Version: 1, TimersFrom: begin,
					DeleteAt: begin.Add(time.Duration(i) * time.Minute / 10000),
				}
				due[s.ID] = s.DeleteAt
				if err := tx.InsertSandbox(ctx, s); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	var ops []sandbox.Operation
	for time.Since(begin) < time.Duration(n)*time.Minute/10000 { // what follows has its own patience
		time.Sleep(100 * time.Millisecond)
	}
	until(t, "the last to be acted on", func() bool {
		ids, _ := b.host.operations(sandbox.Delete)
		return len(ids) == n
	})
	must0(t, b.db.View(t.Context(), func(ctx context.Context, r store.Reader) (err error) {
		ops, err = r.Operations(ctx, store.OperationFilter{Project: "default"})
		return err
	}))
	if len(ops) != n {
		t.Fatalf("%d operations for %d timers", len(ops), n)
	}
	var latest time.Duration
	for _, op := range ops {
		late := op.CreatedAt.Sub(due[op.Sandbox])
		if late < 0 {
			t.Errorf("%s was early by %s", op.Sandbox, -late)
		}
		latest = max(latest, late)
	}
	t.Logf("%d timers: the latest by %s", n, latest)
}
