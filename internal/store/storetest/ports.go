package storetest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// portGrants: a port is public once, tokens are as many as there are, and what ends at a
// stop is the tokens of that sandbox.
func portGrants(t *testing.T, b *bundle) {
	s, other := b.sandbox("a"), b.sandbox("b")
	b.insert(t, s, other)
	open := store.PortGrant{ID: "prt_2", Project: "p1", Sandbox: s.ID, Port: 8000, CreatedAt: b.at.Add(time.Hour)}
	token := store.PortGrant{ID: "prt_1", Project: "p1", Sandbox: s.ID, Hash: []byte{0, 1, 255}, CreatedAt: b.at, ExpiresAt: b.at.Add(time.Minute)}
	kept := store.PortGrant{ID: "prt_3", Project: "p1", Sandbox: other.ID, Port: 8000, Hash: []byte{1}, CreatedAt: b.at}
	b.update(t, func(ctx context.Context, tx store.Tx) error {
		for _, g := range []store.PortGrant{open, token, kept} {
			if err := tx.InsertPortGrant(ctx, g); err != nil {
				return err
			}
		}
		return nil
	})
	check := func(id string, want ...store.PortGrant) {
		t.Helper()
		b.view(t, func(ctx context.Context, r store.Reader) error {
			got, err := r.PortGrants(ctx, id)
			if len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
				t.Errorf("read\n%+v, wrote\n%+v", got, want)
			}
			return err
		})
	}
	try := func(fn func(ctx context.Context, tx store.Tx) error) error { return b.s.Update(t.Context(), fn) }
	check(s.ID, token, open)
	again := open
	again.ID = "prt_4"
	is(t, try(func(ctx context.Context, tx store.Tx) error { return tx.InsertPortGrant(ctx, again) }), fault.Conflict, store.ReasonExists)
	is(t, try(func(ctx context.Context, tx store.Tx) error { return tx.DeletePortGrant(ctx, s.ID, kept.ID) }), fault.NotFound, "")
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.EndPortGrants(ctx, s.ID, false) })
	check(s.ID, open)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.EndPortGrants(ctx, s.ID, true) })
	check(s.ID)
	check(other.ID, kept)
	b.update(t, func(ctx context.Context, tx store.Tx) error { return tx.DeletePortGrant(ctx, other.ID, kept.ID) })
	check(other.ID)
}
