package hostagent

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// phaseStates are the states that a record without timers stands for.
var phaseStates = map[phase]sandbox.State{
	phaseNone: sandbox.Creating, phaseRunning: sandbox.Ready, phaseSaved: sandbox.Sleeping, phaseStopped: sandbox.Stopped,
}

// fact is what a record says of its sandbox.
func (r *record) fact() hostproto.Fact {
	f := hostproto.Fact{
		Sandbox: r.Sandbox, Name: r.Name, Spec: r.Spec, State: phaseStates[r.Phase],
		Generation: r.Generation, Seq: r.Seq, Acked: r.Seq - int64(len(r.Unacked)),
	}
	if t := r.Timers; t != nil && r.Phase != phaseErased {
		f.State, f.Since, f.Policy, f.Deadline = t.State, t.From, &t.Policy, t.Deadline
		f.Change = r.Policy
	}
	if r.Job != nil {
		f.Operation = r.Job.Command.Operation
	}
	return f
}

// Facts gives how the host stands with each of its sandboxes.
func (a *Agent) Facts(ctx context.Context) ([]hostproto.Fact, error) {
	a.mu.Lock()
	owners := make([]*owner, 0, len(a.owners))
	for _, o := range a.owners {
		owners = append(owners, o)
	}
	a.mu.Unlock()
	var list []hostproto.Fact
	for _, o := range owners {
		var f hostproto.Fact
		err := o.call(ctx, func() error { f = o.rec.fact(); return nil })
		if errors.Is(err, errGone) { // it was deleted meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b hostproto.Fact) int { return cmp.Compare(a.Sandbox, b.Sandbox) })
	return list, nil
}

// Facts reads the same from outside, where no agent uses the journals. A journal in
// which nothing whole was written has none.
func (h Holdings) Facts() ([]hostproto.Fact, error) {
	var list []hostproto.Fact
	err := h.each(func(_ string, r *record) {
		if r != nil {
			list = append(list, r.fact())
		}
	})
	return list, err
}

// Layers gives the digests of the agent layers that a sandbox has or is about to get.
// Unavailable where a journal cannot be read in full: who knows which it has.
func (h Holdings) Layers() (map[string]bool, error) {
	layers := map[string]bool{}
	damaged := ""
	err := h.each(func(id string, r *record) {
		if r == nil {
			damaged = id
			return
		}
		layers[r.Agent] = true
		if r.Job != nil && r.Job.Capture != nil {
			layers[r.Job.Capture.Agent] = true
		}
	})
	if err == nil && damaged != "" {
		err = fault.New(fault.Unavailable, "the journal of %s has no whole record; start the server, then try again", damaged)
	}
	return layers, err
}

// Needs reads in the manifest of a save which version of the runtime its memory needs (""
// for a save without memory), and which layer of the guest agent.
func Needs(manifest []byte) (version, layer string, err error) {
	m, err := parseManifest(manifest)
	return m.Memory.Version, m.Agent, err
}
