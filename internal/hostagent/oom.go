package hostagent

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/hostproto"
)

// oomEvery is how often it is looked whether processes inside were killed for want of
// memory. It also bounds how many facts a guest that kills its own without end makes.
const oomEvery = 2 * time.Second

// watchMemory reports that sandboxes have run out of memory (R3).
func (a *Agent) watchMemory(ctx context.Context) {
	ticker := time.NewTicker(oomEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, o := range a.everyOwner() {
			if l := o.live.Load(); l != nil && l.oomSeen.Load() != l.handle.OOMKills() {
				if err := o.call(ctx, func() error { return o.tellOOM(l) }); err != nil && ctx.Err() == nil {
					a.log.Warn("it could not be told that a sandbox ran out of memory", "sandbox", o.id, "err", err)
				}
			}
		}
	}
}

// tellOOM is called in the owner's goroutine. What was reported of this boot is in the
// journal, so that an agent that starts anew does not report it again.
func (o *owner) tellOOM(l *live) error {
	kills, told := l.handle.OOMKills(), uint64(0)
	if o.rec.OOMBoot == o.rec.Generation {
		told = o.rec.OOMKills
	}
	if o.live.Load() != l || o.rec.Job != nil {
		return nil // the next round sees what is then
	}
	if kills > told {
		err := o.write(func(r *record) {
			r.OOMKills, r.OOMBoot = kills, r.Generation
			r.addReport(hostproto.Report{OOMKills: kills - told, At: o.agent.now()})
		})
		if err != nil {
			return err
		}
	}
	l.oomSeen.Store(kills)
	return nil
}
