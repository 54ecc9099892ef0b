package hostagent

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// A write that the pool has no space for fails below the file system of a disk, which
// then loses what it has promised to keep. So sandboxes that run are held before it
// comes to that: their tasks stop, and go on when there is space again. An operation
// on one that is held lets it run while it is at work: what gives space back, a stop
// or a sleep, needs the programs inside.

const (
	// fastestWriter bounds how fast the pool fills, in bytes a second. It says how soon
	// the space that is left has to be looked at again.
	fastestWriter = 4 << 30
	roomSoonest   = 10 * time.Millisecond
	roomLatest    = time.Second
	// holdLimit bounds one hold or release of one sandbox.
	holdLimit = 10 * time.Second
)

// diskFull is the condition of a sandbox that is held.
var diskFull = sandbox.Condition{Type: sandbox.Degraded, Reason: "disk_full",
	Message: "the host's disk pool is full: the sandbox is held until there is space; `hutch df` shows what takes it"}

// watchRoom holds the sandboxes that run while the pool is full. Each is looked at as
// long as that lasts, for new ones come and operations end.
func (a *Agent) watchRoom(ctx context.Context) {
	full, known := false, false
	for {
		pause := roomLatest
		if err := a.makeRoom(ctx); err != nil && ctx.Err() == nil {
			a.log.Error("what is deleted could not be erased to make room, and is tried again", "err", err)
		}
		room, err := a.room(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			a.log.Error("the pool's free space cannot be read", "err", err)
		case room.Left < 0, full && room.Left < room.Clear:
			if !full {
				a.log.Warn("the disk pool is full: the sandboxes that run are held", "bytes", room.Left)
			}
			full, known = true, a.holdAll(ctx, true)
			pause = roomLatest / 10
		default:
			if full {
				a.log.Info("the disk pool has space again: the sandboxes go on", "bytes", room.Left)
			}
			if full || !known { // also what an earlier agent held
				full, known = false, a.holdAll(ctx, false)
			}
			pause = min(max(time.Duration(float64(room.Left)/fastestWriter*float64(time.Second)), roomSoonest), roomLatest)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// room is the pool's headroom, less what the sandboxes that run have written and the
// kernel has not: that takes space yet, whether they are held or not.
func (a *Agent) room(ctx context.Context) (disk.Headroom, error) {
	room, err := a.cfg.Disks.Headroom(ctx)
	if err != nil || room.Left > memoryTotal() { // more than memory can hold back
		return room, err
	}
	for _, o := range a.everyOwner() {
		if l := o.live.Load(); l != nil {
			if u, err := l.handle.Usage(ctx); err == nil { // else it has just ended
				room.Left -= u.DirtyBytes
			}
		}
	}
	return room, nil
}

// everyOwner gives the owners that there are now.
func (a *Agent) everyOwner() []*owner {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.owners))
}

// holdAll holds or releases all sandboxes at once; false where one is to be tried
// again.
func (a *Agent) holdAll(ctx context.Context, hold bool) bool {
	owners := a.everyOwner()
	results := make(chan error, len(owners))
	for _, o := range owners {
		go func() {
			ctx, cancel := context.WithTimeout(ctx, holdLimit)
			defer cancel()
			results <- o.call(ctx, func() error { return o.hold(ctx, hold) })
		}()
	}
	ok := true
	for range owners {
		if err := <-results; err != nil && !errors.Is(err, errGone) {
			a.log.Warn("a sandbox could not be held or released and is tried again", "held", hold, "err", err)
			ok = false
		}
	}
	return ok
}

// hold is called in the owner's goroutine. A sandbox at which an operation is at work
// is left to it.
func (o *owner) hold(ctx context.Context, hold bool) error {
	if o.job != nil || o.rec.Job != nil {
		return nil
	}
	l := o.live.Load()
	if hold && (l == nil || !l.ready.Load()) {
		return nil
	}
	if l != nil && l.held.Load() != hold {
		if err := l.hold(ctx, hold); err != nil {
			return err
		}
		o.log.Info("the pool is full or has space again", "held", hold)
	}
	if o.rec.Full == hold {
		return nil
	}
	return o.write(func(r *record) {
		rep := hostproto.Report{At: o.agent.now()}
		if r.Full = hold; hold {
			rep.Set = []sandbox.Condition{diskFull}
		} else {
			rep.Clear = []sandbox.Condition{diskFull}
		}
		r.addReport(rep)
	})
}

// hold stops all tasks of a boot, or lets them run.
func (l *live) hold(ctx context.Context, hold bool) error {
	if !hold {
		if err := l.handle.Thaw(ctx); err != nil {
			return err
		}
		l.held.Store(false)
		return nil
	}
	l.held.Store(true) // calls are refused from here on, and not left hanging
	if _, err := l.handle.Pause(ctx); err != nil {
		l.held.Store(false)
		return err
	}
	return nil
}

// letGo lets a sandbox that is held run, for the operation that is about to begin. One
// that cannot be is killed or found ended by the operation itself.
func (o *owner) letGo(ctx context.Context) {
	l := o.live.Load()
	if l == nil || !l.held.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, holdLimit)
	defer cancel()
	if err := l.hold(ctx, false); err != nil {
		o.log.Warn("a sandbox that was held could not be let run", "err", err)
	}
}

// errHeld answers calls to a sandbox that is held.
func errHeld(id string) error {
	return fault.New(fault.NoCapacity, "the sandbox %s is held, as the disk pool of its host is full; `hutch df` shows what takes the space: "+
		"delete or stop sandboxes, or make the pool larger", id).Because("disk_full").After(5 * time.Second)
}
