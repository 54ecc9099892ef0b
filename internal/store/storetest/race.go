package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// racers is how many write at a time.
const racers = 8

// noLostUpdate: what a transaction reads by id stays so until it has written.
func noLostUpdate(t *testing.T, b *bundle) {
	const each = 10
	s := b.sandbox("a")
	op := b.operation(s.ID, sandbox.Sleep)
	b.insert(t, s)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.InsertOperation(ctx, op) })
	var all sync.WaitGroup
	for w := range racers {
		all.Go(func() {
			for range each {
				err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
					read := func() (sandbox.Sandbox, error) { return tx.Sandbox(ctx, s.ID) }
					if w%2 == 1 {
						read = func() (sandbox.Sandbox, error) { return tx.SandboxByName(ctx, "p1", "a") }
					}
					row, err := read()
					if err != nil {
						return err
					}
					active, err := tx.ActiveOperation(ctx, s.ID)
					if err != nil {
						return err
					}
					row.HostSeq++
					active.Generation++
					row.Labels = map[string]string{"by": fmt.Sprint(w), "n": fmt.Sprint(row.HostSeq)}
					return errorsOf(tx.UpdateSandbox(ctx, &row), tx.UpdateOperation(ctx, active))
				})
				if err != nil {
					t.Errorf("writer %d: %v", w, err)
				}
			}
		})
	}
	all.Wait()
	got := b.get(t, s.ID)
	if got.HostSeq != racers*each || got.Version != racers*each+1 || got.Labels["n"] != fmt.Sprint(racers*each) {
		t.Errorf("after %d updates: %d, version %d, labels %v", racers*each, got.HostSeq, got.Version, got.Labels)
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		op, err := r.Operation(ctx, op.ID)
		if op.Generation != racers*each {
			t.Errorf("after %d updates of the operation: %d", racers*each, op.Generation)
		}
		return err
	})
}

// keyRace: of many calls with one request key one has its effect, and the others find
// what it left.
func keyRace(t *testing.T, b *bundle) {
	const rounds = 5
	for round := range rounds {
		key, made, found := fmt.Sprintf("k%d", round), make([]bool, racers), make([]string, racers)
		id := fmt.Sprintf("k%d-sandbox", round)
		var all sync.WaitGroup
		for w := range racers {
			row := b.sandbox(id)
			all.Go(func() {
				err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
					seen, err := tx.Request(ctx, "p1", "r", key)
					if made[w] = fault.Is(err, fault.NotFound); !made[w] {
						found[w] = seen.Resource
						return err
					}
					found[w] = row.ID
					return errorsOf(tx.InsertSandbox(ctx, row),
						tx.PutRequest(ctx, store.Request{Project: "p1", Route: "r", Key: key, Resource: row.ID, CreatedAt: b.at}))
				})
				if err != nil {
					t.Errorf("caller %d: %v", w, err)
				}
			})
		}
		all.Wait()
		first := 0
		for w := range racers {
			if made[w] {
				first++
			}
			if found[w] != found[0] {
				t.Errorf("two callers with one key got %s and %s", found[0], found[w])
			}
		}
		if first != 1 {
			t.Errorf("%d callers with one key had their effect", first)
		}
	}
	if got := b.list(t, store.SandboxFilter{}); len(got) != rounds {
		t.Errorf("%d sandboxes are there, want %d", len(got), rounds)
	}
}

// lockedOut: a decision that rests on rows that are not there holds under a lock.
func lockedOut(t *testing.T, b *bundle) {
	errFull := errors.New("full")
	var all sync.WaitGroup
	for w := range racers {
		row := b.sandbox(fmt.Sprintf("s%d", w))
		all.Go(func() {
			err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
				if err := tx.Lock(ctx, "quota p1"); err != nil {
					return err
				}
				rows, err := tx.Sandboxes(ctx, store.SandboxFilter{Project: "p1"})
				if err != nil {
					return err
				}
				if len(rows) >= 2 {
					return errFull
				}
				return tx.InsertSandbox(ctx, row)
			})
			if err != nil && !errors.Is(err, errFull) {
				t.Errorf("writer %d: %v", w, err)
			}
		})
	}
	all.Wait()
	if got := b.list(t, store.SandboxFilter{}); len(got) != 2 {
		t.Errorf("a quota of 2 let in %v", got)
	}
}

// anyText: what a hostile guest puts into a message does not keep the row from being
// written, and what is no text is looked for in vain.
func anyText(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	s.Message = "it said \xff\xfe and \x00, then 'quotes' \\ ? ?0 ✓"
	s.Labels = map[string]string{"k": "a\x00b"}
	b.insert(t, s)
	if got, want := b.get(t, s.ID).Message, "it said \uFFFD and \uFFFD, then 'quotes' \\ ? ?0 ✓"; got != want {
		t.Errorf("read %q, want %q", got, want)
	}
	if got := b.get(t, s.ID).Labels["k"]; got != "a\uFFFDb" {
		t.Errorf("a label reads %q", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := b.s.View(ctx, func(ctx context.Context, r store.Reader) error {
		_, err := r.Sandboxes(ctx, store.SandboxFilter{Labels: map[string]string{"k": "\xff"}})
		return err
	})
	if err != nil && !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("a filter that is no text: %v", err)
	}
	b.at = b.at.Add(time.Second)
	e := b.event("odd")
	e.Key = "\xff\x00"
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.AddEvent(ctx, e) })
	b.numbered(t, 1)
}
