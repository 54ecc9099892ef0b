package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// Check is one thing that a server needs so that it can do work.
type Check struct {
	Name string
	// Probe gives nil where it is there. Its context ends soon; one that does not return
	// then counts as not there.
	Probe func(context.Context) error
}

const (
	probeTimeout = 2 * time.Second
	// probesFor is how long the answers of probes are believed: anyone may ask, and many
	// who ask must not become load.
	probesFor = 250 * time.Millisecond
)

// readiness asks the checks, one round at a time.
type readiness struct {
	checks []Check
	log    *slog.Logger

	mu   sync.Mutex // held while a round goes on, which has an end
	at   time.Time
	last api.Readiness

	hanging sync.Map // names of the checks whose probes have not returned
}

// ask gives what there is and what is missing.
func (r *readiness) ask(ctx context.Context) api.Readiness {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.at.IsZero() && time.Since(r.at) < probesFor {
		return r.last
	}
	now := api.Readiness{Status: api.ReadinessStatusReady, Checks: make([]api.ReadinessCheck, len(r.checks))}
	errs := r.probe(context.WithoutCancel(ctx))
	for i, c := range r.checks {
		now.Checks[i] = api.ReadinessCheck{Name: c.Name, Ready: errs[i] == nil}
		if errs[i] != nil {
			now.Status, now.Checks[i].Message = api.ReadinessStatusNotReady, missing(errs[i])
		}
	}
	r.tell(now, errs)
	r.at, r.last = time.Now(), now
	return now
}

// probe runs all checks at a time. One that hangs is not asked a second time.
func (r *readiness) probe(ctx context.Context) []error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	type answer struct {
		i   int
		err error
	}
	answers := make(chan answer, len(r.checks))
	errs := make([]error, len(r.checks))
	waiting := 0
	for i, c := range r.checks {
		errs[i] = fault.New(fault.DeadlineExceeded, "it does not answer")
		if _, hangs := r.hanging.LoadOrStore(c.Name, true); hangs {
			continue
		}
		waiting++
		go func() {
			err := calmly(ctx, c.Probe)
			r.hanging.Delete(c.Name)
			answers <- answer{i, err}
		}()
	}
	for ; waiting > 0; waiting-- {
		select {
		case a := <-answers:
			errs[a.i] = a.err
		case <-ctx.Done():
			return errs
		}
	}
	return errs
}

// calmly makes an error of a panic, which would end the process here.
func calmly(ctx context.Context, probe func(context.Context) error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return probe(ctx)
}

// missing is what a stranger is told of a check that failed: no more than its fault says,
// and nothing of what is not one.
func missing(err error) string {
	if f := faultOf(err); f.Kind != fault.Internal {
		return f.Message
	}
	return "it does not work; the server's log has the cause"
}

// tell logs what has changed since the last round.
func (r *readiness) tell(now api.Readiness, errs []error) {
	for i, c := range now.Checks {
		before := slices.IndexFunc(r.last.Checks, func(b api.ReadinessCheck) bool { return b.Name == c.Name && !b.Ready })
		switch {
		case !c.Ready && before < 0:
			r.log.Warn("the server is not ready", "reason", c.Name, "err", errs[i])
		case c.Ready && before >= 0:
			r.log.Info("the server has again what it was missing", "reason", c.Name)
		}
	}
}

// GetHealth says that the process answers.
func (s *server) GetHealth(context.Context, GetHealthRequestObject) (GetHealthResponseObject, error) {
	return GetHealth200JSONResponse{Status: api.HealthStatusOk}, nil
}

// GetReadiness says whether the server can do work, and what is missing.
func (s *server) GetReadiness(ctx context.Context, _ GetReadinessRequestObject) (GetReadinessResponseObject, error) {
	now := s.readiness.ask(ctx)
	if now.Status != api.ReadinessStatusReady {
		return GetReadiness503JSONResponse(now), nil
	}
	return GetReadiness200JSONResponse(now), nil
}

// Gate is the handler of a server that starts: the process lives and says what it waits
// for, and every other call waits with it.
type Gate struct {
	open chan struct{}
	next http.Handler // once open is closed

	mu     sync.Mutex
	phases []string
	done   int
}

// NewGate gives a gate before a server that gets ready in these phases.
func NewGate(phases ...string) *Gate { return &Gate{open: make(chan struct{}), phases: phases} }

// Passed says that the next phase is over.
func (g *Gate) Passed() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.done++
}

// Open hands this and every later call to h. It is called once.
func (g *Gate) Open(h http.Handler) {
	g.next = h
	close(g.open)
}

// ServeHTTP implements http.Handler.
func (g *Gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	select {
	case <-g.open:
		g.next.ServeHTTP(w, r)
		return
	default:
	}
	switch r.Method + " " + r.URL.Path {
	case "GET /healthz":
		answerJSON(w, http.StatusOK, api.Health{Status: api.HealthStatusOk})
	case "GET /readyz":
		answerJSON(w, http.StatusServiceUnavailable, g.readiness())
	default:
		select {
		case <-g.open:
			g.next.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}
}

func (g *Gate) readiness() api.Readiness {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := api.Readiness{Status: api.ReadinessStatusNotReady, Checks: []api.ReadinessCheck{}}
	for i, name := range g.phases {
		c := api.ReadinessCheck{Name: name, Ready: i < g.done}
		if !c.Ready {
			c.Message = "the server starts"
		}
		out.Checks = append(out.Checks, c)
	}
	return out
}

func answerJSON(w http.ResponseWriter, status int, body any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // a client that went away
}

// GetMetrics gives the metrics.
func (s *server) GetMetrics(ctx context.Context, _ GetMetricsRequestObject) (GetMetricsResponseObject, error) {
	if s.metrics == nil {
		return nil, fault.New(fault.Unsupported, "this server has no metrics").Because("metrics")
	}
	if !callOf(ctx).caller.Operator() {
		return nil, fault.New(fault.PermissionDenied, "metrics tell of all projects; use an operator's key, or the address of --metrics-listen").
			Because("operators")
	}
	text, media, err := s.metrics()
	return exposition{text, media}, err
}

// exposition is an answer with metrics.
type exposition struct {
	text  []byte
	media string
}

// VisitGetMetricsResponse writes it.
func (e exposition) VisitGetMetricsResponse(w http.ResponseWriter) error {
	w.Header().Set("Content-Type", e.media)
	_, err := w.Write(e.text)
	return err
}
