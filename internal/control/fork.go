package control

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// forkParams are the parameters of a fork operation.
type forkParams struct {
	Mode     sandbox.ForkMode `json:"mode"`
	Children []forkChild      `json:"children"`
	// Policy is the children's. It is missing in what was written before they could have
	// one of their own: then it is the source's.
	Policy *sandbox.Policy `json:"policy,omitempty"`
}

type forkChild struct {
	Sandbox   string `json:"sandbox"`
	Operation string `json:"operation"`
	Name      string `json:"name"`
}

// childParams are the parameters of the create operation of a fork's child.
type childParams struct {
	Fork string `json:"fork"` // the operation that makes it
}

// ForkResult is what came of one child; a fork operation's Result is a JSON list of
// them. Error is set once the child has failed to start.
type ForkResult struct {
	Sandbox   string                  `json:"sandbox_id"`
	Operation string                  `json:"operation_id"`
	Name      string                  `json:"name"`
	Error     *sandbox.OperationError `json:"error,omitempty"`
}

// Fork makes copies of a sandbox from one capture. The copies exist, as creating,
// when Fork returns; each has an operation of its own, and Result.Children names both.
func (c *Control) Fork(ctx context.Context, a Actor, ref string, r ForkRequest) (Result, error) {
	req := sandbox.Request{Verb: sandbox.Fork, Mode: r.Mode}
	var facts hostFacts
	var count int
	check := func() (err error) {
		if req.Mode, err = forkMode(r.Mode); err != nil {
			return err
		}
		if count, err = c.forkCount(r); err != nil {
			return err
		}
		facts, err = c.factsFor(ctx, a, ref, req)
		return err
	}
	return c.onSandboxes(ctx, a, r.Idempotency, check, func(ctx context.Context, w *writer) (Result, error) {
		return w.fork(ctx, c, a, ref, req, facts, r, count)
	})
}

// forkCount checks how many forks are asked for, and their names.
func (c *Control) forkCount(r ForkRequest) (int, error) {
	n := int64(max(1, len(r.Names)))
	if r.Count != nil {
		n = *r.Count
	}
	if n < 1 || n > c.limits.Forks {
		return 0, invalid("count", "cannot make %d forks: one call makes from 1 to %d", n, c.limits.Forks)
	}
	if len(r.Names) > 1 && int64(len(r.Names)) != n {
		return 0, invalid("names", "%d names do not fit %d forks: give one for each, one for all, or none", len(r.Names), n)
	}
	for i := range r.Names {
		if err := validName("sandbox", forkName(r.Names, int(n), i)); err != nil {
			return 0, err
		}
	}
	if len(r.Names) == 1 && n > 1 {
		return int(n), validName("sandbox", forkName(r.Names, int(n), int(n)-1)) // the longest
	}
	return int(n), nil
}

// forkName gives the name of fork i of n, "" where one is to be generated.
func forkName(names []string, n, i int) string {
	switch {
	case len(names) == 0:
		return ""
	case len(names) == n:
		return names[i]
	}
	return fmt.Sprintf("%s-%d", names[0], i+1)
}

// fork writes the source's operation and a row, an operation and events for each
// child. All exist together or not at all.
func (w *writer) fork(ctx context.Context, c *Control, a Actor, ref string, req sandbox.Request, facts hostFacts,
	r ForkRequest, count int) (Result, error) {
	out, err := w.admit(ctx, c, a, ref, req, facts, nil)
	if err != nil || out.Outcome != sandbox.Accept {
		return out, err
	}
	policy, err := r.TTL.set(out.Sandbox.Policy, out.Sandbox.Spec.Sleep, c.limits.Bounds)
	if err != nil {
		return out, err
	}
	params := forkParams{Mode: req.Mode, Policy: &policy}
	s := out.Sandbox
	err = w.within(ctx, c, more{verb: sandbox.Fork, name: s.Name, add: another(s.Spec, int64(count)), forks: int64(count), spec: s.Spec, policy: &policy})
	if err != nil {
		return out, err
	}
	link, err := json.Marshal(childParams{Fork: out.Operation.ID})
	if err != nil {
		return out, err
	}
	var results []ForkResult
	for i := range count {
		name := forkName(r.Names, count, i)
		if name == "" {
			if name, err = c.freeName(ctx, w); err != nil {
				return out, err
			}
		}
		origin := sandbox.Origin{Kind: originFork, Source: out.Sandbox.ID, Mode: string(req.Mode)}
		child := w.newSandbox(c, name, out.Sandbox.Host, out.Sandbox.Spec, out.Sandbox.Labels, origin)
		child.Policy = policy
		op, err := w.create(ctx, c, child, link)
		if err != nil {
			return out, err
		}
		out.Children = append(out.Children, View{Sandbox: child, Operation: &op})
		params.Children = append(params.Children, forkChild{Sandbox: child.ID, Operation: op.ID, Name: name})
		results = append(results, ForkResult{Sandbox: child.ID, Operation: op.ID, Name: name})
	}
	own, err := json.Marshal(params)
	if err != nil {
		return out, err
	}
	if out.Operation.Params, err = withOrigin(own, OriginOf(*out.Operation)); err != nil {
		return out, err
	}
	if out.Operation.Result, err = json.Marshal(results); err != nil {
		return out, err
	}
	return out, w.UpdateOperation(ctx, out.Operation)
}

// childFailed writes into a fork's result that one of its children did not start.
func (w *writer) childFailed(ctx context.Context, child sandbox.Operation) error {
	var link childParams
	if len(child.Params) == 0 || json.Unmarshal(child.Params, &link) != nil || link.Fork == "" {
		return nil // made from a template
	}
	fork, err := w.Operation(ctx, link.Fork)
	if err != nil {
		return err
	}
	var results []ForkResult
	if err := json.Unmarshal(fork.Result, &results); err != nil {
		return fmt.Errorf("control: the result of %s: %w", fork.ID, err)
	}
	for i := range results {
		if results[i].Operation == child.ID {
			results[i].Error = child.Error
		}
	}
	if fork.Result, err = json.Marshal(results); err != nil {
		return err
	}
	return w.UpdateOperation(ctx, &fork)
}

// unborn ends the creation of a fork's children when the fork has failed: it has made
// none of them but those that its host has, so no host will speak of them.
func (c *Control) unborn(ctx context.Context, w *writer, fork sandbox.Operation, why hostproto.Failure, has []string) error {
	var p forkParams
	if err := json.Unmarshal(fork.Params, &p); err != nil {
		return fmt.Errorf("control: the parameters of %s: %w", fork.ID, err)
	}
	for _, child := range p.Children {
		op, err := w.Operation(ctx, child.Operation)
		if err != nil {
			return err
		}
		if !op.Status.Active() || slices.Contains(has, child.Sandbox) {
			continue
		}
		if err := c.notCreated(ctx, w, &op, why); err != nil {
			return err
		}
	}
	return nil
}

// notCreated ends a creation that no host will report the end of.
func (c *Control) notCreated(ctx context.Context, w *writer, op *sandbox.Operation, why hostproto.Failure) error {
	s, err := w.Sandbox(ctx, op.Sandbox)
	if err != nil {
		return err
	}
	r := hostproto.Report{
		Sandbox: s.ID, Seq: s.HostSeq, Generation: s.Generation, Operation: op.ID, Verb: sandbox.Create,
		Event: sandbox.EventCreateFailed, Ended: true, Failure: &why, At: w.at,
	}
	return c.write(ctx, w, apply(s, op, r), op, r)
}
