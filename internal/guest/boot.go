package guest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// bootState is what Init and Restored keep. Its lock makes them happen one at a time.
type bootState struct {
	template atomic.Pointer[template]
	held     atomic.Bool // the work of Restored is under way

	mu       sync.Mutex
	name     string
	init     *guestproto.InitResponse
	restored *guestproto.RestoredResponse // of the current token
}

// initialise does the work of a fresh boot once; later calls with the same token get
// the first answer, and one that comes meanwhile waits for it.
func (g *Guest) initialise(token string, req *guestproto.InitRequest) (*guestproto.InitResponse, error) {
	work := workOf(req.WallClockUnixNano, req.Entropy, req.Identity)
	work.Boot, work.User = true, req.DefaultUser
	if err := checkWork(work); err != nil {
		return nil, err
	}
	if req.PidsLimit < 0 {
		return nil, fault.New(fault.InvalidArgument, "a limit of processes is not negative")
	}
	g.boot.mu.Lock()
	defer g.boot.mu.Unlock()
	first, err := g.gate.claim(token)
	if err != nil {
		return nil, err
	}
	if !first {
		return g.boot.init, nil
	}
	defer g.gate.admit()
	g.boot.name = req.SandboxName
	g.ids.mix(req.Entropy)
	g.boot.template.Store(&template{user: req.DefaultUser, env: req.Env})
	items := []*guestproto.ItemResult{result(guestproto.ItemToken, done(""))}
	items = append(items, applyItems(g.identity, bootItems, work)...)
	items = append(items, result(guestproto.ItemPidsLimit, g.limitPids(req.PidsLimit)))
	g.boot.init = &guestproto.InitResponse{Items: items}
	return g.boot.init, nil
}

func (g *Guest) limitPids(limit int64) Outcome {
	if limit == 0 {
		return done("no limit asked for")
	}
	group, err := newPidsGroup(g.path("/sys/fs/cgroup"), limit)
	if err != nil {
		return failed(err)
	}
	g.pids.Store(group)
	return done(fmt.Sprintf("at most %d processes and threads", limit))
}

// takeOver does the work of a restore once for each new token. It goes on to its end
// even if its caller has gone: half an identity is worse than none.
func (g *Guest) takeOver(under string, req *guestproto.RestoredRequest) (*guestproto.RestoredResponse, error) {
	work := workOf(req.WallClockUnixNano, req.Entropy, req.Identity)
	work.User = g.template().user
	if err := checkWork(work); err != nil {
		return nil, err
	}
	items := wakeItems
	switch req.Kind {
	case guestproto.RestoreKind_RESTORE_KIND_WAKE:
	case guestproto.RestoreKind_RESTORE_KIND_FORK:
		items = forkItems
		if work.Hostname == "" || work.MachineID == "" {
			return nil, fault.New(fault.InvalidArgument, "a fork needs a hostname and a machine id of its own")
		}
	default:
		return nil, fault.New(fault.InvalidArgument, "Restored needs a kind: wake or fork")
	}
	g.boot.mu.Lock()
	defer g.boot.mu.Unlock()
	repeated, err := g.gate.replace(under, req.NewToken)
	if err != nil {
		return nil, err
	}
	if repeated {
		return g.boot.restored, nil
	}
	g.boot.held.Store(true)
	defer g.boot.held.Store(false)
	if req.SandboxName != "" {
		g.boot.name = req.SandboxName
	}
	g.ids.mix(req.Entropy)
	results := []*guestproto.ItemResult{result(guestproto.ItemToken, done(""))}
	results = append(results, applyItems(g.identity, items, work)...)
	ids := done("kept")
	if req.Kind == guestproto.RestoreKind_RESTORE_KIND_FORK {
		ids = done(fmt.Sprintf("%d renewed", g.commands.renew(g.ids.next)))
	}
	results = append(results, result(guestproto.ItemCommandIDs, ids))
	g.boot.restored = &guestproto.RestoredResponse{Items: results}
	return g.boot.restored, nil
}

func workOf(wall int64, entropy []byte, id *guestproto.Identity) IdentityWork {
	return IdentityWork{
		WallClock: time.Unix(0, wall),
		Entropy:   entropy,
		Hostname:  id.GetHostname(),
		MachineID: id.GetMachineId(),
		Hosts:     id.GetHosts(),
		Resolv:    id.GetResolvConf(),
	}
}
