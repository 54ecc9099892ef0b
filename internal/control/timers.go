package control

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

const (
	// dueMost bounds what is acted on in one look at the timers: after a long absence
	// everything may be due at once, and hosts have other work too.
	dueMost = 500
	// dueAgain is the pause until the next look where there was more.
	dueAgain = 250 * time.Millisecond
	// dueLeast is the shortest pause: what falls due meanwhile shares a transaction, which
	// costs the same for one sandbox as for many.
	dueLeast = 100 * time.Millisecond
	// dueBatch is how many sandboxes share a transaction.
	dueBatch = 50
)

// clocks remember by how much the time of each host is ahead of the wall clock. Timers
// are instants of the host's time, which no step of a wall clock moves.
type clocks struct {
	mu    sync.Mutex
	ahead map[string]time.Duration
}

func (c *clocks) set(host string, ahead time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead[host] = ahead
}

// at is an instant of this server's clock in the time of a host, as it was last heard.
func (c *clocks) at(host string, t time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return t.Add(c.ahead[host])
}

// timersLoop acts on the timers at rest of a host's sandboxes (A8): to be archived, to
// be deleted. A server does that for the hosts that are connected to it, in their time:
// where the host is away the disk cannot be moved or erased anyway. What fell due
// meanwhile is acted on when it is back. The rows are the truth; two servers that see
// the same one due make one operation of it, whose id follows from the due time.
func (c *Control) timersLoop(ctx context.Context, host string) {
	for {
		pause := c.look(ctx, host)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// look acts on what is due and gives the pause until the next look.
func (c *Control) look(ctx context.Context, host string) time.Duration {
	pause := c.limits.TimersEvery
	info, err := c.info(ctx, host)
	if err != nil {
		c.log.Debug("the timers wait for their host", "host", host, "err", err)
		return pause
	}
	c.clocks.set(host, info.Ahead)
	now := c.clocks.at(host, c.instant())
	var list []store.DueSandbox
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		list, err = r.DueSandboxes(ctx, host, now.Add(pause), dueMost)
		return err
	})
	if err != nil {
		if ctx.Err() == nil {
			c.log.Error("the timers cannot be read; it will be tried again", "host", host, "err", err)
		}
		return pause
	}
	var due []string
	for _, d := range list {
		if d.Due.After(now) {
			pause = d.Due.Sub(now)
			break
		}
		due = append(due, d.Sandbox)
	}
	if len(due) == dueMost {
		pause = dueAgain
	}
	for batch := range slices.Chunk(due, dueBatch) {
		c.act(ctx, batch)
	}
	return max(pause-c.clocks.at(host, c.instant()).Sub(now), dueLeast)
}

// act does what the timers of some sandboxes ask for, in one transaction; where that
// fails, in one each, so that one does not hold up the others.
func (c *Control) act(ctx context.Context, ids []string) {
	ids = slices.Sorted(slices.Values(ids)) // two servers lock the same rows in one order
	var begun []sandbox.Sandbox
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		begun = begun[:0]
		for _, id := range ids {
			s, err := tx.Sandbox(ctx, id)
			if err != nil {
				return err
			}
			started, err := c.timer(ctx, tx, &s)
			if err != nil {
				return err
			}
			if started {
				begun = append(begun, s)
			}
		}
		return nil
	})
	switch {
	case err == nil:
		for _, s := range begun {
			c.lanes.nudge(s)
		}
	case ctx.Err() != nil:
	case len(ids) > 1:
		for _, id := range ids {
			c.act(ctx, []string{id})
		}
	default:
		c.log.Error("what fell due could not be done and is tried again", "sandbox", ids[0], "err", err)
	}
}

// timer does what the timers of one sandbox ask for. It says whether that began an
// operation.
func (c *Control) timer(ctx context.Context, tx store.Tx, s *sandbox.Sandbox) (started bool, err error) {
	active, err := tx.ActiveOperation(ctx, s.ID)
	if err != nil || active != nil || !s.DeletedAt.IsZero() {
		return false, err // its end asks again
	}
	v := s.RestVerdict(c.clocks.at(s.Host, c.instant()))
	if v.Act != sandbox.Run {
		return false, nil // another server has seen to it, or its policy was changed
	}
	w := c.writer(tx, s.Project, hostActor, c.instant())
	s.UpdatedAt = w.at
	if v.Verb != sandbox.Delete {
		// There is no cold storage yet: that it is due is kept with the row. It stays
		// stopped, and free (B6).
		s.ArchiveWaits = true
		if err := w.UpdateSandbox(ctx, s); err != nil {
			return false, err
		}
		return false, w.event(ctx, "archive.waiting", s.ID, "", dueData{Kind: v.Verb, Cause: v.Cause, Due: v.Due, Reason: waitsForStore})
	}
	op := sandbox.Operation{
		ID: v.Operation, Project: s.Project, Sandbox: s.ID, Kind: v.Verb, Status: sandbox.Pending, Generation: s.Generation,
		Params: []byte("{}"), Actor: hostActor, CreatedAt: w.at, Version: 1,
	}
	s.DeletedAt = w.at
	if err := w.UpdateSandbox(ctx, s); err != nil {
		return false, err
	}
	if err := w.InsertOperation(ctx, op); err != nil {
		return false, err
	}
	if err := w.event(ctx, "operation.started", s.ID, op.ID, dueData{Kind: v.Verb, Cause: v.Cause, Due: v.Due}); err != nil {
		return false, err
	}
	return true, w.meterAccepted(ctx, c, *s, op)
}

// waitsForStore is why an archiving that fell due has not begun.
const waitsForStore = "no_blob_store"

// dueData is the data of an event of what fell due.
type dueData struct {
	Kind   sandbox.Verb  `json:"kind"`
	Cause  sandbox.Cause `json:"cause"`
	Due    time.Time     `json:"due"`
	Reason string        `json:"reason,omitempty"`
}

// missed keeps what a sleep missed of the timers inside, with an event (X7).
func (w *writer) missed(ctx context.Context, id string, m hostproto.Missed) error {
	items, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if err := w.PutMissed(ctx, id, items); err != nil {
		return err
	}
	data := map[string]any{"from": m.From, "to": m.To, "timers": len(m.Timers) + m.Omitted}
	return w.event(ctx, "timers.missed", id, "", data)
}

// Missed gives what the last sleep of a sandbox missed of the timers inside; the zero
// value where nothing is known to be missed.
func (c *Control) Missed(ctx context.Context, a Actor, ref string) (id string, m Missed, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		s, err := resolve(ctx, r, a, ref)
		if err != nil {
			return err
		}
		id = s.ID
		items, err := r.Missed(ctx, s.ID)
		if fault.Is(err, fault.NotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return json.Unmarshal(items, &m)
	})
	return id, m, err
}
