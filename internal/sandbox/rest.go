package sandbox

import "time"

// AtRest gives the timers that the control plane keeps of a sandbox: those of one that
// is stopped or archived (A8, D3). They are moved by the functions that move a host's.
func (s Sandbox) AtRest() Timers {
	from := s.TimersFrom
	if from.IsZero() {
		from = s.StateSince
	}
	return Timers{
		Sandbox: s.ID, Generation: s.Generation, State: s.State, From: from, Policy: s.Policy,
		Archive: s.ArchiveAt, Delete: s.DeleteAt,
	}
}

// Rest gives the row with timers that were moved. One whose archiving waits for a place
// to go to does so until that timer is another.
func (s Sandbox) Rest(t Timers) Sandbox {
	if !t.Archive.Equal(s.ArchiveAt) {
		s.ArchiveWaits = false
	}
	s.TimersFrom, s.ArchiveAt, s.DeleteAt = t.From, t.Archive, t.Delete
	if t.State != Stopped && t.State != Archived {
		s.TimersFrom = time.Time{}
	}
	return s
}

// RestDue is when the first of these timers falls due; zero is never. An archiving that
// waits is not among them.
func (s Sandbox) RestDue() time.Time {
	due := s.DeleteAt
	if !s.ArchiveWaits && !s.ArchiveAt.IsZero() {
		due = sooner(due, s.ArchiveAt)
	}
	return due
}

// RestVerdict is what these timers ask for now, while no operation is at work.
func (s Sandbox) RestVerdict(now time.Time) Verdict {
	t := s.AtRest()
	if s.ArchiveWaits {
		t.Archive = time.Time{}
	}
	return Due(t, Leases{}, now)
}
