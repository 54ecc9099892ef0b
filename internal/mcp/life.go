package mcp

import (
	"context"
	"net/http"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/hutchrun/hutch/api"
)

// box is a sandbox as the tools tell it.
type box struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	State    string `json:"state" jsonschema:"ready, sleeping, stopped, failed, or a state on the way to one of these"`
	Reason   string `json:"reason,omitempty"`
	Message  string `json:"message,omitempty" jsonschema:"why it is in that state"`
	Template string `json:"template"`
	StopsAt  string `json:"stops_at,omitempty" jsonschema:"when its auto-stop ends it (RFC 3339), where it has one"`
}

func boxOf(sb api.Sandbox) box {
	b := box{ID: sb.ID, Name: sb.Name, State: string(sb.State), Reason: sb.Reason, Message: sb.Message, Template: sb.Template}
	if at := sb.Deadline.At; at != nil {
		b.StopsAt = at.UTC().Format(time.RFC3339)
	}
	return b
}

type boxIn struct {
	Sandbox string `json:"sandbox" jsonschema:"name or id of the sandbox"`
}

type newIn struct {
	Name       string            `json:"name,omitempty" jsonschema:"a name of your choice; made up where left out"`
	Template   string            `json:"template,omitempty" jsonschema:"what it starts from; base where left out"`
	CPUs       int64             `json:"cpus,omitempty"`
	MemoryMiB  int64             `json:"memory_mib,omitempty"`
	DiskMB     int64             `json:"disk_mb,omitempty"`
	Env        map[string]string `json:"env,omitempty" jsonschema:"variables of all its commands"`
	TTLSeconds int64             `json:"ttl_seconds,omitempty" jsonschema:"the auto-stop: it is stopped this long after its start"`
}

type forkIn struct {
	Sandbox string `json:"sandbox" jsonschema:"name or id of the sandbox to copy"`
	Count   int64  `json:"count,omitempty" jsonschema:"how many copies, 1 to 100; 1 where left out"`
	Name    string `json:"name,omitempty" jsonschema:"the copy's name; several get -1, -2 … after it"`
	Mode    string `json:"mode,omitempty" jsonschema:"live (memory and disk, the default) or disk (the disk alone, which boots)"`
}

type forkOut struct {
	Forks []box `json:"forks"`
}

type deleteIn struct {
	Sandbox   string `json:"sandbox" jsonschema:"name or id of the sandbox"`
	Permanent bool   `json:"permanent,omitempty" jsonschema:"erase the disk at once, with no way back; otherwise it can be brought back for a time"`
}

type deleted struct {
	Deleted string `json:"deleted"`
}

type listIn struct {
	State  string `json:"state,omitempty" jsonschema:"only those in this state, such as ready or sleeping"`
	Cursor string `json:"cursor,omitempty" jsonschema:"next_cursor of the page before"`
}

type listOut struct {
	Sandboxes  []box  `json:"sandboxes"`
	NextCursor string `json:"next_cursor,omitempty"`
}

func (t *tools) addLife(s *mcp.Server) {
	add(s, "new", "Make a sandbox and wait until it is ready.", changes, t.create)
	add(s, "list", "List the sandboxes, a page of 100 at a time.", looks, t.list)
	add(s, "get", "Describe a sandbox. Wakes nothing.", looks, func(ctx context.Context, in boxIn) (box, error) {
		sb, err := read[api.Sandbox](t.api.GetSandbox(ctx, in.Sandbox, &api.GetSandboxParams{}))
		return boxOf(sb), err
	})
	add(s, "sleep", "Save a sandbox's memory and disk and give its RAM back. Any later exec or file call goes on where it was.", changes,
		t.verb(func(ctx context.Context, ref string) (*http.Response, error) {
			return t.api.SleepSandbox(ctx, ref, &api.SleepSandboxParams{IdempotencyKey: key()})
		}))
	add(s, "wake", "Bring a sleeping sandbox back with its programs as they were.", changes,
		t.verb(func(ctx context.Context, ref string) (*http.Response, error) {
			return t.api.WakeSandbox(ctx, ref, &api.WakeSandboxParams{IdempotencyKey: key()}, api.Boot{})
		}))
	add(s, "stop", "End a sandbox's programs and keep its disk.", destroys,
		t.verb(func(ctx context.Context, ref string) (*http.Response, error) {
			return t.api.StopSandbox(ctx, ref, &api.StopSandboxParams{IdempotencyKey: key()})
		}))
	add(s, "resume", "Boot a stopped sandbox from its disk.", changes,
		t.verb(func(ctx context.Context, ref string) (*http.Response, error) {
			return t.api.ResumeSandbox(ctx, ref, &api.ResumeSandboxParams{IdempotencyKey: key()}, api.Boot{})
		}))
	add(s, "fork", "Copy a sandbox as it is now, running programs included, and wait until the copies are ready.", changes, t.fork)
	add(s, "delete", "Delete a sandbox, whatever its state.", destroys, func(ctx context.Context, in deleteIn) (deleted, error) {
		ch, err := read[api.Change](t.api.DeleteSandbox(ctx, in.Sandbox, &api.DeleteSandboxParams{IdempotencyKey: key(), Permanent: in.Permanent}))
		if err == nil {
			err = t.await(ctx, ch.Operation)
		}
		return deleted{ch.Sandbox.ID}, err
	})
}

// verb makes a tool's function of a call that changes one sandbox: it waits for the end
// and tells what there is then.
func (t *tools) verb(call func(ctx context.Context, ref string) (*http.Response, error)) func(context.Context, boxIn) (box, error) {
	return func(ctx context.Context, in boxIn) (box, error) { return t.settled(ctx)(call(ctx, in.Sandbox)) }
}

func (t *tools) settled(ctx context.Context) func(*http.Response, error) (box, error) {
	return func(resp *http.Response, err error) (box, error) {
		ch, err := read[api.Change](resp, err)
		if err == nil {
			err = t.await(ctx, ch.Operation)
		}
		if err != nil {
			return box{}, err
		}
		sb, err := read[api.Sandbox](t.api.GetSandbox(ctx, ch.Sandbox.ID, &api.GetSandboxParams{}))
		return boxOf(sb), err
	}
}

func (t *tools) create(ctx context.Context, in newIn) (box, error) {
	body := api.CreateSandbox{Name: in.Name, Template: in.Template, Env: in.Env}
	if in.CPUs != 0 {
		body.CPUs = &in.CPUs
	}
	if in.MemoryMiB != 0 {
		body.MemoryBytes = new(in.MemoryMiB << 20)
	}
	if in.DiskMB != 0 {
		body.DiskBytes = new(in.DiskMB * 1_000_000)
	}
	if in.TTLSeconds != 0 {
		body.TTLSeconds = api.SecondsOf(&in.TTLSeconds)
	}
	return t.settled(ctx)(t.api.CreateSandbox(ctx, &api.CreateSandboxParams{IdempotencyKey: key()}, body))
}

func (t *tools) list(ctx context.Context, in listIn) (listOut, error) {
	params := &api.ListSandboxesParams{Cursor: in.Cursor}
	if in.State != "" {
		params.State = []api.State{api.State(in.State)}
	}
	page, err := read[api.SandboxList](t.api.ListSandboxes(ctx, params))
	out := listOut{Sandboxes: []box{}, NextCursor: page.NextCursor}
	for _, sb := range page.Sandboxes {
		out.Sandboxes = append(out.Sandboxes, boxOf(sb))
	}
	return out, err
}

func (t *tools) fork(ctx context.Context, in forkIn) (forkOut, error) {
	out := forkOut{Forks: []box{}}
	body := api.ForkSandbox{Name: in.Name, Mode: api.ForkSandboxMode(in.Mode)}
	if in.Count != 0 {
		body.Count = &in.Count
	}
	res, err := read[api.ForkResult](t.api.ForkSandbox(ctx, in.Sandbox, &api.ForkSandboxParams{IdempotencyKey: key()}, body))
	if err == nil {
		err = t.await(ctx, &res.Operation)
	}
	if err != nil {
		return out, err
	}
	for _, f := range res.Forks {
		sb, err := read[api.Sandbox](t.api.GetSandbox(ctx, f.Sandbox.ID, &api.GetSandboxParams{}))
		if err == nil && sb.Operation != nil { // its own start, after the capture
			if err = t.await(ctx, sb.Operation); err == nil {
				sb, err = read[api.Sandbox](t.api.GetSandbox(ctx, f.Sandbox.ID, &api.GetSandboxParams{}))
			}
		}
		if err != nil {
			return out, err
		}
		out.Forks = append(out.Forks, boxOf(sb))
	}
	return out, nil
}
