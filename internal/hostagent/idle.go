package hostagent

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// lookApart is the time between the two looks at a sandbox that is not sampled.
const lookApart = time.Second

// watchIdle samples the sandboxes whose sleep mode is auto, and has those sleep or stop
// that are idle (Z1). It needs no server (A6). Those of another mode cost nothing.
func (a *Agent) watchIdle(ctx context.Context) {
	ticker := time.NewTicker(a.cfg.SampleEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			a.sampleAll(ctx)
		}
	}
}

// sampleAll takes one sample of each, beside each other: neither a guest nor a journal that
// does not answer holds up the samples of others. What is not done with the one before is
// passed over.
func (a *Agent) sampleAll(ctx context.Context) *sync.WaitGroup {
	var round sync.WaitGroup
	owners := slices.DeleteFunc(a.everyOwner(), func(o *owner) bool { return !o.auto.Load() || o.live.Load() == nil })
	if len(owners) == 0 {
		return &round
	}
	traffic, err := a.cfg.Network.Traffic(ctx)
	if err != nil {
		a.log.Warn("the network counters of the sandboxes cannot be read, so none of them is put to sleep", "err", err)
		return &round
	}
	for _, o := range owners {
		if !o.sampling.CompareAndSwap(false, true) {
			continue
		}
		round.Add(1)
		a.sender(func(ctx context.Context) {
			defer round.Done()
			defer o.sampling.Store(false)
			o.sample(ctx, traffic)
		})
	}
	return &round
}

// sample reads what the host sees, which takes microseconds, and asks the guest only where
// its word could change what that comes to.
func (o *owner) sample(ctx context.Context, traffic map[string]int64) {
	at, ok := o.watched(ctx)
	if !ok {
		return
	}
	s, err := o.counters(at, traffic)
	if err != nil {
		return // it has just ended
	}
	if at.watch.Asks(s, at.policy) {
		s = o.witness(ctx, at, s)
	}
	o.take(ctx, at, s)
}

// vantage is what a look at a sandbox is taken from.
type vantage struct {
	live   *live
	policy sandbox.IdlePolicy
	watch  sandbox.Watch
	seen   seen // what was at work through hutch when the look began
	turns  int  // that the control plane has given a lease for
}

// watched gives the vantage on a sandbox that is sampled; false where it is not.
func (o *owner) watched(ctx context.Context) (at vantage, ok bool) {
	err := o.call(ctx, func() error {
		at, ok = o.vantage()
		ok = ok && at.policy.Mode == sandbox.SleepAuto
		return nil
	})
	return at, ok && err == nil
}

// vantage is called in the owner's goroutine; false where nothing runs that could be
// looked at, or an operation is at work on it.
func (o *owner) vantage() (vantage, bool) {
	l := o.live.Load()
	if l == nil || !l.ready.Load() || l.held.Load() || o.job != nil || o.rec.Job != nil || o.rec.Timers == nil {
		return vantage{}, false
	}
	return vantage{live: l, policy: o.idlePolicy(), watch: o.watch, seen: o.uses.seen(), turns: o.turns()}, true
}

// turns counts the harness turns that are active. It is called in the owner's goroutine.
func (o *owner) turns() int { return o.rec.Leases.Awake(o.agent.now(), o.rec.Timers.Policy.TTL) }

func (o *owner) idlePolicy() sandbox.IdlePolicy {
	return sandbox.IdlePolicy{
		Mode: o.rec.Spec.Sleep, Window: o.rec.Timers.Policy.IdleAfter, Every: o.agent.cfg.SampleEvery,
		CPUs: o.rec.Spec.CPUs, Nested: o.agent.cfg.Capabilities.Nested,
	}
}

// counters is a sample of what the host sees itself.
func (o *owner) counters(at vantage, traffic map[string]int64) (sandbox.Sample, error) {
	cpu, err := at.live.handle.CPUTime()
	if err != nil {
		return sandbox.Sample{}, err
	}
	return sandbox.Sample{
		At: o.agent.now(), Generation: at.live.generation, CPU: cpu, Network: traffic[o.id],
		Sessions: at.seen.sessions, Turns: sandbox.Seen{Open: at.turns}, Streams: at.seen.streams, Commands: at.seen.commands,
	}, nil
}

// witness adds the guest's word to a sample, where it says any.
func (o *owner) witness(ctx context.Context, at vantage, s sandbox.Sample) sandbox.Sample {
	ctx, cancel := context.WithTimeout(ctx, min(o.agent.cfg.GuestAnswer, o.agent.cfg.SampleEvery/2))
	defer cancel()
	a, err := at.live.guest.Agent.Activity(ctx, &guestproto.ActivityRequest{})
	if err != nil {
		return s
	}
	s.Guest = &sandbox.GuestSample{
		CPU: time.Duration(a.GetCpuNanos()), Network: s.Network, // hutch's own is not in what the host counts
		Foreground: int(a.GetForegroundCommands()), LastOutput: a.GetLastOutputUnixNano(), Nested: int(a.GetNestedGuests()),
	}
	s.Commands = o.uses.hear(at.seen, int(a.GetRunningCommands()), int(a.GetForegroundCommands()))
	return s
}

// take has the owner take a sample in, and act on it.
func (o *owner) take(ctx context.Context, at vantage, s sandbox.Sample) {
	_ = o.call(ctx, func() error { // an owner that is gone needs none
		if now, ok := o.vantage(); ok && now.live == at.live {
			o.sampled(ctx, at, s)
		}
		return nil
	})
}

// sampled is called in the owner's goroutine.
func (o *owner) sampled(ctx context.Context, at vantage, s sandbox.Sample) {
	p := o.idlePolicy()
	if o.tried {
		o.watch, o.tried = o.watch.Over(s), false
	}
	o.watch = o.watch.Add(s, p)
	o.relent(p)
	if o.idleDue(o.watch, p).Act != sandbox.Run || o.agent.autos.Load() >= autosMost {
		return
	}
	// The last check is in the goroutine that alone can begin an operation, behind the
	// gate that all use comes through (Z4).
	traffic, err := o.agent.cfg.Network.Traffic(ctx)
	if err != nil {
		return
	}
	at.turns = o.turns() // one may have begun since
	last, err := o.counters(at, traffic)
	if err != nil || at.turns > 0 {
		return
	}
	last.Guest, last.Commands = s.Guest, s.Commands
	v := o.idleDue(o.watch.Add(last, p), p)
	if v.Act != sandbox.Run || !o.uses.closeIfQuiet(at.seen) {
		return
	}
	o.log.Info("it is idle", "op", v.Operation, "verb", v.Verb, "due", v.Due)
	cmd := hostproto.Command{Operation: v.Operation, Verb: v.Verb, Sandbox: o.id, Generation: o.rec.Generation}
	if err := o.begin(jobRecord{Command: cmd, Auto: &v}); err != nil {
		o.uses.close(false)
		o.log.Error("an idle sandbox could not be put to sleep; the next sample tries again", "op", v.Operation, "err", err)
	}
}

func (o *owner) idleDue(w sandbox.Watch, p sandbox.IdlePolicy) sandbox.Verdict {
	now := o.agent.now()
	return o.rec.Timers.DueIdle(w.Idleness(p, now), now)
}

// resample looks again at once after an operation of its own that failed: what that took
// is no activity, and what comes after it is.
func (o *owner) resample() {
	o.tried = true
	o.agent.sender(func(ctx context.Context) {
		if at, ok := o.watched(ctx); ok {
			if s, err := o.look(ctx, at); err == nil {
				o.take(ctx, at, s)
			}
		}
	})
}

// look is one sample with the guest's word.
func (o *owner) look(ctx context.Context, at vantage) (sandbox.Sample, error) {
	traffic, err := o.agent.cfg.Network.Traffic(ctx)
	if err != nil {
		return sandbox.Sample{}, err
	}
	s, err := o.counters(at, traffic)
	if err != nil {
		return s, err
	}
	return o.witness(ctx, at, s), nil
}

// Idleness reads whether a sandbox is idle; see hostproto.Host. One that is not sampled is
// looked at twice, a second apart.
func (a *Agent) Idleness(ctx context.Context, sandboxID string) (hostproto.Idleness, error) {
	o, err := a.find(sandboxID)
	if err != nil {
		return hostproto.Idleness{}, err
	}
	var at vantage
	var timers sandbox.Timers
	var out hostproto.Idleness
	looks := false
	err = o.call(ctx, func() error {
		if o.rec.Timers == nil || o.live.Load() == nil {
			return fault.New(fault.FailedPrecondition, "the sandbox %s does not run", sandboxID).Because("not_running")
		}
		timers = *o.rec.Timers
		at, looks = o.vantage()
		p := o.idlePolicy()
		out = hostproto.Idleness{Mode: p.Mode, Window: p.Window, OnIdle: timers.Policy.OnIdle, Every: p.Every}
		return nil
	})
	if err != nil {
		return out, err
	}
	if retry, ok := timers.Retries[sandbox.CauseIdle]; ok {
		out.Failed = &retry
	}
	if !looks {
		out.Idleness = sandbox.Idleness{Blocker: sandbox.IdleOperation}
		if l := o.live.Load(); l != nil && l.held.Load() {
			out.Blocker = sandbox.IdleHeld
		}
		return out, nil
	}
	w, p := at.watch, at.policy
	if p.Mode != sandbox.SleepAuto {
		first, err := o.look(ctx, at)
		if err != nil {
			return out, err
		}
		p.Every = lookApart
		w = sandbox.Watch{}.Add(first, p)
		select {
		case <-ctx.Done():
			return out, context.Cause(ctx)
		case <-time.After(lookApart):
		}
		at.seen = o.uses.seen()
	}
	s, err := o.look(ctx, at)
	if err != nil {
		return out, err
	}
	now := a.now()
	out.Idleness, out.At = w.Add(s, p).Idleness(p, now), s.At
	if out.Idle { // acted on with the next sample, or when a pause after a failure is over
		out.Next = now
		if v := timers.DueIdle(out.Idleness, now); v.Next.After(now) {
			out.Next = v.Next
		}
	}
	return out, nil
}

// Attend counts an activity that does not come through Guest: an LLM stream through the
// proxy. FailedPrecondition where the sandbox does not run, Unavailable where an
// operation ends its running; done ends it.
func (a *Agent) Attend(sandboxID string, use hostproto.Use) (done func(), err error) {
	o, err := a.find(sandboxID)
	if err != nil {
		return nil, err
	}
	if o.live.Load() == nil {
		return nil, fault.New(fault.FailedPrecondition, "the sandbox %s does not run", sandboxID).Because("not_running")
	}
	done, ok := o.uses.begin(use)
	if !ok {
		return nil, errNotTaken(sandboxID)
	}
	return done, nil
}

// errNotTaken answers calls to a sandbox that does not run, or soon will not.
func errNotTaken(id string) error {
	return fault.New(fault.Unavailable, "the sandbox %s does not take calls at this moment", id).Because("not_running").After(time.Second)
}
