// Package guest is the agent inside a sandbox. It runs as PID 1: it takes on the
// sandbox's identity at boot and after a restore, reaps every process, runs commands
// and terminals as its children and keeps their output, serves files, and ends all in
// order. It speaks the services of guestproto and nothing else.
//
// It must outlive everything in the sandbox: a request that panics fails alone, each
// request has its own goroutine and connection, and all that it keeps is bounded.
package guest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// Config says what the agent may do to the system around it.
type Config struct {
	// Root is the directory that stands for the sandbox's "/"; "" is the real one.
	// With another Root commands still run on the surrounding system, in directories
	// below Root: for tests.
	Root string
	// Init says that this process is PID 1 of a pid namespace of its own: it reaps all
	// processes, and Shutdown ends all of them. Without it only the commands that were
	// started here are touched.
	Init bool
	// RefuseLocal closes connections that come from inside the sandbox.
	RefuseLocal bool
	// Identity does the identity work; nil does it for real.
	Identity Identity
	// Version is told by Ping.
	Version string
	// OutputBudget is how many bytes all kept output may cost; 0 is an eighth of the
	// memory, within 16 and 256 MiB.
	OutputBudget int64
	// Log gets what goes wrong; nil drops it.
	Log *slog.Logger
}

// Guest is the agent.
type Guest struct {
	cfg      Config
	log      *slog.Logger
	began    time.Time
	gate     gate
	identity Identity
	ids      idSource
	reaper   *reaper
	pids     atomic.Pointer[pidsGroup]
	commands *commandTable
	boot     bootState
	shutdown shutdownState
	syncing  syncState
	traffic  traffic
	threads  threads

	accountFiles accountFiles

	server *http.Server
	entry  sync.Mutex     // guards stop against calls that begin
	stop   chan struct{}  // closed by Close
	calls  sync.WaitGroup // calls that run; only they begin work
	work   sync.WaitGroup // pumps, supervisors, the shutdown
}

// template is what Init said about commands.
type template struct {
	user string
	env  map[string]string
}

// New makes an agent that serves nothing yet.
func New(cfg Config) *Guest {
	g := &Guest{cfg: cfg, log: cfg.Log, began: time.Now(), identity: cfg.Identity, stop: make(chan struct{})}
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	if cfg.OutputBudget == 0 {
		g.cfg.OutputBudget = defaultBudget()
	}
	if g.identity == nil {
		g.identity = &linux{path: g.path, run: g.runTool}
	}
	g.boot.template.Store(&template{})
	g.commands = newCommandTable(g.cfg.OutputBudget)
	g.reaper = newReaper(cfg.Init)

	services := connect.NewServer(g.guard)
	guestproto.RegisterAgentHandler(services, agentService{g: g})
	guestproto.RegisterCommandsHandler(services, commandService{g: g})
	guestproto.RegisterFilesHandler(services, fileService{g: g})
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services,
		connecthttp.WithReadMaxBytes(guestproto.MaxMessage),
		connecthttp.WithSendMaxBytes(guestproto.MaxMessage),
		connecthttp.WithCompressors())
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	g.server = &http.Server{
		Handler:           mux,
		Protocols:         protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       10 * time.Minute, // longer than the client's, which closes first
		MaxHeaderBytes:    guestproto.MaxHeader,
		ErrorLog:          slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
	}
	return g
}

// Serve answers calls on l until Close. It may be called again with another listener
// after one has failed.
func (g *Guest) Serve(l net.Listener) error {
	err := g.server.Serve(&guestListener{Listener: l, g: g})
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the agent: its streams, the commands that it started (without Init), and
// its goroutines. A sandbox's PID 1 never calls it; the host ends the sandbox.
func (g *Guest) Close() error {
	g.entry.Lock()
	if g.closing() {
		g.entry.Unlock()
		return nil
	}
	close(g.stop)
	g.entry.Unlock()
	err := g.server.Close() // ends the calls' contexts
	g.calls.Wait()
	for _, c := range g.commands.live() {
		g.reaper.signal(c.pid, syscall.SIGKILL)
		c.interrupt()
	}
	g.work.Wait()
	g.threads.close()
	g.reaper.close()
	return err
}

// enter counts a call in; false when the agent is ending.
func (g *Guest) enter() bool {
	g.entry.Lock()
	defer g.entry.Unlock()
	if g.closing() {
		return false
	}
	g.calls.Add(1)
	return true
}

func (g *Guest) closing() bool {
	select {
	case <-g.stop:
		return true
	default:
		return false
	}
}

func (g *Guest) template() *template { return g.boot.template.Load() }

// path gives the place of one of the sandbox's paths on the agent's own file system.
// Under the real root it is left as it is: what ".." means behind a symbolic link is
// the kernel's to say.
func (g *Guest) path(p string) string {
	if g.cfg.Root == "" || g.cfg.Root == "/" {
		return p
	}
	return filepath.Join(g.cfg.Root, filepath.Join("/", p))
}

// guard stands before every call: the token, then a net for panics, then the fault's
// way onto the wire.
func (g *Guest) guard(next connect.ServerFunc) connect.ServerFunc {
	return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) (err error) {
		defer func() {
			if p := recover(); p != nil {
				g.log.Error("a call panicked", "call", spec.Procedure, "err", panicError(p), "stack", string(debug.Stack()))
				err = fault.Wrap(panicError(p), fault.Internal, "the guest agent failed in this call")
			}
			err = guestproto.ToWire(err)
		}()
		if !g.enter() {
			return fault.New(fault.Unavailable, "the guest agent is ending")
		}
		defer g.calls.Done()
		info, ok := connect.CallInfoForServerContext(ctx)
		if !ok {
			return fault.New(fault.Internal, "the call came without its headers")
		}
		if err := g.gate.check(spec.Procedure, info.RequestHeader().Get(guestproto.TokenHeader)); err != nil {
			return err
		}
		return next(ctx, spec, stream)
	}
}

// panicError makes an error of a recovered value.
func panicError(p any) error {
	if err, ok := p.(error); ok {
		return err
	}
	return fmt.Errorf("panic: %v", p)
}
