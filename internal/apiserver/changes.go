package apiserver

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// change is the answer to a verb.
type change struct {
	status int
	body   api.Change
}

// change waits for the operation of a result as long as the caller wants, and gives
// the answer: 200 where it has ended or was not needed, 202 where the wait ran out,
// begun where the caller did not wait.
func (s *server) change(ctx context.Context, res control.Result, wait time.Duration, begun int) (*change, error) {
	out := &change{status: begun}
	view := viewOf(res)
	if wait > 0 && active(res.Operation) {
		op, err := s.await(ctx, res.Operation, time.Now().Add(wait))
		if err != nil {
			return nil, err
		}
		res.Operation = op
		if view, err = s.again(ctx, view); err != nil {
			return nil, err
		}
		out.status = http.StatusAccepted
	}
	if !active(res.Operation) {
		out.status = http.StatusOK
	}
	out.body = api.Change{
		Sandbox: sandboxOf(view, s.hostViews(ctx)), Operation: operationOf(res.Operation), Outcome: outcomes[res.Outcome],
	}
	return out, nil
}

// again reads a sandbox after a wait, also one that is deleted now.
func (s *server) again(ctx context.Context, old control.View) (control.View, error) {
	return s.control.GetAny(ctx, callOf(ctx).caller, old.Sandbox.ID)
}

// viewOf is a result's sandbox as readers see it.
func viewOf(r control.Result) control.View {
	return control.View{Sandbox: r.Sandbox, Operation: r.Operation}
}

func active(op *sandbox.Operation) bool { return op != nil && op.Status.Active() }

// await gives the operation once it has ended, or as it is at the given time. A client
// that goes away ends the wait and nothing else.
func (s *server) await(ctx context.Context, op *sandbox.Operation, until time.Time) (*sandbox.Operation, error) {
	left := time.Until(until)
	if !active(op) || left <= 0 {
		return op, nil
	}
	waiting, cancel := Lasting(ctx)
	defer cancel()
	now, err := s.control.Wait(waiting, callOf(ctx).caller, op.ID, left)
	if err != nil && waiting.Err() != nil && ctx.Err() == nil { // the server shuts down: the wait has run out
		return op, nil
	}
	if err != nil {
		return nil, err
	}
	return &now, nil
}

func (c *change) write(w http.ResponseWriter) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(c.status)
	return json.NewEncoder(w).Encode(c.body)
}

// VisitCreateSandboxResponse answers createSandbox.
func (c *change) VisitCreateSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitDeleteSandboxResponse answers deleteSandbox.
func (c *change) VisitDeleteSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitSleepSandboxResponse answers sleepSandbox.
func (c *change) VisitSleepSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitWakeSandboxResponse answers wakeSandbox.
func (c *change) VisitWakeSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitStopSandboxResponse answers stopSandbox.
func (c *change) VisitStopSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitResumeSandboxResponse answers resumeSandbox.
func (c *change) VisitResumeSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitUndeleteSandboxResponse answers undeleteSandbox.
func (c *change) VisitUndeleteSandboxResponse(w http.ResponseWriter) error { return c.write(w) }

// VisitKeepSandboxResponse answers keepSandbox.
func (c *change) VisitKeepSandboxResponse(w http.ResponseWriter) error { return c.write(w) }
