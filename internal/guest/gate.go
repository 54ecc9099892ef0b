package guest

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/binary"
	"strings"
	"sync"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// gate decides which calls get in. It keeps digests of tokens, never tokens, and
// compares them in constant time.
type gate struct {
	mu       sync.Mutex
	set      bool
	current  [sha256.Size]byte
	previous [sha256.Size]byte // of before the last Restored
	replaced bool              // previous is set
	open     bool              // Init's work is done
}

// check says whether a call may go on. Init passes before there is a token, and
// Restored under the token before the last one too: its reply may have been lost.
func (g *gate) check(procedure, token string) error {
	if n := len(token); n < guestproto.MinToken || n > guestproto.MaxToken {
		return errToken()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.set {
		if procedure == guestproto.AgentInitProcedure {
			return nil
		}
		return fault.New(fault.Unavailable, "the sandbox has not been initialised; call Init first").Because(guestproto.ReasonNotInitialised)
	}
	digest := sha256.Sum256([]byte(token))
	ok := subtle.ConstantTimeCompare(digest[:], g.current[:])
	if procedure == guestproto.AgentRestoredProcedure && g.replaced {
		ok |= subtle.ConstantTimeCompare(digest[:], g.previous[:])
	}
	switch {
	case ok != 1:
		return errToken()
	case !g.open && procedure != guestproto.AgentInitProcedure:
		return fault.New(fault.Unavailable, "the sandbox is being initialised; wait for Init").Because(guestproto.ReasonNotInitialised)
	}
	return nil
}

func errToken() error {
	return fault.New(fault.Unauthenticated, "the call has not this boot's token")
}

// claim makes a token the boot's. Where one is set already it must be the same; first
// says that this call set it.
func (g *gate) claim(token string) (first bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	digest := sha256.Sum256([]byte(token))
	if !g.set {
		g.set, g.current = true, digest
		return true, nil
	}
	if subtle.ConstantTimeCompare(digest[:], g.current[:]) != 1 {
		return false, errToken()
	}
	return false, nil
}

// admit opens the gate for all calls.
func (g *gate) admit() {
	g.mu.Lock()
	g.open = true
	g.mu.Unlock()
}

// replace makes next the token of a restored boot. repeated says that it is so
// already; then the caller may have come under the old token or the new one. Coming
// under the old one with yet another new token is refused.
func (g *gate) replace(under, next string) (repeated bool, err error) {
	if n := len(next); n < guestproto.MinToken || n > guestproto.MaxToken {
		return false, fault.New(fault.InvalidArgument, "a token has %d to %d bytes", guestproto.MinToken, guestproto.MaxToken)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	was, will := sha256.Sum256([]byte(under)), sha256.Sum256([]byte(next))
	if g.replaced && subtle.ConstantTimeCompare(will[:], g.current[:]) == 1 {
		return true, nil
	}
	if subtle.ConstantTimeCompare(was[:], g.current[:]) != 1 {
		return false, errToken()
	}
	if was == will {
		return false, fault.New(fault.InvalidArgument, "the new token is the old one; make another")
	}
	g.previous, g.current, g.replaced = g.current, will, true
	return false, nil
}

// idSource makes ids that no copy of this memory makes: the host's entropy is mixed
// into the kernel's, because a fork might not have other randomness yet.
type idSource struct {
	mu  sync.Mutex
	key [sha256.Size]byte
	n   uint64
}

// mix adds the host's entropy.
func (s *idSource) mix(entropy []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.key = sha256.Sum256(append(s.key[:], entropy...))
}

// next gives a new command id: cmd_ and 20 letters and digits.
func (s *idSource) next() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	var fresh [16]byte
	rand.Read(fresh[:]) // never fails
	seed := binary.BigEndian.AppendUint64(append(s.key[:len(s.key):len(s.key)], fresh[:]...), s.n)
	sum := sha256.Sum256(seed)
	return "cmd_" + strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:])[:20])
}
