package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/api"
)

const (
	// execsPerRound is how many round trips a round has: they are short and vary.
	execsPerRound = 5
	// settleTime is what an idle sandbox is left alone for before it is looked at.
	settleTime = 3 * time.Second
	// idleTime is how long an idle sandbox is looked at.
	idleTime = 10 * time.Second
	// roundTimeout bounds a round, so that one that hangs ends with an error.
	roundTimeout = 10 * time.Minute
	// closeTimeout bounds the cleaning.
	closeTimeout = 5 * time.Minute
)

// bench is both sides of the comparison.
type bench struct {
	server      *server
	bare        *bare
	facts       facts
	podmanFails bool // so it is not tried again
}

// facts are what the document says beside the figures.
type facts struct {
	like    api.Sandbox // a sandbox of the size that all have
	extents []int       // of the disks that are cloned
	runsc   string      // the runtime's version
	loadEnd string
}

// prepare starts the server, makes the template and mounts the bare root file system.
func (b *bench) prepare(ctx context.Context) error {
	// runsc's processes come to this one when runsc has returned, and are collected
	// at once: `runsc delete` waits for that.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	say("starting a server")
	if err := b.server.start(ctx); err != nil {
		return err
	}
	say("making the template, which takes some minutes")
	if err := b.server.buildTemplate(ctx); err != nil {
		return err
	}
	// The first sandbox has the template mounted, on which the bare one is built then.
	first, err := b.server.api.create(ctx)
	if err != nil {
		return err
	}
	b.facts.like = first
	if err := b.server.api.remove(ctx, first.ID); err != nil {
		return err
	}
	image, err := b.server.image(ctx)
	if err != nil {
		return err
	}
	version, err := b.bare.version(ctx)
	if err != nil {
		return err
	}
	b.facts.runsc = version
	return b.bare.prepare(image, first)
}

// measure runs all rounds. A first one, which finds cold caches, is not counted. With
// an error it gives what was measured before.
func (b *bench) measure(ctx context.Context, rounds int) (*results, error) {
	say("a round that does not count")
	if err := b.round(ctx, 0, new(results)); err != nil {
		return nil, err
	}
	r := new(results)
	for i := range rounds {
		say("round %d of %d", i+1, rounds)
		if err := b.round(ctx, i, r); err != nil {
			return r, err
		}
	}
	for i := range rounds {
		say("idle sandboxes, %d of %d", i+1, rounds)
		if err := b.idle(ctx, r); err != nil {
			return r, err
		}
	}
	for _, part := range []struct {
		what string
		do   func(context.Context, *results) error
	}{{"memory in use", b.memories}, {"forks", b.forks}, {"ordinary work", b.work}, {"podman", b.podman}} {
		for i := range rounds {
			say("%s, %d of %d", part.what, i+1, rounds)
			if err := part.do(ctx, r); err != nil {
				return r, err
			}
		}
	}
	say("many sandboxes")
	if err := b.population(ctx, r); err != nil {
		return r, err
	}
	say("clones")
	var err error
	if b.facts.extents, err = measureClones(ctx, filepath.Join(b.server.data(), "pool"), rounds, r); err != nil {
		return r, err
	}
	b.facts.loadEnd, err = load()
	return r, err
}

// round takes a sandbox of each kind through its life. The two take turns in being the
// first, so that neither always has the other's warm caches.
func (b *bench) round(ctx context.Context, i int, r *results) error {
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	sides := []func(context.Context, *results) error{b.hutchRound, b.bareRound}
	for k := range sides {
		if err := sides[(i+k)%len(sides)](ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// step is one measured act.
type step struct {
	rows []rowID
	do   func() error
}

func (r *results) steps(on side, steps []step) error {
	for _, s := range steps {
		if len(s.rows) == 0 { // what the next one needs
			if err := s.do(); err != nil {
				return err
			}
			continue
		}
		if err := r.time(on, s.do, s.rows...); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) hutchRound(ctx context.Context, r *results) error {
	c := b.server.api
	var s, copied api.Sandbox
	exec := func() error { return c.exec(ctx, s.ID) }
	steps := []step{{[]rowID{rowCreate, rowCreateExec}, func() (err error) {
		if s, err = c.create(ctx); err != nil {
			return err
		}
		return exec()
	}}}
	for range execsPerRound {
		steps = append(steps, step{[]rowID{rowExec}, exec})
	}
	steps = append(steps,
		step{[]rowID{rowExecProcess}, func() error { return b.server.run(ctx, "exec", s.ID, "--", "true") }},
		step{[]rowID{rowFork}, func() (err error) {
			if copied, err = c.fork(ctx, s.ID); err != nil {
				return err
			}
			return c.exec(ctx, copied.ID)
		}},
	)
	if err := r.steps(hutchSide, steps); err != nil {
		return err
	}
	if err := c.remove(ctx, copied.ID); err != nil {
		return err
	}
	err := r.steps(hutchSide, []step{
		{[]rowID{rowSleep}, func() error { return c.sleep(ctx, s.ID) }},
		{[]rowID{rowWake}, func() error { return then(c.wake(ctx, s.ID), exec) }},
		{[]rowID{rowStop}, func() error { return c.stop(ctx, s.ID) }},
		{[]rowID{rowResume}, func() error { return then(c.resume(ctx, s.ID), exec) }},
	})
	return then(err, func() error { return c.remove(ctx, s.ID) })
}

// then goes on where nothing has failed.
func then(err error, next func() error) error {
	if err != nil {
		return err
	}
	return next()
}

// bareRound does what of a round the runtime can do alone.
func (b *bench) bareRound(ctx context.Context, r *results) error {
	if err := b.bareExecs(ctx, r); err != nil {
		return err
	}
	return b.bareSaves(ctx, r)
}

// bareExecs boots a sandbox, runs programs in it, ends it and boots it again.
func (b *bench) bareExecs(ctx context.Context, r *results) (err error) {
	var p *program
	boot := func() error {
		if p, err = b.bare.run(ctx, "still"); err != nil {
			return err
		}
		return p.up(ctx)
	}
	exec := func() error { return b.bare.exec(ctx, p) }
	begin := time.Now()
	if err := r.time(bareSide, boot, rowCreate); err != nil {
		return err
	}
	// An exec needs runsc's record, which it writes before it returns.
	if err := then(p.launchedWell(ctx), exec); err != nil {
		return err
	}
	r.add(bareSide, rowCreateExec, inMilliseconds(time.Since(begin)))
	for range execsPerRound {
		if err := r.time(bareSide, exec, rowExec, rowExecProcess); err != nil {
			return err
		}
	}
	if err := p.settled(ctx); err != nil {
		return err
	}
	if err := r.time(bareSide, func() error { return b.bare.end(ctx, p) }, rowStop); err != nil {
		return err
	}
	if err := r.time(bareSide, boot, rowResume); err != nil {
		return err
	}
	return then(p.settled(ctx), func() error { return b.bare.end(ctx, p) })
}

// bareSaves copies a sandbox, saves it and brings it back.
func (b *bench) bareSaves(ctx context.Context, r *results) error {
	p, err := b.bare.run(ctx, "ticker")
	if err != nil {
		return err
	}
	if err := then(p.up(ctx), func() error { return p.settled(ctx) }); err != nil {
		return err
	}
	var image string
	restored := func() (err error) {
		if p, err = b.bare.restore(ctx, image); err != nil {
			return err
		}
		return p.up(ctx)
	}
	source := p
	err = r.time(bareSide, func() (err error) {
		image, err = b.bare.checkpoint(ctx, source)
		return then(err, restored)
	}, rowFork)
	if err := b.finish(ctx, err, p, image); err != nil {
		return err
	}
	if err := source.settled(ctx); err != nil {
		return err
	}
	err = r.time(bareSide, func() error {
		err := b.bare.do(ctx, source, "pause")
		if err == nil {
			image, err = b.bare.checkpoint(ctx, source)
		}
		return then(err, func() error { return b.bare.end(ctx, source) })
	}, rowSleep)
	err = then(err, func() error { return r.time(bareSide, restored, rowWake) })
	return b.finish(ctx, err, p, image)
}

// finish ends a restored sandbox and removes its image.
func (b *bench) finish(ctx context.Context, err error, p *program, image string) error {
	if err == nil {
		err = p.settled(ctx)
	}
	if err == nil {
		err = b.bare.end(ctx, p)
	}
	if err != nil || image == "" {
		return err
	}
	return os.RemoveAll(image)
}

// idle looks at a sandbox of each kind that has run one program and does nothing now.
func (b *bench) idle(ctx context.Context, r *results) error {
	ctx, cancel := context.WithTimeout(ctx, roundTimeout)
	defer cancel()
	c := b.server.api
	s, err := c.create(ctx)
	if err != nil {
		return err
	}
	if err := c.exec(ctx, s.ID); err != nil {
		return err
	}
	p, err := b.bare.run(ctx, "still")
	if err != nil {
		return err
	}
	err = then(p.up(ctx), func() error { return p.launchedWell(ctx) })
	if err := then(err, func() error { return b.bare.exec(ctx, p) }); err != nil {
		return err
	}
	if err := pause(ctx, settleTime); err != nil {
		return err
	}
	if err := p.settled(ctx); err != nil {
		return err
	}
	pids, group, err := members(s.ID)
	if err != nil {
		return err
	}
	if err := r.watch(ctx, pids, p.pids); err != nil {
		return err
	}
	if bytes, ok := groupMemory(group); ok {
		r.add(hutchSide, rowIdleCgroup, inMebibytes(bytes))
	}
	return then(b.bare.end(ctx, p), func() error { return c.remove(ctx, s.ID) })
}

// watch looks at the processes of both sandboxes over the same time.
func (r *results) watch(ctx context.Context, hutch, bare []int) error {
	sides := []struct {
		on   side
		pids []int
	}{{hutchSide, hutch}, {bareSide, bare}}
	before := make([]usage, len(sides))
	begin := time.Now()
	for i, s := range sides {
		var err error
		if before[i], err = usageOf(s.pids); err != nil {
			return err
		}
	}
	if err := pause(ctx, idleTime); err != nil {
		return err
	}
	for i, s := range sides {
		after, err := usageOf(s.pids)
		if err != nil {
			return err
		}
		r.add(s.on, rowIdleCPU, 100*float64(after.cpu-before[i].cpu)/float64(time.Since(begin)))
		r.add(s.on, rowIdleOwn, inMebibytes(after.own))
		r.add(s.on, rowIdlePSS, inMebibytes(after.pss))
		r.add(s.on, rowIdleRSS, inMebibytes(after.rss))
	}
	return nil
}

// pause waits.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// close removes all that the run has made, also when it was interrupted.
func (b *bench) close() error {
	say("cleaning up")
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	// The bare root file system lies on the template, which the server's cleaning takes
	// down.
	err := b.bare.close(ctx)
	// What the server leaves is for the machine's init to collect, not for this process.
	err = errors.Join(err, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0), b.server.close(ctx))
	table, tableErr := mounts()
	err = errors.Join(err, tableErr)
	for _, m := range table {
		if strings.HasPrefix(m.target, b.server.dir+"/") {
			err = errors.Join(err, fmt.Errorf("%s is still mounted", m.target))
		}
	}
	if err != nil {
		return fmt.Errorf("%s is left as it is: %w", b.server.dir, err)
	}
	return os.RemoveAll(b.server.dir)
}
