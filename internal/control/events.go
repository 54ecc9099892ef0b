package control

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/webhook"
)

// EventQuery selects events of the actor's project.
type EventQuery struct {
	After   int64    // the last number that was seen; 0 begins with the oldest kept
	Sandbox string   // an id; "" for all
	Types   []string // as sandbox.ready or sandbox.*; none is all
	Limit   int      // 0 is Limits.PageDefault
	Wait    time.Duration
}

// EventPage is some events, oldest first. There are no others of the query up to Seen,
// which is where a reader goes on.
type EventPage struct {
	Events []Event
	Seen   int64
}

// Events gives the events of the actor's project after q.After, oldest first. Where
// there are none it waits up to q.Wait for the first, and gives none when none came.
// A reader that asks on with Seen misses none and gets none twice.
func (c *Control) Events(ctx context.Context, a Actor, q EventQuery) (EventPage, error) {
	f := store.EventFilter{After: q.After, Limit: q.Limit, Project: a.Project, Sandbox: q.Sandbox, Types: q.Types}
	if f.After < 0 || f.Limit < 0 || int64(f.Limit) > c.limits.PageMax {
		return EventPage{}, invalid("after", "cannot give %d events after %d: begin at 0 or later, with at most %d at a time", f.Limit, f.After, c.limits.PageMax)
	}
	if err := webhook.CheckTypes(f.Types); err != nil {
		return EventPage{}, err
	}
	if f.Limit == 0 {
		f.Limit = int(c.limits.PageDefault)
	}
	if q.Wait <= 0 {
		return c.readEvents(ctx, f)
	}
	timer := time.NewTimer(q.Wait)
	defer timer.Stop()
	for {
		fresh := c.feed.waiting()
		page, ok := c.feed.read(f)
		if !ok {
			fresh = c.store.Committed()
			var err error
			if page, err = c.readEvents(ctx, f); err != nil {
				return page, err
			}
		}
		if len(page.Events) > 0 {
			return page, nil
		}
		f.After = page.Seen
		select {
		case <-ctx.Done():
			return page, fault.Wrap(context.Cause(ctx), fault.Cancelled, "the stream of events was cancelled")
		case <-timer.C:
			return page, nil
		case <-fresh:
		}
	}
}

// readEvents gives events from the database. The last number is read first: what has a
// number by then is seen by the read after it.
func (c *Control) readEvents(ctx context.Context, f store.EventFilter) (EventPage, error) {
	last, err := c.store.LastEvent(ctx)
	if err != nil {
		return EventPage{}, err
	}
	if f.After > last {
		// A database that was put back from a backup: what comes next has numbers that the
		// reader takes for seen.
		return EventPage{}, fault.New(fault.InvalidArgument, "cannot give the events after %d: the newest is %d; begin there, or at 0", f.After, last).Because("after")
	}
	events, err := c.store.Events(ctx, f)
	page := EventPage{Events: events, Seen: max(last, f.After)}
	if len(events) == f.Limit || len(events) > 0 && events[len(events)-1].Seq > last {
		page.Seen = events[len(events)-1].Seq
	}
	return page, err
}

// SandboxID gives the id of a sandbox by id or name, also of one that is deleted: what
// happened to it is still told.
func (c *Control) SandboxID(ctx context.Context, a Actor, ref string) (id string, err error) {
	err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		s, err := resolve(ctx, r, a, ref)
		id = s.ID
		return err
	})
	return id, err
}

// EventStart gives the number to begin after for a reader that has none: of the events
// from an instant on, or, where since is zero, of the last so many of the query.
func (c *Control) EventStart(ctx context.Context, a Actor, q EventQuery, since time.Time, tail int64) (int64, error) {
	if tail < 0 || tail > c.limits.PageMax {
		return 0, invalid("tail", "cannot begin with the last %d events: from 0 to %d can be asked for", tail, c.limits.PageMax)
	}
	if err := webhook.CheckTypes(q.Types); err != nil {
		return 0, err
	}
	return c.store.EventStart(ctx, store.EventFilter{Project: a.Project, Sandbox: q.Sandbox, Types: q.Types}, since, int(tail))
}

// LastEvent gives the number of the newest event, for a reader that wants only what
// comes.
func (c *Control) LastEvent(ctx context.Context) (int64, error) { return c.store.LastEvent(ctx) }
