package guest

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// commandTable holds the commands that run and those that have ended and are
// remembered, within a bound on the memory of all their output.
type commandTable struct {
	budget     int64        // bytes that all outputs together may cost
	used       atomic.Int64 // what they cost now
	lastOutput atomic.Int64 // when any command last wrote something, unix ns

	mu      sync.Mutex
	order   []*command // by start
	byID    map[string]*command
	byKey   map[string]*started
	running int
	refuse  string // why no command may start, "" while they may
}

// started is the one start of a request key; the others wait for it.
type started struct {
	ready chan struct{}
	cmd   *command
	err   error
}

func newCommandTable(budget int64) *commandTable {
	return &commandTable{budget: budget, byID: map[string]*command{}, byKey: map[string]*started{}}
}

// start runs what a request asks for, or finds the command that its key started
// before. The hold, where lossless asks for one, keeps all output for the caller.
func (g *Guest) start(ctx context.Context, req *guestproto.StartRequest) (c *command, h *hold, joined bool, err error) {
	if req.RequestKey == "" {
		c, h, err = g.launch(req)
		return c, h, false, err
	}
	t := g.commands
	t.mu.Lock()
	first, ok := t.byKey[req.RequestKey]
	if !ok {
		first = &started{ready: make(chan struct{})}
		t.byKey[req.RequestKey] = first
	}
	t.mu.Unlock()
	if ok {
		select {
		case <-first.ready:
			return first.cmd, nil, true, first.err
		case <-ctx.Done():
			return nil, nil, false, ctx.Err()
		}
	}
	defer func() {
		if err != nil { // nothing was run: the key is free again
			t.mu.Lock()
			if t.byKey[req.RequestKey] == first {
				delete(t.byKey, req.RequestKey)
			}
			t.mu.Unlock()
		}
		first.cmd, first.err = c, err
		close(first.ready)
	}()
	c, h, err = g.launch(req)
	return c, h, false, err
}

// launch starts a new command.
func (g *Guest) launch(req *guestproto.StartRequest) (*command, *hold, error) {
	prog, err := g.plan(req)
	if err != nil {
		return nil, nil, err
	}
	file, err := prog.find(g.path)
	if err != nil {
		return nil, nil, err
	}
	if err := g.commands.admit(); err != nil {
		return nil, nil, err
	}
	w, err := wire(req, prog.account)
	if err != nil {
		g.commands.release()
		return nil, nil, fault.Wrap(err, fault.Unavailable, "the command's pipes or terminal could not be made (%v); end some commands first", err)
	}
	pid, ended, err := g.reaper.start(func() (int, error) {
		return g.exec(prog, file, w.child[:], req.Pty != nil)
	})
	closeFiles(w.child[:]...)
	if err != nil {
		w.close()
		g.commands.release()
		return nil, nil, err
	}

	c := newCommand(pid, req, prog, w, &g.commands.used)
	var h *hold
	if req.Lossless && !req.Detach {
		h = c.log.hold(0)
	}
	g.commands.add(c, g.ids.next())
	for _, p := range c.pumps {
		g.work.Go(func() { p.run(g, c) })
	}
	g.work.Go(func() { c.supervise(g, ended) })
	return c, h, nil
}

func newPump(file *os.File, stream guestproto.Stream) *pump {
	return &pump{file: file, stream: stream, settled: make(chan struct{}), eof: make(chan struct{})}
}

func newCommand(pid int, req *guestproto.StartRequest, prog program, w wires, used *atomic.Int64) *command {
	c := &command{
		pid: pid,
		spec: &guestproto.StartRequest{
			Args: clipArgs(prog.args), Cwd: clipText(req.Cwd), Tag: req.Tag, RequestKey: req.RequestKey,
			Detach: req.Detach, TimeoutNanos: req.TimeoutNanos,
		},
		user:    prog.account.label(),
		started: time.Now(),
		log:     newOutputLog(guestproto.OutputLimit, used),
		done:    make(chan struct{}),
		renewed: make(chan struct{}),
		size:    req.Pty,
	}
	if req.Pty != nil {
		c.pty, c.shell = w.stdout, interactiveShell(prog.args)
		c.pumps = []*pump{newPump(w.stdout, guestproto.Stream_STREAM_PTY)}
	} else {
		c.pumps = []*pump{newPump(w.stdout, guestproto.Stream_STREAM_STDOUT), newPump(w.stderr, guestproto.Stream_STREAM_STDERR)}
	}
	if w.stdin != nil {
		c.input = newInput(w.stdin, req.Pty != nil)
	}
	return c
}

// admit counts a command in, or says why it may not start.
func (t *commandTable) admit() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.refuse != "":
		return fault.New(fault.FailedPrecondition, "no command can start: the sandbox is stopping").Because(t.refuse)
	case t.running >= guestproto.MaxCommands:
		return fault.New(fault.QuotaExceeded, "%d commands run already, which is the most; end some first", t.running).Because("commands")
	}
	t.running++
	return nil
}

func (t *commandTable) release() {
	t.mu.Lock()
	t.running--
	t.mu.Unlock()
}

// close refuses all further starts.
func (t *commandTable) close(reason string) {
	t.mu.Lock()
	t.refuse = reason
	t.mu.Unlock()
}

func (t *commandTable) add(c *command, id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c.id = id
	t.byID[id] = c
	t.order = append(t.order, c)
}

// finished notes that a command has ended, and forgets the oldest ended ones above
// the number that is kept.
func (t *commandTable) finished() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running--
	ended := 0
	for _, c := range t.order {
		if c.ended() != nil {
			ended++
		}
	}
	t.order = slices.DeleteFunc(t.order, func(c *command) bool {
		if ended <= guestproto.EndedCommands || c.ended() == nil {
			return false
		}
		ended--
		t.forget(c)
		return true
	})
}

func (t *commandTable) forget(c *command) {
	delete(t.byID, c.id)
	if s := t.byKey[c.spec.RequestKey]; s != nil && s.cmd == c {
		delete(t.byKey, c.spec.RequestKey)
	}
	c.log.setLimit(0)
}

// press keeps all output within the budget. Above it the oldest ended commands lose
// theirs first; then the largest running one keeps half of what it had.
func (t *commandTable) press() {
	if t.used.Load() <= t.budget {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.order {
		if t.used.Load() <= t.budget {
			return
		}
		if c.ended() != nil {
			c.log.setLimit(0)
		}
	}
	for t.used.Load() > t.budget {
		largest := slices.MaxFunc(t.order, func(a, b *command) int { return a.log.cost() - b.log.cost() })
		size := largest.log.cost()
		if size <= leastOutput || largest.log.setLimit(max(size/2, leastOutput)) == size {
			return // all are small, or a lossless reader holds it and its writer waits
		}
	}
}

// get finds a command by id, with the channel that is closed when a fork renews it.
func (t *commandTable) get(id string) (*command, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c, ok := t.byID[id]; ok {
		return c, nil
	}
	return nil, fault.New(fault.NotFound, "there is no command %q here; ended commands are forgotten in time and at a stop", clipText(id)).Because("command")
}

// name gives a command's present id and the channel that is closed when it changes.
func (t *commandTable) name(c *command) (id string, renewed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return c.id, c.renewed
}

// renew gives every command a new id and cuts off those who follow the old one: in a
// fork they belong to the source.
func (t *commandTable) renew(next func() string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.byID)
	clear(t.byKey)
	for _, c := range t.order {
		c.id = next()
		t.byID[c.id] = c
		close(c.renewed)
		c.renewed = make(chan struct{})
	}
	return len(t.order)
}

// list describes all commands, oldest first.
func (t *commandTable) list() []*guestproto.Command {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []*guestproto.Command
	for _, c := range t.order {
		out = append(out, c.describe())
	}
	return out
}

// live gives the commands that run.
func (t *commandTable) live() []*command {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.order), func(c *command) bool { return c.ended() != nil })
}

// signalCommand sends a signal to a command's group.
func (g *Guest) signalCommand(c *command, sig syscall.Signal) error {
	if err := g.reaper.signal(c.pid, sig); err != nil {
		return fault.Wrap(err, fault.FailedPrecondition, "the command has ended, so it gets no signal").Because("ended")
	}
	return nil
}

func clipText(s string) string {
	if len(s) > 256 {
		s = s[:256]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
