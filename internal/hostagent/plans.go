package hostagent

import (
	"context"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// plan chooses how the job's verb is carried out from where the sandbox is. A verb
// that was admitted before the host acted by itself meets another phase: then its
// goal may be reached already, or it was overtaken.
func (o *owner) plan(r record, j *job) plan {
	w := &work{o: o, r: r, j: j.rec}
	switch at := r.Phase; j.rec.Command.Verb {
	case sandbox.Create:
		switch {
		case at == phaseNone && j.rec.Capture == nil:
			return w.create()
		case at == phaseNone && !j.rec.Capture.Memory:
			return w.createFromDisk()
		case at == phaseNone || j.rec.Committed:
			return w.createFromMemory()
		}
	case sandbox.Sleep:
		switch {
		case at == phaseRunning || j.rec.Committed:
			return w.sleep()
		case at == phaseSaved:
			return reached(sandbox.EventSlept)
		}
	case sandbox.Wake:
		switch {
		case at == phaseSaved || j.rec.Committed:
			return w.wake()
		case at == phaseRunning:
			return reached(sandbox.EventWoken)
		}
	case sandbox.Stop:
		switch {
		case at == phaseRunning || j.rec.Committed && r.Save == 0:
			return w.stop()
		case at == phaseSaved || j.rec.Committed:
			return w.stopSaved()
		case at == phaseStopped:
			return reached(sandbox.EventStopped)
		}
	case sandbox.Resume:
		switch at {
		case phaseStopped:
			return w.resume()
		case phaseRunning:
			return reached(sandbox.EventResumed)
		}
	case sandbox.Fork:
		if at == phaseRunning || at == phaseSaved || at == phaseStopped || j.rec.Committed {
			return w.fork()
		}
	case sandbox.Delete:
		return w.delete()
	case sandbox.Undelete:
		if at == phaseDeleted {
			return w.undelete()
		}
	case verbReboot:
		return w.reboot()
	case verbSettle:
		return w.settle()
	case verbRouse:
		if at == phaseRunning {
			return w.rouse()
		}
	}
	return refusal(fault.New(fault.Conflict, "cannot %s it: the host found it %s in the meantime; look at it with `hutch get`", j.rec.Command.Verb, r.Phase).Because("overtaken"))
}

// reached is the plan of a verb whose goal the host finds reached.
func reached(e sandbox.Event) plan {
	return plan{end: func(*record) hostproto.Report { return hostproto.Report{Event: e} }}
}

func refusal(err error) plan {
	return plan{before: []action{{step: "admit", do: func(context.Context) error { return err }}}}
}

// work is what the actions of one job share. It is used by the job's goroutine
// alone; r is the record as it was when the job began.
type work struct {
	o *owner
	r record
	j jobRecord

	root, netns string
	live        *live
	identity    []hostproto.IdentityItem
	verified    chan error
	staging     Staging
	memory      bool         // the staging has one
	captured    runtime.Meta // of the staging's memory
	frozen      bool         // it could not be let run on
	lost        bool         // of a delete: there is no disk to bring back
	save        *hostproto.Save
}

func (w *work) disks() Disks { return w.o.agent.cfg.Disks }

// running is the end of what boots or restores a sandbox.
func (w *work) running(e sandbox.Event) func(*record) hostproto.Report {
	return func(r *record) hostproto.Report {
		if r.Phase != phaseRunning || r.Generation != w.j.Generation { // else it was committed
			w.boots(r)
		}
		if l := w.o.live.Load(); l != nil {
			l.ready.Store(true)
		}
		return hostproto.Report{Event: e, Identity: w.identity}
	}
}

// boots writes into the record what runs from here on.
func (w *work) boots(r *record) {
	r.Phase, r.Generation, r.Token = phaseRunning, w.j.Generation, w.j.Token
	r.HostBoot, r.Agent = w.o.agent.cfg.BootID, w.agent()
}

// agent is the agent layer under this boot: a restored memory needs the one that it
// was captured with.
func (w *work) agent() string {
	switch {
	case w.j.Capture != nil && w.j.Capture.Memory:
		return w.j.Capture.Agent
	case w.j.Command.Verb == sandbox.Wake:
		return w.r.Agent
	}
	return w.o.agent.cfg.Agent
}

func (w *work) create() plan {
	disk := action{sandbox.StepDisk,
		func(ctx context.Context) error { return w.disks().Create(ctx, w.o.id, w.r.Spec.Disk) },
		func(ctx context.Context) error { return w.disks().Delete(ctx, w.o.id) }}
	return plan{
		before: append([]action{disk}, w.boot()...),
		end:    w.running(sandbox.EventCreated),
		failed: createFailed,
	}
}

func createFailed(*record, error) hostproto.Report {
	return hostproto.Report{Event: sandbox.EventCreateFailed}
}

func (w *work) resume() plan {
	return plan{before: w.boot(), end: w.running(sandbox.EventResumed)}
}

// reboot is a fresh boot after init asked for it. When it fails the sandbox has
// crashed.
func (w *work) reboot() plan {
	away := action{sandbox.StepRelease, w.away, nil}
	return plan{
		before: append([]action{away}, w.boot()...),
		end:    w.running(sandbox.EventRebooted),
		failed: func(r *record, err error) hostproto.Report {
			r.Phase = phaseStopped
			return hostproto.Report{Event: sandbox.EventCrashed, Message: "the sandbox did not come back from a reboot: " + fault.Of(err).Message}
		},
	}
}

// settle gives back what a sandbox held that ended by itself.
func (w *work) settle() plan {
	return plan{
		after: []action{{sandbox.StepRelease, w.away, nil}},
		end: func(r *record) hostproto.Report {
			r.Phase = phaseStopped
			return hostproto.Report{Event: w.j.Event, Message: w.j.Why, Until: w.j.Until}
		},
	}
}

func (w *work) away(ctx context.Context) error {
	if err := w.o.down(ctx, w.r.Generation); err != nil {
		return err
	}
	return w.o.release(ctx)
}

func (w *work) kill(ctx context.Context) error {
	return w.o.down(ctx, w.r.Generation, w.j.Generation)
}

func (w *work) release(ctx context.Context) error { return w.o.release(ctx) }

// stop saves a running sandbox's disk and nothing else. Until the commit nothing
// inside has been told to end; after it there is no way back (Z11).
func (w *work) stop() plan {
	return plan{
		before: []action{{sandbox.StepPrepare, w.prepareStop, nil}},
		after: []action{
			{sandbox.StepShutdown, w.shutdown, nil},
			{sandbox.StepKill, w.kill, nil},
			{sandbox.StepRelease, w.release, nil},
		},
		end: func(r *record) hostproto.Report {
			r.Phase = phaseStopped
			return stopped(r)
		},
		failed: w.saveFailed,
	}
}

// stopSaved drops the memory of a sleeping sandbox: its saved disk becomes its disk.
func (w *work) stopSaved() plan {
	return plan{
		before: []action{{sandbox.StepDisk,
			func(ctx context.Context) error { return w.disks().CloneSaved(ctx, w.o.id, w.r.Save, w.o.id) },
			func(ctx context.Context) error { return w.disks().Delete(ctx, w.o.id) }}},
		commit: func(r *record) { r.Phase = phaseStopped },
		after:  []action{{sandbox.StepErase, w.dropSave, nil}},
		end: func(r *record) hostproto.Report {
			r.Save = 0
			return stopped(r)
		},
		failed: w.saveFailed,
	}
}

func (w *work) dropSave(ctx context.Context) error {
	return w.disks().DropSaved(ctx, w.o.id, w.r.Save)
}

// erase ends a sandbox for good, from whatever it is, also from being deleted.
func (w *work) erase() plan {
	return plan{
		after: []action{
			{sandbox.StepKill, w.kill, nil},
			{sandbox.StepRelease, w.release, nil},
			{sandbox.StepErase, func(ctx context.Context) error { return w.disks().Erase(ctx, w.o.id) }, nil},
		},
		end: func(r *record) hostproto.Report {
			r.unkeep()
			if w.r.Phase == phaseDeleted {
				return hostproto.Report{Erased: true}
			}
			return hostproto.Report{Event: sandbox.EventDeleted}
		},
	}
}

func stopped(*record) hostproto.Report {
	return hostproto.Report{Event: sandbox.EventStopped, Saved: true}
}
