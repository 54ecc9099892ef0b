package control

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
)

// twoServers gives two Controls with connections of their own to one PostgreSQL
// database. The hosts of each are by id; a host reports to the first that has it.
func twoServers(t *testing.T, hosts [2]map[string]*fakeHost) (a, b *bench) {
	t.Helper()
	url := pgtest.URL(t)
	var out [2]*bench
	reports := map[*fakeHost]bool{}
	for i := range out {
		db, err := postgres.Open(t.Context(), url, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := &bench{t: t, db: db, log: &logBook{}}
		// What one server admits reaches the other's host and waiters without the reconciler.
		s.cfg = Config{Store: db, Hosts: map[string]hostproto.Host{}, Log: slog.New(s.log), Shared: true, Limits: Limits{ReconcileEvery: time.Hour}}
		for id, h := range hosts[i] {
			s.host = h
			s.cfg.Hosts[id] = h
		}
		s.Control = New(s.cfg)
		if s.host != nil && !reports[s.host] {
			reports[s.host] = true
			s.host.reportTo(s.Control)
			t.Cleanup(s.host.close)
		}
		t.Cleanup(func() {
			s.Close()
			must0(t, db.Close())
		})
		must0(t, s.EnsureProject(t.Context(), "default"))
		out[i] = s
	}
	must0(t, out[0].putTemplate("base", "sha256:base"))
	for _, s := range out {
		must0(t, s.Start(context.Background()))
	}
	return out[0], out[1]
}

// TestFiftyWakesAtTwoServers_S4: they join one operation, and all hear of its end.
func TestFiftyWakesAtTwoServers_S4(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	for round := range 3 {
		s := a.reaches(fmt.Sprintf("otter-%d", round), sandbox.Sleeping)
		host.script(func(h *fakeHost) { h.hold = only(sandbox.Wake) })
		var mu sync.Mutex
		outcomes, ids := map[sandbox.Outcome]int{}, map[string]bool{}
		var all sync.WaitGroup
		for i := range 50 {
			server := []*bench{a, b}[i%2]
			all.Go(func() {
				r, err := server.Wake(t.Context(), me, s.ID, Idempotency{})
				if err != nil {
					t.Errorf("a wake: %v", err)
					return
				}
				mu.Lock()
				outcomes[r.Outcome]++
				ids[r.Operation.ID] = true
				mu.Unlock()
				if op, err := server.Wait(t.Context(), me, r.Operation.ID, patience); err != nil || op.Status != sandbox.Succeeded {
					t.Errorf("a wake ended %s, %v", op.Status, err)
				}
			})
		}
		var op string
		until(t, "all fifty are admitted, and the host has the wake", func() bool {
			mu.Lock()
			defer mu.Unlock()
			got, _ := host.operations(sandbox.Wake)
			if len(got) == round+1 {
				op = got[round]
			}
			return outcomes[sandbox.Accept]+outcomes[sandbox.Join] == 50 && op != "" || t.Failed()
		})
		if op == "" {
			return // a wake failed, which has been said
		}
		if outcomes[sandbox.Accept] != 1 || len(ids) != 1 {
			t.Errorf("outcomes %v, operations %v", outcomes, ids)
		}
		host.script(func(h *fakeHost) { h.hold = nil })
		host.proceed(op)
		all.Wait()
		if got, _ := host.operations(sandbox.Wake); len(got) != round+1 {
			t.Errorf("the host was asked for %d wakes, want %d", len(got), round+1)
		}
		if got := b.get(s.ID); got.State != sandbox.Ready {
			t.Errorf("it is %s", got.State)
		}
	}
}

// TestOneKeyAtTwoServers_V1: a request key that is used at both makes one sandbox.
func TestOneKeyAtTwoServers_V1(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	for round := range 3 {
		req := CreateRequest{Idempotency: keyed("POST /v1/sandboxes", fmt.Sprint("k", round), `{}`)}
		var mu sync.Mutex
		ids, fresh := map[string]bool{}, 0
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				r, err := []*bench{a, b}[i%2].Create(t.Context(), me, req)
				if err != nil {
					t.Errorf("a create: %v", err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				ids[r.Sandbox.ID] = true
				if !r.Replayed {
					fresh++
				}
			})
		}
		all.Wait()
		if len(ids) != 1 || fresh != 1 {
			t.Errorf("one key at two servers made %d sandboxes, %d answers were first ones", len(ids), fresh)
		}
		other := req
		other.Idempotency.BodyHash = []byte("other")
		_, err := b.Create(t.Context(), me, other)
		wantFault(t, err, fault.Conflict, "key_reused")
	}
}

// TestServerWithoutHosts: what it admits is carried out through the server that has
// the host, at once, and it hears of the end. What needs a host here is refused here.
func TestServerWithoutHosts(t *testing.T) {
	t.Parallel()
	a, b := twoServers(t, [2]map[string]*fakeHost{{"far": newFakeHost()}, {}})
	s := a.ready("otter")
	for _, step := range []struct {
		call func(context.Context, Actor, string, Idempotency) (Result, error)
		want sandbox.State
	}{{b.Sleep, sandbox.Sleeping}, {b.Wake, sandbox.Ready}, {b.Stop, sandbox.Stopped}, {b.Resume, sandbox.Ready}} {
		b.ended(must(step.call(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
		if got := b.get(s.ID); got.State != step.want {
			t.Errorf("it is %s, want %s", got.State, step.want)
		}
	}
	r := must(b.Fork(t.Context(), me, "otter", ForkRequest{Names: []string{"pup"}}))(t)
	b.ended(r.Operation, sandbox.Succeeded)
	b.ended(r.Children[0].Operation, sandbox.Succeeded)
	_, err := b.Guest(t.Context(), me, "otter", hostproto.UseSession)
	wantFault(t, err, fault.Unavailable, "")
	_, err = b.Create(t.Context(), me, CreateRequest{})
	wantFault(t, err, fault.Unavailable, "no_host")
	_, err = b.BuildTemplate(t.Context(), me, BuildRequest{Name: "node", Source: TemplateSource{Debian: true}})
	wantFault(t, err, fault.Unavailable, "no_host")
	b.ended(must(b.Delete(t.Context(), me, "pup", DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	if n := b.log.count(func(line string) bool { return strings.Contains(line, "could not be handed") }); n != 0 {
		t.Errorf("the server without hosts tried to hand %d operations to one", n)
	}
}

// TestOneBuildAtTwoServers: a build that is asked for at both is one, and only the
// server of its host runs it, whatever the other's reconciler finds.
func TestOneBuildAtTwoServers(t *testing.T) {
	t.Parallel()
	near, far := newFakeHost(), newFakeHost()
	release := make(chan struct{})
	for _, h := range []*fakeHost{near, far} {
		h.script(func(h *fakeHost) {
			h.build = func(ctx context.Context, _ func(string, float64)) error {
				select {
				case <-release:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		})
	}
	a, b := twoServers(t, [2]map[string]*fakeHost{{"near": near}, {"far": far}})
	const names, callers = 6, 8
	var ids []string
	for n := range names {
		name, begin := fmt.Sprint("t", n), make(chan struct{})
		made := make([]string, callers)
		var all sync.WaitGroup
		for i := range callers {
			all.Go(func() {
				<-begin
				op, err := []*bench{a, b}[i%2].BuildTemplate(t.Context(), me, BuildRequest{Name: name, Source: TemplateSource{Debian: true}})
				if err != nil {
					t.Errorf("a build: %v", err)
				}
				made[i] = op.ID
			})
		}
		close(begin)
		all.Wait()
		for _, id := range made {
			if id != made[0] {
				t.Errorf("two builds were made of one: %v", made)
				break
			}
		}
		ids = append(ids, made[0])
	}
	for range 3 {
		a.reconcile(t.Context())
		b.reconcile(t.Context())
	}
	close(release)
	for _, id := range ids {
		for _, s := range []*bench{a, b} {
			if op := must(s.Wait(t.Context(), me, id, patience))(t); op.Status != sandbox.Succeeded {
				t.Errorf("the build is %s", op.Status)
			}
		}
	}
	a.Close()
	b.Close()
	if n := near.built() + far.built(); n != names {
		t.Errorf("%d templates were built %d times", names, n)
	}
}

func (h *fakeHost) built() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.builds
}

// TestTemplateIsNotDeletedUnderACreation: of a deletion and creations at another server
// either the sandboxes are there and the template too, or neither.
func TestTemplateIsNotDeletedUnderACreation(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	for round := range 10 {
		name := fmt.Sprint("t", round)
		must0(t, a.putTemplate(name, "sha256:"+name))
		var all sync.WaitGroup
		made := make([]error, 4)
		var deleted error
		for i := range made {
			all.Go(func() { _, made[i] = a.Create(t.Context(), me, CreateRequest{Template: name}) })
		}
		all.Go(func() { deleted = b.DeleteTemplate(t.Context(), me, name, Idempotency{}) })
		all.Wait()
		for _, err := range made {
			if err == nil && deleted == nil {
				t.Error("a template went while a sandbox was made from it")
			}
			if err != nil && (deleted != nil || !fault.Is(err, fault.NotFound)) {
				t.Errorf("a creation failed: %v; the deletion: %v", err, deleted)
			}
		}
		if deleted != nil {
			wantFault(t, deleted, fault.FailedPrecondition, "template_in_use")
		}
	}
}

// TestStormAtTwoServers: verbs of all kinds at both servers; the history then tells of
// each sandbox one thing after the other, without gap or repeat, and agrees with the rows.
func TestStormAtTwoServers_S4(t *testing.T) {
	t.Parallel()
	host := newFakeHost()
	both := map[string]*fakeHost{"local": host}
	a, b := twoServers(t, [2]map[string]*fakeHost{both, both})
	const sandboxes, callers, calls = 4, 8, 30
	var ids []string
	for i := range sandboxes {
		ids = append(ids, a.ready(fmt.Sprint("s", i)).ID)
	}
	renames := make([]int, callers)
	var all sync.WaitGroup
	for caller := range callers {
		s := []*bench{a, b}[caller%2]
		dice := rand.New(rand.NewPCG(1, uint64(caller)))
		all.Go(func() {
			verbs := []func(context.Context, Actor, string, Idempotency) (Result, error){s.Sleep, s.Wake, s.Stop, s.Resume}
			for i := range calls {
				id := ids[dice.IntN(len(ids))]
				var err error
				if dice.IntN(5) == 0 {
					labels := map[string]string{"by": fmt.Sprint(caller, i)}
					if _, err = s.Update(t.Context(), me, id, UpdateRequest{Labels: &labels}); err == nil {
						renames[caller]++
					}
				} else {
					_, err = verbs[dice.IntN(len(verbs))](t.Context(), me, id, Idempotency{})
				}
				if err != nil && !fault.Is(err, fault.Conflict) && !fault.Is(err, fault.FailedPrecondition) || reasonOf(err) == store.ReasonStale || reasonOf(err) == store.ReasonActive {
					t.Errorf("a call failed: %v", err)
				}
			}
		})
	}
	all.Wait()
	for _, id := range ids {
		until(t, "the last operation ends", func() bool { return must(b.Get(t.Context(), me, id))(t).Operation == nil })
	}
	// The last event is an end, so it is there when the last operation is.
	var history []Event
	until(t, "every operation's end is told of", func() bool {
		for {
			more := must(b.Events(t.Context(), me, EventQuery{After: int64(len(history)), Limit: 1000}))(t).Events
			if len(more) == 0 {
				break
			}
			history = append(history, more...)
		}
		open := 0
		for _, e := range history {
			switch {
			case e.Type == "operation.started":
				open++
			case strings.HasPrefix(e.Type, "operation."):
				open--
			}
		}
		return open == 0
	})
	state, active, updates := map[string]sandbox.State{}, map[string]string{}, 0
	for i, e := range history {
		if e.Seq != int64(i+1) {
			t.Fatalf("event %d has number %d", i+1, e.Seq)
		}
		switch {
		case e.Type == "operation.started":
			if active[e.Sandbox] != "" {
				t.Errorf("%s began on %s while %s was at work", e.Operation, e.Sandbox, active[e.Sandbox])
			}
			active[e.Sandbox] = e.Operation
		case strings.HasPrefix(e.Type, "operation."):
			if active[e.Sandbox] != e.Operation {
				t.Errorf("%s ended on %s while %q was at work", e.Operation, e.Sandbox, active[e.Sandbox])
			}
			active[e.Sandbox] = ""
		case e.Type == "sandbox.updated":
			updates++
		case strings.HasPrefix(e.Type, "sandbox."):
			var change stateChange
			must0(t, json.Unmarshal(e.Data, &change))
			if change.From != state[e.Sandbox] {
				t.Errorf("%s came to %s from %q, the event before says %q", e.Sandbox, change.State, change.From, state[e.Sandbox])
			}
			state[e.Sandbox] = change.State
		}
	}
	want := 0
	for _, n := range renames {
		want += n
	}
	if updates != want {
		t.Errorf("%d updates were made, the history tells of %d", want, updates)
	}
	for _, id := range ids {
		if got := a.get(id); got.State != state[id] {
			t.Errorf("%s is %s, its history ends with %s", id, got.State, state[id])
		}
	}
}

func reasonOf(err error) string {
	if f := fault.Of(err); f != nil {
		return f.Reason
	}
	return ""
}
