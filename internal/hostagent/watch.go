package hostagent

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// probeEvery is how often a running sandbox's agent is asked whether it answers.
const probeEvery = 30 * time.Second

// probesMost bounds how many are asked at a time. A question that waits for its turn on a
// machine that has much else to do must not be taken for one that nobody answers.
const probesMost = 32

// watch asks the agents of all that runs, now and then: a sandbox that is frozen, or
// whose PID 1 hangs, is ready by its state and must not look well (ADR 0006).
func (a *Agent) watch(ctx context.Context) {
	ticker := time.NewTicker(a.cfg.ProbeEvery)
	defer ticker.Stop()
	turns := make(chan struct{}, probesMost)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, o := range a.everyOwner() {
			if o.live.Load() == nil || !o.probing.CompareAndSwap(false, true) {
				continue
			}
			select {
			case <-ctx.Done():
				return
			case turns <- struct{}{}:
			}
			a.sender(func(ctx context.Context) {
				defer func() { o.probing.Store(false); <-turns }()
				o.probe(ctx)
			})
		}
	}
}

// probe asks one guest. Where an operation is at work nothing is wrong with a guest
// that does not answer. One that should and does not is roused; that job decides.
func (o *owner) probe(ctx context.Context) {
	l := o.live.Load()
	if l == nil || !l.ready.Load() || l.held.Load() {
		return
	}
	err := o.ping(ctx, l)
	_ = o.call(ctx, func() error {
		if o.job != nil || o.rec.Job != nil || o.live.Load() != l || l.held.Load() {
			return nil
		}
		if err != nil {
			return o.begin(jobRecord{Command: o.own(verbRouse)})
		}
		if !o.rec.Silent {
			return nil
		}
		return o.write(func(r *record) { r.addReport(hostproto.Report{Clear: r.heard(), At: o.agent.now()}) })
	})
}

func (o *owner) ping(ctx context.Context, l *live) error {
	ctx, cancel := context.WithTimeout(ctx, o.agent.cfg.GuestAnswer)
	defer cancel()
	_, err := l.guest.Agent.Ping(ctx, &guestproto.PingRequest{})
	return err
}

// rouse lets a sandbox run whose agent does not answer, whatever keeps it, and asks
// again. It is a job, so that no save pauses the sandbox at the same time.
func (w *work) rouse() plan {
	return plan{
		before: []action{{sandbox.StepThaw, w.thawAndAsk, nil}},
		end:    func(r *record) hostproto.Report { return hostproto.Report{Clear: r.heard()} },
		failed: func(r *record, _ error) hostproto.Report {
			if l := w.o.live.Load(); l == nil || l.ended() {
				return hostproto.Report{}
			}
			why := "the agent inside does not answer"
			if w.frozen {
				why = "it is frozen and could not be let run on"
			}
			return hostproto.Report{Set: r.unheard(why)}
		},
	}
}

func (w *work) thawAndAsk(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		return nil
	}
	if err := w.unfreeze(ctx); err != nil {
		return err
	}
	return w.o.ping(ctx, l)
}

// unheard gives the condition of a guest that does not answer, nil where it is set.
func (r *record) unheard(why string) []sandbox.Condition {
	if r.Silent {
		return nil
	}
	r.Silent = true
	return []sandbox.Condition{{Type: sandbox.Degraded, Reason: sandbox.GuestSilent,
		Message: why + "; `hutch sleep` and `hutch wake` may bring it back with its memory, `hutch stop` and `hutch resume` start it anew on its disk"}}
}

// heard clears it.
func (r *record) heard() []sandbox.Condition {
	if !r.Silent {
		return nil
	}
	r.Silent = false
	return []sandbox.Condition{{Type: sandbox.Degraded, Reason: sandbox.GuestSilent}}
}

// stall notes that a step hangs in the kernel, or does no more. It does not wait: the
// journal may be on the same storage.
func (o *owner) stall(on bool) {
	o.stalled.Store(on)
	o.later(0, o.tellStalled)
}

// tellStalled reports the condition storage_stalled where it has changed. It is called
// in the owner's goroutine.
func (o *owner) tellStalled() {
	on := o.stalled.Load()
	if on == o.rec.Stalled {
		return
	}
	cond := []sandbox.Condition{{Type: sandbox.Degraded, Reason: "storage_stalled", Message: "a step of an operation hangs in the host's kernel; look at the host's disks"}}
	rep := hostproto.Report{Set: cond, At: o.agent.now()}
	if !on {
		rep.Set, rep.Clear = nil, cond
	}
	if err := o.write(func(r *record) { r.Stalled = on; r.addReport(rep) }); err != nil {
		o.later(time.Second, o.tellStalled)
	}
}
