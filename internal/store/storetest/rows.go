package storetest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

func sandboxRoundTrip(t *testing.T, b *bundle) {
	s := b.sandbox("calm-otter-12")
	s.Reason, s.Message, s.Generation, s.HostSeq, s.Started = "crashed", "it fell", 7, 42, true
	s.Conditions = []sandbox.Condition{{Type: sandbox.Degraded, Reason: "save_failed", Message: "no room", Since: b.at}}
	s.Spec.Env = map[string]string{"A": "1", "B": "zwei\n\x01 'quoted' \"twice\" ? ?0"}
	s.Spec.User, s.Spec.Workdir, s.Spec.Runtime = "agent", "/workspace", "gvisor"
	s.Labels = map[string]string{"env": "prod", "team": "größe ✓", "empty": ""}
	s.Origin = sandbox.Origin{Kind: "fork", Source: "sbx_parent", Mode: "live"}
	s.SavedAt, s.DeletedAt = b.at.Add(time.Second), b.at.Add(2*time.Second)
	s.Policy = sandbox.Policy{TTL: 90 * time.Second, OnDeadline: sandbox.Sleep, SleepDeadline: sandbox.DeadlinePaused, MemoryWindow: time.Hour}
	s.Deadline, s.PolicyChange, s.PolicyRestart, s.PolicyKeep = b.at.Add(90*time.Second), 5, true, true
	s.EraseAt = b.at.Add(3 * time.Second)
	b.insert(t, s)
	if got := b.get(t, s.ID); !reflect.DeepEqual(got, s) {
		t.Errorf("read\n%+v, wrote\n%+v", got, s)
	}
	s.State, s.Labels, s.SavedAt, s.DeletedAt = sandbox.Stopped, map[string]string{"env": "test"}, time.Time{}, time.Time{}
	s.Conditions = nil
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		if err := tx.UpdateSandbox(ctx, &s); err != nil {
			return err
		}
		got, err := tx.Sandbox(ctx, s.ID) // a transaction sees its own writes
		if err == nil && !reflect.DeepEqual(got, s) {
			t.Errorf("read in the transaction\n%+v, wrote\n%+v", got, s)
		}
		return err
	})
	if s.Version != 2 {
		t.Errorf("the version is %d after an update, want 2", s.Version)
	}
	if got := b.get(t, s.ID); !reflect.DeepEqual(got, s) {
		t.Errorf("read\n%+v, wrote\n%+v", got, s)
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		names, err := r.SandboxNames(ctx, manyIDs(s.ID))
		if err != nil || len(names) != 1 || names[s.ID] != s.Name {
			t.Errorf("the names of many are %v, %v", names, err)
		}
		none, err := r.SandboxNames(ctx, nil)
		if err != nil || len(none) != 0 {
			t.Errorf("the names of none are %v, %v", none, err)
		}
		return nil
	})
	err := b.s.View(t.Context(), func(ctx context.Context, r store.Reader) error { _, err := r.Sandbox(ctx, "sbx_none"); return err })
	is(t, err, fault.NotFound, "")
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.InsertSandbox(ctx, s) }), fault.Conflict, "")
}

// manyIDs are more ids than one query names, of which one may be there.
func manyIDs(id string) []string {
	var ids []string
	for i := range 1200 {
		ids = append(ids, fmt.Sprint("sbx_none_", i))
	}
	return append(ids, id)
}

func staleVersion(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	first, second := s, s
	first.Message = "first"
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &first) })
	second.Message = "second"
	err := b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &second) })
	is(t, err, fault.Conflict, store.ReasonStale)
	if got := b.get(t, s.ID); got.Message != "first" || got.Version != 2 || second.Version != 1 {
		t.Errorf("after a stale write: %q version %d, the loser's version is %d", got.Message, got.Version, second.Version)
	}
	none := b.sandbox("none")
	err = b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &none) })
	is(t, err, fault.NotFound, "")

	op := b.operation(s.ID, sandbox.Sleep)
	stale := op
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		if err := tx.InsertOperation(ctx, op); err != nil {
			return err
		}
		return tx.UpdateOperation(ctx, &op)
	})
	err = b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateOperation(ctx, &stale) })
	is(t, err, fault.Conflict, store.ReasonStale)
}

func names(t *testing.T, b *bundle) {
	first, twin, other := b.sandbox("otter"), b.sandbox("otter"), b.sandbox("otter")
	other.Project = "p2"
	b.insert(t, first, other)
	insert := func(ctx context.Context, tx store.Tx) error { return tx.InsertSandbox(ctx, twin) }
	is(t, b.s.Update(t.Context(), insert), fault.Conflict, store.ReasonName)

	byName := func() (id string, err error) {
		err = b.s.View(t.Context(), func(ctx context.Context, r store.Reader) error {
			s, err := r.SandboxByName(ctx, "p1", "otter")
			id = s.ID
			return err
		})
		return id, err
	}
	held := func(want bool) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) error {
			if got, err := r.NameHeld(ctx, "p1", "otter"); got != want || err != nil {
				t.Errorf("the name is held: %v, %v, want %v", got, err, want)
			}
			return nil
		})
	}
	held(true)
	// A deletion that was accepted frees the name, and the name still finds its last
	// holder until another has it or the deletion has ended.
	first.DeletedAt = b.at
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &first) })
	held(false)
	if id, err := byName(); id != first.ID || err != nil {
		t.Errorf("the name of what is being deleted finds %q, %v", id, err)
	}
	if err := b.s.Update(t.Context(), insert); err != nil {
		t.Fatalf("the name is not free: %v", err)
	}
	if id, err := byName(); id != twin.ID || err != nil {
		t.Errorf("the name finds %q, %v, want its new holder %s", id, err, twin.ID)
	}
	third := b.sandbox("badger")
	b.insert(t, third)
	third.Name = "otter"
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &third) }), fault.Conflict, store.ReasonName)

	first.State, twin.State, twin.DeletedAt = sandbox.Deleted, sandbox.Deleted, b.at
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		if err := tx.UpdateSandbox(ctx, &first); err != nil {
			return err
		}
		return tx.UpdateSandbox(ctx, &twin)
	})
	_, err := byName()
	is(t, err, fault.NotFound, "")
}

func oneActiveOperation(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	first, second := b.operation(s.ID, sandbox.Sleep), b.operation(s.ID, sandbox.Stop)
	add := func(op sandbox.Operation) error {
		return b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.InsertOperation(ctx, op) })
	}
	if err := add(first); err != nil {
		t.Fatal(err)
	}
	is(t, add(second), fault.Conflict, store.ReasonActive)
	is(t, add(first), fault.Conflict, "")
	for _, status := range []sandbox.OperationStatus{sandbox.Running, sandbox.Succeeded} {
		first.Status = status
		b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateOperation(ctx, &first) })
		err := add(second)
		if status.Active() {
			is(t, err, fault.Conflict, store.ReasonActive)
		} else if err != nil {
			t.Errorf("after the first has ended: %v", err)
		}
	}
	// Reviving an ended one beside an active one is refused too.
	first.Status = sandbox.Running
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateOperation(ctx, &first) }), fault.Conflict, store.ReasonActive)
	// Operations without a sandbox do not get in each other's way.
	for range 2 {
		if err := add(b.operation("", sandbox.BuildTemplate)); err != nil {
			t.Errorf("an operation without a sandbox: %v", err)
		}
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		op, err := r.ActiveOperation(ctx, s.ID)
		if err == nil && (op == nil || op.ID != second.ID) {
			t.Errorf("the active operation is %+v, want %s", op, second.ID)
		}
		if none, err := r.ActiveOperation(ctx, "sbx_none"); none != nil || err != nil {
			t.Errorf("the active operation of nothing: %v, %v", none, err)
		}
		all, err2 := r.ActiveOperations(ctx)
		if len(all) != 3 {
			t.Errorf("%d active operations, want 3", len(all))
		}
		some, err3 := r.ActiveOperations(ctx, s.ID, "sbx_none")
		if len(some) != 1 {
			t.Errorf("%d active operations of one sandbox, want 1", len(some))
		}
		return errorsOf(err, err2, err3)
	})
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func operationRoundTrip(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	op := b.operation(s.ID, sandbox.Fork)
	op.Step, op.Progress, op.Generation = "capture", 0.25, 3
	op.Params, op.Result = json.RawMessage(`{"count":2}`), json.RawMessage(`[]`)
	op.Error = &sandbox.OperationError{Code: "internal", Message: "why", Reason: "r"}
	op.Timings = []sandbox.StepTime{{Step: "prepare", Milliseconds: 1.25}, {Step: "capture", Milliseconds: 40}}
	op.Status, op.StartedAt, op.EndedAt = sandbox.Errored, b.at, b.at.Add(time.Second)
	bare := b.operation("", sandbox.BuildTemplate)
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return errorsOf(tx.InsertOperation(ctx, op), tx.InsertOperation(ctx, bare))
	})
	b.view(t, func(ctx context.Context, r store.Reader) error {
		for _, want := range []sandbox.Operation{op, bare} {
			got, err := r.Operation(ctx, want.ID)
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("read\n%+v (%v), wrote\n%+v", got, err, want)
			}
		}
		_, err := r.Operation(ctx, "op_none")
		is(t, err, fault.NotFound, "")
		for _, c := range []struct {
			f    store.OperationFilter
			want int
		}{
			{store.OperationFilter{Project: "p1"}, 2}, {store.OperationFilter{Project: "p2"}, 0},
			{store.OperationFilter{Sandbox: s.ID}, 1}, {store.OperationFilter{Page: store.Page{Limit: 1}}, 1},
			{store.OperationFilter{Page: store.Page{After: store.Cursor{At: op.CreatedAt, ID: op.ID}}}, 1},
		} {
			list, err := r.Operations(ctx, c.f)
			if err != nil || len(list) != c.want {
				t.Errorf("%+v: %d operations, %v, want %d", c.f, len(list), err, c.want)
			}
		}
		return nil
	})
}

func pages(t *testing.T, b *bundle) {
	var all []sandbox.Sandbox
	for i := range 23 {
		s := b.sandbox(fmt.Sprintf("s-%02d", i))
		if i >= 5 && i < 12 {
			s.CreatedAt = b.at.Add(5 * time.Millisecond) // made in the same millisecond
		}
		all = append(all, s)
	}
	b.insert(t, all...)
	seen := map[string]int{}
	var order []string
	cursor := store.Cursor{}
	for page := 0; ; page++ {
		var rows []sandbox.Sandbox
		b.view(t, func(ctx context.Context, r store.Reader) (err error) {
			rows, err = r.Sandboxes(ctx, store.SandboxFilter{Project: "p1", Page: store.Page{Limit: 4, After: cursor}})
			return err
		})
		if len(rows) == 0 {
			break
		}
		for _, s := range rows {
			seen[s.ID]++
			order = append(order, s.ID)
		}
		last := rows[len(rows)-1]
		cursor = store.Cursor{At: last.CreatedAt, ID: last.ID}
		// The row that the cursor names goes, and another comes.
		last.State, last.DeletedAt = sandbox.Deleted, b.at
		b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &last) })
		if page < 3 {
			b.insert(t, b.sandbox(fmt.Sprintf("new-%d", page)))
		}
	}
	for _, s := range all {
		if seen[s.ID] != 1 {
			t.Errorf("%s was listed %d times", s.Name, seen[s.ID])
		}
	}
	if len(seen) != len(all)+3 {
		t.Errorf("%d rows were listed, want %d", len(seen), len(all)+3)
	}
	if !slices.IsSorted(order) {
		t.Errorf("the order is not that of the making: %v", order)
	}
}

func filters(t *testing.T, b *bundle) {
	a, c, d, e, f := b.sandbox("a"), b.sandbox("c"), b.sandbox("d"), b.sandbox("e"), b.sandbox("f")
	a.Labels = map[string]string{"env": "prod", "team": "x"}
	c.Labels, c.State = map[string]string{"env": "prod", "team": "y"}, sandbox.Stopped
	d.Labels, d.Project = map[string]string{"env": "prod", "team": "x"}, "p2"
	e.Spec.Template, e.Spec.Version, e.Host = "node", "sha256:bb", "far"
	f.State, f.DeletedAt, f.Labels = sandbox.Deleted, b.at, map[string]string{"team": "prod"} // a value under another key
	e.Origin = sandbox.Origin{Kind: "fork", Source: a.ID, Mode: "disk"}
	e.PolicyChange = 3
	b.insert(t, a, c, d, e, f)
	for _, test := range []struct {
		f    store.SandboxFilter
		want []string
	}{
		{store.SandboxFilter{}, []string{"a", "c", "d", "e"}},
		{store.SandboxFilter{Project: "p1"}, []string{"a", "c", "e"}},
		{store.SandboxFilter{Project: "p1", Labels: map[string]string{"env": "prod"}}, []string{"a", "c"}},
		{store.SandboxFilter{Labels: map[string]string{"env": "prod", "team": "x"}}, []string{"a", "d"}},
		{store.SandboxFilter{Labels: map[string]string{"team": "prod"}}, nil},
		{store.SandboxFilter{Labels: map[string]string{"env": "PROD"}}, nil},
		{store.SandboxFilter{States: []sandbox.State{sandbox.Stopped}}, []string{"c"}},
		{store.SandboxFilter{States: []sandbox.State{sandbox.Deleted, sandbox.Stopped}}, []string{"c", "f"}},
		{store.SandboxFilter{Template: "node"}, []string{"e"}},
		{store.SandboxFilter{Version: "sha256:bb"}, []string{"e"}},
		{store.SandboxFilter{Host: "far"}, []string{"e"}},
		{store.SandboxFilter{Source: a.ID}, []string{"e"}},
		{store.SandboxFilter{PolicyPending: true}, []string{"e"}},
		{store.SandboxFilter{Project: "p1", States: []sandbox.State{sandbox.Ready}, Labels: map[string]string{"team": "x"}, Template: "base"}, []string{"a"}},
		{store.SandboxFilter{Labels: map[string]string{"env": "prod"}, Page: store.Page{Limit: 1, After: store.Cursor{At: a.CreatedAt, ID: a.ID}}}, []string{"c"}},
	} {
		if got := b.list(t, test.f); !slices.Equal(got, test.want) {
			t.Errorf("%+v: %v, want %v", test.f, got, test.want)
		}
	}
	// Labels that were replaced no longer match.
	a.Labels = map[string]string{"env": "test"}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateSandbox(ctx, &a) })
	if got := b.list(t, store.SandboxFilter{Labels: map[string]string{"team": "x"}}); !slices.Equal(got, []string{"d"}) {
		t.Errorf("after a change of labels: %v", got)
	}
}

func counted(t *testing.T, b *bundle) {
	for _, row := range []struct {
		project string
		state   sandbox.State
	}{
		{"p1", sandbox.Ready}, {"p1", sandbox.Ready}, {"p2", sandbox.Ready}, {"p1", sandbox.Sleeping}, {"p1", sandbox.Deleted},
	} {
		s := b.sandbox(fmt.Sprintf("box-%d", b.n))
		s.Project, s.State = row.project, row.state
		if s.State == sandbox.Deleted {
			s.DeletedAt = b.at
		}
		b.insert(t, s)
	}
	b.view(t, func(ctx context.Context, r store.Reader) error {
		got, err := r.SandboxStates(ctx)
		if want := (map[sandbox.State]int64{sandbox.Ready: 3, sandbox.Sleeping: 1}); !maps.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		return err
	})
}

func requestKeys(t *testing.T, b *bundle) {
	r := store.Request{
		Project: "p1", Route: "POST /v1/sandboxes", Key: "k1", BodyHash: []byte{1, 2, 3}, Outcome: "run",
		Sandboxes: []string{"sbx_1", "sbx_2"}, Operation: "op_1", Resource: "key_1", CreatedAt: b.at,
	}
	put := func(r store.Request) error {
		return b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.PutRequest(ctx, r) })
	}
	find := func(project, route, key string) (out store.Request, err error) {
		err = b.s.View(t.Context(), func(ctx context.Context, rd store.Reader) error {
			out, err = rd.Request(ctx, project, route, key)
			return err
		})
		return out, err
	}
	if err := put(r); err != nil {
		t.Fatal(err)
	}
	is(t, put(r), fault.Conflict, store.ReasonKey)
	if got, err := find("p1", r.Route, "k1"); err != nil || !reflect.DeepEqual(got, r) {
		t.Errorf("read %+v, %v, wrote %+v", got, err, r)
	}
	for _, other := range [][3]string{{"p2", r.Route, "k1"}, {"p1", "POST /v1/other", "k1"}, {"p1", r.Route, "k2"}} {
		_, err := find(other[0], other[1], other[2])
		is(t, err, fault.NotFound, "")
	}
	young := r
	young.Key, young.CreatedAt = "k2", b.at.Add(time.Hour)
	if err := put(young); err != nil {
		t.Fatal(err)
	}
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PruneRequests(ctx, b.at.Add(time.Minute)) })
	_, err := find("p1", r.Route, "k1")
	is(t, err, fault.NotFound, "")
	if _, err := find("p1", r.Route, "k2"); err != nil {
		t.Errorf("the younger key is gone too: %v", err)
	}
}

func templates(t *testing.T, b *bundle) {
	base := store.Template{
		Project: "p1", Name: "base", Digest: "sha256:aa", Source: "debian", Bytes: 12, User: "agent", Workdir: "/workspace",
		Env: map[string]string{"PATH": "/bin"}, CreatedAt: b.at,
	}
	node, far := base, base
	node.Name, node.Digest, far.Project = "node", "sha256:bb", "p2"
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return errorsOf(tx.PutTemplate(ctx, base), tx.PutTemplate(ctx, node), tx.PutTemplate(ctx, far))
	})
	read := func(f func(context.Context, store.Reader) ([]store.Template, error), want ...store.Template) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) error {
			got, err := f(ctx, r)
			if len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
				t.Errorf("read\n%+v, want\n%+v", got, want)
			}
			return err
		})
	}
	page := func(p store.Page) func(context.Context, store.Reader) ([]store.Template, error) {
		return func(ctx context.Context, r store.Reader) ([]store.Template, error) { return r.Templates(ctx, "p1", p) }
	}
	read(page(store.Page{}), base, node)
	read(page(store.Page{Limit: 1}), base)
	read(page(store.Page{After: store.Cursor{ID: "base"}}), node)
	read(func(ctx context.Context, r store.Reader) ([]store.Template, error) {
		return r.TemplatesByDigest(ctx, "sha256:aa")
	}, base, far)
	base.Digest, base.Bytes = "sha256:cc", 13
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PutTemplate(ctx, base) })
	read(page(store.Page{}), base, node)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.DeleteTemplate(ctx, "p1", "node") })
	read(page(store.Page{}), base)
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.DeleteTemplate(ctx, "p1", "node") }), fault.NotFound, "")
	is(t, b.s.View(t.Context(), func(ctx context.Context, r store.Reader) error { _, err := r.Template(ctx, "p1", "node"); return err }), fault.NotFound, "")
}

func apiKeys(t *testing.T, b *bundle) {
	k := store.APIKey{ID: "key_1", Project: "p1", Name: "laptop", Hash: []byte{0, 1, 255}, Prefix: "hutch_ab", Scopes: "read,keys", CreatedAt: b.at, ExpiresAt: b.at.Add(time.Hour)}
	twin := k
	twin.ID = "key_2"
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.InsertAPIKey(ctx, k) })
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.InsertAPIKey(ctx, twin) }), fault.Conflict, "")
	k.LastUsed = b.at.Add(time.Minute)
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		return errorsOf(tx.TouchAPIKey(ctx, "key_1", k.LastUsed), tx.TouchAPIKey(ctx, "key_none", k.LastUsed))
	})
	b.view(t, func(ctx context.Context, r store.Reader) error {
		byHash, err := r.APIKeyByHash(ctx, []byte{0, 1, 255})
		if !reflect.DeepEqual(byHash, k) {
			t.Errorf("read %+v, wrote %+v", byHash, k)
		}
		byID, err2 := r.APIKey(ctx, "p1", "key_1")
		list, err3 := r.APIKeys(ctx, "p1", store.Page{})
		if !reflect.DeepEqual(byID, k) || len(list) != 1 || !reflect.DeepEqual(list[0], k) {
			t.Errorf("read %+v and %+v, wrote %+v", byID, list, k)
		}
		_, none := r.APIKeyByHash(ctx, []byte{9})
		is(t, none, fault.NotFound, "")
		_, foreign := r.APIKey(ctx, "p2", "key_1")
		is(t, foreign, fault.NotFound, "")
		anyones, err4 := r.APIKey(ctx, "", "key_1")
		if !reflect.DeepEqual(anyones, k) {
			t.Errorf("of any project: %+v", anyones)
		}
		return errorsOf(err, err2, err3, err4)
	})
	k.Hash, k.Prefix, k.RotatedAt = []byte{7}, "hutch_cd", b.at.Add(time.Minute)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.UpdateAPIKey(ctx, k) })
	b.view(t, func(ctx context.Context, r store.Reader) error {
		_, old := r.APIKeyByHash(ctx, []byte{0, 1, 255})
		is(t, old, fault.NotFound, "")
		byHash, err := r.APIKeyByHash(ctx, []byte{7})
		if !reflect.DeepEqual(byHash, k) {
			t.Errorf("after its rotation %+v, wrote %+v", byHash, k)
		}
		return err
	})
	gone := k
	gone.ID = "key_9"
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.UpdateAPIKey(ctx, gone) }), fault.NotFound, "")
	del := func(project string) error {
		return b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.DeleteAPIKey(ctx, project, "key_1") })
	}
	is(t, del("p2"), fault.NotFound, "")
	if err := del("p1"); err != nil {
		t.Fatal(err)
	}
	is(t, del("p1"), fault.NotFound, "")
}

func projects(t *testing.T, b *bundle) {
	b.view(t, func(ctx context.Context, r store.Reader) error {
		p, err := r.Project(ctx, "p1")
		if want := (store.Project{ID: "p1", Name: "project p1", CreatedAt: b.at, Plan: sandbox.PlanStandard, Budget: store.Budget{Spent: "0"}, Version: 1}); p != want {
			t.Errorf("read %+v, wrote %+v", p, want)
		}
		_, none := r.Project(ctx, "p9")
		is(t, none, fault.NotFound, "")
		return err
	})
	again := func(ctx context.Context, tx store.Tx) error {
		return tx.InsertProject(ctx, store.Project{ID: "p1", CreatedAt: b.at})
	}
	is(t, b.s.Update(t.Context(), again), fault.Conflict, store.ReasonExists)
}

func identity(t *testing.T, b *bundle) {
	s := b.sandbox("a")
	b.insert(t, s)
	is(t, b.s.View(t.Context(), func(ctx context.Context, r store.Reader) error { _, err := r.Identity(ctx, s.ID); return err }), fault.NotFound, "")
	for _, items := range []string{`[{"item":"mac"}]`, `[]`} {
		b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PutIdentity(ctx, s.ID, json.RawMessage(items)) })
		b.view(t, func(ctx context.Context, r store.Reader) error {
			got, err := r.Identity(ctx, s.ID)
			if string(got) != items {
				t.Errorf("read %s, wrote %s", got, items)
			}
			return err
		})
	}
}
