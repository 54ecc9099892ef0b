package control

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// TestPorts_N1: who may reach which port, and until when; what may not wakes nothing.
func TestPorts_N1(t *testing.T) {
	t.Parallel()
	clock := &handClock{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	b := newBench(t, func(c *Config) { c.Now = clock.now })
	ctx := t.Context()
	s := b.reaches("otter", sandbox.Sleeping)
	grant := func(r GrantPortRequest) (id, token string) {
		t.Helper()
		g, _, token, err := b.GrantPort(ctx, me, "otter", r)
		must0(t, err)
		return g.ID, token
	}
	_, one := grant(GrantPortRequest{Port: 3000})
	_, short := grant(GrantPortRequest{Port: 3000, Expires: clock.now().Add(time.Minute)})
	id, all := grant(GrantPortRequest{})
	refusedPort := func(port int, cred PortCredential, kind fault.Kind, reason string) {
		t.Helper()
		_, err := b.Port(ctx, s.ID, port, cred)
		wantFault(t, err, kind, reason)
		if got := b.get("otter"); got.State != sandbox.Sleeping {
			t.Fatalf("a refused call woke it: %s", got.State)
		}
	}
	refusedPort(3000, PortCredential{}, fault.Unauthenticated, "port_token")
	refusedPort(3000, PortCredential{Token: one + "x"}, fault.Unauthenticated, "port_token")
	refusedPort(3001, PortCredential{Token: one}, fault.Unauthenticated, "port_token")
	refusedPort(3000, PortCredential{Key: "hutch_wrong"}, fault.Unauthenticated, "")
	_, err := b.Port(ctx, "sbx_"+strings.Repeat("0", 26), 3000, PortCredential{Token: one})
	wantFault(t, err, fault.Unauthenticated, "port_token") // as if it were there
	_, foreign, err := b.CreateKey(ctx, boss, CreateKeyRequest{Name: "theirs", Project: "other"})
	must0(t, err)
	refusedPort(3000, PortCredential{Key: foreign}, fault.Unauthenticated, "port_token")
	_, reader, err := b.CreateKey(ctx, me, CreateKeyRequest{Name: "reads", Scopes: []string{"read"}})
	must0(t, err)
	refusedPort(3000, PortCredential{Key: reader}, fault.PermissionDenied, "scope")
	clock.set(clock.now().Add(2 * time.Minute))
	refusedPort(3000, PortCredential{Token: short}, fault.Unauthenticated, "port_token")

	if got := must(b.Port(ctx, s.ID, 3000, PortCredential{Token: one}))(t); got.Guest.Generation != 2 {
		t.Errorf("the way leads to generation %d", got.Guest.Generation)
	}
	must(b.Port(ctx, s.ID, 9, PortCredential{Token: all}))(t)
	_, full, err := b.CreateKey(ctx, me, CreateKeyRequest{Name: "all"})
	must0(t, err)
	must(b.Port(ctx, s.ID, 9, PortCredential{Key: full}))(t)
	must0(t, b.RevokePort(ctx, me, "otter", id, Idempotency{}))
	_, err = b.Port(ctx, s.ID, 9, PortCredential{Token: all})
	wantFault(t, err, fault.Unauthenticated, "port_token")
	wantFault(t, b.RevokePort(ctx, me, "otter", id, Idempotency{}), fault.NotFound, "grant")

	open, _ := grant(GrantPortRequest{Port: 8000, Public: true})
	if again, _ := grant(GrantPortRequest{Port: 8000, Public: true}); again != open {
		t.Errorf("a port is public twice: %s, %s", open, again)
	}
	must(b.Port(ctx, s.ID, 8000, PortCredential{}))(t)
	must(b.Port(ctx, s.ID, 8000, PortCredential{Key: foreign}))(t) // to everybody
	_, err = b.SetFirewall(ctx, me, "otter", FirewallRequest{Firewall: sandbox.Firewall{DenyPorts: []int{8000}}})
	must0(t, err)
	_, err = b.Port(ctx, s.ID, 8000, PortCredential{Key: full})
	wantFault(t, err, fault.PermissionDenied, "firewall")
	_, err = b.SetFirewall(ctx, me, "otter", FirewallRequest{})
	must0(t, err)

	// Tokens end at a stop; what is public stays, and says how to start it.
	b.ended(must(b.Stop(ctx, me, "otter", Idempotency{}))(t).Operation, sandbox.Succeeded)
	grants, _, err := b.PortGrants(ctx, me, "otter")
	must0(t, err)
	if len(grants) != 1 || grants[0].ID != open {
		t.Errorf("after a stop %+v", grants)
	}
	_, err = b.Port(ctx, s.ID, 8000, PortCredential{})
	wantFault(t, err, fault.FailedPrecondition, "state_stopped")
	_, _, _, err = b.GrantPort(ctx, me, "otter", GrantPortRequest{Port: 1})
	wantFault(t, err, fault.FailedPrecondition, "state_stopped")
	b.ended(must(b.Delete(ctx, me, "otter", DeleteRequest{}))(t).Operation, sandbox.Succeeded)
	_, err = b.Port(ctx, s.ID, 8000, PortCredential{})
	wantFault(t, err, fault.Unauthenticated, "port_token")
}

// TestGrantsAreBounded: what has expired makes room.
func TestGrantsAreBounded(t *testing.T) {
	t.Parallel()
	clock := &handClock{at: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	b := newBench(t, func(c *Config) { c.Now = clock.now })
	b.ready("otter")
	make := func(ctx context.Context, i int) error {
		_, _, _, err := b.GrantPort(ctx, me, "otter", GrantPortRequest{Port: 3000, Idempotency: Idempotency{Route: "POST", Key: fmt.Sprint(i)}})
		return err
	}
	for i := range grantsMost {
		must0(t, make(t.Context(), i))
	}
	wantFault(t, make(t.Context(), grantsMost), fault.QuotaExceeded, "port_grants")
	clock.set(clock.now().Add(2 * time.Hour))
	must0(t, make(t.Context(), grantsMost))
	grants, _, err := b.PortGrants(t.Context(), me, "otter")
	if must0(t, err); len(grants) != 1 {
		t.Errorf("%d grants are left", len(grants))
	}
}
