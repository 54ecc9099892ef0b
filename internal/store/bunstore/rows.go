package bunstore

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// millis is an instant in the database; 0 is written as NULL where the column may be.
func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func instant(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms).UTC()
}

// text is what every database takes as text: UTF-8 without zero bytes. What a guest or
// a host said must not keep a row from being written.
func text(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// encode writes a value that always can be written as JSON: maps, slices and structs
// of strings and numbers.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("bunstore: encode %T: %v", v, err))
	}
	return string(b)
}

type sandboxRow struct {
	bun.BaseModel `bun:"table:sandboxes,alias:s"`

	ID              string `bun:",pk"`
	Project         string
	Name            string
	State           string
	Reason          string
	Message         string
	Conditions      string
	Generation      int64
	Host            string
	HostSeq         int64
	Template        string
	TemplateVersion string
	Spec            string
	CPUs            int64 `bun:"cpus"`
	MemoryBytes     int64
	DiskBytes       int64
	OriginKind      string
	OriginSource    string
	OriginMode      string
	Policy          string
	PolicyChange    int64
	PolicyRestart   bool
	PolicyKeep      bool
	DeadlineAt      int64 `bun:",nullzero"`
	TimersFrom      int64 `bun:",nullzero"`
	ArchiveAt       int64 `bun:",nullzero"`
	DeleteAt        int64 `bun:",nullzero"`
	ArchiveWaits    bool
	DueAt           int64 `bun:",nullzero"`
	Started         bool
	CreatedAt       int64
	UpdatedAt       int64
	StateSince      int64
	SavedAt         int64 `bun:",nullzero"`
	DeletedAt       int64 `bun:",nullzero"`
	EraseAt         int64 `bun:",nullzero"`
	Version         int64
}

func rowOfSandbox(s sandbox.Sandbox) *sandboxRow {
	conditions := s.Conditions
	if conditions == nil {
		conditions = []sandbox.Condition{}
	}
	return &sandboxRow{
		ID: s.ID, Project: s.Project, Name: s.Name,
		State: string(s.State), Reason: text(s.Reason), Message: text(s.Message), Conditions: encode(conditions),
		Generation: s.Generation, Host: s.Host, HostSeq: s.HostSeq,
		Template: s.Spec.Template, TemplateVersion: s.Spec.Version, Spec: encode(s.Spec),
		CPUs: int64(s.Spec.CPUs), MemoryBytes: s.Spec.Memory, DiskBytes: s.Spec.Disk,
		OriginKind: s.Origin.Kind, OriginSource: s.Origin.Source, OriginMode: s.Origin.Mode,
		Policy: encode(s.Policy), PolicyChange: s.PolicyChange, PolicyRestart: s.PolicyRestart, PolicyKeep: s.PolicyKeep, DeadlineAt: millis(s.Deadline),
		TimersFrom: millis(s.TimersFrom), ArchiveAt: millis(s.ArchiveAt), DeleteAt: millis(s.DeleteAt), ArchiveWaits: s.ArchiveWaits,
		DueAt: millis(s.RestDue()), Started: s.Started, CreatedAt: millis(s.CreatedAt), UpdatedAt: millis(s.UpdatedAt), StateSince: millis(s.StateSince),
		SavedAt: millis(s.SavedAt), DeletedAt: millis(s.DeletedAt), EraseAt: millis(s.EraseAt), Version: s.Version,
	}
}

func (r *sandboxRow) sandbox() (sandbox.Sandbox, error) {
	s := sandbox.Sandbox{
		ID: r.ID, Project: r.Project, Name: r.Name,
		State: sandbox.State(r.State), Reason: r.Reason, Message: r.Message,
		Generation: r.Generation, Host: r.Host, HostSeq: r.HostSeq,
		Origin: sandbox.Origin{Kind: r.OriginKind, Source: r.OriginSource, Mode: r.OriginMode},
		Policy: sandbox.PolicyBefore(), PolicyChange: r.PolicyChange, PolicyRestart: r.PolicyRestart, PolicyKeep: r.PolicyKeep, Deadline: instant(r.DeadlineAt),
		TimersFrom: instant(r.TimersFrom), ArchiveAt: instant(r.ArchiveAt), DeleteAt: instant(r.DeleteAt), ArchiveWaits: r.ArchiveWaits,
		Started: r.Started, CreatedAt: instant(r.CreatedAt), UpdatedAt: instant(r.UpdatedAt), StateSince: instant(r.StateSince),
		SavedAt: instant(r.SavedAt), DeletedAt: instant(r.DeletedAt), EraseAt: instant(r.EraseAt), Version: r.Version,
	}
	if err := json.Unmarshal([]byte(r.Spec), &s.Spec); err != nil {
		return s, fmt.Errorf("bunstore: the spec of %s: %w", r.ID, err)
	}
	if r.Policy != "" { // else it is from before there were timers
		s.Policy = sandbox.Policy{}
		if err := json.Unmarshal([]byte(r.Policy), &s.Policy); err != nil {
			return s, fmt.Errorf("bunstore: the policy of %s: %w", r.ID, err)
		}
	}
	if err := json.Unmarshal([]byte(r.Conditions), &s.Conditions); err != nil {
		return s, fmt.Errorf("bunstore: the conditions of %s: %w", r.ID, err)
	}
	if len(s.Conditions) == 0 {
		s.Conditions = nil
	}
	return s, nil
}

type labelRow struct {
	bun.BaseModel `bun:"table:sandbox_labels,alias:l"`

	Sandbox string `bun:",pk"`
	Key     string `bun:",pk"`
	Value   string
}

type operationRow struct {
	bun.BaseModel `bun:"table:operations,alias:o"`

	ID         string `bun:",pk"`
	Project    string
	Sandbox    string `bun:",nullzero"`
	Kind       string
	Status     string
	Step       string
	Progress   float64
	Generation int64
	Params     string `bun:",nullzero"`
	Result     string `bun:",nullzero"`
	Error      string `bun:",nullzero"`
	Timings    string `bun:",nullzero"`
	Actor      string
	CreatedAt  int64
	StartedAt  int64 `bun:",nullzero"`
	EndedAt    int64 `bun:",nullzero"`
	CancelAt   int64 `bun:",nullzero"`
	Version    int64
}

func rowOfOperation(op sandbox.Operation) *operationRow {
	r := &operationRow{
		ID: op.ID, Project: op.Project, Sandbox: op.Sandbox, Kind: string(op.Kind), Status: string(op.Status),
		Step: text(op.Step), Progress: op.Progress, Generation: op.Generation,
		Params: string(op.Params), Result: string(op.Result), Actor: op.Actor,
		CreatedAt: millis(op.CreatedAt), StartedAt: millis(op.StartedAt), EndedAt: millis(op.EndedAt), CancelAt: millis(op.CancelAt), Version: op.Version,
	}
	if op.Error != nil {
		r.Error = encode(op.Error)
	}
	if len(op.Timings) > 0 {
		r.Timings = encode(op.Timings)
	}
	return r
}

func (r *operationRow) operation() (sandbox.Operation, error) {
	op := sandbox.Operation{
		ID: r.ID, Project: r.Project, Sandbox: r.Sandbox, Kind: sandbox.Verb(r.Kind), Status: sandbox.OperationStatus(r.Status),
		Step: r.Step, Progress: r.Progress, Generation: r.Generation, Params: raw(r.Params), Result: raw(r.Result), Actor: r.Actor,
		CreatedAt: instant(r.CreatedAt), StartedAt: instant(r.StartedAt), EndedAt: instant(r.EndedAt), CancelAt: instant(r.CancelAt), Version: r.Version,
	}
	if r.Error != "" {
		if err := json.Unmarshal([]byte(r.Error), &op.Error); err != nil {
			return op, fmt.Errorf("bunstore: the error of %s: %w", r.ID, err)
		}
	}
	if r.Timings != "" {
		if err := json.Unmarshal([]byte(r.Timings), &op.Timings); err != nil {
			return op, fmt.Errorf("bunstore: the timings of %s: %w", r.ID, err)
		}
	}
	return op, nil
}

// raw is JSON text as it is; "" is none.
func raw(s string) json.RawMessage {
	if s == "" {
		return nil
	}
	return json.RawMessage(s)
}

type identityRow struct {
	bun.BaseModel `bun:"table:identities,alias:i"`

	Sandbox string `bun:",pk"`
	Items   string
}

// EventRow is an event as it is kept.
type EventRow struct {
	bun.BaseModel `bun:"table:events,alias:e"`

	Seq       int64  `bun:",pk"`
	UID       string `bun:"uid"`
	Project   string
	Sandbox   string
	Operation string
	Type      string
	Actor     string
	Key       string
	Data      string `bun:",nullzero"`
	At        int64
}

func rowOfEvent(e store.Event) EventRow {
	return EventRow{
		UID: e.ID, Project: e.Project, Sandbox: e.Sandbox, Operation: e.Operation, Type: e.Type,
		Actor: text(e.Actor), Key: text(e.Key), Data: string(e.Data), At: millis(e.At),
	}
}

func (r *EventRow) event() store.Event {
	return store.Event{
		ID: r.UID, Seq: r.Seq, Project: r.Project, Sandbox: r.Sandbox, Operation: r.Operation, Type: r.Type,
		Actor: r.Actor, Key: r.Key, Data: raw(r.Data), At: instant(r.At),
	}
}

type templateRow struct {
	bun.BaseModel `bun:"table:templates,alias:t"`

	Project   string `bun:",pk"`
	Name      string `bun:",pk"`
	Digest    string
	Source    string
	Bytes     int64
	UserName  string
	Workdir   string
	Env       string
	CreatedAt int64
}

func rowOfTemplate(t store.Template) *templateRow {
	env := t.Env
	if env == nil {
		env = map[string]string{}
	}
	return &templateRow{
		Project: t.Project, Name: t.Name, Digest: text(t.Digest), Source: text(t.Source), Bytes: t.Bytes,
		UserName: text(t.User), Workdir: text(t.Workdir), Env: encode(env), CreatedAt: millis(t.CreatedAt),
	}
}

func (r *templateRow) template() (store.Template, error) {
	t := store.Template{
		Project: r.Project, Name: r.Name, Digest: r.Digest, Source: r.Source, Bytes: r.Bytes,
		User: r.UserName, Workdir: r.Workdir, CreatedAt: instant(r.CreatedAt),
	}
	if err := json.Unmarshal([]byte(r.Env), &t.Env); err != nil {
		return t, fmt.Errorf("bunstore: the environment of template %s: %w", r.Name, err)
	}
	return t, nil
}

type keyRow struct {
	bun.BaseModel `bun:"table:api_keys,alias:k"`

	ID        string `bun:",pk"`
	Project   string
	Name      string
	Hash      string // hex
	Prefix    string
	Scopes    string
	CreatedAt int64
	ExpiresAt int64 `bun:",nullzero"`
	RotatedAt int64 `bun:",nullzero"`
	LastUsed  int64 `bun:",nullzero"`
}

func rowOfKey(k store.APIKey) *keyRow {
	return &keyRow{
		ID: k.ID, Project: k.Project, Name: text(k.Name), Hash: hex.EncodeToString(k.Hash), Prefix: k.Prefix, Scopes: k.Scopes,
		CreatedAt: millis(k.CreatedAt), ExpiresAt: millis(k.ExpiresAt), RotatedAt: millis(k.RotatedAt), LastUsed: millis(k.LastUsed),
	}
}

func (r *keyRow) key() (store.APIKey, error) {
	hash, err := hex.DecodeString(r.Hash)
	if err != nil {
		return store.APIKey{}, fmt.Errorf("bunstore: the hash of %s: %w", r.ID, err)
	}
	return store.APIKey{
		ID: r.ID, Project: r.Project, Name: r.Name, Hash: hash, Prefix: r.Prefix, Scopes: r.Scopes,
		CreatedAt: instant(r.CreatedAt), ExpiresAt: instant(r.ExpiresAt), RotatedAt: instant(r.RotatedAt), LastUsed: instant(r.LastUsed),
	}, nil
}

type requestRow struct {
	bun.BaseModel `bun:"table:requests,alias:r"`

	Project   string `bun:",pk"`
	Route     string `bun:",pk"`
	Key       string `bun:",pk"`
	BodyHash  string // hex
	Outcome   string
	Sandboxes string
	Operation string
	Resource  string
	CreatedAt int64
}

func rowOfRequest(r store.Request) *requestRow {
	ids := r.Sandboxes
	if ids == nil {
		ids = []string{}
	}
	return &requestRow{
		Project: r.Project, Route: text(r.Route), Key: text(r.Key), BodyHash: hex.EncodeToString(r.BodyHash), Outcome: r.Outcome,
		Sandboxes: encode(ids), Operation: r.Operation, Resource: text(r.Resource), CreatedAt: millis(r.CreatedAt),
	}
}

func (r *requestRow) request() (store.Request, error) {
	out := store.Request{
		Project: r.Project, Route: r.Route, Key: r.Key, Outcome: r.Outcome,
		Operation: r.Operation, Resource: r.Resource, CreatedAt: instant(r.CreatedAt),
	}
	hash, err := hex.DecodeString(r.BodyHash)
	if err == nil {
		out.BodyHash = hash
		err = json.Unmarshal([]byte(r.Sandboxes), &out.Sandboxes)
	}
	if err != nil {
		return out, fmt.Errorf("bunstore: the remembered request %s: %w", r.Key, err)
	}
	return out, nil
}
