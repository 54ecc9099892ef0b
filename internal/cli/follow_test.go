package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// E2: whatever a server repeats, skips or leaves out, a byte is written once, what is
// missing is told, and there is no exit code that it did not send.
func TestFollowerTakesEachByteOnce(t *testing.T) {
	t.Parallel()
	at := func(cursor int64, data string) api.CommandEvent {
		return api.CommandEvent{Stream: "stdout", Cursor: &cursor, Data: []byte(data)}
	}
	for name, c := range map[string]struct {
		events []api.CommandEvent
		out    string
		cursor int64
		said   string
	}{
		"in order":          {[]api.CommandEvent{at(0, "abc"), at(3, "def")}, "abcdef", 6, ""},
		"repeated":          {[]api.CommandEvent{at(0, "abc"), at(0, "abc"), at(3, "d")}, "abcd", 4, ""},
		"overlapping":       {[]api.CommandEvent{at(0, "abc"), at(1, "bcde")}, "abcde", 5, ""},
		"a gap":             {[]api.CommandEvent{at(0, "ab"), {Gap: &api.OutputGap{From: 2, To: 10}}, at(10, "z")}, "abz", 11, "8 bytes"},
		"a gap twice":       {[]api.CommandEvent{{Gap: &api.OutputGap{From: 0, To: 10}}, {Gap: &api.OutputGap{From: 0, To: 10}}}, "", 10, "10 bytes"},
		"a gap left unsaid": {[]api.CommandEvent{at(0, "ab"), at(5, "f")}, "abf", 6, "3 bytes"},
		"without cursors":   {[]api.CommandEvent{{Stream: "stdout", Data: []byte("ab")}, {Stream: "stdout", Data: []byte("c")}}, "abc", 3, ""},
		"nothing known":     {[]api.CommandEvent{{}}, "", 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var out, said bytes.Buffer
			f := &follower{a: &app{env: Env{Stdout: &out, Stderr: &said}, progress: &progress{}}}
			for _, e := range c.events {
				if last, err := f.take(doc[api.CommandEvent]{V: e}); last || err != nil {
					t.Fatalf("take = %v, %v", last, err)
				}
			}
			if out.String() != c.out || f.cursor != c.cursor || f.exit != nil {
				t.Errorf("wrote %q up to %d, exit %v; want %q up to %d", out.String(), f.cursor, f.exit, c.out, c.cursor)
			}
			if strings.Count(said.String(), "no longer kept") != min(1, len(c.said)) || !strings.Contains(said.String(), c.said) {
				t.Errorf("said %q, want %q once", said.String(), c.said)
			}
		})
	}
}

// E2: a stream that ends without an exit was cut, however cleanly it ended.
func TestStreamWithoutExitWasCut(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "{\"started\":{\"id\":\"c\",\"pid\":1}}\n", "{\"started\":{\"id\":\"c\",\"pid\":1}}\n{\"stre"} {
		f := &follower{a: &app{env: Env{Stdout: io.Discard, Stderr: io.Discard}, progress: &progress{}}}
		resp := &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(text))}
		if _, err := f.stream(resp, nil); !errors.Is(err, errCut) || f.exit != nil {
			t.Errorf("after %q: %v, exit %v; want errCut", text, err, f.exit)
		}
	}
}

// clientOf is a client that gets the same answer to every call.
func clientOf(t *testing.T, status int, body any) *client {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	doer := &http.Client{Transport: &transport{base: roundTrip(func(req *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewReader(text)), Request: req}, nil
	})}}
	inner, err := api.NewClient(defaultURL, api.WithHTTPClient(doer))
	if err != nil {
		t.Fatal(err)
	}
	return &client{Client: inner, url: defaultURL}
}

// E1, E2: how sessions end: with the command's own code, or with an error that says
// why it is not known.
func TestSessionEnd(t *testing.T) {
	t.Parallel()
	ready := api.Sandbox{Name: "demo", State: api.StateReady}
	stopping := api.Sandbox{Name: "demo", State: api.StateReady, Operation: &api.Operation{Kind: "stop"}}
	failed := func(reason string) api.Sandbox {
		return api.Sandbox{Name: "demo", State: api.StateFailed, Reason: reason, MemoryBytes: 1 << 30}
	}
	stopped := func(reason string) api.Sandbox {
		return api.Sandbox{Name: "demo", State: api.StateStopped, Reason: reason}
	}
	refused := fault.New(fault.FailedPrecondition, "cannot reach demo")
	for name, c := range map[string]struct {
		exit *api.Exit
		err  error
		sb   api.Sandbox
		want string // of the error; "" is an exit status
		said string
		code exitStatus
	}{
		"success":             {exit: &api.Exit{}},
		"a code":              {exit: &api.Exit{Code: 255}, code: 255},
		"a signal":            {exit: &api.Exit{Code: 137, Signal: "KILL"}, sb: ready, code: 137},
		"a signal at a stop":  {exit: &api.Exit{Code: 143, Signal: "TERM"}, sb: stopping, code: 143, said: "ended by a signal, as demo is being stopped"},
		"a signal, no memory": {exit: &api.Exit{Code: 137, Signal: "KILL"}, sb: failed("oom_killed"), code: 137, said: "demo ran out of memory (it has 1GiB)"},
		"timeout":             {exit: &api.Exit{Code: 137, Signal: "KILL", Reason: "timeout"}, code: 137, said: "time was over (--timeout 9s)"},
		"its status is lost":  {exit: &api.Exit{Code: 255, Reason: "lost"}, sb: ready, want: "its exit code was lost"},
		"lost, no memory":     {exit: &api.Exit{Code: 255, Reason: "lost"}, sb: failed("oom_killed"), want: "demo ran out of memory"},
		"cut for good":        {err: errCut, sb: ready, want: "how it ends is not known"},
		"no memory":           {err: refused, sb: failed("oom_killed"), want: "exit code is not known: demo ran out of memory (it has 1GiB) and was ended as a whole; `hutch resume demo`"},
		"a crash":             {err: refused, sb: failed("crashed"), want: "exit code is not known: demo crashed; "},
		"a host's restart":    {err: refused, sb: failed("host_restarted"), want: "the host of demo was restarted"},
		"another failure":     {err: refused, sb: failed("odd"), want: "demo failed (odd)"},
		"a stop":              {err: refused, sb: stopped("stop"), want: "demo was stopped"},
		"an auto-stop":        {err: refused, sb: stopped("auto_stop"), want: "demo was stopped: "},
		"a poweroff":          {err: refused, sb: stopped("exited"), want: "demo was powered off from inside"},
		"a stop under way":    {err: fault.New(fault.Conflict, "at work"), sb: stopping, want: "demo is being stopped"},
		"a new start":         {err: fault.New(fault.NotFound, "no command"), sb: ready, want: "demo was started anew meanwhile"},
		"deleted":             {err: fault.New(fault.NotFound, "no sandbox"), sb: api.Sandbox{}, want: "demo was deleted or renamed"},
		"none of these":       {err: refused, sb: ready, want: "cannot reach demo"},
	} {
		t.Run(name, func(t *testing.T) {
			answer := clientOf(t, 200, c.sb)
			if c.sb.Name == "" {
				answer = clientOf(t, 404, api.Error{Error: api.ErrorDetail{Code: "not_found", Message: "no sandbox"}})
			}
			var said bytes.Buffer
			s := &session{
				follower: follower{
					a: &app{env: Env{Stderr: &said}, progress: &progress{}}, c: answer, ref: "demo", id: "cmd_1", opened: true, exit: c.exit,
				},
				body: api.StartCommand{TimeoutSeconds: 9},
			}
			err := s.end(t.Context(), c.err)
			status, isStatus := errors.AsType[exitStatus](err)
			switch {
			case c.want != "":
				if err == nil || isStatus || !strings.Contains(err.Error(), c.want) {
					t.Errorf("end = %v, want %q", err, c.want)
				}
			case c.code == 0 && err != nil, c.code != 0 && (!isStatus || status != c.code):
				t.Errorf("end = %v, want status %d", err, c.code)
			}
			if !strings.Contains(said.String(), c.said) || c.said == "" && said.Len() > 0 {
				t.Errorf("said %q, want %q", said.String(), c.said)
			}
		})
	}
}

func TestServerSentEvents(t *testing.T) {
	t.Parallel()
	var got []string
	err := serverSentEvents(strings.NewReader(": hello\n\nid: 1\ndata: one\n\nevent: x\ndata:two\ndata: lines\n\nid: 7\n\ndata: unfinished\n"),
		func(id string, data []byte) error { got = append(got, id+" "+string(data)); return nil })
	if !errors.Is(err, errCut) || strings.Join(got, "|") != "1 one|1 two\nlines|7 " {
		t.Errorf("got %q, %v", got, err)
	}
}
