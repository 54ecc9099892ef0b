// Package store is the contract of the database: what the control plane keeps and
// how. store/sqlite and store/postgres implement it with the queries of
// store/bunstore; storetest is the suite that every implementation passes.
//
// Everything that changes changes inside Update, in one transaction: a sandbox's new
// state, its operation's end and the events that tell of them appear together or not
// at all. Rows are written conditional on the Version that was read; a write that
// lost the race is a Conflict fault with reason ReasonStale, and the caller reads
// again.
//
// Writers may run at a time. What Update's function reads through its Tx by id or by
// name stays as it was read until the commit: others that read it so wait. Lists and
// rows that are not there are not held; a decision that rests on those needs a unique
// index or Tx.Lock.
//
// Instants are kept in milliseconds, UTC. The zero time.Time is kept as "never".
package store

import (
	"context"
	"encoding/json"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// The reasons of the Conflict faults (and of one FailedPrecondition and one
// Unavailable) that a store gives, for callers that decide on them.
const (
	ReasonStale  = "stale"      // the row has changed since it was read
	ReasonName   = "name_taken" // the name is in use
	ReasonActive = "active"     // the sandbox has an active operation
	ReasonKey    = "key_in_use" // the request key is remembered already
	ReasonExists = "exists"     // a row with this id is there already
	ReasonPruned = "pruned"     // of Events: FailedPrecondition
	// ReasonUnknown is of Update, Unavailable: the connection broke during the commit.
	ReasonUnknown = "commit_unknown"
)

// Store is a database. It is safe for use from any goroutine.
type Store interface {
	// Update runs fn in one write transaction and commits when it returns nil. fn may
	// run again, when the transaction lost against another or lost its connection, so it
	// has no effects of its own. fn calls neither Update nor View: with one writer that
	// would wait for itself, so it is refused as Internal. When ctx ends before the
	// commit nothing is written. An error means that nothing was written, but for
	// Unavailable with ReasonUnknown.
	Update(ctx context.Context, fn func(ctx context.Context, tx Tx) error) error
	// View runs fn on one consistent snapshot.
	View(ctx context.Context, fn func(ctx context.Context, tx Reader) error) error
	// Events gives numbered events after f.After, oldest first, at most f.Limit. The
	// numbers have no gaps that are filled later: a reader that has seen n never misses
	// one below it. After 0 begins with the oldest that is kept; any other number
	// before what is kept is FailedPrecondition with ReasonPruned and the oldest kept
	// number in the message.
	Events(ctx context.Context, f EventFilter) ([]Event, error)
	// LastEvent gives the highest number that was given to an event, 0 before the first.
	LastEvent(ctx context.Context) (int64, error)
	// EventStart gives the number after which the events begin that a reader wants who
	// names none: those from the instant since on, or, where since is zero, the last tail
	// ones that f selects. f.After and f.Limit do not count.
	EventStart(ctx context.Context, f EventFilter, since time.Time, tail int) (int64, error)
	// Committed gives a channel that is closed when events have got their numbers, here
	// or at another server of the same database. Take the channel first, read then, and
	// wait on it only when nothing was found.
	Committed() <-chan struct{}
	Webhooks
	Close() error
}

// Reader is what a transaction can read. A row that is not there is a NotFound fault.
type Reader interface {
	Sandbox(ctx context.Context, id string) (sandbox.Sandbox, error)
	// SandboxByName finds the sandbox that holds the name; where none does, the one
	// that held it last and whose deletion has not ended.
	SandboxByName(ctx context.Context, project, name string) (sandbox.Sandbox, error)
	// NameHeld says whether a sandbox holds the name. It costs the same however many
	// sandboxes there are, which SandboxByName of a name that nobody has does not.
	NameHeld(ctx context.Context, project, name string) (bool, error)
	Sandboxes(ctx context.Context, f SandboxFilter) ([]sandbox.Sandbox, error)
	// SandboxNames gives the names of those of the ids that there are, deleted ones too.
	SandboxNames(ctx context.Context, ids []string) (map[string]string, error)
	// SandboxStates counts the sandboxes of all projects that are not deleted, by state.
	SandboxStates(ctx context.Context) (map[sandbox.State]int64, error)
	Operation(ctx context.Context, id string) (sandbox.Operation, error)
	// ActiveOperation gives nil where none is pending or running.
	ActiveOperation(ctx context.Context, sandboxID string) (*sandbox.Operation, error)
	// ActiveOperations gives the active ones of the sandboxes named, or of all, those
	// without a sandbox included, when none is named. Oldest first.
	ActiveOperations(ctx context.Context, sandboxIDs ...string) ([]sandbox.Operation, error)
	Operations(ctx context.Context, f OperationFilter) ([]sandbox.Operation, error)
	Template(ctx context.Context, project, name string) (Template, error)
	// TemplatesByDigest gives every project's templates whose version is the digest.
	TemplatesByDigest(ctx context.Context, digest string) ([]Template, error)
	// Templates is in the order of names; Page.After is a name.
	Templates(ctx context.Context, project string, p Page) ([]Template, error)
	Identity(ctx context.Context, sandboxID string) (json.RawMessage, error)
	APIKeyByHash(ctx context.Context, hash []byte) (APIKey, error)
	APIKey(ctx context.Context, project, id string) (APIKey, error) // project "" is any
	APIKeys(ctx context.Context, project string, p Page) ([]APIKey, error)
	// Request finds a remembered request key.
	Request(ctx context.Context, project, route, key string) (Request, error)
	ProjectReader
	SSHKeyReader
	LedgerReader
	WebhookReader
	TimerReader
	ReceiptReader
	PortReader
}

// Tx is a write transaction.
type Tx interface {
	Reader
	// Lock keeps out, until the commit, other transactions that lock the same name. It
	// is for decisions that rest on rows that are not there. Call it before the reads.
	Lock(ctx context.Context, name string) error
	// InsertSandbox: Conflict with ReasonName when the name is held by another. A
	// sandbox holds its name while DeletedAt is zero.
	InsertSandbox(ctx context.Context, s sandbox.Sandbox) error
	// UpdateSandbox writes s where the stored version is s.Version and counts
	// s.Version up. Conflict with ReasonStale where it is another, with ReasonName
	// when the new name is held.
	UpdateSandbox(ctx context.Context, s *sandbox.Sandbox) error
	// InsertOperation: Conflict with ReasonActive when the sandbox has an active one.
	InsertOperation(ctx context.Context, op sandbox.Operation) error
	// UpdateOperation is to operations what UpdateSandbox is to sandboxes.
	UpdateOperation(ctx context.Context, op *sandbox.Operation) error
	// AddEvent appends an event; it gets its number at the commit or soon after.
	AddEvent(ctx context.Context, e Event) error
	// PutTemplate writes a template, in place of the one of its name.
	PutTemplate(ctx context.Context, t Template) error
	DeleteTemplate(ctx context.Context, project, name string) error
	PutIdentity(ctx context.Context, sandboxID string, items json.RawMessage) error
	InsertAPIKey(ctx context.Context, k APIKey) error
	// TouchAPIKey records a use; a key that is gone is no error.
	TouchAPIKey(ctx context.Context, id string, at time.Time) error
	DeleteAPIKey(ctx context.Context, project, id string) error
	// UpdateAPIKey writes what may change of a key: its secret, and when it was rotated.
	UpdateAPIKey(ctx context.Context, k APIKey) error
	// PutRequest: Conflict with ReasonKey when the key is there already.
	PutRequest(ctx context.Context, r Request) error
	// PruneRequests forgets the request keys that were first used before an instant.
	PruneRequests(ctx context.Context, before time.Time) error
	// PruneHistory removes events, operations and deliveries that ended, and receipts from
	// before an instant, but for each sandbox's last receipt.
	PruneHistory(ctx context.Context, before time.Time) error
	ProjectWriter
	SSHKeyWriter
	LedgerWriter
	WebhookWriter
	TimerWriter
	ReceiptWriter
	PortWriter
}

// Cursor is the place of a row in a list that is ordered by creation, then id. The
// row itself may be gone.
type Cursor struct {
	At time.Time
	ID string
}

// Page is a slice of a list in a stable order (creation, then id): at most Limit
// rows after the cursor. The zero Cursor is the beginning, a Limit of 0 is all.
type Page struct {
	Limit int
	After Cursor
}

// SandboxFilter selects sandboxes; empty fields select all. Deleted ones are left
// out unless States asks for them.
type SandboxFilter struct {
	Page
	Project  string
	States   []sandbox.State
	Labels   map[string]string // all of them
	Template string            // its name
	Version  string            // the digest of the pinned template version
	Host     string
	Source   string // the sandbox that it is a fork of

	Name string // of those that held it when they were deleted too

	KeptAt  time.Time // only deleted ones that can be brought back at this instant (X9)
	HasDisk bool      // also deleted ones of which anything is kept

	PolicyPending bool // its host has a changed policy still to take note of
	Unmetered     bool // those that never had a meter
}

// OperationFilter selects operations, newest last.
type OperationFilter struct {
	Page
	Project string
	Sandbox string
}

// EventFilter selects numbered events.
type EventFilter struct {
	After   int64
	Limit   int
	Project string   // "" for all
	Sandbox string   // "" for all
	Types   []string // as TypeMatches takes them; none is all
}

// Selects says whether an event passes the filter, whatever its number.
func (f EventFilter) Selects(e Event) bool {
	return (f.Project == "" || f.Project == e.Project) && (f.Sandbox == "" || f.Sandbox == e.Sandbox) && TypeMatches(f.Types, e.Type)
}

// Event is one line of the history.
type Event struct {
	ID        string // "ev_" and 26 characters; unlike Seq it is known when the event is written
	Seq       int64
	Project   string
	Sandbox   string
	Operation string
	Type      string // "sandbox.ready", "operation.succeeded", "condition.set" …
	Actor     string // API key id, or "host"
	Key       string // the request key, where one was used
	Data      json.RawMessage
	At        time.Time
}

// Template is a named root image of a project. Its version is the digest of its
// contents; a build under the same name replaces it.
type Template struct {
	Project   string
	Name      string
	Digest    string
	Source    string // what it was built from, for people
	Bytes     int64
	User      string
	Workdir   string
	Env       map[string]string
	CreatedAt time.Time // of this version
}

// APIKey is a key as it is kept: never the secret, only its SHA-256.
type APIKey struct {
	ID        string
	Project   string
	Name      string
	Hash      []byte
	Prefix    string // first characters of the secret, to tell keys apart
	Scopes    string // what it may do, as control writes it
	CreatedAt time.Time
	ExpiresAt time.Time // zero is never
	RotatedAt time.Time // when its secret was last made anew; zero is never
	LastUsed  time.Time // zero is never
}

// Request is a remembered mutating call and what came of it.
type Request struct {
	Project   string
	Route     string
	Key       string
	BodyHash  []byte // SHA-256 of the canonical JSON body
	Outcome   string // a sandbox.Outcome: what the first call met
	Sandboxes []string
	Operation string
	Resource  string // the id of a key or the name of a template, for calls on those
	CreatedAt time.Time
}
