package cli

import (
	"bytes"
	"context"
	"errors"
	"io"

	"github.com/muesli/cancelreader"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// inputChunk is the most input that one call carries. What comes while a call is on
// its way goes into the next one.
const inputChunk = 256 << 10

// pumpInput passes the input on, once the command runs, until its end or until the
// returned function is called. Each chunk says how many bytes went before it, so that
// a repeated call writes nothing twice.
func (s *session) pumpInput(ctx context.Context) (stop func()) {
	// A regular file cannot be cancelled and need not be: it never blocks.
	input, cancel := s.a.env.Stdin, func() bool { return false }
	if reader, err := cancelreader.NewReader(input); err == nil {
		input, cancel = reader, reader.Cancel
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case <-ctx.Done():
		case <-s.running:
			s.pump(ctx, input)
		}
	}()
	return func() {
		// A read of a stream that is no file and is still at it ends with the process.
		if cancel() {
			<-ended
		}
	}
}

func (s *session) pump(ctx context.Context, reader io.Reader) {
	buf := make([]byte, inputChunk)
	offset := s.offset
	var keys leaveKeys
	_, keyboard := terminalFile(s.a.env.Stdin)
	keyboard = keyboard && s.body.Pty != nil
	for {
		n, readErr := reader.Read(buf)
		if errors.Is(readErr, cancelreader.ErrCanceled) {
			return
		}
		last := readErr != nil
		if keyboard {
			if last { // a terminal in raw mode ends when its window does
				s.leave(errDetached)
				return
			}
			rest, left := keys.filter(buf[:n])
			if n = copy(buf, rest); n > 0 && !s.sendInput(ctx, buf[:n], offset, false) {
				return
			}
			offset += int64(n)
			if left {
				s.leave(errDetached)
				return
			}
			continue
		}
		if n > 0 || last {
			if !s.sendInput(ctx, buf[:n], offset, last) {
				return
			}
			offset += int64(n)
		}
		if last {
			return
		}
	}
}

// writeInput writes one chunk, again where the answer was cut off.
func (s *session) writeInput(ctx context.Context, data []byte, offset int64, last bool) error {
	return s.a.keepAsking(ctx, func() (bool, error) {
		return false, done(s.c.WriteCommandStdinWithBody(ctx, s.ref, s.id,
			&api.WriteCommandStdinParams{Offset: &offset, KeepOpen: !last}, "application/octet-stream", bytes.NewReader(data)))
	})
}

// sendInput writes one chunk and says whether more may follow. A command that takes
// no more input is no error: its exit code says what it thinks of that.
func (s *session) sendInput(ctx context.Context, data []byte, offset int64, last bool) bool {
	err := s.writeInput(ctx, data, offset, last)
	if err == nil {
		return true
	}
	switch fault.Of(err).Kind {
	case fault.FailedPrecondition, fault.NotFound, fault.Conflict, fault.Cancelled:
	default:
		if ctx.Err() == nil {
			s.a.note("hutch: the rest of the input did not reach the command: %s", clean(fault.Of(err).Message))
		}
	}
	return false
}

// leaveKey begins the two keys that leave a terminal: ctrl-] and d.
const leaveKey = 0x1d

// leaveKeys finds the keys that leave a terminal in what is typed.
type leaveKeys struct{ held bool }

// filter gives what goes on to the command. A key that may be the first of the two is
// held until the next one is there.
func (k *leaveKeys) filter(typed []byte) (rest []byte, left bool) {
	for _, b := range typed {
		switch {
		case k.held && b == 'd':
			return rest, true
		case k.held:
			k.held = false
			rest = append(rest, leaveKey, b)
		case b == leaveKey:
			k.held = true
		default:
			rest = append(rest, b)
		}
	}
	return rest, false
}
