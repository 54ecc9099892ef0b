package gvisor

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// probeTimeout bounds Probe, which takes about a second.
const probeTimeout = 60 * time.Second

// Probe boots a sandbox whose PID 1 is hutch-runsc itself, saves it, kills it and
// restores it: what a user's sandbox needs, without a network.
func (d *Driver) Probe(ctx context.Context) (runtime.Capabilities, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var none runtime.Capabilities
	version, _, err := d.choose(ctx, "")
	if err != nil {
		return none, err
	}
	dir, err := os.MkdirTemp("", "hutch-probe-")
	if err != nil {
		return none, fault.Wrap(err, fault.Unsupported, "the gVisor runtime cannot be tried: no temporary directory can be made")
	}
	defer os.RemoveAll(dir)
	if err := d.rehearse(ctx, dir); err != nil {
		f := fault.Of(err)
		if f.Kind == fault.Cancelled || f.Kind == fault.Unsupported {
			return none, f
		}
		return none, fault.Wrap(err, fault.Unsupported, "the gVisor runtime does not work on this machine: %s; it needs root, ptrace and seccomp, so a container must be privileged", f.Message).Because("gvisor")
	}
	return runtime.Capabilities{
		Runtime:        "gvisor",
		Version:        version,
		Older:          d.keptVersions(ctx, version),
		MemorySnapshot: true,
		HeldRestore:    true,
		Docker:         true,
	}, nil
}

// rehearse goes through the life of a sandbox, in folders of dir.
func (d *Driver) rehearse(ctx context.Context, dir string) (err error) {
	image, root := filepath.Join(dir, "image"), filepath.Join(dir, "root")
	first, second := filepath.Join(dir, "1"), filepath.Join(dir, "2")
	for _, path := range []string{image, root, first, second} {
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
	}
	runsc, err := filepath.Abs(d.cfg.Runsc)
	if err != nil {
		return err
	}
	extra := []ociMount{{Destination: "/hutch-runsc", Type: "bind", Source: runsc, Options: []string{"bind", "ro"}}}
	spec := runtime.Spec{
		ID:   filepath.Base(dir),
		Dir:  first,
		Root: root,
		Args: []string{"/hutch-runsc", "idle"},
		CPUs: 1, MemoryBytes: 128 << 20,
	}
	h, err := d.boot(ctx, spec, "", extra)
	if err != nil {
		return err
	}
	err = d.rehearseSave(ctx, h, image)
	if killed := h.Kill(context.WithoutCancel(ctx)); err == nil {
		err = killed
	}
	if err != nil {
		return err
	}
	spec.Dir = second
	h, err = d.boot(ctx, spec, image, extra)
	if err != nil {
		return err
	}
	err = h.release(ctx)
	if killed := h.Kill(context.WithoutCancel(ctx)); err == nil {
		err = killed
	}
	return err
}

func (d *Driver) rehearseSave(ctx context.Context, h *handle, image string) error {
	p, err := h.Pause(ctx)
	if err != nil {
		return err
	}
	return p.Capture(ctx, image)
}
