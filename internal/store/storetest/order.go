package storetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// patience is how long a test waits for what has to happen.
const patience = 30 * time.Second

func rollback(t *testing.T, b *bundle) {
	s := b.sandbox("kept")
	b.insert(t, s)
	write := func(ctx context.Context, tx store.Tx) {
		changed := s
		changed.State, changed.Labels = sandbox.Stopped, map[string]string{"a": "b"}
		for _, err := range []error{
			tx.InsertSandbox(ctx, b.sandbox("lost")), tx.UpdateSandbox(ctx, &changed),
			tx.InsertOperation(ctx, b.operation(s.ID, sandbox.Stop)), tx.AddEvent(ctx, b.event("lost")),
			tx.PutRequest(ctx, store.Request{Project: "p1", Route: "r", Key: "lost", CreatedAt: b.at}),
		} {
			if err != nil {
				t.Errorf("write: %v", err)
			}
		}
	}
	check := func(how string) {
		t.Helper()
		if got := b.list(t, store.SandboxFilter{}); len(got) != 1 || got[0] != "kept" {
			t.Errorf("%s left %v", how, got)
		}
		if got := b.get(t, s.ID); !reflect.DeepEqual(got, s) {
			t.Errorf("%s changed a row to %+v", how, got)
		}
		if got := b.events(t, store.EventFilter{}); len(got) != 0 {
			t.Errorf("%s left events %+v", how, got)
		}
		b.view(t, func(ctx context.Context, r store.Reader) error {
			ops, err := r.ActiveOperations(ctx)
			if len(ops) != 0 {
				t.Errorf("%s left operations %+v", how, ops)
			}
			_, none := r.Request(ctx, "p1", "r", "lost")
			is(t, none, fault.NotFound, "")
			return err
		})
	}
	err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { write(ctx, tx); return errTest })
	if !errors.Is(err, errTest) {
		t.Errorf("the function's error became %v", err)
	}
	check("an error")

	ctx, cancel := context.WithCancel(t.Context())
	err = b.s.Update(ctx, func(ctx context.Context, tx store.Tx) error { write(ctx, tx); cancel(); return nil })
	is(t, err, fault.Cancelled, "")
	check("a caller that went away") // V3

	is(t, b.s.Update(ctx, func(context.Context, store.Tx) error { t.Error("it ran"); return nil }), fault.Cancelled, "")

	func() {
		defer func() { _ = recover() }()
		_ = b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { write(ctx, tx); panic("the test panics") })
	}()
	check("a panic")

	// Events may get their numbers late: those that were lost would lie before this one.
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, b.event("marker")) })
	b.numbered(t, 1)
	if got := types(b.events(t, store.EventFilter{})); got != "marker" {
		t.Errorf("events that were never committed: %q", got)
	}
}

func snapshot(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	b.view(t, func(ctx context.Context, r store.Reader) error {
		before, err := r.Sandbox(ctx, s.ID)
		if err != nil {
			return err
		}
		b.update(t, func(ctx context.Context, tx store.Tx) error {
			s.State = sandbox.Stopped
			return errorsOf(tx.UpdateSandbox(ctx, &s), tx.InsertOperation(ctx, b.operation(s.ID, sandbox.Stop)))
		})
		after, err := r.Sandbox(ctx, s.ID)
		if err != nil {
			return err
		}
		op, err := r.ActiveOperation(ctx, s.ID)
		if after.State != before.State || op != nil {
			t.Errorf("a view saw half of a commit: %s, then %s with %v", before.State, after.State, op)
		}
		return err
	})
	if got := b.get(t, s.ID); got.State != sandbox.Stopped {
		t.Errorf("the next view sees %s", got.State)
	}
}

func nested(t *testing.T, b *bundle) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := b.s.Update(ctx, func(ctx context.Context, _ store.Tx) error {
		is(t, b.s.Update(ctx, func(context.Context, store.Tx) error { return nil }), fault.Internal, "")
		is(t, b.s.View(ctx, func(context.Context, store.Reader) error { return nil }), fault.Internal, "")
		_, err := b.s.Events(ctx, store.EventFilter{})
		is(t, err, fault.Internal, "")
		return nil
	})
	if err != nil {
		t.Errorf("the outer transaction: %v", err)
	}
}

func slowAndFast(t *testing.T, b *bundle) {
	added, release := make(chan struct{}), make(chan struct{})
	var both sync.WaitGroup
	both.Go(func() {
		err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			err := tx.AddEvent(ctx, b.event("slow"))
			close(added)
			<-release
			return err
		})
		if err != nil {
			t.Errorf("slow: %v", err)
		}
	})
	<-added
	started, done := make(chan struct{}), make(chan struct{})
	both.Go(func() {
		defer close(done)
		close(started)
		err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, b.event("fast")) })
		if err != nil {
			t.Errorf("fast: %v", err)
		}
	})
	<-started
	// The reader follows from what it has seen, before and after the slow one commits.
	var seen []store.Event
	follow := func() {
		var after int64
		if len(seen) > 0 {
			after = seen[len(seen)-1].Seq
		}
		seen = append(seen, b.events(t, store.EventFilter{After: after})...)
	}
	if b.Concurrent {
		<-done
		b.numbered(t, 1)
	}
	follow()
	if b.Concurrent && types(seen) != "fast" {
		t.Errorf("while the slow one is open a reader saw %q, want the fast one", types(seen))
	}
	close(release)
	both.Wait()
	b.numbered(t, 2)
	follow()
	if len(seen) != 2 {
		t.Fatalf("a reader between two transactions saw %+v, want both events", seen)
	}
	if seen[0].Seq != 1 || seen[1].Seq != 2 || seen[0].Type == seen[1].Type {
		t.Errorf("a reader between two transactions saw %+v", seen)
	}
}

func eightWriters(t *testing.T, b *bundle) {
	const writers, each = 8, 20
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := range each {
				err := b.s.Update(ctx, func(ctx context.Context, tx store.Tx) error {
					for part := range 2 {
						if err := tx.AddEvent(ctx, b.event(fmt.Sprintf("%d.%d.%d", w, i, part))); err != nil {
							return err
						}
					}
					if i%5 == 4 {
						return errTest // its events take no number
					}
					return nil
				})
				if err != nil && !errors.Is(err, errTest) {
					t.Errorf("writer %d: %v", w, err)
				}
			}
		})
	}
	const want = writers * each * 4 / 5 * 2
	var seen []store.Event
	for len(seen) < want && ctx.Err() == nil && !t.Failed() {
		next := b.s.Committed()
		got := b.events(t, store.EventFilter{After: int64(len(seen)), Limit: 7})
		for _, e := range got {
			seen = append(seen, e)
			if e.Seq != int64(len(seen)) {
				t.Fatalf("event %d came as number %d: a gap or a repeat", len(seen), e.Seq)
			}
		}
		if len(got) == 0 {
			select {
			case <-next:
			case <-ctx.Done():
				t.Fatalf("%d of %d events came", len(seen), want)
			}
		}
	}
	all.Wait()
	last := map[string]int{}
	for i := 0; i+1 < len(seen); i += 2 {
		first, second := strings.Split(seen[i].Type, "."), strings.Split(seen[i+1].Type, ".")
		if first[0] != second[0] || first[1] != second[1] || first[2] != "0" || second[2] != "1" {
			t.Fatalf("the events of one transaction are torn: %s, %s", seen[i].Type, seen[i+1].Type)
		}
		var turn int
		fmt.Sscan(first[1], &turn)
		if turn < last[first[0]] {
			t.Fatalf("writer %s: %d came after %d", first[0], turn, last[first[0]])
		}
		last[first[0]] = turn
	}
	if n, err := b.s.LastEvent(ctx); n != want || err != nil {
		t.Errorf("the last event is %d, %v, want %d", n, err, want)
	}
}

func committed(t *testing.T, b *bundle) {
	closed := func(ch <-chan struct{}) bool {
		select {
		case <-ch:
			return true
		default:
			return false
		}
	}
	ch := b.s.Committed()
	b.insert(t, b.sandbox("quiet"))
	_ = b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { _ = tx.AddEvent(ctx, b.event("lost")); return errTest })
	if closed(ch) {
		t.Error("a commit without events, or none at all, was announced")
	}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, b.event("one")) })
	select {
	case <-ch:
	case <-time.After(patience):
		t.Error("a commit with events was not announced")
	}
	if closed(b.s.Committed()) {
		t.Error("the next channel is closed already")
	}
	want := b.event("one")
	want.Seq = 1
	if got := b.events(t, store.EventFilter{}); len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("read %+v, wrote %+v", got, want)
	}
}

func pruned(t *testing.T, b *bundle) {
	for i := range 10 {
		b.update(t, func(ctx context.Context, tx store.Tx) error {
			e := b.event(fmt.Sprint(i + 1))
			e.At = b.at.Add(time.Duration(i) * time.Hour)
			if i == 2 {
				e.At = b.at.Add(20 * time.Hour) // a clock that was ahead for a moment
			}
			if i%2 == 1 {
				e.Project, e.Sandbox = "p2", "sbx_y"
			}
			return tx.AddEvent(ctx, e)
		})
	}
	b.numbered(t, 10)
	prune := func(before time.Time) {
		b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PruneHistory(ctx, before) })
	}
	for _, c := range []struct {
		f    store.EventFilter
		want string
	}{
		{store.EventFilter{}, "1 2 3 4 5 6 7 8 9 10"}, {store.EventFilter{After: 8}, "9 10"}, {store.EventFilter{After: 10}, ""},
		{store.EventFilter{Project: "p2", Limit: 2}, "2 4"}, {store.EventFilter{Sandbox: "sbx_x", After: 5}, "7 9"},
	} {
		if got := types(b.events(t, c.f)); got != c.want {
			t.Errorf("%+v: %q, want %q", c.f, got, c.want)
		}
	}
	prune(b.at.Add(5 * time.Hour))
	// 3 looks younger than it is: nothing after it goes, so that what is kept has no holes.
	if got := types(b.events(t, store.EventFilter{})); got != "3 4 5 6 7 8 9 10" {
		t.Errorf("kept %q", got)
	}
	_, err := b.s.Events(t.Context(), store.EventFilter{After: 1})
	is(t, err, fault.FailedPrecondition, store.ReasonPruned)
	if !strings.Contains(fault.Of(err).Message, "oldest is 3") {
		t.Errorf("%v does not name the oldest", err)
	}
	if got := types(b.events(t, store.EventFilter{After: 2})); got != "3 4 5 6 7 8 9 10" {
		t.Errorf("after the last that is gone: %q", got)
	}
	prune(b.at.Add(100 * time.Hour))
	if got := b.events(t, store.EventFilter{}); len(got) != 0 {
		t.Errorf("kept %+v", got)
	}
	if got := b.events(t, store.EventFilter{After: 10}); len(got) != 0 {
		t.Errorf("after the newest: %+v", got)
	}
	_, err = b.s.Events(t.Context(), store.EventFilter{After: 9})
	is(t, err, fault.FailedPrecondition, store.ReasonPruned)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, b.event("11")) })
	b.numbered(t, 11)
	if got := b.events(t, store.EventFilter{After: 10}); len(got) != 1 || got[0].Seq != 11 {
		t.Errorf("after all was pruned, the next is %+v, want number 11", got)
	}
	pruneOperations(t, b)
}

func pruneOperations(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	old, running := b.operation("", sandbox.BuildTemplate), b.operation(s.ID, sandbox.Sleep)
	old.Status, old.EndedAt = sandbox.Succeeded, b.at
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return errorsOf(tx.InsertOperation(ctx, old), tx.InsertOperation(ctx, running), tx.PruneHistory(ctx, b.at.Add(time.Hour)))
	})
	b.view(t, func(ctx context.Context, r store.Reader) error {
		_, err := r.Operation(ctx, old.ID)
		is(t, err, fault.NotFound, "")
		_, err = r.Operation(ctx, running.ID)
		return err
	})
}

func types(events []store.Event) string {
	var out []string
	for _, e := range events {
		out = append(out, e.Type)
	}
	return strings.Join(out, " ")
}

func reopen(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	s.Labels = map[string]string{"k": "v"}
	op := b.operation(s.ID, sandbox.Create)
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return errorsOf(tx.InsertSandbox(ctx, s), tx.InsertOperation(ctx, op), tx.AddEvent(ctx, b.event("one")))
	})
	if err := b.s.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	b.s = b.Open(t, b.dir)
	if got := b.get(t, s.ID); !reflect.DeepEqual(got, s) {
		t.Errorf("after opening again: %+v, want %+v", got, s)
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		got, err := r.ActiveOperation(ctx, s.ID)
		if got == nil || got.ID != op.ID {
			t.Errorf("after opening again the active operation is %+v", got)
		}
		return err
	})
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, b.event("two")) })
	b.numbered(t, 2)
	if got := types(b.events(t, store.EventFilter{})); got != "one two" {
		t.Errorf("events after opening again: %q", got)
	}
}
