package guest_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guest"
	"github.com/hutchrun/hutch/internal/guest/guesttest"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// eventStream is what Start and Follow give.
type eventStream interface {
	Receive() (*guestproto.CommandEvent, error)
	Close() error
}

// outcome is all that a stream told.
type outcome struct {
	id     string
	joined bool
	out    map[guestproto.Stream]*bytes.Buffer
	all    bytes.Buffer // in cursor order
	gaps   []*guestproto.Gap
	cursor int64
	exit   *guestproto.Exit
}

func (o *outcome) stdout() string { return o.out[guestproto.Stream_STREAM_STDOUT].String() }
func (o *outcome) stderr() string { return o.out[guestproto.Stream_STREAM_STDERR].String() }
func (o *outcome) pty() string    { return o.out[guestproto.Stream_STREAM_PTY].String() }

func newOutcome(from int64) *outcome {
	o := &outcome{out: map[guestproto.Stream]*bytes.Buffer{}, cursor: from}
	for s := range guestproto.Stream_name {
		o.out[guestproto.Stream(s)] = &bytes.Buffer{}
	}
	return o
}

// take adds one event and checks that cursors leave no gap and repeat nothing.
func (o *outcome) take(t *testing.T, ev *guestproto.CommandEvent) {
	t.Helper()
	switch e := ev.Event.(type) {
	case *guestproto.CommandEvent_Started:
		o.id, o.joined = e.Started.Id, e.Started.Joined
	case *guestproto.CommandEvent_Output:
		if e.Output.Cursor != o.cursor {
			t.Fatalf("output at cursor %d, want %d", e.Output.Cursor, o.cursor)
		}
		o.cursor += int64(len(e.Output.Data))
		o.out[e.Output.Stream].Write(e.Output.Data)
		o.all.Write(e.Output.Data)
	case *guestproto.CommandEvent_Gap:
		if e.Gap.From != o.cursor || e.Gap.To <= e.Gap.From {
			t.Fatalf("gap %d to %d at cursor %d", e.Gap.From, e.Gap.To, o.cursor)
		}
		o.gaps = append(o.gaps, e.Gap)
		o.cursor = e.Gap.To
	case *guestproto.CommandEvent_Exit:
		if o.exit != nil {
			t.Fatal("two exits")
		}
		o.exit = e.Exit
	}
}

// drain reads a stream to its end.
func drain(t *testing.T, s eventStream, from int64) *outcome {
	t.Helper()
	o := newOutcome(from)
	for {
		ev, err := s.Receive()
		if errors.Is(err, io.EOF) {
			return o
		}
		if err != nil {
			t.Fatalf("receive: %v", err)
		}
		o.take(t, ev)
	}
}

// until reads a stream until a condition holds.
func until(t *testing.T, s eventStream, o *outcome, holds func() bool) {
	t.Helper()
	for !holds() {
		ev, err := s.Receive()
		if err != nil {
			t.Fatalf("receive: %v; got %q so far", err, o.all.String())
		}
		o.take(t, ev)
	}
}

func start(t *testing.T, a *guesttest.Agent, req *guestproto.StartRequest) eventStream {
	t.Helper()
	s, err := a.Client.Commands.Start(t.Context(), req)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func run(t *testing.T, a *guesttest.Agent, req *guestproto.StartRequest) *outcome {
	t.Helper()
	return drain(t, start(t, a, req), 0)
}

func shell(line string) *guestproto.StartRequest { return &guestproto.StartRequest{Shell: line} }

func follow(t *testing.T, a *guesttest.Agent, id string, cursor int64) eventStream {
	t.Helper()
	s, err := a.Client.Commands.Follow(t.Context(), &guestproto.FollowRequest{Id: id, Cursor: cursor})
	if err != nil {
		t.Fatalf("follow: %v", err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// wantFault checks an error's kind and, unless "", its reason.
func wantFault(t *testing.T, err error, kind fault.Kind, reason string) {
	t.Helper()
	f := fault.Of(err)
	if err == nil || f.Kind != kind || (reason != "" && f.Reason != reason) {
		t.Fatalf("got error %v (%+v), want kind %s, reason %q", err, f, kind, reason)
	}
}

// startFails gives the error of a command that must not start.
func startFails(t *testing.T, a *guesttest.Agent, req *guestproto.StartRequest) error {
	t.Helper()
	s, err := a.Client.Commands.Start(t.Context(), req)
	if err == nil {
		defer s.Close()
		_, err = s.Receive()
	}
	if err == nil {
		t.Fatal("the command started")
	}
	return err
}

// eventually polls until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !holds() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func boot(t *testing.T) *guesttest.Agent {
	t.Helper()
	return guesttest.Boot(t, guest.Config{Version: "test"})
}

// dialer is a transport's way to the agent.
func dialer(a *guesttest.Agent) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) { return a.Conn(ctx) }
}
