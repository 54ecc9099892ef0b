package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// Every kind has one status, and docs/status-codes.md lists the same (SPEC 16).
func TestStatusTableIsComplete(t *testing.T) {
	t.Parallel()
	if len(statuses) != len(fault.Kinds) {
		t.Errorf("the table has %d kinds, fault has %d", len(statuses), len(fault.Kinds))
	}
	doc, err := os.ReadFile("../../docs/status-codes.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (\\d+) \\|").FindAllStringSubmatch(string(doc), -1) {
		documented[m[1]] = m[2]
	}
	for _, kind := range fault.Kinds {
		want, ok := statuses[kind]
		if !ok {
			t.Errorf("%s has no status", kind)
		}
		if got := documented[string(kind)]; got != strconv.Itoa(want) {
			t.Errorf("docs/status-codes.md gives %s the status %q, the table %d", kind, got, want)
		}
	}
	if len(documented) != len(fault.Kinds) {
		t.Errorf("docs/status-codes.md lists %d codes, fault has %d", len(documented), len(fault.Kinds))
	}
	spec := mustLoad(t)
	enum := spec.Components.Schemas["ErrorCode"].Value.Enum
	if len(enum) != len(fault.Kinds) {
		t.Errorf("openapi.yaml lists %d codes, fault has %d", len(enum), len(fault.Kinds))
	}
	for i, v := range enum {
		if v != string(fault.Kinds[i]) {
			t.Errorf("openapi.yaml has %v where fault has %s", v, fault.Kinds[i])
		}
	}
}

func TestFaultOf(t *testing.T) {
	t.Parallel()
	var into struct {
		CPUs int `json:"cpus"`
	}
	typeErr := json.Unmarshal([]byte(`{"cpus":"x"}`), &into)
	for _, c := range []struct {
		err    error
		kind   fault.Kind
		status int
	}{
		{fault.New(fault.FailedPrecondition, "gone").Because(reasonPruned), fault.FailedPrecondition, 410}, // H1
		{fault.New(fault.FailedPrecondition, "stopped"), fault.FailedPrecondition, 409},                    // Z5
		{&http.MaxBytesError{Limit: 5}, fault.TooLarge, 413},
		{typeErr, fault.InvalidArgument, 400},
		{&RequiredParamError{ParamName: "path"}, fault.InvalidArgument, 400},
		{context.Canceled, fault.Cancelled, 499},
		{context.DeadlineExceeded, fault.DeadlineExceeded, 504},
		{errors.New("secret"), fault.Internal, 500},
	} {
		f := faultOf(c.err)
		if f.Kind != c.kind || status(f) != c.status {
			t.Errorf("%v: %s %d, want %s %d", c.err, f.Kind, status(f), c.kind, c.status)
		}
		if strings.Contains(f.Message, "secret") {
			t.Errorf("the cause is in the public message %q", f.Message)
		}
	}
}

func TestCheckListen(t *testing.T) { // R6
	t.Parallel()
	for _, c := range []struct {
		addr string
		tls  bool
		ok   bool
	}{
		{"127.0.0.1:7777", false, true}, {"127.9.9.9:1", false, true}, {"[::1]:7777", false, true}, {"localhost:0", false, true},
		{":7777", false, false}, {"0.0.0.0:7777", false, false}, {"[::]:7777", false, false}, {"192.168.1.4:7777", false, false},
		{"example.com:80", false, false}, {"127.0.0.1.example.com:80", false, false}, {"7777", false, false},
		{":7777", true, true}, {"0.0.0.0:443", true, true}, {"nonsense", true, false},
	} {
		if err := CheckListen(c.addr, c.tls); (err == nil) != c.ok {
			t.Errorf("CheckListen(%q, %v) = %v", c.addr, c.tls, err)
		}
	}
}

func TestParseJSONRefuses(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"no JSON":         `{`,
		"array":           `[]`,
		"string":          `"x"`,
		"null":            `null`,
		"garbage after":   `{} x`,
		"object after":    `{}{}`,
		"name twice":      `{"a":1,"a":2}`,
		"name twice deep": `{"x":[{"a":1,"\u0061":2}]}`,
		"NUL in name":     `{"a\u0000":1}`,
		"NUL in value":    `{"a":"x\u0000y"}`,
		"NUL byte":        "{\"a\":\"\x00\"}",
		"not UTF-8":       "{\"a\":\"\xff\"}",
		"deep arrays":     `{"a":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}`,
		"very deep":       strings.Repeat(`{"a":`, 200_000),
		"huge number":     `{"a":1e999}`,
		"long number":     `{"a":1` + strings.Repeat("0", 64) + `}`,
		"comment":         `{} // x`,
		"trailing comma":  `{"a":1,}`,
	} {
		_, err := parseJSON([]byte(body))
		if !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := parseJSON([]byte(` {"a":[1,2.5,{"b":null}],"c":"ü"} ` + "\n")); err != nil {
		t.Error(err)
	}
}

func FuzzBody(f *testing.F) {
	f.Add(`{"name":"a","cpus":2}`)
	f.Add(`{"sleep":{"mode":"auto"}}`)
	f.Add(`{"labels":{"a":"b"},"env":{"A":"1"}}`)
	f.Add(`{"command":["a"],"pty":{"rows":1,"cols":2}}`)
	f.Add(`[[[[`)
	rules, err := loadContract(api.Spec)
	if err != nil {
		f.Fatal(err)
	}
	bodies := map[string]any{
		"POST /v1/sandboxes":                new(api.CreateSandbox),
		"PATCH /v1/sandboxes/{ref}":         new(api.UpdateSandbox),
		"POST /v1/sandboxes/{ref}/commands": new(api.StartCommand),
		"POST /v1/sandboxes/{ref}/fork":     new(api.ForkSandbox),
		"POST /v1/templates":                new(api.CreateTemplate),
		"POST /v1/sandboxes/{ref}/stop":     nil,
	}
	f.Fuzz(func(t *testing.T, body string) {
		for pattern, into := range bodies {
			w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			value, err := readBody(w, r, rules[pattern])
			if err != nil {
				if k := faultOf(err).Kind; k == fault.Internal {
					t.Fatalf("%s: %v", pattern, err)
				}
				continue
			}
			if _, err := hashRequest(value, nil); err != nil {
				t.Fatal(err)
			}
			if into == nil {
				continue
			}
			// What the contract lets through the types can hold, or say what they cannot.
			if err := json.NewDecoder(r.Body).Decode(reflect.New(reflect.TypeOf(into).Elem()).Interface()); err != nil {
				if _, ok := errors.AsType[*json.UnmarshalTypeError](err); !ok {
					t.Fatalf("%s: %q: %v", pattern, body, err)
				}
			}
		}
	})
}

func TestHashRequest(t *testing.T) { // V1: canonical JSON
	t.Parallel()
	hash := func(body, query string) string {
		t.Helper()
		v, err := parseJSON([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPost, "/?"+query, nil)
		sum, err := hashRequest(v, r.URL.Query())
		if err != nil {
			t.Fatal(err)
		}
		return string(sum)
	}
	base := hash(`{"name":"a","cpus":2}`, "")
	for _, same := range [][2]string{{`{ "cpus": 2.0, "name":"\u0061" }`, ""}, {`{"name":"a","cpus":2}`, "wait=10s"}, {`{"name":"a","cpus":2}`, "permanent="}} {
		if hash(same[0], same[1]) != base {
			t.Errorf("%v is another request", same)
		}
	}
	for _, other := range [][2]string{{`{"name":"a","cpus":3}`, ""}, {`{"name":"a"}`, ""}, {`{"name":"a","cpus":2}`, "permanent=true"}} {
		if hash(other[0], other[1]) == base {
			t.Errorf("%v is the same request", other)
		}
	}
}

func TestParseWait(t *testing.T) { // V2
	t.Parallel()
	for in, want := range map[string]time.Duration{
		"": 0, "0": 0, "60": time.Minute, "60s": time.Minute, "1m30s": 90 * time.Second, "10m": 10 * time.Minute, "600": 10 * time.Minute,
	} {
		if got, err := parseWait(in); err != nil || got != want {
			t.Errorf("parseWait(%q) = %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"10m1s", "601", "-1s", "-5", "soon", "1h", "9999999999999999999", "NaN"} {
		if got, err := parseWait(in); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("parseWait(%q) = %v, %v", in, got, err)
		}
	}
}

func TestWalkOrder(t *testing.T) {
	t.Parallel()
	order := []string{"/a", "/a/b", "/a/b/c", "/a/d", "/a.txt", "/b"} // a directory before what is in it, names by bytes
	for i, a := range order {
		for j, b := range order {
			if got := walksAfter(a, b); got != (i > j) {
				t.Errorf("walksAfter(%s, %s) = %v", a, b, got)
			}
		}
	}
}

func TestParseSignal(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]int32{"TERM": 15, "SIGTERM": 15, "sigint": 2, "9": 9, "64": 64} {
		if got, err := parseSignal(in); err != nil || got != want {
			t.Errorf("parseSignal(%q) = %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "0", "65", "-9", "SIGNONE", "SIG"} {
		if got, err := parseSignal(in); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("parseSignal(%q) = %d, %v", in, got, err)
		}
	}
}

// A guest is not believed: bytes come in order, each once, and no exit is made up (E2).
func TestReplayRefusesWhatBreaksTheProtocol(t *testing.T) {
	t.Parallel()
	out := func(cursor int64, data string) *guestproto.CommandEvent {
		return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Output{Output: &guestproto.Output{
			Stream: guestproto.Stream_STREAM_STDOUT, Cursor: cursor, Data: []byte(data),
		}}}
	}
	gap := func(from, to int64) *guestproto.CommandEvent {
		return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Gap{Gap: &guestproto.Gap{From: from, To: to}}}
	}
	exit := func(code int32, word string) *guestproto.CommandEvent {
		return &guestproto.CommandEvent{Event: &guestproto.CommandEvent_Exit{Exit: &guestproto.Exit{Code: code, Error: word}}}
	}
	for name, bad := range map[string]*guestproto.CommandEvent{
		"repeat":         out(5, "x"),
		"jump":           out(11, "x"),
		"negative":       out(-1, "x"),
		"overflow":       out(math.MaxInt64, "xx"),
		"stream":         {Event: &guestproto.CommandEvent_Output{Output: &guestproto.Output{Cursor: 10, Data: []byte("x")}}},
		"gap back":       gap(10, 9),
		"empty gap":      gap(10, 10),
		"gap from other": gap(9, 12),
		"code":           exit(256, ""),
		"negative code":  exit(-1, ""),
		"lost":           exit(0, exitLost),
		"empty":          {},
	} {
		r := replay{sandbox: "sbx", next: 10, end: noEnd}
		if line, err := r.line(bad); err == nil {
			t.Errorf("%s was let through as %+v", name, line)
		}
	}
	r := replay{next: 0, end: 6}
	var got []byte
	for _, e := range []*guestproto.CommandEvent{out(0, "ab"), gap(2, 4), out(4, "cdef")} {
		line, err := r.line(e)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, line.Data...)
	}
	if string(got) != "abcd" || !r.done() {
		t.Errorf("got %q, done %v", got, r.done())
	}
}

// N5: the first call of a new generation uses a new connection.
func TestGuestPoolDropsAnOlderGeneration(t *testing.T) {
	t.Parallel()
	var pool guestPool
	dial := func(context.Context) (net.Conn, error) { return nil, errors.New("not called") }
	first := pool.client("sbx_a", 1, "t1", dial)
	if pool.client("sbx_a", 1, "t1", dial) != first {
		t.Error("one generation has two clients")
	}
	second := pool.client("sbx_a", 2, "t2", dial)
	if second == first {
		t.Error("the new generation uses the old client")
	}
	if late := pool.client("sbx_a", 1, "t1", dial); late == second || pool.client("sbx_a", 2, "t2", dial) != second {
		t.Error("a late caller of the old generation took the new one's place")
	}
	pool.drop("sbx_a", first)
	if pool.client("sbx_a", 2, "t2", dial) != second {
		t.Error("dropping the old client took the new one away")
	}
	pool.drop("sbx_a", second)
	if pool.client("sbx_a", 2, "t2", dial) == second {
		t.Error("a dropped client is used again")
	}
}

func TestGuestErrors(t *testing.T) {
	t.Parallel()
	g := guest{pool: &guestPool{}, id: "sbx_a", Client: guestproto.NewClient(nil, "t")}
	// A guest's refusal of a token must never look like a refusal of the caller's key.
	if f := faultOf(g.failed(fault.New(fault.Unauthenticated, "wrong token"))); f.Kind != fault.Unavailable {
		t.Errorf("a stale token is %s", f.Kind)
	}
	if f := faultOf(g.failed(fault.New(fault.NotFound, "no such file").Because("x"))); f.Kind != fault.NotFound || f.Message != "no such file" {
		t.Errorf("a guest's own fault became %v", f)
	}
}
