package control

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// backedUp is a bench whose database can be put back to an earlier time.
type backedUp struct {
	*bench
	path, copy string
}

func newBackedUp(t *testing.T) *backedUp {
	dir := t.TempDir()
	u := &backedUp{path: filepath.Join(dir, "hutch.db"), copy: filepath.Join(dir, "backup.db")}
	t.Cleanup(func() { _ = u.db.Close() }) // after the bench has looked at it
	u.bench = newBench(t)
	u.Close()
	db := must(sqlite.Open(t.Context(), u.path))(t)
	u.cfg.Store, u.db = db, db
	u.Control = New(u.cfg)
	u.host.reportTo(u.Control)
	must0(t, u.EnsureProject(t.Context(), "default"))
	must0(t, u.putTemplate("base", "sha256:base"))
	must0(t, u.Start(context.Background()))
	return u
}

func (u *backedUp) backup() {
	u.t.Helper()
	must0(u.t, sqlite.Copy(u.t.Context(), u.path, u.copy))
}

// restore ends the server, puts the database back, and gives the Control before its start.
func (u *backedUp) restore() {
	u.t.Helper()
	u.Close()
	must0(u.t, u.db.Close())
	for _, log := range []string{"-wal", "-shm"} { // or what is in them would be put on top of the copy
		if err := os.Remove(u.path + log); err != nil && !errors.Is(err, fs.ErrNotExist) {
			u.t.Fatal(err)
		}
	}
	from, err := os.Open(u.copy)
	must0(u.t, err)
	defer from.Close()
	to, err := os.OpenFile(u.path, os.O_WRONLY|os.O_TRUNC, 0)
	must0(u.t, err)
	_, err = io.Copy(to, from)
	must0(u.t, err)
	must0(u.t, to.Close())
	db, err := sqlite.Open(context.Background(), u.path)
	must0(u.t, err)
	u.cfg.Store, u.db = db, db
	u.Control = New(u.cfg)
	u.host.reportTo(u.Control)
}

// factOf is what a host says of a sandbox as the database has it now.
func (u *backedUp) factOf(ref string) hostproto.Fact {
	u.t.Helper()
	s := u.get(ref)
	return hostproto.Fact{Sandbox: s.ID, Name: s.Name, Spec: s.Spec, State: s.State, Since: s.StateSince, Generation: s.Generation,
		Seq: s.HostSeq, Acked: s.HostSeq, Deadline: s.Deadline, Policy: &s.Policy}
}

// R9: after an older database was put back the hosts' facts win: what went on is as the
// host has it, what is gone is failed, what is new is told of and can be taken in; nothing
// is done a second time, and the bill is right.
func TestAfterRestore(t *testing.T) {
	t.Parallel()
	u := newBackedUp(t)
	same, slept := u.ready("same"), u.ready("slept")
	woken, stopped := u.reaches("woken", sandbox.Sleeping), u.ready("stopped")
	gone, again := u.ready("gone"), u.reaches("again", sandbox.Stopped)
	crashed, cycled := u.ready("crashed"), u.ready("cycled")
	u.host.script(func(h *fakeHost) { h.hold = only(sandbox.Stop) })
	open := must(u.Stop(t.Context(), me, stopped.ID, Idempotency{}))(t).Operation // at work when the backup is made
	u.backup()
	u.host.script(func(h *fakeHost) { h.hold = nil })
	u.host.mu.Lock()
	u.host.send(u.host.obey(hostproto.Command{Operation: open.ID, Verb: sandbox.Stop, Sandbox: stopped.ID}))
	u.host.mu.Unlock()
	u.ended(open, sandbox.Succeeded)
	verbs := func(ref string, verbs ...func(context.Context, Actor, string, Idempotency) (Result, error)) {
		for _, verb := range verbs {
			u.ended(must(verb(t.Context(), me, ref, Idempotency{}))(t).Operation, sandbox.Succeeded)
		}
	}
	verbs(slept.ID, u.Sleep)
	verbs(woken.ID, u.Wake)
	verbs(again.ID, u.Resume, u.Sleep)
	verbs(cycled.ID, u.Sleep, u.Wake, u.Stop, u.Resume)
	must0(t, u.host.befall(crashed.ID, sandbox.EventCrashed))
	u.ended(must(u.Delete(t.Context(), me, gone.ID, DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	fresh := u.ready("fresh")
	want := map[string]sandbox.Sandbox{}
	var facts []hostproto.Fact
	for _, id := range []string{same.ID, slept.ID, woken.ID, stopped.ID, again.ID, crashed.ID, cycled.ID, fresh.ID} {
		want[id] = u.get(id)
		facts = append(facts, u.factOf(id))
	}
	u.restore()
	u.host.script(func(h *fakeHost) { h.facts = facts })
	before := len(u.host.callList())

	settled := must(u.AfterRestore(t.Context()))(t)
	if len(settled.Advanced) != 6 || !slices.Equal(settled.Lost, []string{gone.ID}) || !slices.Equal(settled.Cancelled, []string{open.ID}) ||
		len(settled.Unknown) != 1 || settled.Unknown[0].Sandbox != fresh.ID {
		t.Errorf("%+v", settled)
	}
	if again := must(u.AfterRestore(t.Context()))(t); len(again.Advanced)+len(again.Lost)+len(again.Cancelled) != 0 || len(again.Unknown) != 1 {
		t.Errorf("the second time: %+v", again)
	}
	for i, want := range []int{1, 0} {
		if taken := must(u.Adopt(t.Context(), me.Project, "all"))(t); len(taken) != want {
			t.Errorf("try %d takes %v in", i, taken)
		}
	}
	for id, want := range want {
		got := u.get(id)
		if got.State != want.State || got.Generation != want.Generation || got.HostSeq != want.HostSeq || got.Name != want.Name || !got.Policy.Equal(want.Policy) {
			t.Errorf("%s is %s (generation %d, seq %d), not %s (%d, %d)", want.Name, got.State, got.Generation, got.HostSeq, want.State, want.Generation, want.HostSeq)
		}
		if rests := got.State == sandbox.Stopped; got.ArchiveAt.IsZero() == rests {
			t.Errorf("%s is %s, and due to be archived at %s", want.Name, got.State, got.ArchiveAt)
		}
		u.clean(id)
	}
	if got := u.get(gone.ID); got.State != sandbox.Failed || got.Reason != "host_lost" {
		t.Errorf("what was deleted since is %s (%s)", got.State, got.Reason)
	}
	u.clean(gone.ID)

	must0(t, u.Start(context.Background()))
	verbs(same.ID, u.Sleep) // its next report follows on the last that was taken
	verbs(slept.ID, u.Wake)
	verbs(fresh.ID, u.Stop)
	if calls := u.host.callList()[before:]; slices.ContainsFunc(calls, func(c string) bool { return c == "submit stop "+stopped.ID }) {
		t.Errorf("the stop that had ended was handed in again: %v", calls)
	}
}

// R9: a host with nothing new to say changes nothing, and one that is at work on what the
// database knows as open goes on with it.
func TestAfterRestoreOfTheSame(t *testing.T) {
	t.Parallel()
	u := newBackedUp(t)
	s, busy := u.ready("s"), u.ready("busy")
	u.host.script(func(h *fakeHost) { h.hold = only(sandbox.Sleep) })
	op := must(u.Sleep(t.Context(), me, busy.ID, Idempotency{}))(t).Operation
	u.backup()
	facts := []hostproto.Fact{u.factOf(s.ID), u.factOf(busy.ID)}
	facts[1].Operation = op.ID
	facts[1].Seq, facts[1].Acked = facts[1].Seq+1, facts[1].Acked+1 // a condition that came and went, say
	u.restore()
	u.host.script(func(h *fakeHost) { h.facts, h.hold = facts, nil })
	settled := must(u.AfterRestore(t.Context()))(t)
	if !slices.Equal(settled.Advanced, []string{busy.ID}) || len(settled.Lost)+len(settled.Unknown)+len(settled.Cancelled) != 0 {
		t.Errorf("%+v", settled)
	}
	must0(t, u.Start(context.Background()))
	u.host.script(func(h *fakeHost) {
		h.at(busy.ID).seq++
		h.send(h.obey(hostproto.Command{Operation: op.ID, Verb: sandbox.Sleep, Sandbox: busy.ID}))
	})
	u.ended(op, sandbox.Succeeded)
}

// Every way from one state to another is one that the model has.
func TestRoutes(t *testing.T) {
	t.Parallel()
	for _, from := range sandbox.States {
		for _, to := range []sandbox.State{"", sandbox.Creating, sandbox.Ready, sandbox.Sleeping, sandbox.Stopped, sandbox.Failed} {
			for _, booted := range []bool{false, true} {
				if from == sandbox.Deleted || to == sandbox.Creating && from != sandbox.Creating {
					continue // deleted rows are not looked at, and no host goes back to creating
				}
				at := from
				for _, e := range route(from, to, booted) {
					next, err := at.Next(e)
					if err != nil {
						t.Errorf("%s to %s (%v): %v", from, to, booted, err)
					}
					at = next
				}
				want := to
				switch {
				case to == "":
					want = sandbox.Deleted
				case from == sandbox.Failed && to == sandbox.Stopped && !booted:
					want = sandbox.Failed
				}
				if at != want {
					t.Errorf("%s to %s (%v) ends at %s", from, to, booted, at)
				}
			}
		}
	}
}

// A2, R9: where a policy was changed after the backup, what is shown after it was put back
// is told to the host, and does not stay pending.
func TestPolicyAfterRestore_A2(t *testing.T) {
	t.Parallel()
	u := newBackedUp(t)
	s := u.ready("timed")
	u.backup()
	must(u.Update(t.Context(), me, s.ID, UpdateRequest{TTL: seconds(7200)}))(t)
	until(t, "the host to have the change", func() bool { return u.get(s.ID).PolicyChange == 0 })
	facts := []hostproto.Fact{u.factOf(s.ID)}
	u.host.script(func(h *fakeHost) { facts[0].Change = h.policies[0].Change })
	u.restore()
	u.host.script(func(h *fakeHost) { h.facts = facts })
	must(u.AfterRestore(t.Context()))(t)
	must0(t, u.Start(context.Background()))
	until(t, "the host to be told", func() bool { return u.get(s.ID).PolicyChange == 0 })
	var told []hostproto.PolicyChange
	u.host.script(func(h *fakeHost) { told = h.policies })
	if last := told[len(told)-1]; len(told) < 2 || last.Change <= facts[0].Change || last.Policy.TTL != s.Policy.TTL || u.get(s.ID).Policy.TTL != s.Policy.TTL {
		t.Errorf("the host was told %+v", told)
	}
}
