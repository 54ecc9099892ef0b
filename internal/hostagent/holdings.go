package hostagent

import (
	"errors"
	"io/fs"
	"os"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// Holdings reads the journals of a host agent from outside, beside the agent that
// writes them, and says what sandboxes may have on the machine. All but NoteClean change
// nothing.
type Holdings struct {
	Dir    string // the journals
	BootID string // of the machine
}

// Holding is what a journal says that a sandbox has.
type Holding struct {
	// Kernel says that it may have processes, mounts and a network: it runs, or an
	// operation is at work on it.
	Kernel bool
	// Open says that an operation is at work on it, which may have half-made files.
	Open bool
}

// read gives the last whole record of a sandbox's journal, nil where there is none in
// it; false where the sandbox has no journal.
func (h Holdings) read(id string) (*record, bool, error) {
	data, err := os.ReadFile(journalPath(h.Dir, id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	r, _ := lastRecord(data)
	return r, true, nil
}

func (h Holdings) holding(r *record) Holding {
	if r == nil { // nothing whole was written yet, or it is damaged: who knows
		return Holding{Kernel: true, Open: true}
	}
	open := r.Job != nil
	return Holding{Kernel: open || r.Phase == phaseRunning && r.HostBoot == h.BootID, Open: open}
}

// each reads every journal; r is nil where there is no whole record in one.
func (h Holdings) each(see func(id string, r *record)) error {
	ids, err := journalIDs(h.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, id := range ids {
		r, known, err := h.read(id)
		if err != nil {
			return err
		}
		if known { // and not deleted since it was listed
			see(id, r)
		}
	}
	return nil
}

// All reads every journal: what each sandbox has, and which captures are needed.
func (h Holdings) All() (sandboxes map[string]Holding, captures map[string]bool, err error) {
	sandboxes, captures = map[string]Holding{}, map[string]bool{}
	err = h.each(func(id string, r *record) {
		sandboxes[id] = h.holding(r)
		if capture := captureOf(r); capture != "" {
			captures[capture] = true
		}
	})
	return sandboxes, captures, err
}

// NoteClean writes into the journal of a sandbox that runs that its processes are about
// to be removed, so that the next agent tells what became of it. No agent may use the
// journals meanwhile.
func (h Holdings) NoteClean(id string) error {
	j, r, err := openJournal(h.Dir, id)
	if err != nil {
		return err
	}
	if r != nil {
		r.Cleaned = r.Generation
		err = j.write(r)
	}
	return errors.Join(err, j.close())
}

// captureOf names the capture that the operation at work needs: a fork makes one, a
// child of it starts from one.
func captureOf(r *record) string {
	switch {
	case r == nil || r.Job == nil:
		return ""
	case r.Job.Capture != nil:
		return r.Job.Capture.ID
	case r.Job.Command.Verb == sandbox.Fork:
		return r.Job.Command.Operation
	}
	return ""
}

// IsCapture says whether a save of this owner is the capture of a fork and not a
// sandbox's own.
func IsCapture(owner string) bool { return isCapture(owner) }
