package control

import (
	"cmp"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// Range is what a number may be and what it is when nobody says.
type Range struct {
	Default int64
	Min     int64
	Max     int64
}

// Limits are the operator's settings. A zero field has its value of DefaultLimits.
type Limits struct {
	CPUs     Range
	Memory   Range  // bytes
	Disk     Range  // bytes; GB are 10^9
	Forks    int64  // most forks of one call
	Template string // what a sandbox is made from when nobody says

	Policy sandbox.Policy // of a sandbox where nobody says otherwise
	Bounds sandbox.Bounds // what a policy may be

	PageDefault int64 // rows of a list page
	PageMax     int64

	WaitMax     time.Duration // longest Wait
	GuestWait   time.Duration // longest that Guest waits for a sandbox to run
	CallTimeout time.Duration // of one call to a host
	UndeleteFor time.Duration // how long a deleted sandbox can be brought back; less than 0 is not at all
	RequestKeep time.Duration // how long a request key is remembered
	HistoryKeep time.Duration // how long events and ended operations are kept

	ReconcileEvery time.Duration
	FlushEvery     time.Duration // how often progress and key uses are written
	PruneEvery     time.Duration
	TimersEvery    time.Duration // the longest pause between two looks at the timers of what is at rest
	LeaseEvery     time.Duration // how often the leases of active turns are renewed
}

// DefaultLimits are the settings of an installation that sets none.
var DefaultLimits = Limits{
	CPUs:     Range{Default: 1, Min: 1, Max: 64},
	Memory:   Range{Default: 1 << 30, Min: 128 << 20, Max: 256 << 30},
	Disk:     Range{Default: 4e9, Min: 1e9, Max: 8e9},
	Forks:    100,
	Template: "base",

	PageDefault: 100,
	PageMax:     1000,

	WaitMax:     10 * time.Minute,
	GuestWait:   time.Minute,
	CallTimeout: 30 * time.Second,
	UndeleteFor: 24 * time.Hour,
	RequestKeep: 24 * time.Hour,
	HistoryKeep: 90 * 24 * time.Hour,

	ReconcileEvery: 15 * time.Second,
	FlushEvery:     time.Second,
	PruneEvery:     time.Hour,
	TimersEvery:    time.Second,
	LeaseEvery:     sandbox.LeaseRenewal,
}

func (l Limits) withDefaults() Limits {
	d := DefaultLimits
	return Limits{
		Policy: cmp.Or(l.Policy, sandbox.DefaultPolicy()), Bounds: cmp.Or(l.Bounds, sandbox.DefaultBounds()),
		CPUs: cmp.Or(l.CPUs, d.CPUs), Memory: cmp.Or(l.Memory, d.Memory), Disk: cmp.Or(l.Disk, d.Disk),
		Forks: cmp.Or(l.Forks, d.Forks), Template: cmp.Or(l.Template, d.Template),
		PageDefault: cmp.Or(l.PageDefault, d.PageDefault), PageMax: cmp.Or(l.PageMax, d.PageMax),
		WaitMax: cmp.Or(l.WaitMax, d.WaitMax), GuestWait: cmp.Or(l.GuestWait, d.GuestWait),
		CallTimeout: cmp.Or(l.CallTimeout, d.CallTimeout), UndeleteFor: cmp.Or(l.UndeleteFor, d.UndeleteFor), RequestKeep: cmp.Or(l.RequestKeep, d.RequestKeep),
		HistoryKeep: cmp.Or(l.HistoryKeep, d.HistoryKeep), ReconcileEvery: cmp.Or(l.ReconcileEvery, d.ReconcileEvery),
		FlushEvery: cmp.Or(l.FlushEvery, d.FlushEvery), PruneEvery: cmp.Or(l.PruneEvery, d.PruneEvery),
		TimersEvery: cmp.Or(l.TimersEvery, d.TimersEvery), LeaseEvery: cmp.Or(l.LeaseEvery, d.LeaseEvery),
	}
}

// below gives the range with a host's own maximum, where it names one.
func (r Range) below(most int64) Range {
	if most > 0 && most < r.Max {
		r.Max = most
	}
	return r
}

// choose gives the number that was asked for, or the default when none was. Nothing
// is clipped.
func (r Range) choose(what string, asked *int64) (int64, error) {
	if asked == nil {
		return min(r.Default, r.Max), nil
	}
	if *asked < r.Min || *asked > r.Max {
		return 0, fault.New(fault.InvalidArgument, "cannot make a sandbox with %s %d: it must be from %d to %d",
			what, *asked, r.Min, r.Max).Because(what)
	}
	return *asked, nil
}

// roomy says whether the host's pool takes new disks: not below a tenth free (D6).
func roomy(info hostproto.HostInfo) bool {
	return info.PoolBytes == 0 || info.PoolFree >= info.PoolBytes/10
}

func poolFull(verb string, host hostproto.HostInfo) error {
	return fault.New(fault.NoCapacity, "cannot %s: the disk pool of host %s has %.1f of %.1f GB free, and nothing new is made below a tenth; "+
		"`hutch df` shows what takes the space: delete sandboxes that you do not need, or make the pool larger",
		verb, host.ID, float64(host.PoolFree)/1e9, float64(host.PoolBytes)/1e9).Because("pool_full")
}
