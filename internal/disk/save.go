package disk

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

const (
	memName      = "mem"
	manifestName = "manifest.json"
	stagingMark  = ".tmp" // ends the name of a save that is not committed
)

// Saved is a committed save. Nothing in it changes any more.
type Saved struct {
	ID         string
	Generation int64
	Dir        string
	MemDir     string // the runtime's memory image
	Disk       string // path of the clone; "" where the save has none
	Manifest   []byte // as it was committed
}

// Staging is a save that is being written. One goroutine at a time uses it. It ends
// with Commit or Abort; one that a crash has left is removed by the next Stage of the
// same generation, by DropSaved and by nothing else.
type Staging struct {
	pool       *Pool
	id         string
	generation int64
	dir        string
}

func (p *Pool) saveDir(id string, generation int64) string {
	return p.path("saves", id, strconv.FormatInt(generation, 10))
}

// Stage begins a save of need bytes at most (memory, and what the disk may come to
// differ by), for which it gives up the reserve where it must. id need not name a
// disk on this host: a capture for forks has an id of its own, and is ForNew. Kinds:
// NoCapacity, Conflict (this generation is saved already).
func (p *Pool) Stage(ctx context.Context, id string, generation, need int64, use Use) (*Staging, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	unlock, err := p.held.lock(ctx, "save/"+id)
	if err != nil {
		return nil, err
	}
	defer unlock()
	s := &Staging{pool: p, id: id, generation: generation, dir: p.saveDir(id, generation) + stagingMark}
	if exists(p.saveDir(id, generation)) {
		return nil, fault.New(fault.Conflict, "generation %d of %s is saved already; use that save or drop it", generation, id)
	}
	if err := p.discard(s.dir); err != nil {
		return nil, wrap(err, "an earlier attempt to save %s could not be removed", id)
	}
	if err := p.room(ctx, use); err != nil {
		return nil, err
	}
	if err := p.borrow(ctx, s, need, use); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.MemDir(), 0o700); err != nil {
		p.giveBack(s)
		return nil, wrap(err, "a save of %s could not be begun", id)
	}
	return s, nil
}

// Dir is the directory of the save until it is committed.
func (s *Staging) Dir() string { return s.dir }

// MemDir is where the memory image goes.
func (s *Staging) MemDir() string { return filepath.Join(s.dir, memName) }

// CloneDisk puts a clone of a disk into the save, that of the sandbox that is saved.
// A second call replaces the clone of the first.
func (s *Staging) CloneDisk(ctx context.Context, disk string) error {
	src := FromDisk(disk)
	dir, rec, err := s.pool.source(src)
	if err != nil {
		return err
	}
	rec.Origin = &src
	image := filepath.Join(s.dir, imageName)
	if err := os.Remove(image); err != nil && !errors.Is(err, os.ErrNotExist) {
		return wrap(err, "the disk %s could not be cloned for its save", disk)
	}
	if err := s.pool.cloneImage(src, dir, image); err != nil {
		return wrap(err, "the disk %s could not be cloned for its save", disk)
	}
	return wrap(writeRecord(s.dir, rec), "the disk %s could not be cloned for its save", disk)
}

// Commit makes the save durable and gives it its final name. When it returns nil the
// save outlives a power cut; when it does not, the save may still be aborted, and
// Commit may be called again.
func (s *Staging) Commit(ctx context.Context, manifest []byte) error {
	final := s.pool.saveDir(s.id, s.generation)
	if !exists(s.dir) && exists(final) { // committed by an earlier call
		return nil
	}
	err := os.WriteFile(filepath.Join(s.dir, manifestName), manifest, 0o600)
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		_, err = publish(s.dir, final)
	}
	if err == nil {
		err = syncDir(s.pool.path("saves"))
	}
	if err == nil {
		s.pool.giveBack(s)
	}
	return wrap(err, "the save of %s could not be committed", s.id)
}

// Abort removes a save that is not committed. A committed one stays.
func (s *Staging) Abort() error {
	defer s.pool.giveBack(s)
	return wrap(s.pool.discard(s.dir), "the unfinished save of %s could not be removed", s.id)
}

// Saved lists the committed saves of an id, the newest generation first.
func (p *Pool) Saved(ctx context.Context, id string) ([]Saved, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	var list []Saved
	for _, name := range names(p.path("saves", id)) {
		generation, err := strconv.ParseInt(name, 10, 64)
		if err != nil {
			continue
		}
		s, err := p.OpenSaved(ctx, id, generation)
		if fault.Is(err, fault.NotFound) { // dropped meanwhile
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b Saved) int { return cmp.Compare(b.Generation, a.Generation) })
	return list, nil
}

// OpenSaved finds a committed save. NotFound where there is none.
func (p *Pool) OpenSaved(ctx context.Context, id string, generation int64) (Saved, error) {
	if err := checkID(id); err != nil {
		return Saved{}, err
	}
	dir := p.saveDir(id, generation)
	manifest, err := os.ReadFile(filepath.Join(dir, manifestName))
	if errors.Is(err, os.ErrNotExist) {
		return Saved{}, fault.New(fault.NotFound, "there is no save of %s with generation %d on this host", id, generation)
	}
	if err != nil {
		return Saved{}, wrap(err, "the save of %s with generation %d could not be read", id, generation)
	}
	s := Saved{ID: id, Generation: generation, Dir: dir, MemDir: filepath.Join(dir, memName), Manifest: manifest}
	if image := filepath.Join(dir, imageName); exists(image) {
		s.Disk = image
	}
	return s, nil
}

// DropSaved removes a save, committed or not. One that is not there is gone already.
func (p *Pool) DropSaved(ctx context.Context, id string, generation int64) error {
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := p.held.lock(ctx, "save/"+id)
	if err != nil {
		return err
	}
	defer unlock()
	dir := p.saveDir(id, generation)
	for _, path := range []string{dir, dir + stagingMark} {
		if err := p.discard(path); err != nil {
			return wrap(err, "the save of %s with generation %d could not be removed", id, generation)
		}
	}
	// The directory of the id goes with its last save.
	err = unix.Rmdir(filepath.Dir(dir))
	if err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.ENOENT) {
		return wrap(err, "the saves of %s could not be removed", id)
	}
	return nil
}

// parseSave reads the directory name of a save.
func parseSave(name string) (generation int64, committed, ok bool) {
	number, staged := strings.CutSuffix(name, stagingMark)
	generation, err := strconv.ParseInt(number, 10, 64)
	return generation, !staged, err == nil
}
