package hostagent

import (
	"context"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// Storage is the Disks of a disk.Pool.
type Storage struct{ *disk.Pool }

// Mount brings a disk up on its template and agent layer.
func (s Storage) Mount(ctx context.Context, id, template, agent string) (string, error) {
	return s.Pool.Mount(ctx, id, disk.MountSpec{Template: template, Agent: agent})
}

// Unmount takes a disk's mounts down.
func (s Storage) Unmount(ctx context.Context, id string) error { return s.Pool.Unmount(ctx, id) }

// Sync makes a disk durable before it is saved, and gives back what deleted files took.
func (s Storage) Sync(ctx context.Context, id string) error {
	if err := s.Pool.Sync(ctx, id); err != nil {
		return err
	}
	s.Tidy(ctx, id)
	return nil
}

// Has says whether a sandbox has a disk of its own.
func (s Storage) Has(ctx context.Context, id string) (bool, error) {
	_, err := s.Stat(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// Erase removes the disk and every save of a sandbox, committed or not.
func (s Storage) Erase(ctx context.Context, id string) error {
	inv, err := s.Inventory(ctx)
	if err != nil {
		return err
	}
	for _, save := range inv.Saves {
		if save.ID != id {
			continue
		}
		if err := s.DropSaved(ctx, id, save.Generation); err != nil {
			return err
		}
	}
	return s.Delete(ctx, id)
}

// Stage begins a save. A sandbox that exists may use the reserve for it; a capture for
// forks is refused like all that is new.
func (s Storage) Stage(ctx context.Context, owner string, generation, need int64) (Staging, error) {
	use := disk.ForKept
	if isCapture(owner) {
		use = disk.ForNew
	}
	st, err := s.Pool.Stage(ctx, owner, generation, need, use)
	if err != nil {
		return nil, err
	}
	return st, nil
}

// Saved finds a committed save.
func (s Storage) Saved(ctx context.Context, owner string, generation int64) (disk.Saved, error) {
	return s.OpenSaved(ctx, owner, generation)
}

// CloneSaved makes a disk from a save's. It exists already as a save, so it is not
// refused in a pool that runs low.
func (s Storage) CloneSaved(ctx context.Context, owner string, generation int64, id string) error {
	return s.Replace(ctx, disk.FromSave(owner, generation), id)
}

// BuildTemplate makes a template from what the source names.
func (s Storage) BuildTemplate(ctx context.Context, src hostproto.TemplateSource, progress func(string, float64)) (hostproto.Template, error) {
	report := func(step string, done, total int64) {
		fraction := 0.0
		if total > 0 {
			fraction = float64(done) / float64(total)
		}
		progress(step, fraction)
	}
	var t disk.Template
	var err error
	switch {
	case src.Debian && src.OCI == "":
		t, err = s.BuildDebian(ctx, disk.DebianRecipe{}, report)
	case src.OCI != "" && !src.Debian:
		t, err = s.ImportOCI(ctx, disk.OCIImage{Ref: src.OCI}, report)
	default:
		err = fault.New(fault.InvalidArgument, "a template is made from the built-in Debian recipe or from an OCI image: give one of them")
	}
	if err != nil {
		return hostproto.Template{}, err
	}
	return hostproto.Template{Digest: t.Digest, Bytes: t.Bytes, User: t.Account.Name, Workdir: t.Config.WorkDir, Env: envMap(t.Config.Env)}, nil
}

// IDs lists the sandboxes that have a disk or a save.
func (s Storage) IDs(ctx context.Context) ([]string, error) {
	inv, err := s.Inventory(ctx)
	if err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, d := range inv.Disks {
		if !d.Stray {
			ids[d.ID] = true
		}
	}
	for _, save := range inv.Saves {
		if !isCapture(save.ID) {
			ids[save.ID] = true
		}
	}
	return sortedKeys(ids), nil
}

// Mounted lists the sandboxes of which anything is mounted or attached.
func (s Storage) Mounted(ctx context.Context) ([]string, error) {
	inv, err := s.Inventory(ctx)
	if err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, d := range inv.Disks {
		if d.Attached || d.Image || d.Root {
			ids[d.ID] = true
		}
	}
	return sortedKeys(ids), nil
}

// SaveOwners lists who has a save, committed or not.
func (s Storage) SaveOwners(ctx context.Context) ([]string, error) {
	inv, err := s.Inventory(ctx)
	if err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, save := range inv.Saves {
		ids[save.ID] = true
	}
	return sortedKeys(ids), nil
}

// Space is the size of the pool and what is free in it.
func (s Storage) Space(ctx context.Context) (total, free int64, err error) {
	u, err := s.Usage(ctx)
	return u.Total, u.Free, err
}

func envMap(list []string) map[string]string {
	m := map[string]string{}
	for _, kv := range list {
		for i := range kv {
			if kv[i] == '=' {
				m[kv[:i]] = kv[i+1:]
				break
			}
		}
	}
	return m
}
