package sandbox

import (
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// Policy is what a sandbox's user has set about its life: when it ends by itself and
// how (A1, A4, A8, Z1, Z7). The sleep mode is in Spec.
type Policy struct {
	TTL        time.Duration `json:"ttl_ns"`      // the auto-stop; 0 is none
	OnDeadline Verb          `json:"on_deadline"` // Stop, Sleep or Delete

	SleepDeadline DeadlineMode  `json:"sleep_deadline"` // whether the deadline runs on while asleep
	IdleAfter     time.Duration `json:"idle_after_ns"`  // the idle window of sleep mode auto
	OnIdle        Verb          `json:"on_idle"`        // Sleep or Stop

	MemoryWindow time.Duration `json:"memory_window_ns"` // how long saved memory is kept
	ArchiveAfter time.Duration `json:"archive_after_ns"` // from stopped; 0 is never
	DeleteAfter  time.Duration `json:"delete_after_ns"`  // from stopped, archived or not; 0 is never

	// Firewall is what it may reach and be reached on (N3), in its normal form; nil is
	// DefaultFirewall. What it points to is never changed.
	Firewall *Firewall `json:"firewall,omitempty"`
}

// DeadlineMode says what the deadline does while a sandbox sleeps (A4).
type DeadlineMode string

// The deadline modes.
const (
	DeadlineRunning DeadlineMode = "running" // it runs on
	DeadlinePaused  DeadlineMode = "paused"  // only the memory window ends the sleep
)

// Plan is what a project pays for. Only trial changes what a policy may be.
type Plan string

// The plans.
const (
	PlanStandard Plan = "standard"
	PlanTrial    Plan = "trial" // of A5
)

// Plans lists every plan.
var Plans = []Plan{PlanStandard, PlanTrial}

// DefaultPolicy is what holds where nobody says otherwise.
func DefaultPolicy() Policy {
	return Policy{
		TTL: time.Hour, OnDeadline: Stop,
		SleepDeadline: DeadlineRunning, IdleAfter: 120 * time.Second, OnIdle: Sleep,
		MemoryWindow: 7 * day, ArchiveAfter: 14 * day,
	}
}

// PolicyBefore is the policy of a sandbox from before there were timers: it has no
// auto-stop, rather than one that nobody expects.
func PolicyBefore() Policy {
	p := DefaultPolicy()
	p.TTL = 0
	return p
}

const day = 24 * time.Hour

// Bounds are what the values of a policy may be. They are settings, so that an
// operator can narrow them and a test can shorten a life.
type Bounds struct {
	TTLMin, TTLMax   time.Duration
	TrialTTLMax      time.Duration
	IdleMin, IdleMax time.Duration
	MemoryMax        time.Duration // at least a second
	AfterMin         time.Duration // of ArchiveAfter and DeleteAfter, where they are set
}

// DefaultBounds are those of the contract.
func DefaultBounds() Bounds {
	return Bounds{
		TTLMin: time.Second, TTLMax: 30 * day, TrialTTLMax: 2 * time.Hour,
		IdleMin: 30 * time.Second, IdleMax: 24 * time.Hour,
		MemoryMax: 7 * day, AfterMin: time.Second,
	}
}

// Check refuses a policy that is out of bounds (A1: refused, never clipped), that
// contradicts the sleep mode, or that the project's plan does not allow (A5). It is
// asked at new, run, fork, resume, undelete and each change, and at no other time: a
// plan that changes counts from the next boot on. A policy that is InvalidArgument
// has the field as the reason, one that the plan forbids is FailedPrecondition.
func (p Policy) Check(mode SleepMode, plan Plan, b Bounds) error {
	for _, err := range []*fault.Fault{p.words(mode), p.lengths(b), p.trial(plan, b)} {
		if err != nil {
			return err
		}
	}
	return nil
}

func (p Policy) words(mode SleepMode) *fault.Fault {
	switch {
	case mode != SleepNever && mode != SleepManual && mode != SleepAuto:
		return badPolicy("sleep_mode", "%.60q is no sleep mode; use never, manual or auto", string(mode))
	case p.OnDeadline != Stop && p.OnDeadline != Sleep && p.OnDeadline != Delete:
		return badPolicy("on_deadline", "%.60q cannot be done at the deadline; use stop, sleep or delete", string(p.OnDeadline))
	case p.OnDeadline == Sleep && mode == SleepNever:
		return badPolicy("on_deadline", "it cannot sleep at the deadline with sleep mode never; use stop, or sleep mode manual")
	case p.OnIdle != Sleep && p.OnIdle != Stop:
		return badPolicy("on_idle", "%.60q cannot be done when it is idle; use sleep or stop", string(p.OnIdle))
	case p.SleepDeadline != DeadlineRunning && p.SleepDeadline != DeadlinePaused:
		return badPolicy("sleep_deadline", "%.60q is nothing that a deadline does during sleep; use running or paused", string(p.SleepDeadline))
	}
	return nil
}

func (p Policy) lengths(b Bounds) *fault.Fault {
	switch {
	case p.TTL != 0 && (p.TTL < b.TTLMin || p.TTL > b.TTLMax):
		return badPolicy("ttl_seconds", "an auto-stop of %s is not possible; it can be %s to %s, or none", p.TTL, b.TTLMin, b.TTLMax)
	case p.IdleAfter < b.IdleMin || p.IdleAfter > b.IdleMax:
		return badPolicy("idle_seconds", "an idle window of %s is not possible; it can be %s to %s", p.IdleAfter, b.IdleMin, b.IdleMax)
	case p.MemoryWindow < time.Second || p.MemoryWindow > b.MemoryMax:
		return badPolicy("memory_window", "saved memory cannot be kept for %s; it can be %s to %s", p.MemoryWindow, time.Second, b.MemoryMax)
	case p.ArchiveAfter != 0 && p.ArchiveAfter < b.AfterMin:
		return badPolicy("archive_after", "it cannot be archived after %s; use %s or more, or never", p.ArchiveAfter, b.AfterMin)
	case p.DeleteAfter != 0 && p.DeleteAfter < b.AfterMin:
		return badPolicy("delete_after", "it cannot be deleted after %s; use %s or more, or never", p.DeleteAfter, b.AfterMin)
	}
	return nil
}

// trial is A5, and A4's `paused`, which is not for trial.
func (p Policy) trial(plan Plan, b Bounds) *fault.Fault {
	switch {
	case plan != PlanTrial:
		return nil
	case p.TTL == 0:
		return fault.New(fault.FailedPrecondition,
			"no auto-stop is not possible on the trial plan; set one of %s or less", b.TrialTTLMax).Because("trial_auto_stop")
	case p.TTL > b.TrialTTLMax:
		return fault.New(fault.FailedPrecondition,
			"an auto-stop of %s is not possible on the trial plan; set one of %s or less", p.TTL, b.TrialTTLMax).Because("trial_auto_stop")
	case p.SleepDeadline == DeadlinePaused:
		return fault.New(fault.FailedPrecondition,
			"a deadline that pauses during sleep is not possible on the trial plan; use running").Because("trial_sleep_deadline")
	}
	return nil
}

func badPolicy(field, format string, args ...any) *fault.Fault {
	return fault.New(fault.InvalidArgument, format, args...).Because(field)
}
