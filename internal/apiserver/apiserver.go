// Package apiserver serves the API of openapi.yaml over HTTP: it checks a request
// against that description, finds who calls, calls control or the guest agent, and
// writes the answer. It decides nothing about sandboxes.
package apiserver

import (
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/span"
)

//go:generate go run github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen@v2.8.2 -config oapi.yaml ../../api/openapi.yaml

// Config is what a server works with. Control is needed.
type Config struct {
	Control *control.Control
	Log     *slog.Logger // nothing is logged where nil
	Version string
	// AllowedHosts are the names and addresses, without a port, that the server may be
	// called by besides localhost and the loopback addresses.
	AllowedHosts []string
	// Request, where it is set, is told of each call when it begins, and what it gives is
	// told of its end. route is a path template of the API, "" for what is none.
	Request func(route, method string) (end func(status int))
	// Span traces calls; nil does not.
	Span span.Start
	// Metrics gives the metrics and their media type, to the operator's keys; nil is a server
	// without.
	Metrics func() (text []byte, media string, err error)
	// Checks are what the server needs to do work; /readyz tells of them.
	Checks []Check
	// PortURL gives the address of a sandbox's port, for a caller who called the server by
	// host; nil gives none.
	PortURL func(host, sandboxID string, port int) string
}

// server is the handler; its methods are the calls of the API.
type server struct {
	control  *control.Control
	log      *slog.Logger
	version  string
	hosts    []string
	contract contract
	mux      *http.ServeMux
	guests   guestPool
	known    hostCache

	request   func(route, method string) (end func(status int))
	span      span.Start
	metrics   func() (text []byte, media string, err error)
	readiness readiness
	portURL   func(host, sandboxID string, port int) string
}

var _ StrictServerInterface = (*server)(nil)

// New gives the handler of the whole API. It fails only where the description that is
// built in is damaged.
func New(cfg Config) (http.Handler, error) {
	rules, err := loadContract(api.Spec)
	if err != nil {
		return nil, err
	}
	s := &server{
		control: cfg.Control, log: cfg.Log, version: cfg.Version, hosts: lower(cfg.AllowedHosts),
		contract: rules, mux: http.NewServeMux(),
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.request, s.span = cfg.Request, cfg.Span; s.request == nil {
		s.request = func(string, string) func(int) { return func(int) {} }
	}
	if s.portURL = cfg.PortURL; s.portURL == nil {
		s.portURL = func(string, string, int) string { return "" }
	}
	s.metrics = cfg.Metrics
	s.readiness.checks, s.readiness.log = cfg.Checks, s.log
	HandlerWithOptions(NewStrictHandlerWithOptions(s, nil, StrictHTTPServerOptions{
		RequestErrorHandlerFunc:  s.badRequest,
		ResponseErrorHandlerFunc: s.answerError,
	}), StdHTTPServerOptions{BaseRouter: s.mux, ErrorHandlerFunc: s.badRequest})
	return s, nil
}

func lower(list []string) []string {
	out := slices.Clone(list)
	for i := range out {
		out[i] = strings.ToLower(out[i])
	}
	return out
}

// badRequest answers what the generated code cannot read.
func (s *server) badRequest(w http.ResponseWriter, r *http.Request, err error) {
	f := faultOf(err)
	if f.Kind == fault.Internal {
		f = fault.Wrap(err, fault.InvalidArgument, "the request cannot be read; see /openapi.yaml for its form")
	}
	s.writeError(w, r, f)
}

// answerError answers a call that failed. Where the answer has begun already, only a
// broken connection tells the client that it is not whole.
func (s *server) answerError(w http.ResponseWriter, r *http.Request, err error) {
	if rec, ok := w.(*recorder); ok && rec.status != 0 {
		if r.Context().Err() == nil {
			s.fail(r.Context(), err)
		}
		panic(http.ErrAbortHandler)
	}
	s.writeError(w, r, err)
}
