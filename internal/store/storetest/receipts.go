package storetest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// receipts: one an operation, in the order of time; the last of each sandbox outlives the
// rest of its history.
func receipts(t *testing.T, b *bundle) {
	s, other := b.sandbox("a"), b.sandbox("b")
	b.insert(t, s, other)
	at := func(n int) time.Time { return b.at.Add(time.Duration(n) * time.Hour) }
	rc := func(op, id string, n int) store.Receipt {
		return store.Receipt{Operation: op, Project: "p1", Sandbox: id, Document: `{"receipt":{"ä":1},"signature":"` + op + `"}`, At: at(n)}
	}
	want := []store.Receipt{rc("op_1", s.ID, 1), rc("op_2", s.ID, 2), rc("op_3", s.ID, 3)}
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for _, r := range append([]store.Receipt{want[2], want[0], want[1]}, rc("op_4", other.ID, 0)) {
			if err := tx.AddReceipt(ctx, r); err != nil {
				return err
			}
		}
		return nil
	})
	read := func(id string, p store.Page) (out []store.Receipt) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) (err error) { out, err = r.Receipts(ctx, id, p); return err })
		return out
	}
	if got := read(s.ID, store.Page{}); !reflect.DeepEqual(got, want) {
		t.Errorf("read\n%+v, wrote\n%+v", got, want)
	}
	if got := read(s.ID, store.Page{Limit: 1, After: store.Cursor{At: at(1), ID: "op_1"}}); !reflect.DeepEqual(got, want[1:2]) {
		t.Errorf("the second page: %+v", got)
	}
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.AddReceipt(ctx, want[0]) }), fault.Conflict, store.ReasonExists)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.PruneHistory(ctx, at(9)) })
	if got := read(s.ID, store.Page{}); !reflect.DeepEqual(got, want[2:]) {
		t.Errorf("after pruning: %+v", got)
	}
	if got := read(other.ID, store.Page{}); len(got) != 1 {
		t.Errorf("the other's last receipt: %+v", got)
	}
}

func signingKeys(t *testing.T, b *bundle) {
	want := []store.SigningKey{{ID: "k2", Secret: []byte{0, 1, 255}, CreatedAt: b.at}, {ID: "k1", Secret: []byte("seed"), CreatedAt: b.at.Add(time.Hour)}}
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for _, k := range []store.SigningKey{want[1], want[0]} {
			if err := tx.AddSigningKey(ctx, k); err != nil {
				return err
			}
		}
		return nil
	})
	b.view(t, func(ctx context.Context, r store.Reader) error {
		got, err := r.SigningKeys(ctx)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("read %+v, wrote %+v", got, want)
		}
		return err
	})
	is(t, b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.AddSigningKey(ctx, want[0]) }), fault.Conflict, store.ReasonExists)
}

// kept: what is deleted and can be brought back is found by its name, whoever has that
// now, until its time; and its template's version is in use.
func kept(t *testing.T, b *bundle) {
	gone, erased, holder := b.sandbox("otter"), b.sandbox("otter"), b.sandbox("otter")
	gone.State, gone.DeletedAt, gone.EraseAt = sandbox.Deleted, b.at, b.at.Add(time.Hour)
	erased.State, erased.DeletedAt = sandbox.Deleted, b.at
	gone.Spec.Version = "sha256:old"
	b.insert(t, gone, erased, holder)
	for _, c := range []struct {
		f    store.SandboxFilter
		want int
	}{
		{store.SandboxFilter{Project: "p1", Name: "otter", KeptAt: b.at.Add(time.Minute)}, 1},
		{store.SandboxFilter{Project: "p1", Name: "otter", KeptAt: b.at.Add(time.Hour)}, 0},
		{store.SandboxFilter{Project: "p2", Name: "otter", KeptAt: b.at}, 0},
		{store.SandboxFilter{Project: "p1", Name: "heron", KeptAt: b.at}, 0},
		{store.SandboxFilter{Version: "sha256:old"}, 0},
		{store.SandboxFilter{Version: "sha256:old", HasDisk: true}, 1},
		{store.SandboxFilter{Project: "p1", HasDisk: true}, 2},
		{store.SandboxFilter{Project: "p1", States: []sandbox.State{sandbox.Deleted}}, 2},
	} {
		if got := b.list(t, c.f); len(got) != c.want {
			t.Errorf("%+v gives %d, want %d", c.f, len(got), c.want)
		}
	}
}
