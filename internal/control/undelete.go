package control

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// UndeleteRequest asks that a deleted sandbox come back.
type UndeleteRequest struct {
	Idempotency Idempotency
	Name        string // "" is the name that it had, or a new one where that is taken
}

// undeleteParams are the parameters of an undelete operation.
type undeleteParams struct {
	Name string `json:"name,omitempty"`
}

// Undelete brings a deleted sandbox back as a stopped one, with its disk (X9). ref is its
// id, or the name that it had: then the one that was deleted last is meant. Where its
// name has been taken meanwhile it gets a new one.
func (c *Control) Undelete(ctx context.Context, a Actor, ref string, r UndeleteRequest) (Result, error) {
	check := func() error {
		if r.Name == "" {
			return nil
		}
		return validName("sandbox", r.Name)
	}
	return c.onSandboxes(ctx, a, r.Idempotency, check, func(ctx context.Context, w *writer) (Result, error) {
		s, err := resolveKept(ctx, w, a, ref, w.at)
		if err != nil {
			return Result{}, err
		}
		if r.Name != "" {
			if holder, err := w.SandboxByName(ctx, a.Project, r.Name); err == nil && holder.DeletedAt.IsZero() {
				return Result{}, fault.New(fault.Conflict, "cannot bring %s back as %s: the name is in use; choose another, or leave --name out", s.Name, r.Name).
					Because(store.ReasonName)
			} else if err != nil && !fault.Is(err, fault.NotFound) {
				return Result{}, err
			}
		}
		params := func(*sandbox.Operation) any { return undeleteParams{Name: r.Name} }
		out, err := w.admit(ctx, c, a, s.ID, sandbox.Request{Verb: sandbox.Undelete}, hostFacts{}, params)
		if err != nil || out.Outcome != sandbox.Accept {
			return out, err
		}
		back := store.Use{Sandboxes: 1, DiskBytes: s.Spec.Disk}
		return out, w.within(ctx, c, more{verb: sandbox.Undelete, name: s.Name, add: back, spec: s.Spec, policy: &s.Policy, free: true})
	})
}

// resolveKept finds a deleted sandbox that can be brought back, by its id or by the name
// that it had when it was deleted. By its id one is found too that is not deleted.
func resolveKept(ctx context.Context, r store.Reader, a Actor, ref string, at time.Time) (sandbox.Sandbox, error) {
	if strings.HasPrefix(ref, "sbx_") {
		return resolve(ctx, r, a, ref)
	}
	if !nameSyntax.MatchString(ref) {
		return sandbox.Sandbox{}, unknown(ref)
	}
	list, err := r.Sandboxes(ctx, store.SandboxFilter{Project: a.Project, Name: ref, KeptAt: at})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	var last sandbox.Sandbox
	for _, s := range list {
		if last.ID == "" || s.DeletedAt.After(last.DeletedAt) {
			last = s
		}
	}
	if last.ID != "" {
		return last, nil
	}
	if s, err := resolve(ctx, r, a, ref); err == nil { // it is there: what is asked for says what that means
		return s, nil
	}
	return last, fault.New(fault.NotFound, "there is no deleted sandbox %s that could be brought back; `hutch ls --deleted` lists those that can", shown(ref)).
		Because("sandbox")
}

// nameBack gives the name of a sandbox that comes back: the one that was asked for, or
// that it had, where nobody has it now.
func (c *Control) nameBack(ctx context.Context, w *writer, s sandbox.Sandbox, op *sandbox.Operation) (string, error) {
	name := s.Name
	if op != nil && len(op.Params) > 0 {
		var p undeleteParams
		if err := json.Unmarshal(op.Params, &p); err != nil {
			return "", fmt.Errorf("control: the parameters of %s: %w", op.ID, err)
		}
		if p.Name != "" {
			name = p.Name
		}
	}
	holder, err := w.SandboxByName(ctx, s.Project, name)
	switch {
	case fault.Is(err, fault.NotFound), err == nil && (!holder.DeletedAt.IsZero() || holder.ID == s.ID):
		return name, nil
	case err != nil:
		return "", err
	}
	return c.freeName(ctx, w)
}

// deleted says that a sandbox is not there, and how it comes back where it can.
func (c *Control) deleted(ctx context.Context, r store.Reader, a Actor, ref string) error {
	now := c.instant()
	s, err := resolveKept(ctx, r, a, ref, now)
	if err != nil || !s.EraseAt.After(now) {
		return unknown(ref)
	}
	return fault.New(fault.NotFound, "there is no sandbox %s: it was deleted, and can be brought back until %s; `hutch undelete %s`",
		shown(ref), s.EraseAt.Format(time.RFC3339), s.ID).Because("sandbox")
}
