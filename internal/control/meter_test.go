package control

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// account reads all of a sandbox's metering at one instant.
func (b *bench) account(id string) (a metering.Account, prices metering.Prices) {
	b.t.Helper()
	must0(b.t, b.db.View(context.Background(), func(ctx context.Context, r store.Reader) (err error) {
		if a.Meter, err = r.Meter(ctx, id); err != nil {
			return err
		}
		if a.Facts, err = r.MeterFacts(ctx, id); err != nil {
			return err
		}
		if prices, err = r.Prices(ctx); err != nil {
			return err
		}
		a.Entries, err = r.MeterEntries(ctx, store.EntryFilter{Project: a.Meter.Project, Sandbox: id})
		return err
	}))
	return a, prices
}

// clean fails unless the sandbox's ledger is what its facts say.
func (b *bench) clean(id string) metering.Account {
	b.t.Helper()
	a, prices := b.account(id)
	now := b.instant()
	for _, f := range a.Facts {
		if f.At.After(now) {
			now = f.At
		}
	}
	for _, difference := range metering.Verify(a, prices, now) {
		b.t.Errorf("B7: %s", difference)
	}
	return a
}

// allClean checks every sandbox's ledger, at the end of every test.
func (b *bench) allClean() {
	b.t.Helper()
	var meters []metering.Meter
	must0(b.t, b.db.View(context.Background(), func(ctx context.Context, r store.Reader) (err error) {
		meters, err = r.Meters(ctx, me.Project)
		return err
	}))
	for _, m := range meters {
		b.clean(m.Sandbox)
	}
}

// life is a sandbox whose host says by hand what happens to it, on a clock by hand.
type life struct {
	*bench
	t0    time.Time
	clock *handClock
	id    string
	seq   int64
	gen   int64
	op    *sandbox.Operation
}

type handClock struct {
	mu sync.Mutex
	at time.Time
}

func (c *handClock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *handClock) set(at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = at
}

func newLife(t *testing.T) *life {
	t.Helper()
	t0 := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	clock := &handClock{at: t0}
	b := newBench(t, func(c *Config) { c.Now = clock.now })
	b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
	l := &life{bench: b, t0: t0, clock: clock}
	r := must(b.Create(t.Context(), me, CreateRequest{Name: "otter"}))(t)
	l.id, l.op = r.Sandbox.ID, r.Operation
	return l
}

// ask asks for a verb so many seconds after the beginning.
func (l *life) ask(seconds int, verb func(context.Context, Actor, string, Idempotency) (Result, error)) {
	l.t.Helper()
	l.clock.set(l.t0.Add(time.Duration(seconds) * time.Second))
	l.op = must(verb(l.t.Context(), me, l.id, Idempotency{}))(l.t).Operation
}

// told reports an event of the operation that was asked for.
func (l *life) told(seconds int, e sandbox.Event) { l.t.Helper(); l.report(seconds, e, nil, false) }

func (l *life) failed(seconds int, kind fault.Kind, begun bool) {
	l.t.Helper()
	l.report(seconds, "", &hostproto.Failure{Kind: string(kind), Message: "no"}, begun)
}

func (l *life) report(seconds int, e sandbox.Event, failure *hostproto.Failure, begun bool) {
	l.t.Helper()
	l.seq++
	if e.Boots() {
		l.gen++
	}
	r := hostproto.Report{Sandbox: l.id, Seq: l.seq, Generation: l.gen, Event: e, Failure: failure, At: l.t0.Add(time.Duration(seconds) * time.Second)}
	if l.op != nil {
		r.Operation, r.Verb, r.Ended = l.op.ID, l.op.Kind, true
	}
	if begun {
		r.Set = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed", Message: "no"}}
	}
	must0(l.t, l.Report(l.t.Context(), r))
	l.op = nil
}

// found reports an end that was found later than the last instant at which it is known to
// have run.
func (l *life) found(seconds, until int, e sandbox.Event) {
	l.t.Helper()
	l.seq++
	must0(l.t, l.Report(l.t.Context(), hostproto.Report{
		Sandbox: l.id, Seq: l.seq, Generation: l.gen, Event: e, At: l.t0.Add(time.Duration(seconds) * time.Second), Until: l.t0.Add(time.Duration(until) * time.Second),
	}))
}

// ledger is what is metered up to an instant, open intervals included.
func (l *life) ledger(seconds int) string {
	l.t.Helper()
	to := l.t0.Add(time.Duration(seconds) * time.Second)
	l.clock.set(to)
	a := l.clean(l.id)
	_, prices := l.account(l.id)
	var out []string
	for _, e := range append(a.Entries, a.Meter.Open(to, prices)...) {
		out = append(out, fmt.Sprintf("%s %v-%v %s", e.Reason, e.From.Sub(l.t0).Seconds(), e.To.Sub(l.t0).Seconds(), e.End))
	}
	return strings.Join(out, ", ")
}

func TestWhatIsMetered(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		live func(*life)
		want string // at 1000
	}{
		{"B1 a boot counts from its acceptance", func(l *life) { l.told(10, sandbox.EventCreated) }, "starting 0-10 ready, running 10-1000 open"},
		{"B1 a boot that is not ready does not count", func(*life) {}, ""},
		{"S8 a restart of the host that is found later", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.found(500, 60, sandbox.EventHostRestarted)
		}, "starting 0-10 ready, running 10-60 host_restarted"},
		{"S8 one that nothing is known of since its boot", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.found(500, 5, sandbox.EventHostRestarted)
		}, "starting 0-10 ready"},
		{"D8 a host that is lost", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.told(25, sandbox.EventSlept)
			l.found(500, 200, sandbox.EventHostLost)
		}, "starting 0-10 ready, running 10-20 sleep, sleeping 25-200 host_lost"},
		{"S8 a host that speaks of a time to come", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.found(500, 900, sandbox.EventHostRestarted)
		}, "starting 0-10 ready, running 10-500 host_restarted"},
		{"B1 a create that fails costs nothing", func(l *life) {
			l.report(10, sandbox.EventCreateFailed, &hostproto.Failure{Kind: string(fault.Internal), Message: "no"}, false)
		}, ""},
		{"B1 a resume that fails costs nothing, the next does", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Stop)
			l.told(25, sandbox.EventStopped)
			l.ask(30, l.Resume)
			l.failed(40, fault.Internal, false)
			l.ask(50, l.Resume)
			l.told(55, sandbox.EventResumed)
		}, "starting 0-10 ready, running 10-20 stop, starting 50-55 ready, running 55-1000 open"},
		{"B2 a save is not metered, a wake leaves no gap", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.told(30, sandbox.EventSlept)
			l.ask(40, l.Wake)
			l.told(45, sandbox.EventWoken)
		}, "starting 0-10 ready, running 10-20 sleep, sleeping 30-45 woken, running 45-1000 open"},
		{"B3 an accepted stop is the end", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Stop)
		}, "starting 0-10 ready, running 10-20 open"},
		{"B3 an accepted deletion is the end", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.clock.set(l.t0.Add(20 * time.Second))
			l.op = must(l.Delete(l.t.Context(), me, l.id, DeleteRequest{}))(l.t).Operation
			l.told(30, sandbox.EventDeleted)
		}, "starting 0-10 ready, running 10-20 delete"},
		{"B5 a save that failed pauses the meter", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.failed(30, fault.NoCapacity, true)
		}, "starting 0-10 ready, running 10-20 open"},
		{"B5 and a retry ends the pause", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.failed(30, fault.NoCapacity, true)
			l.ask(40, l.Sleep)
			l.told(50, sandbox.EventSlept)
		}, "starting 0-10 ready, running 10-20 sleep, sleeping 50-1000 open"},
		{"Z10 a stop without room pauses it", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Stop)
			l.failed(30, fault.NoCapacity, true)
		}, "starting 0-10 ready, running 10-20 open"},
		{"Z10 what the host does not take has paused nothing but itself", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Stop)
			l.failed(30, fault.NotFound, false)
		}, "starting 0-10 ready, running 10-20 stop, running 30-1000 open"},
		{"Z10 what the guest causes does not", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.failed(30, fault.FailedPrecondition, false)
		}, "starting 0-10 ready, running 10-1000 open"},
		{"B2 a cancelled save is not metered itself", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.failed(30, fault.Cancelled, false)
		}, "starting 0-10 ready, running 10-20 sleep, running 30-1000 open"},
		{"a crash is the end", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.told(20, sandbox.EventCrashed)
		}, "starting 0-10 ready, running 10-20 crashed"},
		{"a crash during a stop is told later and was later", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Stop)
			l.report(30, sandbox.EventCrashed, &hostproto.Failure{Kind: string(fault.Conflict), Message: "no", Reason: reasonOvertaken}, false)
		}, "starting 0-10 ready, running 10-20 stop"},
		{"a reboot goes on", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.told(20, sandbox.EventRebooted)
		}, "starting 0-10 ready, running 10-20 rebooted, running 20-1000 open"},
		{"a reboot overtakes a sleep", func(l *life) {
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.report(30, sandbox.EventRebooted, &hostproto.Failure{Kind: string(fault.Conflict), Message: "no", Reason: reasonOvertaken}, false)
		}, "starting 0-10 ready, running 10-20 sleep, running 30-1000 open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			c.live(l)
			if got := l.ledger(1000); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestEntriesAreToldOf_B7: each entry names the event of the transition that completed
// it, and there is an event of each entry.
func TestEntriesAreToldOf_B7(t *testing.T) {
	t.Parallel()
	l := newLife(t)
	l.told(10, sandbox.EventCreated)
	events := must(l.Events(t.Context(), me, EventQuery{Sandbox: l.id, Limit: 100}))(t).Events
	entries := l.clean(l.id).Entries
	if len(entries) != 1 {
		t.Fatalf("entries: %+v", entries)
	}
	told, cause := 0, ""
	for _, e := range events {
		if e.ID == "" {
			t.Errorf("an event without an id: %+v", e)
		}
		if e.ID == entries[0].Event {
			cause = e.Type
		}
		if e.Type == "meter.entry" {
			told++
			if !strings.Contains(string(e.Data), entries[0].Event) {
				t.Errorf("the entry's event says %s", e.Data)
			}
		}
	}
	if told != 1 || cause != "sandbox.ready" {
		t.Errorf("%d events of entries; the entry is of %q, want sandbox.ready", told, cause)
	}
}

// TestLostReplies_V1: a request whose reply is lost a thousand times makes one charge.
func TestLostReplies_V1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	key := Idempotency{Route: "POST /v1/sandboxes", Key: "once", BodyHash: []byte("hash")}
	first := must(b.Create(t.Context(), me, CreateRequest{Name: "otter", Idempotency: key}))(t)
	b.ended(first.Operation, sandbox.Succeeded)
	for range 999 {
		if r := must(b.Create(t.Context(), me, CreateRequest{Name: "otter", Idempotency: key}))(t); r.Sandbox.ID != first.Sandbox.ID {
			t.Fatalf("a repeat made %s", r.Sandbox.ID)
		}
	}
	boots := 0
	for _, f := range b.clean(first.Sandbox.ID).Facts {
		if f.Kind == metering.Assigned {
			boots++
		}
	}
	var meters []metering.Meter
	must0(t, b.db.View(t.Context(), func(ctx context.Context, r store.Reader) (err error) {
		meters, err = r.Meters(ctx, "default")
		return err
	}))
	if boots != 1 || len(meters) != 1 {
		t.Errorf("%d boots of %d sandboxes are metered, want one of one", boots, len(meters))
	}
}

// TestWhatRanBefore: what runs when a server first meters is metered from its start on,
// once, and what is at work on it counts.
func TestWhatRanBefore(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.Close()
	b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
	at := time.Now().UTC().Add(-time.Hour).Truncate(time.Millisecond)
	old := func(id string, state sandbox.State, verb sandbox.Verb) string {
		id = "sbx_" + id
		must0(t, b.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			s := sandbox.Sandbox{
				ID: id, Project: "default", Name: id[4:], State: state, Host: "local", Generation: 3, Started: true,
				Spec: sandbox.Spec{Template: "base", CPUs: 2, Memory: 1 << 30, Disk: 4e9}, Labels: map[string]string{},
				CreatedAt: at, UpdatedAt: at, StateSince: at, Version: 1,
			}
			if err := tx.InsertSandbox(ctx, s); err != nil || verb == "" {
				return err
			}
			return tx.InsertOperation(ctx, sandbox.Operation{
				ID: "op_" + id, Project: "default", Sandbox: id, Kind: verb, Status: sandbox.Pending, Generation: 3, Actor: "key", CreatedAt: at, Version: 1,
			})
		}))
		return id
	}
	ids := map[string]string{ // to the kinds of their facts
		old("runs", sandbox.Ready, ""):                "found",
		old("sleeps", sandbox.Sleeping, ""):           "found",
		old("stops", sandbox.Ready, sandbox.Stop):     "found halted",
		old("boots", sandbox.Stopped, sandbox.Resume): "assigned",
	}
	stopped := old("stopped", sandbox.Stopped, "")
	for range 2 {
		b.restart()
		for id, want := range ids {
			var got []string
			for _, f := range b.clean(id).Facts {
				got = append(got, string(f.Kind))
				if f.At.Before(at.Add(time.Minute)) {
					t.Errorf("%s: %s at %s, before there was a meter", id, f.Kind, f.At)
				}
			}
			if strings.Join(got, " ") != want {
				t.Errorf("%s: %v, want %s", id, got, want)
			}
		}
	}
	err := b.db.View(t.Context(), func(ctx context.Context, r store.Reader) error { _, err := r.Meter(ctx, stopped); return err })
	wantFault(t, err, fault.NotFound, "")
}

// TestRandomLives_B7: whatever is asked, whatever fails and whatever befalls, the ledger
// is what the facts say, a stop is not metered past its beginning, and what never became
// ready costs nothing.
func TestRandomLives_B7(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			dice := rand.New(rand.NewPCG(seed, 7))
			b := newBench(t)
			pay := seed%2 == 1 // under a budget that is reached, raised and lowered
			must0(t, b.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
				p, err := metering.ParsePrice(2, time.Now().Add(-time.Hour), "1", "0.5", "0.012")
				if err != nil {
					return err
				}
				return tx.AddPrice(ctx, p)
			}))
			var mu sync.Mutex // the host fails from its own goroutines
			kinds := []fault.Kind{fault.Internal, fault.NoCapacity, fault.FailedPrecondition, fault.Cancelled, fault.Unavailable}
			b.host.script(func(h *fakeHost) {
				h.fail = func(c hostproto.Command) *hostproto.Failure {
					mu.Lock()
					defer mu.Unlock()
					if c.Verb == sandbox.Delete || dice.IntN(3) > 0 {
						return nil
					}
					return &hostproto.Failure{Kind: string(kinds[dice.IntN(len(kinds))]), Message: "by chance"}
				}
			})
			roll := func(n int) int { mu.Lock(); defer mu.Unlock(); return dice.IntN(n) }
			var ids []string
			for i := range 4 {
				r := must(b.Create(t.Context(), me, CreateRequest{Name: fmt.Sprintf("otter-%d", i)}))(t)
				ids = append(ids, r.Sandbox.ID)
			}
			befalls := []sandbox.Event{sandbox.EventCrashed, sandbox.EventRebooted, sandbox.EventExited, sandbox.EventOOMKilled, sandbox.EventHostLost}
			for range 60 {
				id := ids[roll(len(ids))]
				var r Result
				var err error
				switch roll(9) {
				case 8:
					if budget := fmt.Sprintf("0.%02d", roll(100)); pay {
						b.edit("default", ProjectSettings{Budget: &budget})
					}
				case 0:
					r, err = b.Sleep(t.Context(), me, id, Idempotency{})
				case 1:
					r, err = b.Wake(t.Context(), me, id, Idempotency{})
				case 2:
					r, err = b.Stop(t.Context(), me, id, Idempotency{})
				case 3, 4:
					r, err = b.Resume(t.Context(), me, id, Idempotency{})
				case 5:
					r, err = b.Fork(t.Context(), me, id, ForkRequest{Mode: sandbox.ForkDisk})
					if err == nil && len(ids) < 12 {
						ids = append(ids, r.Children[0].Sandbox.ID)
					}
				case 6:
					err = b.host.befall(id, befalls[roll(len(befalls))])
				case 7:
					if roll(5) == 0 {
						r, err = b.Delete(t.Context(), me, id, DeleteRequest{})
					}
				}
				if err == nil && r.Operation != nil && roll(2) == 0 {
					must(b.Wait(t.Context(), me, r.Operation.ID, patience))(t)
				}
			}
			until(t, "all operations end", func() bool {
				var active []sandbox.Operation
				must0(t, b.db.View(t.Context(), func(ctx context.Context, r store.Reader) (err error) {
					active, err = r.ActiveOperations(ctx)
					return err
				}))
				return len(active) == 0
			})
			b.spentIsKept()
			for _, id := range ids {
				a := b.clean(id)
				s := b.row(id)
				if !s.Started && len(a.Entries) > 0 {
					t.Errorf("B1: %s never was ready and is charged for %+v", id, a.Entries)
				}
				if !slices.Contains([]sandbox.State{sandbox.Ready, sandbox.Sleeping}, s.State) && a.Meter.Reason != "" {
					t.Errorf("%s is %s and is metered as %s", id, s.State, a.Meter.Reason)
				}
			}
		})
	}
}
