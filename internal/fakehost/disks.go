package fakehost

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// newMark ends the name of what is being written or removed.
const newMark = ".new"

// disks is a hostagent.Disks. A disk is a file with the content of the guest's cell, a
// save a directory that counts once it has its manifest.
type disks struct {
	dir string
	mu  sync.Mutex // of what takes several steps; a step that a kill cuts is taken again
}

var _ hostagent.Disks = (*disks)(nil)

func (d *disks) disk(id string) string  { return filepath.Join(d.dir, "disks", id) }
func (d *disks) mount(id string) string { return filepath.Join(d.dir, "mounts", id) }
func (d *disks) save(owner string, generation int64) string {
	return filepath.Join(d.dir, "saves", fmt.Sprintf("%s@%d", owner, generation))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// put writes a file whole or not at all.
func put(path string, data []byte) error {
	if err := os.WriteFile(path+newMark, data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+newMark, path)
}

// copyFile writes a copy whole or not at all.
func copyFile(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return put(to, data)
}

// Create implements hostagent.Disks.
func (d *disks) Create(_ context.Context, id string, _ int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if exists(d.disk(id)) {
		return nil
	}
	return put(d.disk(id), nil)
}

// Mount implements hostagent.Disks. The root of a guest is its disk.
func (d *disks) Mount(_ context.Context, id, template, agent string) (string, error) {
	if template != Template || agent == "" {
		return "", fault.New(fault.NotFound, "there is no template %q or agent layer %q", template, agent)
	}
	if !exists(d.disk(id)) {
		return "", fault.New(fault.NotFound, "there is no disk %s", id)
	}
	return d.disk(id), put(d.mount(id), nil)
}

// Unmount implements hostagent.Disks.
func (d *disks) Unmount(_ context.Context, id string) error { return gone(d.mount(id)) }

// Sync implements hostagent.Disks.
func (d *disks) Sync(context.Context, string) error { return nil }

// Delete implements hostagent.Disks.
func (d *disks) Delete(_ context.Context, id string) error {
	if exists(d.mount(id)) {
		return errors.New("fakehost: a mounted disk is deleted: " + id)
	}
	return gone(d.disk(id))
}

// Has implements hostagent.Disks.
func (d *disks) Has(_ context.Context, id string) (bool, error) { return exists(d.disk(id)), nil }

// Erase implements hostagent.Disks.
func (d *disks) Erase(ctx context.Context, id string) error {
	saves, err := d.saves()
	if err != nil {
		return err
	}
	for _, s := range saves {
		if s.owner == id {
			if err := d.DropSaved(ctx, id, s.generation); err != nil {
				return err
			}
		}
	}
	return d.Delete(ctx, id)
}

// ReadGuestFile implements hostagent.Disks: guests leave no files.
func (d *disks) ReadGuestFile(context.Context, string, string, int64) ([]byte, error) {
	return nil, os.ErrNotExist
}

// Names in a save.
const (
	saveMemory   = "memory"
	saveDisk     = "disk"
	saveManifest = "manifest"
)

func committed(save string) bool { return exists(filepath.Join(save, saveManifest)) }

// staging is a save that is being made.
type staging struct {
	d   *disks
	dir string
}

// Stage implements hostagent.Disks.
func (d *disks) Stage(_ context.Context, owner string, generation, _ int64) (hostagent.Staging, error) {
	dir := d.save(owner, generation)
	if committed(dir) {
		return nil, fault.New(fault.Conflict, "%s is saved already", owner)
	}
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	return &staging{d, dir}, os.MkdirAll(filepath.Join(dir, saveMemory), 0o700)
}

// MemDir implements hostagent.Staging.
func (s *staging) MemDir() string { return filepath.Join(s.dir, saveMemory) }

// CloneDisk implements hostagent.Staging.
func (s *staging) CloneDisk(_ context.Context, id string) error {
	return copyFile(s.d.disk(id), filepath.Join(s.dir, saveDisk))
}

// Commit implements hostagent.Staging.
func (s *staging) Commit(_ context.Context, manifest []byte) error {
	if !exists(filepath.Join(s.dir, saveDisk)) {
		return errors.New("fakehost: a save without its disk is committed: " + s.dir)
	}
	return put(filepath.Join(s.dir, saveManifest), manifest)
}

// Abort implements hostagent.Staging.
func (s *staging) Abort() error {
	if committed(s.dir) {
		return nil
	}
	return os.RemoveAll(s.dir)
}

// Saved implements hostagent.Disks.
func (d *disks) Saved(_ context.Context, owner string, generation int64) (disk.Saved, error) {
	dir := d.save(owner, generation)
	manifest, err := os.ReadFile(filepath.Join(dir, saveManifest))
	if os.IsNotExist(err) {
		return disk.Saved{}, fault.New(fault.NotFound, "there is no save %s of generation %d", owner, generation)
	}
	return disk.Saved{ID: owner, Generation: generation, Dir: dir, MemDir: filepath.Join(dir, saveMemory), Manifest: manifest}, err
}

// CloneSaved implements hostagent.Disks.
func (d *disks) CloneSaved(ctx context.Context, owner string, generation int64, id string) error {
	s, err := d.Saved(ctx, owner, generation)
	if err != nil {
		return err
	}
	if exists(d.mount(id)) {
		return errors.New("fakehost: a mounted disk is replaced: " + id)
	}
	return copyFile(filepath.Join(s.Dir, saveDisk), d.disk(id))
}

// CopySaved implements hostagent.Disks.
func (d *disks) CopySaved(ctx context.Context, owner string, generation int64, to string, toGeneration int64) error {
	s, err := d.Saved(ctx, owner, generation)
	if err != nil {
		return err
	}
	dir := d.save(to, toGeneration)
	if err := d.DropSaved(ctx, to, toGeneration); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, saveMemory), 0o700); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(dir, saveMemory), os.DirFS(s.MemDir)); err != nil {
		return err
	}
	if err := copyFile(filepath.Join(s.Dir, saveDisk), filepath.Join(dir, saveDisk)); err != nil {
		return err
	}
	return put(filepath.Join(dir, saveManifest), s.Manifest)
}

// DropSaved implements hostagent.Disks.
func (d *disks) DropSaved(_ context.Context, owner string, generation int64) error {
	dir := d.save(owner, generation)
	if err := gone(filepath.Join(dir, saveManifest)); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

type saveName struct {
	owner      string
	generation int64
}

func (d *disks) saves() ([]saveName, error) {
	names, err := list(filepath.Join(d.dir, "saves"))
	var out []saveName
	for _, name := range names {
		owner, number, _ := strings.Cut(name, "@")
		if generation, err := strconv.ParseInt(number, 10, 64); err == nil {
			out = append(out, saveName{owner, generation})
		}
	}
	return out, err
}

// IDs implements hostagent.Disks.
func (d *disks) IDs(ctx context.Context) ([]string, error) {
	ids, err := list(filepath.Join(d.dir, "disks"))
	if err != nil {
		return nil, err
	}
	owners, err := d.SaveOwners(ctx)
	ids = append(ids, owners...)
	slices.Sort(ids)
	return slices.Compact(ids), err
}

// Mounted implements hostagent.Disks.
func (d *disks) Mounted(context.Context) ([]string, error) {
	return list(filepath.Join(d.dir, "mounts"))
}

// SaveOwners implements hostagent.Disks.
func (d *disks) SaveOwners(context.Context) ([]string, error) {
	saves, err := d.saves()
	var owners []string
	for _, s := range saves {
		owners = append(owners, s.owner)
	}
	slices.Sort(owners)
	return slices.Compact(owners), err
}

// BuildTemplate implements hostagent.Disks: there is one, and it is there.
func (d *disks) BuildTemplate(_ context.Context, _ hostproto.TemplateSource, progress func(string, float64)) (hostproto.Template, error) {
	progress("unpack", 0.5)
	return hostproto.Template{Digest: Template, Bytes: 1, User: "user", Workdir: "/workspace"}, nil
}

// DeleteTemplate implements hostagent.Disks.
func (d *disks) DeleteTemplate(context.Context, string) error { return nil }

// Space implements hostagent.Disks: there is always enough.
func (d *disks) Space(context.Context) (total, free int64, _ error) { return 1e15, 1e15, nil }

// Headroom implements hostagent.Disks.
func (d *disks) Headroom(context.Context) (disk.Headroom, error) {
	return disk.Headroom{Left: 1e15, Clear: 1}, nil
}

// Report implements hostagent.Disks.
func (d *disks) Report(context.Context) (disk.Report, error) { return disk.Report{}, nil }
