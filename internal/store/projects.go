package store

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// Project owns sandboxes, templates, keys and what they cost.
type Project struct {
	ID        string
	Name      string
	CreatedAt time.Time
	Plan      sandbox.Plan // "" is sandbox.PlanStandard
	Settings
	Budget  Budget
	Version int64 // counts the writes; 0 is 1 at the insert
}

// Settings are what the operator has set for a project. A zero number is no limit of the
// project's own.
type Settings struct {
	Quotas Quotas `json:"quotas,omitzero"`
	Rate   Rate   `json:"rate,omitzero"`
	// TTL is the auto-stop of a sandbox where nobody names one; 0 is the installation's.
	TTL time.Duration `json:"ttl_ns,omitempty"`
}

// Quotas are the most that a project may have at a time (P1); 0 is no limit.
type Quotas struct {
	Sandboxes   int64 `json:"sandboxes,omitempty"`    // that are not deleted
	Running     int64 `json:"running,omitempty"`      // that run, or are on their way there
	VCPUs       int64 `json:"vcpus,omitempty"`        // of those that run
	MemoryBytes int64 `json:"memory_bytes,omitempty"` // of those that run
	DiskBytes   int64 `json:"disk_bytes,omitempty"`   // of all, by their sizes
	Forks       int64 `json:"forks,omitempty"`        // of one call
}

// Rate is how often each key of a project may call.
type Rate struct {
	PerSecond int64 `json:"per_second,omitempty"` // 0 is no limit
	Burst     int64 `json:"burst,omitempty"`      // how many at once after a pause; 0 is one second's
}

// Budget is what a project may spend (B4), as it is kept: decimals are text.
type Budget struct {
	Limit string    // in units of the operator's currency; "" is none
	From  time.Time // what was metered before does not count; zero is the beginning
	Set   time.Time // when it was set last: it never falls due before
	// Spent is what the ledger says was spent since From, as metering.Amount's text. It is
	// kept up with every entry, so that no ledger has to be added up again.
	Spent string
	// Exhausted is the instant at which the spending reached Limit; zero is not yet.
	Exhausted time.Time
}

// Use is what a project has at the moment, for its quotas.
type Use struct {
	Sandboxes   int64
	Running     int64
	VCPUs       int64 // of those that run
	MemoryBytes int64 // of those that run
	DiskBytes   int64 // of all
}

// ProjectReader is what a transaction can read of projects.
type ProjectReader interface {
	// Project: the row is not held; who changes it takes a Lock of the project first.
	Project(ctx context.Context, id string) (Project, error)
	Projects(ctx context.Context, p Page) ([]Project, error)
	// Budgeted gives the projects that have a budget.
	Budgeted(ctx context.Context) ([]Project, error)
	// ProjectUse adds up what a project has. One that is sleeping or stopped runs, as far
	// as this goes, from the moment that its wake or resume was accepted.
	ProjectUse(ctx context.Context, project string) (Use, error)
}

// ProjectWriter is what a write transaction can do to them.
type ProjectWriter interface {
	// InsertProject: Conflict with ReasonExists when it is there.
	InsertProject(ctx context.Context, p Project) error
	// UpdateProject is to projects what UpdateSandbox is to sandboxes.
	UpdateProject(ctx context.Context, p *Project) error
}
