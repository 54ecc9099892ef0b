package hostagent

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// live is one boot of a sandbox that runs.
type live struct {
	handle     runtime.Handle
	guest      guestClient
	token      string
	generation int64
	ready      atomic.Bool   // the guest agent takes the calls of users
	held       atomic.Bool   // its tasks are stopped until the pool has space
	oomSeen    atomic.Uint64 // kills for want of memory that were looked at
	exited     chan struct{} // closed when it has ended; exit is set then
	exit       runtime.Exit

	// lasts ends with the boot, whoever ends it. Connections to a guest that is gone
	// would otherwise hang until the kernel's patience is over.
	lasts context.Context
	over  context.CancelFunc
}

// bring makes a handle the sandbox's live boot and watches its end.
func (o *owner) bring(h runtime.Handle, token string, generation int64) *live {
	l := &live{handle: h, token: token, generation: generation, exited: make(chan struct{})}
	l.lasts, l.over = context.WithCancel(context.WithoutCancel(o.agent.loops))
	l.guest = newGuest(l.dial(), token)
	o.live.Store(l)
	o.agent.sender(func(ctx context.Context) {
		select {
		case l.exit = <-h.Wait():
		case <-ctx.Done():
			return
		}
		close(l.exited)
		l.over()
		select {
		case o.inbox <- func() { o.lost(l) }:
		case <-o.done:
		}
	})
	return l
}

// dial gives the way to the guest agent.
func (l *live) dial() func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return l.connect(ctx, guestproto.Port) }
}

// dialPort opens a connection to a program's port. The agent answers to its host alone,
// which it knows by a token that no caller has; they have no business there at all.
func (l *live) dialPort(ctx context.Context, port int) (net.Conn, error) {
	if port < 1 || port > 65535 || port == guestproto.Port {
		return nil, fault.New(fault.InvalidArgument, "the port %d cannot be reached: use one between 1 and 65535 that is not %d", port, guestproto.Port).Because("port")
	}
	return l.connect(ctx, port)
}

// connect opens a connection that ends with the boot, also while it is being made: a
// namespace that nobody lives in any more answers nothing.
func (l *live) connect(ctx context.Context, port int) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.lasts, cancel)()
	conn, err := l.handle.DialGuest(ctx, port)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(l.lasts, func() { _ = conn.Close() })
	return bootConn{conn, stop}, nil
}

// bootConn is a connection that is closed when its boot ends.
type bootConn struct {
	net.Conn
	stop func() bool
}

// Close closes it and forgets it.
func (c bootConn) Close() error {
	c.stop()
	return c.Conn.Close()
}

// ended says whether it has ended by itself.
func (l *live) ended() bool {
	select {
	case <-l.exited:
		return true
	default:
		return false
	}
}

func exitText(e runtime.Exit) string {
	switch {
	case e.OOM:
		return "out of memory"
	case e.Signal != 0:
		return fmt.Sprintf("signal %d", e.Signal)
	case e.Known:
		return fmt.Sprintf("code %d", e.Code)
	}
	return "its status is not known"
}

// down makes sure that nothing of the sandbox runs: what this agent started, and
// what an earlier one may have.
func (o *owner) down(ctx context.Context, generations ...int64) error {
	if l := o.live.Load(); l != nil {
		l.ready.Store(false)
		if err := l.handle.Kill(ctx); err != nil {
			return err
		}
		l.over()
		l.guest.Close()
		o.live.CompareAndSwap(l, nil)
	}
	for _, gen := range generations {
		dir := o.agent.bootDir(o.id, gen)
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		h, err := o.agent.cfg.Driver.Adopt(ctx, runtime.Spec{ID: o.id, Dir: dir})
		if err == nil {
			err = h.Kill(ctx)
		}
		if err != nil && !fault.Is(err, fault.NotFound) {
			return err
		}
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	_ = os.Remove(filepath.Join(o.agent.cfg.RunDir, o.id)) // with the last boot in it
	return nil
}

// release gives back what a sandbox that does not run holds in the kernel.
func (o *owner) release(ctx context.Context) error {
	if err := o.agent.cfg.Disks.Unmount(ctx, o.id); err != nil {
		return err
	}
	return o.agent.cfg.Network.Detach(ctx, o.id)
}

// spec is what a boot of this generation is given.
func (o *owner) spec(r *record, generation int64, root, netns string) runtime.Spec {
	return runtime.Spec{
		ID: o.id, Dir: o.agent.bootDir(o.id, generation), Root: root, NetNS: netns, Hostname: r.Name,
		Args: []string{guestproto.AgentPath}, Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		CPUs: r.Spec.CPUs, MemoryBytes: r.Spec.Memory,
		Dial: func(ctx context.Context, port int) (net.Conn, error) {
			return o.agent.cfg.Network.Dial(ctx, o.id, port)
		},
	}
}

// lost is told, in the owner's goroutine, that a boot has ended by itself.
func (o *owner) lost(l *live) {
	l.ready.Store(false)
	if !o.live.CompareAndSwap(l, nil) {
		return // a job ended it
	}
	l.guest.Close()
	o.lastExit = l.exit
	o.next()
}

// settle turns an end that no verb caused into a fact: a poweroff is a stop, a
// reboot a fresh boot, all else a crash (S8), of which a clean-up is told as one. While a job is at work it waits: the
// job either meant the end or fails by it.
func (o *owner) settle() error {
	if o.job != nil || o.rec.Job != nil || o.rec.Phase != phaseRunning || o.live.Load() != nil {
		return nil
	}
	exit := o.lastExit
	var until time.Time
	event, why := sandbox.EventCrashed, "the sandbox ended unexpectedly ("+exitText(exit)+"); its disk is kept"
	switch marker := o.marker(); {
	case o.rec.Cleaned != 0 && o.rec.Cleaned == o.rec.Generation:
		why = "its processes were removed by `hutch doctor --clean`; its disk is kept"
	case o.rec.HostBoot != o.agent.cfg.BootID:
		event, why = sandbox.EventHostRestarted, "the host was restarted while the sandbox ran; its disk is kept"
		until = o.agent.clock.before
	case exit.OOM:
		event, why = sandbox.EventOOMKilled, "the sandbox used more memory than it has and was killed; its disk is kept"
	case marker == guestproto.ExitReboot:
		return o.begin(jobRecord{Command: o.own(verbReboot)})
	case marker == guestproto.ExitPoweroff, exit.Known && exit.Code == 0 && exit.Signal == 0:
		event, why = sandbox.EventExited, "the sandbox was switched off from inside"
	}
	return o.begin(jobRecord{Command: o.own(verbSettle), Event: event, Why: why, Until: until})
}

// The verbs that the host gives itself.
const (
	verbReboot sandbox.Verb = "reboot" // a fresh boot on the same disk
	verbSettle sandbox.Verb = "settle" // give back what an ended sandbox held
	verbRouse  sandbox.Verb = "rouse"  // let one run whose agent does not answer
)

func ownVerb(v sandbox.Verb) bool { return v == verbReboot || v == verbSettle || v == verbRouse }

// own is a command that the host gives itself. Its operation is unknown to the
// control plane, which learns of the event only.
func (o *owner) own(verb sandbox.Verb) hostproto.Command {
	return hostproto.Command{Verb: verb, Sandbox: o.id, Generation: o.rec.Generation,
		Operation: fmt.Sprintf("host/%s/%d/%s", o.id, o.rec.Generation, verb)}
}

// marker reads what the guest agent left behind when somebody inside asked for a
// poweroff or a reboot.
func (o *owner) marker() string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	data, err := o.agent.cfg.Disks.ReadGuestFile(ctx, o.id, guestproto.ExitMarker, 64)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}
