package apiserver

import (
	"context"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// GetFirewall shows a sandbox's firewall.
func (s *server) GetFirewall(ctx context.Context, r GetFirewallRequestObject) (GetFirewallResponseObject, error) {
	v, err := s.control.Get(ctx, callOf(ctx).caller, r.Ref)
	if err != nil {
		return nil, err
	}
	return GetFirewall200JSONResponse(firewallState(v.Sandbox)), nil
}

// SetFirewall puts another firewall in its place.
func (s *server) SetFirewall(ctx context.Context, r SetFirewallRequestObject) (SetFirewallResponseObject, error) {
	res, err := s.control.SetFirewall(durable(ctx), callOf(ctx).caller, r.Ref, control.FirewallRequest{
		Idempotency: idempotency(ctx, r.Params.IdempotencyKey), Firewall: firewallOf(*r.Body),
	})
	if err != nil {
		return nil, err
	}
	return SetFirewall200JSONResponse(firewallState(res.Sandbox)), nil
}

func firewallState(s sandbox.Sandbox) api.FirewallState {
	f := s.Policy.Walls()
	return api.FirewallState{Sandbox: s.ID, Pending: s.PolicyChange != 0, Firewall: api.Firewall{
		Mode: api.FirewallMode(f.Mode), Allow: f.Allow, Deny: f.Deny,
		Ports: api.FirewallPorts(f.Ports), AllowPorts: f.AllowPorts, DenyPorts: f.DenyPorts,
	}}
}

func firewallOf(f api.Firewall) sandbox.Firewall {
	return sandbox.Firewall{
		Mode: sandbox.FirewallMode(f.Mode), Allow: f.Allow, Deny: f.Deny,
		Ports: sandbox.PortMode(f.Ports), AllowPorts: f.AllowPorts, DenyPorts: f.DenyPorts,
	}
}
