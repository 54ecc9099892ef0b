package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/observed"
	"github.com/hutchrun/hutch/internal/telemetry"
)

const (
	metricsFlagHelp = "loopback address that serves /metrics without a key, such as 127.0.0.1:9464 (default: only the API does, with a key)"
	domainFlagHelp  = "domain below which the ports of sandboxes are served too, by a proxy with TLS (default: *.localhost only)"
	drainFlagHelp   = "how long /readyz says that the server stops before it does, at most 20s, so that a load balancer sends it nothing more"
)

// drainMost is the longest drain: `hutch down` waits half a minute.
const drainMost = 20 * time.Second

// observing is how a server is asked to be observed.
type observing struct {
	metricsListen string
	drain         time.Duration
	domain        string              // below which ports are served beside localhost; "" for none
	tracesTo      string              // a collector, where no variable names one
	getenv        func(string) string // for the OTEL_* variables
}

func (o *observing) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.metricsListen, "metrics-listen", "", metricsFlagHelp)
	cmd.Flags().StringVar(&o.domain, "domain", "", domainFlagHelp)
	cmd.Flags().DurationVar(&o.drain, "drain", 0, drainFlagHelp)
}

// settle takes from the settings what no flag says.
func (o *observing) settle(cmd *cobra.Command, s settings) {
	o.metricsListen, o.tracesTo, o.domain = s.text(config.MetricsListen), s.text(config.TracesTo), s.text(config.Domain)
	if !cmd.Flags().Changed("drain") && s.text(config.Drain) != "" {
		o.drain = s.duration(config.Drain)
	}
}

func (o observing) check() error {
	if o.drain < 0 || o.drain > drainMost {
		return fault.New(fault.InvalidArgument, "cannot drain for %s; --drain is at most %s", o.drain, drainMost).Because("drain")
	}
	if o.metricsListen == "" {
		return nil
	}
	return apiserver.CheckListen(o.metricsListen, false)
}

// front is the side of a server that callers see. It answers from the moment at which it
// has its address, at first with what the server waits for.
type front struct {
	observing
	log      *slog.Logger
	listener net.Listener
	own      net.Listener // of the metrics; nil is none
	gate     *apiserver.Gate
	server   *http.Server
	ended    chan error
	stopping atomic.Bool
	traces   *telemetry.Traces
}

// openFront takes the addresses and begins to answer.
func openFront(listen string, o observing, log *slog.Logger, phases ...string) (*front, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	traces, err := telemetry.NewTraces(context.Background(), o.getenv, o.tracesTo, version, log)
	if err != nil {
		return nil, err
	}
	f := &front{observing: o, log: log, gate: apiserver.NewGate(phases...), ended: make(chan error, 1), traces: traces}
	if f.listener, err = net.Listen("tcp", listen); err != nil {
		return nil, fault.Wrap(err, fault.Unavailable, "cannot listen on %s; end what uses it, or give another --listen", listen)
	}
	if o.metricsListen != "" {
		if f.own, err = net.Listen("tcp", o.metricsListen); err != nil {
			_ = f.listener.Close()
			return nil, fault.Wrap(err, fault.Unavailable, "cannot listen on %s; end what uses it, or give another --metrics-listen", o.metricsListen)
		}
	}
	f.server = apiserver.HTTPServer(f.gate, log)
	go func() { f.ended <- f.server.Serve(f.listener) }()
	return f, nil
}

// close ends what still answers, and sends the last spans.
func (f *front) close() {
	_ = f.server.Close()
	if f.own != nil {
		_ = f.own.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	f.traces.Close(ctx)
}

// watch gives the store with metrics and traces, and the metrics. agent is nil for a
// server without a host.
func (f *front) watch(db store.Store, l layout, agent *hostagent.Agent) (store.Store, *telemetry.Metrics) {
	levels := telemetry.Levels{
		Sandboxes: func(ctx context.Context) (n map[sandbox.State]int64, err error) {
			err = db.View(ctx, func(ctx context.Context, r store.Reader) (err error) { n, err = r.SandboxStates(ctx); return err })
			return n, err
		},
		Operations: func(ctx context.Context) (map[sandbox.Verb]int64, error) {
			n := map[sandbox.Verb]int64{}
			err := db.View(ctx, func(ctx context.Context, r store.Reader) error {
				ops, err := r.ActiveOperations(ctx)
				for _, op := range ops {
					n[op.Kind]++
				}
				return err
			})
			return n, err
		},
	}
	if agent != nil {
		levels.Host = func(ctx context.Context) (telemetry.HostLevels, error) { return hostLevels(ctx, l, agent) }
	}
	metrics := telemetry.NewMetrics(version, levels)
	return observed.New(db, watcher{metrics, f.traces}), metrics
}

// answer opens the gate and serves the API until ctx ends. ready is called just before
// it does.
func (f *front) answer(ctx context.Context, ctl *control.Control, metrics *telemetry.Metrics, withHost bool, ready func(url string) error) error {
	checks := []apiserver.Check{
		{Name: "schema", Probe: func(context.Context) error { return nil }}, // nothing is answered here before it is up to date
		{Name: "database", Probe: func(ctx context.Context) error { _, err := ctl.LastEvent(ctx); return err }},
		{Name: "accepting", Probe: func(context.Context) error {
			if f.stopping.Load() {
				return fault.New(fault.Unavailable, "the server stops")
			}
			return nil
		}},
	}
	if withHost {
		checks = append(checks, apiserver.Check{Name: "host", Probe: func(ctx context.Context) error { _, err := ctl.HostInfo(ctx); return err }})
	}
	handler, err := apiserver.New(apiserver.Config{
		Control: ctl, Log: f.log, Version: version, Checks: checks,
		Request: metrics.Request, Metrics: metrics.Text, Span: f.traces.Start(), PortURL: f.portURL,
	})
	if err != nil {
		return err
	}
	if err := ready("http://" + f.listener.Addr().String()); err != nil {
		return err
	}
	f.gate.Open(f.ports(ctl, handler))
	if f.own != nil {
		server := apiserver.HTTPServer(apiserver.OnLoopback(metrics.Handler()), f.log)
		done := make(chan struct{})
		go func() { defer close(done); _ = server.Serve(f.own) }()
		defer func() { _ = server.Close(); <-done }()
	}
	select {
	case err := <-f.ended:
		return err
	case <-ctx.Done():
	}
	f.stopping.Store(true)
	f.log.Info("hutch goes down")
	if f.drain > 0 {
		select {
		case err := <-f.ended:
			return err
		case <-time.After(f.drain):
		}
	}
	grace, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := f.server.Shutdown(grace); err != nil {
		_ = f.server.Close()
	}
	<-f.ended
	return nil
}

// hostLevels looks at the machine.
func hostLevels(ctx context.Context, l layout, agent *hostagent.Agent) (telemetry.HostLevels, error) {
	info, err := agent.Info(ctx)
	if err != nil {
		return telemetry.HostLevels{}, err
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(l.data, &fs); err != nil {
		return telemetry.HostLevels{}, err
	}
	free, err := memoryAvailable()
	return telemetry.HostLevels{
		PoolBytes: info.PoolBytes, PoolFree: info.PoolFree, MemoryBytes: info.MemoryBytes, MemoryFree: free,
		DataBytes: int64(fs.Blocks) * fs.Frsize, DataFree: int64(fs.Bavail) * fs.Frsize, Running: agent.Running(),
	}, err
}

// memoryAvailable is what the kernel says that programs could have (proc_meminfo(5)).
func memoryAvailable() (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
			return kib << 10, nil
		}
	}
	return 0, errors.New("/proc/meminfo does not say what is available")
}

// watcher counts what a store tells of, and puts operations that have ended into their
// traces: only their end, which any server may write, says how long they took.
type watcher struct {
	*telemetry.Metrics
	traces *telemetry.Traces
}

// Settled implements observed.Watcher.
func (w watcher) Settled(s store.DeliveryStatus) { w.Attempt(string(s)) }

// OperationEnded implements observed.Watcher.
func (w watcher) OperationEnded(op sandbox.Operation) {
	w.Metrics.OperationEnded(op)
	origin := control.OriginOf(op)
	failed := ""
	if op.Error != nil {
		failed = op.Error.Message
	}
	w.traces.Past(origin.Trace, origin.Parent, "operation "+string(op.Kind), op.CreatedAt, op.EndedAt, failed,
		"hutch.operation", op.ID, "hutch.sandbox", op.Sandbox, "hutch.verb", string(op.Kind), "hutch.outcome", string(op.Status),
		"hutch.request", origin.Request)
}
