package control

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// hostIDs gives the hosts in a fixed order.
func (c *Control) hostIDs() []string { return slices.Sorted(maps.Keys(c.hosts)) }

// anyHost gives the host that builds templates: the first.
func (c *Control) anyHost() (hostproto.Host, error) {
	ids := c.hostIDs()
	if len(ids) == 0 {
		return nil, noHost(nil)
	}
	return c.host(ids[0])
}

// info asks a host what it can do, within the time that a call may take.
func (c *Control) info(ctx context.Context, id string) (hostproto.HostInfo, error) {
	h, err := c.host(id)
	if err != nil {
		return hostproto.HostInfo{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	info, err := h.Info(ctx)
	info.ID = id
	return info, err
}

// HostInfo gives what each host that answers can do and how full it is. It is an
// error only when none answers.
func (c *Control) HostInfo(ctx context.Context) ([]HostInfo, error) {
	var out []HostInfo
	var failed []error
	for _, id := range c.hostIDs() {
		info, err := c.info(ctx, id)
		if err != nil {
			failed = append(failed, err)
			continue
		}
		out = append(out, info)
	}
	if err := gone(ctx); err != nil {
		return nil, err
	}
	if len(out) == 0 {
		return nil, noHost(errors.Join(failed...))
	}
	return out, nil
}

// gone says that the caller went away, where it did.
func gone(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fault.Wrap(context.Cause(ctx), fault.Cancelled, "the call was cancelled; nothing was changed")
}

func noHost(cause error) error {
	return fault.Wrap(cause, fault.Unavailable, "no host answers; check the host agent, then try again").Because("no_host")
}

// place chooses the host of a new sandbox: the first that answers and has room.
func (c *Control) place(ctx context.Context) (hostproto.HostInfo, error) {
	infos, err := c.HostInfo(ctx)
	if err != nil {
		return hostproto.HostInfo{}, err
	}
	for _, info := range infos {
		if roomy(info) {
			return info, nil
		}
	}
	return hostproto.HostInfo{}, poolFull("create a sandbox", infos[0])
}

// hostFacts is what a host says that decides on a verb. A host that does not answer
// leaves nothing known: the verb is admitted, and the host decides when it is back.
type hostFacts struct {
	known bool
	info  hostproto.HostInfo
}

// factsFor asks the sandbox's host what matters for a verb. It is asked before the
// transaction, so that no host holds the database up.
func (c *Control) factsFor(ctx context.Context, a Actor, ref string, req sandbox.Request) (hostFacts, error) {
	if req.Verb != sandbox.Sleep && req.Verb != sandbox.Fork {
		return hostFacts{}, nil
	}
	var s sandbox.Sandbox
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		s, err = resolve(ctx, r, a, ref)
		return err
	})
	if err != nil {
		return hostFacts{}, err
	}
	info, err := c.info(ctx, s.Host)
	if err != nil {
		c.log.Debug("a host did not say what it can do", "sandbox", s.ID, "host", s.Host, "err", err)
		return hostFacts{}, gone(ctx)
	}
	return hostFacts{known: true, info: info}, nil
}

// allow refuses what the host cannot do now, before anything is frozen (Z9, D6).
func (f hostFacts) allow(s sandbox.Sandbox, verb sandbox.Verb, mode sandbox.ForkMode) error {
	if !f.known {
		return nil
	}
	if !f.info.Memory && verb == sandbox.Sleep {
		return fault.New(fault.Unsupported, "cannot sleep %s: its host cannot save memory; `stop` it instead", s.Name).Because("memory_snapshot")
	}
	if !f.info.Memory && verb == sandbox.Fork && mode == sandbox.ForkLive {
		return fault.New(fault.Unsupported, "cannot fork %s live: its host cannot save memory; use `--mode disk`", s.Name).Because("memory_snapshot")
	}
	if verb == sandbox.Fork && !roomy(f.info) {
		return poolFull("fork "+s.Name, f.info)
	}
	return nil
}
