package apiserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// Bodies that are refused, each with its code, and none leaves anything behind (SPEC 16).
func TestBodiesThatAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, c := range map[string]struct {
		body    string
		headers []string
		kind    fault.Kind
	}{
		"no body":            {"", nil, fault.InvalidArgument},
		"no JSON":            {"hello", nil, fault.InvalidArgument},
		"form":               {"name=a", []string{"Content-Type: application/x-www-form-urlencoded"}, fault.InvalidArgument},
		"no content type":    {`{"name":"a"}`, []string{"Content-Type: "}, fault.InvalidArgument},
		"other content type": {`{"name":"a"}`, []string{"Content-Type: text/plain"}, fault.InvalidArgument},
		"array":              {`[]`, nil, fault.InvalidArgument},
		"garbage after":      {`{"name":"a"}]`, nil, fault.InvalidArgument},
		"name twice":         {`{"name":"a","name":"b"}`, nil, fault.InvalidArgument},
		"other case":         {`{"Name":"a"}`, nil, fault.InvalidArgument},
		"unknown":            {`{"colour":"red"}`, nil, fault.InvalidArgument},
		"NUL":                {`{"name":"a\u0000"}`, nil, fault.InvalidArgument},
		"no name":            {`{"name":"A b"}`, nil, fault.InvalidArgument},
		"deep":               {`{"labels":` + strings.Repeat("[", 50) + strings.Repeat("]", 50) + `}`, nil, fault.InvalidArgument},
		"float":              {`{"cpus":1.5}`, nil, fault.InvalidArgument},
		"exponent":           {`{"cpus":1e0}`, nil, fault.InvalidArgument},
		"over int64":         {`{"memory_bytes":99999999999999999999}`, nil, fault.InvalidArgument},
		"zero CPUs":          {`{"cpus":0}`, nil, fault.InvalidArgument},
		"negative":           {`{"disk_bytes":-1}`, nil, fault.InvalidArgument},
		"ttl zero":           {`{"ttl_seconds":0}`, nil, fault.InvalidArgument},
		"ttl over 30 days":   {`{"ttl_seconds":2592001}`, nil, fault.InvalidArgument},
		"ttl over all":       {`{"ttl_seconds":9223372036854775807}`, nil, fault.InvalidArgument},
		"no idle window":     {`{"sleep":{"mode":"auto","idle_seconds":29}}`, nil, fault.InvalidArgument},
		"on deadline":        {`{"on_deadline":"explode"}`, nil, fault.InvalidArgument},
		"on deadline, never": {`{"on_deadline":"sleep","sleep":{"mode":"never"}}`, nil, fault.InvalidArgument},
		"a snapshot":         {`{"snapshot":"s"}`, nil, fault.Unsupported},
		"over 1 MiB":         {`{"env":{"A":"` + strings.Repeat("x", maxBody) + `"}}`, nil, fault.TooLarge},
		"no template":        {`{"template":"none"}`, nil, fault.NotFound},
	} {
		refusedNamed(t, name, r.do("POST", "/v1/sandboxes", c.body, c.headers...), c.kind)
	}
	if list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes", ""), 200); len(list.Sandboxes) != 0 {
		t.Errorf("a refused call made %+v", list.Sandboxes)
	}
	if e := refused(t, r.do("POST", "/v1/sandboxes", `{"snapshot":"s"}`), fault.Unsupported); e.Reason != "snapshots" || !strings.Contains(e.Message, "snapshot") {
		t.Errorf("unsupported without its capability: %+v", e)
	}
}

func refusedNamed(t *testing.T, name string, a answer, kind fault.Kind) {
	t.Helper()
	if a.status != statuses[kind] || !strings.Contains(string(a.body), `"`+string(kind)+`"`) {
		t.Errorf("%s: %d %s, want %s", name, a.status, a.body, kind)
	}
}

// 100 MB are refused without being read.
func TestHugeBodyIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for name, announced := range map[string]int64{"announced": 100 << 20, "chunked": -1} {
		sent := &endless{left: 100 << 20}
		req := r.request("POST", "/v1/sandboxes", sent, "Content-Type: application/json")
		req.ContentLength = announced
		began := time.Now()
		res, err := r.client.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_ = res.Body.Close()
		if res.StatusCode != 413 || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %d after %v", name, res.StatusCode, time.Since(began))
		}
		if read := sent.read(); read > 16<<20 {
			t.Errorf("%s: the server took %d bytes", name, read)
		}
	}
}

// endless is a body of spaces.
type endless struct {
	mu   sync.Mutex
	left int64
	done int64
}

func (e *endless) Read(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.left <= 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), e.left)
	for i := range p[:n] {
		p[i] = ' '
	}
	e.left -= n
	e.done += n
	return int(n), nil
}

func (e *endless) read() int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.done
}

func TestWhoMayCall(t *testing.T) { // R6
	t.Parallel()
	r := newRig(t)
	for name, c := range map[string]struct {
		headers []string
		kind    fault.Kind // "" is answered
		reason  string
	}{
		"key":                {nil, "", ""},
		"lower-case scheme":  {[]string{"Authorization: bearer " + r.key}, "", ""},
		"header key":         {[]string{"Authorization: ", "X-API-Key: " + r.key}, "", ""},
		"no key":             {[]string{"Authorization: "}, fault.Unauthenticated, ""},
		"wrong key":          {[]string{"Authorization: Bearer hutch_" + strings.Repeat("a", 52)}, fault.Unauthenticated, ""},
		"not a key":          {[]string{"Authorization: Bearer x"}, fault.Unauthenticated, ""},
		"basic":              {[]string{"Authorization: Basic dTpw"}, fault.Unauthenticated, ""},
		"localhost":          {[]string{"Host: localhost:9"}, "", ""},
		"IPv6":               {[]string{"Host: [::1]:9"}, "", ""},
		"allowed name":       {[]string{"Host: hutch.TEST"}, "", ""},
		"rebound name":       {[]string{"Host: evil.example"}, fault.PermissionDenied, "host"},
		"rebound to port":    {[]string{"Host: evil.example:7777"}, fault.PermissionDenied, "host"},
		"name with loopback": {[]string{"Host: 127.0.0.1.evil.example"}, fault.PermissionDenied, "host"},
		"other address":      {[]string{"Host: 10.0.0.1"}, fault.PermissionDenied, "host"},
		"own page":           {[]string{"Host: localhost:9", "Origin: http://localhost:9"}, "", ""},
		"page of other port": {[]string{"Host: localhost:9", "Origin: http://localhost:10"}, fault.PermissionDenied, "origin"},
		"foreign page":       {[]string{"Origin: https://evil.example"}, fault.PermissionDenied, "origin"},
		"page without name":  {[]string{"Origin: null"}, fault.PermissionDenied, "origin"},
	} {
		a := r.do("GET", "/v1/version", "", c.headers...)
		if c.kind == "" {
			if a.status != 200 {
				t.Errorf("%s: %d %s", name, a.status, a.body)
			}
			continue
		}
		if e := refused(t, a, c.kind); e.Reason != c.reason {
			t.Errorf("%s: reason %q", name, e.Reason)
		}
	}
	refused(t, r.do("GET", "/healthz", "", "Host: evil.example"), fault.PermissionDenied)
	if a := r.do("GET", "/v1/version", "", "Authorization: "); a.header.Get("WWW-Authenticate") != "Bearer" {
		t.Error("401 without WWW-Authenticate")
	}
	if strings.Contains(r.log.String(), r.key) {
		t.Error("the log has the key")
	}
}

func TestPathsThatAreNotThere(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	for _, c := range []struct {
		method, path string
		kind         fault.Kind
	}{
		{"GET", "/", fault.NotFound},
		{"GET", "/v2/sandboxes", fault.NotFound},
		{"PUT", "/v1/sandboxes", fault.NotFound},
		{"HEAD", "/v1/sandboxes", fault.NotFound},
		{"GET", "/v1/sandboxes/", fault.InvalidArgument},
		{"GET", "/v1//sandboxes", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/../keys", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/%2e%2e", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/a%00b", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/sbx_none", fault.NotFound},
		{"GET", "/v1/sandboxes/no-such", fault.NotFound},
		{"GET", "/v1/sandboxes/" + strings.Repeat("x", 5000), fault.NotFound},
		{"GET", "/v1/sandboxes/%F0%9F%98%80", fault.NotFound},
		{"GET", "/v1/sandboxes/a%2Fb", fault.NotFound},
		{"GET", "/v1/sandboxes/';%20DROP%20TABLE%20sandboxes;--", fault.NotFound},
		{"GET", "/v1/operations/op_none", fault.NotFound},
		{"GET", "/v1/sandboxes/box/commands/none", fault.NotFound},
		{"DELETE", "/v1/keys/none", fault.NotFound},
		{"DELETE", "/v1/templates/none", fault.NotFound},
		{"GET", "/v1/sandboxes?limit=0", fault.InvalidArgument},
		{"GET", "/v1/sandboxes?cursor=%21", fault.InvalidArgument},
		{"GET", "/v1/sandboxes?label=a", fault.InvalidArgument},
		{"GET", "/v1/sandboxes?colour=red", fault.InvalidArgument},
		{"GET", "/v1/sandboxes?limit=%zz", fault.InvalidArgument},
		{"POST", "/v1/sandboxes/box/sleep?wait=11m", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/box/files?path=", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/box/files", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/box/files?path=a%00b", fault.InvalidArgument},
		{"GET", "/v1/sandboxes/box/files?path=../../../../no/such", fault.NotFound},
	} {
		a := r.do(c.method, c.path, "")
		if c.method == "HEAD" {
			if a.status != 404 {
				t.Errorf("HEAD: %d", a.status)
			}
			continue
		}
		refusedNamed(t, c.method+" "+c.path, a, c.kind)
	}
	if a := r.do("PUT", "/v1/sandboxes", ""); a.header.Get("Allow") != "GET, POST" {
		t.Errorf("Allow: %q", a.header.Get("Allow"))
	}
}

// V1: a reply that is lost makes one sandbox, however often it is asked for again.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const key = "Idempotency-Key: once"
	first := decode[api.Change](t, r.do("POST", "/v1/sandboxes", `{"name":"a","labels":{"x":"1","y":"2"}}`, key), 201)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			again := r.do("POST", "/v1/sandboxes?wait=20s", ` {"labels":{"y":"2","x":"1"}, "name":"\u0061"}`, key)
			got := decode[api.Change](t, again, 200)
			if got.Sandbox.ID != first.Sandbox.ID || got.Operation.ID != first.Operation.ID || got.Outcome != api.OutcomeStarted {
				t.Errorf("the repeat gives %+v", got)
			}
		})
	}
	wg.Wait()
	if list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes", ""), 200); len(list.Sandboxes) != 1 {
		t.Errorf("%d sandboxes", len(list.Sandboxes))
	}
	if e := refused(t, r.do("POST", "/v1/sandboxes", `{"name":"b"}`, key), fault.Conflict); e.Reason != "key_reused" {
		t.Errorf("another body: %+v", e)
	}
	decode[api.Change](t, r.do("DELETE", "/v1/sandboxes/a?wait=20s", "", key), 200) // a key is of one route
	refused(t, r.do("DELETE", "/v1/sandboxes/a?wait=20s&permanent=true", "", key), fault.Conflict)
	refused(t, r.do("POST", "/v1/sandboxes", `{"template":"none"}`, "Idempotency-Key: two"), fault.NotFound)
	decode[api.Change](t, r.do("POST", "/v1/sandboxes", `{"name":"c"}`, "Idempotency-Key: two"), 201) // a refusal is not remembered
	refused(t, r.do("POST", "/v1/sandboxes", `{}`, "Idempotency-Key: "+strings.Repeat("k", 256)), fault.InvalidArgument)
}

// V2 and S6: at once without a wait, 202 where it runs out, 200 at the end, with the
// operation's error inside.
func TestWait(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	release := r.host.hold(sandbox.Sleep)
	begun := decode[api.Change](t, r.do("POST", "/v1/sandboxes/box/sleep", ""), 202)
	if begun.Outcome != api.OutcomeStarted || begun.Sandbox.Operation == nil || begun.Sandbox.State != api.StateReady { // S1
		t.Errorf("begun %+v", begun)
	}
	ranOut := decode[api.Change](t, r.do("POST", "/v1/sandboxes/box/sleep?wait=50ms", ""), 202)
	if ranOut.Outcome != api.OutcomeJoined || ranOut.Operation.ID != begun.Operation.ID { // S4
		t.Errorf("ran out %+v", ranOut)
	}
	if e := refused(t, r.do("POST", "/v1/sandboxes/box/stop", ""), fault.Conflict); e.Reason != begun.Operation.ID { // S4
		t.Errorf("conflict %+v", e)
	}
	ended := make(chan answer, 1)
	go func() { ended <- r.do("GET", "/v1/operations/"+begun.Operation.ID+"?wait=20s", "") }()
	release()
	if op := decode[api.Operation](t, <-ended, 200); op.Status != api.OperationStatusSucceeded {
		t.Errorf("waited for %+v", op)
	}
	done := decode[api.Change](t, r.do("POST", "/v1/sandboxes/box/sleep", ""), 200)
	if done.Outcome != api.OutcomeDone || done.Operation != nil {
		t.Errorf("done %+v", done)
	}
	r.host.fail(sandbox.Wake, &hostproto.Failure{Kind: "data_corrupt", Message: "a chunk of the memory does not hold", Reason: "digest"})
	failed := decode[api.Change](t, r.do("POST", "/v1/sandboxes/box/wake?wait=20s", ""), 200)
	if e := failed.Operation.Error; failed.Operation.Status != api.OperationStatusFailed || e == nil || e.Code != "data_corrupt" || e.Reason != "digest" {
		t.Errorf("failed %+v", failed.Operation)
	}
}

// V3: a client that goes away undoes nothing, and a shutdown ends its wait.
func TestClientThatGoesAway(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	release := r.host.hold(sandbox.Stop)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		res, err := r.client.Do(r.request("POST", "/v1/sandboxes/box/stop?wait=10m", nil).WithContext(ctx))
		if err == nil {
			_ = res.Body.Close()
		}
		gone <- err
	}()
	eventually(t, func() bool { return decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/box", ""), 200).Operation != nil })
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	release()
	if box := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/box?wait=20s", ""), 200); box.State != api.StateStopped {
		t.Errorf("the sandbox is %s", box.State)
	}

	release = r.host.hold(sandbox.Resume)
	defer release()
	waiting := make(chan answer, 1)
	go func() { waiting <- r.do("POST", "/v1/sandboxes/box/resume?wait=10m", "") }()
	eventually(t, func() bool { return decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/box", ""), 200).Operation != nil })
	if err := r.http.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c := decode[api.Change](t, <-waiting, 202); c.Operation.EndedAt != nil {
		t.Errorf("at the shutdown %+v", c)
	}
}

// Slow senders lose their connection (slow loris), and nonsense is answered.
func TestConnectionLimits(t *testing.T) {
	t.Parallel()
	srv := HTTPServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	if srv.ReadHeaderTimeout == 0 || srv.ReadHeaderTimeout > 30*time.Second || srv.IdleTimeout == 0 || srv.MaxHeaderBytes == 0 {
		t.Errorf("limits: %v %v %d", srv.ReadHeaderTimeout, srv.IdleTimeout, srv.MaxHeaderBytes)
	}
	r := newRig(t)
	for name, raw := range map[string]string{
		"nonsense":     "hello\r\n\r\n",
		"huge header":  "GET / HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("x", 2*maxHeader) + "\r\n\r\n",
		"no host":      "GET /v1/version HTTP/1.1\r\n\r\n",
		"absolute URL": "GET http://evil.example/v1/version HTTP/1.1\r\nHost: localhost\r\n\r\n",
		"old protocol": "GET /v1/version HTTP/1.0\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(deadline))
		_, _ = io.WriteString(conn, raw) // the server may answer and close before all is sent
		line, err := bufio.NewReader(conn).ReadString('\n')
		_ = conn.Close()
		var status int
		if _, scanErr := fmt.Sscanf(line, "HTTP/1.%d %d", new(int), &status); err != nil || scanErr != nil || status < 400 || status >= 500 {
			t.Errorf("%s: %q, %v", name, line, err)
		}
	}
	if a := r.do("GET", "/healthz", ""); a.status != 200 {
		t.Error("the server is gone")
	}
}

// A handler that panics fails its own request and nothing else.
func TestPanicIsAnInternalError(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.host.mu.Lock()
	r.host.upset = func() { panic("boom: secret") }
	r.host.mu.Unlock()
	a := r.do("GET", "/v1/df", "")
	refused(t, a, fault.Internal)
	if strings.Contains(string(a.body), "secret") {
		t.Error("a cause is in an answer")
	}
	if log := r.log.String(); !strings.Contains(log, "boom") || !strings.Contains(log, a.header.Get("X-Request-Id")) {
		t.Error("the log does not have the panic under its request")
	}
}

// R2: a list is stable while rows come and go.
func TestPagesOfSandboxes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for i := range 5 {
		r.create(fmt.Sprintf("box-%d", i))
	}
	first := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes?limit=2", ""), 200)
	decode[api.Change](t, r.do("DELETE", "/v1/sandboxes/box-1?wait=20s", ""), 200) // the row that the cursor names
	var names []string
	for page := first; ; {
		for _, s := range page.Sandboxes {
			names = append(names, s.Name)
		}
		if page.NextCursor == "" {
			break
		}
		page = decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes?limit=2&cursor="+page.NextCursor, ""), 200)
	}
	if got := strings.Join(names, " "); got != "box-0 box-1 box-2 box-3 box-4" {
		t.Errorf("the pages have %s", got)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, holds func() bool) {
	t.Helper()
	end := time.Now().Add(deadline)
	for !holds() {
		if time.Now().After(end) {
			t.Fatal("what the test waits for did not come")
		}
		time.Sleep(5 * time.Millisecond) // between two looks, with the deadline above
	}
}
