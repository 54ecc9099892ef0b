package control

import (
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Names of other packages' types that callers of Control handle, so that they need
// not import those packages.
type (
	Event          = store.Event
	Template       = store.Template
	Project        = store.Project
	Quotas         = store.Quotas
	Rate           = store.Rate
	TemplateSource = hostproto.TemplateSource
	HostInfo       = hostproto.HostInfo
	IdentityItem   = hostproto.IdentityItem
	Usage          = hostproto.Usage
	Share          = hostproto.Share
	Use            = hostproto.Use
	Missed         = hostproto.Missed
)

// Actor is who calls: the key says which project, and what it may do.
type Actor struct {
	Project string
	KeyID   string
	Scopes  Scopes
}

// Idempotency is the request key of a mutating call. With a Key, the same call (same
// Route, same BodyHash) has its effect once within Limits.RequestKeep: repeats give
// the first call's outcome and ids with the present state, and Result.Replayed. The
// same key with another body is a Conflict with reason "key_reused". A refused call
// is not remembered. Without a Key nothing is.
type Idempotency struct {
	Route    string // the method and the path pattern with its ids filled in
	Key      string // 1 to 255 bytes
	BodyHash []byte // SHA-256 of the canonical JSON body
}

// Result is what a mutating call on sandboxes gives at once; the work goes on.
type Result struct {
	Sandbox sandbox.Sandbox
	// Operation is what was started or joined; nil where the goal is reached already
	// or nothing asynchronous is needed.
	Operation *sandbox.Operation
	// Outcome is sandbox.Accept for an operation that was started, Join for one that
	// ran already, Done for a goal already reached.
	Outcome  sandbox.Outcome
	Children []View // of a fork, in the order of their making
	Replayed bool   // the answer to a repeated request key
}

// View is a sandbox as readers see it.
type View struct {
	Sandbox   sandbox.Sandbox
	Operation *sandbox.Operation // the active one; nil for none
}

// CreateRequest asks for a sandbox. A nil or empty field takes its default; a number
// that is given must lie in its range, also when it is 0.
type CreateRequest struct {
	Idempotency Idempotency
	Name        string // "" generates one
	Template    string // "" is Limits.Template
	CPUs        *int64
	MemoryBytes *int64
	DiskBytes   *int64 // GB are 10^9 bytes
	Env         map[string]string
	Labels      map[string]string
	TTL         TTL // what is not given is Limits.Policy's
	Sleep       SleepSettings
	Policy      PolicyRequest
	User        string            // who commands run as; "" is the template's user
	Workdir     string            // "" is the template's
	Firewall    *sandbox.Firewall // nil is the default
}

// UpdateRequest changes what may change on a sandbox. Nil fields stay as they are.
type UpdateRequest struct {
	Idempotency Idempotency
	Name        *string
	Labels      *map[string]string // replaces all labels
	TTL         TTL                // begins anew from now, also with the value that it has (A2)
	Sleep       SleepSettings
	Policy      PolicyRequest
}

// ForkRequest asks for copies of a sandbox.
type ForkRequest struct {
	Idempotency Idempotency
	Mode        sandbox.ForkMode // "" is live
	Count       *int64           // nil is 1
	// Names has one name for each fork, or one name that is given a number for each
	// when there are several; empty generates them.
	Names []string
	TTL   TTL // of the copies; the source's where not given
}

// DeleteRequest asks that a sandbox go away.
type DeleteRequest struct {
	Idempotency Idempotency
	Permanent   bool // erase at once
}

// ListQuery selects sandboxes of the actor's project, in the order of their making.
type ListQuery struct {
	Limit    *int64 // nil is Limits.PageDefault
	Cursor   string // of the page before
	States   []sandbox.State
	Labels   map[string]string
	Template string
	Deleted  bool // only deleted ones that can be brought back
}

// SandboxPage is one page of a list. NextCursor is "" on the last.
type SandboxPage struct {
	Sandboxes  []View
	NextCursor string
}

// OperationQuery selects operations of the actor's project, newest last.
type OperationQuery struct {
	Limit   *int64
	Cursor  string
	Sandbox string // id or name; "" for all
}

// OperationPage is one page of operations.
type OperationPage struct {
	Operations []sandbox.Operation
	NextCursor string
}

// PageQuery selects a page of a list without filters.
type PageQuery struct {
	Limit  *int64
	Cursor string
}

// TemplatePage is one page of templates, in the order of their names.
type TemplatePage struct {
	Templates  []Template
	NextCursor string
}

// APIKeyPage is one page of keys. No secret is in it.
type APIKeyPage struct {
	APIKeys    []APIKey
	NextCursor string
}

// BuildRequest asks for a template.
type BuildRequest struct {
	Idempotency Idempotency
	Name        string
	Source      TemplateSource
}

// Access is the way to the programs in a running sandbox.
type Access struct {
	Guest   hostproto.Guest
	Sandbox sandbox.Sandbox
}
