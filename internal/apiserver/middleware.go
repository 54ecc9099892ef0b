package apiserver

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/span"
)

// call is what the middleware learns of a request and the handlers need.
type call struct {
	id       string // of the request, in every answer and log line
	pattern  string // of the mux: method and path template, "" for no call of the API
	route    string // method and path, as an idempotency key is scoped
	accept   string
	host     string // that the caller called
	caller   control.Actor
	bodyHash []byte // SHA-256 of the canonical JSON body
	end      func(status int)
	span     span.Span // nil where the call is not traced
}

// accepts says whether the client asks for a media type by name.
func (c *call) accepts(media string) bool { return strings.Contains(c.accept, media) }

type callKey struct{}

// callOf gives the request's call; outside of the middleware an empty one.
func callOf(ctx context.Context) *call {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		return c
	}
	return &call{}
}

func requestID(ctx context.Context) string { return callOf(ctx).id }

// ServeHTTP runs a request through all checks and to its handler.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{id: "req_" + strings.ToLower(rand.Text()), route: r.Method + " " + r.URL.Path, accept: r.Header.Get("Accept"), host: r.Host}
	if _, pattern := s.mux.Handler(r); s.contract[pattern] != nil {
		c.pattern = pattern
	}
	_, path, _ := strings.Cut(c.pattern, " ")
	c.end = s.request(path, r.Method)
	ctx, traced := s.trace(r, c, path)
	ctx = control.WithCall(ctx, control.Call{Request: c.id, Trace: traced})
	r = r.WithContext(context.WithValue(ctx, callKey{}, c))
	rec := &recorder{ResponseWriter: w}
	began := time.Now()
	defer s.recover(rec, r, began)
	h := rec.Header()
	h.Set("X-Request-Id", c.id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	if err := s.admit(rec, r, c); err != nil {
		s.writeError(rec, r, err)
		return
	}
	s.mux.ServeHTTP(rec, r)
}

// admit checks a request in the order that tells a stranger least: the Host and the
// Origin, the path, the key, then what was sent.
func (s *server) admit(w http.ResponseWriter, r *http.Request, c *call) error {
	if err := s.checkHost(r); err != nil {
		return err
	}
	if err := checkPath(r.URL); err != nil {
		return err
	}
	op, served := s.contract[c.pattern]
	if served && op.public {
		return op.checkQuery(r.URL.Query())
	}
	caller, err := s.authenticate(r)
	if err != nil {
		return err
	}
	c.caller = caller
	if !served || r.Method == http.MethodHead {
		return s.noSuchCall(w, r)
	}
	if op.id != "updateProject" { // that of another project is not found, whatever the key may do
		if err := caller.Need(op.scope); err != nil {
			return err
		}
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return fault.Wrap(err, fault.InvalidArgument, "the query cannot be read; percent-encode it")
	}
	if err := op.checkQuery(query); err != nil {
		return err
	}
	if err := op.checkHeaders(r.Header); err != nil {
		return err
	}
	if op.binary {
		return checkStream(w, r, op)
	}
	if r.Method == http.MethodGet {
		return nil
	}
	body, err := readBody(w, r, op)
	if err != nil {
		return err
	}
	c.bodyHash, err = hashRequest(body, query)
	return err
}

// checkHost refuses names that are not the server's own, which is how a web page
// whose name was pointed at this address (DNS rebinding) shows itself, and pages of
// another origin.
func (s *server) checkHost(r *http.Request) error {
	if !s.ownName(hostname(r.Host)) {
		return fault.New(fault.PermissionDenied,
			"the Host %.100q is not a name of this server; call it by the address that it listens on, as 127.0.0.1", r.Host).Because("host")
	}
	origin := r.Header.Get("Origin")
	if origin == "" {
		return nil
	}
	u, err := url.Parse(origin)
	if err != nil || u.Host == "" || !strings.EqualFold(u.Host, r.Host) {
		return fault.New(fault.PermissionDenied, "pages from %.100q may not call this server; only its own pages may", origin).Because("origin")
	}
	return nil
}

func (s *server) ownName(name string) bool {
	if strings.EqualFold(name, "localhost") {
		return true
	}
	if ip := net.ParseIP(name); ip != nil && ip.IsLoopback() {
		return true
	}
	return slices.Contains(s.hosts, strings.ToLower(name))
}

// hostname takes the port and an IPv6 address's brackets away.
func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return strings.Trim(hostport, "[]")
}

// checkPath refuses what the mux would clean up and redirect: no client of the API
// needs it, and a redirect would lose a body.
func checkPath(u *url.URL) error {
	if !strings.HasPrefix(u.Path, "/") || strings.ContainsRune(u.Path, 0) {
		return fault.New(fault.InvalidArgument, "the path cannot be read")
	}
	for _, part := range strings.Split(u.Path[1:], "/") {
		if part == "" && u.Path != "/" || part == "." || part == ".." {
			return fault.New(fault.InvalidArgument, "the path %.200q has an empty part, `.` or `..`; a name in it must be percent-encoded", u.Path)
		}
	}
	return nil
}

// authenticate finds the key of a request.
func (s *server) authenticate(r *http.Request) (control.Actor, error) {
	secret := r.Header.Get("X-API-Key")
	if auth := r.Header.Get("Authorization"); auth != "" {
		scheme, value, _ := strings.Cut(auth, " ")
		if !strings.EqualFold(scheme, "Bearer") {
			return control.Actor{}, fault.New(fault.Unauthenticated, "the Authorization header takes `Bearer hutch_…`")
		}
		secret = strings.TrimSpace(value)
	}
	if secret == "" {
		return control.Actor{}, fault.New(fault.Unauthenticated,
			"no API key was given; send `Authorization: Bearer hutch_…` or `X-API-Key`")
	}
	return s.control.Authenticate(r.Context(), secret)
}

// methods are what the API is asked with.
var methods = []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}

// noSuchCall says which methods a path takes, if any.
func (s *server) noSuchCall(w http.ResponseWriter, r *http.Request) error {
	var allowed []string
	for _, m := range methods {
		probe := r.Clone(r.Context())
		probe.Method = m
		if _, pattern := s.mux.Handler(probe); pattern != "" {
			allowed = append(allowed, m)
		}
	}
	if len(allowed) == 0 {
		return fault.New(fault.NotFound, "there is no %.200s; see /openapi.yaml", r.URL.Path)
	}
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	return fault.New(fault.NotFound, "there is no %.20s %.200s; it takes %s", r.Method, r.URL.Path, strings.Join(allowed, ", "))
}

// recover ends a request: a panic becomes an internal error, and the access log has
// its line. What changes something is logged at Info, the rest at Debug.
func (s *server) recover(w *recorder, r *http.Request, began time.Time) {
	ctx := r.Context()
	aborted := false
	if v := recover(); v != nil {
		if aborted = v == http.ErrAbortHandler; !aborted { //nolint:errorlint // a value that was panicked with
			s.log.ErrorContext(ctx, "request panicked", "request", requestID(ctx), "err", v, "stack", string(debug.Stack()))
			if aborted = w.status != 0; !aborted {
				s.writeError(w, r, fault.New(fault.Internal, "an internal error; the server's log has its cause"))
			}
		}
	}
	level := slog.LevelDebug
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		level = slog.LevelInfo
	}
	s.log.Log(ctx, level, "request", "request", requestID(ctx), "method", r.Method, "path", r.URL.Path,
		"status", w.status, "bytes", w.bytes, "took", time.Since(began), "key", callOf(ctx).caller.KeyID)
	c := callOf(ctx)
	c.end(w.status)
	if c.span != nil {
		c.span.End(broken(w.status), "http.response.status_code", strconv.Itoa(w.status))
	}
	if aborted { // the connection must break, so that the client knows that not all came
		panic(http.ErrAbortHandler)
	}
}

// untraced are calls that machines make all the time.
var untraced = []string{"", "/healthz", "/readyz", "/metrics"}

// trace begins the span of a call, beneath the caller's where it names one.
func (s *server) trace(r *http.Request, c *call, path string) (context.Context, string) {
	if s.span == nil || slices.Contains(untraced, path) {
		return r.Context(), ""
	}
	ctx, began := s.span.Begin(r.Context(), r.Header.Get("Traceparent"), c.pattern,
		"http.request.method", r.Method, "http.route", path, "hutch.request", c.id)
	c.span = began
	return ctx, began.Traceparent()
}

// broken is the error of a call that failed for the server's own fault.
func broken(status int) error {
	if status < http.StatusInternalServerError {
		return nil
	}
	return fault.New(fault.Internal, "the answer is %d", status)
}

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status int // 0 before the header
	bytes  int64
}

// WriteHeader notes the first final status.
func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && status >= 200 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write counts.
func (w *recorder) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(b)
	w.bytes += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController reach the connection.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }
