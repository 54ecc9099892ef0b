package control

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// R10: df names the project's sandboxes, the largest first, and adds up the rest.
func TestR10DiskUsage(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	ctx := t.Context()
	small, large, slept := b.ready("small"), b.ready("large"), b.reaches("slept", sandbox.Sleeping)
	other := Actor{Project: "other"}
	must0(t, b.db.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		return tx.PutTemplate(ctx, store.Template{Project: "other", Name: "base", Digest: "sha256:base", Source: "debian", CreatedAt: time.Now()})
	}))
	theirs := must(b.Create(ctx, other, CreateRequest{Name: "theirs"}))(t).Sandbox
	b.host.script(func(h *fakeHost) {
		h.disks = hostproto.DiskReport{PoolBytes: 1000, PoolFree: 50, Sandboxes: []hostproto.SandboxDisk{
			{Sandbox: small.ID, Owned: true, Size: 100, Allocated: 10, Unique: 1},
			{Sandbox: large.ID, Owned: true, Size: 100, Allocated: 70, Unique: -1},
			{Sandbox: slept.ID, Owned: true, Size: 100, Allocated: 20, Memory: 40},
			{Sandbox: theirs.ID, Owned: true, Size: 100, Allocated: 30, Memory: 5},
			{Sandbox: "sbx_gone", Allocated: 3, Memory: 4},
			{Sandbox: "sbx_unwritten", Owned: true, Allocated: 2},
		}}
	})
	hosts := must(b.DiskUsage(ctx, me, ""))(t)
	if len(hosts) != 1 || hosts[0].ID != "local" {
		t.Fatalf("hosts: %+v", hosts)
	}
	h := hosts[0]
	var order []string
	for _, d := range h.Mine {
		order = append(order, d.Sandbox.Name)
	}
	if got := strings.Join(order, " "); got != "large slept small" {
		t.Errorf("the order is %s", got)
	}
	if h.Others != (hostproto.Share{Count: 2, Bytes: 37}) || h.Unowned != (hostproto.Share{Count: 1, Bytes: 7}) {
		t.Errorf("others %+v, unowned %+v", h.Others, h.Unowned)
	}
	one := must(b.DiskUsage(ctx, me, "slept"))(t)
	if len(one[0].Mine) != 1 || one[0].Mine[0].Memory != 40 {
		t.Errorf("of one: %+v", one[0].Mine)
	}
	_, err := b.DiskUsage(ctx, me, "theirs")
	wantFault(t, err, fault.NotFound, "")
	b.host.script(func(h *fakeHost) { h.infoErr = errors.New("away") })
	_, err = b.DiskUsage(ctx, me, "")
	wantFault(t, err, fault.Unavailable, "no_host")
}

// D6: a refusal says how much is free and what to do.
func TestD6PoolFullMessage(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.ready("otter")
	b.host.script(func(h *fakeHost) { h.info.PoolBytes, h.info.PoolFree = 100e9, 9.9e9 })
	_, err := b.Create(t.Context(), me, CreateRequest{})
	f := wantFault(t, err, fault.NoCapacity, "pool_full")
	for _, part := range []string{"9.9 of 100.0 GB free", "`hutch df`", "delete", "larger"} {
		if !strings.Contains(f.Message, part) {
			t.Errorf("%q does not say %q", f.Message, part)
		}
	}
	_, err = b.Fork(t.Context(), me, "otter", ForkRequest{})
	wantFault(t, err, fault.NoCapacity, "pool_full")
	// What exists goes on.
	b.ended(must(b.Sleep(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Wake(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	b.ended(must(b.Stop(t.Context(), me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
}
