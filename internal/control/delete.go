package control

import (
	"context"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// deleteParams are the parameters of a delete operation.
type deleteParams struct {
	Permanent bool `json:"permanent,omitempty"`
	// Cancels is the operation that ran when the deletion was accepted. It is kept so
	// that the host is told of the cancellation also after a restart.
	Cancels string `json:"cancels,omitempty"`
}

// Delete removes a sandbox, whatever its state and whatever is at work on it. Its name is
// free when Delete returns; it is deleted when its host has ended it. Its disk is kept for
// Limits.UndeleteFor, unless the deletion is permanent: that erases also what was deleted
// before.
func (c *Control) Delete(ctx context.Context, a Actor, ref string, r DeleteRequest) (Result, error) {
	return c.onSandboxes(ctx, a, r.Idempotency, nil, func(ctx context.Context, w *writer) (Result, error) {
		if _, err := resolve(ctx, w, a, ref); r.Permanent && fault.Is(err, fault.NotFound) {
			s, err := resolveKept(ctx, w, a, ref, w.at)
			if err != nil {
				return Result{}, err
			}
			ref = s.ID
		}
		params := func(cancelled *sandbox.Operation) any {
			p := deleteParams{Permanent: r.Permanent}
			if cancelled != nil {
				p.Cancels = cancelled.ID
			}
			return p
		}
		out, err := w.admit(ctx, c, a, ref, sandbox.Request{Verb: sandbox.Delete, Erase: r.Permanent}, hostFacts{}, params)
		if err != nil || out.Outcome != sandbox.Accept {
			return out, err
		}
		if out.Sandbox.State != sandbox.Deleted {
			out.Sandbox.DeletedAt = w.at
		}
		out.Sandbox.UpdatedAt = w.at
		return out, w.UpdateSandbox(ctx, &out.Sandbox)
	})
}

// Update changes a sandbox's name, labels, policy or sleep settings. Its operation is nil:
// it is done when Update returns.
func (c *Control) Update(ctx context.Context, a Actor, ref string, r UpdateRequest) (Result, error) {
	check := func() error {
		if r.Name != nil {
			if err := validName("sandbox", *r.Name); err != nil {
				return err
			}
		}
		if r.Labels != nil {
			return validLabels(*r.Labels)
		}
		return nil
	}
	return c.onSandboxes(ctx, a, r.Idempotency, check, func(ctx context.Context, w *writer) (Result, error) {
		s, err := resolve(ctx, w, a, ref)
		if err != nil {
			return Result{}, err
		}
		if !s.DeletedAt.IsZero() {
			return Result{}, unknown(ref)
		}
		if r.Name != nil {
			s.Name = *r.Name
		}
		if r.Labels != nil {
			s.Labels = *r.Labels
		}
		if r.TTL.Given || r.Sleep.given() || r.Policy != (PolicyRequest{}) {
			p, mode, err := r.Sleep.set(s.Policy, s.Spec.Sleep)
			if err != nil {
				return Result{}, err
			}
			if p, err = r.Policy.set(p); err != nil {
				return Result{}, err
			}
			if p, err = r.TTL.set(p, mode, c.limits.Bounds); err != nil {
				return Result{}, err
			}
			s.Spec.Sleep = mode
			if r.TTL.Given {
				if err := w.planAllows(ctx, c, s, p); err != nil {
					return Result{}, err
				}
			}
			c.change(&s, p, r.TTL.Given)
		}
		s.UpdatedAt = w.at
		if err := w.UpdateSandbox(ctx, &s); err != nil {
			return Result{}, err
		}
		return Result{Sandbox: s, Outcome: sandbox.Done}, w.event(ctx, "sandbox.updated", s.ID, "", updated(s))
	})
}
