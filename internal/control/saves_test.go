package control

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/receipt"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// fact reports something that no operation of the control plane's brought.
func (l *life) fact(seconds int, change func(*hostproto.Report)) {
	l.t.Helper()
	l.seq++
	r := hostproto.Report{Sandbox: l.id, Seq: l.seq, Generation: l.gen, At: l.t0.Add(time.Duration(seconds) * time.Second)}
	change(&r)
	must0(l.t, l.Report(l.t.Context(), r))
}

// retried reports a try that the host made of a save that began at an instant.
func (l *life) retried(seconds, began int, verb sandbox.Verb, e sandbox.Event) {
	l.t.Helper()
	l.fact(seconds, func(r *hostproto.Report) {
		r.Cause, r.Due = sandbox.CauseSave, l.t0.Add(time.Duration(began)*time.Second)
		r.Operation, r.Verb, r.Ended = sandbox.OperationID(l.id, l.gen, r.Cause, r.Due, int(l.seq)), verb, true
		if r.Event = e; e == "" {
			r.Failure = &hostproto.Failure{Kind: string(fault.Internal), Message: "no"}
			r.Set = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed", Message: "no, again"}}
			return
		}
		r.Saved, r.Clear = true, []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed"}}
	})
}

// Z10, B5: the meter is paused from the beginning of a save that failed until a retry of
// the host's succeeds, or its user keeps it, or the guest prevents it; and not longer.
func TestPausedWhileUnsaved_Z10(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		live func(*life)
		want string // at 1000
	}{
		{"a retry puts it to sleep", func(l *life) {
			l.retried(60, 20, sandbox.Sleep, "")
			l.retried(120, 20, sandbox.Sleep, sandbox.EventSlept)
		}, "starting 0-10 ready, running 10-20 sleep, sleeping 120-1000 open"},
		{"its user keeps it", func(l *life) {
			l.retried(60, 20, sandbox.Sleep, "")
			l.clock.set(l.t0.Add(100 * time.Second))
			must(l.Keep(l.t.Context(), me, l.id, Idempotency{}))(l.t)
		}, "starting 0-10 ready, running 10-20 sleep, running 100-1000 open"},
		{"its user keeps it while a retry is at work, which succeeds", func(l *life) {
			l.clock.set(l.t0.Add(100 * time.Second))
			must(l.Keep(l.t.Context(), me, l.id, Idempotency{}))(l.t)
			l.retried(110, 20, sandbox.Sleep, sandbox.EventSlept)
		}, "starting 0-10 ready, running 10-20 sleep, sleeping 110-1000 open"},
		{"its user keeps it while a retry is at work, which fails", func(l *life) {
			l.clock.set(l.t0.Add(100 * time.Second))
			must(l.Keep(l.t.Context(), me, l.id, Idempotency{}))(l.t)
			l.retried(110, 20, sandbox.Sleep, "")
			l.fact(111, func(r *hostproto.Report) {
				r.Clear = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed"}}
			})
		}, "starting 0-10 ready, running 10-20 sleep, running 100-1000 open"},
		{"X4 the guest prevents the retry", func(l *life) {
			l.fact(60, func(r *hostproto.Report) {
				r.Clear = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed"}}
			})
		}, "starting 0-10 ready, running 10-20 sleep, running 60-1000 open"},
		{"a failed stop, and then a sleep is what its user wants", func(l *life) {
			l.ask(30, l.Stop)
			l.failed(40, fault.Internal, true)
			l.ask(50, l.Sleep)
			l.report(60, sandbox.EventSlept, nil, false)
			l.fact(61, func(r *hostproto.Report) {
				r.Clear = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed"}}
			})
		}, "starting 0-10 ready, running 10-20 sleep, sleeping 61-1000 open"},
		{"a retry stops it", func(l *life) {
			l.retried(120, 20, sandbox.Stop, sandbox.EventStopped)
		}, "starting 0-10 ready, running 10-20 sleep"},
		{"X4 a reboot from inside ends no pause", func(l *life) {
			l.told(50, sandbox.EventRebooted)
		}, "starting 0-10 ready, running 10-20 open"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := newLife(t)
			l.told(10, sandbox.EventCreated)
			l.ask(20, l.Sleep)
			l.failed(30, fault.Internal, true)
			c.live(l)
			if got := l.ledger(1000); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

// Z10: keep is done at once, also while the host is away, which is told in the end; twice
// is once, and there is nothing to keep where no save has failed.
func TestKeep_Z10(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	if r := must(b.Keep(t.Context(), me, "otter", Idempotency{}))(t); r.Outcome != sandbox.Done || r.Sandbox.PolicyKeep {
		t.Errorf("S6: with nothing to keep: %+v", r)
	}
	b.host.script(func(h *fakeHost) { h.away = fault.New(fault.Unavailable, "the host is away") })
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Seq: 2, Generation: 1, At: time.Now(),
		Set: []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed", Message: "no"}}}))
	b.host.script(func(h *fakeHost) { h.at(s.ID).seq = 2 })
	key := Idempotency{Route: "POST /v1/sandboxes/otter/keep", Key: "once", BodyHash: []byte("hash")}
	for range 2 {
		if r := must(b.Keep(t.Context(), me, "otter", key))(t); r.Outcome != sandbox.Accept || len(r.Sandbox.Conditions) != 0 {
			t.Fatalf("kept: %+v", r)
		}
	}
	if got := b.row(s.ID); !got.PolicyKeep || got.PolicyChange == 0 {
		t.Errorf("the host is not to be told: %+v", got)
	}
	b.restart()
	b.host.script(func(h *fakeHost) { h.away = nil })
	b.reconcile(t.Context())
	until(t, "the host has it", func() bool { return b.row(s.ID).PolicyChange == 0 })
	b.host.script(func(h *fakeHost) {
		for _, p := range h.policies {
			if !p.Keep || p.Change != h.policies[0].Change {
				t.Errorf("the host was told %+v", h.policies)
			}
		}
	})
	if got := b.row(s.ID); got.PolicyKeep {
		t.Error("it would be told again")
	}
	if n := strings.Count(strings.Join(b.events(s.ID), " "), "condition.cleared"); n != 1 {
		t.Errorf("the end of the condition is told %d times", n)
	}
	asleep := b.reaches("heron", sandbox.Sleeping)
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: asleep.ID, Seq: 3, Generation: 1, At: time.Now(),
		Set: []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed", Message: "no"}}}))
	_, err := b.Keep(t.Context(), me, "heron", Idempotency{})
	wantFault(t, err, fault.FailedPrecondition, "state_sleeping")
}

// What can be cancelled is, wherever it waits: at its host, for its host, across a
// restart; and a creation that is cancelled costs nothing.
func TestCancelled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		begin func(b *bench) *sandbox.Operation
		state sandbox.State
	}{
		{"create", func(b *bench) *sandbox.Operation {
			return must(b.Create(b.t.Context(), me, CreateRequest{Name: "otter"}))(b.t).Operation
		}, sandbox.Failed},
		{"sleep", func(b *bench) *sandbox.Operation {
			b.ready("otter")
			b.host.script(func(h *fakeHost) {
				h.refuse = func(hostproto.Command) error { return fault.New(fault.Unavailable, "away") }
			})
			return must(b.Sleep(b.t.Context(), me, "otter", Idempotency{}))(b.t).Operation
		}, sandbox.Ready},
		{"fork", func(b *bench) *sandbox.Operation {
			b.ready("otter")
			b.host.script(func(h *fakeHost) {
				h.refuse = func(hostproto.Command) error { return fault.New(fault.Unavailable, "away") }
			})
			return must(b.Fork(b.t.Context(), me, "otter", ForkRequest{}))(b.t).Operation
		}, sandbox.Ready},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			b.host.script(func(h *fakeHost) {
				if c.name == "create" {
					h.refuse = func(hostproto.Command) error { return fault.New(fault.Unavailable, "away") }
				}
			})
			op := c.begin(b)
			first := must(b.Cancel(t.Context(), me, op.ID))(t)
			if again := must(b.Cancel(t.Context(), me, op.ID))(t); !again.CancelAt.Equal(first.CancelAt) || first.CancelAt.IsZero() || !again.Status.Active() {
				t.Errorf("twice: %+v, then %+v", first, again)
			}
			b.restart() // the wish is kept
			b.host.script(func(h *fakeHost) { h.refuse = nil })
			b.reconcile(t.Context())
			b.ended(op, sandbox.Cancelled)
			s := b.row(op.Sandbox)
			if s.State != c.state {
				t.Errorf("it is %s, want %s", s.State, c.state)
			}
			if n := strings.Count(strings.Join(b.events(s.ID), " "), eventCancelling); n != 1 {
				t.Errorf("its end is asked for %d times", n)
			}
			if entries := b.clean(s.ID).Entries; c.name == "create" && len(entries) != 0 {
				t.Errorf("a cancelled creation costs: %+v", entries)
			}
			b.host.script(func(h *fakeHost) {
				for _, cmd := range h.submits {
					if cmd.Operation == op.ID && h.seen[op.ID] != nil && !cmd.Cancelled && cmd.Verb != sandbox.Create {
						continue // it was refused then
					}
				}
				if !slices.Contains(h.calls, "cancel "+op.ID) {
					t.Errorf("the host was not told: %v", h.calls)
				}
			})
			if c.name == "fork" {
				for _, child := range must(b.List(t.Context(), me, ListQuery{States: []sandbox.State{sandbox.Failed}}))(t).Sandboxes {
					if entries := b.clean(child.Sandbox.ID).Entries; len(entries) != 0 {
						t.Errorf("a fork that was cancelled costs: %+v", entries)
					}
				}
			}
			if got := must(b.Cancel(t.Context(), me, op.ID))(t); got.Status != sandbox.Cancelled {
				t.Errorf("S6: %+v", got)
			}
		})
	}
}

// taken waits until the host has an operation.
func (b *bench) taken(op *sandbox.Operation) {
	b.t.Helper()
	until(b.t, "the host has it", func() bool {
		ids, _ := b.host.operations(op.Kind)
		return slices.Contains(ids, op.ID)
	})
}

// A cancellation that comes too late is refused where that is known, and changes nothing
// where it is not.
func TestCancelledTooLate(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
	op := must(b.Sleep(t.Context(), me, "otter", Idempotency{}))(t).Operation
	b.taken(op)
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Operation: op.ID, Step: sandbox.StepKill, Progress: 0.9, At: time.Now()}))
	_, err := b.Cancel(t.Context(), me, op.ID)
	wantFault(t, err, fault.FailedPrecondition, "too_late")
	must0(t, b.Report(t.Context(), hostproto.Report{Sandbox: s.ID, Operation: op.ID, Step: sandbox.StepSeal, Progress: 0.5, At: time.Now()}))
	must(b.Cancel(t.Context(), me, op.ID))(t)
	b.host.proceed(op.ID) // it had committed just then
	if got := b.ended(op, sandbox.Succeeded); got.CancelAt.IsZero() {
		t.Error("that its end was asked for is forgotten")
	}
	if got := b.get("otter"); got.State != sandbox.Sleeping {
		t.Errorf("it is %s", got.State)
	}
	if got := must(b.Cancel(t.Context(), me, op.ID))(t); got.Status != sandbox.Succeeded {
		t.Errorf("a cancellation of what has ended: %+v", got)
	}
}

// receiptsOf gives the receipts of a sandbox, each of which holds.
func (b *bench) receiptsOf(id string) []receipt.Receipt {
	b.t.Helper()
	var keys []ed25519.PublicKey
	for _, k := range must(b.ReceiptKeys(b.t.Context()))(b.t) {
		keys = append(keys, must(receipt.ParseKeys(k.Text))(b.t)...)
	}
	var out []receipt.Receipt
	for _, rc := range must(b.Receipts(b.t.Context(), me, id, PageQuery{}))(b.t).Receipts {
		r := must(receipt.Verify([]byte(rc.Document), keys...))(b.t)
		if r.Operation != rc.Operation {
			b.t.Errorf("the receipt of %s is kept as that of %s", r.Operation, rc.Operation)
		}
		out = append(out, r)
	}
	return out
}

// X1, D7: each committed save has one receipt, signed with the installation's key, also
// of a save that the host made by itself; what failed, and what saved nothing, has none.
func TestReceipts_X1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.reaches("otter", sandbox.Sleeping)
	got := b.receiptsOf(s.ID)
	if len(got) != 1 || got[0].Kind != receipt.Sleep || got[0].Memory == nil || got[0].Memory.Digest != "blake3:bb" || got[0].Disk.Tree != nil || got[0].Generation != 1 {
		t.Fatalf("the receipt of a sleep: %+v", got)
	}
	b.ended(must(b.Wake(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.host.script(func(h *fakeHost) {
		h.fail = func(hostproto.Command) *hostproto.Failure { return &hostproto.Failure{Kind: "internal", Message: "no"} }
	})
	b.ended(must(b.Stop(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Errored)
	b.host.script(func(h *fakeHost) { h.fail = nil })
	b.restart() // and the key is the same
	b.ended(must(b.Stop(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	if got = b.receiptsOf(s.ID); len(got) != 2 || got[1].Kind != receipt.Stop || got[1].Memory != nil || got[1].Generation != 2 || got[1].Key != got[0].Key {
		t.Fatalf("the receipts: %+v", got)
	}
	b.ended(must(b.Resume(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	must0(t, b.host.befall(s.ID, sandbox.EventExited)) // which nobody has saved
	if got = b.receiptsOf(s.ID); len(got) != 2 {
		t.Errorf("what was not saved has a receipt: %+v", got)
	}
	rows := must(b.Receipts(t.Context(), me, s.ID, PageQuery{Limit: new(int64(1))}))(t)
	if len(rows.Receipts) != 1 || rows.NextCursor == "" {
		t.Errorf("a page: %+v", rows)
	}
	told := 0
	for _, e := range must(b.Events(t.Context(), me, EventQuery{Sandbox: s.ID, Limit: 1000}))(t).Events {
		var data struct{ Document string }
		if e.Type == "receipt.issued" && json.Unmarshal(e.Data, &data) == nil && strings.Contains(data.Document, e.Operation) {
			told++
		}
	}
	if told != 2 {
		t.Errorf("%d receipts are told of", told)
	}
	_, err := b.Receipts(t.Context(), Actor{Project: "other"}, s.ID, PageQuery{})
	wantFault(t, err, fault.NotFound, "sandbox")
}

// deleted deletes a sandbox.
func (b *bench) deleted(ref string, permanent bool) sandbox.Sandbox {
	b.t.Helper()
	r := must(b.Delete(b.t.Context(), me, ref, DeleteRequest{Permanent: permanent}))(b.t)
	if r.Operation != nil {
		b.ended(r.Operation, sandbox.Succeeded)
	}
	return b.row(r.Sandbox.ID)
}

func (b *bench) undeleted(ref, name string) sandbox.Sandbox {
	b.t.Helper()
	r := must(b.Undelete(b.t.Context(), me, ref, UndeleteRequest{Name: name}))(b.t)
	b.ended(r.Operation, sandbox.Succeeded)
	return b.get(r.Sandbox.ID)
}

// X9: it comes back as stopped, by its name, and costs nothing meanwhile; it is listed
// with its time.
func TestUndelete_X9(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	gone := b.deleted("otter", false)
	if gone.State != sandbox.Deleted || gone.EraseAt.Sub(gone.DeletedAt).Round(time.Hour) != 24*time.Hour {
		t.Fatalf("deleted: %+v", gone)
	}
	list := must(b.List(t.Context(), me, ListQuery{Deleted: true}))(t).Sandboxes
	if len(list) != 1 || list[0].Sandbox.ID != s.ID {
		t.Errorf("listed: %+v", list)
	}
	_, err := b.Get(t.Context(), me, "otter")
	if f := wantFault(t, err, fault.NotFound, ""); !strings.Contains(f.Message, "hutch undelete "+s.ID) {
		t.Errorf("%q does not say how it comes back", f.Message)
	}
	entries := len(b.clean(s.ID).Entries)
	back := b.undeleted("otter", "")
	if back.State != sandbox.Stopped || back.Name != "otter" || !back.DeletedAt.IsZero() || !back.EraseAt.IsZero() || back.Generation != 1 {
		t.Errorf("back: %+v", back)
	}
	if n := len(b.clean(s.ID).Entries); n != entries {
		t.Errorf("being deleted costs %d entries", n-entries)
	}
	b.ended(must(b.Resume(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.deleted("otter", false)
	b.undeleted(s.ID, "") // a second time, and by its id
	_, err = b.Undelete(t.Context(), me, "otter", UndeleteRequest{})
	wantFault(t, err, fault.FailedPrecondition, "state_stopped")
	_, err = b.Undelete(t.Context(), me, "nobody", UndeleteRequest{})
	wantFault(t, err, fault.NotFound, "sandbox")
	_, err = b.Undelete(t.Context(), Actor{Project: "other"}, s.ID, UndeleteRequest{})
	wantFault(t, err, fault.NotFound, "sandbox")
}

// X9, R1: a name can be taken again, and nobody loses it to one that comes back.
func TestUndeleteWhereTheNameIsTaken_X9(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first := b.ready("otter")
	b.deleted("otter", false)
	second := b.ready("otter")
	_, err := b.Undelete(t.Context(), me, first.ID, UndeleteRequest{Name: "otter"})
	wantFault(t, err, fault.Conflict, store.ReasonName)
	if back := b.undeleted(first.ID, ""); back.Name == "otter" || back.Name == "" {
		t.Errorf("it is back as %q", back.Name)
	}
	if holder := b.get("otter"); holder.ID != second.ID {
		t.Errorf("otter is %s now", holder.ID)
	}
	b.deleted(first.ID, false)
	b.deleted("otter", false)
	if back := b.undeleted("otter", ""); back.ID != second.ID {
		t.Errorf("of two that had the name, %s came back", back.ID)
	}
	if back := b.undeleted(first.ID, "heron"); back.Name != "heron" {
		t.Errorf("it is back as %q", back.Name)
	}
	// The name is taken between the acceptance and the end: the new one keeps it.
	b.deleted("heron", false)
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Undelete) })
	op := must(b.Undelete(t.Context(), me, "heron", UndeleteRequest{Name: "heron"}))(t).Operation
	b.taken(op)
	third := b.ready("heron")
	b.host.proceed(op.ID)
	b.ended(op, sandbox.Succeeded)
	if back := b.get(first.ID); back.State != sandbox.Stopped || back.Name == "heron" || b.get("heron").ID != third.ID {
		t.Errorf("it is back as %q", back.Name)
	}
}

// X9: --permanent erases at once, also what is deleted already; and what is erased is not
// brought back, whoever erased it.
func TestErased_X9(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(c *Config) { c.Limits.UndeleteFor = time.Hour })
	s := b.ready("otter")
	if gone := b.deleted("otter", true); !gone.EraseAt.IsZero() {
		t.Fatalf("erased at once: %+v", gone)
	}
	_, err := b.Undelete(t.Context(), me, s.ID, UndeleteRequest{})
	wantFault(t, err, fault.NotFound, "sandbox")

	s = b.ready("otter")
	kept := b.deleted("otter", false)
	if again := b.deleted(s.ID, false); !again.EraseAt.Equal(kept.EraseAt) {
		t.Errorf("a second deletion: %+v", again)
	}
	if gone := b.deleted("otter", true); gone.ID != s.ID || !gone.EraseAt.IsZero() || !gone.DeletedAt.Equal(kept.DeletedAt) {
		t.Errorf("erased by its name: %+v", gone)
	}
	if !slices.Contains(b.events(s.ID), "sandbox.erased") {
		t.Errorf("its events: %v", b.events(s.ID))
	}

	s = b.ready("otter")
	kept = b.deleted("otter", false)
	b.host.script(func(h *fakeHost) {
		r := h.fact(s.ID, sandbox.OperationID(s.ID, 1, sandbox.CauseErase, kept.EraseAt, 0), sandbox.Delete, "")
		r.Cause, r.Due, r.Ended, r.Erased = sandbox.CauseErase, kept.EraseAt, true, true
		h.send([]hostproto.Report{r})
	})
	until(t, "it is erased", func() bool { return b.row(s.ID).EraseAt.IsZero() })
	_, err = b.Undelete(t.Context(), me, "otter", UndeleteRequest{})
	wantFault(t, err, fault.NotFound, "sandbox")
	ops := must(b.Operations(t.Context(), me, OperationQuery{Sandbox: s.ID}))(t).Operations
	if last := ops[len(ops)-1]; last.Kind != sandbox.Delete || last.Actor != hostActor || last.Status != sandbox.Succeeded {
		t.Errorf("the host's operation: %+v", last)
	}
	b.clean(s.ID)
}

// X9: the window is over although its host, which is away, has not erased it yet.
func TestUndeleteAfterTheWindow_X9(t *testing.T) {
	t.Parallel()
	clock := &handClock{at: time.Now().UTC().Truncate(time.Millisecond)}
	b := newBench(t, func(c *Config) { c.Now = clock.now })
	s := b.ready("otter")
	gone := b.deleted("otter", false)
	clock.set(gone.EraseAt)
	for _, ref := range []string{"otter", s.ID} {
		_, err := b.Undelete(t.Context(), me, ref, UndeleteRequest{})
		wantFault(t, err, fault.NotFound, "sandbox")
	}
	if list := must(b.List(t.Context(), me, ListQuery{Deleted: true}))(t).Sandboxes; len(list) != 0 {
		t.Errorf("listed: %+v", list)
	}
}

// F7, X9: the image of a template stays while a deleted sandbox of it can come back, and
// goes with the last of them.
func TestTemplateOfADeletedOne_X9(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.deleted("otter", false)
	must0(t, b.DeleteTemplate(context.Background(), me, "base", Idempotency{}))
	b.deleted(s.ID, true)
	until(t, "the image is removed", func() bool { return slices.Equal(b.host.removed(), []string{"sha256:base"}) })
}

// S5: a deletion while an undelete runs wins.
func TestDeleteWhileUndeleted_S5(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.deleted("otter", false)
	b.host.script(func(h *fakeHost) { h.hold = only(sandbox.Undelete) })
	op := must(b.Undelete(t.Context(), me, "otter", UndeleteRequest{}))(t).Operation
	if r := must(b.Undelete(t.Context(), me, "otter", UndeleteRequest{}))(t); r.Outcome != sandbox.Join || r.Operation.ID != op.ID {
		t.Errorf("twice: %+v", r)
	}
	del := must(b.Delete(t.Context(), me, s.ID, DeleteRequest{}))(t)
	b.ended(op, sandbox.Cancelled)
	if del.Outcome != sandbox.Accept {
		t.Fatalf("the deletion: %+v", del)
	}
	b.ended(del.Operation, sandbox.Succeeded)
	if got := b.row(s.ID); got.State != sandbox.Deleted {
		t.Errorf("it is %s", got.State)
	}
}

// P1, A5, X9: one that comes back counts in its project again, and its plan has to allow
// its policy.
func TestUndeleteWithinQuotas_P1(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	s := b.ready("otter")
	b.deleted("otter", false)
	must0(t, b.db.Update(t.Context(), func(ctx context.Context, tx store.Tx) error {
		p, err := tx.Project(ctx, me.Project)
		if err != nil {
			return err
		}
		p.Quotas.Sandboxes = 1
		return tx.UpdateProject(ctx, &p)
	}))
	other := b.ready("heron")
	_, err := b.Undelete(t.Context(), me, s.ID, UndeleteRequest{})
	wantFault(t, err, fault.QuotaExceeded, "sandboxes")
	if got := b.row(s.ID); got.State != sandbox.Deleted {
		t.Errorf("it is %s", got.State)
	}
	b.deleted(other.ID, false)
	b.undeleted(s.ID, "")
}
