package guestproto

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/hutchrun/hutch/internal/fault"
)

// liar is an agent that answers each connection with the same bytes, whatever it is
// asked. hang says whether it leaves the connection open after them.
func liar(answer []byte, hang bool) func(context.Context) (net.Conn, error) {
	return func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() {
			// The question is read on, or its writer would wait for the reader.
			go func() {
				_, _ = io.Copy(io.Discard, theirs)
				theirs.Close()
			}()
			_, _ = theirs.Write(answer)
			if !hang {
				theirs.Close()
			}
		}()
		return ours, nil
	}
}

// frame is one envelope of Connect's streams.
func frame(flags byte, data []byte) []byte {
	out := append([]byte{flags}, binary.BigEndian.AppendUint32(nil, uint32(len(data)))...)
	return append(out, data...)
}

func response(kind, body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/%s\r\nContent-Length: %d\r\n\r\n%s", kind, len(body), body)
}

// FuzzAnswers asks all kinds of calls of an agent that answers anything: each ends with
// an answer or a fault of a known kind, within its time, and no message is larger than
// it may be.
func FuzzAnswers(f *testing.F) {
	event, err := proto.Marshal(&CommandEvent{Event: &CommandEvent_Output{Output: &Output{Stream: Stream_STREAM_STDOUT, Data: []byte("data")}}})
	if err != nil {
		f.Fatal(err)
	}
	stream := string(frame(0, event)) + string(frame(2, []byte("{}")))
	for _, seed := range [][]byte{
		nil, []byte("\x00\x01\x02"), []byte("HTTP/1.1 200 OK\r\n"), []byte("HTTP/1.1 101 Switching Protocols\r\n\r\n"),
		[]byte("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"),
		[]byte("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 2*MaxHeader) + "\r\n\r\n"),
		response("proto", "\x0a\xff\xff\xff\xff\x0f"), response("proto", ""), response("json", "{}"),
		response("connect+proto", stream), response("connect+proto", stream[:len(stream)-3]),
		response("connect+proto", string(frame(0, event))),                             // no end
		response("connect+proto", "\x00\xff\xff\xff\xff"),                              // 4 GiB are to come
		response("connect+proto", string(frame(1, event))),                             // compressed, as nobody asked for
		response("connect+proto", string(frame(2, []byte(`{"error":{"code":"no"}}`)))), // no such code
		response("connect+proto", string(frame(2, []byte(`{"error":{"code":"not_found","message":"`+strings.Repeat("x", 10<<10)+`"}}`)))),
		[]byte("HTTP/1.1 500 no\r\nContent-Type: application/json\r\nContent-Length: 30\r\n\r\n{\"code\":\"internal\",\"message\":1}"),
		[]byte("HTTP/1.1 200 OK\r\nContent-Type: application/connect+proto\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
	} {
		f.Add(seed, false)
		f.Add(seed, true)
	}
	f.Fuzz(func(t *testing.T, answer []byte, hang bool) {
		c := NewClient(liar(answer, hang), strings.Repeat("t", MinToken))
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		check := func(err error) {
			if err == nil || errors.Is(err, io.EOF) {
				return
			}
			fl, ok := errors.AsType[*fault.Fault](err)
			if !ok || !slices.Contains(fault.Kinds, fl.Kind) || len(fl.Message) > maxPublicMessage+1024 {
				t.Errorf("the error is %T %.200v", err, err)
			}
		}
		calls := []func(){
			func() { _, err := c.Commands.List(ctx, &ListCommandsRequest{}); check(err) },
			func() { _, err := c.Agent.Activity(ctx, &ActivityRequest{}); check(err) },
			func() {
				s, err := c.Commands.Follow(ctx, &FollowRequest{Id: "x"})
				check(err)
				if err == nil {
					defer s.Close()
				}
				for total := 0; err == nil; {
					var e *CommandEvent
					if e, err = s.Receive(); err == nil {
						if total += proto.Size(e); total > len(answer) {
							t.Errorf("%d bytes of messages were made of %d", total, len(answer))
						}
					}
					check(err)
				}
			},
			func() {
				s, err := c.Files.Write(ctx)
				check(err)
				if err == nil {
					_ = s.Send(&WriteRequest{Part: &WriteRequest_Data{Data: []byte("x")}})
					_, err = s.CloseAndReceive()
					check(err)
				}
			},
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for _, call := range calls {
				call()
			}
		}()
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			t.Fatalf("a call goes on after its time: %q", answer)
		}
	})
}

// A message that is too large is refused before it is taken, however much is sent.
func TestTooMuchIsRefused(t *testing.T) {
	t.Parallel()
	big := bytes.Repeat([]byte{0x0a, 0x00}, MaxMessage) // twice as much as may be, of empty commands
	for name, answer := range map[string][]byte{
		"unary":  response("proto", string(big)),
		"stream": response("connect+proto", string(frame(0, big))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := NewClient(liar(answer, true), strings.Repeat("t", MinToken))
			defer c.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var err error
			if name == "unary" {
				_, err = c.Commands.List(ctx, &ListCommandsRequest{})
			} else {
				var s CommandsFollowClientStream
				if s, err = c.Commands.Follow(ctx, &FollowRequest{Id: "x"}); err == nil {
					_, err = s.Receive()
				}
			}
			if err == nil || ctx.Err() != nil {
				t.Errorf("it was taken, or waited for: %v", err)
			}
		})
	}
}
