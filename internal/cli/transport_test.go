package cli

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// V1: a change that may have arrived is asked for again, with its key, while the server
// is being started; one that cannot have arrived is given up at once.
func TestV1TransportOutlastsARestart(t *testing.T) {
	t.Parallel()
	refused := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for name, c := range map[string]struct {
		method, key string
		errs        []error // then it answers
		tries       int
		fails       bool
	}{
		"a change, cut":               {"POST", "k", []error{io.ErrUnexpectedEOF, refused, refused, refused}, 5, false},
		"a change that never arrived": {"POST", "k", []error{refused}, 1, true},
		"a change without a way":      {"POST", "k", []error{&net.OpError{Op: "dial", Err: &net.DNSError{IsNotFound: true}}}, 1, true},
		"a read":                      {"GET", "", []error{io.ErrUnexpectedEOF, refused}, 2, true},
		"a change without a key":      {"POST", "", []error{io.ErrUnexpectedEOF}, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			tries := 0
			tr := &transport{delays: []time.Duration{0, 0, 0, 0, 0}, patience: time.Minute, base: roundTrip(func(r *http.Request) (*http.Response, error) {
				if tries++; tries > len(c.errs) {
					return &http.Response{StatusCode: 200, Body: http.NoBody}, nil
				}
				return nil, c.errs[tries-1]
			})}
			req, err := http.NewRequest(c.method, "http://host/", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set(headerKey, c.key)
			res, err := tr.RoundTrip(req)
			if err == nil {
				_ = res.Body.Close()
			}
			if tries != c.tries || (err != nil) != c.fails {
				t.Errorf("%d tries, %v", tries, err)
			}
		})
	}
	tr := &transport{patience: 1, base: roundTrip(func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF })}
	req, err := http.NewRequest("POST", "http://host/v1/sandboxes/a/sleep", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(headerKey, "k")
	if _, err := tr.RoundTrip(req); err == nil || !strings.Contains(err.Error(), "may be done all the same") {
		t.Errorf("a fate that is unknown: %v", err)
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// V1: only what is safe to do twice is repeated, and with the same key and body.
func TestTransportRepeatsWhatIsSafe(t *testing.T) {
	t.Parallel()
	cut := io.ErrUnexpectedEOF
	refused := &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	for name, c := range map[string]struct {
		method string
		key    string
		body   io.Reader
		err    error
		want   int
	}{
		"a read":                 {"GET", "", nil, cut, 3},
		"a write with a key":     {"POST", "k", strings.NewReader("body"), cut, 3},
		"a file written whole":   {"PUT", "", strings.NewReader("body"), cut, 3},
		"a write without a key":  {"POST", "", strings.NewReader("body"), cut, 1},
		"a body that is used up": {"PUT", "", io.MultiReader(strings.NewReader("body")), cut, 1},
		"nothing listens":        {"GET", "", nil, refused, 1},
		"no such host":           {"GET", "", nil, &net.DNSError{IsNotFound: true}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tries := 0
			tr := &transport{delays: []time.Duration{0, 0}, conn: connection{APIKey: "secret"}, base: roundTrip(func(r *http.Request) (*http.Response, error) {
				tries++
				if r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get(headerKey) != c.key {
					t.Errorf("headers %v", r.Header)
				}
				if r.Body != nil {
					if text, _ := io.ReadAll(r.Body); string(text) != "body" {
						t.Errorf("try %d sent %q", tries, text)
					}
				}
				return nil, c.err
			})}
			req, err := http.NewRequest(c.method, "http://host/", c.body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set(headerKey, c.key)
			if _, err := tr.RoundTrip(req); !fault.Is(err, fault.Unavailable) || tries != c.want {
				t.Errorf("%d tries, %v; want %d and unavailable", tries, err, c.want)
			}
		})
	}
}

func TestTransportGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	for want, end := range map[fault.Kind]func() (context.Context, context.CancelFunc){
		fault.Cancelled: func() (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			return ctx, cancel
		},
		fault.DeadlineExceeded: func() (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), -1)
		},
	} {
		ctx, cancel := end()
		tries := 0
		tr := &transport{delays: retryDelays, base: roundTrip(func(*http.Request) (*http.Response, error) {
			tries++
			return nil, ctx.Err()
		})}
		req := httptest.NewRequest("GET", "http://host/", nil).WithContext(ctx)
		if _, err := tr.RoundTrip(req); !fault.Is(err, want) || tries != 1 {
			t.Errorf("%d tries, %v; want one and %s", tries, err, want)
		}
		cancel()
	}
}

// V3: what was asked may go on; where that shows is said, and only where it does.
func TestWhereToLookAfterGivingUp(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for call, want := range map[string]string{
		"GET /v1/sandboxes":                    "nothing was changed",
		"POST /v1/sandboxes":                   "`hutch operations ls`",
		"POST /v1/sandboxes/demo/sleep":        "`hutch operations ls`",
		"POST /v1/sandboxes/demo/commands":     "`hutch commands ls NAME`",
		"POST /v1/sandboxes/demo/commands/c/x": "may be done all the same",
	} {
		method, path, _ := strings.Cut(call, " ")
		req := httptest.NewRequest(method, path, nil).WithContext(ctx)
		if err := networkFault(req, connection{URL: "http://host"}, ctx.Err()); !fault.Is(err, fault.Cancelled) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", call, err, want)
		}
	}
}

// The key never goes where the named server points to.
func TestKeyIsNotRedirected(t *testing.T) {
	t.Parallel()
	leaked := false
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		leaked = true
	}))
	defer other.Close()
	named := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer named.Close()
	vars := map[string]string{"HUTCH_URL": named.URL, "HUTCH_API_KEY": fakeKey}
	a := &app{env: Env{Getenv: func(name string) string { return vars[name] }}}
	c, err := a.newClient(New(a.env))
	if err != nil {
		t.Fatal(err)
	}
	_, err = read[api.Version](c.GetVersion(t.Context()))
	if !fault.Is(err, fault.Internal) || leaked {
		t.Errorf("GetVersion = %v, leaked %v", err, leaked)
	}
}

// SPEC section 16: an answer that is none of hutch's is an error that says so.
func TestForeignAnswers(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]fault.Kind{200: fault.Internal, 307: fault.Internal, 404: fault.Internal, 502: fault.Unavailable, 504: fault.Unavailable} {
		tr := &transport{base: roundTrip(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader("<html>gateway</html>"))}, nil
		})}
		req := httptest.NewRequest("GET", "http://host/", nil)
		if _, err := read[api.Version](tr.RoundTrip(req)); !fault.Is(err, want) || strings.Contains(err.Error(), "<html>") {
			t.Errorf("status %d: %v; want %s", status, err, want)
		}
	}
	if err := done(nil, errors.New("broken")); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("done = %v", err)
	}
}
