package storetest

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// sshKeys: a key is once in a project, and may be in others.
func sshKeys(t *testing.T, b *bundle) {
	k := store.SSHKey{ID: "sshk_1", Project: "p1", Name: "laptop", Fingerprint: "SHA256:a", PublicKey: "ssh-ed25519 AAAA", CreatedAt: b.at}
	twin, other := k, k
	twin.ID = "sshk_2"
	other.ID, other.Project, other.CreatedAt = "sshk_0", "p2", b.at.Add(time.Minute)
	insert := func(k store.SSHKey) error {
		return b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.InsertSSHKey(ctx, k) })
	}
	if err := errorsOf(insert(k), insert(other)); err != nil {
		t.Fatal(err)
	}
	is(t, insert(twin), fault.Conflict, store.ReasonExists)
	b.view(t, func(ctx context.Context, r store.Reader) error {
		all, err := r.SSHKeysByFingerprint(ctx, "SHA256:a")
		if !reflect.DeepEqual(all, []store.SSHKey{k, other}) {
			t.Errorf("by fingerprint %+v", all)
		}
		list, err2 := r.SSHKeys(ctx, "p1", store.Page{})
		if !reflect.DeepEqual(list, []store.SSHKey{k}) {
			t.Errorf("of p1 %+v", list)
		}
		byID, err3 := r.SSHKey(ctx, "", "sshk_0")
		if byID != other {
			t.Errorf("by id %+v", byID)
		}
		_, foreign := r.SSHKey(ctx, "p1", "sshk_0")
		is(t, foreign, fault.NotFound, "")
		return errorsOf(err, err2, err3)
	})
	del := func(project string) error {
		return b.s.Update(t.Context(), func(ctx context.Context, tx store.Tx) error { return tx.DeleteSSHKey(ctx, project, "sshk_1") })
	}
	is(t, del("p2"), fault.NotFound, "")
	if err := del("p1"); err != nil {
		t.Fatal(err)
	}
	is(t, del("p1"), fault.NotFound, "")
}
