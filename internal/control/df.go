package control

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// HostDisk is what takes the space of a host's pool, as one project may see it.
type HostDisk struct {
	ID string
	hostproto.DiskReport
	Mine    []SandboxDisk   // the project's, the one that takes most first
	Others  hostproto.Share // those of other projects
	Unowned hostproto.Share // disks and saves that no sandbox of the host owns
}

// SandboxDisk is what one sandbox has in a pool.
type SandboxDisk struct {
	Sandbox sandbox.Sandbox
	hostproto.SandboxDisk
}

// DiskUsage asks each host what takes the space of its pool. With a ref only the host
// of that sandbox is asked, and of the sandboxes only that one is given. It is an
// error when none answers.
func (c *Control) DiskUsage(ctx context.Context, a Actor, ref string) ([]HostDisk, error) {
	ids, only := c.hostIDs(), ""
	if ref != "" {
		v, err := c.Get(ctx, a, ref)
		if err != nil {
			return nil, err
		}
		ids, only = []string{v.Sandbox.Host}, v.Sandbox.ID
	}
	var out []HostDisk
	var failed []error
	for _, id := range ids {
		r, err := c.diskReport(ctx, id)
		if err == nil {
			var h HostDisk
			if h, err = c.divide(ctx, a, id, r, only); err != nil {
				return nil, err
			}
			out = append(out, h)
			continue
		}
		failed = append(failed, err)
	}
	if err := gone(ctx); err != nil {
		return nil, err
	}
	if len(out) == 0 {
		return nil, noHost(errors.Join(failed...))
	}
	return out, nil
}

func (c *Control) diskReport(ctx context.Context, id string) (hostproto.DiskReport, error) {
	h, err := c.host(id)
	if err != nil {
		return hostproto.DiskReport{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	return h.DiskReport(ctx)
}

// divide tells the project's sandboxes from those of others.
func (c *Control) divide(ctx context.Context, a Actor, host string, r hostproto.DiskReport, only string) (HostDisk, error) {
	out := HostDisk{ID: host, DiskReport: r}
	err := c.store.View(ctx, func(ctx context.Context, rows store.Reader) error {
		for _, d := range r.Sandboxes {
			s, err := rows.Sandbox(ctx, d.Sandbox)
			switch {
			case !d.Owned:
				out.Unowned.Count++
				out.Unowned.Bytes += d.Allocated + d.Memory
			case fault.Is(err, fault.NotFound), err == nil && s.Project != a.Project:
				out.Others.Count++
				out.Others.Bytes += d.Allocated + d.Memory
			case err != nil:
				return err
			case only == "" || only == s.ID:
				out.Mine = append(out.Mine, SandboxDisk{s, d})
			}
		}
		return nil
	})
	slices.SortStableFunc(out.Mine, func(a, b SandboxDisk) int { return cmp.Compare(b.Allocated+b.Memory, a.Allocated+a.Memory) })
	return out, err
}
