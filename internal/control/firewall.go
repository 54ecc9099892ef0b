package control

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// FirewallRequest puts a firewall in the place of the one that a sandbox has.
type FirewallRequest struct {
	Idempotency Idempotency
	Firewall    sandbox.Firewall // what is "" is the default
}

// SetFirewall changes what a sandbox may reach and be reached on (N3). Where its host
// answers it holds when SetFirewall returns, for what is established too; else the
// sandbox's PolicyChange says that it is still to come.
func (c *Control) SetFirewall(ctx context.Context, a Actor, ref string, r FirewallRequest) (Result, error) {
	var f sandbox.Firewall
	check := func() (err error) {
		f, err = r.Firewall.Normal()
		return err
	}
	out, err := c.onSandboxes(ctx, a, r.Idempotency, check, func(ctx context.Context, w *writer) (Result, error) {
		s, err := resolve(ctx, w, a, ref)
		if err != nil {
			return Result{}, err
		}
		if !s.DeletedAt.IsZero() {
			return Result{}, unknown(ref)
		}
		p := s.Policy
		p.Firewall = &f
		c.change(&s, p, false)
		s.UpdatedAt = w.at
		if err := w.UpdateSandbox(ctx, &s); err != nil {
			return Result{}, err
		}
		data := updated(s)
		data["firewall"] = f
		return Result{Sandbox: s, Outcome: sandbox.Done}, w.event(ctx, "sandbox.updated", s.ID, "", data)
	})
	if err != nil || out.Sandbox.PolicyChange == 0 {
		return out, err
	}
	return out, c.applied(ctx, &out.Sandbox)
}

// applyPatience is how long a change waits for its host to say that it holds, and
// applyLook the pause between two looks.
const (
	applyPatience = 5 * time.Second
	applyLook     = 20 * time.Millisecond
)

// applied waits until the host has taken a sandbox's policy. One that does not answer in
// time leaves the change pending, and is told again until it does.
func (c *Control) applied(ctx context.Context, s *sandbox.Sandbox) error {
	for deadline := time.Now().Add(applyPatience); s.PolicyChange != 0 && time.Now().Before(deadline); {
		select {
		case <-ctx.Done():
			return nil // it is done all the same
		case <-time.After(applyLook):
		}
		now := *s
		err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
			now, err = r.Sandbox(ctx, s.ID)
			return err
		})
		if err != nil {
			return err
		}
		s.PolicyChange = now.PolicyChange
	}
	return nil
}
