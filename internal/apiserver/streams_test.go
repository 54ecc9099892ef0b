package apiserver

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// sse is one server-sent event.
type sse struct {
	id    int64
	name  string
	event api.Event
}

// readSSE reads the next event, passing over comments and over what only tells how far the
// stream has come.
func readSSE(r *bufio.Reader) (sse, error) {
	var out sse
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return out, err
		}
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch name {
		case "id":
			if out.id, err = strconv.ParseInt(value, 10, 64); err != nil {
				return out, err
			}
		case "event":
			out.name = value
		case "data":
			if err := json.Unmarshal([]byte(value), &out.event); err != nil {
				return out, err
			}
		case "":
			if out.name != "" {
				return out, nil
			}
		}
	}
}

// H1: events from any number, without gap or repeat, however often the client connects
// again, and each as soon as it happens.
func TestEventsWithoutGapOrRepeat(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	stop := make(chan struct{})
	made := make(chan int)
	go func() { // things go on happening
		n := 0
		for {
			select {
			case <-stop:
				made <- n
				return
			default:
				r.do("PATCH", "/v1/sandboxes/box", fmt.Sprintf(`{"labels":{"n":"%d"}}`, n))
				n++
			}
		}
	}()
	var got []int64
	last := int64(0)
	for reconnect := range 10 {
		headers := []string{"Accept: text/event-stream"}
		path := "/v1/events"
		if reconnect%2 == 0 {
			path += fmt.Sprintf("?after=%d", last)
		} else {
			headers = append(headers, fmt.Sprintf("Last-Event-ID: %d", last))
		}
		res := r.open("GET", path, nil, headers...)
		body := bufio.NewReader(res.Body)
		for range 7 {
			e, err := readSSE(body)
			if err != nil {
				t.Fatal(err)
			}
			if e.id != e.event.Seq || e.name != e.event.Type {
				t.Errorf("the frame %+v", e)
			}
			got = append(got, e.id)
			last = e.id
		}
		_ = res.Body.Close()
	}
	close(stop)
	<-made
	for i, id := range got {
		if id != got[0]+int64(i) {
			t.Fatalf("a gap or a repeat in %v", got)
		}
	}
	var paged []int64
	for cursor := ""; ; {
		page := decode[api.EventList](t, r.do("GET", "/v1/events?limit=3&cursor="+cursor, "", "Accept: application/json"), 200)
		for _, e := range page.Events {
			paged = append(paged, e.Seq)
		}
		if cursor = page.NextCursor; cursor == "" {
			break
		}
	}
	if len(paged) < len(got) || fmt.Sprint(paged[:len(got)]) != fmt.Sprint(got) {
		t.Errorf("the pages have %v, the stream %v", paged, got)
	}
}

func TestEventStreamFollowsAndEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	box, other := r.create("box"), r.create("other")
	a := r.do("GET", "/v1/events?follow=false", "")
	if n := strings.Count(string(a.body), "\nevent: "); a.status != 200 || n < 4 {
		t.Errorf("without follow: %d, %d events", a.status, n)
	}
	res := r.open("GET", "/v1/events?sandbox=box&after=0", nil)
	body := bufio.NewReader(res.Body)
	seen := 0
	for { // what is there already
		e, err := readSSE(body)
		if err != nil {
			t.Fatal(err)
		}
		if e.event.Sandbox != box.ID {
			t.Errorf("an event of another sandbox: %+v", e)
		}
		if seen++; e.name == "operation.succeeded" {
			break
		}
	}
	r.verb(other.ID, "stop") // is not told
	r.verb("box", "sleep")
	for {
		e, err := readSSE(body)
		if err != nil {
			t.Fatal(err)
		}
		if e.event.Sandbox != box.ID {
			t.Errorf("an event of another sandbox: %+v", e)
		}
		if e.name == "sandbox.sleeping" {
			break
		}
	}
	shut := make(chan error, 1)
	go func() { shut <- r.http.Shutdown(t.Context()) }()
	if rest, err := io.ReadAll(body); err != nil { // a shutdown ends the stream in order
		t.Errorf("the stream ended with %v after %q", err, rest)
	}
	_ = res.Body.Close()
	select {
	case err := <-shut:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(deadline):
		t.Error("the stream holds up the shutdown")
	}
}

func TestEventsThatAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	refused(t, r.do("GET", "/v1/events?sandbox=none", ""), fault.NotFound)
	refused(t, r.do("GET", "/v1/events", "", "Last-Event-ID: x"), fault.InvalidArgument)
	refused(t, r.do("GET", "/v1/events?cursor=-3", ""), fault.InvalidArgument)
	for _, query := range []string{"after=1000000", "type=Bad!", "tail=-1", "tail=1001", "since=soon", "tail=1&after=1", "tail=1&since=2026-01-01", "after=1&since=2026-01-01"} {
		refused(t, r.do("GET", "/v1/events?"+query, ""), fault.InvalidArgument)
	}
	refused(t, r.do("GET", "/v1/events?after=", "", "Authorization: "), fault.Unauthenticated)
}

// E1 and E2: exec streams both outputs in order and ends with the command's own code.
func TestExecStream(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	for _, how := range [][2]string{{"", "Accept: application/x-ndjson"}, {"?follow=true", "Accept: */*"}} {
		a := r.do("POST", "/v1/sandboxes/box/commands"+how[0], `{"command":["sh","-c","echo out; echo err >&2; exit 42"],"env":{"A":"b"}}`, how[1])
		if a.status != 200 || a.header.Get("Content-Type") != ndjson {
			t.Fatalf("%d %s", a.status, a.body)
		}
		events := parseEvents(t, a.body)
		if events[0].Started == nil || events[0].Started.ID == "" {
			t.Errorf("the first line is %+v", events[0])
		}
		if output(events, api.CommandEventStreamStdout) != "out\n" || output(events, api.CommandEventStreamStderr) != "err\n" {
			t.Errorf("output %s", a.body)
		}
		if exit := events[len(events)-1].Exit; exit == nil || exit.Code != 42 {
			t.Errorf("the last line is %+v", events[len(events)-1])
		}
	}
	for code := range 4 { // E1: 0 to 255
		code *= 85
		events := parseEvents(t, r.do("POST", "/v1/sandboxes/box/commands?follow=true", fmt.Sprintf(`{"command":"exit %d"}`, code)).body)
		if exit := events[len(events)-1].Exit; exit == nil || exit.Code != code {
			t.Errorf("exit %d gives %+v", code, exit)
		}
	}
	timedOut := parseEvents(t, r.do("POST", "/v1/sandboxes/box/commands?follow=true", `{"command":["sleep","600"],"timeout_seconds":1}`).body)
	if exit := timedOut[len(timedOut)-1].Exit; exit == nil || exit.Reason != "timeout" {
		t.Errorf("timed out %+v", exit)
	}
	// What cannot start is a refusal with a status, not a stream.
	refused(t, r.do("POST", "/v1/sandboxes/box/commands?follow=true", `{"command":["/no/such/program"]}`), fault.NotFound)
}

// E1: input goes in as it comes, and each line is answered before the next is sent.
func TestExecInteractive(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	res := r.open("POST", "/v1/sandboxes/box/commands?follow=true", strings.NewReader(`{"command":["cat"],"stdin":true}`))
	defer func() { _ = res.Body.Close() }()
	lines := json.NewDecoder(res.Body)
	next := func() api.CommandEvent {
		t.Helper()
		var e api.CommandEvent
		if err := lines.Decode(&e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	id := next().Started.ID
	input, writer := io.Pipe()
	sent := make(chan answer, 1)
	go func() {
		res := r.open("POST", "/v1/sandboxes/box/commands/"+id+"/stdin", input, "Content-Type: application/octet-stream")
		b, _ := io.ReadAll(res.Body) // the status tells
		_ = res.Body.Close()
		sent <- answer{status: res.StatusCode, body: b, header: res.Header}
	}()
	for _, line := range []string{"one\n", "two\n"} {
		if _, err := io.WriteString(writer, line); err != nil {
			t.Fatal(err)
		}
		if e := next(); string(e.Data) != line {
			t.Fatalf("cat says %+v to %q", e, line)
		}
	}
	_ = writer.Close() // the end of the body is the end of the input
	if got := decode[api.StdinResult](t, <-sent, 200); got.Offset != 8 {
		t.Errorf("input %+v", got)
	}
	if e := next(); e.Exit == nil || e.Exit.Code != 0 {
		t.Errorf("cat ended with %+v", e)
	}
}

// E2: a repeated write of input is taken once, and a key starts a command once.
func TestExecOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	const body = `{"command":["cat"],"stdin":true}`
	first := decode[api.Command](t, r.do("POST", "/v1/sandboxes/box/commands", body, "Idempotency-Key: k"), 201)
	again := decode[api.Command](t, r.do("POST", "/v1/sandboxes/box/commands", body, "Idempotency-Key: k"), 201)
	if first.ID != again.ID {
		t.Error("one key started two commands")
	}
	one := "/v1/sandboxes/box/commands/" + first.ID
	for range 3 {
		r.do("POST", one+"/stdin?offset=0&keep_open=true", "abc", "Content-Type: application/octet-stream")
	}
	decode[api.StdinResult](t, r.do("POST", one+"/stdin?offset=3", "def", "Content-Type: application/octet-stream"), 200)
	events := readEvents(t, r, one+"/output?follow=true")
	if got := output(events, api.CommandEventStreamStdout); got != "abcdef" {
		t.Errorf("cat got %q", got)
	}
	for cursor := range int64(7) { // E2: from any byte
		rest := readEvents(t, r, fmt.Sprintf("%s/output?cursor=%d", one, cursor))
		if got := output(rest, api.CommandEventStreamStdout); got != "abcdef"[cursor:] || rest[len(rest)-1].Exit == nil {
			t.Errorf("from %d: %q", cursor, got)
		}
	}
	refused(t, r.do("POST", one+"/stdin", "x", "Content-Type: multipart/form-data; boundary=x"), fault.InvalidArgument)
	refused(t, r.do("POST", one+"/signal", `{"signal":"NONE"}`), fault.InvalidArgument)
}

// Without follow, output ends at what is there although the command runs on.
func TestOutputWithoutFollow(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	c := decode[api.Command](t, r.do("POST", "/v1/sandboxes/box/commands", `{"command":"echo here; exec sleep 600"}`), 201)
	one := "/v1/sandboxes/box/commands/" + c.ID
	eventually(t, func() bool { return decode[api.Command](t, r.do("GET", one, ""), 200).OutputBytes == 5 })
	events := readEvents(t, r, one+"/output")
	if got := output(events, api.CommandEventStreamStdout); got != "here\n" || events[len(events)-1].Exit != nil {
		t.Errorf("got %q, %+v", got, events)
	}
	if at := r.do("GET", one+"/output?cursor=5", ""); at.status != 200 {
		t.Errorf("at the end: %d %s", at.status, at.body)
	}
	r.do("POST", one+"/signal", `{"signal":"9"}`)
}

// Z5: exec and files wake a sleeping sandbox once for a burst; reading what commands
// there are does not; a stopped one is refused with the way to start it.
func TestCallsWakeASleeper(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	r.verb("box", "sleep")
	if e := refused(t, r.do("GET", "/v1/sandboxes/box/commands", ""), fault.FailedPrecondition); e.Reason != "state_sleeping" {
		t.Errorf("the list says %+v", e)
	}
	burst := make(chan answer)
	for i := range 10 {
		go func() {
			if i%2 == 0 {
				burst <- r.do("GET", "/v1/sandboxes/box/files/list?path=.", "")
				return
			}
			burst <- r.do("POST", "/v1/sandboxes/box/commands?follow=true", `{"command":["true"]}`)
		}()
	}
	for range 10 {
		if a := <-burst; a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if box := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/box", ""), 200); box.State != api.StateReady || box.Generation != 2 {
		t.Errorf("after the burst %s, generation %d", box.State, box.Generation)
	}
	wakes := 0
	r.host.mu.Lock()
	for _, c := range r.host.submitted {
		if c.Verb == sandbox.Wake {
			wakes++
		}
	}
	r.host.mu.Unlock()
	if wakes != 1 {
		t.Errorf("%d wakes", wakes)
	}
	r.verb("box", "stop")
	for _, a := range []answer{
		r.do("POST", "/v1/sandboxes/box/commands", `{"command":["true"]}`),
		r.do("GET", "/v1/sandboxes/box/files?path=x", ""),
	} {
		if e := refused(t, a, fault.FailedPrecondition); e.Reason != "state_stopped" || !strings.Contains(e.Message, "resume") {
			t.Errorf("stopped: %+v", e)
		}
	}
}

// Z1, Z2: what a call is to the host: something that keeps the sandbox awake until it has
// been answered, or a look that does not. Nothing stays in use.
func TestUsesOfASandbox_Z1_Z2(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	started := decode[api.Command](t, r.do("POST", "/v1/sandboxes/box/commands", `{"command":["sh","-c","exit 0"]}`), 201)
	one := "/v1/sandboxes/box/commands/" + started.ID
	r.do("POST", "/v1/sandboxes/box/commands", `{"command":["true"],"detach":true}`)
	r.do("GET", "/v1/sandboxes/box/commands", "")
	r.do("GET", one, "")
	r.do("GET", one+"/output", "")
	r.do("GET", one+"/output?follow=true", "")
	r.do("GET", "/v1/sandboxes/box/files/list?path=.", "")
	r.do("GET", "/v1/sandboxes/box", "")
	r.do("GET", "/v1/sandboxes/box/idle", "")
	want := []hostproto.Use{
		hostproto.UseCommand, hostproto.UseDetached, hostproto.UseLook, hostproto.UseLook, hostproto.UseLook, hostproto.UseFollow, hostproto.UseSession,
	}
	r.host.mu.Lock()
	if !slices.Equal(r.host.uses, want) {
		t.Errorf("the uses are %v, want %v", r.host.uses, want)
	}
	r.host.mu.Unlock()
	for left := -1; left != 0; {
		r.host.mu.Lock()
		left = r.host.inUse
		r.host.mu.Unlock()
	}
}

// Z5: a request that is refused wakes nothing, and neither does a look.
func TestRefusedWakesNothing_Z5(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	r.verb("box", "sleep")
	const box = "/v1/sandboxes/box"
	for _, a := range []answer{
		r.do("POST", box+"/commands", `{"command":["true"]}`, "Authorization: Bearer hutch_nonsense"),
		r.do("POST", box+"/commands", `{"command":["true"],"nonsense":1}`),
		r.do("POST", box+"/commands", `{"command":[]}`),
		r.do("POST", box+"/commands/cmd_1/signal", `{"signal":"NONSENSE"}`),
		r.do("PUT", box+"/files?path=x&mode=9", "x", "Content-Type: application/octet-stream"),
		r.do("GET", box+"/files/list?path=.&cursor=%21", ""),
		r.do("GET", box+"/files", ""),
		r.do("GET", box+"/commands/cmd_1/output?follow=true", ""),
		r.do("GET", box+"/commands", ""),
	} {
		if a.status < 400 || a.status >= 500 {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	why := decode[api.Idleness](t, r.do("GET", box+"/idle", ""), 200)
	if why.State != api.StateSleeping || why.Blocker != "state" || len(why.Criteria) != 0 || why.NextDecisionAt != nil || why.Sleep.IdleSeconds != 120 {
		t.Errorf("asleep it says %+v", why)
	}
	if s := decode[api.Sandbox](t, r.do("GET", box, ""), 200); s.State != api.StateSleeping || s.Operation != nil || s.Generation != 1 {
		t.Errorf("after what was refused it is %s, generation %d, %+v", s.State, s.Generation, s.Operation)
	}
}

// Z3: the host's readings as the API tells them.
func TestIdleness_Z3(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	s := decode[api.Sandbox](t, r.do("PATCH", "/v1/sandboxes/box", `{"sleep":{"mode":"auto","idle_seconds":600},"on_idle":"stop"}`), 200)
	if s.Sleep.Mode != api.SleepModeAuto || s.Sleep.IdleSeconds != 600 || s.OnIdle != api.OnIdleStop {
		t.Errorf("the settings are %+v", s.Sleep)
	}
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	r.host.mu.Lock()
	r.host.idle = hostproto.Idleness{
		Idleness: sandbox.Idleness{Blocker: sandbox.IdleCPU, Next: at.Add(time.Minute), Criteria: []sandbox.Criterion{
			{Name: sandbox.IdleSessions, Limit: 1, OK: true, Since: at}, {Name: sandbox.IdleCPU, Reading: 2.5, Limit: 2, Unit: "%"},
		}},
		Mode: sandbox.SleepAuto, Window: 10 * time.Minute, OnIdle: sandbox.Stop, Every: 10 * time.Second, At: at, Failed: &sandbox.Retry{Tries: 3},
	}
	r.host.mu.Unlock()
	why := decode[api.Idleness](t, r.do("GET", "/v1/sandboxes/box/idle", ""), 200)
	if why.Idle || why.Blocker != "cpu" || !why.NextDecisionAt.Equal(at.Add(time.Minute)) || !why.SampledAt.Equal(at) || why.SampleSeconds != 10 ||
		why.FailedTries != 3 || len(why.Criteria) != 2 || why.Criteria[0].Since == nil || why.Criteria[1].Since != nil || why.Criteria[1].Reading != 2.5 || why.Criteria[1].Ok {
		t.Errorf("it says %+v", why)
	}
	refused(t, r.do("PATCH", "/v1/sandboxes/box", `{"sleep":{"idle_seconds":29}}`), fault.InvalidArgument)
	refused(t, r.do("GET", "/v1/sandboxes/nobody/idle", ""), fault.NotFound)
}

// E4: a file is replaced whole or not at all, also where its upload breaks off.
func TestUploadThatBreaksOff(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	const file = "/v1/sandboxes/box/files?path=f"
	decode[api.FileInfo](t, r.do("PUT", file, "old", "Content-Type: application/octet-stream"), 200)
	body, writer := io.Pipe()
	req := r.request("PUT", file, body, "Content-Type: application/octet-stream")
	failed := make(chan error, 1)
	go func() {
		res, err := r.client.Do(req)
		if err == nil {
			_ = res.Body.Close()
		}
		failed <- err
	}()
	if _, err := writer.Write([]byte(strings.Repeat("new", 100_000))); err != nil {
		t.Fatal(err)
	}
	_ = writer.CloseWithError(io.ErrUnexpectedEOF)
	if err := <-failed; err == nil {
		t.Error("the upload went well")
	}
	if a := r.do("GET", file, ""); string(a.body) != "old" {
		t.Errorf("the file has %d bytes", len(a.body))
	}
	decode[api.FileInfo](t, r.do("PUT", file, "", "Content-Type: application/octet-stream"), 200)
	if a := r.do("GET", file, ""); a.status != 200 || len(a.body) != 0 {
		t.Errorf("the empty file: %d %q", a.status, a.body)
	}
	for mode, ok := range map[string]bool{"0755": true, "rwx": false, "99": false, "17777": false, "000": false} {
		if a := r.do("PUT", file+"&mode="+mode, "x", "Content-Type: application/octet-stream"); (a.status == http.StatusOK) != ok {
			t.Errorf("mode %s: %d %s", mode, a.status, a.body)
		}
	}
}

// A build that fails says so in its operation and in the stream; one cut is joined.
func TestTemplateStream(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	block := make(chan error, 1)
	r.host.mu.Lock()
	r.host.building = func() error { return <-block }
	r.host.mu.Unlock()
	build := func() *http.Response {
		return r.open("POST", "/v1/templates", strings.NewReader(`{"name":"big","source":{"oci":"registry.example.com/debian"}}`),
			"Accept: application/x-ndjson", "Idempotency-Key: build")
	}
	res := build()
	var e api.TemplateEvent
	if err := json.NewDecoder(res.Body).Decode(&e); err != nil || e.Progress == nil {
		t.Fatalf("%+v %v", e, err)
	}
	_ = res.Body.Close() // cut off
	res = build()
	block <- fault.New(fault.Unavailable, "the registry does not answer").Because("registry")
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	e = api.TemplateEvent{}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &e); err != nil || e.Error == nil || e.Error.Reason != "registry" {
		t.Errorf("the stream ends with %s", lines[len(lines)-1])
	}
	refused(t, r.do("GET", "/v1/templates/big", ""), fault.NotFound)
	block <- nil
	done := decode[api.TemplateChange](t, r.do("POST", "/v1/templates?wait=20s", `{"name":"big","source":{"debian":true}}`), 200)
	if done.Template == nil || done.Template.Name != "big" {
		t.Errorf("made %+v", done)
	}
	refused(t, r.do("POST", "/v1/templates", `{"name":"x","source":{}}`), fault.InvalidArgument)
}
