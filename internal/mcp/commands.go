package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// Bounds of an exec: how much of each stream is given, head and tail half each, and how
// long a call waits for the command's end.
const (
	maxOutput   = 64 << 10
	defaultWait = 2 * time.Minute
	maxWait     = time.Hour
)

type execIn struct {
	Sandbox string            `json:"sandbox" jsonschema:"name or id of the sandbox; a sleeping one is woken"`
	Command string            `json:"command,omitempty" jsonschema:"a shell line; or give args"`
	Args    []string          `json:"args,omitempty" jsonschema:"program and arguments, run without a shell"`
	Cwd     string            `json:"cwd,omitempty" jsonschema:"where it starts; /workspace where left out"`
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Timeout int               `json:"timeout_seconds,omitempty" jsonschema:"kill it after this time"`
	Wait    int               `json:"wait_seconds,omitempty" jsonschema:"how long this call waits for its end, 120 where left out; the command goes on after it"`
	Detach  bool              `json:"detach,omitempty" jsonschema:"return at once, as for a server"`
}

type outputIn struct {
	Sandbox string `json:"sandbox" jsonschema:"name or id of the sandbox"`
	ID      string `json:"id" jsonschema:"the command's id, as exec gave it"`
	Cursor  int64  `json:"cursor,omitempty" jsonschema:"the first byte that is wanted, as the last answer's cursor said; 0 is the beginning"`
	Wait    int    `json:"wait_seconds,omitempty" jsonschema:"how long to wait for its end; at once where left out"`
}

type ran struct {
	ID       string `json:"id"`
	Status   string `json:"status" jsonschema:"exited (exit_code is its own), running, or interrupted: the output was cut off, and how the command ended is not known"`
	ExitCode *int   `json:"exit_code,omitempty"`
	Signal   string `json:"signal,omitempty" jsonschema:"the signal that ended it"`
	Reason   string `json:"reason,omitempty"`
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
	Cursor   int64  `json:"cursor" jsonschema:"where command_output goes on"`
	Omitted  int64  `json:"omitted_bytes,omitempty" jsonschema:"bytes that fell out between head and tail"`
}

type killIn struct {
	Sandbox string `json:"sandbox" jsonschema:"name or id of the sandbox"`
	ID      string `json:"id" jsonschema:"the command's id"`
	Signal  string `json:"signal,omitempty" jsonschema:"a name or a number; TERM where left out"`
}

type killed struct {
	ID     string `json:"id"`
	Signal string `json:"signal"`
}

type commandsOut struct {
	Commands []commandLine `json:"commands"`
}

type commandLine struct {
	ID       string   `json:"id"`
	Command  []string `json:"command"`
	Running  bool     `json:"running"`
	ExitCode *int     `json:"exit_code,omitempty"`
	PID      int      `json:"pid"`
}

func (t *tools) addCommands(s *mcp.Server) {
	add(s, "exec", "Run a command in a sandbox and give its output and exit code. A long one goes on after wait_seconds; command_output reads on.", runs, t.exec)
	add(s, "command_output", "Read a command's output on from a cursor, and its exit code when it has ended. Wakes nothing.", looks, t.output)
	add(s, "command_kill", "Send a signal to a command and its children.", runs, func(ctx context.Context, in killIn) (killed, error) {
		if in.Signal == "" {
			in.Signal = "TERM"
		}
		return killed{in.ID, in.Signal}, done(t.api.SignalCommand(ctx, in.Sandbox, in.ID, api.SignalCommand{Signal: in.Signal}))
	})
	add(s, "commands", "List the commands of a sandbox since its last boot, those that run and those that have ended.", looks, t.commands)
}

func (t *tools) commands(ctx context.Context, in boxIn) (commandsOut, error) {
	out := commandsOut{Commands: []commandLine{}}
	for cursor := ""; ; {
		page, err := read[api.CommandList](t.api.ListCommands(ctx, in.Sandbox, &api.ListCommandsParams{Limit: new(api.Limit(100)), Cursor: cursor}))
		if err != nil {
			return out, err
		}
		for _, c := range page.Commands {
			line := commandLine{ID: c.ID, Command: c.Command, Running: c.Exit == nil, PID: c.PID}
			if c.Exit != nil {
				line.ExitCode = &c.Exit.Code
			}
			out.Commands = append(out.Commands, line)
		}
		if cursor = page.NextCursor; cursor == "" {
			return out, nil
		}
	}
}

func (t *tools) exec(ctx context.Context, in execIn) (ran, error) {
	if (in.Command == "") == (len(in.Args) == 0) {
		return ran{}, fault.New(fault.InvalidArgument, "give either command, a shell line, or args, a program with its arguments")
	}
	body := api.StartCommand{
		Command: api.CommandLine{Args: in.Args, Shell: in.Command}, Cwd: in.Cwd, Env: in.Env, User: in.User, TimeoutSeconds: in.Timeout, Detach: in.Detach,
	}
	params := &api.StartCommandParams{IdempotencyKey: key()}
	if in.Detach {
		c, err := read[api.Command](t.api.StartCommand(ctx, in.Sandbox, params, body))
		return ran{ID: c.ID, Status: "running"}, err
	}
	params.Follow = true
	wait := defaultWait
	if in.Wait > 0 {
		wait = min(time.Duration(in.Wait)*time.Second, maxWait)
	}
	f := &following{tools: t, ref: in.Sandbox}
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	err := f.take(t.api.StartCommand(limited, in.Sandbox, params, body, lines))
	if err != nil && f.id == "" {
		return ran{}, f.unknown(ctx, err)
	}
	return f.on(ctx, limited, err)
}

func (t *tools) output(ctx context.Context, in outputIn) (ran, error) {
	f := &following{tools: t, ref: in.Sandbox, id: in.ID, cursor: in.Cursor}
	if in.Wait <= 0 {
		err := f.take(t.api.GetCommandOutput(ctx, in.Sandbox, in.ID, &api.GetCommandOutputParams{Cursor: in.Cursor}, lines))
		if errors.Is(err, io.EOF) { // what was written by now ends so
			err = nil
		}
		if err != nil {
			return ran{}, err
		}
		return f.result("running"), nil
	}
	limited, cancel := context.WithTimeout(ctx, min(time.Duration(in.Wait)*time.Second, maxWait))
	defer cancel()
	return f.on(ctx, limited, errCut)
}

// lines asks for a stream of JSON lines.
func lines(_ context.Context, req *http.Request) error {
	req.Header.Set("Accept", "application/x-ndjson")
	return nil
}

// errCut says that a stream ended before it said so.
var errCut = errors.New("the stream was cut off")

// following is a command whose output is being read, each byte once.
type following struct {
	*tools
	ref, id        string
	cursor         int64
	exit           *api.Exit
	stdout, stderr kept
}

// take reads one stream, to the command's end or its own.
func (f *following) take(resp *http.Response, err error) error {
	body, err := open(resp, err)
	if err != nil {
		return err
	}
	defer body.Close()
	dec := json.NewDecoder(body)
	for f.exit == nil {
		var e api.CommandEvent
		if err := dec.Decode(&e); err != nil {
			return fmt.Errorf("%w: %w", errCut, err)
		}
		switch {
		case e.Started != nil:
			f.id = e.Started.ID
		case e.Error != nil:
			return &fault.Fault{Kind: fault.Kind(e.Error.Code), Message: e.Error.Message, Reason: e.Error.Reason}
		case e.Exit != nil:
			f.exit = e.Exit
		case e.Gap != nil && e.Gap.To > f.cursor:
			f.stdout.omitted += e.Gap.To - max(e.Gap.From, f.cursor)
			f.cursor = e.Gap.To
		case e.Stream != "" && e.Cursor != nil:
			skip := f.cursor - *e.Cursor
			if skip >= int64(len(e.Data)) || skip < 0 && len(e.Data) == 0 {
				continue
			}
			data := e.Data[max(skip, 0):]
			f.cursor = *e.Cursor + int64(len(e.Data))
			if e.Stream == api.CommandEventStreamStderr {
				f.stderr.write(data)
			} else {
				f.stdout.write(data)
			}
		}
	}
	return nil
}

// on takes a stream up again where it was cut, until the command's end or the time is
// over. What cannot be known is told as it is: running, or interrupted.
func (f *following) on(ctx, limited context.Context, err error) (ran, error) {
	for lost := 0; err != nil && limited.Err() == nil; {
		if !errors.Is(err, errCut) && !fault.Is(err, fault.Unavailable) {
			if lost == 0 && f.stdout.total == 0 && f.stderr.total == 0 && ctx.Err() == nil {
				return ran{}, err // refused, as a command that is not known
			}
			out := f.result("interrupted")
			out.Reason = fault.Of(err).Message
			return out, nil
		}
		if lost++; lost > 10 {
			out := f.result("interrupted")
			out.Reason = "the server does not answer; command_output goes on from the cursor"
			return out, nil
		}
		before := f.cursor
		if lost > 1 {
			select {
			case <-limited.Done():
			case <-time.After(time.Second):
			}
		}
		err = f.take(f.api.GetCommandOutput(limited, f.ref, f.id, &api.GetCommandOutputParams{Cursor: f.cursor, Follow: true}, lines))
		if f.cursor > before {
			lost = 0
		}
	}
	if ctx.Err() != nil {
		return ran{}, ctx.Err()
	}
	return f.result("running"), nil
}

// unknown is the fault of a start of which no word came back.
func (f *following) unknown(ctx context.Context, err error) error {
	if ctx.Err() == nil && !errors.Is(err, errCut) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fault.Wrap(err, fault.Unavailable, "the answer was cut off before the command was known to run; `commands` lists what runs in %s", f.ref)
}

func (f *following) result(status string) ran {
	out := ran{
		ID: f.id, Status: status, Stdout: f.stdout.String(), Stderr: f.stderr.String(), Cursor: f.cursor,
		Omitted: f.stdout.omitted + f.stderr.omitted,
	}
	if f.exit != nil {
		out.Status, out.ExitCode, out.Signal, out.Reason = "exited", &f.exit.Code, f.exit.Signal, f.exit.Reason
	}
	return out
}

// kept is the head and the tail of a stream.
type kept struct {
	head, tail     []byte
	total, omitted int64
}

func (k *kept) write(p []byte) {
	k.total += int64(len(p))
	n := min(len(p), maxOutput/2-len(k.head))
	k.head = append(k.head, p[:n]...)
	k.tail = append(k.tail, p[n:]...)
	if over := len(k.tail) - maxOutput/2; over > 0 {
		k.tail = append(k.tail[:0], k.tail[over:]...)
		k.omitted += int64(over)
	}
}

// String is the text, with a line where bytes fell out.
func (k *kept) String() string {
	text := string(k.head)
	if k.omitted > 0 {
		text += fmt.Sprintf("\n[%d bytes left out]\n", k.omitted)
	}
	return strings.ToValidUTF8(text+string(k.tail), "\uFFFD")
}
