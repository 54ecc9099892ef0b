// Package traced puts the calls to a runtime driver into the trace of the step that makes
// them. It changes nothing else about the driver.
package traced

import (
	"context"

	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/span"
)

// New gives the driver with a span around each call that does something; the driver
// itself where start is nil.
func New(d runtime.Driver, start span.Start) runtime.Driver {
	if start == nil {
		return d
	}
	return driver{d, start}
}

type driver struct {
	runtime.Driver
	start span.Start
}

// within runs a call in a span of its own.
func within[T any](ctx context.Context, start span.Start, name string, do func(context.Context) (T, error)) (T, error) {
	ctx, s := start.Begin(ctx, "", "runtime "+name)
	out, err := do(ctx)
	s.End(err)
	return out, err
}

// alone is within for a call that gives nothing but an error.
func alone(ctx context.Context, start span.Start, name string, do func(context.Context) error) error {
	_, err := within(ctx, start, name, func(ctx context.Context) (struct{}, error) { return struct{}{}, do(ctx) })
	return err
}

// Start implements runtime.Driver.
func (d driver) Start(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	h, err := within(ctx, d.start, "start", func(ctx context.Context) (runtime.Handle, error) { return d.Driver.Start(ctx, spec) })
	if err != nil {
		return nil, err
	}
	return handle{h, d.start}, nil
}

// Restore implements runtime.Driver.
func (d driver) Restore(ctx context.Context, spec runtime.Spec, image string) (runtime.Held, error) {
	h, err := within(ctx, d.start, "restore", func(ctx context.Context) (runtime.Held, error) { return d.Driver.Restore(ctx, spec, image) })
	if err != nil {
		return nil, err
	}
	return held{handle{h, d.start}, h}, nil
}

// Adopt implements runtime.Driver.
func (d driver) Adopt(ctx context.Context, spec runtime.Spec) (runtime.Handle, error) {
	h, err := d.Driver.Adopt(ctx, spec)
	if err != nil {
		return nil, err
	}
	return handle{h, d.start}, nil
}

type handle struct {
	runtime.Handle
	start span.Start
}

// Pause implements runtime.Handle.
func (h handle) Pause(ctx context.Context) (runtime.Paused, error) {
	p, err := within(ctx, h.start, "pause", h.Handle.Pause)
	if err != nil {
		return nil, err
	}
	return paused{p, h.start}, nil
}

// Thaw implements runtime.Handle.
func (h handle) Thaw(ctx context.Context) error { return alone(ctx, h.start, "thaw", h.Handle.Thaw) }

// Kill implements runtime.Handle.
func (h handle) Kill(ctx context.Context) error { return alone(ctx, h.start, "kill", h.Handle.Kill) }

type held struct {
	handle
	inner runtime.Held
}

// Release implements runtime.Held.
func (h held) Release(ctx context.Context) error {
	return alone(ctx, h.start, "release", h.inner.Release)
}

type paused struct {
	runtime.Paused
	start span.Start
}

// Capture implements runtime.Paused.
func (p paused) Capture(ctx context.Context, dir string) error {
	return alone(ctx, p.start, "capture", func(ctx context.Context) error { return p.Paused.Capture(ctx, dir) })
}

// Resume implements runtime.Paused.
func (p paused) Resume(ctx context.Context) error {
	return alone(ctx, p.start, "resume", p.Paused.Resume)
}

// Kill implements runtime.Paused.
func (p paused) Kill(ctx context.Context) error { return alone(ctx, p.start, "kill", p.Paused.Kill) }
