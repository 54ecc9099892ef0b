package hostagent

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// wallsTime bounds how long a change of a firewall may take: the owner waits for it.
const wallsTime = 20 * time.Second

// noteWalls makes the record's firewall known to whoever asks, in any goroutine.
func (o *owner) noteWalls() {
	f := sandbox.DefaultFirewall()
	if t := o.rec.Timers; t != nil {
		f = t.Policy.Walls()
	}
	o.walls.Store(&f)
}

// egress gives the outbound rules that hold by the journal.
func (o *owner) egress() sandbox.Egress { return o.walls.Load().Egress() }

// applyWalls brings the rules of the record into the sandbox's network, if it has one. An
// operation that makes one at this moment applies the same: it asks for them when it does.
func (o *owner) applyWalls() error {
	if o.rec.Phase != phaseRunning && o.rec.Job == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(o.agent.jobs, wallsTime)
	defer cancel()
	return o.agent.cfg.Network.SetEgress(ctx, o.id, o.egress)
}
