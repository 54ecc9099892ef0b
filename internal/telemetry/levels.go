package telemetry

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// Levels are where a scrape asks what is there now. A nil one is not asked, and has no
// series.
type Levels struct {
	// Sandboxes counts those that are not deleted, by their state.
	Sandboxes func(context.Context) (map[sandbox.State]int64, error)
	// Operations counts those that are active, by their verb.
	Operations func(context.Context) (map[sandbox.Verb]int64, error)
	// Host gives the levels of the machine that runs sandboxes.
	Host func(context.Context) (HostLevels, error)
}

// HostLevels are a machine's, in bytes.
type HostLevels struct {
	PoolBytes, PoolFree     int64 // the disk pool, without its reserve
	DataBytes, DataFree     int64 // the file system of the data directory
	MemoryBytes, MemoryFree int64 // of the machine; free is what programs could have
	Running                 int64 // sandboxes that run here
}

const (
	// scrapeTimeout bounds a scrape: a host that hangs leaves its series out.
	scrapeTimeout = 5 * time.Second
	// levelsFor is how long levels are believed: two Prometheus that scrape do not ask the
	// database twice.
	levelsFor = 2 * time.Second
)

// The levels' series.
var (
	descSandboxes  = prometheus.NewDesc("hutch_sandboxes", "Sandboxes of the installation, by state; every server of a database tells the same.", []string{"state"}, nil)
	descOperations = prometheus.NewDesc("hutch_operations_active", "Operations that have not ended, by verb; every server of a database tells the same.", []string{"verb"}, nil)
	descFailures   = prometheus.NewDesc("hutch_scrape_failed", "Whether a source did not answer this scrape, so that its series are left out.", []string{"source"}, nil)

	descPool       = prometheus.NewDesc("hutch_pool_size_bytes", "Size of the disk pool.", nil, nil)
	descPoolFree   = prometheus.NewDesc("hutch_pool_free_bytes", "Free in the disk pool, without the reserve for saves.", nil, nil)
	descData       = prometheus.NewDesc("hutch_data_size_bytes", "Size of the data directory's file system.", nil, nil)
	descDataFree   = prometheus.NewDesc("hutch_data_free_bytes", "Free in the data directory's file system.", nil, nil)
	descMemory     = prometheus.NewDesc("hutch_host_memory_size_bytes", "Memory of the machine.", nil, nil)
	descMemoryFree = prometheus.NewDesc("hutch_host_memory_available_bytes", "Memory of the machine that programs could have.", nil, nil)
	descRunning    = prometheus.NewDesc("hutch_host_sandboxes_running", "Sandboxes whose processes run on this machine.", nil, nil)
)

// source is one of the levels as series.
type source struct {
	name string
	get  func(context.Context) ([]prometheus.Metric, error)
	busy atomic.Bool // an earlier scrape's question has not been answered
}

// scrape asks for levels.
type scrape struct {
	sources []*source

	mu   sync.Mutex // one scrape asks at a time
	at   time.Time
	last []prometheus.Metric
}

func newScrape(l Levels) *scrape {
	s := &scrape{}
	add := func(name string, get func(context.Context) ([]prometheus.Metric, error)) {
		s.sources = append(s.sources, &source{name: name, get: get})
	}
	if l.Sandboxes != nil {
		add("sandboxes", func(ctx context.Context) ([]prometheus.Metric, error) {
			n, err := l.Sandboxes(ctx)
			return byState(n), err
		})
	}
	if l.Operations != nil {
		add("operations", func(ctx context.Context) ([]prometheus.Metric, error) {
			n, err := l.Operations(ctx)
			return byVerb(n), err
		})
	}
	if l.Host != nil {
		add("host", func(ctx context.Context) ([]prometheus.Metric, error) { h, err := l.Host(ctx); return h.metrics(), err })
	}
	return s
}

// Describe implements prometheus.Collector.
func (s *scrape) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descSandboxes, descOperations, descFailures, descPool, descPoolFree, descData, descDataFree,
		descMemory, descMemoryFree, descRunning} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (s *scrape) Collect(ch chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= levelsFor {
		s.last, s.at = s.ask(), time.Now()
	}
	for _, m := range s.last {
		ch <- m
	}
}

// ask asks all sources at a time. One that does not answer in time, or has not answered
// the last time, is left out.
func (s *scrape) ask() []prometheus.Metric {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout/2)
	defer cancel()
	type answer struct {
		from *source
		list []prometheus.Metric
	}
	answers := make(chan answer, len(s.sources))
	waiting := 0
	for _, from := range s.sources {
		if !from.busy.CompareAndSwap(false, true) {
			continue
		}
		waiting++
		go func() {
			list, err := from.get(ctx)
			if err != nil {
				list = nil
			}
			from.busy.Store(false)
			answers <- answer{from, list}
		}()
	}
	answered := map[*source]bool{}
	var out []prometheus.Metric
	for ; waiting > 0 && ctx.Err() == nil; waiting-- {
		select {
		case a := <-answers:
			answered[a.from] = a.list != nil
			out = append(out, a.list...)
		case <-ctx.Done():
		}
	}
	for _, from := range s.sources {
		failed := 1.0
		if answered[from] {
			failed = 0
		}
		out = append(out, level(descFailures, failed, from.name))
	}
	return out
}

func level(d *prometheus.Desc, v float64, labels ...string) prometheus.Metric {
	return prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func byState(n map[sandbox.State]int64) (out []prometheus.Metric) {
	for _, s := range sandbox.States {
		if s != sandbox.Deleted {
			out = append(out, level(descSandboxes, float64(n[s]), string(s)))
		}
	}
	return out
}

func byVerb(n map[sandbox.Verb]int64) (out []prometheus.Metric) {
	for _, v := range verbs {
		out = append(out, level(descOperations, float64(n[v]), string(v)))
	}
	return out
}

func (h HostLevels) metrics() []prometheus.Metric {
	return []prometheus.Metric{
		level(descPool, float64(h.PoolBytes)), level(descPoolFree, float64(h.PoolFree)),
		level(descData, float64(h.DataBytes)), level(descDataFree, float64(h.DataFree)),
		level(descMemory, float64(h.MemoryBytes)), level(descMemoryFree, float64(h.MemoryFree)),
		level(descRunning, float64(h.Running)),
	}
}
