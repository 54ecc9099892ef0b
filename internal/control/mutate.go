package control

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// hostActor is the actor of what no caller asked for.
const hostActor = "host"

// writer is one write transaction of a use case: who writes, and when.
type writer struct {
	store.Tx
	project string
	actor   string
	key     string // the request key; "" for none
	at      time.Time
	memo    store.Request // what a repeat of the request is to find
	newID   func(prefix string) string
	told    string // the id of the event that was written last
}

func (c *Control) writer(tx store.Tx, project, actor string, at time.Time) *writer {
	return &writer{Tx: tx, project: project, actor: actor, at: at, newID: c.newID}
}

// event appends an event; data may be nil.
func (w *writer) event(ctx context.Context, typ, sandboxID, operationID string, data any) error {
	e := store.Event{
		ID: w.newID("ev"), Project: w.project, Sandbox: sandboxID, Operation: operationID, Type: typ,
		Actor: w.actor, Key: w.key, At: w.at,
	}
	if data != nil {
		b, err := json.Marshal(data)
		if err != nil {
			return fmt.Errorf("control: encode event %s: %w", typ, err)
		}
		e.Data = b
	}
	w.told = e.ID
	return w.AddEvent(ctx, e)
}

// once carries out a use case in one transaction, or, for a request key that is
// remembered, answers from what the first call left. The look before the transaction
// is there so that a repeat needs no host and passes no validation again; the one
// inside decides.
func once[T any](
	ctx context.Context, c *Control, a Actor, idem Idempotency,
	check func() error,
	again func(context.Context, store.Reader, store.Request) (T, error),
	fn func(context.Context, *writer) (T, error),
) (out T, replayed bool, err error) {
	if err := idem.valid(); err != nil {
		return out, false, err
	}
	recall := func(ctx context.Context, r store.Reader) error {
		replayed = false
		if idem.Key == "" {
			return nil
		}
		seen, err := r.Request(ctx, a.Project, idem.Route, idem.Key)
		if fault.Is(err, fault.NotFound) || err == nil && seen.CreatedAt.Before(c.instant().Add(-c.limits.RequestKeep)) {
			return nil
		}
		if err != nil {
			return err
		}
		if !bytes.Equal(seen.BodyHash, idem.BodyHash) {
			return fault.New(fault.Conflict, "the request key %s was used with another body; use a new key for a new request", shown(idem.Key)).
				Because("key_reused")
		}
		replayed = true
		out, err = again(ctx, r, seen)
		return err
	}
	if idem.Key != "" {
		if err := c.store.View(ctx, recall); err != nil || replayed {
			return out, replayed, err
		}
	}
	if check != nil {
		if err := check(); err != nil {
			return out, false, err
		}
	}
	err = c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		if err := recall(ctx, tx); err != nil || replayed {
			return err
		}
		w := c.writer(tx, a.Project, a.KeyID, c.instant())
		w.key = idem.Key
		var err error
		if out, err = fn(ctx, w); err != nil || idem.Key == "" {
			return err
		}
		if err := tx.PruneRequests(ctx, w.at.Add(-c.limits.RequestKeep)); err != nil {
			return err
		}
		w.memo.Project, w.memo.Route, w.memo.Key = a.Project, idem.Route, idem.Key
		w.memo.BodyHash, w.memo.CreatedAt = idem.BodyHash, w.at
		return tx.PutRequest(ctx, w.memo)
	})
	return out, replayed, err
}

// onSandboxes is once for calls whose answer is a Result, and hands what they started
// to the hosts.
func (c *Control) onSandboxes(ctx context.Context, a Actor, idem Idempotency, check func() error,
	fn func(context.Context, *writer) (Result, error)) (Result, error) {
	remembered := func(ctx context.Context, w *writer) (Result, error) {
		r, err := fn(ctx, w)
		if err != nil {
			return r, err
		}
		w.memo.Outcome, w.memo.Sandboxes = string(r.Outcome), []string{r.Sandbox.ID}
		for _, child := range r.Children {
			w.memo.Sandboxes = append(w.memo.Sandboxes, child.Sandbox.ID)
		}
		if r.Operation != nil {
			w.memo.Operation = r.Operation.ID
		}
		return r, nil
	}
	r, replayed, err := once(ctx, c, a, idem, check, recallResult, remembered)
	if err != nil {
		return Result{}, err
	}
	r.Replayed = replayed
	if r.Operation != nil && r.Operation.Status.Active() || r.Sandbox.PolicyChange != 0 {
		c.lanes.nudge(r.Sandbox)
	}
	return c.overlaid(r), nil
}

// recallResult gives the first call's answer with the present state of what is in it.
func recallResult(ctx context.Context, r store.Reader, seen store.Request) (Result, error) {
	out := Result{Outcome: sandbox.Outcome(seen.Outcome)}
	for i, id := range seen.Sandboxes {
		s, err := r.Sandbox(ctx, id)
		if err != nil {
			return Result{}, err
		}
		if i == 0 {
			out.Sandbox = s
			continue
		}
		op, err := r.ActiveOperation(ctx, id)
		if err != nil {
			return Result{}, err
		}
		out.Children = append(out.Children, View{Sandbox: s, Operation: op})
	}
	if seen.Operation != "" {
		op, err := r.Operation(ctx, seen.Operation)
		if err != nil {
			return Result{}, err
		}
		out.Operation = &op
	}
	return out, nil
}

// overlaid puts the latest progress, which may not be written yet, into a result.
func (c *Control) overlaid(r Result) Result {
	c.progress.overlay(r.Operation)
	for i := range r.Children {
		c.progress.overlay(r.Children[i].Operation)
	}
	return r
}

// resolve finds a sandbox of the actor's project by id or name. An id of another
// project is as unknown as one that never was.
func resolve(ctx context.Context, r store.Reader, a Actor, ref string) (sandbox.Sandbox, error) {
	if !strings.HasPrefix(ref, "sbx_") {
		if !nameSyntax.MatchString(ref) {
			return sandbox.Sandbox{}, unknown(ref)
		}
		s, err := r.SandboxByName(ctx, a.Project, ref)
		if fault.Is(err, fault.NotFound) {
			return s, unknown(ref)
		}
		return s, err
	}
	s, err := r.Sandbox(ctx, ref)
	if fault.Is(err, fault.NotFound) || err == nil && s.Project != a.Project {
		return sandbox.Sandbox{}, unknown(ref)
	}
	return s, err
}

func unknown(ref string) error {
	return fault.New(fault.NotFound, "there is no sandbox %s; `hutch ls` lists those that are", shown(ref)).Because("sandbox")
}

// verb is the use case of the verbs that need nothing but the sandbox.
func (c *Control) verb(ctx context.Context, a Actor, ref string, req sandbox.Request, idem Idempotency) (Result, error) {
	var facts hostFacts
	check := func() (err error) { facts, err = c.factsFor(ctx, a, ref, req); return err }
	return c.onSandboxes(ctx, a, idem, check, func(ctx context.Context, w *writer) (Result, error) {
		return w.admit(ctx, c, a, ref, req, facts, nil)
	})
}

// admit lets the pure model decide on a verb and writes what it accepts. params are
// the operation's, and may be nil.
func (w *writer) admit(ctx context.Context, c *Control, a Actor, ref string, req sandbox.Request, facts hostFacts,
	params func(cancelled *sandbox.Operation) any) (Result, error) {
	s, err := resolve(ctx, w, a, ref)
	if err != nil {
		return Result{}, err
	}
	active, err := w.ActiveOperation(ctx, s.ID)
	if err != nil {
		return Result{}, err
	}
	req.Undelete = s.EraseAt.After(w.at)
	d := sandbox.Admit(s, active, req)
	switch d.Outcome {
	case sandbox.Refuse:
		return Result{}, d.Err
	case sandbox.Done:
		return Result{Sandbox: s, Outcome: d.Outcome}, nil
	case sandbox.Join:
		return Result{Sandbox: s, Operation: active, Outcome: d.Outcome}, nil
	}
	if err := facts.allow(s, d.Verb, req.Mode); err != nil {
		return Result{}, err
	}
	if d.Verb == sandbox.Wake || d.Verb == sandbox.Resume {
		if err := w.within(ctx, c, more{verb: d.Verb, name: s.Name, add: one(s.Spec), spec: s.Spec}); err != nil {
			return Result{}, err
		}
	}
	var cancelled *sandbox.Operation
	if d.Cancels {
		cancelled = active
		if err := w.cancelled(ctx, c, active, "the sandbox is being deleted"); err != nil {
			return Result{}, err
		}
	}
	op := sandbox.Operation{
		ID: c.newID("op"), Project: s.Project, Sandbox: s.ID, Kind: d.Verb, Status: sandbox.Pending,
		Generation: s.Generation, Actor: w.actor, CreatedAt: w.at, Version: 1,
	}
	if params != nil {
		if op.Params, err = json.Marshal(params(cancelled)); err != nil {
			return Result{}, err
		}
	}
	if op.Params, err = withCall(ctx, op.Params); err != nil {
		return Result{}, err
	}
	if err := w.begin(ctx, op); err != nil {
		return Result{}, err
	}
	if err := w.meterAccepted(ctx, c, s, op); err != nil {
		return Result{}, err
	}
	return Result{Sandbox: s, Operation: &op, Outcome: sandbox.Accept}, nil
}

// begin writes a new operation and the event that tells of it.
func (w *writer) begin(ctx context.Context, op sandbox.Operation) error {
	if err := w.InsertOperation(ctx, op); err != nil {
		return err
	}
	return w.event(ctx, "operation.started", op.Sandbox, op.ID, map[string]any{"kind": op.Kind})
}

// cancelled ends an active operation because of something that overrides it.
func (w *writer) cancelled(ctx context.Context, c *Control, op *sandbox.Operation, why string) error {
	c.progress.overlay(op) // how far it came
	op.Status, op.EndedAt = sandbox.Cancelled, w.at
	op.Error = &sandbox.OperationError{Code: string(fault.Cancelled), Message: why}
	return w.end(ctx, op)
}

// end writes an operation that has ended and the event that tells of it.
func (w *writer) end(ctx context.Context, op *sandbox.Operation) error {
	if err := w.UpdateOperation(ctx, op); err != nil {
		return err
	}
	if op.Kind == sandbox.Create && op.Status != sandbox.Succeeded {
		if err := w.childFailed(ctx, *op); err != nil {
			return err
		}
	}
	return w.event(ctx, "operation."+string(op.Status), op.Sandbox, op.ID, operationEnd{Kind: op.Kind, Error: op.Error})
}

// operationEnd is the data of the events operation.succeeded, .failed and .cancelled.
type operationEnd struct {
	Kind  sandbox.Verb            `json:"kind"`
	Error *sandbox.OperationError `json:"error,omitempty"`
}
