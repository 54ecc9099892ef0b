package control

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

func keyed(route, key, body string) Idempotency {
	hash := sha256.Sum256([]byte(body))
	return Idempotency{Route: route, Key: key, BodyHash: hash[:]}
}

// TestAThousandLostReplies_V1: a reply lost 1,000 times makes one sandbox. Some callers
// go away before the answer, the others throw it away and ask again.
func TestAThousandLostReplies_V1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	req := CreateRequest{Idempotency: keyed("POST /v1/sandboxes", "k1", `{"labels":{}}`)}
	var mu sync.Mutex
	ids, ops, fresh := map[string]int{}, map[string]int{}, 0
	var all sync.WaitGroup
	for worker := range 8 {
		all.Go(func() {
			for i := range 125 {
				ctx, cancel := context.WithCancel(t.Context())
				if (worker+i)%5 == 0 {
					time.AfterFunc(time.Duration(i)*20*time.Microsecond, cancel) // somewhere in the call
				}
				r, err := b.Create(ctx, me, req)
				cancel()
				if err != nil {
					if !fault.Is(err, fault.Cancelled) && !errors.Is(err, context.Canceled) {
						t.Errorf("create: %v", err)
					}
					continue
				}
				mu.Lock()
				ids[r.Sandbox.ID]++
				ops[r.Operation.ID]++
				if !r.Replayed {
					fresh++
				}
				if r.Outcome != sandbox.Accept {
					t.Errorf("an answer is %q, the first was run", r.Outcome)
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if len(ids) != 1 || len(ops) != 1 || fresh > 1 {
		t.Errorf("%d sandboxes, %d operations, %d first answers", len(ids), len(ops), fresh)
	}
	for id := range ids {
		until(t, "it is ready", func() bool { return b.get(id).State == sandbox.Ready })
		r := must(b.Create(t.Context(), me, req))(t)
		if r.Sandbox.State != sandbox.Ready || r.Operation.Status != sandbox.Succeeded || !r.Replayed {
			t.Errorf("a repeat gives %s, %s: want the present state", r.Sandbox.State, r.Operation.Status)
		}
	}
	if page := must(b.List(t.Context(), me, ListQuery{}))(t); len(page.Sandboxes) != 1 {
		t.Errorf("there are %d sandboxes", len(page.Sandboxes))
	}
	if made, _ := b.host.operations(sandbox.Create); len(made) != 1 {
		t.Errorf("the host was asked for %d", len(made))
	}
}

func TestRequestKeys_V1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	first := must(b.Create(ctx, me, CreateRequest{Name: "otter", Idempotency: keyed("POST /v1/sandboxes", "k", "a")}))(t)
	b.ended(first.Operation, sandbox.Succeeded)
	_, err := b.Create(ctx, me, CreateRequest{Name: "badger", Idempotency: keyed("POST /v1/sandboxes", "k", "b")})
	wantFault(t, err, fault.Conflict, "key_reused")

	// Another project and another route have keys of their own.
	other := Actor{Project: "other", KeyID: "key_o"}
	_, err = b.Create(ctx, other, CreateRequest{Idempotency: keyed("POST /v1/sandboxes", "k", "a")})
	wantFault(t, err, fault.NotFound, "template") // it went past the key
	fork := must(b.Fork(ctx, me, "otter", ForkRequest{Count: new(int64(2)), Idempotency: keyed("POST /v1/sandboxes/otter/fork", "k", "a")}))(t)
	b.ended(fork.Operation, sandbox.Succeeded)

	// A refusal is not remembered: the same call succeeds when its cause is gone.
	stop := keyed("POST stop", "k3", "")
	b.host.script(func(h *fakeHost) { h.infoErr = fault.New(fault.Unavailable, "away") })
	create := CreateRequest{Name: "late", Idempotency: keyed("POST /v1/sandboxes", "k2", "a")}
	_, err = b.Create(ctx, me, create)
	wantFault(t, err, fault.Unavailable, "")
	_, err = b.Stop(ctx, me, "late", stop)
	wantFault(t, err, fault.NotFound, "")
	b.host.script(func(h *fakeHost) { h.infoErr = nil })
	b.ended(must(b.Create(ctx, me, create))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Stop(ctx, me, "late", stop))(t).Operation, sandbox.Succeeded)

	// A repeat needs neither the host nor the sandbox as it was.
	b.host.script(func(h *fakeHost) { h.infoErr = fault.New(fault.Unavailable, "away") })
	b.ended(must(b.Delete(ctx, me, "otter", DeleteRequest{Idempotency: keyed("DELETE otter", "k", "")}))(t).Operation, sandbox.Succeeded)
	again := must(b.Create(ctx, me, CreateRequest{Name: "otter", Idempotency: keyed("POST /v1/sandboxes", "k", "a")}))(t)
	if again.Sandbox.ID != first.Sandbox.ID || again.Sandbox.State != sandbox.Deleted || again.Operation.ID != first.Operation.ID {
		t.Errorf("a repeat after the deletion: %+v", again)
	}
	del := must(b.Delete(ctx, me, "otter", DeleteRequest{Idempotency: keyed("DELETE otter", "k", "")}))(t)
	if del.Outcome != sandbox.Accept || del.Operation.Status != sandbox.Succeeded || !del.Replayed {
		t.Errorf("a repeated delete by a name that is free: %+v", del)
	}
	forkAgain := must(b.Fork(ctx, me, "otter", ForkRequest{Count: new(int64(2)), Idempotency: keyed("POST /v1/sandboxes/otter/fork", "k", "a")}))(t)
	if len(forkAgain.Children) != 2 || forkAgain.Children[1].Sandbox.ID != fork.Children[1].Sandbox.ID || forkAgain.Operation.ID != fork.Operation.ID {
		t.Errorf("a repeated fork: %+v", forkAgain)
	}
	_, err = b.Stop(ctx, me, "late", Idempotency{Key: "line\nbreak"})
	wantFault(t, err, fault.InvalidArgument, "request_key")
}

// TestRequestKeysOfOtherThings_V1: keys, templates and changes have their effect once
// too.
func TestRequestKeysOfOtherThings_V1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	newKey := CreateKeyRequest{Name: "laptop", Idempotency: keyed("POST /v1/keys", "k", "a")}
	key, secret, err := b.CreateKey(ctx, me, newKey)
	must0(t, err)
	again, none, err := b.CreateKey(ctx, me, newKey)
	if err != nil || again.ID != key.ID || none != "" || secret == "" {
		t.Errorf("a repeat gives %s (secret %q), %v, want %s", again.ID, none, err, key.ID)
	}
	for range 2 {
		must0(t, b.DeleteKey(ctx, me, key.ID, keyed("DELETE /v1/keys/x", "k", "")))
	}
	build := BuildRequest{Name: "node", Source: TemplateSource{OCI: "registry.example.com/node"}, Idempotency: keyed("POST /v1/templates", "k", "a")}
	op := must(b.BuildTemplate(ctx, me, build))(t)
	b.ended(&op, sandbox.Succeeded)
	if op2 := must(b.BuildTemplate(ctx, me, build))(t); op2.ID != op.ID {
		t.Errorf("a repeat builds anew: %s", op2.ID)
	}
	for range 2 {
		must0(t, b.DeleteTemplate(ctx, me, "node", keyed("DELETE /v1/templates/node", "k", "")))
	}
	s := b.ready("otter")
	rename := UpdateRequest{Name: new("badger"), Idempotency: keyed("PATCH "+s.ID, "k", "a")}
	must(b.Update(ctx, me, s.ID, rename))(t)
	if r := must(b.Update(ctx, me, s.ID, rename))(t); r.Sandbox.Name != "badger" || r.Sandbox.Version != s.Version+1 || !r.Replayed {
		t.Errorf("a repeated change: %+v", r)
	}
}

// TestRequestKeysAreKeptADay_V1.
func TestRequestKeysAreKeptADay_V1(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *Config) { c.Limits.ReconcileEvery, c.Limits.FlushEvery = time.Hour, time.Hour })
		req := CreateRequest{Idempotency: keyed("POST /v1/sandboxes", "k", "a")}
		first := must(b.Create(t.Context(), me, req))(t)
		time.Sleep(24*time.Hour - time.Minute)
		if r := must(b.Create(t.Context(), me, req))(t); r.Sandbox.ID != first.Sandbox.ID {
			t.Error("forgotten before a day was over")
		}
		time.Sleep(2 * time.Minute)
		if r := must(b.Create(t.Context(), me, req))(t); r.Sandbox.ID == first.Sandbox.ID {
			t.Error("remembered after a day")
		}
	})
}

// TestNothingIsHalfDone_V3 cuts each use case before each of its writes and before its
// commit, by a caller that goes away and by a database that fails: everything is there
// or nothing is.
func TestNothingIsHalfDone_V3(t *testing.T) {
	t.Parallel()
	errDisk := errors.New("the disk is full")
	for _, how := range []string{"the caller goes away", "the database fails"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			var cut *cutStore
			b := newBench(t, func(c *Config) {
				cut = &cutStore{Store: c.Store}
				c.Store, c.Limits.FlushEvery = cut, time.Hour // nothing else writes meanwhile
			})
			source := b.ready("source")
			b.host.script(func(h *fakeHost) { h.hold = func(hostproto.Command) bool { return true } })
			for _, use := range []struct {
				name string
				call func(ctx context.Context, n int) (Result, error)
				rows int // new sandboxes, where it is done
			}{
				{"create", func(ctx context.Context, n int) (Result, error) {
					return b.Create(ctx, me, CreateRequest{Idempotency: keyed("POST c", fmt.Sprint("c", n), "")})
				}, 1},
				{"fork", func(ctx context.Context, n int) (Result, error) {
					return b.Fork(ctx, me, source.ID, ForkRequest{Count: new(int64(3)), Idempotency: keyed("POST f", fmt.Sprint("f", n), "")})
				}, 3},
				{"delete", func(ctx context.Context, n int) (Result, error) { // while the fork runs
					return b.Delete(ctx, me, source.ID, DeleteRequest{Idempotency: keyed("DELETE d", fmt.Sprint("d", n), "")})
				}, 0},
			} {
				for n := 1; ; n++ {
					before := b.count()
					ctx, cancel := context.WithCancel(t.Context())
					cut.arm(n, func() error {
						if how == "the caller goes away" {
							cancel()
							return nil
						}
						return errDisk
					})
					_, err := use.call(ctx, n)
					missed := cut.armed()
					cancel()
					after := b.count()
					if err == nil != missed {
						t.Fatalf("%s cut before write %d: %v", use.name, n, err)
					}
					if err != nil {
						if after != before {
							t.Fatalf("%s cut before write %d left %+v of %+v", use.name, n, after, before)
						}
						continue
					}
					if got := after.sandboxes - before.sandboxes; got != use.rows {
						t.Fatalf("%s made %d sandboxes", use.name, got)
					}
					if n < 4 {
						t.Errorf("%s has only %d places to be cut at", use.name, n)
					}
					break
				}
			}
		})
	}
}

// tally is how much is in the database.
type tally struct {
	sandboxes, operations, active, deleting int
	events                                  int64
}

func (b *bench) count() (n tally) {
	b.t.Helper()
	must0(b.t, b.db.View(b.t.Context(), func(ctx context.Context, r store.Reader) error {
		rows, err := r.Sandboxes(ctx, store.SandboxFilter{})
		if err != nil {
			return err
		}
		for _, s := range rows {
			if !s.DeletedAt.IsZero() {
				n.deleting++
			}
		}
		ops, err := r.Operations(ctx, store.OperationFilter{})
		if err != nil {
			return err
		}
		for _, op := range ops {
			if op.Status.Active() {
				n.active++
			}
		}
		n.sandboxes, n.operations = len(rows), len(ops)
		return nil
	}))
	n.events = must(b.LastEvent(b.t.Context()))(b.t)
	return n
}

// TestTheCallerIsGoneAfterTheCommit_V3: the operation goes on.
func TestTheCallerIsGoneAfterTheCommit_V3(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	r := must(b.Create(ctx, me, CreateRequest{}))(t)
	cancel()
	b.ended(r.Operation, sandbox.Succeeded)
}
