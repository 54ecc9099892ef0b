package sshgate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
)

const (
	callTimeout = 30 * time.Second // of a guest's answer: it is not trusted to give one
	exitFailed  = 255              // what ssh itself says where no command's code is known
	maxEnv      = 128              // variables of a session
	maxEnvBytes = 32 << 10
	maxCells    = 65535 // a terminal's rows and columns: the kernel keeps 16 bits
)

// The requests of RFC 4254.
type (
	ptyRequest struct {
		Term                      string
		Cols, Rows, Width, Height uint32
		Modes                     string
	}
	windowChange  struct{ Cols, Rows, Width, Height uint32 }
	envRequest    struct{ Name, Value string }
	execRequest   struct{ Command string }
	signalRequest struct{ Signal string }
	exitStatus    struct{ Status uint32 }
	exitSignal    struct {
		Signal     string
		CoreDumped bool
		Message    string
		Language   string
	}
)

// session is one channel: what the client asks for up to the start, then one command.
type session struct {
	who     login
	channel ssh.Channel

	env      map[string]string
	envBytes int
	size     *guestproto.WindowSize

	mu    sync.Mutex
	guest Guest
	id    string // the command's, once it runs
	early []int32
}

func serveSession(ctx context.Context, who login, channel ssh.Channel, requests <-chan *ssh.Request) {
	s := &session{who: who, channel: channel, env: map[string]string{}}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	started := false
	for r := range requests {
		ok := false
		switch r.Type {
		case "exec", "shell":
			var line execRequest
			if started || r.Type == "exec" && ssh.Unmarshal(r.Payload, &line) != nil {
				break
			}
			ok, started = true, true
			req := s.request(line.Command, r.Type == "shell")
			running.Go(func() {
				s.run(ctx, req)
				_ = channel.Close()
			})
		default:
			ok = s.handle(ctx, r, started)
		}
		if r.WantReply {
			_ = r.Reply(ok, nil)
		}
	}
	cancel() // the client has gone
	running.Wait()
	_ = channel.Close()
}

// handle does a request that starts nothing. What it does not know, agent forwarding and
// subsystems among it, is refused.
func (s *session) handle(ctx context.Context, r *ssh.Request, started bool) bool {
	switch r.Type {
	case "env":
		var e envRequest
		if started || ssh.Unmarshal(r.Payload, &e) != nil || e.Name == "" || len(s.env) >= maxEnv || s.envBytes+len(e.Name)+len(e.Value) > maxEnvBytes {
			return false
		}
		s.envBytes += len(e.Name) + len(e.Value)
		s.env[e.Name] = e.Value
		return true
	case "pty-req":
		var p ptyRequest
		if started || ssh.Unmarshal(r.Payload, &p) != nil {
			return false
		}
		s.size = sizeOf(p.Rows, p.Cols)
		if p.Term != "" {
			s.env["TERM"] = p.Term
		}
		return true
	case "window-change":
		var w windowChange
		if ssh.Unmarshal(r.Payload, &w) != nil {
			return false
		}
		return s.resize(ctx, sizeOf(w.Rows, w.Cols))
	case "signal":
		var sig signalRequest
		if ssh.Unmarshal(r.Payload, &sig) != nil {
			return false
		}
		n := unix.SignalNum("SIG" + sig.Signal)
		if n == 0 {
			return false
		}
		s.signal(ctx, int32(n))
		return true
	}
	return false
}

func sizeOf(rows, cols uint32) *guestproto.WindowSize {
	return &guestproto.WindowSize{Rows: min(rows, maxCells), Cols: min(cols, maxCells)}
}

// request says what to run. A shell in a terminal is a login shell, as sshd's are.
func (s *session) request(line string, shell bool) *guestproto.StartRequest {
	req := &guestproto.StartRequest{Shell: line, Env: s.env, Pty: s.size, Stdin: true, Lossless: true}
	if shell || line == "" {
		req.Shell = "if command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi"
	}
	return req
}

func (s *session) resize(ctx context.Context, size *guestproto.WindowSize) bool {
	s.mu.Lock()
	guest, id := s.guest, s.id
	if s.size == nil {
		s.mu.Unlock()
		return false
	}
	s.size = size // the start looks at it again
	s.mu.Unlock()
	if id == "" {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return guest.Resize(ctx, &guestproto.ResizeRequest{Id: id, Size: size}) == nil
}

func (s *session) signal(ctx context.Context, n int32) {
	s.mu.Lock()
	guest, id := s.guest, s.id
	if id == "" { // between the request and the start: a wake may lie there
		if len(s.early) < maxEnv {
			s.early = append(s.early, n)
		}
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_ = guest.Signal(ctx, &guestproto.SignalRequest{Id: id, Signal: n}) // one that has ended takes none
}

// begun makes the command known to resize and signal, and does what came before.
func (s *session) begun(ctx context.Context, guest Guest, id string, asked *guestproto.WindowSize) {
	s.mu.Lock()
	s.guest, s.id = guest, id
	size, early := s.size, s.early
	s.early = nil
	s.mu.Unlock()
	if size != asked {
		s.resize(ctx, size)
	}
	for _, n := range early {
		s.signal(ctx, n)
	}
}

// run runs the command and says how it ended. An end that is not known is never given
// as a code of the command.
func (s *session) run(ctx context.Context, req *guestproto.StartRequest) {
	exit, err := s.command(ctx, req)
	if err != nil {
		if ctx.Err() == nil {
			fmt.Fprintf(s.channel.Stderr(), "hutch: %s\r\n", wordsOf(err))
		}
		_ = s.channel.CloseWrite() // nothing can be said after it
		_, _ = s.channel.SendRequest("exit-status", false, ssh.Marshal(exitStatus{exitFailed}))
		return
	}
	_ = s.channel.CloseWrite()
	if name := unix.SignalName(unix.Signal(exit.Signal)); exit.Signal != 0 && name != "" {
		_, _ = s.channel.SendRequest("exit-signal", false, ssh.Marshal(exitSignal{Signal: name[len("SIG"):], Message: exit.Error}))
		return
	}
	_, _ = s.channel.SendRequest("exit-status", false, ssh.Marshal(exitStatus{uint32(exit.Code) & 0xff})) //nolint:gosec // a byte
}

// wordsOf is what a person reads of an error: faults are written for people, and other
// errors are the server's own.
func wordsOf(err error) string {
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f.Message
	}
	return "the command was interrupted, and how it ended is not known"
}

func (s *session) command(ctx context.Context, req *guestproto.StartRequest) (*guestproto.Exit, error) {
	guest, err := s.who.Guest(ctx, s.who.ref, hostproto.UseCommand)
	if err != nil {
		return nil, err
	}
	defer guest.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	silent := time.AfterFunc(callTimeout, cancel)
	stream, err := guest.Start(ctx, req)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	first, err := stream.Receive()
	if !silent.Stop() && err == nil {
		err = context.Canceled
	}
	if err != nil {
		return nil, err
	}
	id := first.GetStarted().GetId()
	if id == "" {
		return nil, broke()
	}
	s.begun(ctx, guest, id, req.Pty)
	ended := false
	defer func() {
		if !ended { // as sshd's: a command in front goes with its client
			s.hangUp(guest, id)
		}
	}()
	go s.feed(ctx, guest, id)
	for {
		event, err := stream.Receive()
		if err != nil {
			return nil, err
		}
		switch e := event.GetEvent().(type) {
		case *guestproto.CommandEvent_Output:
			out := io.Writer(s.channel)
			if e.Output.GetStream() == guestproto.Stream_STREAM_STDERR {
				out = s.channel.Stderr()
			}
			if _, err := out.Write(e.Output.GetData()); err != nil {
				return nil, err
			}
		case *guestproto.CommandEvent_Gap:
			return nil, fault.New(fault.Unavailable, "output of the command was lost on its way; `hutch commands logs` may have it")
		case *guestproto.CommandEvent_Exit:
			ended = true
			if e.Exit.GetError() == "lost" {
				return nil, errors.New("sshgate: the command's status was lost")
			}
			return e.Exit, nil
		default:
			return nil, broke()
		}
	}
}

func broke() error {
	return fault.New(fault.Unavailable, "the agent in the sandbox answered what it must not; `hutch stop` and `hutch resume` start it anew")
}

// hangUp ends a command whose client has gone.
func (s *session) hangUp(guest Guest, id string) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	_ = guest.Signal(ctx, &guestproto.SignalRequest{Id: id, Signal: int32(unix.SIGHUP)})
}

// feed hands the client's input on until it ends. It ends with the channel, which is
// closed after the command.
func (s *session) feed(ctx context.Context, guest Guest, id string) {
	buf := make([]byte, guestproto.Chunk)
	offset := int64(0)
	for {
		n, err := s.channel.Read(buf)
		for data := buf[:n]; len(data) > 0; {
			res, err := guest.Input(ctx, &guestproto.InputRequest{Id: id, Offset: offset, Data: data})
			if err != nil {
				_, _ = io.Copy(io.Discard, s.channel) // stdin was closed inside: the client may go on writing
				return
			}
			taken := res.GetOffset() - offset
			if taken <= 0 || taken > int64(len(data)) {
				return
			}
			data, offset = data[taken:], res.GetOffset()
		}
		if err != nil {
			_, _ = guest.Input(ctx, &guestproto.InputRequest{Id: id, Offset: offset, Eof: true})
			return
		}
	}
}
