package sandbox

import (
	"encoding/json"
	"time"
)

// Sandbox is the row that is the truth about what is wanted and what was last
// reported. Every write of it is conditional on Version, and a host's report on
// Generation.
type Sandbox struct {
	ID      string // "sbx_" and 26 characters: never changes, never used again
	Project string
	Name    string // unique in the project among what is not deleted

	State      State
	Reason     string // of failed and stopped: start_failed, exited, crashed, oom_killed, host_restarted …; "" otherwise
	Message    string // the reason in a sentence
	Conditions []Condition
	Generation int64 // 0 before the first boot
	Host       string
	HostSeq    int64 // last host report that was applied

	Spec   Spec
	Labels map[string]string
	Origin Origin

	Policy   Policy
	Deadline time.Time // the auto-stop, as the host last had it; zero is none
	// PolicyChange numbers the change of Policy that the host has not taken note of
	// yet, 0 for none. Restart says that the auto-stop begins anew with it, Keep that its
	// user keeps what runs after a failed save (Z10).
	PolicyChange  int64
	PolicyRestart bool
	PolicyKeep    bool

	// The timers of one that is stopped or archived (AtRest); zero is one that does not run.
	TimersFrom   time.Time // what they count from
	ArchiveAt    time.Time
	DeleteAt     time.Time
	ArchiveWaits bool // its archiving fell due, and there is no cold storage yet

	Started    bool // has been ready once, so that there is a disk to resume
	CreatedAt  time.Time
	UpdatedAt  time.Time
	StateSince time.Time
	SavedAt    time.Time // the disk was last saved in full (W4); zero is never
	DeletedAt  time.Time
	EraseAt    time.Time // of a deleted one: until then it can be brought back (X9); zero is not at all
	Version    int64
}

// Spec is what a sandbox was asked to be. It is fixed at creation.
type Spec struct {
	Template string            `json:"template"` // the template's name
	Version  string            `json:"version"`  // the digest of the pinned template version
	Runtime  string            `json:"runtime"`
	CPUs     int               `json:"cpus"`
	Memory   int64             `json:"memory_bytes"`
	Disk     int64             `json:"disk_bytes"` // GB are 10^9 bytes
	Env      map[string]string `json:"env,omitempty"`
	User     string            `json:"user,omitempty"`    // who commands run as; "" is the template's user
	Workdir  string            `json:"workdir,omitempty"` // "" is /workspace
	Sleep    SleepMode         `json:"sleep_mode"`
}

// SleepMode says who may put a sandbox to sleep.
type SleepMode string

// The sleep modes (Z1).
const (
	SleepNever  SleepMode = "never"  // nobody: the verb is refused too
	SleepManual SleepMode = "manual" // its users
	SleepAuto   SleepMode = "auto"   // its users, and its host after the idle window
)

// Origin says what a sandbox was made from.
type Origin struct {
	Kind   string `json:"kind"`             // "template" or "fork"
	Source string `json:"source,omitempty"` // the source sandbox's id
	Mode   string `json:"mode,omitempty"`   // of a fork: live or disk
}

// OperationStatus says how far an operation is.
type OperationStatus string

// The statuses. Pending and running are active: a sandbox has one active operation
// at most.
const (
	Pending   OperationStatus = "pending"
	Running   OperationStatus = "running"
	Succeeded OperationStatus = "succeeded"
	Errored   OperationStatus = "failed"
	Cancelled OperationStatus = "cancelled"
)

// Active says whether the operation has not ended.
func (s OperationStatus) Active() bool { return s == Pending || s == Running }

// Operation is one asynchronous piece of work on a sandbox.
type Operation struct {
	ID         string // "op_" and 26 characters
	Project    string
	Sandbox    string
	Kind       Verb
	Status     OperationStatus
	Step       string  // of Steps(Kind); "" before the first
	Progress   float64 // 0 to 1
	Generation int64   // the sandbox's when it was admitted
	Params     json.RawMessage
	Result     json.RawMessage
	Error      *OperationError
	Timings    []StepTime // of the steps that ended, in order; a step that was tried again is there again
	Actor      string     // the API key's id, or "host"
	CreatedAt  time.Time
	StartedAt  time.Time
	EndedAt    time.Time
	CancelAt   time.Time // its end was asked for; zero is never
	Version    int64
}

// StepTime is how long one step of an operation took.
type StepTime struct {
	Step         string  `json:"step"`
	Milliseconds float64 `json:"milliseconds"`
}

// OperationError is why an operation failed, as users see it.
type OperationError struct {
	Code    string `json:"code"` // a fault.Kind
	Message string `json:"message"`
	Reason  string `json:"reason,omitempty"`
}
