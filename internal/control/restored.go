package control

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Settled is what became of the sandboxes after the database was restored.
type Settled struct {
	Advanced  []string // have gone on since the backup: they are as their host says
	Lost      []string // were deleted since the backup: their host has nothing of them
	Unknown   []hostproto.Fact
	Cancelled []string // operations of before the backup that are at work no longer
}

// AfterRestore makes the database agree with what this server's hosts know, after it was
// put back to an earlier time (R9). What a host did since is not asked for again and not
// done twice: its facts win. Sandboxes that were made since are given as Unknown and left
// alone; Adopt takes them in. Call it once the hosts have started and before Start. It may
// be called again.
func (c *Control) AfterRestore(ctx context.Context) (out Settled, err error) {
	for _, host := range c.hostIDs() {
		facts, err := c.factsOf(ctx, host)
		if err != nil {
			return out, err
		}
		var rows []sandbox.Sandbox
		err = c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
			rows, err = r.Sandboxes(ctx, store.SandboxFilter{Host: host})
			return err
		})
		if err != nil {
			return out, err
		}
		for _, s := range rows {
			fact, known := facts[s.ID]
			delete(facts, s.ID)
			if err := c.settle(ctx, s.ID, fact, known, &out); err != nil {
				return out, err
			}
		}
		for _, f := range facts {
			if f.State != "" {
				out.Unknown = append(out.Unknown, f)
			}
		}
	}
	slices.SortFunc(out.Unknown, func(a, b hostproto.Fact) int { return strings.Compare(a.Sandbox, b.Sandbox) })
	return out, nil
}

func (c *Control) factsOf(ctx context.Context, host string) (map[string]hostproto.Fact, error) {
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	list, err := c.hosts[host].Facts(ctx)
	facts := map[string]hostproto.Fact{}
	for _, f := range list {
		facts[f.Sandbox] = f
	}
	return facts, err
}

const restoredMessage = "the database was restored from a backup of before this"

// settle makes one sandbox's row what its host says, in one transaction.
func (c *Control) settle(ctx context.Context, id string, f hostproto.Fact, known bool, out *Settled) error {
	var behind, gone bool
	var cancelled string
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		cancelled = ""
		s, err := tx.Sandbox(ctx, id)
		if err != nil {
			return err
		}
		op, err := tx.ActiveOperation(ctx, id)
		if err != nil {
			return err
		}
		behind = known && f.Acked > s.HostSeq
		gone = !known && s.State != sandbox.Failed && s.State != sandbox.Archived && s.State != sandbox.Deleted
		if op != nil && op.Kind == sandbox.Delete && !known {
			gone = false // the host is asked again, and says that nothing is there
		}
		if !behind && !gone {
			return nil
		}
		w := c.writer(tx, s.Project, hostActor, c.instant())
		if op != nil && op.ID != f.Operation {
			cancelled = op.ID
			if err := w.cancelled(ctx, c, op, restoredMessage+"; ask again where it is still wanted"); err != nil {
				return err
			}
			if err := w.meterUnchanged(ctx, c, s, *op, false); err != nil {
				return err
			}
		}
		events, at := []sandbox.Event{sandbox.EventHostLost}, w.at
		if known {
			events = route(s.State, f.State, f.Generation > s.Generation)
			if f.Since.After(s.StateSince) && f.Since.Before(at) {
				at = f.Since
			}
			s.HostSeq, s.Generation, s.Deadline = f.Seq, f.Generation, f.Deadline
			if f.Policy != nil && !f.Policy.Equal(s.Policy) && s.PolicyChange == 0 {
				// What is shown is what is to hold. The host passes over a number that it has had.
				s.PolicyChange = max(s.Version, f.Change) + 1
			}
		}
		if err := w.travel(ctx, &s, events, at); err != nil {
			return err
		}
		return w.align(ctx, c, s, at)
	})
	if err != nil {
		return err
	}
	if behind {
		out.Advanced = append(out.Advanced, id)
	}
	if gone {
		out.Lost = append(out.Lost, id)
	}
	if cancelled != "" {
		out.Cancelled = append(out.Cancelled, cancelled)
	}
	return nil
}

// travel brings a sandbox's row through events that happened while nobody took note.
func (w *writer) travel(ctx context.Context, s *sandbox.Sandbox, events []sandbox.Event, at time.Time) error {
	s.UpdatedAt = w.at
	for _, e := range events {
		from := s.State
		next, err := from.Next(e)
		if err != nil {
			return err
		}
		*s = arrive(*s, next, hostproto.Report{Event: e, At: at, Message: restoredMessage})
		change := stateChange{State: s.State, From: from, Cause: e, Reason: s.Reason, Message: restoredMessage, Generation: s.Generation}
		if err := w.event(ctx, "sandbox."+string(s.State), s.ID, "", change); err != nil {
			return err
		}
	}
	return w.UpdateSandbox(ctx, s)
}

// route gives events that lead from one state to another; booted says that its programs
// have begun anew in between.
func route(from, to sandbox.State, booted bool) []sandbox.Event {
	awake := map[sandbox.State]sandbox.Event{
		sandbox.Creating: sandbox.EventCreated, sandbox.Ready: sandbox.EventRebooted, sandbox.Sleeping: sandbox.EventWoken,
		sandbox.Stopped: sandbox.EventResumed, sandbox.Archived: sandbox.EventResumed, sandbox.Failed: sandbox.EventResumed,
	}[from]
	var out []sandbox.Event
	if from == to && !booted || to == sandbox.Creating {
		return nil
	}
	if booted || from != sandbox.Ready {
		out = append(out, awake)
	}
	switch to {
	case sandbox.Sleeping:
		return append(out, sandbox.EventSlept)
	case sandbox.Stopped:
		if from == sandbox.Sleeping && !booted {
			return []sandbox.Event{sandbox.EventStopped}
		}
		if from == sandbox.Failed && !booted { // a disk that resumes, in either state
			return nil
		}
		return append(out, sandbox.EventStopped)
	case sandbox.Failed:
		if from == sandbox.Creating {
			return []sandbox.Event{sandbox.EventCreateFailed}
		}
		return append(out, sandbox.EventCrashed)
	case "", sandbox.Deleted: // erased, and the host waits for that to be taken note of
		return []sandbox.Event{sandbox.EventDeleted}
	}
	return out
}

// align makes a sandbox's meter agree with its state from an instant on. It is metered to
// that instant as it was when the backup was made.
func (w *writer) align(ctx context.Context, c *Control, s sandbox.Sandbox, at time.Time) error {
	m, err := w.Meter(ctx, s.ID)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return err
	}
	want := map[sandbox.State]metering.Reason{sandbox.Ready: metering.Running, sandbox.Sleeping: metering.Sleeping}[s.State]
	if m.Reason == want || s.State == sandbox.Creating {
		return nil
	}
	if w.told == "" {
		if err := w.event(ctx, "meter.found", s.ID, "", map[string]any{"state": s.State}); err != nil {
			return err
		}
	}
	var facts []metering.Fact
	switch {
	case m.Reason == metering.Starting:
		facts = append(facts, metering.Fact{Kind: metering.Unstarted})
	case m.Reason != "":
		end := metering.ByStop
		if s.State == sandbox.Failed {
			end = metering.ByHostLost
		}
		facts = append(facts, metering.Fact{Kind: metering.Ended, End: end})
	}
	if want != "" {
		facts = append(facts, metering.Fact{Kind: metering.Found, Reason: want, Rate: rate(s), Generation: s.Generation})
	}
	for _, f := range facts {
		f.At = at
		if err := w.meter(ctx, c, s, f); err != nil {
			return err
		}
	}
	return nil
}

// Adopt takes sandboxes into the database that this server's hosts have and it does not
// know (R9): those named by id, or all for "all". They are as their hosts say, in the
// project named, with the name that they had where it is free; their labels are lost. It
// gives the ids of those that it took in; one that is known already is passed over.
func (c *Control) Adopt(ctx context.Context, project string, ids ...string) (taken []string, err error) {
	all := slices.Contains(ids, "all")
	found := map[string]bool{}
	for _, host := range c.hostIDs() {
		facts, err := c.factsOf(ctx, host)
		if err != nil {
			return taken, err
		}
		for _, f := range facts {
			found[f.Sandbox] = true
			if f.State == "" || f.State == sandbox.Deleted || !all && !slices.Contains(ids, f.Sandbox) {
				continue
			}
			added, err := c.adopt(ctx, project, host, f)
			if err != nil {
				return taken, err
			}
			if added {
				taken = append(taken, f.Sandbox)
			}
		}
	}
	for _, id := range ids {
		if id != "all" && !found[id] {
			return taken, fault.New(fault.NotFound, "no host here has a sandbox %s; `hutch doctor` lists what is there that nobody owns", shown(id)).Because("sandbox")
		}
	}
	slices.Sort(taken)
	return taken, nil
}

func (c *Control) adopt(ctx context.Context, project, host string, f hostproto.Fact) (added bool, err error) {
	err = c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		added = false
		if _, err := tx.Sandbox(ctx, f.Sandbox); !fault.Is(err, fault.NotFound) {
			return err
		}
		w := c.writer(tx, project, hostActor, c.instant())
		s := w.newSandbox(c, f.Name, host, f.Spec, nil, sandbox.Origin{Kind: "template"})
		s.ID, s.State, s.Generation, s.HostSeq, s.Deadline = f.Sandbox, f.State, f.Generation, f.Seq, f.Deadline
		s.Started = f.State != sandbox.Creating
		if f.Policy != nil {
			s.Policy = *f.Policy
		} else {
			s.Policy = sandbox.PolicyBefore()
		}
		s = s.Rest(sandbox.AdoptTimers(s.ID, s.Generation, s.State, s.Policy, c.clocks.at(host, w.at)))
		_, err := tx.SandboxByName(ctx, project, s.Name)
		if err == nil || validName("sandbox", s.Name) != nil {
			if s.Name, err = c.freeName(ctx, w); err != nil {
				return err
			}
		} else if !fault.Is(err, fault.NotFound) {
			return err
		}
		if err := w.InsertSandbox(ctx, s); err != nil {
			return err
		}
		change := stateChange{State: s.State, Message: "taken in as its host has it", Generation: s.Generation, Name: s.Name, Origin: s.Origin.Kind}
		if err := w.event(ctx, "sandbox."+string(s.State), s.ID, "", change); err != nil {
			return err
		}
		added = true
		return w.align(ctx, c, s, w.at)
	})
	return added, err
}
