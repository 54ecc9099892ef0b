package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// full are metrics all of whose series have been told of.
func full(t *testing.T) *Metrics {
	t.Helper()
	m := NewMetrics("v1", Levels{
		Sandboxes: func(context.Context) (map[sandbox.State]int64, error) {
			return map[sandbox.State]int64{sandbox.Ready: 3}, nil
		},
		Operations: func(context.Context) (map[sandbox.Verb]int64, error) {
			return map[sandbox.Verb]int64{sandbox.Stop: 1}, nil
		},
		Host: func(context.Context) (HostLevels, error) {
			return HostLevels{PoolBytes: 10, PoolFree: 4, Running: 2}, nil
		},
	})
	m.Request("/v1/sandboxes", "GET")(200)
	m.Transaction("update", time.Millisecond, nil)
	now := time.Now()
	m.OperationEnded(sandbox.Operation{
		Kind: sandbox.Wake, Status: sandbox.Succeeded, CreatedAt: now.Add(-time.Second), EndedAt: now,
		Timings: []sandbox.StepTime{{Step: sandbox.StepRestore, Milliseconds: 250}},
	})
	m.EventsRead(7, time.Millisecond)
	return m
}

func families(t *testing.T, m *Metrics) map[string]*dto.MetricFamily {
	t.Helper()
	list, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*dto.MetricFamily{}
	for _, f := range list {
		out[f.GetName()] = f
	}
	return out
}

// value gives the value of the series of a name with all of these labels.
func value(t *testing.T, m *Metrics, name string, labels ...string) float64 {
	t.Helper()
	for _, s := range families(t, m)[name].GetMetric() {
		var have []string
		for _, l := range s.GetLabel() {
			have = append(have, l.GetName()+"="+l.GetValue())
		}
		if !slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(have, l) }) {
			if h := s.GetHistogram(); h != nil {
				return float64(h.GetSampleCount())
			}
			return s.GetCounter().GetValue() + s.GetGauge().GetValue()
		}
	}
	t.Errorf("there is no %s %v", name, labels)
	return -1
}

// docs/metrics.md lists exactly what is served, with type and labels.
func TestMetricsAreDocumented(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(hutch_[a-z_]+)` \\| ([a-z]+) \\| ([a-z, ]*)\\|").FindAllStringSubmatch(string(b), -1) {
		listed[row[1]] = row[2] + " " + strings.TrimSpace(row[3])
	}
	served := families(t, full(t))
	for name, f := range served {
		if !strings.HasPrefix(name, "hutch_") {
			continue
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		if is := strings.ToLower(f.GetType().String()) + " " + strings.Join(labels, ", "); listed[name] != is {
			t.Errorf("%s is %q, docs/metrics.md says %q", name, is, listed[name])
		}
		delete(listed, name)
	}
	for name := range listed {
		t.Errorf("docs/metrics.md lists %s, which is not served", name)
	}
}

// The dashboard asks for what is there.
func TestDashboardAsksForWhatIsServed(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../docs/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	if !json.Valid(b) {
		t.Fatal("docs/grafana.json is no JSON")
	}
	served := families(t, full(t))
	asked := regexp.MustCompile(`hutch_[a-z_]+`).FindAllString(string(b), -1)
	if len(asked) < 10 {
		t.Errorf("it asks for %q only", asked)
	}
	for _, name := range asked {
		of := name // a histogram has series of other names
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			if base, is := strings.CutSuffix(name, suffix); is && served[base] != nil {
				of = base
			}
		}
		if served[of] == nil {
			t.Errorf("it asks for %s, which is not served", name)
		}
	}
}

// Names, units and help are as Prometheus wants them.
func TestMetricsAreNamedAsOthersAre(t *testing.T) {
	t.Parallel()
	text, media, err := full(t).Text()
	if err != nil || !strings.HasPrefix(media, "text/plain; version=0.0.4") {
		t.Fatalf("%q, %v", media, err)
	}
	problems, err := promlint.New(strings.NewReader(string(text))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// What comes from outside of the lists makes one series, whatever it is.
func TestLabelsAreClosed(t *testing.T) {
	t.Parallel()
	m := full(t)
	count := func() (n int) {
		for _, f := range families(t, m) {
			n += len(f.GetMetric())
		}
		return n
	}
	tell := func(word string) {
		m.Request("", word)(404)
		m.Transaction(word, time.Second, errors.New(word))
		m.OperationEnded(sandbox.Operation{
			Kind: sandbox.Verb(word), Status: sandbox.OperationStatus(word), Timings: []sandbox.StepTime{{Step: word}},
			Error: &sandbox.OperationError{Code: word},
		})
		m.Entered(sandbox.State(word))
		m.Attempt(word)
		m.ConditionSet(sandbox.ConditionType(word), word)
		m.ConditionSet(sandbox.Degraded, word)
		m.Metered(metering.Entry{Reason: metering.Reason(word)})
	}
	tell("first")
	before := count()
	for _, word := range []string{"second", "sbx_01", "", "\xff"} {
		tell(word)
	}
	if after := count(); after != before {
		t.Errorf("%d series became %d", before, after)
	}
}

// A save that failed counts where the machine failed it, and only there.
func TestSaveFailures(t *testing.T) {
	t.Parallel()
	m := full(t)
	end := func(verb sandbox.Verb, code fault.Kind) {
		m.OperationEnded(sandbox.Operation{Kind: verb, Status: sandbox.Errored, Error: &sandbox.OperationError{Code: string(code)}})
	}
	end(sandbox.Sleep, fault.Internal)
	end(sandbox.Stop, fault.Unavailable)
	end(sandbox.Sleep, fault.FailedPrecondition) // the guest's disk is full
	end(sandbox.Sleep, fault.Cancelled)
	end(sandbox.Wake, fault.Internal)
	for verb, want := range map[string]float64{"sleep": 1, "stop": 1, "fork": 0} {
		if got := value(t, m, "hutch_save_failures_total", "verb="+verb); got != want {
			t.Errorf("%s: %v failures, want %v", verb, got, want)
		}
	}
	if n := value(t, m, "hutch_wake_duration_seconds"); n != 1 {
		t.Errorf("%v wakes, want the one that went well", n)
	}
}

// A source that hangs or fails leaves its own series out, is asked once, and the rest of
// the scrape comes.
func TestScrapeOutlivesItsSources(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	defer close(release)
	asked := make(chan struct{}, 10)
	m := NewMetrics("v1", Levels{
		Sandboxes:  func(context.Context) (map[sandbox.State]int64, error) { return nil, errors.New("the database is gone") },
		Operations: func(context.Context) (map[sandbox.Verb]int64, error) { return map[sandbox.Verb]int64{}, nil },
		Host:       func(context.Context) (HostLevels, error) { asked <- struct{}{}; <-release; return HostLevels{}, nil },
	})
	for range 2 {
		w := httptest.NewRecorder()
		m.Handler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		if w.Code != 200 || strings.Contains(w.Body.String(), "hutch_pool_size_bytes ") || strings.Contains(w.Body.String(), "hutch_sandboxes{") {
			t.Fatalf("%d: %s", w.Code, w.Body)
		}
		for _, line := range []string{
			`hutch_scrape_failed{source="host"} 1`, `hutch_scrape_failed{source="sandboxes"} 1`,
			`hutch_scrape_failed{source="operations"} 0`, `hutch_operations_active{verb="stop"} 0`,
		} {
			if !strings.Contains(w.Body.String(), line) {
				t.Errorf("%s is missing", line)
			}
		}
		m.levels.mu.Lock()
		m.levels.at = time.Time{} // what was learnt is old by the next
		m.levels.mu.Unlock()
	}
	if n := len(asked); n != 1 {
		t.Errorf("a source that hangs was asked %d times", n)
	}
}
