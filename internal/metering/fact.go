package metering

import (
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// FactKind says what happened.
type FactKind string

// The kinds of facts. Operation is set on those that say so.
const (
	// Assigned: a boot by create, resume or fork has a host. With the Rate.
	Assigned FactKind = "assigned"
	// Unstarted: that boot ended without being ready.
	Unstarted FactKind = "unstarted"
	// Ready: that boot is done. With the Generation.
	Ready FactKind = "ready"
	// Halted: a sleep, stop or deletion was accepted (At its acceptance), or fell due (At
	// its due time). With the Operation that carries it out, its Verb, and the End.
	Halted FactKind = "halted"
	// Refused: the Operation of a Halted ended before anything began, for a cause of the
	// guest's: it is as if it had not been asked for.
	Refused FactKind = "refused"
	// Released: the Operation of a Halted ended without effect of its own: it was
	// cancelled, overtaken, or found its goal reached.
	Released FactKind = "released"
	// SaveFailed: the Operation of a Halted failed and the sandbox runs on.
	SaveFailed FactKind = "save_failed"
	// Kept: the user lets the sandbox run on after failed saves.
	Kept FactKind = "kept"
	// Slept: it is asleep. With the Operation.
	Slept FactKind = "slept"
	// Woken: it is awake again. With the Generation.
	Woken FactKind = "woken"
	// Rebooted: it booted afresh from inside. With the Generation.
	Rebooted FactKind = "rebooted"
	// Ended: it is stopped, failed or deleted. At is the last instant at which it is known
	// to have run: of a crash that of the crash, of a lost host its last contact, of a
	// restarted one the last that is known of before. With the End; that of a deletion,
	// whatever asked for it, is ByDelete.
	Ended FactKind = "ended"
	// Archived: its disk is in cold storage. With DiskBytes.
	Archived FactKind = "archived"
	// Found: one that was thought lost runs or sleeps (D8), or one that ran before there
	// was a meter. With the Rate, the Generation and the Reason: Running or Sleeping.
	Found FactKind = "found"
)

// Fact is one thing that happened to a sandbox, as far as its meter is concerned. Facts
// are kept for good beside the ledger, so that Verify can recompute it.
type Fact struct {
	Kind       FactKind     `json:"kind"`
	At         time.Time    `json:"at"`
	Event      string       `json:"event"` // the id of the event that tells of it
	Operation  string       `json:"operation,omitempty"`
	Verb       sandbox.Verb `json:"verb,omitempty"`
	End        End          `json:"end,omitempty"`
	Reason     Reason       `json:"reason,omitempty"`
	Generation int64        `json:"generation,omitempty"`
	Rate       Rate         `json:"rate,omitzero"`
	DiskBytes  int64        `json:"disk_bytes,omitempty"`
}

var (
	haltEnds  = []End{BySleep, ByIdle, ByStop, ByDelete, ByAutoStop, ByMemoryWindow, ByBudget, BySpotNotice}
	finalEnds = append([]End{ByExit, ByCrash, ByOOM, ByHostRestarted, ByHostLost}, haltEnds...)
	haltVerbs = []sandbox.Verb{sandbox.Sleep, sandbox.Stop, sandbox.Delete}
)

// valid says what a fact lacks. That is a mistake of the caller's.
func (f Fact) valid() error {
	bad := func(format string, args ...any) error {
		return fault.New(fault.Internal, "the fact "+string(f.Kind)+" "+format, args...).Because("fact")
	}
	if f.At.IsZero() || f.Event == "" {
		return bad("has no instant or no event")
	}
	switch f.Kind {
	case Assigned, Found:
		if f.Rate.VCPUs < 1 || f.Rate.MemoryBytes < 1 {
			return bad("has a machine of %d vCPUs and %d bytes", f.Rate.VCPUs, f.Rate.MemoryBytes)
		}
		if f.Kind == Found && f.Reason != Running && f.Reason != Sleeping {
			return bad("has the reason %q", f.Reason)
		}
	case Halted:
		if f.Operation == "" || !slices.Contains(haltVerbs, f.Verb) || !slices.Contains(haltEnds, f.End) {
			return bad("has operation %q, verb %q, end %q", f.Operation, f.Verb, f.End)
		}
	case Refused, Released, SaveFailed:
		if f.Operation == "" {
			return bad("has no operation")
		}
	case Ended:
		if !slices.Contains(finalEnds, f.End) {
			return bad("has the end %q", f.End)
		}
	case Archived:
		if f.DiskBytes < 0 {
			return bad("has a disk of %d bytes", f.DiskBytes)
		}
	case Unstarted, Ready, Kept, Slept, Woken, Rebooted:
	default:
		return bad("is not one of the list")
	}
	return nil
}
