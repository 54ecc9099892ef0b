package apiserver

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// hostView is what of a host is shown with its sandboxes.
type hostView struct {
	capable api.Capabilities
	ahead   time.Duration // of the host's time, to the wall clock
}

// shown is an instant of the host's time as the wall clock has it; null for the zero one.
func (h hostView) shown(t time.Time) *api.Timestamp {
	if t.IsZero() {
		return nil
	}
	return api.AtOrNil(t.Add(-h.ahead))
}

// sandboxOf is a sandbox in the API's words. hosts says what is known of its host.
func sandboxOf(v control.View, hosts map[string]hostView) api.Sandbox {
	s := v.Sandbox
	host := hosts[s.Host]
	out := api.Sandbox{
		ID: s.ID, Name: s.Name, State: api.State(s.State), Reason: s.Reason, Message: s.Message,
		Conditions: make([]api.Condition, 0, len(s.Conditions)), Generation: s.Generation, Host: s.Host,
		Template: s.Spec.Template, TemplateVersion: s.Spec.Version, Runtime: s.Spec.Runtime,
		CPUs: s.Spec.CPUs, MemoryBytes: s.Spec.Memory, DiskBytes: s.Spec.Disk, Labels: s.Labels,
		Origin: api.Origin{Kind: api.OriginKind(s.Origin.Kind), Source: s.Origin.Source, Mode: api.OriginMode(s.Origin.Mode)},
		Sleep:  sleepShown(s.Spec.Sleep, s.Policy.IdleAfter, s.Policy.SleepDeadline), OnIdle: api.OnIdle(s.Policy.OnIdle), Workspace: api.Workspace{SavedAt: api.AtOrNil(s.SavedAt)},
		Deadline:     api.Deadline{At: host.shown(s.Deadline), Pending: s.PolicyChange != 0},
		ArchiveAfter: secondsOf(s.Policy.ArchiveAfter), Archive: api.Archive{At: host.shown(s.ArchiveAt)},
		DeleteAfter: secondsOf(s.Policy.DeleteAfter), DeleteAt: host.shown(s.DeleteAt),
		Capabilities: host.capable, CreatedAt: api.At(s.CreatedAt), UpdatedAt: api.At(s.UpdatedAt),
		StateSince: api.At(s.StateSince), DeletedAt: api.AtOrNil(s.DeletedAt), UndeleteUntil: host.shown(s.EraseAt),
	}
	out.TTLSeconds, out.OnDeadline = secondsOf(s.Policy.TTL), api.OnDeadline(s.Policy.OnDeadline)
	if s.ArchiveWaits {
		out.Archive.Waiting = api.ArchiveWaitingNoBlobStore
	}
	if out.Labels == nil {
		out.Labels = api.Labels{}
	}
	for _, c := range s.Conditions {
		out.Conditions = append(out.Conditions, api.Condition{
			Type: api.ConditionType(c.Type), Reason: c.Reason, Message: c.Message, Since: api.At(c.Since),
		})
	}
	if v.Operation != nil && v.Operation.Status.Active() {
		out.Operation = operationOf(v.Operation)
	}
	return out
}

// secondsOf is a length of time that 0 means none of.
func secondsOf(d time.Duration) *int64 {
	if d == 0 {
		return nil
	}
	n := int64(d / time.Second)
	return &n
}

// operationOf gives nil for nil.
func operationOf(op *sandbox.Operation) *api.Operation {
	if op == nil {
		return nil
	}
	out := &api.Operation{
		ID: op.ID, Sandbox: op.Sandbox, Kind: string(op.Kind), Status: api.OperationStatus(op.Status), Step: op.Step,
		Progress: min(max(op.Progress, 0), 1), Actor: op.Actor, RequestID: control.OriginOf(*op).Request, CreatedAt: api.At(op.CreatedAt),
		StartedAt: api.AtOrNil(op.StartedAt), EndedAt: api.AtOrNil(op.EndedAt), CancelRequestedAt: api.AtOrNil(op.CancelAt),
	}
	out.Timings = []api.StepTime{}
	for _, t := range op.Timings {
		out.Timings = append(out.Timings, api.StepTime{Step: t.Step, Milliseconds: max(t.Milliseconds, 0)})
	}
	if op.Error != nil {
		out.Error = &api.OperationError{Code: api.ErrorCode(op.Error.Code), Message: op.Error.Message, Reason: op.Error.Reason}
	}
	return out
}

var outcomes = map[sandbox.Outcome]api.Outcome{
	sandbox.Accept: api.OutcomeStarted, sandbox.Join: api.OutcomeJoined, sandbox.Done: api.OutcomeDone,
}

func eventOf(e control.Event) api.Event {
	data := e.Data
	if len(data) == 0 {
		data = json.RawMessage("null")
	}
	return api.Event{
		ID: e.ID, Seq: e.Seq, Type: e.Type, Sandbox: e.Sandbox, Operation: e.Operation, Actor: e.Actor, Key: e.Key, Data: data, At: api.At(e.At),
	}
}

func templateOf(t control.Template) api.Template {
	return api.Template{
		Name: t.Name, Version: t.Digest, Source: t.Source, Bytes: t.Bytes, User: t.User, Workdir: t.Workdir, CreatedAt: api.At(t.CreatedAt),
	}
}

func keyOf(k control.APIKey) api.Key {
	out := api.Key{
		ID: k.ID, Project: k.Project, Name: k.Name, Prefix: k.Prefix, Scopes: []api.Scope{}, CreatedAt: api.At(k.CreatedAt),
		ExpiresAt: api.AtOrNil(k.ExpiresAt), RotatedAt: api.AtOrNil(k.RotatedAt), LastUsedAt: api.AtOrNil(k.LastUsed),
	}
	for _, name := range k.Scopes.Names() {
		out.Scopes = append(out.Scopes, api.Scope(name))
	}
	return out
}

func capabilitiesOf(h control.HostInfo) api.Capabilities {
	return api.Capabilities{MemorySnapshot: h.Memory, HeldRestore: h.HeldRestore}
}

func hostOf(h control.HostInfo) api.Host {
	out := api.Host{
		ID: h.ID, Runtimes: h.Runtimes, Capabilities: capabilitiesOf(h), CPUs: h.CPUs, MemoryBytes: h.MemoryBytes,
		DiskMaxBytes: h.DiskMaxBytes, PoolBytes: h.PoolBytes, PoolFreeBytes: h.PoolFree,
	}
	if out.Runtimes == nil {
		out.Runtimes = []string{}
	}
	return out
}

func hostDiskOf(h control.HostDisk) api.HostDisk {
	out := api.HostDisk{
		ID: h.ID, State: api.HostDiskStateOk, PoolBytes: h.PoolBytes, PoolFreeBytes: h.PoolFree, PoolInFile: h.PoolInFile,
		LowMarkBytes: h.LowMark, StopMarkBytes: h.StopMark, ReserveBytes: h.Reserve, DataBytes: h.DataBytes, DataFreeBytes: h.DataFree,
		MemoryQuotaBytes: h.MemoryQuota, OtherBytes: h.Other,
		Templates: shareOf(h.Templates), Forks: shareOf(h.Forks), Others: shareOf(h.Others), Unowned: shareOf(h.Unowned),
		Sandboxes: make([]api.SandboxDisk, 0, len(h.Mine)),
	}
	switch {
	case h.PoolFree < h.StopMark:
		out.State = api.HostDiskStateFull
	case h.PoolFree < h.LowMark:
		out.State = api.HostDiskStateLow
	}
	for _, d := range h.DiskReport.Sandboxes {
		out.DisksBytes += d.Allocated
		out.SavedMemoryBytes += d.Memory
	}
	for _, d := range h.Mine {
		one := api.SandboxDisk{
			Sandbox: d.Sandbox.ID, Name: d.Sandbox.Name, State: api.State(d.Sandbox.State),
			SizeBytes: d.Size, AllocatedBytes: d.Allocated, SavedMemoryBytes: d.Memory,
		}
		if d.Unique >= 0 {
			one.UniqueBytes = &d.Unique
		}
		out.Sandboxes = append(out.Sandboxes, one)
	}
	return out
}

func shareOf(s control.Share) api.Share { return api.Share{Count: s.Count, Bytes: s.Bytes} }

// limitDefault is the size of a page where none is asked for.
const limitDefault = 100

func limitOf(l *int64) int {
	if l == nil {
		return limitDefault
	}
	return int(*l)
}

// encodeCursor and decodeCursor make a cursor opaque, for the lists that are made here.
func encodeCursor(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) }

func decodeCursor(s string) (string, error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err != nil {
		return "", badCursor()
	}
	return string(b), nil
}

func badCursor() error {
	return fault.New(fault.InvalidArgument, "the cursor is not one of this list's; begin again without it")
}

// maxWait is the longest that a call may wait for an operation.
const maxWait = 10 * time.Minute

// parseWait reads a wait as a duration or as seconds; "" is none. One that is longer
// than allowed is refused, never cut.
func parseWait(s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(s)
	if seconds, atoiErr := strconv.Atoi(s); atoiErr == nil && seconds >= 0 && seconds <= int(maxWait/time.Second) {
		d, err = time.Duration(seconds)*time.Second, nil
	}
	if err != nil || d < 0 || d > maxWait {
		return 0, fault.New(fault.InvalidArgument, "the parameter wait takes a duration from 0s to %s, as 60s, not %.40q",
			strings.TrimSuffix(maxWait.String(), "0s"), s)
	}
	return d, nil
}

// parseLabels reads key=value filters.
func parseLabels(list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, l := range list {
		if l == "" {
			continue
		}
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, fault.New(fault.InvalidArgument, "the parameter label takes key=value, not %.100q", l)
		}
		if old, twice := out[k]; twice && old != v {
			return nil, fault.New(fault.InvalidArgument, "the label %.100q is asked for with two values, which no sandbox has", k)
		}
		out[k] = v
	}
	return out, nil
}
