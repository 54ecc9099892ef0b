// Package hostproto is what the control plane and a host say to each other. The
// control plane says what is wanted (Command), the host says what happened
// (Report). Either side may repeat itself: a command is known by its operation, a
// report by the sandbox's sequence number.
package hostproto

import (
	"context"
	"net"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// Command asks a host to carry out one operation on one sandbox.
type Command struct {
	Operation  string           `json:"operation"`
	Verb       sandbox.Verb     `json:"verb"`
	Sandbox    string           `json:"sandbox"`
	Generation int64            `json:"generation"` // the sandbox's when the operation was admitted
	Name       string           `json:"name"`       // becomes the hostname at a boot
	Spec       sandbox.Spec     `json:"spec"`
	Mode       sandbox.ForkMode `json:"mode,omitempty"`      // of Fork
	Children   []Child          `json:"children,omitempty"`  // of Fork: what is to be made, their rows exist
	Policy     *sandbox.Policy  `json:"policy,omitempty"`    // of Create, and of Fork for its children
	Cancelled  bool             `json:"cancelled,omitempty"` // it is cancelled before it has begun
	// UndeleteFor is, of Delete, how long the disk is kept for an undelete; 0 erases it at once.
	UndeleteFor time.Duration `json:"undelete_for_ns,omitempty"`
	Origin                    // of the operation
}

// Origin is the call of the API that an operation comes from. A host puts it into what
// it tells of its steps, and decides nothing by it. Both are empty where no call asked.
type Origin struct {
	Request string `json:"request,omitempty"` // "req_" and 26 characters
	Trace   string `json:"trace,omitempty"`   // the operation's span, as in the header traceparent
}

// PolicyChange tells a host of a sandbox's new policy. It may come again: a host acts
// on each number once.
type PolicyChange struct {
	Sandbox string         `json:"sandbox"`
	Change  int64          `json:"change"` // grows with each change of the sandbox's policy
	Policy  sandbox.Policy `json:"policy"`
	Restart bool           `json:"restart"` // the auto-stop begins anew
	Keep    bool           `json:"keep"`    // after a failed save: it is to go on running, and not to be saved again (Z10)

	Sleep sandbox.SleepMode `json:"sleep_mode,omitempty"` // "" leaves it as it is
}

// Child is one sandbox that a fork makes. The host reports on it as it does on a
// sandbox that is created, under the child's own operation.
type Child struct {
	Sandbox   string `json:"sandbox"`
	Operation string `json:"operation"`
	Name      string `json:"name"`
	Trace     string `json:"trace,omitempty"` // as in Origin
}

// Report is one fact from a host. Facts of one sandbox apply in the order of Seq,
// each once; progress (Seq 0) may be dropped.
type Report struct {
	Sandbox    string        `json:"sandbox"`
	Seq        int64         `json:"seq"`
	Generation int64         `json:"generation"` // after the event
	Operation  string        `json:"operation,omitempty"`
	Verb       sandbox.Verb  `json:"verb,omitempty"` // of Operation
	Ended      bool          `json:"ended,omitempty"`
	Failure    *Failure      `json:"failure,omitempty"` // of an operation that ended without success
	Event      sandbox.Event `json:"event,omitempty"`   // the transition; "" for none
	Message    string        `json:"message,omitempty"` // why, for an event that no verb caused
	Step       string        `json:"step,omitempty"`
	Progress   float64       `json:"progress,omitempty"`
	// Timings are of an ended operation's steps since the host agent last started.
	Timings []sandbox.StepTime `json:"timings,omitempty"`
	Saved   bool               `json:"saved,omitempty"` // the disk was saved in full at At

	// Save tells of the save, where the operation has committed one.
	Save *Save `json:"save,omitempty"`

	// EraseAt is until when a deleted one can be brought back, Erased that it no longer can.
	EraseAt time.Time `json:"erase_at,omitzero"`
	Erased  bool      `json:"erased,omitempty"`

	Set   []sandbox.Condition `json:"set,omitempty"`
	Clear []sandbox.Condition `json:"clear,omitempty"` // by type and reason

	OOMKills uint64 `json:"oom_kills,omitempty"` // processes inside that were killed for want of memory since the last report of them

	// Of an operation that the host made by itself: what caused it, and when it fell
	// due, which is what it is metered to (B4).
	Cause sandbox.Cause `json:"cause,omitempty"`
	Due   time.Time     `json:"due,omitzero"`

	// Until is the last instant at which a sandbox is known to have run, of an end that was
	// found only later; zero is At.
	Until time.Time `json:"until,omitzero"`

	Deadline     time.Time `json:"deadline,omitzero"`       // the auto-stop after this; zero is none
	Turn         string    `json:"turn,omitempty"`          // the active harness turn for which Deadline was put off
	PolicyChange int64     `json:"policy_change,omitempty"` // the change of the policy that this applied

	Missed *Missed `json:"missed,omitempty"` // of a wake, soon after it

	Identity []IdentityItem `json:"identity,omitempty"` // of a boot, a wake or a fork
	At       time.Time      `json:"at"`
}

// Missed is what a sleep missed of the timers inside (X7).
type Missed struct {
	From    time.Time     `json:"from"` // of the sleep, as the sandbox's wall clock has it
	To      time.Time     `json:"to"`
	Zone    string        `json:"zone"` // of the sandbox
	Timers  []MissedTimer `json:"timers"`
	Omitted int           `json:"omitted,omitempty"` // how many more there were
}

// MissedTimer is a line of a crontab that would have fired.
type MissedTimer struct {
	Source   string    `json:"source"` // the file
	Line     int       `json:"line"`
	Schedule string    `json:"schedule"`
	User     string    `json:"user"`
	Command  string    `json:"command"`
	Count    int       `json:"count"` // how often
	Last     time.Time `json:"last"`
}

// Save is what a committed save is: a disk, and the memory that belongs to it where it
// was put to sleep.
type Save struct {
	At          time.Time `json:"at"`                    // the instant that it is of
	MemoryRoot  string    `json:"memory_root,omitempty"` // BLAKE3 over the memory's files; "" is no memory
	MemoryBytes int64     `json:"memory_bytes,omitempty"`
	Runtime     string    `json:"runtime,omitempty"` // that the memory needs
	Version     string    `json:"version,omitempty"`
}

// Failure is why an operation ended without success.
type Failure struct {
	Kind    string `json:"kind"` // a fault.Kind
	Message string `json:"message"`
	Reason  string `json:"reason,omitempty"`
}

// IdentityItem is one thing that a fork must not share with its source.
type IdentityItem struct {
	Item    string `json:"item"`   // hostname, machine_id, random, mac, token …
	Status  string `json:"status"` // done, failed, impossible
	Message string `json:"message,omitempty"`
}

// Guest is the way to a running sandbox's guest agent.
type Guest struct {
	Dial func(ctx context.Context) (net.Conn, error)
	// DialPort connects to a TCP port of the sandbox. A port that nobody listens on is
	// Unavailable at once; the agent's own port is InvalidArgument.
	DialPort   func(ctx context.Context, port int) (net.Conn, error)
	Token      string
	Generation int64
	Done       func() // ends the use, and may be called again
}

// TemplateSource says what a template is made from: exactly one field is set.
type TemplateSource struct {
	Debian bool   `json:"debian,omitempty"` // the built-in recipe
	OCI    string `json:"oci,omitempty"`    // registry reference, layout directory or tar file on the host
}

// Template is a root image that a host has.
type Template struct {
	Digest  string            `json:"digest"`
	Bytes   int64             `json:"bytes"`
	User    string            `json:"user"`
	Workdir string            `json:"workdir"`
	Env     map[string]string `json:"env,omitempty"`
}

// HostInfo is what a host can do and how full it is.
type HostInfo struct {
	ID           string   `json:"id"`
	Runtimes     []string `json:"runtimes"`
	HeldRestore  bool     `json:"held_restore"`
	Memory       bool     `json:"memory_snapshot"`
	PoolBytes    int64    `json:"pool_bytes"`
	PoolFree     int64    `json:"pool_free"`
	CPUs         int      `json:"cpus"`
	MemoryBytes  int64    `json:"memory_bytes"`
	DiskMaxBytes int64    `json:"disk_max_bytes"`
	// Ahead is by how much the host's time, in which its timers are kept, is ahead of the
	// wall clock.
	Ahead time.Duration `json:"ahead_ns,omitempty"`
}

// DiskReport is what takes the space of a host's disk pool, in bytes.
type DiskReport struct {
	PoolBytes   int64 `json:"pool_bytes"`
	PoolFree    int64 `json:"pool_free"` // without the reserve
	PoolInFile  bool  `json:"pool_in_file"`
	LowMark     int64 `json:"low_mark"`  // below so many free nothing new is made
	StopMark    int64 `json:"stop_mark"` // below so many free sandboxes that run have to wait
	Reserve     int64 `json:"reserve"`   // held for saves
	DataBytes   int64 `json:"data_bytes"`
	DataFree    int64 `json:"data_free"`
	MemoryQuota int64 `json:"memory_quota"`

	Sandboxes []SandboxDisk `json:"sandboxes"` // also those that nobody owns
	Templates Share         `json:"templates"`
	Forks     Share         `json:"forks"` // captures that copies are being made from
	Other     int64         `json:"other"`
}

// Share is several things and what they take together.
type Share struct {
	Count int   `json:"count"`
	Bytes int64 `json:"bytes"`
}

// SandboxDisk is what one sandbox has in the pool: its disk, and its saves.
type SandboxDisk struct {
	Sandbox   string `json:"sandbox"`
	Owned     bool   `json:"owned"` // the host knows the sandbox
	Size      int64  `json:"size"`  // the disk's limit
	Allocated int64  `json:"allocated"`
	Unique    int64  `json:"unique"` // not shared with any copy; -1 where that is not known
	Memory    int64  `json:"memory"`
}

// Fact is how a host stands with one sandbox: what its journal says now, whatever the
// control plane was told or remembers of it (R9).
type Fact struct {
	Sandbox    string
	Name       string
	Spec       sandbox.Spec
	Policy     *sandbox.Policy // nil where nothing was ready yet
	Change     int64           // the number of the last change of it that the host took, 0 for none
	State      sandbox.State   // "" where the host has erased it
	Since      time.Time       // when it came into the state; zero where that is not known
	Generation int64
	Seq        int64  // of its last report
	Acked      int64  // of the last report that the control plane has taken
	Operation  string // that is at work on it, "" for none
	Deadline   time.Time
}

// Usage is what one running sandbox uses.
type Usage struct {
	CPU         time.Duration `json:"cpu"`
	MemoryBytes int64         `json:"memory_bytes"`
}

// Host is a host as the control plane sees it, in the same process or far away.
type Host interface {
	// Submit hands in a command. When it returns nil the host has it and will report
	// its end, whatever dies meanwhile. Handing in one that it has, or has ended,
	// makes it report again.
	Submit(ctx context.Context, c Command) error
	// Cancel asks that the operation end early, undone. It may end with success all the same.
	Cancel(ctx context.Context, sandboxID, operationID string) error
	// SetPolicy tells of a changed policy. When it returns nil the host has it and will
	// report on it. NotFound where the host has nothing of the sandbox (yet).
	SetPolicy(ctx context.Context, c PolicyChange) error
	// Renew tells of every harness turn that is active in the host's sandboxes, by
	// sandbox, at this moment; what is left out has ended (A3).
	Renew(ctx context.Context, turns map[string][]string) error
	// Guest gives the way to the agent in a running sandbox, for a use that lasts until
	// Guest.Done. Unavailable while it does not run, or an operation is at work that ends
	// its running.
	Guest(ctx context.Context, sandboxID string, use Use) (Guest, error)
	// Idleness reads whether a sandbox that runs is idle. FailedPrecondition when it does
	// not run.
	Idleness(ctx context.Context, sandboxID string) (Idleness, error)
	Usage(ctx context.Context, sandboxID string) (Usage, error)
	// BuildTemplate makes a template, calling progress as it goes, and returns when it
	// is whole and durable.
	BuildTemplate(ctx context.Context, src TemplateSource, progress func(step string, fraction float64)) (Template, error)
	DeleteTemplate(ctx context.Context, digest string) error
	Info(ctx context.Context) (HostInfo, error)
	// DiskReport adds up what takes the space of the pool: some milliseconds a sandbox.
	DiskReport(ctx context.Context) (DiskReport, error)
	// Inventory lists the sandboxes of which the host has anything.
	Inventory(ctx context.Context) ([]string, error)
	// Facts gives how the host stands with each sandbox that it knows, by id.
	Facts(ctx context.Context) ([]Fact, error)
}

// Reporter takes a host's reports. A nil error means that the report is durable and
// need not be sent again.
type Reporter interface {
	Report(ctx context.Context, r Report) error
}
