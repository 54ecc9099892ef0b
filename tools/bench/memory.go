package main

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/api"
)

// filled is a saved memory of some size, and the rows that it fills.
type filled struct {
	mib               int
	sleep, warm, cold rowID
}

var fillings = []filled{
	{64, rowSleep64, rowWake64, rowWake64Cold},
	{1024, rowSleep1024, rowWake1024, rowWake1024Cold},
}

// fill is a program that touches memory and keeps it.
func (f filled) program() []string {
	return []string{"python3", "-c", fmt.Sprintf("import time\nx = bytearray(b'\\1') * (%d << 20)\nprint('full', flush=True)\ntime.sleep(1e9)", f.mib)}
}

// perl does the same in a bare sandbox and goes on as a ticker.
func (f filled) perl() []string {
	return []string{ticker[0], "-e", fmt.Sprintf(`$x = "\1" x (%d << 20); `, f.mib) + ticker[2]}
}

// memories saves sandboxes whose memory is in use and brings them back, from the page
// cache and from the disk.
func (b *bench) memories(ctx context.Context, r *results) error {
	for _, f := range fillings {
		ctx, cancel := context.WithTimeout(ctx, roundTimeout)
		err := b.hutchMemory(ctx, f, r)
		if err == nil {
			err = b.bareMemory(ctx, f, r)
		}
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) hutchMemory(ctx context.Context, f filled, r *results) error {
	c := b.server.api
	size := int64(f.mib+512) << 20
	s, err := c.createAs(ctx, api.CreateSandbox{Template: "base", MemoryBytes: &size})
	if err != nil {
		return err
	}
	if err := c.startUntil(ctx, s.ID, "full", f.program()...); err != nil {
		return err
	}
	exec := func() error { return c.exec(ctx, s.ID) }
	sleep := func() error { return c.sleep(ctx, s.ID) }
	wake := func() error { return then(c.wake(ctx, s.ID), exec) }
	return r.steps(hutchSide, []step{
		{[]rowID{f.sleep}, sleep},
		{[]rowID{f.warm}, wake},
		{nil, sleep},
		{nil, dropCaches},
		{[]rowID{f.cold}, wake},
		{nil, func() error { return c.remove(ctx, s.ID) }},
	})
}

func (b *bench) bareMemory(ctx context.Context, f filled, r *results) error {
	p, err := b.bare.run(ctx, fmt.Sprintf("filled-%d", f.mib))
	if err != nil {
		return err
	}
	if err := then(p.up(ctx), func() error { return p.settled(ctx) }); err != nil {
		return err
	}
	var image string
	for i, row := range []rowID{f.warm, f.cold} {
		save := func() error {
			err := b.bare.do(ctx, p, "pause")
			if err == nil {
				image, err = b.bare.checkpoint(ctx, p)
			}
			return then(err, func() error { return b.bare.end(ctx, p) })
		}
		steps := []step{{[]rowID{f.sleep}, save}, {nil, dropCaches}}
		if i == 0 {
			steps = steps[:1]
		} else {
			steps[0].rows = nil
		}
		steps = append(steps, step{[]rowID{row}, func() (err error) {
			if p, err = b.bare.restoreAs(ctx, image, fmt.Sprintf("filled-%d", f.mib)); err != nil {
				return err
			}
			return p.up(ctx)
		}})
		if err := r.steps(bareSide, steps); err != nil {
			return err
		}
		if err := then(p.settled(ctx), func() error { return os.RemoveAll(image) }); err != nil {
			return err
		}
	}
	return b.bare.end(ctx, p)
}

// dropCaches makes the next read of a file read the disk (proc_sys_vm(5)).
func dropCaches() error {
	unix.Sync()
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("1"), 0)
}
