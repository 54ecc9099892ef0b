package hostagent

import (
	"context"
	"net"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// Disks is what the agent needs of the disk pool (Storage gives it). A save has an
// owner, a sandbox or the fork operation that captured it, and a generation. Every
// call may be repeated.
type Disks interface {
	Create(ctx context.Context, id string, size int64) error
	// Mount gives the root file system tree of a disk on its template and agent layer.
	Mount(ctx context.Context, id, template, agent string) (root string, err error)
	Unmount(ctx context.Context, id string) error
	Sync(ctx context.Context, id string) error
	Delete(ctx context.Context, id string) error
	// Has says whether a sandbox has a disk of its own, saves aside.
	Has(ctx context.Context, id string) (bool, error)
	// Erase removes the disk and every save of a sandbox.
	Erase(ctx context.Context, id string) error
	ReadGuestFile(ctx context.Context, id, path string, limit int64) ([]byte, error)

	// Stage begins a save of need bytes at most.
	Stage(ctx context.Context, owner string, generation, need int64) (Staging, error)
	Saved(ctx context.Context, owner string, generation int64) (disk.Saved, error)
	// CloneSaved makes a disk from a save's.
	CloneSaved(ctx context.Context, owner string, generation int64, id string) error
	// CopySaved makes a save from a save.
	CopySaved(ctx context.Context, owner string, generation int64, to string, toGeneration int64) error
	// DropSaved removes a save, committed or not.
	DropSaved(ctx context.Context, owner string, generation int64) error

	IDs(ctx context.Context) ([]string, error)        // that have a disk or a save
	Mounted(ctx context.Context) ([]string, error)    // that have anything mounted
	SaveOwners(ctx context.Context) ([]string, error) // that have a save or a staged one

	BuildTemplate(ctx context.Context, src hostproto.TemplateSource, progress func(step string, fraction float64)) (hostproto.Template, error)
	DeleteTemplate(ctx context.Context, digest string) error
	Space(ctx context.Context) (total, free int64, err error)
	// Headroom says how far the pool is from the mark at which writers have to wait.
	Headroom(ctx context.Context) (disk.Headroom, error)
	Report(ctx context.Context) (disk.Report, error) // what takes the space
}

// Staging is a save that is being made (disk.Staging). It ends with Commit or Abort.
type Staging interface {
	MemDir() string                                   // where the memory goes
	CloneDisk(ctx context.Context, disk string) error // what is written out, and then the clone
	Commit(ctx context.Context, manifest []byte) error
	Abort() error
}

// Rules gives the outbound rules of a sandbox at the time of the call: of two calls at a
// time, the later one applies what is newest, whichever asked first.
type Rules = func() sandbox.Egress

// Network is what the agent needs of the network (Links gives it). Every call may be
// repeated.
type Network interface {
	// Attach makes the sandbox's network, or finds it, and gives the path of the
	// namespace that the runtime gets. The rules hold before anything can leave.
	Attach(ctx context.Context, id string, rules Rules) (netns string, err error)
	// SetEgress applies the rules to a network that is there, also to what is established.
	// Where it fails nothing leaves the sandbox.
	SetEgress(ctx context.Context, id string, rules Rules) error
	Detach(ctx context.Context, id string) error
	Dial(ctx context.Context, id string, port int) (net.Conn, error)
	IDs(ctx context.Context) ([]string, error) // that have anything in the kernel
	// Traffic gives the bytes that went in and out of each sandbox since its network was
	// made, without those of hutch's own calls.
	Traffic(ctx context.Context) (map[string]int64, error)
}
