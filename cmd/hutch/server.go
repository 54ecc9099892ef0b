package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"time"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/network"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
	"github.com/hutchrun/hutch/internal/runtime/traced"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/span"
)

// hostID is the name of the one host of a server that runs its sandboxes itself and
// shares its database with no other.
const hostID = "local"

// serverConfig is what `hutch up` was told.
type serverConfig struct {
	layout      layout
	listen      string
	sshListen   string // "" is no SSH
	poolBytes   int64
	spares      int             // networks that are kept ready
	databaseURL string          // of PostgreSQL; "" is SQLite in the data directory
	prices      *metering.Price // nil leaves them as they are
	idle        idleSettings
	events      eventFlags
	limits      control.Limits
	machineStop string           // what becomes of sandboxes when the machine goes down: config.StopBySleep …
	stopLimit   time.Duration    // how long that may take
	power       <-chan os.Signal // says that the machine goes down; nil never does
	settings    map[string]setting
	adopt       []string        // sandboxes to take in that only the host knows
	undeleteFor time.Duration   // how long what is deleted can be brought back; less than 0 is not at all
	saveRetry   sandbox.Backoff // of saves that failed
	log         *slog.Logger
	observing
}

// machine is the host side on this machine: everything below the host agent.
type machine struct {
	layout layout
	log    *slog.Logger
	driver *gvisor.Driver
	caps   runtime.Capabilities
	pool   *disk.Pool
	net    *network.Manager
	agent  *hostagent.Agent
	runsc  string // the program of the runtime
	layer  string // digest of the guest agent's layer
}

// openMachine brings up what the host agent stands on. It is what a server does
// first.
func openMachine(ctx context.Context, cfg serverConfig, host string, spans span.Start) (*machine, error) {
	m := &machine{layout: cfg.layout, log: cfg.log}
	if err := gvisor.BecomeSubreaper(); err != nil {
		return nil, err
	}
	runsc, err := findBinary("hutch-runsc")
	if err != nil {
		return nil, err
	}
	if runsc, err = keepBinary(cfg.layout.binaries(), runsc); err != nil {
		return nil, err
	}
	m.runsc = runsc
	m.driver = gvisor.New(gvisor.Config{Runsc: runsc, Kept: cfg.layout.binaries(), Log: cfg.log, CgroupParent: cfg.layout.cgroup()})
	if m.caps, err = m.driver.Probe(ctx); err != nil {
		return nil, err
	}
	m.pool, err = disk.Open(ctx, disk.Config{Dir: cfg.layout.data, RunDir: cfg.layout.run(), PoolBytes: cfg.poolBytes, Log: cfg.log})
	if err != nil {
		return nil, err
	}
	if m.net, err = network.Open(ctx, network.Config{Tag: cfg.layout.tag, Spares: cfg.spares, Log: cfg.log}); err != nil {
		return nil, err
	}
	if faults, err := m.net.Diagnose(ctx); err == nil {
		for _, f := range faults {
			cfg.log.Warn("sandboxes may not reach the network", "err", f)
		}
	}
	guest, err := findBinary("hutch-guest")
	if err != nil {
		return nil, err
	}
	layer, err := m.pool.InstallAgent(ctx, guest)
	if err != nil {
		return nil, err
	}
	m.layer = layer
	boot, err := hostagent.BootID()
	if err != nil {
		return nil, err
	}
	cpu, err := runtime.CPUFeatures()
	if err != nil {
		return nil, err
	}
	m.agent, err = hostagent.New(hostagent.Config{
		ID: host, Dir: cfg.layout.journals(), RunDir: cfg.layout.boots(), BootID: boot,
		Driver: traced.New(m.driver, spans), Span: spans, Capabilities: m.caps, CPUFeatures: cpu,
		Disks: hostagent.Storage{Pool: m.pool}, Network: hostagent.Links{Manager: m.net},
		Agent: layer, Backoff: cfg.saveRetry, UndeleteFor: max(cfg.undeleteFor, 0), Log: cfg.log, SampleEvery: cfg.idle.sampleEvery,
	})
	return m, err
}

// close leaves the sandboxes and their mounts and networks as they are.
func (m *machine) close() {
	if m.net != nil {
		_ = m.net.Close()
	}
	if m.driver != nil {
		m.driver.Close()
	}
	if m.pool != nil {
		_ = m.pool.Close()
	}
}

// serve runs a server until ctx ends. ready is called just before it answers.
func serve(ctx context.Context, cfg serverConfig, ready func(ctl *control.Control, url string) error) (err error) {
	if err := apiserver.CheckListen(cfg.listen, false); err != nil {
		return err
	}
	settings := control.Config{Shared: cfg.databaseURL != "", Log: cfg.log, Limits: cfg.limits}
	if err := cfg.events.apply(&settings); err != nil {
		return err
	}
	if err := cfg.layout.prepare(); err != nil {
		return err
	}
	// A start that fails early leaves no empty run directory.
	defer func() {
		if err != nil {
			_ = os.Remove(cfg.layout.run())
		}
	}()
	lock, err := cfg.layout.lock()
	if errors.Is(err, errLocked) {
		info, _ := cfg.layout.readServer()
		return fault.New(fault.Conflict, "a hutch server (pid %d) uses %s already; `hutch down --data %s` ends it, or give another --data", info.PID, cfg.layout.data, cfg.layout.data)
	}
	if err != nil {
		return err
	}
	defer lock.Close()

	// The address is taken before anything is touched: a server that cannot answer
	// must not act.
	front, err := openFront(cfg.listen, cfg.observing, cfg.log, "schema", "host")
	if err != nil {
		return err
	}
	defer front.close()

	db, host, err := openDatabase(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	front.gate.Passed()
	m, err := openMachine(ctx, cfg, host, front.traces.Start())
	if m != nil {
		defer m.close()
	}
	if err != nil {
		return err
	}
	watched, metrics := front.watch(db, cfg.layout, m.agent)
	settings.Store, settings.Hosts = watched, map[string]hostproto.Host{host: m.agent}
	ctl := control.New(settings)
	if err := m.agent.Start(ctx, ctl); err != nil {
		return err
	}
	defer m.agent.Stop()
	if err := agree(ctx, cfg.log, cfg.layout, ctl); err != nil {
		return err
	}
	if err := adopt(ctx, cfg.log, ctl, cfg.adopt); err != nil {
		return err
	}
	if err := setPrices(ctx, ctl, cfg.log, cfg.prices); err != nil {
		return err
	}
	if err := ctl.Start(ctx); err != nil {
		return err
	}
	defer ctl.Close()
	if err := bringBack(ctx, cfg.log, cfg.layout, ctl); err != nil {
		return err
	}
	defer os.Remove(cfg.layout.serverFile())
	power, end := untilPower(ctx, cfg.power)
	defer end()
	endSSH, err := serveSSH(power, cfg, ctl)
	if err != nil {
		return err
	}
	defer endSSH()
	err = front.answer(power, ctl, metrics, true, func(url string) error {
		// Whoever waits for the server finds it by its file and its answers: the key and
		// the context that they need are there before.
		if err := ready(ctl, url); err != nil {
			return err
		}
		cfg.log.Info("hutch is up", "url", url, "data", cfg.layout.data, "version", version)
		return cfg.layout.writeServer(serverInfo{PID: os.Getpid(), URL: url, Version: version, Runtime: m.runsc, Agent: m.layer, Settings: cfg.settings})
	})
	endSSH()
	if err == nil && errors.Is(context.Cause(power), errPower) {
		err = putAway(ctx, cfg, ctl) // nobody calls any more
	}
	return err
}

// errPower is why a server ends that was told that the machine goes down.
var errPower = errors.New("the machine goes down")

// untilPower gives a context that ends when the machine goes down, for errPower.
func untilPower(ctx context.Context, power <-chan os.Signal) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-power:
			cancel(errPower)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil); <-ended }
}
