package hostagent

import (
	"context"
	"maps"
	"slices"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// DiskReport adds up what takes the space of the pool.
func (a *Agent) DiskReport(ctx context.Context) (hostproto.DiskReport, error) {
	r, err := a.cfg.Disks.Report(ctx)
	if err != nil {
		return hostproto.DiskReport{}, err
	}
	out := diskReport(r)
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range out.Sandboxes {
		_, out.Sandboxes[i].Owned = a.owners[out.Sandboxes[i].Sandbox]
	}
	return out, nil
}

// diskReport adds disks and saves up by sandbox.
func diskReport(r disk.Report) hostproto.DiskReport {
	out := hostproto.DiskReport{
		PoolBytes: r.Total, PoolFree: r.Free, PoolInFile: r.File, LowMark: r.LowMark, StopMark: r.StopMark, Reserve: r.Reserved,
		DataBytes: r.DataTotal, DataFree: r.DataFree, MemoryQuota: r.MemoryQuota, Other: r.Other,
	}
	for _, t := range r.Templates {
		out.Templates.Count++
		out.Templates.Bytes += t.Bytes
	}
	byID := map[string]*hostproto.SandboxDisk{}
	add := func(id string, s disk.Space, memory int64) {
		d := byID[id]
		if d == nil {
			d = &hostproto.SandboxDisk{Sandbox: id}
			byID[id] = d
		}
		d.Size = max(d.Size, s.Size)
		d.Allocated += s.Allocated
		d.Memory += memory
		if s.Unique < 0 || d.Unique < 0 {
			d.Unique = -1
		} else {
			d.Unique += s.Unique
		}
	}
	for _, d := range r.Disks {
		add(d.ID, d.Space, 0)
	}
	for _, s := range r.Saves {
		if isCapture(s.ID) {
			out.Forks.Count++
			out.Forks.Bytes += s.Memory + max(s.Disk.Unique, 0)
			continue
		}
		add(s.ID, s.Disk, s.Memory)
	}
	for _, id := range slices.Sorted(maps.Keys(byID)) {
		out.Sandboxes = append(out.Sandboxes, *byID[id])
	}
	return out
}

// Running counts the sandboxes whose processes run here.
func (a *Agent) Running() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	var n int64
	for _, o := range a.owners {
		if o.live.Load() != nil {
			n++
		}
	}
	return n
}
