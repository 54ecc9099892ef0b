package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hutchrun/hutch/api"
)

const (
	crowd    = 50  // idle sandboxes
	many     = 100 // sandboxes that are created
	together = 10  // of them, at once
)

// gaps is a program that looks at the clock all the time, and says at the end for how
// many milliseconds at most it could not.
var gaps = []string{"python3", "-c", `
import time
print("looking", flush=True)
last = time.time(); end = last + 3; worst = 0
while last < end:
    time.sleep(0.0002)
    now = time.time(); worst = max(worst, now - last); last = now
print(worst * 1000)
`}

// forks measures for how long a live fork stops its source, as the source sees it, and
// how long ten copies of one instant take.
func (b *bench) forks(ctx context.Context, r *results) error {
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	c := b.server.api
	s, err := c.create(ctx)
	if err != nil {
		return err
	}
	var pause string
	var looking sync.WaitGroup
	began := make(chan struct{})
	var lookErr error
	looking.Go(func() {
		pause, lookErr = c.output(ctx, s.ID, func(line string) {
			if line == "looking" {
				close(began)
			}
		}, gaps...)
	})
	select {
	case <-began:
	case <-time.After(time.Minute):
		return errors.New("the program that looks at the clock does not begin")
	}
	copied, err := c.fork(ctx, s.ID)
	looking.Wait()
	if err := errors.Join(err, lookErr); err != nil {
		return err
	}
	lines := strings.Fields(pause)
	ms, err := strconv.ParseFloat(lines[len(lines)-1], 64)
	if err != nil {
		return fmt.Errorf("the program that looks at the clock said %q", pause)
	}
	r.add(hutchSide, rowForkPause, ms)
	if err := c.remove(ctx, copied.ID); err != nil {
		return err
	}
	var copies []api.Sandbox
	err = r.time(hutchSide, func() (err error) {
		copies, err = c.forkMany(ctx, s.ID, together)
		return err
	}, rowForkTen)
	for _, s := range append(copies, s) {
		err = then(err, func() error { return c.remove(ctx, s.ID) })
	}
	if err != nil {
		return err
	}
	return b.bareCheckpoint(ctx, r)
}

func (b *bench) bareCheckpoint(ctx context.Context, r *results) error {
	p, err := b.bare.run(ctx, "ticker")
	if err != nil {
		return err
	}
	if err := then(p.up(ctx), func() error { return p.settled(ctx) }); err != nil {
		return err
	}
	var image string
	err = r.time(bareSide, func() (err error) {
		image, err = b.bare.checkpoint(ctx, p)
		return err
	}, rowForkPause)
	return b.finish(ctx, err, p, image)
}

// population creates a hundred sandboxes one after the other and a hundred ten at a
// time, and looks at fifty that do nothing.
func (b *bench) population(ctx context.Context, r *results) error {
	c := b.server.api
	var ids []string
	for range many {
		if err := r.time(hutchSide, func() error {
			s, err := c.create(ctx)
			ids = append(ids, s.ID)
			return err
		}, rowCreateHundred); err != nil {
			return err
		}
		if len(ids) == crowd {
			if err := b.crowded(ctx, ids, r); err != nil {
				return err
			}
		}
	}
	if err := c.removeAll(ctx); err != nil {
		return err
	}
	for range many / together {
		if err := r.time(hutchSide, func() error { return parallel(together, func() error { _, err := c.create(ctx); return err }) }, rowCreateTen); err != nil {
			return err
		}
	}
	return c.removeAll(ctx)
}

func parallel(n int, do func() error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = do() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// crowded looks at idle sandboxes, each for itself.
func (b *bench) crowded(ctx context.Context, ids []string, r *results) error {
	if err := pause(ctx, settleTime); err != nil {
		return err
	}
	pids := make([][]int, len(ids))
	before := make([]usage, len(ids))
	begin := time.Now()
	for i, id := range ids {
		var err error
		if pids[i], _, err = members(id); err != nil {
			return err
		}
		if before[i], err = usageOf(pids[i]); err != nil {
			return err
		}
	}
	if err := pause(ctx, idleTime); err != nil {
		return err
	}
	for i := range ids {
		after, err := usageOf(pids[i])
		if err != nil {
			return err
		}
		r.add(hutchSide, rowCrowdCPU, 100*float64(after.cpu-before[i].cpu)/float64(time.Since(begin)))
		r.add(hutchSide, rowCrowdOwn, inMebibytes(after.own))
		r.add(hutchSide, rowCrowdPSS, inMebibytes(after.pss))
	}
	return nil
}
