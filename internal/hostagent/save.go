package hostagent

import (
	"cmp"
	"context"
	"encoding/json"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// manifest is what a committed save says of itself.
type manifest struct {
	Sandbox    string           `json:"sandbox"`
	Generation int64            `json:"generation"`
	Template   string           `json:"template"`
	Agent      string           `json:"agent"`
	Memory     runtime.Manifest `json:"memory"`
	At         time.Time        `json:"at"`
}

func parseManifest(data []byte) (manifest, error) {
	var m manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fault.Wrap(err, fault.DataCorrupt, "the save's manifest is damaged; `stop` the sandbox to go on from its disk").Because("manifest")
	}
	return m, nil
}

const (
	// guestAnswer bounds what a guest may take for a question.
	guestAnswer = 10 * time.Second
	// stopGrace is how long programs get to end at a stop; containers get 15 s (V5).
	stopGrace = 5 * time.Second
)

// sleep saves memory and disk at one instant. Only when all of it is durable is the
// sandbox ended.
func (w *work) sleep() plan {
	return plan{
		before: []action{
			{sandbox.StepPrepare, w.prepareSave, nil},
			{sandbox.StepPause, w.pause, w.unfreeze},
			{sandbox.StepCapture, func(ctx context.Context) error { return w.capture(ctx, w.o.id, w.r.Generation) },
				func(ctx context.Context) error { return w.drop(ctx, w.o.id, w.r.Generation) }},
			{sandbox.StepClone, w.clone, nil},
			{sandbox.StepSeal, w.seal, nil},
		},
		commit: func(r *record) { r.Phase, r.Save = phaseSaved, r.Generation },
		after: []action{
			{sandbox.StepKill, w.kill, nil},
			{sandbox.StepRelease, w.release, nil},
			// The saved copy is the disk from here on.
			{sandbox.StepErase, w.dropDisk, nil},
		},
		end: func(*record) hostproto.Report {
			return hostproto.Report{Event: sandbox.EventSlept, Saved: true, Save: w.save}
		},
		failed: w.saveFailed,
	}
}

// dropDisk removes the disk of a sandbox that sleeps, but never the only copy.
func (w *work) dropDisk(ctx context.Context) error {
	save, err := w.disks().Saved(ctx, w.o.id, w.r.Generation)
	if err != nil {
		return err
	}
	if m, err := parseManifest(save.Manifest); err == nil { // else the wake says so
		w.save = &hostproto.Save{At: m.At, MemoryRoot: m.Memory.Root, MemoryBytes: m.Memory.Bytes(), Runtime: m.Memory.Runtime, Version: m.Memory.Version}
	}
	return w.disks().Delete(ctx, w.o.id)
}

// fork makes one capture and as many sandboxes from it as were asked for. The
// source is frozen only while its memory is read.
func (w *work) fork() plan {
	id := w.j.Command.Operation
	p := plan{
		after:  []action{{sandbox.StepSpawn, w.spawn, nil}},
		end:    func(*record) hostproto.Report { return hostproto.Report{} },
		failed: w.forkFailed,
	}
	drop := func(ctx context.Context) error { return w.drop(ctx, id, 0) }
	live := w.j.Command.Mode == sandbox.ForkLive
	switch {
	case w.r.Phase == phaseSaved:
		p.before = []action{{sandbox.StepClone, func(ctx context.Context) error {
			if live {
				if err := w.restorable(ctx); err != nil {
					return err
				}
			}
			return w.disks().CopySaved(ctx, w.o.id, w.r.Save, id, 0)
		}, drop}}
	case live && w.r.Phase == phaseRunning:
		p.before = []action{
			{sandbox.StepPrepare, w.prepareSave, nil},
			{sandbox.StepPause, w.pause, w.unfreeze},
			{sandbox.StepCapture, func(ctx context.Context) error { return w.capture(ctx, id, 0) }, drop},
			{sandbox.StepClone, w.clone, nil},
			{sandbox.StepThaw, w.thaw, nil},
			{sandbox.StepSeal, w.seal, nil},
		}
	case live:
		p.before = refusal(fault.New(fault.Conflict, "cannot fork its memory: it does not run; use `--mode disk`").Because("overtaken")).before
	default:
		p.before = []action{
			{sandbox.StepPrepare, w.prepareStop, nil},
			{sandbox.StepClone, func(ctx context.Context) error { return w.cloneOnly(ctx, id) }, drop},
			{sandbox.StepSeal, w.seal, nil},
		}
	}
	return p
}

// restorable refuses to fork a saved memory that this machine cannot bring back.
func (w *work) restorable(ctx context.Context) error {
	save, err := w.disks().Saved(ctx, w.o.id, w.r.Save)
	if err != nil {
		return err
	}
	m, err := parseManifest(save.Manifest)
	if err != nil {
		return err
	}
	return m.Memory.RunsOn(w.o.agent.cfg.Capabilities, w.o.agent.cfg.CPUFeatures)
}

// prepareSave refuses what cannot be saved before anything is frozen, and has the
// guest write its file systems out (Z9, Z12).
func (w *work) prepareSave(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		return errNotRunning
	}
	if err := l.handle.Saveable(ctx); err != nil {
		return err
	}
	return w.sync(ctx, l)
}

// prepareStop proves that the disk can be saved, and tells nothing inside to end.
func (w *work) prepareStop(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		if w.r.Phase == phaseRunning {
			return errNotRunning
		}
		return nil
	}
	return w.sync(ctx, l)
}

var errNotRunning = fault.New(fault.FailedPrecondition, "the sandbox ended by itself in the meantime; look at it with `hutch get`").Because("not_running")

// sync writes out what the sandbox has written: the guest first, then the host. A
// guest that does not answer, for whatever reason of its own, cannot prevent a save:
// the host's file system has what its programs wrote.
func (w *work) sync(ctx context.Context, l *live) error {
	asked, cancel := context.WithTimeout(ctx, w.o.agent.cfg.GuestAnswer)
	defer cancel()
	if _, err := l.guest.Agent.Sync(asked, &guestproto.SyncRequest{}); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		w.o.log.Warn("the guest did not sync; the host does", "op", w.j.Command.Operation, "err", err)
	}
	return w.disks().Sync(ctx, w.o.id)
}

// pause is given to the capture through the driver, which makes it harmless to ask
// for it again.
func (w *work) pause(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		return errNotRunning
	}
	_, err := l.handle.Pause(ctx)
	return err
}

func (w *work) thaw(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		return nil
	}
	err := l.handle.Thaw(ctx)
	if l.ended() {
		return nil
	}
	return err
}

// unfreeze is thaw where a save is taken back; it remembers whether it could.
func (w *work) unfreeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.o.agent.cfg.GuestAnswer)
	defer cancel()
	err := w.thaw(ctx)
	w.frozen = err != nil
	return err
}

func (w *work) capture(ctx context.Context, owner string, generation int64) error {
	l := w.o.live.Load()
	if l == nil {
		return errNotRunning
	}
	paused, err := l.handle.Pause(ctx)
	if err != nil {
		return err
	}
	if w.staging, err = w.disks().Stage(ctx, owner, generation, w.captureBytes(ctx, l)); err != nil {
		return err
	}
	w.memory, w.captured = true, w.o.agent.meta(l.handle)
	return paused.Capture(ctx, w.staging.MemDir())
}

// captureSlack is what a memory image may take beyond the memory that is in use.
const captureSlack = 64 << 20

// captureBytes is how much a capture may come to: what is resident, or the whole
// memory where that is not known, and the deleted files that are open.
func (w *work) captureBytes(ctx context.Context, l *live) int64 {
	most := w.r.Spec.Memory + captureSlack
	if u, err := l.handle.Usage(ctx); err == nil && u.MemoryBytes > 0 {
		return min(most, u.MemoryBytes+captureSlack) + u.DeletedBytes
	}
	return most
}

// clone copies the disk beside the memory that it belongs to.
func (w *work) clone(ctx context.Context) error { return w.staging.CloneDisk(ctx, w.o.id) }

// cloneOnly makes a capture that has no memory.
func (w *work) cloneOnly(ctx context.Context, owner string) (err error) {
	if w.staging, err = w.disks().Stage(ctx, owner, 0, captureSlack); err != nil {
		return err
	}
	return w.clone(ctx)
}

// drop removes a save that this job made or an earlier attempt left.
func (w *work) drop(ctx context.Context, owner string, generation int64) error {
	if w.staging != nil {
		if err := w.staging.Abort(); err != nil {
			return err
		}
	}
	return w.disks().DropSaved(ctx, owner, generation)
}

// seal computes the memory's digests and makes the whole save durable under its
// final name.
func (w *work) seal(ctx context.Context) error {
	m := manifest{Sandbox: w.o.id, Generation: w.r.Generation, Template: w.r.Spec.Version, Agent: w.r.Agent, At: w.o.agent.now()}
	if w.memory {
		var err error
		if m.Memory, err = runtime.Seal(ctx, w.staging.MemDir(), w.captured); err != nil {
			return err
		}
	}
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return w.staging.Commit(ctx, data)
}

// shutdown tells the programs inside to end and waits for them, within bounds: what
// does not end is killed with the sandbox.
func (w *work) shutdown(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		return nil
	}
	wait := guestproto.ContainerGrace + w.o.agent.cfg.GuestAnswer
	if w.r.Silent { // it has not answered a simpler question
		wait = w.o.agent.cfg.GuestAnswer
	}
	asked, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if _, err := l.guest.Agent.Shutdown(asked, &guestproto.ShutdownRequest{GraceNanos: int64(stopGrace)}); err != nil {
		w.o.log.Warn("the guest did not shut down in order and is killed", "op", w.j.Command.Operation, "err", err)
	}
	return w.disks().Sync(ctx, w.o.id)
}

// spawn hands the capture to the children and waits until each has ended its
// creation. Each child keeps the capture until then, whatever becomes of the source.
func (w *work) spawn(ctx context.Context) error {
	ref := &captureRef{ID: w.j.Command.Operation, Memory: w.j.Command.Mode == sandbox.ForkLive, Token: w.r.Token, Agent: w.r.Agent}
	a, spec := w.o.agent, w.r.Spec
	spec.Sleep = cmp.Or(w.j.Command.Spec.Sleep, spec.Sleep) // a change of it may still be on its way here
	for _, c := range w.j.Command.Children {
		cmd := hostproto.Command{Operation: c.Operation, Verb: sandbox.Create, Sandbox: c.Sandbox, Name: c.Name, Spec: spec, Policy: w.j.Command.Policy,
			Origin: hostproto.Origin{Request: w.j.Command.Request, Trace: c.Trace}}
		if err := a.spawn(ctx, cmd, ref); err != nil {
			return err
		}
	}
	for _, c := range w.j.Command.Children {
		if err := a.await(ctx, c.Sandbox, c.Operation); err != nil {
			return err
		}
	}
	return nil
}
