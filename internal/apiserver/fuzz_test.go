package apiserver

import (
	"encoding/binary"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// FuzzReplay has a guest say anything of a command: what the client gets is each byte once
// and in order, one exit at most, and a code that a process can have.
func FuzzReplay(f *testing.F) {
	add := func(start, end int64, events ...*guestproto.CommandEvent) {
		var data []byte
		for _, e := range events {
			b, err := proto.Marshal(e)
			if err != nil {
				f.Fatal(err)
			}
			data = append(binary.AppendUvarint(data, uint64(len(b))), b...)
		}
		f.Add(data, start, end)
	}
	output := func(stream guestproto.Stream, cursor int64, data string) *guestproto.CommandEvent {
		return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Output{Output: &guestproto.Output{Stream: stream, Cursor: cursor, Data: []byte(data)}}}
	}
	gap := func(from, to int64) *guestproto.CommandEvent {
		return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Gap{Gap: &guestproto.Gap{From: from, To: to}}}
	}
	exit := func(code, signal int32, word string) *guestproto.CommandEvent {
		return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Exit{Exit: &guestproto.Exit{Code: code, Signal: signal, Error: word}}}
	}
	add(0, noEnd, output(1, 0, "one"), output(2, 3, "two"), gap(6, 9), output(1, 9, "x"), exit(0, 0, ""))
	add(0, noEnd, output(1, 0, "one"), output(1, 0, "one"))
	add(5, noEnd, output(1, 4, "early"), exit(1, 0, ""))
	add(0, 4, output(1, 0, "more than is wanted"))
	add(0, noEnd, output(7, 0, "no such stream"))
	add(0, noEnd, gap(0, -1), gap(9, 9))
	add(1<<63-2, noEnd, output(1, 1<<63-2, "past the last number"))
	add(0, noEnd, exit(256, 0, ""), exit(-1, -1, ""))
	add(0, noEnd, exit(0, 0, exitLost))
	add(0, noEnd, &guestproto.CommandEvent{})
	f.Fuzz(func(t *testing.T, data []byte, start, end int64) {
		if start < 0 || end < start {
			return // the contract bounds what the client asks for
		}
		r := replay{sandbox: "sbx", next: start, end: end}
		at := start
		for len(data) > 0 && !r.done() {
			n, used := binary.Uvarint(data)
			if used <= 0 || n > uint64(len(data)-used) {
				return
			}
			var e guestproto.CommandEvent
			if proto.Unmarshal(data[used:used+int(n)], &e) != nil {
				return
			}
			data = data[used+int(n):]
			line, err := r.line(&e)
			if err != nil {
				if line != nil {
					t.Fatalf("an error and a line: %+v", line)
				}
				return // and the stream with it
			}
			switch {
			case line == nil || line.Started != nil:
			case line.Exit != nil:
				if line.Exit.Code < 0 || line.Exit.Code > 255 || !r.done() {
					t.Fatalf("the exit %+v", line.Exit)
				}
			case line.Gap != nil:
				if line.Gap.From != at || line.Gap.To <= at {
					t.Fatalf("at %d the gap %+v", at, line.Gap)
				}
				at = line.Gap.To
			default:
				if line.Stream == "" || len(line.Data) == 0 || *line.Cursor != at || at+int64(len(line.Data)) > end {
					t.Fatalf("at %d of %d the output %+v", at, end, line)
				}
				at += int64(len(line.Data))
			}
			if at != r.next {
				t.Fatalf("at %d, and it believes %d", at, r.next)
			}
		}
	})
}
