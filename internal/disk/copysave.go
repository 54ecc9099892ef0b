package disk

import (
	"context"
	"os"
	"path/filepath"

	"github.com/hutchrun/hutch/internal/fault"
)

// CopySaved makes a save from a save, sharing its blocks: a capture for forks from a
// sandbox that sleeps. The same call again finds it made. Kinds: NotFound (the
// source), NoCapacity.
func (p *Pool) CopySaved(ctx context.Context, id string, generation int64, to string, toGeneration int64) error {
	if _, err := p.OpenSaved(ctx, to, toGeneration); err == nil {
		return nil
	}
	src, err := p.OpenSaved(ctx, id, generation)
	if err != nil {
		return err
	}
	s, err := p.Stage(ctx, to, toGeneration, 0, ForNew)
	if err != nil {
		return err
	}
	err = s.copyFrom(src)
	if err == nil {
		err = s.Commit(ctx, src.Manifest)
	}
	if err != nil {
		_ = s.Abort() // what is left, the next Stage removes
		return err
	}
	return nil
}

func (s *Staging) copyFrom(src Saved) error {
	files, err := os.ReadDir(src.MemDir)
	if err != nil {
		return wrap(err, "the save of %s could not be read", src.ID)
	}
	for _, f := range files {
		if !f.Type().IsRegular() {
			return fault.New(fault.DataCorrupt, "the save of %s has %s, which is no file; it cannot be forked", src.ID, f.Name())
		}
		if err := cloneFile(filepath.Join(src.MemDir, f.Name()), filepath.Join(s.MemDir(), f.Name())); err != nil {
			return wrap(err, "the save of %s could not be copied", src.ID)
		}
	}
	if src.Disk == "" {
		return nil
	}
	rec, err := readRecord(src.Dir)
	if err != nil {
		return err
	}
	if err := cloneFile(src.Disk, filepath.Join(s.dir, imageName)); err != nil {
		return wrap(err, "the save of %s could not be copied", src.ID)
	}
	return wrap(writeRecord(s.dir, rec), "the save of %s could not be copied", src.ID)
}
