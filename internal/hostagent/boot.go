package hostagent

import (
	"context"
	"os"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// boot is the way from a disk to a guest agent that answers.
func (w *work) boot() []action {
	return []action{
		w.attach(), w.mount(),
		{sandbox.StepBoot, w.start, w.kill},
		{sandbox.StepInit, w.init, nil},
	}
}

func (w *work) attach() action {
	return action{sandbox.StepNetwork,
		func(ctx context.Context) (err error) {
			w.netns, err = w.o.agent.cfg.Network.Attach(ctx, w.o.id, w.o.egress)
			return err
		},
		func(ctx context.Context) error { return w.o.agent.cfg.Network.Detach(ctx, w.o.id) }}
}

func (w *work) mount() action {
	return action{sandbox.StepMount,
		func(ctx context.Context) (err error) {
			w.root, err = w.disks().Mount(ctx, w.o.id, w.r.Spec.Version, w.agent())
			return err
		},
		func(ctx context.Context) error { return w.disks().Unmount(ctx, w.o.id) }}
}

// spec makes the runtime's directory and says what is to run.
func (w *work) spec() (runtime.Spec, error) {
	spec := w.o.spec(&w.r, w.j.Generation, w.root, w.netns)
	if err := os.RemoveAll(spec.Dir); err != nil {
		return spec, err
	}
	return spec, os.MkdirAll(spec.Dir, 0o700)
}

func (w *work) start(ctx context.Context) error {
	if err := w.kill(ctx); err != nil { // what an earlier try of this step has started
		return err
	}
	spec, err := w.spec()
	if err != nil {
		return err
	}
	h, err := w.o.agent.cfg.Driver.Start(ctx, spec)
	if err != nil {
		return err
	}
	w.o.uses.fresh()
	w.live = w.o.bring(h, w.j.Token, w.j.Generation)
	return nil
}

func (w *work) init(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, w.o.agent.cfg.BootTimeout)
	defer cancel()
	w.identity, err = w.live.init(ctx, &w.r, w.j.Generation)
	return err
}

// source is the committed memory that a wake or a fork's child starts from.
type source struct {
	owner      string
	generation int64
	token      string
	fork       bool
}

func (w *work) createFromMemory() plan {
	c := w.j.Capture
	p := w.restore(source{owner: c.ID, token: c.Token, fork: true})
	p.end, p.failed = w.running(sandbox.EventCreated), createFailed
	return p
}

// createFromDisk boots a copied disk. Its names are changed before anything of it
// runs: by the guest agent's first call.
func (w *work) createFromDisk() plan {
	return plan{
		before: append([]action{w.copyDisk(w.j.Capture.ID, 0)}, w.boot()...),
		end:    w.running(sandbox.EventCreated),
		failed: createFailed,
	}
}

func (w *work) wake() plan {
	p := w.restore(source{owner: w.o.id, generation: w.r.Save, token: w.r.Token})
	p.after = append(p.after, action{sandbox.StepErase, w.dropSave, nil})
	end := w.running(sandbox.EventWoken)
	p.end = func(r *record) hostproto.Report {
		r.Save = 0
		return end(r)
	}
	return p
}

func (w *work) copyDisk(owner string, generation int64) action {
	return action{sandbox.StepDisk,
		func(ctx context.Context) error { return w.disks().CloneSaved(ctx, owner, generation, w.o.id) },
		func(ctx context.Context) error { return w.disks().Delete(ctx, w.o.id) }}
}

// restore brings a committed memory back on a copy of the disk that belongs to it.
// Until the commit only PID 1 has run and everything can be taken back and repeated;
// from the commit on the memory is void.
func (w *work) restore(src source) plan {
	return plan{
		before: []action{
			w.copyDisk(src.owner, src.generation), w.attach(), w.mount(),
			{sandbox.StepRestore, func(ctx context.Context) error { return w.restoreMemory(ctx, src) }, w.kill},
			{sandbox.StepVerify, w.awaitVerified, nil},
			{sandbox.StepIdentity, func(ctx context.Context) error { return w.renew(ctx, src) }, nil},
		},
		commit: w.boots,
		after:  []action{{sandbox.StepRun, w.letRun, nil}},
	}
}

func (w *work) restoreMemory(ctx context.Context, src source) error {
	save, err := w.disks().Saved(ctx, src.owner, src.generation)
	if err != nil {
		return err
	}
	manifest, err := parseManifest(save.Manifest)
	if err != nil {
		return err
	}
	if err := manifest.Memory.RunsOn(w.o.agent.cfg.Capabilities, w.o.agent.cfg.CPUFeatures); err != nil {
		return err
	}
	if err := w.kill(ctx); err != nil { // what an earlier try of this step has started
		return err
	}
	// The digests are checked beside the restore, and awaited before anything runs. A
	// damaged memory fails a restore in many ways, or makes it hang: the digests end it,
	// and name the cause.
	verified := make(chan error, 1)
	w.verified = verified
	restoring, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	w.o.agent.sender(func(context.Context) {
		err := runtime.Verify(w.o.agent.jobs, save.MemDir, manifest.Memory)
		verified <- err
		if err != nil {
			stop(err)
		}
	})
	spec, err := w.spec()
	if err != nil {
		return err
	}
	spec.Version = manifest.Memory.Version
	held, err := w.o.agent.cfg.Driver.Restore(restoring, spec, save.MemDir)
	if err != nil {
		select {
		case bad := <-verified:
			verified <- bad
			if fault.Is(bad, fault.DataCorrupt) {
				return bad
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return err
	}
	w.live = w.o.bring(held, w.j.Token, w.j.Generation)
	return nil
}

func (w *work) awaitVerified(ctx context.Context) error {
	select {
	case err := <-w.verified:
		w.verified <- err // for whoever asks again
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// renew gives the restored guest its clock, entropy, token and, in a fork, its own
// names, while nothing else of it runs.
func (w *work) renew(ctx context.Context, src source) (err error) {
	ctx, cancel := context.WithTimeout(ctx, w.o.agent.cfg.BootTimeout)
	defer cancel()
	w.identity, err = w.live.restored(ctx, &w.r, src.token, src.fork)
	if err == nil && src.fork {
		err = identityFault(w.identity)
	}
	return err
}

// letRun releases what is held. Where an earlier agent did it, or the sandbox has
// ended since, there is nothing to do: its end is looked at when the job is over.
func (w *work) letRun(ctx context.Context) error {
	l := w.o.live.Load()
	if l == nil {
		return nil
	}
	var err error
	if held, ok := l.handle.(runtime.Held); ok {
		err = held.Release(ctx)
	} else {
		err = l.handle.Thaw(ctx)
	}
	if l.ended() {
		return nil
	}
	return err
}
