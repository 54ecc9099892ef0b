package guest

import (
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// IdentityWork is what a boot, a wake or a fork wants this sandbox to be.
type IdentityWork struct {
	Boot      bool // the first boot of this memory; otherwise it was restored
	WallClock time.Time
	Entropy   []byte
	Hostname  string // "" leaves it
	MachineID string
	Hosts     []byte
	Resolv    []byte
	User      string // the template's user, who owns /workspace and the Docker logins
}

// Outcome is how one item went.
type Outcome struct {
	Status  guestproto.ItemStatus
	Message string
}

// Done, failed and impossible outcomes.
func done(message string) Outcome { return Outcome{guestproto.ItemStatus_ITEM_STATUS_DONE, message} }
func failed(err error) Outcome {
	return Outcome{guestproto.ItemStatus_ITEM_STATUS_FAILED, clipText(err.Error())}
}
func impossible(message string) Outcome {
	return Outcome{guestproto.ItemStatus_ITEM_STATUS_IMPOSSIBLE, message}
}

// Identity applies one item of the identity work to the system. Items come one at a
// time and in order; an item may come again with other work after a fork of a fork.
type Identity interface {
	Apply(item string, work IdentityWork) Outcome
}

// The items of each occasion, in the order in which they are done: time and
// randomness first, for what follows may use them.
var (
	bootItems = []string{
		guestproto.ItemExitMarker, guestproto.ItemClock, guestproto.ItemEntropy, guestproto.ItemRandom,
		guestproto.ItemHostname, guestproto.ItemHosts, guestproto.ItemMachineID, guestproto.ItemNetwork,
		guestproto.ItemDockerConfig, guestproto.ItemWorkspace,
	}
	wakeItems = []string{
		guestproto.ItemClock, guestproto.ItemEntropy, guestproto.ItemRandom, guestproto.ItemNetwork,
	}
	forkItems = []string{
		guestproto.ItemClock, guestproto.ItemEntropy, guestproto.ItemRandom, guestproto.ItemHostname,
		guestproto.ItemHosts, guestproto.ItemMachineID, guestproto.ItemBootID, guestproto.ItemNetwork,
		guestproto.ItemConnections, guestproto.ItemSSHHostKeys, guestproto.ItemDockerConfig,
	}
)

// applyItems does items in order. One that fails does not keep the others from being
// done: the host decides what a failure means.
func applyItems(identity Identity, items []string, work IdentityWork) []*guestproto.ItemResult {
	var results []*guestproto.ItemResult
	for _, item := range items {
		o := applyOne(identity, item, work)
		results = append(results, result(item, o))
	}
	return results
}

func applyOne(identity Identity, item string, work IdentityWork) (o Outcome) {
	defer func() {
		if p := recover(); p != nil {
			o = failed(panicError(p))
		}
	}()
	return identity.Apply(item, work)
}

func result(item string, o Outcome) *guestproto.ItemResult {
	return &guestproto.ItemResult{Item: item, Status: o.Status, Message: o.Message}
}

// checkWork refuses what could not be applied, before anything is.
func checkWork(w IdentityWork) error {
	switch {
	case len(w.Entropy) < guestproto.MinEntropy || len(w.Entropy) > guestproto.MaxEntropy:
		return fault.New(fault.InvalidArgument, "entropy has %d bytes; %d to %d are needed", len(w.Entropy), guestproto.MinEntropy, guestproto.MaxEntropy)
	case w.WallClock.Before(time.Unix(1<<30, 0)):
		return fault.New(fault.InvalidArgument, "the wall clock %s is not a present time", w.WallClock.UTC().Format(time.RFC3339))
	case w.Hostname != "" && !validHostname(w.Hostname):
		return fault.New(fault.InvalidArgument, "the hostname %q has to be 1 to 63 of a-z, 0-9 and -", w.Hostname)
	case w.MachineID != "" && !validMachineID(w.MachineID):
		return fault.New(fault.InvalidArgument, "a machine id is 32 lower-case hex digits")
	}
	return nil
}

func validHostname(s string) bool {
	if len(s) < 1 || len(s) > 63 {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' {
			return false
		}
	}
	return true
}

func validMachineID(s string) bool {
	if len(s) != 32 {
		return false
	}
	for _, r := range s {
		if (r < 'a' || r > 'f') && (r < '0' || r > '9') {
			return false
		}
	}
	return true
}

// Recorder is an Identity that changes nothing and remembers what it was asked: for
// an agent inside a test's own process.
type Recorder struct {
	mu    sync.Mutex
	items []string
	works []IdentityWork
}

// Apply records the item as done.
func (r *Recorder) Apply(item string, work IdentityWork) Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.items = append(r.items, item)
	r.works = append(r.works, work)
	return done("recorded")
}

// Items gives all items so far, in the order in which they came.
func (r *Recorder) Items() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.items)
}

// Last gives the work of the last item, and false where none came.
func (r *Recorder) Last() (IdentityWork, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.works) == 0 {
		return IdentityWork{}, false
	}
	return r.works[len(r.works)-1], true
}
