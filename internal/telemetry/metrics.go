// Package telemetry is how hutch is observed from outside: metrics for Prometheus and
// traces for OpenTelemetry. Others tell it what they did; it asks for levels when it is
// scraped. Every label is from a closed list: no id, no name and no word of a user's is
// one, so that the number of series does not grow with what runs.
package telemetry

import (
	"bytes"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// other stands for a value that is not on its list: a newer part of hutch may know more.
const other = "other"

// The closed lists.
var (
	verbs = []sandbox.Verb{
		sandbox.Create, sandbox.Sleep, sandbox.Wake, sandbox.Stop, sandbox.Resume, sandbox.Fork, sandbox.Delete, sandbox.BuildTemplate,
		sandbox.Snapshot, sandbox.Archive, sandbox.Migrate, sandbox.Undelete,
	}
	statuses     = []sandbox.OperationStatus{sandbox.Succeeded, sandbox.Errored, sandbox.Cancelled}
	saves        = []sandbox.Verb{sandbox.Sleep, sandbox.Stop, sandbox.Fork}
	reasons      = []metering.Reason{metering.Starting, metering.Running, metering.Sleeping, metering.Stored}
	methods      = []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodHead}
	transactions = []string{"update", "view", "events"}
	results      = []string{"ok", "refused", "failed"}
	attempts     = []string{"delivered", "pending", "failed"}
)

// among gives the value as a label, or other where it is not on the list.
func among[T ~string](list []T, value T) string {
	if slices.Contains(list, value) {
		return string(value)
	}
	return other
}

// Buckets in seconds: of what a store or a call takes, and of what a sandbox takes.
var (
	quick = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	slow  = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
)

// Metrics are the metrics of one server. A nil *Metrics counts nothing.
type Metrics struct {
	registry *prometheus.Registry
	levels   *scrape

	requests    *prometheus.CounterVec
	requestTime *prometheus.HistogramVec
	inFlight    prometheus.Gauge

	operations    *prometheus.CounterVec
	operationTime *prometheus.HistogramVec
	stepTime      *prometheus.HistogramVec
	wakeTime      prometheus.Histogram
	saveFailures  *prometheus.CounterVec

	entered    *prometheus.CounterVec
	conditions *prometheus.CounterVec
	oomKills   prometheus.Counter

	transactionTime *prometheus.HistogramVec
	eventLag        prometheus.Histogram
	lastEvent       prometheus.Gauge

	meterEntries *prometheus.CounterVec
	metered      *prometheus.CounterVec
	webhooks     *prometheus.CounterVec
}

// NewMetrics makes the metrics of a server of a version. Levels are asked for at each
// scrape.
func NewMetrics(version string, levels Levels) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), levels: newScrape(levels)}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	}
	m.requests = counter("hutch_http_requests_total", "Answers of the API, by route template, method and status code.", "route", "method", "code")
	m.requestTime = histogram("hutch_http_request_duration_seconds", "Time to answer a call of the API, waits and streams included.", quick, "route", "method")
	m.inFlight = prometheus.NewGauge(prometheus.GaugeOpts{Name: "hutch_http_requests_in_flight", Help: "Calls of the API that are being answered."})
	m.operations = counter("hutch_operations_total", "Operations that have ended, by verb and outcome.", "verb", "outcome")
	m.operationTime = histogram("hutch_operation_duration_seconds", "Time from an operation's acceptance to its end.", slow, "verb", "outcome")
	m.stepTime = histogram("hutch_operation_step_duration_seconds", "Time that a host took for a step of an operation.", slow, "verb", "step")
	m.wakeTime = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "hutch_wake_duration_seconds",
		Help: "Time from the acceptance of a wake to a sandbox that takes commands; wakes that failed are not in it.", Buckets: quick})
	m.saveFailures = counter("hutch_save_failures_total", "Saves (by the verb that asked for them) that failed for a cause that was not the guest's.", "verb")
	m.entered = counter("hutch_sandbox_transitions_total", "Sandboxes that came into a state.", "state")
	m.conditions = counter("hutch_sandbox_conditions_total", "Conditions that were set on sandboxes.", "type", "reason")
	m.oomKills = prometheus.NewCounter(prometheus.CounterOpts{Name: "hutch_sandbox_oom_kills_total", Help: "Processes in sandboxes that were killed for want of memory."})
	m.transactionTime = histogram("hutch_store_transaction_duration_seconds", "Time that a transaction took, the wait for its turn included.", quick, "kind", "outcome")
	m.eventLag = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "hutch_event_lag_seconds",
		Help: "Time from what an event tells of to the moment that readers can have it.", Buckets: quick})
	m.lastEvent = prometheus.NewGauge(prometheus.GaugeOpts{Name: "hutch_event_last_number", Help: "Number of the newest event that can be read."})
	m.meterEntries = counter("hutch_meter_entries_total", "Entries of the ledger, by the reason of the metering.", "reason")
	m.webhooks = counter("hutch_webhook_attempts_total", "Attempts to deliver an event to a webhook, by what became of the delivery; pending ones are tried again.", "outcome")
	m.metered = counter("hutch_metered_seconds_total", "Time that was metered, summed over sandboxes as their entries were made.", "reason")

	m.registry.MustRegister(
		m.requests, m.requestTime, m.inFlight, m.operations, m.operationTime, m.stepTime, m.wakeTime, m.saveFailures,
		m.entered, m.conditions, m.oomKills, m.transactionTime, m.eventLag, m.lastEvent, m.meterEntries, m.metered, m.webhooks,
		m.levels, buildInfo(version),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	m.begin()
	return m
}

func buildInfo(version string) prometheus.Collector {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "hutch_build_info", Help: "Always 1; the labels say what runs."}, []string{"version", "goversion"})
	g.WithLabelValues(version, runtime.Version()).Set(1)
	return g
}

// begin has the series that tell of failures there before the first one, so that a rate
// over them is never without its beginning.
func (m *Metrics) begin() {
	for _, v := range verbs {
		if sandbox.Steps(v) == nil && v != sandbox.BuildTemplate {
			continue
		}
		for _, s := range statuses {
			m.operations.WithLabelValues(string(v), string(s))
		}
	}
	for _, v := range saves {
		m.saveFailures.WithLabelValues(string(v))
	}
	for _, s := range sandbox.States {
		m.entered.WithLabelValues(string(s))
	}
	for _, typ := range slices.Sorted(maps.Keys(sandbox.ConditionReasons)) {
		for _, reason := range sandbox.ConditionReasons[typ] {
			m.conditions.WithLabelValues(string(typ), reason)
		}
	}
	for _, r := range reasons {
		m.meterEntries.WithLabelValues(string(r))
		m.metered.WithLabelValues(string(r))
	}
	for _, a := range attempts {
		m.webhooks.WithLabelValues(a)
	}
	for _, k := range transactions {
		for _, r := range results {
			m.transactionTime.WithLabelValues(k, r)
		}
	}
}

// Handler answers scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: scrapeTimeout})
}

// Text gives all metrics in the text format of Prometheus, with its media type.
func (m *Metrics) Text() (text []byte, media string, err error) {
	families, err := m.registry.Gather()
	if err != nil {
		return nil, "", err
	}
	var b bytes.Buffer
	format := expfmt.NewFormat(expfmt.TypeTextPlain)
	enc := expfmt.NewEncoder(&b, format)
	for _, f := range families {
		if err := enc.Encode(f); err != nil {
			return nil, "", err
		}
	}
	return b.Bytes(), string(format), nil
}

// Request tells that a call of the API has begun, and gives what tells of its end. route
// is a template of the API, "" for what is none of its calls.
func (m *Metrics) Request(route, method string) (end func(status int)) {
	if m == nil {
		return func(int) {}
	}
	if route == "" {
		route = other
	}
	method = among(methods, method)
	m.inFlight.Inc()
	began := time.Now()
	return func(status int) {
		m.inFlight.Dec()
		m.requestTime.WithLabelValues(route, method).Observe(time.Since(began).Seconds())
		m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	}
}

// Transaction implements observed.Watcher.
func (m *Metrics) Transaction(kind string, took time.Duration, err error) {
	m.transactionTime.WithLabelValues(among(transactions, kind), result(err)).Observe(took.Seconds())
}

// result tells what the caller may not do from what is broken.
func result(err error) string {
	if err == nil {
		return "ok"
	}
	switch fault.Of(err).Kind {
	case fault.Internal, fault.Unavailable, fault.DataCorrupt, fault.DeadlineExceeded:
		return "failed"
	}
	return "refused"
}

// OperationEnded implements observed.Watcher.
func (m *Metrics) OperationEnded(op sandbox.Operation) {
	verb, outcome := among(verbs, op.Kind), among(statuses, op.Status)
	took := op.EndedAt.Sub(op.CreatedAt).Seconds()
	m.operations.WithLabelValues(verb, outcome).Inc()
	m.operationTime.WithLabelValues(verb, outcome).Observe(took)
	for _, t := range op.Timings {
		m.stepTime.WithLabelValues(verb, among(sandbox.StepNames, t.Step)).Observe(t.Milliseconds / 1000)
	}
	if op.Kind == sandbox.Wake && op.Status == sandbox.Succeeded {
		m.wakeTime.Observe(took)
	}
	if op.Status == sandbox.Errored && slices.Contains(saves, op.Kind) && !asked(op.Error) {
		m.saveFailures.WithLabelValues(verb).Inc()
	}
}

// asked says whether an operation failed for what the caller or the guest can change, and
// not for a fault of the machine.
func asked(e *sandbox.OperationError) bool {
	if e == nil {
		return false
	}
	switch fault.Kind(e.Code) {
	case fault.FailedPrecondition, fault.Unsupported, fault.Conflict, fault.InvalidArgument, fault.Cancelled, fault.NotFound:
		return true
	}
	return false
}

// Entered implements observed.Watcher.
func (m *Metrics) Entered(state sandbox.State) {
	m.entered.WithLabelValues(among(sandbox.States, state)).Inc()
}

// ConditionSet implements observed.Watcher.
func (m *Metrics) ConditionSet(typ sandbox.ConditionType, reason string) {
	list, known := sandbox.ConditionReasons[typ]
	if !known {
		typ = other
	}
	m.conditions.WithLabelValues(string(typ), among(list, reason)).Inc()
}

// OutOfMemory implements observed.Watcher.
func (m *Metrics) OutOfMemory(killed uint64) { m.oomKills.Add(float64(killed)) }

// Metered implements observed.Watcher.
func (m *Metrics) Metered(e metering.Entry) {
	reason := among(reasons, e.Reason)
	m.meterEntries.WithLabelValues(reason).Inc()
	m.metered.WithLabelValues(reason).Add(max(e.To.Sub(e.From).Seconds(), 0))
}

// Attempt tells of an attempt to deliver an event to a webhook.
func (m *Metrics) Attempt(outcome string) { m.webhooks.WithLabelValues(among(attempts, outcome)).Inc() }

// EventsRead implements observed.Watcher.
func (m *Metrics) EventsRead(last int64, lag time.Duration) {
	m.lastEvent.Set(float64(last))
	m.eventLag.Observe(max(lag.Seconds(), 0))
}
