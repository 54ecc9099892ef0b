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
	var offset int64
	for {
		n, readErr := reader.Read(buf)
		if errors.Is(readErr, cancelreader.ErrCanceled) {
			return
		}
		last := readErr != nil
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

// sendInput writes one chunk and says whether more may follow. A command that takes
// no more input is no error: its exit code says what it thinks of that.
func (s *session) sendInput(ctx context.Context, data []byte, offset int64, last bool) bool {
	err := s.a.keepAsking(ctx, func() (bool, error) {
		return false, done(s.c.WriteCommandStdinWithBody(ctx, s.ref, s.id,
			&api.WriteCommandStdinParams{Offset: &offset, KeepOpen: !last}, "application/octet-stream", bytes.NewReader(data)))
	})
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
