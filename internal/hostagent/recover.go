package hostagent

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
)

const (
	// adoptAgain is how long a sandbox waits that could not be taken over.
	adoptAgain = 5 * time.Second
	// adoptLimit bounds one try to take a sandbox over, and thawLimit in it the wait for
	// an answer that takes milliseconds: the agent's start waits for both.
	adoptLimit = time.Minute
	thawLimit  = 5 * time.Second
)

// recover makes the owner's view true after a start: it adopts what runs, and goes
// on with the operation that was open. It is called in the owner's goroutine. One
// sandbox that cannot be taken over does not keep the others: it is tried again.
func (o *owner) recover(ctx context.Context) error {
	if o.job != nil || o.live.Load() != nil {
		return nil // a command came in between and has seen to it
	}
	if o.rec.Phase == phaseRunning && o.rec.HostBoot == o.agent.cfg.BootID {
		if err := o.adopt(ctx); err != nil {
			o.log.Error("a sandbox that ran could not be taken over and is tried again", "err", err)
			o.later(adoptAgain, func() { _ = o.recover(o.agent.jobs) })
			return nil
		}
	}
	o.tellStalled() // what hung in the kernel for the agent before has no job any more
	if o.rec.Job == nil {
		o.next()
		o.deliver()
		return nil
	}
	if err := o.write(func(r *record) { r.Job.Attempt++ }); err != nil {
		return err
	}
	o.start()
	return nil
}

// adopt takes over a sandbox that an earlier agent left running. One that has ended
// meanwhile is settled by the caller. What was paused or held by an operation that
// did not get to its commit runs on; that operation is begun again.
func (o *owner) adopt(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, adoptLimit)
	defer cancel()
	netns, err := o.agent.cfg.Network.Attach(ctx, o.id, o.egress)
	if err != nil {
		return err
	}
	h, err := o.agent.cfg.Driver.Adopt(ctx, o.spec(o.rec, o.rec.Generation, "", netns))
	if fault.Is(err, fault.NotFound) {
		o.lastExit = runtime.Exit{At: o.agent.now()}
		return nil
	}
	if err != nil {
		return err
	}
	l := o.bring(h, o.rec.Token, o.rec.Generation)
	l.ready.Store(true)
	if o.rec.Cleaned != 0 { // a clean-up that did not get to it
		if err := o.write(func(r *record) { r.Cleaned = 0 }); err != nil {
			return err
		}
	}
	if j := o.rec.Job; j != nil && j.Committed {
		return nil
	}
	ctx, cancel = context.WithTimeout(ctx, thawLimit)
	defer cancel()
	if err := h.Thaw(ctx); err != nil && !l.ended() {
		o.log.Error("a sandbox that was found could not be let run, and is tried again", "err", err)
		return o.write(func(r *record) {
			if set := r.unheard("it was found frozen and could not be let run on"); set != nil {
				r.addReport(hostproto.Report{Set: set, At: o.agent.now()})
			}
		})
	}
	return nil
}

// sweep removes what no journal accounts for: runtime directories with their
// processes, mounts, networks, captures that nobody waits for. Disks and saves of
// sandboxes are never removed here.
func (a *Agent) sweep(ctx context.Context, owners []*owner) error {
	holds := map[string]bool{} // has or may have something in the kernel
	for _, o := range owners {
		if o.rec.Job != nil || o.rec.Phase == phaseRunning && o.rec.HostBoot == a.cfg.BootID {
			holds[o.id] = true
		}
	}
	if err := a.clear(ctx, func(id string) bool { return !holds[id] }); err != nil {
		return err
	}
	saves, err := a.cfg.Disks.SaveOwners(ctx)
	if err != nil {
		return err
	}
	for _, id := range saves {
		if isCapture(id) && !a.captures.needed(id) {
			a.log.Info("a capture that no fork needs is removed", "op", id)
			if err := a.cfg.Disks.DropSaved(ctx, id, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// clear ends what the sandboxes that away names hold in the kernel.
func (a *Agent) clear(ctx context.Context, away func(id string) bool) error {
	found := map[string]bool{}
	boots, err := a.bootDirs()
	if err != nil {
		return err
	}
	for id := range boots {
		found[id] = true
	}
	for _, list := range []func(context.Context) ([]string, error){a.cfg.Network.IDs, a.cfg.Disks.Mounted} {
		ids, err := list(ctx)
		if err != nil {
			return err
		}
		for _, id := range ids {
			found[id] = true
		}
	}
	var all error
	for _, id := range sortedKeys(found) {
		if !away(id) {
			continue
		}
		a.log.Info("what a sandbox left is removed", "sandbox", id)
		o := &owner{agent: a, id: id, log: a.log}
		if err := errors.Join(o.down(ctx, boots[id]...), o.release(ctx), os.RemoveAll(filepath.Join(a.cfg.RunDir, id))); err != nil {
			all = errors.Join(all, err)
		}
	}
	return all
}

// bootDirs lists the runtime directories that are there: generations by sandbox.
func (a *Agent) bootDirs() (map[string][]int64, error) {
	entries, err := os.ReadDir(a.cfg.RunDir)
	if err != nil {
		return nil, err
	}
	found := map[string][]int64{}
	for _, e := range entries {
		boots, err := os.ReadDir(filepath.Join(a.cfg.RunDir, e.Name()))
		if err != nil {
			continue
		}
		for _, b := range boots {
			if gen, err := strconv.ParseInt(b.Name(), 10, 64); err == nil {
				found[e.Name()] = append(found[e.Name()], gen)
			}
		}
	}
	return found, nil
}

func sortedKeys(m map[string]bool) []string { return slices.Sorted(maps.Keys(m)) }
