// Package storetest is the suite that every implementation of store.Store passes.
package storetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Open opens the database that is kept in a directory, and makes it when it is not
// there. A test closes what it opened, then opens the same directory again.
type Open func(t *testing.T, dir string) store.Store

// Engine is what the suite is run on.
type Engine struct {
	Open Open
	// Concurrent says that write transactions run at a time: one that is open does not
	// hold up another that touches other rows.
	Concurrent bool
}

// Run runs the suite. Each test has a database of its own.
func Run(t *testing.T, engine Engine) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, *bundle)
	}{
		{"SandboxRoundTrip", sandboxRoundTrip},
		{"StaleVersionIsConflict", staleVersion},
		{"NamesAreUniqueAmongWhatIsNotDeleted_R1", names},
		{"OneActiveOperation_S4", oneActiveOperation},
		{"OperationRoundTrip", operationRoundTrip},
		{"FailedUpdateLeavesNothing_S3", rollback},
		{"ViewIsASnapshot_S3", snapshot},
		{"UpdateInsideUpdateIsRefused", nested},
		{"SlowAndFastTransactionWithAReaderBetween_H1", slowAndFast},
		{"EightWritersLeaveNoGap_H1", eightWriters},
		{"CommittedTellsOfEvents", committed},
		{"NoUpdateIsLost_S3", noLostUpdate},
		{"RequestKeyIsPutOnce_V1", keyRace},
		{"LockKeepsOthersOut", lockedOut},
		{"TextOfAnyKind", anyText},
		{"PrunedEventsAreRefused_H1", pruned},
		{"PagesAreStableWhileRowsComeAndGo_R2", pages},
		{"Filters_R1", filters},
		{"SandboxesAreCountedByState", counted},
		{"RequestKeys_V1", requestKeys},
		{"Templates", templates},
		{"APIKeys", apiKeys},
		{"SSHKeys", sshKeys},
		{"Projects", projects},
		{"ProjectLimits_P1", limits},
		{"ProjectUse_P1", use},
		{"RunningMeters_B4", runningMeters},
		{"Identity", identity},
		{"LedgerRoundTrip_B7", ledger},
		{"FailedUpdateLeavesNoEntry_S3", noHalfEntry},
		{"Unmetered", unmetered},
		{"DueSandboxes_A8", dueSandboxes},
		{"Leases_A3", leases},
		{"WhereReadersBegin_H1", eventStart},
		{"Webhooks_H2", webhooks},
		{"Receipts_X1", receipts},
		{"SigningKeys_X1", signingKeys},
		{"WhatIsDeletedAndKept_X9", kept},
		{"PortGrants_N1", portGrants},
		{"ReopenAfterClose", reopen},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			b := &bundle{Engine: engine, dir: dir, s: engine.Open(t, dir), at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
			t.Cleanup(func() { b.s.Close() })
			b.update(t, func(ctx context.Context, tx store.Tx) error {
				for _, id := range []string{"p1", "p2"} {
					if err := tx.InsertProject(ctx, store.Project{ID: id, Name: "project " + id, CreatedAt: b.at}); err != nil {
						return err
					}
				}
				return nil
			})
			test.run(t, b)
		})
	}
}

// bundle is what a test works with.
type bundle struct {
	Engine
	dir string
	s   store.Store
	at  time.Time
	n   int
}

func (b *bundle) update(t *testing.T, fn func(context.Context, store.Tx) error) {
	t.Helper()
	if err := b.s.Update(t.Context(), fn); err != nil {
		t.Fatalf("update: %v", err)
	}
}

func (b *bundle) view(t *testing.T, fn func(context.Context, store.Reader) error) {
	t.Helper()
	if err := b.s.View(t.Context(), fn); err != nil {
		t.Fatalf("view: %v", err)
	}
}

// sandbox gives a row that is not stored yet; each is a millisecond younger.
func (b *bundle) sandbox(name string) sandbox.Sandbox {
	b.n++
	at := b.at.Add(time.Duration(b.n) * time.Millisecond)
	return sandbox.Sandbox{
		ID: fmt.Sprintf("sbx_%026d", b.n), Project: "p1", Name: name, State: sandbox.Ready, Host: "local",
		Spec:   sandbox.Spec{Template: "base", Version: "sha256:aa", CPUs: 1, Memory: 1 << 30, Disk: 4e9, Sleep: sandbox.SleepManual},
		Labels: map[string]string{}, Origin: sandbox.Origin{Kind: "template"},
		CreatedAt: at, UpdatedAt: at, StateSince: at, Version: 1,
	}
}

func (b *bundle) insert(t *testing.T, list ...sandbox.Sandbox) {
	t.Helper()
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for _, s := range list {
			if err := tx.InsertSandbox(ctx, s); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *bundle) get(t *testing.T, id string) sandbox.Sandbox {
	t.Helper()
	var s sandbox.Sandbox
	b.view(t, func(ctx context.Context, r store.Reader) (err error) { s, err = r.Sandbox(ctx, id); return err })
	return s
}

func (b *bundle) list(t *testing.T, f store.SandboxFilter) []string {
	t.Helper()
	var out []string
	b.view(t, func(ctx context.Context, r store.Reader) error {
		list, err := r.Sandboxes(ctx, f)
		for _, s := range list {
			out = append(out, s.Name)
		}
		return err
	})
	return out
}

func (b *bundle) operation(sandboxID string, kind sandbox.Verb) sandbox.Operation {
	b.n++
	return sandbox.Operation{
		ID: fmt.Sprintf("op_%026d", b.n), Project: "p1", Sandbox: sandboxID, Kind: kind, Status: sandbox.Pending,
		Actor: "key_1", CreatedAt: b.at.Add(time.Duration(b.n) * time.Millisecond), Version: 1,
	}
}

func (b *bundle) event(typ string) store.Event {
	return store.Event{ID: "ev_x", Project: "p1", Sandbox: "sbx_x", Operation: "op_x", Type: typ, Actor: "key_1", Key: "k", Data: json.RawMessage(`{"a":1}`), At: b.at}
}

// numbered waits until as many events have ever got a number.
func (b *bundle) numbered(t *testing.T, n int64) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		next := b.s.Committed()
		last, err := b.s.LastEvent(t.Context())
		if err != nil {
			t.Fatalf("the last event: %v", err)
		}
		if last >= n {
			return
		}
		select {
		case <-next:
		case <-timer.C:
			t.Fatalf("%d of %d events got a number", last, n)
		}
	}
}

func (b *bundle) events(t *testing.T, f store.EventFilter) []store.Event {
	t.Helper()
	out, err := b.s.Events(t.Context(), f)
	if err != nil {
		t.Fatalf("events: %v", err)
	}
	return out
}

// is fails unless err is a fault of the kind and the reason ("" for any).
func is(t *testing.T, err error, kind fault.Kind, reason string) {
	t.Helper()
	f := fault.Of(err)
	if f == nil || f.Kind != kind || reason != "" && f.Reason != reason {
		t.Errorf("got %v, want %s (%s)", err, kind, reason)
	}
	if f != nil && f.Message == "" {
		t.Errorf("%v says nothing", err)
	}
}

var errTest = errors.New("the test says no")
