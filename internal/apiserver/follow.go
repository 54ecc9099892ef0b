package apiserver

import (
	"context"
	"errors"
	"io"
	"math"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// noEnd is the end of a stream that goes on to the command's exit.
const noEnd = int64(math.MaxInt64)

// exitLost is the guest's word for a command whose status it could not read.
const exitLost = "lost"

// commandStream is the guest's stream of one command.
type commandStream interface {
	Receive() (*guestproto.CommandEvent, error)
	Close() error
}

// opened is a guest's stream whose first event was read, so that a refusal of the guest
// becomes the status of the answer.
type opened struct {
	ctx    context.Context //nolint:containedctx // the stream's, which ends before the request's at a shutdown
	cancel context.CancelFunc
	stream commandStream
	first  *guestproto.CommandEvent
}

// openStream opens a stream that lasts as long as the client and the server.
func openStream[S commandStream](ctx context.Context, g guest, open func(context.Context) (S, error)) (*opened, error) {
	return openWithin(ctx, g, guestTimeout, open)
}

// openWithin opens a stream whose first event comes within a limit: only what follows
// may take as long as it likes.
func openWithin[S commandStream](ctx context.Context, g guest, limit time.Duration, open func(context.Context) (S, error)) (*opened, error) {
	ctx, cancel := Lasting(ctx)
	var late atomic.Bool
	timer := time.AfterFunc(limit, func() {
		late.Store(true)
		cancel()
	})
	failed := func(err error) error {
		if late.Load() {
			return fault.Wrap(err, fault.DeadlineExceeded, "the agent in the sandbox %s does not answer; `hutch stop` and `hutch resume` start it anew", g.id).Because("guest_silent")
		}
		return g.failed(err)
	}
	stream, err := open(ctx)
	if err != nil {
		timer.Stop()
		cancel()
		return nil, failed(err)
	}
	o := &opened{ctx: ctx, cancel: cancel, stream: stream}
	o.first, err = stream.Receive()
	if !timer.Stop() && err == nil { // it came too late, and the context has ended
		err = context.Canceled
	}
	if err != nil {
		o.close()
		return nil, failed(err)
	}
	return o, nil
}

// close ends the stream; the command lives on without it.
func (o *opened) close() {
	_ = o.stream.Close() // what it would say is not wanted
	o.cancel()
}

// follow hands a guest's stream on. It stops at the exit, or at the cursor end where the
// caller wants no more than that.
func (s *server) follow(g guest, o *opened, cursor, end int64) lines {
	return func(send func(any) error) error {
		defer o.close()
		r := replay{sandbox: g.id, next: cursor, end: end}
		event := o.first
		for {
			if event == nil {
				var err error
				if event, err = o.stream.Receive(); err != nil {
					return s.cut(o.ctx, g, send, err)
				}
			}
			line, err := r.line(event)
			if err != nil {
				return s.cut(o.ctx, g, send, err)
			}
			event = nil
			if line != nil {
				if err := send(line); err != nil {
					return err
				}
			}
			if r.done() {
				return nil
			}
		}
	}
}

// cut ends a stream that has no exit with an error, never with a code of its own.
func (s *server) cut(ctx context.Context, g guest, send func(any) error, err error) error {
	switch {
	case ctx.Err() != nil: // at a shutdown; a client that has gone reads nothing
		err = fault.New(fault.Unavailable, "the server is shutting down; read on from the last cursor").Because("server_stopping")
	case errors.Is(err, io.EOF):
		err = fault.New(fault.Unavailable,
			"the sandbox %s ended the command's stream early; read on from the last cursor", g.id).Because("guest_unreachable")
	}
	d := s.fail(ctx, g.failed(err))
	return send(api.CommandEvent{Error: &d})
}

// replay turns a guest's events into lines. The guest is not trusted: bytes come in
// order, each once, or the stream ends.
type replay struct {
	sandbox string
	next    int64 // the cursor of the next byte
	end     int64
	exited  bool
}

func (r *replay) done() bool { return r.exited || r.next >= r.end }

// line gives nil for an event that tells nothing.
func (r *replay) line(e *guestproto.CommandEvent) (*api.CommandEvent, error) {
	if started := e.GetStarted(); started != nil {
		return &api.CommandEvent{Started: &api.CommandStarted{ID: started.Id, PID: int(started.Pid), Joined: started.Joined}}, nil
	}
	if out := e.GetOutput(); out != nil {
		return r.output(out)
	}
	if gap := e.GetGap(); gap != nil {
		if gap.From != r.next || gap.To <= gap.From {
			return nil, brokeProtocol(r.sandbox)
		}
		r.next = gap.To
		return &api.CommandEvent{Gap: &api.OutputGap{From: gap.From, To: gap.To}}, nil
	}
	if exit := e.GetExit(); exit != nil {
		r.exited = true
		if exit.Error == exitLost {
			return nil, fault.New(fault.Internal, "the command has ended, but its exit status was lost").Because(exitLost)
		}
		if exit.Code < 0 || exit.Code > 255 {
			return nil, brokeProtocol(r.sandbox)
		}
		out := exitOf(exit)
		return &api.CommandEvent{Exit: &out}, nil
	}
	return nil, brokeProtocol(r.sandbox)
}

func (r *replay) output(out *guestproto.Output) (*api.CommandEvent, error) {
	name, known := streamNames[out.Stream]
	if !known || out.Cursor != r.next || out.Cursor > math.MaxInt64-int64(len(out.Data)) {
		return nil, brokeProtocol(r.sandbox)
	}
	data := out.Data[:min(int64(len(out.Data)), r.end-out.Cursor)]
	if len(data) == 0 {
		return nil, nil
	}
	r.next += int64(len(data))
	return &api.CommandEvent{Stream: name, Cursor: &out.Cursor, Data: data}, nil
}

var streamNames = map[guestproto.Stream]api.CommandEventStream{
	guestproto.Stream_STREAM_STDOUT: api.CommandEventStreamStdout,
	guestproto.Stream_STREAM_STDERR: api.CommandEventStreamStderr,
	guestproto.Stream_STREAM_PTY:    api.CommandEventStreamPty,
}

func brokeProtocol(sandbox string) error {
	return fault.New(fault.Unavailable, "the agent in the sandbox %s does not keep to its protocol; restart the sandbox", sandbox).
		Because("guest_protocol")
}
