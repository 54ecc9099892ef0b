package fakehost

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
)

// guests serves the agents of all sandboxes of a machine: one HTTP server, whose
// connections each belong to one guest.
type guests struct {
	server *http.Server
	conns  chan net.Conn
	done   chan struct{}
	once   sync.Once
}

type guestKey struct{}

func newGuests() *guests {
	g := &guests{conns: make(chan net.Conn), done: make(chan struct{})}
	services := connect.NewServer()
	guestproto.RegisterAgentHandler(services, agentService{})
	guestproto.RegisterCommandsHandler(services, commandService{})
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services)
	g.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if guestOf(r.Context()).knows(r) {
				mux.ServeHTTP(w, r)
				return
			}
			http.Error(w, "wrong token", http.StatusUnauthorized)
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if to, ok := c.(guestConn); ok {
				ctx = context.WithValue(ctx, guestKey{}, to.guest)
			}
			return ctx
		},
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	go func() { _ = g.server.Serve(g) }() // ends with close
	return g
}

// guestConn is a connection to one guest, which breaks at the guest's end.
type guestConn struct {
	net.Conn
	guest  *guest
	forget func() bool
}

// Close implements net.Conn.
func (c guestConn) Close() error {
	c.forget()
	return c.Conn.Close()
}

func guestOf(ctx context.Context) *guest {
	g, _ := ctx.Value(guestKey{}).(*guest)
	return g
}

// Accept implements net.Listener.
func (g *guests) Accept() (net.Conn, error) {
	select {
	case c := <-g.conns:
		return c, nil
	case <-g.done:
		return nil, net.ErrClosed
	}
}

// Addr implements net.Listener.
func (g *guests) Addr() net.Addr { return &net.UnixAddr{Name: "guests", Net: "unix"} }

// Close implements net.Listener.
func (g *guests) Close() error {
	g.once.Do(func() { close(g.done) })
	return nil
}

func (g *guests) close() {
	_ = g.Close()
	_ = g.server.Close()
}

// boot makes a guest, or finds one again.
func (g *guests) boot(b fake.Boot) (fake.Guest, error) {
	made := &guest{guests: g, boot: b, runs: make(chan struct{})}
	made.lasts, made.end = context.WithCancel(context.Background())
	close(made.runs)
	if b.Memory != nil {
		if err := json.Unmarshal(b.Memory, &made.memory); err != nil {
			return nil, err
		}
	}
	return made, made.keep()
}

// guest is one boot of a sandbox.
type guest struct {
	guests *guests
	boot   fake.Boot
	lasts  context.Context //nolint:containedctx // the guest's life, not a call's
	end    context.CancelFunc

	mu     sync.Mutex
	runs   chan struct{} // closed while it is not paused
	memory memory
}

// memory is what a save of memory keeps.
type memory struct {
	Token    string
	Previous string // token, of before the last Restored
	Cell     string
	Ran      map[string]string // ids of commands, by request key
}

// keep writes the memory down; the caller holds mu, or is alone.
func (g *guest) keep() error {
	data, err := json.Marshal(g.memory)
	if err != nil {
		return err
	}
	return g.boot.Keep(data)
}

// knows checks a call's token.
func (g *guest) knows(r *http.Request) bool {
	if g == nil {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	token := r.Header.Get(guestproto.TokenHeader)
	return g.memory.Token == "" || g.memory.Token == token || g.memory.Previous == token && r.URL.Path == guestproto.AgentRestoredProcedure
}

// inside runs f in the guest at one instant at which it is not paused.
func (g *guest) inside(ctx context.Context, f func() error) error {
	for {
		g.mu.Lock()
		runs := g.runs
		g.mu.Unlock()
		select {
		case <-runs:
		case <-g.lasts.Done():
			return errEnded
		case <-ctx.Done():
			return ctx.Err()
		}
		again, err := g.at(runs, f)
		if !again {
			return err
		}
	}
}

var errEnded = connect.NewError(connect.CodeUnavailable, "the guest has ended")

// at runs f unless the guest was paused again since it ran.
func (g *guest) at(runs chan struct{}, f func() error) (again bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.runs != runs:
		return true, nil
	case g.lasts.Err() != nil:
		return false, errEnded
	}
	return false, f()
}

// change is inside for what changes the memory: it is kept before anyone hears of it.
func (g *guest) change(ctx context.Context, f func() error) error {
	return g.inside(ctx, func() error {
		if err := f(); err != nil {
			return err
		}
		return g.keep()
	})
}

// Dial implements fake.Guest.
func (g *guest) Dial(ctx context.Context, _ int) (net.Conn, error) {
	here, there := net.Pipe()
	conn := guestConn{there, g, context.AfterFunc(g.lasts, func() { _ = there.Close() })}
	var err error
	select {
	case g.guests.conns <- conn:
	case <-g.guests.done:
		err = net.ErrClosed
	case <-g.lasts.Done():
		err = net.ErrClosed
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return here, nil
}

// Pause implements fake.Guest.
func (g *guest) Pause() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.runs = make(chan struct{})
}

// Resume implements fake.Guest.
func (g *guest) Resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.runs)
}

// Release implements fake.Guest: nothing runs in it but its agent.
func (g *guest) Release() {}

// Snapshot implements fake.Guest.
func (g *guest) Snapshot() ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return json.Marshal(g.memory)
}

// Stop implements fake.Guest.
func (g *guest) Stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end()
}

// agentService is the Agent service of all guests.
type agentService struct {
	guestproto.UnimplementedAgentHandler
}

// Init implements guestproto.AgentHandler.
func (agentService) Init(ctx context.Context, _ *guestproto.InitRequest) (*guestproto.InitResponse, error) {
	info, _ := connect.CallInfoForServerContext(ctx)
	g := guestOf(ctx)
	return &guestproto.InitResponse{}, g.change(ctx, func() error {
		g.memory.Token = info.RequestHeader().Get(guestproto.TokenHeader)
		return nil
	})
}

// Restored implements guestproto.AgentHandler.
func (agentService) Restored(ctx context.Context, r *guestproto.RestoredRequest) (*guestproto.RestoredResponse, error) {
	g := guestOf(ctx)
	return &guestproto.RestoredResponse{}, g.change(ctx, func() error {
		if g.memory.Token != r.GetNewToken() {
			g.memory.Previous, g.memory.Token = g.memory.Token, r.GetNewToken()
		}
		if r.GetKind() == guestproto.RestoreKind_RESTORE_KIND_FORK {
			g.memory.Ran = nil
		}
		return nil
	})
}

// Ping implements guestproto.AgentHandler.
func (agentService) Ping(ctx context.Context, _ *guestproto.PingRequest) (*guestproto.PingResponse, error) {
	g := guestOf(ctx)
	return &guestproto.PingResponse{WallClockUnixNano: time.Now().UnixNano()}, g.inside(ctx, func() error { return nil })
}

// Sync implements guestproto.AgentHandler.
func (agentService) Sync(ctx context.Context, _ *guestproto.SyncRequest) (*guestproto.SyncResponse, error) {
	g := guestOf(ctx)
	return &guestproto.SyncResponse{}, g.inside(ctx, func() error { return nil })
}

// Shutdown implements guestproto.AgentHandler.
func (agentService) Shutdown(context.Context, *guestproto.ShutdownRequest) (*guestproto.ShutdownResponse, error) {
	return &guestproto.ShutdownResponse{}, nil
}

// The commands of a guest. Anything else is `true`.
const (
	Put   = "put"   // VALUE into the cell in memory
	Add   = "add"   // VALUE to what is in it
	Get   = "get"   // what is in it, on standard output
	Write = "write" // VALUE into the cell on the disk
	Read  = "read"  // what is in it, on standard output
	Crash = "crash" // ends the guest with a signal
)

// serial tells commands apart.
var serial atomic.Int64

// commandService is the Commands service of all guests.
type commandService struct {
	guestproto.UnimplementedCommandsHandler
}

// Start implements guestproto.CommandsHandler: a command ends at once. One whose request
// key was seen is not run again.
func (commandService) Start(ctx context.Context, r *guestproto.StartRequest, to guestproto.CommandsStartServerStream) error {
	g := guestOf(ctx)
	var out string
	id := strconv.FormatInt(serial.Add(1), 36) + strconv.FormatInt(time.Now().UnixNano(), 36)
	joined, crash := false, false
	err := g.change(ctx, func() error {
		if key := r.GetRequestKey(); key != "" {
			if ran, known := g.memory.Ran[key]; known {
				id, joined = ran, true
				return nil
			}
			if g.memory.Ran == nil {
				g.memory.Ran = map[string]string{}
			}
			g.memory.Ran[key] = id
		}
		switch args := append(r.GetArgs(), "", ""); args[0] {
		case Put:
			g.memory.Cell = args[1]
		case Add:
			g.memory.Cell += args[1]
		case Get:
			out = g.memory.Cell
		case Write:
			return put(g.boot.Spec.Root, []byte(args[1]))
		case Read:
			data, err := os.ReadFile(g.boot.Spec.Root)
			out = string(data)
			return err
		case Crash:
			crash = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	if crash {
		g.boot.Exit(runtime.Exit{Known: true, Signal: 11})
		return errEnded
	}
	if err := to.Send(&guestproto.CommandEvent{Event: &guestproto.CommandEvent_Started{Started: &guestproto.Started{Id: id, Pid: 2, Joined: joined}}}); err != nil {
		return err
	}
	if out != "" {
		piece := &guestproto.Output{Stream: guestproto.Stream_STREAM_STDOUT, Data: []byte(out)}
		if err := to.Send(&guestproto.CommandEvent{Event: &guestproto.CommandEvent_Output{Output: piece}}); err != nil {
			return err
		}
	}
	return to.Send(&guestproto.CommandEvent{Event: &guestproto.CommandEvent_Exit{Exit: &guestproto.Exit{Cursor: int64(len(out)), AtUnixNano: time.Now().UnixNano()}}})
}

// Get implements guestproto.CommandsHandler: whatever is asked for has ended.
func (commandService) Get(_ context.Context, r *guestproto.GetCommandRequest) (*guestproto.GetCommandResponse, error) {
	now := time.Now().UnixNano()
	return &guestproto.GetCommandResponse{Command: &guestproto.Command{
		Id: r.GetId(), Pid: 2, Cwd: guestproto.Workspace, User: "user", StartedUnixNano: now, Exit: &guestproto.Exit{AtUnixNano: now},
	}}, nil
}
