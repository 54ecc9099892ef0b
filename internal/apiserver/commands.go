package apiserver

import (
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// ndjson is the media type of a stream of JSON lines.
const ndjson = "application/x-ndjson"

// StartCommand runs a program and streams it where the client asks for a stream.
func (s *server) StartCommand(ctx context.Context, r StartCommandRequestObject) (StartCommandResponseObject, error) {
	b, use := r.Body, hostproto.UseCommand
	if b.Detach {
		use = hostproto.UseDetached
	}
	g, err := s.guest(ctx, r.Ref, use)
	if err != nil {
		return nil, err
	}
	req := &guestproto.StartRequest{
		Args: b.Command.Args, Shell: b.Command.Shell, Env: b.Env, Cwd: g.cwd(b.Cwd), User: b.User, Stdin: b.Stdin, Pty: window(b.Pty),
		Detach: b.Detach, Lossless: b.Lossless && !b.Detach, TimeoutNanos: int64(time.Duration(b.TimeoutSeconds) * time.Second),
		RequestKey: r.Params.IdempotencyKey,
	}
	o, err := openStream(ctx, g, func(ctx context.Context) (guestproto.CommandsStartClientStream, error) {
		return g.Commands.Start(ctx, req)
	})
	if err != nil {
		return nil, err
	}
	started := o.first.GetStarted()
	if started == nil {
		o.close()
		return nil, brokeProtocol(g.id)
	}
	if !callOf(ctx).accepts(ndjson) && !r.Params.Follow {
		o.close()
		command, err := g.command(ctx, started.Id)
		return StartCommand201JSONResponse(command), err
	}
	if !b.Detach {
		return s.follow(g, o, 0, noEnd), nil
	}
	o.close() // a detached one's ends here, but the client asked to follow
	if o, err = g.replay(ctx, started.Id, 0); err != nil {
		return nil, err
	}
	return s.follow(g, o, 0, noEnd), nil
}

// cwd is the directory that a command starts in: a relative one is below the
// sandbox's own.
func (g guest) cwd(dir string) string {
	if path.IsAbs(dir) || g.workdir == "" {
		return dir
	}
	return path.Join(g.workdir, dir)
}

// ListCommands lists what the agent knows, oldest first.
func (s *server) ListCommands(ctx context.Context, r ListCommandsRequestObject) (ListCommandsResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseLook)
	if err != nil {
		return nil, err
	}
	res, err := unary(ctx, g, guestTimeout, g.Commands.List, &guestproto.ListCommandsRequest{})
	if err != nil {
		return nil, err
	}
	after, err := decodeCursor(r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	all := res.Commands
	if after != "" {
		i := slices.IndexFunc(all, func(c *guestproto.Command) bool { return c.Id == after })
		if i < 0 {
			return nil, badCursor()
		}
		all = all[i+1:]
	}
	n := limitOf(r.Params.Limit)
	list := ListCommands200JSONResponse{Commands: []api.Command{}}
	for i, c := range all {
		if i == n {
			list.NextCursor = encodeCursor(all[i-1].Id)
			break
		}
		list.Commands = append(list.Commands, commandOf(g.id, c))
	}
	return list, nil
}

// GetCommand describes one command.
func (s *server) GetCommand(ctx context.Context, r GetCommandRequestObject) (GetCommandResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseLook)
	if err != nil {
		return nil, err
	}
	command, err := g.command(ctx, r.ID)
	return GetCommand200JSONResponse(command), err
}

func (g guest) command(ctx context.Context, id string) (api.Command, error) {
	res, err := unary(ctx, g, guestTimeout, g.Commands.Get, &guestproto.GetCommandRequest{Id: id})
	if err != nil {
		return api.Command{}, err
	}
	return commandOf(g.id, res.GetCommand()), nil
}

// GetCommandOutput replays output from a cursor, to what is there now or to the end.
func (s *server) GetCommandOutput(ctx context.Context, r GetCommandOutputRequestObject) (GetCommandOutputResponseObject, error) {
	use := hostproto.UseLook
	if r.Params.Follow {
		use = hostproto.UseFollow
	}
	g, err := s.guest(ctx, r.Ref, use)
	if err != nil {
		return nil, err
	}
	end := noEnd
	if !r.Params.Follow {
		command, err := g.command(ctx, r.ID)
		if err != nil {
			return nil, err
		}
		if command.Exit == nil {
			end = command.OutputBytes
		}
	}
	o, err := g.replay(ctx, r.ID, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	return s.follow(g, o, r.Params.Cursor, end), nil
}

// replay opens a command's stream from a cursor on.
func (g guest) replay(ctx context.Context, id string, cursor int64) (*opened, error) {
	return openStream(ctx, g, func(ctx context.Context) (guestproto.CommandsFollowClientStream, error) {
		return g.Commands.Follow(ctx, &guestproto.FollowRequest{Id: id, Cursor: cursor})
	})
}

// WriteCommandStdin hands the body on as it comes.
func (s *server) WriteCommandStdin(ctx context.Context, r WriteCommandStdinRequestObject) (WriteCommandStdinResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	var offset int64
	if r.Params.Offset != nil {
		offset = *r.Params.Offset
	} else {
		command, err := g.command(ctx, r.ID)
		if err != nil {
			return nil, err
		}
		offset = command.StdinOffset
	}
	buf := make([]byte, guestproto.Chunk)
	for {
		n, err := r.Body.Read(buf)
		for data := buf[:n]; len(data) > 0; {
			res, err := g.Commands.Input(ctx, &guestproto.InputRequest{Id: r.ID, Offset: offset, Data: data})
			if err != nil {
				return nil, g.failed(err)
			}
			taken := res.Offset - offset
			if taken <= 0 {
				return nil, brokeProtocol(g.id)
			}
			data = data[min(taken, int64(len(data))):]
			offset = res.Offset
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil { // cut short: the input stays open for a client that goes on from the offset
			return nil, fault.Wrap(err, fault.InvalidArgument, "the body did not come whole")
		}
	}
	if !r.Params.KeepOpen {
		res, err := g.Commands.Input(ctx, &guestproto.InputRequest{Id: r.ID, Offset: offset, Eof: true})
		if err != nil {
			return nil, g.failed(err)
		}
		offset = res.Offset
	}
	return WriteCommandStdin200JSONResponse{Offset: offset}, nil
}

// SignalCommand sends a signal.
func (s *server) SignalCommand(ctx context.Context, r SignalCommandRequestObject) (SignalCommandResponseObject, error) {
	signal, err := parseSignal(r.Body.Signal)
	if err != nil {
		return nil, err
	}
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	_, err = unary(ctx, g, guestTimeout, g.Commands.Signal, &guestproto.SignalRequest{Id: r.ID, Signal: signal})
	return SignalCommand204Response{}, err
}

// maxSignal is the last real-time signal of Linux (signal(7)).
const maxSignal = 64

func parseSignal(s string) (int32, error) {
	if n, err := strconv.Atoi(s); err == nil && n >= 1 && n <= maxSignal {
		return int32(n), nil
	}
	name := strings.ToUpper(s)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	if n := unix.SignalNum(name); n != 0 {
		return int32(n), nil
	}
	return 0, fault.New(fault.InvalidArgument, "%q is no signal; give a name as TERM or a number from 1 to %d", s, maxSignal)
}

// ResizeCommand changes a terminal's size.
func (s *server) ResizeCommand(ctx context.Context, r ResizeCommandRequestObject) (ResizeCommandResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	_, err = unary(ctx, g, guestTimeout, g.Commands.Resize, &guestproto.ResizeRequest{Id: r.ID, Size: window(r.Body)})
	return ResizeCommand204Response{}, err
}

func window(w *api.WindowSize) *guestproto.WindowSize {
	if w == nil {
		return nil
	}
	return &guestproto.WindowSize{Rows: uint32(w.Rows), Cols: uint32(w.Cols)} //nolint:gosec // the contract bounds both
}

func commandOf(sandbox string, c *guestproto.Command) api.Command {
	out := api.Command{
		ID: c.GetId(), Sandbox: sandbox, Command: c.GetArgs(), Cwd: c.GetCwd(), User: c.GetUser(), PID: int(c.GetPid()),
		Stdin: c.GetStdin(), Detach: c.GetDetach(), OutputBytes: c.GetCursor(), OmittedBytes: c.GetOmitted(),
		StdinOffset: c.GetInputOffset(), StartedAt: api.At(time.Unix(0, c.GetStartedUnixNano())),
	}
	if out.Command == nil {
		out.Command = []string{}
	}
	if p := c.GetPty(); p != nil {
		out.Pty = &api.WindowSize{Rows: int(p.Rows), Cols: int(p.Cols)}
	}
	if e := c.GetExit(); e != nil {
		exit := exitOf(e)
		out.Exit = &exit
		out.EndedAt = api.AtOrNil(time.Unix(0, e.AtUnixNano))
	}
	return out
}

func exitOf(e *guestproto.Exit) api.Exit {
	out := api.Exit{Code: int(e.Code), Reason: e.Error}
	if e.Signal != 0 {
		out.Signal = strings.TrimPrefix(unix.SignalName(unix.Signal(e.Signal)), "SIG")
		if out.Signal == "" { // a real-time signal has no name of its own
			out.Signal = strconv.Itoa(int(e.Signal))
		}
	}
	return out
}
