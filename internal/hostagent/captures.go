package hostagent

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// captures counts who still needs the capture of a fork: the fork's own job, and
// each child until its creation has ended. The last one removes it.
type captures struct {
	mu    sync.Mutex // guards count
	count map[string]int
	disks Disks
	log   *slog.Logger
}

func (c *captures) take(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count[id]++
}

// drop gives a capture up. The last one removes it, and goes on trying until ctx ends:
// it may be as large as a sandbox's memory.
func (c *captures) drop(ctx context.Context, id string) {
	c.mu.Lock()
	c.count[id]--
	last := c.count[id] <= 0
	if last {
		delete(c.count, id)
	}
	c.mu.Unlock()
	if !last {
		return
	}
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		try, cancel := context.WithTimeout(ctx, time.Minute)
		err := c.disks.DropSaved(try, id, 0)
		cancel()
		if err == nil {
			return
		}
		c.log.Error("the capture of a fork could not be removed and is tried again", "op", id, "err", err)
		select {
		case <-ctx.Done():
			return // the next start removes it
		case <-time.After(pause):
		}
	}
}

// countRecord counts what a journal says, at the start.
func (c *captures) countRecord(r *record) {
	if r.Job == nil {
		return
	}
	c.takeJob(*r.Job)
}

// takeJob counts what a job needs, from its beginning to its end: a fork needs its
// capture until all of its children have counted themselves, however often it is begun
// anew.
func (c *captures) takeJob(j jobRecord) {
	for _, id := range j.captures() {
		c.take(id)
	}
}

func (c *captures) dropJob(ctx context.Context, j jobRecord) {
	for _, id := range j.captures() {
		c.drop(ctx, id)
	}
}

func (j jobRecord) captures() []string {
	var ids []string
	if j.Capture != nil {
		ids = append(ids, j.Capture.ID)
	}
	if j.Command.Verb == sandbox.Fork {
		ids = append(ids, j.Command.Operation)
	}
	return ids
}

// needed says whether a capture has anybody who may still use it.
func (c *captures) needed(id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count[id] > 0
}

func isCapture(owner string) bool { return strings.HasPrefix(owner, "op_") }

// spawn hands a child of a fork in. One that was handed in before has counted itself
// then.
func (a *Agent) spawn(ctx context.Context, cmd hostproto.Command, ref *captureRef) error {
	o, err := a.owner(cmd)
	if err != nil {
		return err
	}
	return o.call(ctx, func() error {
		if o.rec.ended(cmd.Operation) != nil || o.rec.Job != nil || o.rec.Phase == phaseErased {
			return nil
		}
		return o.submit(cmd, ref)
	})
}

// await waits until an operation of a sandbox has ended, however; a sandbox that is
// gone has none any more.
func (a *Agent) await(ctx context.Context, sandboxID, op string) error {
	o, err := a.find(sandboxID)
	if err != nil {
		return nil
	}
	var result <-chan *hostproto.Failure
	if err := o.call(ctx, func() error { result = o.result(op); return nil }); err != nil {
		if fault.Is(err, fault.Unavailable) && context.Cause(ctx) == nil {
			return nil // its owner has just gone
		}
		return err
	}
	select {
	case <-result:
		return nil
	case <-o.done:
		return context.Cause(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
