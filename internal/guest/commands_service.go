package guest

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// commandService answers the Commands service.
type commandService struct{ g *Guest }

var _ guestproto.CommandsHandler = commandService{}

func (s commandService) Start(ctx context.Context, req *guestproto.StartRequest, stream guestproto.CommandsStartServerStream) error {
	c, h, joined, err := s.g.start(ctx, req)
	if err != nil {
		return err
	}
	if h != nil {
		defer c.log.release(h)
	}
	if req.Detach {
		return stream.Send(s.startedEvent(c, joined))
	}
	return s.follow(ctx, c, 0, h, joined, stream.Send)
}

func (s commandService) Follow(ctx context.Context, req *guestproto.FollowRequest, stream guestproto.CommandsFollowServerStream) error {
	c, err := s.g.commands.get(req.Id)
	if err != nil {
		return err
	}
	if end, _ := c.log.size(); req.Cursor < 0 || req.Cursor > end {
		return fault.New(fault.InvalidArgument, "the cursor %d is not in the command's output, which ends at %d", req.Cursor, end).Because("cursor")
	}
	return s.follow(ctx, c, req.Cursor, nil, false, stream.Send)
}

func (s commandService) startedEvent(c *command, joined bool) *guestproto.CommandEvent {
	id, _ := s.g.commands.name(c)
	return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Started{
		Started: &guestproto.Started{Id: id, Pid: int32(c.pid), Joined: joined},
	}}
}

// follow sends what is at cursor and after it until the command's exit. It pulls: a
// client that is slow loses only its own place, unless it holds the log.
func (s commandService) follow(ctx context.Context, c *command, cursor int64, h *hold, joined bool, send func(*guestproto.CommandEvent) error) error {
	_, renewed := s.g.commands.name(c)
	c.attached.Add(1)
	defer c.attached.Add(-1)
	if err := send(s.startedEvent(c, joined)); err != nil {
		return err
	}
	for {
		// The exit is looked at first: what is read after it is all there is.
		exit := c.ended()
		piece, gapEnd, next := c.log.read(cursor)
		var event guestproto.CommandEvent
		switch {
		case len(piece.data) > 0:
			event.Event = &guestproto.CommandEvent_Output{Output: &guestproto.Output{Stream: piece.stream, Cursor: cursor, Data: piece.data}}
			cursor = piece.end()
		case gapEnd > 0:
			event.Event = &guestproto.CommandEvent_Gap{Gap: &guestproto.Gap{From: cursor, To: gapEnd}}
			cursor = gapEnd
		case exit != nil:
			event.Event = &guestproto.CommandEvent_Exit{Exit: exit}
			return send(&event)
		default:
			select {
			case <-next:
			case <-c.done:
			case <-renewed:
				return fault.New(fault.Unavailable, "the command has a new id in this fork; list the commands").Because("forked")
			case <-s.g.stop:
				return fault.New(fault.Unavailable, "the guest agent is ending")
			case <-ctx.Done():
				return ctx.Err()
			}
			continue
		}
		if err := send(&event); err != nil {
			return err
		}
		if h != nil {
			c.log.move(h, cursor)
		}
	}
}

func (s commandService) Input(ctx context.Context, req *guestproto.InputRequest) (*guestproto.InputResponse, error) {
	c, err := s.g.commands.get(req.Id)
	if err != nil {
		return nil, err
	}
	switch {
	case c.input == nil:
		return nil, fault.New(fault.FailedPrecondition, "the command was started without stdin").Because("no_stdin")
	case len(req.Data) > guestproto.MaxChunk:
		return nil, fault.New(fault.TooLarge, "input has %d bytes; send %d at a time", len(req.Data), guestproto.MaxChunk)
	case req.Offset < 0:
		return nil, fault.New(fault.InvalidArgument, "an input offset is not negative")
	}
	taken, err := c.input.write(ctx, req.Offset, req.Data, req.Eof)
	if err != nil {
		return nil, err
	}
	return &guestproto.InputResponse{Offset: taken}, nil
}

func (s commandService) Signal(_ context.Context, req *guestproto.SignalRequest) (*guestproto.SignalResponse, error) {
	c, err := s.g.commands.get(req.Id)
	if err != nil {
		return nil, err
	}
	if req.Signal < 1 || req.Signal > 64 {
		return nil, fault.New(fault.InvalidArgument, "%d is not a signal; they are 1 to 64", req.Signal)
	}
	if err := s.g.signalCommand(c, syscall.Signal(req.Signal)); err != nil {
		return nil, err
	}
	return &guestproto.SignalResponse{}, nil
}

func (s commandService) Resize(_ context.Context, req *guestproto.ResizeRequest) (*guestproto.ResizeResponse, error) {
	c, err := s.g.commands.get(req.Id)
	if err != nil {
		return nil, err
	}
	if c.pty == nil {
		return nil, fault.New(fault.FailedPrecondition, "the command has no terminal to resize").Because("no_terminal")
	}
	if err := c.setSize(req.Size); err != nil {
		return nil, fault.Wrap(err, fault.FailedPrecondition, "the command's terminal is gone").Because("ended")
	}
	return &guestproto.ResizeResponse{}, nil
}

func (s commandService) List(context.Context, *guestproto.ListCommandsRequest) (*guestproto.ListCommandsResponse, error) {
	return &guestproto.ListCommandsResponse{Commands: s.g.commands.list()}, nil
}

func (s commandService) Get(_ context.Context, req *guestproto.GetCommandRequest) (*guestproto.GetCommandResponse, error) {
	c, err := s.g.commands.get(req.Id)
	if err != nil {
		return nil, err
	}
	s.g.commands.mu.Lock()
	defer s.g.commands.mu.Unlock()
	return &guestproto.GetCommandResponse{Command: c.describe()}, nil
}

func (s commandService) Wait(ctx context.Context, req *guestproto.WaitRequest) (*guestproto.WaitResponse, error) {
	c, err := s.g.commands.get(req.Id)
	if err != nil {
		return nil, err
	}
	if req.TimeoutNanos > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, time.Duration(req.TimeoutNanos), errWaited)
		defer cancel()
	}
	select {
	case <-c.done:
	case <-s.g.stop:
		return nil, fault.New(fault.Unavailable, "the guest agent is ending")
	case <-ctx.Done():
		if !errors.Is(context.Cause(ctx), errWaited) {
			return nil, ctx.Err()
		}
	}
	return &guestproto.WaitResponse{Exit: c.ended()}, nil
}

// errWaited ends a Wait whose own timeout is over.
var errWaited = errors.New("waited long enough")
