package apiserver

import (
	"context"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// silentStream is that of a guest which takes a call and never says anything.
type silentStream struct{ ctx context.Context }

func (s silentStream) Receive() (*guestproto.CommandEvent, error) {
	<-s.ctx.Done()
	return nil, s.ctx.Err()
}

func (silentStream) Close() error { return nil }

// A guest that never answers does not hold its caller for ever.
func TestSilentGuest(t *testing.T) {
	t.Parallel()
	g := guest{pool: &guestPool{}, id: "sbx_silent"}
	_, err := openWithin(t.Context(), g, 20*time.Millisecond, func(ctx context.Context) (silentStream, error) {
		return silentStream{ctx}, nil
	})
	if !fault.Is(err, fault.DeadlineExceeded) || fault.Of(err).Reason != "guest_silent" {
		t.Errorf("got %v", err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := openWithin(gone, g, time.Minute, func(ctx context.Context) (silentStream, error) {
		return silentStream{ctx}, nil
	}); err == nil || fault.Of(err).Reason == "guest_silent" {
		t.Errorf("a client that went away: %v", err)
	}
}
