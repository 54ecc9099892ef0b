// Package runtime is the contract between the host agent and what isolates a
// sandbox. A driver (gvisor, microvm, fake) boots, pauses, captures, restores and
// kills; it knows nothing of states, disks, networks or users. runtimetest is the
// suite that every driver passes.
//
// # Life of a sandbox
//
// Start and Restore make processes that belong to nobody: they outlive the caller,
// so that an agent can die and Adopt them again. All that a driver keeps about a
// sandbox lies in Spec.Dir, which the caller makes and removes; a driver writes
// there what Adopt needs before it lets a process run.
//
// A save is: Pause, Capture (memory into a directory, the sandbox stays paused),
// the caller's own copy of the disk, and then either Resume or Kill. A driver never
// ends a sandbox as part of a capture: a capture that fails leaves it paused and
// whole.
//
// # Errors and repeats
//
// Errors are faults. A call that fails or times out leaves the sandbox in a state
// that the next call settles: every method may be called again, Pause of a paused
// one and Kill of a dead one succeed. Methods of one Handle are called by one
// goroutine at a time, but for DialGuest, Usage and Wait, which are safe from any.
package runtime

import (
	"context"
	"net"
	"time"
)

// Capabilities says what a driver can do on this machine, found by trying it.
type Capabilities struct {
	Runtime          string   // "gvisor", "microvm", "fake"
	Version          string   // a memory image restores under the same version only
	Older            []string // versions beside it that are kept, and whose images Restore takes too
	MemorySnapshot   bool     // Capture and Restore work
	HeldRestore      bool     // after Restore nothing but PID 1 runs until Release
	LiveMigration    bool
	SharedForkMemory bool // forks of one image share pages
	Nested           bool // virtual machines inside
	Docker           bool
	GPU              bool
}

// Spec is what one boot needs. A Restore gets the Spec of the new place (Dir, Root,
// NetNS may differ from those of the captured sandbox); Args must not differ, and
// Version is that of the capture.
//
// A driver may take a namespace over: gVisor moves the addresses and routes of its
// interfaces into the sandbox, so that a second boot there finds none. The interfaces
// are configured and up before Start and Restore.
type Spec struct {
	ID          string   // unique on the machine, always of the same length
	Dir         string   // the driver's own directory for this boot: absolute, short, 0700, empty at Start and Restore
	Root        string   // the root file system tree, already mounted and writable
	NetNS       string   // path of the network namespace, made for this boot; "" gives loopback only
	Hostname    string   // at boot; a restored sandbox keeps the captured one until the guest changes it
	Args        []string // PID 1 and its arguments
	Env         []string // of PID 1
	CPUs        int      // virtual CPUs, at least 1
	MemoryBytes int64    // hard limit of the whole sandbox; what goes beyond is killed
	Version     string   // of the runtime, one of Capabilities; "" is Capabilities.Version
	// Dial reaches a TCP port of the guest through its network; nil where NetNS is "".
	Dial func(ctx context.Context, port int) (net.Conn, error) `json:"-"`
}

// Exit says how a sandbox ended.
type Exit struct {
	Known  bool // false: it ended while nobody could collect its status
	Code   int  // PID 1's exit code, where Known and Signal is 0
	Signal int  // the signal that ended it, 0 for none
	OOM    bool // the memory limit killed it
	At     time.Time
}

// Usage is what a sandbox has used since it was started or restored here.
type Usage struct {
	CPU          time.Duration // CPU time of all its processes, those of the isolation included
	MemoryBytes  int64         // resident now
	DeletedBytes int64         // on the disk in files that are deleted and open; a capture carries them
	DirtyBytes   int64         // of files, in memory and not yet written to the host's disk; not part of MemoryBytes
}

// Driver boots and restores sandboxes.
type Driver interface {
	// Probe tries the driver for real, in bounded time. An error says what is missing
	// and what to do (kind Unsupported).
	Probe(ctx context.Context) (Capabilities, error)
	// Start boots PID 1 on a root file system. When it returns nil PID 1 has been
	// started; when it returns an error nothing of it runs and Dir may be removed.
	// Conflict: a sandbox of this id still runs here, unharmed; Adopt it or Kill it.
	Start(ctx context.Context, spec Spec) (Handle, error)
	// Restore brings a captured sandbox back in memory. Nothing but PID 1 runs until
	// Held.Release (where HeldRestore). The image is not changed, and is read until
	// Release returns. Kinds: DataCorrupt (damaged or cut image), FailedPrecondition
	// with reason "runtime_version" (captured under another version).
	Restore(ctx context.Context, spec Spec, image string) (Held, error)
	// Adopt finds a sandbox that Start or Restore left in spec.Dir. Of the rest of spec it
	// looks at ID and Dial only. NotFound when it
	// no longer runs; what was left of it has been killed then. A sandbox that was
	// paused stays paused until Thaw; one that was held stays held, and Thaw releases it.
	Adopt(ctx context.Context, spec Spec) (Handle, error)
}

// Handle is a sandbox that runs.
type Handle interface {
	// Pause stops all of its tasks. A Pause that fails has been undone.
	Pause(ctx context.Context) (Paused, error)
	// Thaw lets everything run again whatever an earlier agent left: pauses, held tasks.
	Thaw(ctx context.Context) error
	// Saveable says whether Pause and Capture may be tried, before anything is frozen:
	// nil, or FailedPrecondition with a reason from a closed list ("unlinked_files",
	// "nested_active") and what the user can do.
	Saveable(ctx context.Context) error
	// Version is that of the runtime which it runs under, and which alone restores what
	// is captured of it. It may be older than Capabilities.Version.
	Version() string
	// Kill ends every process of it and waits until they are gone; then nothing holds
	// its root file system or its network namespace any more.
	Kill(ctx context.Context) error
	// DialGuest connects to a TCP port inside.
	DialGuest(ctx context.Context, port int) (net.Conn, error)
	Usage(ctx context.Context) (Usage, error)
	// CPUTime is Usage.CPU alone. It asks nobody and costs next to nothing.
	CPUTime() (time.Duration, error)
	// OOMKills counts the processes inside that were killed for want of memory (R3) since
	// it was started or restored here. It asks nobody and costs nothing.
	OOMKills() uint64
	// Wait gives a channel that receives one Exit and is closed when the sandbox has
	// ended, whoever ended it.
	Wait() <-chan Exit
}

// Paused is a sandbox none of whose tasks run.
type Paused interface {
	// Capture writes the memory into dir, which exists and is empty. The files are not
	// synced and carry no digests; see Seal. On an error dir holds rubbish.
	Capture(ctx context.Context, dir string) error
	// Resume lets the sandbox run on.
	Resume(ctx context.Context) error
	// Kill is Handle.Kill.
	Kill(ctx context.Context) error
}

// Held is a restored sandbox in which only PID 1 runs.
type Held interface {
	Handle
	// Release lets everything else run. From here on the image is void for a second
	// restore of the same sandbox: the caller has made that durable before.
	Release(ctx context.Context) error
}
