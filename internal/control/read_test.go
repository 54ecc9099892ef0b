package control

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

func TestNames_R1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	for _, name := range []string{"Otter", "ot ter", "otter.", "größe", strings.Repeat("a", 41), "a/b", "a\n", "sbx_1", "../x", "-x", "x-", "-"} {
		if _, err := b.BuildTemplate(ctx, me, BuildRequest{Name: name, Source: debian}); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("a template %q: %v", name, err)
		}
		_, err := b.Create(ctx, me, CreateRequest{Name: name})
		if !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", name, err)
		}
	}
	s := b.ready("a")
	for _, name := range []string{"-x", "x-"} {
		_, err := b.Update(ctx, me, "a", UpdateRequest{Name: &name})
		wantFault(t, err, fault.InvalidArgument, "name")
		_, err = b.Fork(ctx, me, "a", ForkRequest{Names: []string{name}})
		wantFault(t, err, fault.InvalidArgument, "name")
	}
	b.ready(strings.Repeat("a", 40))
	_, err := b.Create(ctx, me, CreateRequest{Name: "a"})
	if f := wantFault(t, err, fault.Conflict, "name_taken"); !strings.Contains(f.Message, "name a ") {
		t.Errorf("%q does not name it", f.Message)
	}
	// Names are made up where none is given, and none comes twice.
	fixed := 0
	b.pick = func(n int) int { fixed++; return fixed / 40 % n }
	var names []string
	for range 3 {
		names = append(names, must(b.Create(ctx, me, CreateRequest{}))(t).Sandbox.Name)
	}
	if names[0] != "amber-badger-10" || names[1] == names[0] || names[2] == names[1] || names[2] == names[0] {
		t.Errorf("generated names: %v", names)
	}
	for _, list := range [][]string{adjectives, nouns} {
		for _, word := range list {
			if len(word) > 14 || !nameSyntax.MatchString(word) {
				t.Errorf("the word %q", word)
			}
		}
	}
	// Renaming frees the old name and takes the new one.
	r := must(b.Update(ctx, me, "a", UpdateRequest{Name: new("b"), Labels: &map[string]string{"k": "v"}}))(t)
	if r.Operation != nil || r.Sandbox.Name != "b" || r.Sandbox.ID != s.ID || b.get("b").Labels["k"] != "v" {
		t.Errorf("renamed: %+v", r)
	}
	b.ready("a")
	for _, bad := range []UpdateRequest{{Name: new("")}, {Name: new("B")}, {Labels: &map[string]string{"": ""}}} {
		_, err := b.Update(ctx, me, "b", bad)
		wantFault(t, err, fault.InvalidArgument, "")
	}
	_, err = b.Update(ctx, me, "b", UpdateRequest{Name: new("a")})
	wantFault(t, err, fault.Conflict, "name_taken")
	_, err = b.Update(ctx, me, "nobody", UpdateRequest{})
	wantFault(t, err, fault.NotFound, "")
	if got := b.events(s.ID); got[len(got)-1] != "sandbox.updated" {
		t.Errorf("events: %v", got)
	}
}

func TestResources_R3(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	n := func(v int64) *int64 { return &v }
	for what, make := range map[string]func(v *int64) CreateRequest{
		"cpus":         func(v *int64) CreateRequest { return CreateRequest{CPUs: v} },
		"memory_bytes": func(v *int64) CreateRequest { return CreateRequest{MemoryBytes: v} },
		"disk_bytes":   func(v *int64) CreateRequest { return CreateRequest{DiskBytes: v} },
	} {
		for _, v := range []int64{0, -1, 1 << 62, -1 << 63} {
			_, err := b.Create(t.Context(), me, make(n(v)))
			f := fault.Of(err)
			if f == nil || f.Kind != fault.InvalidArgument || f.Reason != what || !strings.Contains(f.Message, "from") {
				t.Errorf("%s %d: %v", what, v, err)
			}
		}
	}
	// A host's own maximum holds too.
	b.host.script(func(h *fakeHost) { h.info.CPUs, h.info.MemoryBytes, h.info.DiskMaxBytes = 2, 512<<20, 2e9 })
	for _, r := range []CreateRequest{{CPUs: n(3)}, {MemoryBytes: n(1 << 30)}, {DiskBytes: n(3e9)}} {
		_, err := b.Create(t.Context(), me, r)
		wantFault(t, err, fault.InvalidArgument, "")
	}
	s := must(b.Create(t.Context(), me, CreateRequest{CPUs: n(2)}))(t).Sandbox
	if s.Spec.CPUs != 2 || s.Spec.Memory != 512<<20 || s.Spec.Disk != 2e9 {
		t.Errorf("defaults under a small host: %+v", s.Spec)
	}
}

func TestCreateIsChecked(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprintf("k%d", i)] = "v"
	}
	long := map[string]string{}
	for i := range 257 {
		long[fmt.Sprintf("K%d", i)] = "v"
	}
	for name, c := range map[string]struct {
		req  CreateRequest
		kind fault.Kind
	}{
		"65 labels":          {CreateRequest{Labels: many}, fault.InvalidArgument},
		"an empty label":     {CreateRequest{Labels: map[string]string{"": "v"}}, fault.InvalidArgument},
		"a label with =":     {CreateRequest{Labels: map[string]string{"a=b": "v"}}, fault.InvalidArgument},
		"a long label":       {CreateRequest{Labels: map[string]string{strings.Repeat("a", 129): "v"}}, fault.InvalidArgument},
		"a long value":       {CreateRequest{Labels: map[string]string{"a": strings.Repeat("v", 257)}}, fault.InvalidArgument},
		"a value in lines":   {CreateRequest{Labels: map[string]string{"a": "b\nc"}}, fault.InvalidArgument},
		"a broken value":     {CreateRequest{Labels: map[string]string{"a": "\xff"}}, fault.InvalidArgument},
		"an env name":        {CreateRequest{Env: map[string]string{"1A": "v"}}, fault.InvalidArgument},
		"an env with =":      {CreateRequest{Env: map[string]string{"A=B": "v"}}, fault.InvalidArgument},
		"an env with a zero": {CreateRequest{Env: map[string]string{"A": "b\x00c"}}, fault.InvalidArgument},
		"a huge env":         {CreateRequest{Env: map[string]string{"A": strings.Repeat("v", 65<<10)}}, fault.InvalidArgument},
		"257 variables":      {CreateRequest{Env: long}, fault.InvalidArgument},
		"a user":             {CreateRequest{User: "root;id"}, fault.InvalidArgument},
		"a workdir":          {CreateRequest{Workdir: "work"}, fault.InvalidArgument},
		"a sleep mode":       {CreateRequest{Sleep: SleepSettings{Mode: "often"}}, fault.InvalidArgument},
		"a template":         {CreateRequest{Template: "none"}, fault.NotFound},
	} {
		before := b.count()
		_, err := b.Create(t.Context(), me, c.req)
		if f := fault.Of(err); f == nil || f.Kind != c.kind || f.Reason == "" || len(f.Message) > 300 {
			t.Errorf("%s: %v, want %s", name, err, c.kind)
		}
		if b.count() != before {
			t.Errorf("%s: something was written", name)
		}
	}
	delete(many, "k0")
	r := must(b.Create(t.Context(), me, CreateRequest{Labels: many, User: "1000", Workdir: "/srv/x", Env: map[string]string{"A_1": ""}, Sleep: SleepSettings{Mode: "manual"}}))(t)
	if len(b.get(r.Sandbox.ID).Labels) != 64 {
		t.Error("64 labels are not kept")
	}
}

// TestProjectsAreApart: nothing of another project is found, by id or by name.
func TestProjectsAreApart(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	r := must(b.Create(ctx, me, CreateRequest{Name: "otter"}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	they := Actor{Project: "other", KeyID: "key_o"}
	for _, ref := range []string{"otter", r.Sandbox.ID, "sbx_none", "nobody", "", strings.Repeat("x", 1000), "Ünknown"} {
		for name, call := range map[string]func() error{
			"get":      func() error { _, err := b.Get(ctx, they, ref); return err },
			"delete":   func() error { _, err := b.Delete(ctx, they, ref, DeleteRequest{}); return err },
			"sleep":    func() error { _, err := b.Sleep(ctx, they, ref, Idempotency{}); return err },
			"fork":     func() error { _, err := b.Fork(ctx, they, ref, ForkRequest{}); return err },
			"update":   func() error { _, err := b.Update(ctx, they, ref, UpdateRequest{}); return err },
			"guest":    func() error { _, err := b.Guest(ctx, they, ref, hostproto.UseSession); return err },
			"identity": func() error { _, err := b.Identity(ctx, they, ref); return err },
		} {
			err := call()
			if f := fault.Of(err); f == nil || f.Kind != fault.NotFound || len(f.Message) > 200 {
				t.Errorf("%s of %.40q: %v", name, ref, err)
			}
		}
	}
	_, err := b.Operation(ctx, they, r.Operation.ID)
	wantFault(t, err, fault.NotFound, "operation")
	_, err = b.Wait(ctx, they, r.Operation.ID, time.Second)
	wantFault(t, err, fault.NotFound, "operation")
	if events := must(b.Events(ctx, they, EventQuery{}))(t).Events; len(events) != 0 {
		t.Errorf("events of another project: %+v", events)
	}
	if page := must(b.List(ctx, they, ListQuery{}))(t); len(page.Sandboxes) != 0 {
		t.Errorf("sandboxes of another project: %+v", page)
	}
}

func TestLists_R1_R2(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	var want []string
	for i := range 7 {
		labels := map[string]string{"parity": fmt.Sprint(i % 2)}
		r := must(b.Create(ctx, me, CreateRequest{Name: fmt.Sprintf("s-%d", i), Labels: labels}))(t)
		b.ended(r.Operation, sandbox.Succeeded)
		want = append(want, r.Sandbox.Name)
	}
	var got []string
	q := ListQuery{Limit: new(int64(3))}
	for page := 0; ; page++ {
		p := must(b.List(ctx, me, q))(t)
		for _, v := range p.Sandboxes {
			got = append(got, v.Sandbox.Name)
		}
		if p.NextCursor == "" {
			break
		}
		q.Cursor = p.NextCursor
		b.ended(must(b.Delete(ctx, me, got[len(got)-1], DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	}
	if !slices.Equal(got, want) {
		t.Errorf("pages gave %v, want %v", got, want)
	}
	// s-2 and s-5 are gone.
	for _, c := range []struct {
		q    ListQuery
		want int
	}{
		{ListQuery{}, 5}, {ListQuery{Labels: map[string]string{"parity": "1"}}, 2}, {ListQuery{States: []sandbox.State{sandbox.Deleted}}, 2},
		{ListQuery{Template: "base"}, 5}, {ListQuery{Template: "node"}, 0}, {ListQuery{Limit: new(int64(5))}, 5},
	} {
		p := must(b.List(ctx, me, c.q))(t)
		if len(p.Sandboxes) != c.want || p.NextCursor != "" {
			t.Errorf("%+v: %d rows, cursor %q, want %d", c.q, len(p.Sandboxes), p.NextCursor, c.want)
		}
	}
	for _, bad := range []ListQuery{
		{Limit: new(int64(0))}, {Limit: new(int64(1001))}, {Limit: new(int64(-1))}, {Cursor: "nonsense!"}, {Cursor: "YWJj"}, {Cursor: "MSA"},
		{States: []sandbox.State{"paused"}},
	} {
		_, err := b.List(ctx, me, bad)
		wantFault(t, err, fault.InvalidArgument, "")
	}
	ops := must(b.Operations(ctx, me, OperationQuery{Limit: new(int64(4))}))(t)
	more := must(b.Operations(ctx, me, OperationQuery{Limit: new(int64(100)), Cursor: ops.NextCursor}))(t)
	if len(ops.Operations) != 4 || len(more.Operations) != 5 {
		t.Errorf("%d and %d operations", len(ops.Operations), len(more.Operations))
	}
	_, err := b.Operations(ctx, me, OperationQuery{Sandbox: "nobody"})
	wantFault(t, err, fault.NotFound, "")
	_, err = b.Operations(ctx, me, OperationQuery{Limit: new(int64(0))})
	wantFault(t, err, fault.InvalidArgument, "limit")
}

func TestWait_V2(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		ctx := t.Context()
		b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Create) })
		op := must(b.Create(ctx, me, CreateRequest{}))(t).Operation
		began := time.Now()
		if got := must(b.Wait(ctx, me, op.ID, time.Minute))(t); !got.Status.Active() || time.Since(began) != time.Minute {
			t.Errorf("a wait that ran out gives %s after %s", got.Status, time.Since(began))
		}
		if got := must(b.Wait(ctx, me, op.ID, 0))(t); !got.Status.Active() {
			t.Errorf("no wait gives %s", got.Status)
		}
		for _, d := range []time.Duration{-1, 10*time.Minute + 1} {
			_, err := b.Wait(ctx, me, op.ID, d)
			wantFault(t, err, fault.InvalidArgument, "wait")
		}
		gone, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := b.Wait(gone, me, op.ID, time.Minute)
		wantFault(t, err, fault.Cancelled, "")
		time.AfterFunc(3*time.Second, func() { b.host.proceed(op.ID) })
		began = time.Now()
		if got := must(b.Wait(ctx, me, op.ID, time.Minute))(t); got.Status != sandbox.Succeeded || time.Since(began) > 4*time.Second {
			t.Errorf("it ended %s after %s", got.Status, time.Since(began))
		}
		b.waiters.mu.Lock()
		defer b.waiters.mu.Unlock()
		if len(b.waiters.m) != 0 {
			t.Errorf("waiters are left: %v", b.waiters.m)
		}
	})
}

// TestEventsFollow_H1: a reader that asks on with its last number sees each event once.
func TestEventsFollow_H1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	var seen []int64
	var reader sync.WaitGroup
	reader.Go(func() {
		var after int64
		for len(seen) < 40 {
			page, err := b.Events(ctx, me, EventQuery{After: after, Limit: 3, Wait: patience})
			if err != nil {
				t.Errorf("events: %v", err)
				return
			}
			after = page.Seen
			for _, e := range page.Events {
				seen = append(seen, e.Seq)
			}
		}
	})
	var writers sync.WaitGroup
	for range 10 {
		writers.Go(func() { must(b.Create(ctx, me, CreateRequest{}))(t) })
	}
	writers.Wait()
	reader.Wait()
	for i, n := range seen {
		if n != int64(i+1) {
			t.Fatalf("event %d has number %d", i+1, n)
		}
	}
	cancel()
	last := must(b.LastEvent(t.Context()))(t)
	_, err := b.Events(ctx, me, EventQuery{After: last, Wait: time.Hour})
	if err == nil {
		t.Error("a cancelled reader got no error")
	}
	for _, q := range []EventQuery{{After: -1}, {Limit: -1}, {Limit: 1001}} {
		_, err := b.Events(t.Context(), me, q)
		wantFault(t, err, fault.InvalidArgument, "")
	}
}

// TestEventsOfSlowReaders_H1: one that falls behind what is kept in memory goes on in the
// database, and no reader of one project is told of another's.
func TestEventsOfSlowReaders_H1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const n = 2*feedSize + 1000
	first := must(b.LastEvent(t.Context()))(t)
	ask := func(after int64) EventPage {
		t.Helper()
		return must(b.Events(t.Context(), me, EventQuery{After: after, Limit: 300, Wait: patience}))(t)
	}
	for added := 0; added < n; added += 500 {
		must0(t, b.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
			for i := range 500 {
				if err := tx.AddEvent(ctx, store.Event{ID: fmt.Sprint("ev_", added+i), Project: me.Project, Type: "test.many", At: time.Now()}); err != nil {
					return err
				}
			}
			return tx.AddEvent(ctx, store.Event{ID: fmt.Sprint("ev_other_", added), Project: "other", Type: "test.many", At: time.Now()})
		}))
	}
	last := must(b.LastEvent(t.Context()))(t)
	until(t, "the feed is at the end", func() bool {
		page, ok := b.feed.read(store.EventFilter{After: last - 1, Limit: 1})
		return ok && page.Seen == last
	})
	if _, ok := b.feed.read(store.EventFilter{After: first, Limit: 1}); ok {
		t.Error("the feed keeps more than it should")
	}
	got := 0
	for after := first; after < last; {
		page := ask(after)
		for _, e := range page.Events {
			if e.Project != me.Project || e.Seq <= after {
				t.Fatalf("after %d came %+v", after, e)
			}
			after = e.Seq
			got++
		}
		after = page.Seen
	}
	if want := (n + 499) / 500 * 500; got != want {
		t.Errorf("%d of %d events came", got, want)
	}
}

// TestEventsArePruned_H1: after 90 days; a reader from before is told the oldest. Ended
// operations go with them.
func TestEventsArePruned_H1(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *Config) {
			c.Limits.ReconcileEvery, c.Limits.FlushEvery, c.Limits.PruneEvery = 24*time.Hour, 24*time.Hour, 24*time.Hour
			c.Limits.TimersEvery, c.Limits.LeaseEvery = 24*time.Hour, 24*time.Hour
		})
		old := must(b.Create(t.Context(), me, CreateRequest{}))(t).Operation
		b.ended(old, sandbox.Succeeded)
		time.Sleep(60 * 24 * time.Hour)
		must(b.Create(t.Context(), me, CreateRequest{}))(t)
		time.Sleep(32 * 24 * time.Hour)
		_, err := b.Events(t.Context(), me, EventQuery{After: 1})
		if f := wantFault(t, err, fault.FailedPrecondition, store.ReasonPruned); !strings.Contains(f.Message, "oldest is 5") {
			t.Errorf("%q does not name the oldest", f.Message)
		}
		if got := must(b.Events(t.Context(), me, EventQuery{}))(t).Events; got[0].Seq != 5 {
			t.Errorf("from the beginning: number %d", got[0].Seq)
		}
		last := must(b.LastEvent(t.Context()))(t)
		if got := must(b.Events(t.Context(), me, EventQuery{After: last, Wait: time.Second}))(t); len(got.Events) != 0 || got.Seen != last {
			t.Errorf("after the newest: %+v", got)
		}
		// A number from before the database was put back from a backup.
		_, err = b.Events(t.Context(), me, EventQuery{After: 100})
		if f := wantFault(t, err, fault.InvalidArgument, "after"); !strings.Contains(f.Message, fmt.Sprintf("the newest is %d", last)) {
			t.Errorf("a number that no event has: %q", f.Message)
		}
		_, err = b.Operation(t.Context(), me, old.ID)
		wantFault(t, err, fault.NotFound, "operation")
	})
}
