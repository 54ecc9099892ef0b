package hostagent

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// A sandbox that is deleted keeps its disk for a while, so that it can be brought back
// (X9): its record stays, its timers erase it. A pool that runs short erases earlier.

// delete chooses what becomes of a sandbox: its disk is kept where there is one, for as
// long as the command says.
func (w *work) delete() plan {
	keeps := w.keep() > 0
	switch w.r.Phase {
	case phaseDeleted:
		if keeps { // it is deleted already: an undelete was cancelled
			return plan{end: func(*record) hostproto.Report { return hostproto.Report{} }}
		}
	case phaseRunning, phaseSaved, phaseStopped:
		if keeps && w.r.Timers != nil {
			return w.discard()
		}
	}
	return w.erase()
}

// keep is how long the disk is kept: as the command says, or the host's own setting where
// its timers asked for the deletion.
func (w *work) keep() time.Duration {
	switch auto := w.j.Auto; {
	case auto == nil:
		return w.j.Command.UndeleteFor
	case auto.Cause == sandbox.CauseErase:
		return 0
	}
	return w.o.agent.cfg.UndeleteFor
}

// discard ends what runs and drops saved memory. The disk stays, which nothing inside
// was asked about: what its programs wrote is on it.
func (w *work) discard() plan {
	return plan{
		after: []action{
			{sandbox.StepKill, w.kill, nil},
			{sandbox.StepRelease, w.release, nil},
			{sandbox.StepDisk, w.rescue, nil},
			{sandbox.StepErase, w.dropRest, nil},
		},
		end: func(r *record) hostproto.Report {
			if w.lost {
				r.unkeep()
			} else {
				r.Phase, r.Save, r.Token = phaseDeleted, 0, ""
				r.Timers.Window = w.keep()
			}
			return hostproto.Report{Event: sandbox.EventDeleted}
		},
	}
}

// unkeep notes that nothing is left.
func (r *record) unkeep() {
	r.Phase, r.Save, r.Token = phaseErased, 0, ""
	if r.Timers != nil {
		r.Timers.Window, r.Timers.Erase = 0, time.Time{}
	}
}

// rescue makes the disk of a save the sandbox's own. A save that is damaged or gone leaves
// nothing to bring back, which does not keep a deletion from going through (S5); but an
// earlier attempt may have come to its end.
func (w *work) rescue(ctx context.Context) error {
	w.lost = false
	if w.r.Save == 0 {
		return nil
	}
	_, err := w.disks().Saved(ctx, w.o.id, w.r.Save)
	if err == nil {
		err = w.disks().CloneSaved(ctx, w.o.id, w.r.Save, w.o.id)
	}
	switch {
	case fault.Is(err, fault.NotFound):
		there, err := w.disks().Has(ctx, w.o.id)
		w.lost = !there
		return err
	case fault.Is(err, fault.DataCorrupt):
		w.lost = true
		return nil
	}
	return err
}

// dropRest removes what is not kept.
func (w *work) dropRest(ctx context.Context) error {
	switch {
	case w.lost:
		return w.disks().Erase(ctx, w.o.id)
	case w.r.Save != 0:
		return w.dropSave(ctx)
	}
	return nil
}

// undelete brings a deleted sandbox back as a stopped one.
func (w *work) undelete() plan {
	return plan{
		before: []action{{sandbox.StepDisk, func(ctx context.Context) error {
			there, err := w.disks().Has(ctx, w.o.id)
			if err == nil && !there {
				err = fault.New(fault.NotFound, "its disk is not there any more").Because("disk")
			}
			return err
		}, nil}},
		end: func(r *record) hostproto.Report {
			r.Phase = phaseStopped
			return hostproto.Report{Event: sandbox.EventUndeleted}
		},
	}
}

// noteDeleted keeps, for whoever looks for space, since when the sandbox is deleted.
func (o *owner) noteDeleted() {
	var since int64
	if r := o.rec; r.Phase == phaseDeleted && r.Timers != nil {
		since = r.Timers.From.UnixMilli()
	}
	o.deleted.Store(since)
}

// makeRoom erases the sandbox that was deleted first, where the pool is so full that
// nothing new is made (X9: less when the pool is short). It is called now and then, so
// that one goes after the other, for as long as that lasts.
func (a *Agent) makeRoom(ctx context.Context) error {
	var oldest *owner
	for _, o := range a.everyOwner() {
		if at := o.deleted.Load(); at != 0 && (oldest == nil || at < oldest.deleted.Load()) {
			oldest = o
		}
	}
	if oldest == nil {
		return nil
	}
	total, free, err := a.cfg.Disks.Space(ctx)
	if err != nil || free >= total/lowShare {
		return err
	}
	return oldest.call(ctx, oldest.eraseNow)
}

// lowShare of the pool free is little: nothing new is made below (D6).
const lowShare = 10

// eraseNow ends the time for which a deleted sandbox is kept.
func (o *owner) eraseNow() error {
	now := o.agent.now()
	if o.job != nil || o.rec.Job != nil || o.rec.Phase != phaseDeleted || !o.rec.Timers.Erase.After(now) {
		return nil // it is being erased, or brought back
	}
	o.log.Info("the pool is short of space: a deleted sandbox is erased before its time", "due", o.rec.Timers.Erase)
	err := o.write(func(r *record) {
		t := *r.Timers
		t.Erase = now.Truncate(time.Millisecond)
		r.Timers = &t
		r.addReport(hostproto.Report{EraseAt: t.Erase, At: now})
	})
	o.timers()
	return err
}
