package guest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// command is one program that was started here, running or ended.
type command struct {
	pid     int
	spec    *guestproto.StartRequest // without what only the start needed
	user    string
	started time.Time
	log     *outputLog
	input   *input   // nil where stdin is empty
	pty     *os.File // nil without a terminal
	shell   bool     // an interactive one

	// Guarded by the table's lock, for a fork renews them.
	id      string
	renewed chan struct{} // closed when the id has been replaced

	attached atomic.Int32 // streams that follow it
	timedOut atomic.Bool
	done     chan struct{} // closed once exit is set
	exit     *guestproto.Exit
	pumps    []*pump

	sizeMu sync.Mutex
	size   *guestproto.WindowSize
}

// ended gives the exit, nil while it runs.
func (c *command) ended() *guestproto.Exit {
	select {
	case <-c.done:
		return c.exit
	default:
		return nil
	}
}

// wires are the two ends of a command's descriptors.
type wires struct {
	child  [3]*os.File
	stdin  *os.File // ours, nil where stdin is empty
	stdout *os.File // ours; with a terminal its master, which is stdin too
	stderr *os.File // ours, nil with a terminal
}

// close closes files; some may be nil or closed before.
func closeFiles(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// wire makes the descriptors that a request asks for.
func wire(req *guestproto.StartRequest, acc account) (w wires, err error) {
	if req.Pty != nil {
		master, slave, err := openPTY(acc, req.Pty)
		return wires{child: [3]*os.File{slave, slave, slave}, stdin: master, stdout: master}, err
	}
	if req.Stdin {
		w.child[0], w.stdin, err = pipe(false)
	} else {
		w.child[0], err = os.Open(os.DevNull)
	}
	if err == nil {
		w.child[1], w.stdout, err = pipe(true)
	}
	if err == nil {
		w.child[2], w.stderr, err = pipe(true)
	}
	if err != nil {
		w.close()
	}
	return w, err
}

func (w wires) close() {
	closeFiles(w.child[:]...)
	closeFiles(w.stdin, w.stdout, w.stderr)
}

// pipe makes a pipe with a blocking end for the child and a non-blocking one for us;
// the child writes where toUs is set.
func pipe(toUs bool) (child, ours *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe", err)
	}
	theirs, mine := fds[1], fds[0]
	if !toUs {
		theirs, mine = fds[0], fds[1]
	}
	if err := unix.SetNonblock(mine, true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, os.NewSyscallError("pipe", err)
	}
	return os.NewFile(uintptr(theirs), "pipe"), os.NewFile(uintptr(mine), "pipe"), nil
}

// pump moves what a command writes into its log until the end of the file. When the
// command itself has ended, its supervisor interrupts the pump by a read deadline: the
// pump then takes all that is in the pipe at that moment, closes settled, and reads on,
// for a grandchild may still write.
type pump struct {
	file    *os.File
	stream  guestproto.Stream
	settled chan struct{}
	eof     chan struct{}
}

// run is the pump's goroutine.
func (p *pump) run(g *Guest, c *command) {
	settle := sync.OnceFunc(func() { close(p.settled) })
	defer close(p.eof)
	defer settle()
	defer p.file.Close()
	buf := make([]byte, 32<<10)
	left, counting := 0, false
	for {
		n, err := p.file.Read(buf)
		if n > 0 {
			p.deliver(g, c, buf[:n])
		}
		left -= n
		switch {
		case err == nil, errors.Is(err, syscall.EINTR):
		case errors.Is(err, os.ErrDeadlineExceeded) && !g.closing():
			// Only this goroutine reads, so what FIONREAD says now is exact.
			p.file.SetReadDeadline(time.Time{})
			left, _ = unread(p.file)
			counting = true
		default:
			return
		}
		if counting && left <= 0 {
			settle()
		}
	}
}

// deliver appends to the log, after the readers that hold it back have made room.
func (p *pump) deliver(g *Guest, c *command, data []byte) {
	for {
		full, next := c.log.full()
		if !full {
			break
		}
		select {
		case <-next:
		case <-g.stop:
			return
		}
	}
	g.commands.lastOutput.Store(time.Now().UnixNano())
	c.log.append(p.stream, data)
	g.commands.press()
}

// supervise is the command's goroutine: it waits for its end, lets the pumps settle,
// and publishes the exit.
func (c *command) supervise(g *Guest, ended <-chan exitStatus) {
	if c.spec.TimeoutNanos > 0 {
		timer := time.AfterFunc(time.Duration(c.spec.TimeoutNanos), func() {
			c.timedOut.Store(true)
			g.reaper.signal(c.pid, syscall.SIGKILL)
		})
		defer timer.Stop()
	}
	status := <-ended
	at := time.Now()
	c.interrupt()
	if c.input != nil && c.pty == nil {
		c.input.close()
	}
	drained := time.After(guestproto.DrainGrace)
	for _, p := range c.pumps {
		select {
		case <-p.settled:
		case <-g.stop:
		}
	}
	for _, p := range c.pumps {
		select {
		case <-p.eof:
		case <-drained:
			drained = closedTime
		case <-g.stop:
		}
	}
	c.publish(status, at)
	g.commands.finished()
}

// interrupt wakes the pumps out of a read.
func (c *command) interrupt() {
	for _, p := range c.pumps {
		p.file.SetReadDeadline(time.Unix(1, 0))
	}
}

// closedTime is always ready: a grace that is over.
var closedTime = func() <-chan time.Time { c := make(chan time.Time); close(c); return c }()

func (c *command) publish(status exitStatus, at time.Time) {
	end, _ := c.log.size()
	c.exit = &guestproto.Exit{Code: int32(status.code), Signal: int32(status.signal), Cursor: end, AtUnixNano: at.UnixNano()}
	switch {
	case status.lost:
		c.exit.Error = "lost"
	case status.signal != 0:
		c.exit.Code = 128 + int32(status.signal)
	}
	if c.timedOut.Load() && status.signal == syscall.SIGKILL {
		c.exit.Error = "timeout"
	}
	close(c.done)
}

// describe is the command as Get and List tell it; the caller holds the table's lock.
func (c *command) describe() *guestproto.Command {
	end, omitted := c.log.size()
	d := &guestproto.Command{
		Id: c.id, Pid: int32(c.pid), Args: c.spec.Args, Cwd: c.spec.Cwd, User: c.user,
		Tag: c.spec.Tag, Detach: c.spec.Detach, Stdin: c.input != nil,
		StartedUnixNano: c.started.UnixNano(), Cursor: end, Omitted: omitted, Exit: c.ended(),
	}
	c.sizeMu.Lock()
	d.Pty = c.size
	c.sizeMu.Unlock()
	if c.input != nil {
		d.InputOffset = c.input.offset()
	}
	return d
}

// setSize resizes the command's terminal and sees to it that its programs hear of it.
func (c *command) setSize(size *guestproto.WindowSize) error {
	c.sizeMu.Lock()
	defer c.sizeMu.Unlock()
	if err := resize(c.pty, size); err != nil {
		return err
	}
	c.size = size
	if _, ok := foreground(c.pty); ok {
		return nil // a kernel that knows the group in front has signalled it
	}
	told := map[int]bool{}
	for _, p := range readProcesses("/proc") {
		if p.session == c.pid && !told[p.group] {
			told[p.group] = true
			syscall.Kill(-p.group, syscall.SIGWINCH)
		}
	}
	return nil
}

// inFront says whether the command counts as a foreground command (Z1): one that was
// not detached, unless it is a shell at its prompt in a terminal. Where the kernel does
// not tell which group is in front, a shell with any other process in its session
// counts: that may keep a sandbox awake, and never puts work to sleep.
func (c *command) inFront(list []process) bool {
	if c.pty == nil {
		return !c.spec.Detach
	}
	if !c.shell {
		return true
	}
	if pgrp, ok := foreground(c.pty); ok {
		return pgrp != c.pid
	}
	return slices.ContainsFunc(list, func(p process) bool { return p.session == c.pid && p.pid != c.pid })
}

// interactiveShell says whether arguments start a shell that reads commands from its
// terminal: a shell's name, and options only, none of which is -c.
func interactiveShell(args []string) bool {
	switch strings.TrimPrefix(filepath.Base(args[0]), "-") {
	case "sh", "bash", "dash", "ash", "zsh", "fish", "ksh", "csh", "tcsh":
	default:
		return false
	}
	for _, a := range args[1:] {
		long := strings.HasPrefix(a, "--")
		if !strings.HasPrefix(a, "-") || !long && strings.Contains(a, "c") {
			return false
		}
	}
	return true
}

// clipArgs keeps about 1 KiB of arguments, for showing.
func clipArgs(args []string) []string {
	const most = 1 << 10
	var out []string
	room := most
	for _, a := range args {
		if len(a) > room {
			if room > 0 {
				out = append(out, strings.ToValidUTF8(a[:room], "")+"…")
			}
			break
		}
		out = append(out, a)
		room -= len(a) + 1
	}
	return out
}

// input writes to a command's stdin or terminal, in order and by offset.
type input struct {
	file *os.File
	tty  bool
	turn chan struct{} // holds one token: a writer takes it

	mu    sync.Mutex
	taken int64
	eof   bool
	gone  bool
}

func newInput(file *os.File, tty bool) *input {
	in := &input{file: file, tty: tty, turn: make(chan struct{}, 1)}
	in.turn <- struct{}{}
	return in
}

func (in *input) offset() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.taken
}

// write takes data whose first byte is at offset, skips what was taken before, and
// returns how much has been taken in all. It waits while the command does not read,
// until ctx ends; what was taken until then is counted.
func (in *input) write(ctx context.Context, offset int64, data []byte, eof bool) (int64, error) {
	select {
	case <-in.turn:
		defer func() { in.turn <- struct{}{} }()
	case <-ctx.Done():
		return in.offset(), ctx.Err()
	}
	in.mu.Lock()
	taken, closed, gone := in.taken, in.eof, in.gone
	in.mu.Unlock()
	switch {
	case offset > taken:
		return taken, fault.New(fault.FailedPrecondition, "input at offset %d would leave a gap: %d bytes have been taken; send from there", offset, taken).Because("input_gap")
	case offset+int64(len(data)) <= taken && (closed || !eof):
		return taken, nil
	case gone:
		return taken, fault.New(fault.FailedPrecondition, "the command has ended and reads no more").Because("ended")
	case closed:
		return taken, fault.New(fault.FailedPrecondition, "its input was closed before").Because("input_closed")
	}
	data = data[min(taken-offset, int64(len(data))):]
	if err := in.push(ctx, data); err != nil {
		return in.offset(), err
	}
	if eof {
		if err := in.end(ctx); err != nil {
			return in.offset(), err
		}
	}
	return in.offset(), nil
}

// push writes and counts; the caller has the turn.
func (in *input) push(ctx context.Context, data []byte) error {
	n, err := in.raw(ctx, data)
	in.mu.Lock()
	in.taken += int64(n)
	in.mu.Unlock()
	return err
}

// raw writes until all is taken or ctx ends. A deadline that an earlier call's context
// set too late is passed over.
func (in *input) raw(ctx context.Context, data []byte) (total int, err error) {
	release := context.AfterFunc(ctx, func() { in.file.SetWriteDeadline(time.Unix(1, 0)) })
	defer release()
	for total < len(data) {
		if ctx.Err() != nil {
			return total, ctx.Err()
		}
		n, err := in.file.Write(data[total:])
		total += n
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			if ctx.Err() == nil {
				in.file.SetWriteDeadline(time.Time{})
			}
		default:
			return total, fault.Wrap(err, fault.FailedPrecondition, "the command reads its input no more").Because("input_closed")
		}
	}
	return total, nil
}

// end closes stdin, or types the end-of-file key.
func (in *input) end(ctx context.Context) error {
	if in.tty {
		if _, err := in.raw(ctx, []byte{4}); err != nil {
			return err
		}
	} else if err := in.file.Close(); err != nil {
		return fault.Wrap(err, fault.FailedPrecondition, "its input was closed before").Because("input_closed")
	}
	in.mu.Lock()
	in.eof = true
	in.mu.Unlock()
	return nil
}

// close ends the input because the command is gone.
func (in *input) close() {
	in.mu.Lock()
	in.gone = true
	in.mu.Unlock()
	in.file.Close()
}
