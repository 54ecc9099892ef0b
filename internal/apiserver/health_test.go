package apiserver

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// healthServer is a server with checks.
func healthServer(t *testing.T, log *syncBuffer, checks ...Check) http.Handler {
	t.Helper()
	st, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "hutch.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	h, err := New(Config{Control: control.New(control.Config{Store: st}), Log: debugLog(log), Checks: checks})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// ask calls a path without a key.
func ask(t *testing.T, h http.Handler, path string) answer {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", "http://localhost"+path, nil))
	return answer{status: w.Code, header: w.Header(), body: w.Body.Bytes()}
}

// asked waits until /readyz has an answer of a status: answers are believed for a moment.
func asked(t *testing.T, h http.Handler, status int) api.Readiness {
	t.Helper()
	for end := time.Now().Add(deadline); ; time.Sleep(20 * time.Millisecond) {
		a := ask(t, h, "/readyz")
		if a.status == status {
			return decode[api.Readiness](t, a, status)
		}
		if time.Now().After(end) {
			t.Fatalf("/readyz answers %d: %s", a.status, a.body)
		}
	}
}

// A database that is broken, a host that is gone and a server that stops are each named,
// to anybody, without their causes; the process lives all the same.
func TestReadinessNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	st, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "hutch.db"))
	if err != nil {
		t.Fatal(err)
	}
	var stopping atomic.Bool
	log := &syncBuffer{}
	h := healthServer(t, log,
		Check{"database", func(ctx context.Context) error { _, err := st.LastEvent(ctx); return err }},
		Check{"accepting", func(context.Context) error {
			if stopping.Load() {
				return fault.New(fault.Unavailable, "the server stops")
			}
			return nil
		}})
	if r := asked(t, h, 200); r.Status != api.ReadinessStatusReady || len(r.Checks) != 2 || !r.Checks[0].Ready {
		t.Errorf("it is %+v", r)
	}
	if err := st.Close(); err != nil { // whatever breaks it: nothing can be read any more
		t.Fatal(err)
	}
	r := asked(t, h, 503)
	if c := r.Checks[0]; r.Status != api.ReadinessStatusNotReady || c.Name != "database" || c.Ready || c.Message == "" || !r.Checks[1].Ready {
		t.Errorf("with a closed database it is %+v", r)
	}
	if strings.Contains(r.Checks[0].Message, "sql") {
		t.Errorf("a stranger is told %q", r.Checks[0].Message)
	}
	if a := ask(t, h, "/healthz"); a.status != 200 {
		t.Errorf("/healthz answers %d", a.status)
	}
	if !strings.Contains(log.String(), "database is closed") {
		t.Errorf("the log does not have the cause: %s", log)
	}
	stopping.Store(true)
	for end := time.Now().Add(deadline); ; time.Sleep(20 * time.Millisecond) {
		if r = asked(t, h, 503); !r.Checks[1].Ready {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("a server that stops says %+v", r)
		}
	}
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, `"msg":"request"`) && !strings.Contains(line, `"level":"DEBUG"`) {
			t.Errorf("a question for health is logged above debug: %s", line)
		}
	}
}

// A check that hangs, or panics, holds up nobody for long, and is asked again only when
// it has returned.
func TestReadinessOutlivesItsProbes(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var probes atomic.Int32
	h := healthServer(t, &syncBuffer{},
		Check{"host", func(context.Context) error { probes.Add(1); <-release; return nil }},
		Check{"database", func(context.Context) error {
			if probes.Load() < 2 {
				panic("boom")
			}
			return errors.New("secret")
		}})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			r := decode[api.Readiness](t, ask(t, h, "/readyz"), 503)
			if r.Checks[0].Ready || r.Checks[1].Ready {
				t.Errorf("it is %+v", r)
			}
		})
	}
	wg.Wait()
	asked(t, h, 503)
	if n := probes.Load(); n != 1 {
		t.Errorf("a check that hangs was asked %d times", n)
	}
	close(release)
	for end := time.Now().Add(deadline); ; time.Sleep(20 * time.Millisecond) {
		r := asked(t, h, 503)
		if strings.Contains(r.Checks[1].Message, "secret") {
			t.Fatalf("a stranger is told %q", r.Checks[1].Message)
		}
		if r.Checks[0].Ready && !r.Checks[1].Ready {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("it is %+v", r)
		}
	}
}

// While a server starts its process is seen to live, it says what it waits for, and
// other calls wait with it.
func TestGate(t *testing.T) {
	t.Parallel()
	g := NewGate("schema", "host")
	if a := ask(t, g, "/healthz"); a.status != 200 {
		t.Errorf("/healthz answers %d", a.status)
	}
	g.Passed()
	r := decode[api.Readiness](t, ask(t, g, "/readyz"), 503)
	if len(r.Checks) != 2 || !r.Checks[0].Ready || r.Checks[1].Ready || r.Checks[1].Message == "" {
		t.Errorf("it is %+v", r)
	}
	early := make(chan answer)
	go func() { early <- ask(t, g, "/v1/version") }()
	gone, leave := context.WithCancel(t.Context())
	leave()
	w := httptest.NewRecorder() // a client that goes away does not wait
	g.ServeHTTP(w, httptest.NewRequestWithContext(gone, "GET", "http://localhost/v1/version", nil))
	g.Open(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(299) }))
	for _, a := range []answer{<-early, ask(t, g, "/readyz"), ask(t, g, "/healthz")} {
		if a.status != 299 {
			t.Errorf("behind the open gate: %d", a.status)
		}
	}
}

// Metrics tell of all projects: a key of another than the operator's does not open them,
// and neither does none.
func TestMetricsAreTheOperators(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if err := r.control.EnsureProject(t.Context(), "other"); err != nil {
		t.Fatal(err)
	}
	_, key, err := r.control.CreateKey(t.Context(), control.Actor{Project: "other", Scopes: control.ScopesProject}, control.CreateKeyRequest{Name: "theirs"})
	if err != nil {
		t.Fatal(err)
	}
	if e := refused(t, r.do("GET", "/metrics", "", "Authorization: Bearer "+key), fault.PermissionDenied); e.Reason != "operators" {
		t.Errorf("another project's key: %+v", e)
	}
	refused(t, r.do("GET", "/metrics", "", "Authorization: "), fault.Unauthenticated)
	r.server.metrics = nil
	refused(t, r.do("GET", "/metrics", ""), fault.Unsupported)
}

// What is served on loopback without a key answers to this machine's names only.
func TestOnLoopback(t *testing.T) {
	t.Parallel()
	h := OnLoopback(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(299) }))
	for host, want := range map[string]int{
		"127.0.0.1:9464": 299, "[::1]:9464": 299, "localhost": 299, "evil.example:9464": 403, "10.0.0.1": 403, "": 403,
	} {
		w := httptest.NewRecorder()
		req := httptest.NewRequest("GET", "/metrics", nil)
		req.Host = host
		h.ServeHTTP(w, req)
		if w.Code != want {
			t.Errorf("Host %q: %d, want %d", host, w.Code, want)
		}
	}
}
