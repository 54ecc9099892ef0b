package control

import (
	"context"
	"slices"
	"sync"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Rested is a sandbox that Rest has put away.
type Rested struct {
	Sandbox    string       `json:"sandbox"`
	Name       string       `json:"name"`
	Generation int64        `json:"generation"`
	Verb       sandbox.Verb `json:"verb"` // Sleep or Stop
	Operation  string       `json:"operation"`
}

const (
	// restAtATime is how many sandboxes are put away at a time: a save is bound by the
	// disk and by the CPUs that take its digests.
	restAtATime = 4
	// restRounds bounds how often it is looked whether any runs still or again: one
	// whose timer or guest brings it back each time must not hold up the machine.
	restRounds = 3
)

// Rest puts away every sandbox that runs on this server's hosts, before the machine goes
// down (R7): by is Sleep or Stop, and one that cannot be put to sleep is stopped. What is
// under way on one is waited for. done is told of each that is safe, one at a time. left
// are those that run still, because they could be neither or because ctx ended. It works
// between Start and Close, and whoever calls it lets nobody else call meanwhile.
func (c *Control) Rest(ctx context.Context, by sandbox.Verb, done func(Rested) error) (left []sandbox.Sandbox, err error) {
	var told sync.Mutex // guards done and err
	for range restRounds {
		left, err = c.awake(ctx)
		if err != nil || len(left) == 0 {
			return left, err
		}
		var work sync.WaitGroup
		slots := make(chan struct{}, restAtATime)
		for _, s := range left {
			slots <- struct{}{}
			work.Go(func() {
				defer func() { <-slots }()
				r, restErr := c.rest(ctx, s, by)
				told.Lock()
				defer told.Unlock()
				if restErr != nil {
					c.log.Warn("a sandbox could not be put away and runs on", "sandbox", s.ID, "err", restErr)
				} else if r.Operation != "" && err == nil {
					err = done(r)
				}
			})
		}
		work.Wait()
		if err != nil || ctx.Err() != nil {
			break
		}
	}
	last, lastErr := c.awake(context.WithoutCancel(ctx))
	if err == nil {
		err = lastErr
	}
	return last, err
}

// awake are the sandboxes of this server's hosts that run or are about to.
func (c *Control) awake(ctx context.Context) (list []sandbox.Sandbox, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		list, err = r.Sandboxes(ctx, store.SandboxFilter{States: []sandbox.State{sandbox.Ready, sandbox.Creating}})
		return err
	})
	return slices.DeleteFunc(list, func(s sandbox.Sandbox) bool { return c.hosts[s.Host] == nil }), err
}

// rest puts one sandbox away. A Rested without an operation is one that ended by itself.
func (c *Control) rest(ctx context.Context, s sandbox.Sandbox, by sandbox.Verb) (Rested, error) {
	a := Actor{Project: s.Project, KeyID: hostActor}
	for verb := by; ; {
		if err := c.settled(ctx, a, s.ID); err != nil {
			return Rested{}, err
		}
		v, err := c.Get(ctx, a, s.ID)
		if fault.Is(err, fault.NotFound) || err == nil && v.Sandbox.State != sandbox.Ready {
			return Rested{}, nil
		}
		if err != nil {
			return Rested{}, err
		}
		res, err := c.verb(ctx, a, s.ID, sandbox.Request{Verb: verb}, Idempotency{})
		if fault.Is(err, fault.Conflict) && ctx.Err() == nil {
			continue // something began in between: it is waited for
		}
		var op sandbox.Operation
		if err == nil && res.Operation != nil {
			op, err = c.Wait(ctx, a, res.Operation.ID, c.limits.WaitMax)
		}
		switch {
		case ctx.Err() != nil:
			return Rested{}, context.Cause(ctx)
		case err == nil && op.Status == sandbox.Succeeded:
			return Rested{Sandbox: s.ID, Name: s.Name, Generation: v.Sandbox.Generation, Verb: verb, Operation: op.ID}, nil
		case verb == sandbox.Sleep:
			if err == nil && op.Error != nil {
				err = fault.New(fault.Kind(op.Error.Code), "%s", op.Error.Message)
			}
			c.log.Warn("a sandbox cannot be put to sleep and is stopped", "sandbox", s.ID, "err", err)
			verb = sandbox.Stop
		case err != nil:
			return Rested{}, err
		default:
			return Rested{}, fault.New(fault.Unavailable, "the sandbox %s could not be stopped: the operation %s is %s", s.Name, op.ID, op.Status)
		}
	}
}

// settled waits until no operation is at work on a sandbox.
func (c *Control) settled(ctx context.Context, a Actor, id string) error {
	for {
		var op *sandbox.Operation
		err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
			op, err = r.ActiveOperation(ctx, id)
			return err
		})
		if err != nil || op == nil {
			return err
		}
		if _, err := c.Wait(ctx, a, op.ID, c.limits.WaitMax); err != nil {
			return err
		}
	}
}

// Return brings back what Rest has put away, where nothing has happened to it since: one
// that its auto-stop has stopped meanwhile, or that its user has touched, stays as it is.
// It returns when the operations are begun; what cannot begin is logged and left.
func (c *Control) Return(ctx context.Context, list []Rested) (begun int, err error) {
	for _, r := range list {
		var s sandbox.Sandbox
		var ops []sandbox.Operation
		err := c.store.View(ctx, func(ctx context.Context, tx store.Reader) (err error) {
			if s, err = tx.Sandbox(ctx, r.Sandbox); err == nil {
				ops, err = tx.Operations(ctx, store.OperationFilter{Project: s.Project, Sandbox: s.ID})
			}
			return err
		})
		if fault.Is(err, fault.NotFound) {
			continue
		}
		if err != nil {
			return begun, err
		}
		want := map[sandbox.Verb]sandbox.State{sandbox.Sleep: sandbox.Sleeping, sandbox.Stop: sandbox.Stopped}[r.Verb]
		if s.State != want || s.Generation != r.Generation || len(ops) == 0 || ops[len(ops)-1].ID != r.Operation {
			c.log.Info("a sandbox that was put away has gone on since and is left as it is", "sandbox", s.ID, "state", s.State)
			continue
		}
		if _, err := c.Resume(ctx, Actor{Project: s.Project, KeyID: hostActor}, s.ID, Idempotency{}); err != nil {
			c.log.Error("a sandbox that was put away could not be brought back; `hutch resume` does", "sandbox", s.ID, "err", err)
			continue
		}
		begun++
	}
	return begun, nil
}
