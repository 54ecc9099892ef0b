package hostagent

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/network"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// guestClient is a way to one boot's guest agent. Everything that a guest says is
// bounded and checked by guestproto.
type guestClient struct {
	*guestproto.Client
}

func newGuest(dial func(context.Context) (net.Conn, error), token string) guestClient {
	return guestClient{guestproto.NewClient(dial, token)}
}

// pollEvery is how often a guest that does not answer yet is asked again.
const pollEvery = 3 * time.Millisecond

// until repeats call until it succeeds, fails for a reason other than that the guest
// cannot be reached, the sandbox ends, or ctx is over.
func until(ctx context.Context, l *live, call func(context.Context) error) error {
	for {
		err := call(ctx)
		if err == nil || !fault.Is(err, fault.Unavailable) {
			return err
		}
		select {
		case <-l.exited:
			return fault.Wrap(err, fault.FailedPrecondition,
				"the sandbox ended before its agent answered (%s): does the template have what it needs to boot?", exitText(l.exit)).Because("boot_failed")
		case <-ctx.Done():
			return fault.Wrap(err, fault.DeadlineExceeded, "the agent inside did not answer in time; is the machine overloaded?").Because("boot_timeout")
		case <-time.After(pollEvery):
		}
	}
}

// init makes the first call after a fresh boot.
func (l *live) init(ctx context.Context, r *record, generation int64) ([]hostproto.IdentityItem, error) {
	var items []hostproto.IdentityItem
	err := until(ctx, l, func(ctx context.Context) error {
		res, err := l.guest.Agent.Init(ctx, &guestproto.InitRequest{
			WallClockUnixNano: time.Now().UnixNano(),
			Entropy:           entropy(),
			Identity:          identity(r),
			SandboxName:       r.Name,
			DefaultUser:       r.Spec.User,
			Env:               r.Spec.Env,
			PidsLimit:         pidsLimit(r.Spec),
		})
		if err == nil {
			items = identityItems(res.GetItems())
		}
		return err
	})
	if err == nil {
		err = l.judgeClock(ctx, items)
	}
	return items, err
}

// restored makes the first call after a restore, while nothing but PID 1 runs. It
// goes over a client with the captured token and sets the new one.
func (l *live) restored(ctx context.Context, r *record, oldToken string, fork bool) ([]hostproto.IdentityItem, error) {
	old := newGuest(l.dial(), oldToken)
	defer old.Close()
	req := &guestproto.RestoredRequest{
		NewToken: l.token, Kind: guestproto.RestoreKind_RESTORE_KIND_WAKE, Entropy: entropy(),
	}
	if fork {
		req.Kind, req.Identity, req.SandboxName = guestproto.RestoreKind_RESTORE_KIND_FORK, identity(r), r.Name
	}
	var items []hostproto.IdentityItem
	err := until(ctx, l, func(ctx context.Context) error {
		req.WallClockUnixNano = time.Now().UnixNano()
		res, err := old.Agent.Restored(ctx, req)
		if err == nil {
			items = identityItems(res.GetItems())
		}
		return err
	})
	if err == nil {
		err = l.judgeClock(ctx, items)
	}
	return items, err
}

// clockTolerance is how far a guest's clock may be from the host's (Z6).
const clockTolerance = 500 * time.Millisecond

// judgeClock puts the host's own finding in the place of what the guest said of its
// clock: a guest cannot tell a clock that is ahead from a request that was long on its
// way. The host asks between two readings of its own clock, which the answer has to
// lie between; when its own clock was stepped meanwhile it asks again.
func (l *live) judgeClock(ctx context.Context, items []hostproto.IdentityItem) error {
	i := slices.IndexFunc(items, func(it hostproto.IdentityItem) bool { return it.Item == guestproto.ItemClock })
	if i < 0 {
		return nil
	}
	for range 3 {
		var sent, received time.Time
		var res *guestproto.PingResponse
		err := until(ctx, l, func(ctx context.Context) (err error) {
			sent = time.Now()
			res, err = l.guest.Agent.Ping(ctx, &guestproto.PingRequest{})
			received = time.Now()
			return err
		})
		if err != nil {
			return err
		}
		if items[i] = clockItem(sent, received, time.Unix(0, res.GetWallClockUnixNano())); items[i].Status == "done" {
			break
		}
	}
	return nil
}

// clockItem judges a clock that was read between sent and received.
func clockItem(sent, received, guest time.Time) hostproto.IdentityItem {
	it := hostproto.IdentityItem{Item: guestproto.ItemClock, Status: "done"}
	off := max(sent.Round(0).Sub(guest), guest.Sub(received.Round(0)), 0).Round(time.Millisecond)
	it.Message = fmt.Sprintf("within %s of the host's", off+received.Sub(sent).Round(time.Millisecond)+time.Millisecond)
	if off > clockTolerance {
		it.Status, it.Message = "failed", fmt.Sprintf("%s away from the host's", off)
	}
	return it
}

// identity is what the guest is told to be. The machine id follows from the
// sandbox's id: the same at every boot, another one in every fork.
func identity(r *record) *guestproto.Identity {
	sum := sha256.Sum256([]byte("machine-id " + r.Sandbox))
	return &guestproto.Identity{
		Hostname:   r.Name,
		MachineId:  hex.EncodeToString(sum[:16]),
		Hosts:      fmt.Appendf(nil, "127.0.0.1\tlocalhost\n127.0.1.1\t%s\n::1\tlocalhost ip6-localhost ip6-loopback\n", r.Name),
		ResolvConf: []byte(network.ResolvConf),
	}
}

// pidsLimit bounds the processes inside, so that a fork bomb is an error inside and
// not a burden on the host: 512 for each GiB, at least 512.
func pidsLimit(s sandbox.Spec) int64 { return max(512, s.Memory>>30*512) }

func entropy() []byte {
	b := make([]byte, 256)
	_, _ = rand.Read(b) // never fails
	return b
}

func newToken() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

var itemStatus = map[guestproto.ItemStatus]string{
	guestproto.ItemStatus_ITEM_STATUS_DONE:       "done",
	guestproto.ItemStatus_ITEM_STATUS_FAILED:     "failed",
	guestproto.ItemStatus_ITEM_STATUS_IMPOSSIBLE: "impossible",
}

// identityItems takes the guest's list, which is bounded here: a guest that lies
// makes its own proof useless and no more.
func identityItems(items []*guestproto.ItemResult) []hostproto.IdentityItem {
	var out []hostproto.IdentityItem
	for _, it := range items[:min(len(items), 64)] {
		status, ok := itemStatus[it.GetStatus()]
		if !ok {
			status = "failed"
		}
		out = append(out, hostproto.IdentityItem{Item: clip(it.GetItem(), 64), Status: status, Message: clip(it.GetMessage(), 512)})
	}
	return out
}

// identityFault says which item of a fork's identity failed, nil when all that is
// possible was done.
func identityFault(items []hostproto.IdentityItem) error {
	for _, it := range items {
		if it.Status == "failed" {
			return fault.New(fault.Internal, "the fork's %s could not be made its own (%s); it was not let run", it.Item, it.Message).Because("identity")
		}
	}
	return nil
}

func clip(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}
