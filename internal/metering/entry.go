package metering

import (
	"time"
)

// Kind is what is metered.
type Kind string

// The kinds. The intervals of one sandbox and kind never overlap (B7).
const (
	Compute Kind = "compute" // a machine: vCPUs and memory
	Archive Kind = "archive" // a disk in cold storage
)

// Kinds lists both.
var Kinds = []Kind{Compute, Archive}

// Reason is why an interval is metered: what the sandbox was doing.
type Reason string

// The reasons, a closed list. All but the last are of Compute, at one rate (B2).
const (
	Starting Reason = "starting" // from a host's assignment to ready (B1)
	Running  Reason = "running"
	Sleeping Reason = "sleeping"
	Stored   Reason = "archived" // in cold storage (B6)
)

// Reasons lists every reason.
var Reasons = []Reason{Starting, Running, Sleeping, Stored}

// kind is what a reason meters.
func (r Reason) kind() Kind {
	if r == Stored {
		return Archive
	}
	return Compute
}

// End is why an interval ended.
type End string

// The ends, a closed list. The first group are of a Halted fact, the second of an Ended
// one, the third come with other facts.
const (
	BySleep        End = "sleep"         // its user put it to sleep
	ByIdle         End = "idle"          // it was put to sleep for being idle
	ByStop         End = "stop"          // its user stopped it
	ByDelete       End = "delete"        // its user deleted it
	ByAutoStop     End = "auto_stop"     // its deadline
	ByMemoryWindow End = "memory_window" // the end of the time that memory is kept
	ByBudget       End = "budget"        // the project's budget was reached
	BySpotNotice   End = "spot_notice"   // the end of the notice of its host's owner

	ByExit          End = "exited"
	ByCrash         End = "crashed"
	ByOOM           End = "oom_killed"
	ByHostRestarted End = "host_restarted"
	ByHostLost      End = "host_lost"

	ByReady   End = "ready"         // the boot is done
	ByWake    End = "woken"         // from sleeping to running
	ByReboot  End = "rebooted"      // from inside
	ByPrice   End = "price_changed" // the same goes on at another price
	StillOpen End = "open"          // of Meter.Open only, never in the ledger
)

// Ends lists every end.
var Ends = []End{
	BySleep, ByIdle, ByStop, ByDelete, ByAutoStop, ByMemoryWindow, ByBudget, BySpotNotice,
	ByExit, ByCrash, ByOOM, ByHostRestarted, ByHostLost, ByReady, ByWake, ByReboot, ByPrice, StillOpen,
}

// Rate is the size of a machine.
type Rate struct {
	VCPUs       int64 `json:"vcpus"`
	MemoryBytes int64 `json:"memory_bytes"`
}

// Entry is one line of the ledger: that a sandbox was metered in [From, To). It never
// changes. (Sandbox, N) names it; a store refuses a second one of that name, so that a
// fact that is applied twice fails instead of being charged twice.
type Entry struct {
	Project    string    `json:"project"`
	Sandbox    string    `json:"sandbox"`
	N          int64     `json:"n"` // counts the sandbox's entries from 1, without a gap
	Kind       Kind      `json:"kind"`
	Reason     Reason    `json:"reason"`
	End        End       `json:"end"`
	From       time.Time `json:"from"`
	To         time.Time `json:"to"`
	Rate       Rate      `json:"rate"`       // of Compute
	DiskBytes  int64     `json:"disk_bytes"` // of Archive: allocated at the stop's commit
	Price      int64     `json:"price"`      // the version of the price that held throughout
	Generation int64     `json:"generation"` // the last one in the interval; of Archive: before it
	Event      string    `json:"event"`      // the event in whose transaction it was entered
}

// millis is how long an entry is.
func (e Entry) millis() int64 { return e.To.UnixMilli() - e.From.UnixMilli() }
