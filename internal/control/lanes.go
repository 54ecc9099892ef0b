package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// lanes hand operations to hosts. All that concerns one sandbox goes through one lane,
// one call after the other, and each call sends what the database says at that moment:
// so a deletion never overtakes the creation that it cancels. The forks of a sandbox
// share its lane until they are ready, because one command makes them all.
type lanes struct {
	c *Control

	mu   sync.Mutex
	run  context.Context // nil before start and after its end
	m    map[string]*lane
	done sync.WaitGroup
}

// lane holds the sandboxes whose operations are to be sent. It exists while a
// goroutine works on it.
type lane struct{ queue []string }

func newLanes(c *Control) *lanes { return &lanes{c: c, m: map[string]*lane{}} }

func (ls *lanes) start(run context.Context) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.run = run
}

// wait ends the lanes, whose context has ended, and waits for their calls.
func (ls *lanes) wait() {
	ls.mu.Lock()
	ls.run = nil
	ls.mu.Unlock()
	ls.done.Wait()
}

// laneOf names the lane of a sandbox.
func laneOf(s sandbox.Sandbox) string {
	if s.State == sandbox.Creating && s.Origin.Kind == originFork {
		return s.Origin.Source
	}
	return s.ID
}

// nudge has the sandbox's active operation sent to its host, soon. It does not wait.
// Another server sends to hosts that are connected there.
func (ls *lanes) nudge(s sandbox.Sandbox) {
	if _, here := ls.c.hosts[s.Host]; !here && ls.c.shared {
		return
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.run == nil {
		return // Start sends everything that is active
	}
	key := laneOf(s)
	l := ls.m[key]
	if l != nil {
		if !slices.Contains(l.queue, s.ID) {
			l.queue = append(l.queue, s.ID)
		}
		return
	}
	l = &lane{queue: []string{s.ID}}
	ls.m[key] = l
	run := ls.run
	ls.done.Go(func() { ls.work(run, key, l) })
}

// work sends until the lane is empty.
func (ls *lanes) work(ctx context.Context, key string, l *lane) {
	for {
		ls.mu.Lock()
		if len(l.queue) == 0 || ctx.Err() != nil {
			delete(ls.m, key)
			ls.mu.Unlock()
			return
		}
		id := l.queue[0]
		l.queue = l.queue[1:]
		ls.mu.Unlock()
		if err := ls.c.send(ctx, id); err != nil && ctx.Err() == nil {
			ls.c.log.Warn("an operation could not be handed to its host; it will be tried again", "sandbox", id, "err", err)
		}
	}
}

// errand is what is to be said to a host about one sandbox.
type errand struct {
	host string
	// before is a command whose cancellation follows: a fork that the host may not have
	// yet, and has to have so that it ends the forks' creation.
	before *hostproto.Command
	// cancel is the operation to be cancelled; "" is none.
	cancel string
	// submit is the command for the active operation; none where it has no Operation.
	submit hostproto.Command
	// end is the operation whose end is asked for; "" is none.
	end string
}

// send hands a sandbox's changed policy and its active operation to its host: in this
// order, so that a boot begins the auto-stop that was asked for with it.
func (c *Control) send(ctx context.Context, id string) error {
	return errors.Join(c.tellPolicy(ctx, id), c.sendOperation(ctx, id))
}

func (c *Control) sendOperation(ctx context.Context, id string) error {
	var e *errand
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		e, err = c.errand(ctx, r, id)
		return err
	})
	if err != nil || e == nil {
		return err
	}
	h, err := c.host(e.host)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	if e.before != nil {
		if err := h.Submit(ctx, *e.before); err != nil {
			if err := c.refused(ctx, h, *e.before, err); err != nil {
				return fmt.Errorf("control: submit %s before its cancellation: %w", e.before.Operation, err)
			}
		}
	}
	if e.cancel != "" {
		// A host that cannot cancel it, or has ended it, says so in vain: the deletion
		// that follows overrides it.
		if err := h.Cancel(ctx, id, e.cancel); err != nil {
			c.log.Debug("a host did not cancel an operation", "sandbox", id, "op", e.cancel, "err", err)
		}
	}
	if e.submit.Operation != "" {
		if err := h.Submit(ctx, e.submit); err != nil {
			if err := c.refused(ctx, h, e.submit, err); err != nil {
				return fmt.Errorf("control: submit %s: %w", e.submit.Operation, err)
			}
			return nil
		}
	}
	if e.end != "" {
		// A fork's child that the host does not have yet is cancelled once it has it.
		if err := h.Cancel(ctx, id, e.end); err != nil {
			return fmt.Errorf("control: cancel %s: %w", e.end, err)
		}
	}
	if e.submit.Operation == "" {
		return nil
	}
	now := c.instant()
	c.progress.accept(e.submit.Operation, now)
	for _, child := range e.submit.Children {
		c.progress.accept(child.Operation, now)
	}
	return nil
}

// errand reads what is to be said, nil for nothing.
func (c *Control) errand(ctx context.Context, r store.Reader, id string) (*errand, error) {
	s, err := r.Sandbox(ctx, id)
	if err != nil {
		return nil, err
	}
	op, err := r.ActiveOperation(ctx, id)
	if err != nil || op == nil {
		return nil, err
	}
	e := &errand{host: s.Host}
	keep := time.Duration(0)
	if !op.CancelAt.IsZero() {
		e.end = op.ID
	}
	switch {
	case op.Kind == sandbox.Fork:
		e.submit, err = forkCommand(ctx, r, s, *op)
		e.submit.Cancelled = e.end != ""
		return e, err
	case op.Kind == sandbox.Create && s.Origin.Kind == originFork:
		of, err := c.forkOf(ctx, r, *op)
		if of == nil {
			of = &errand{host: s.Host}
		}
		of.end = e.end
		return of, err
	case op.Kind == sandbox.Delete:
		var p deleteParams
		if err := json.Unmarshal(op.Params, &p); err != nil {
			return nil, fmt.Errorf("control: the parameters of %s: %w", op.ID, err)
		}
		e.cancel = p.Cancels
		if !p.Permanent {
			keep = max(c.limits.UndeleteFor, 0)
		}
		if e.before, err = unfinishedFork(ctx, r, s, p.Cancels); err != nil {
			return nil, err
		}
	}
	e.submit = command(s, *op)
	e.submit.Cancelled = e.end != ""
	if op.Kind == sandbox.Delete {
		e.submit.Generation = s.Generation // whatever has happened since: it goes
		e.submit.UndeleteFor = keep
	}
	return e, nil
}

// forkOf gives the errand of a sandbox that a fork is to make: the fork's command
// again, which makes the host report on each fork. While the fork itself is active, its
// source's errand does that.
func (c *Control) forkOf(ctx context.Context, r store.Reader, child sandbox.Operation) (*errand, error) {
	var link childParams
	if err := json.Unmarshal(child.Params, &link); err != nil {
		return nil, fmt.Errorf("control: the parameters of %s: %w", child.ID, err)
	}
	fork, err := r.Operation(ctx, link.Fork)
	if err != nil || fork.Status.Active() {
		return nil, err
	}
	source, err := r.Sandbox(ctx, fork.Sandbox)
	if err != nil {
		return nil, err
	}
	cmd, err := forkCommand(ctx, r, source, fork)
	return &errand{host: source.Host, submit: cmd}, err
}

// unfinishedFork gives the command of a cancelled fork that has forks in the making.
func unfinishedFork(ctx context.Context, r store.Reader, s sandbox.Sandbox, id string) (*hostproto.Command, error) {
	if id == "" {
		return nil, nil
	}
	op, err := r.Operation(ctx, id)
	if err != nil || op.Kind != sandbox.Fork {
		return nil, err
	}
	cmd, err := forkCommand(ctx, r, s, op)
	if err != nil || len(cmd.Children) == 0 {
		return nil, err
	}
	return &cmd, nil
}

func command(s sandbox.Sandbox, op sandbox.Operation) hostproto.Command {
	cmd := hostproto.Command{
		Operation: op.ID, Verb: op.Kind, Sandbox: s.ID, Generation: op.Generation, Name: s.Name, Spec: s.Spec,
		Origin: from(op),
	}
	if op.Kind == sandbox.Create || op.Kind == sandbox.Fork {
		cmd.Policy = &s.Policy
	}
	return cmd
}

// forkCommand gives a fork's command with the forks that are still to be made: one
// that was deleted meanwhile is not.
func forkCommand(ctx context.Context, r store.Reader, source sandbox.Sandbox, op sandbox.Operation) (hostproto.Command, error) {
	cmd := command(source, op)
	var p forkParams
	if err := json.Unmarshal(op.Params, &p); err != nil {
		return cmd, fmt.Errorf("control: the parameters of %s: %w", op.ID, err)
	}
	cmd.Mode = p.Mode
	if p.Policy != nil {
		cmd.Policy = p.Policy
	}
	for _, child := range p.Children {
		create, err := r.Operation(ctx, child.Operation)
		if err != nil {
			return cmd, err
		}
		if create.Status.Active() {
			cmd.Children = append(cmd.Children, hostproto.Child{Sandbox: child.Sandbox, Operation: child.Operation, Name: child.Name, Trace: from(create).Trace})
		}
	}
	return cmd, nil
}
