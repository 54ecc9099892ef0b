package control

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// progress holds how far the active operations are, until it is written: all of it in
// one transaction now and then, so that steps cost the database nothing each. Readers
// get it at once through overlay. It may be lost; the host tells it again.
type progress struct {
	mu sync.Mutex
	m  map[string]*reached // by operation
}

// reached is how far one operation is.
type reached struct {
	accepted time.Time // its host has it
	step     string
	fraction float64
	dirty    bool
}

func newProgress() *progress { return &progress{m: map[string]*reached{}} }

func (p *progress) at(op string) *reached {
	if p.m[op] == nil {
		p.m[op] = &reached{}
	}
	return p.m[op]
}

// accept records that a host has the operation.
func (p *progress) accept(op string, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.at(op)
	e.dirty = e.dirty || e.accepted.IsZero()
	e.accepted = at
}

// accepted gives when a host last took the operation; zero is never.
func (p *progress) acceptedAt(op string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.m[op]; e != nil {
		return e.accepted
	}
	return time.Time{}
}

// note records a step. A host that tells of steps has the operation.
func (p *progress) note(op, step string, fraction float64, at time.Time) {
	if op == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.at(op)
	if e.accepted.IsZero() {
		e.accepted = at
	}
	e.step, e.fraction, e.dirty = step, min(max(fraction, 0), 1), true
}

// forget drops an operation that has ended.
func (p *progress) forget(op string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.m, op)
}

// overlay puts what is known of an active operation into a row that was read. op may
// be nil.
func (p *progress) overlay(op *sandbox.Operation) {
	if op == nil || !op.Status.Active() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.m[op.ID]
	if e == nil {
		return
	}
	if !e.accepted.IsZero() {
		op.Status = sandbox.Running
		if op.StartedAt.IsZero() {
			op.StartedAt = e.accepted
		}
	}
	if e.step != "" {
		op.Step, op.Progress = e.step, e.fraction
	}
}

// take gives the operations with news and counts them as written.
func (p *progress) take() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []string
	for id, e := range p.m {
		if e.dirty {
			e.dirty = false
			out = append(out, id)
		}
	}
	return out
}

// giveBack counts operations as not written after all.
func (p *progress) giveBack(ids []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		if e := p.m[id]; e != nil {
			e.dirty = true
		}
	}
}

// uses holds when API keys were last used, until it is written.
type uses struct {
	mu      sync.Mutex
	pending map[string]time.Time // by key
	written map[string]time.Time
}

// usePrecision is how exact a key's last use is kept: a write for each call would make
// every read a write.
const usePrecision = time.Minute

func (u *uses) note(key string, at time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if at.Sub(u.written[key]) >= usePrecision {
		u.pending[key] = at
	}
}

func (u *uses) take() map[string]time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	out := u.pending
	u.pending = map[string]time.Time{}
	for key, at := range out {
		u.written[key] = at
	}
	return out
}

// flush writes progress and key uses, in one transaction where there is anything.
func (c *Control) flush(ctx context.Context) {
	ids, keys := c.progress.take(), c.uses.take()
	slices.Sort(ids) // two servers lock the same rows in one order
	if len(ids) == 0 && len(keys) == 0 {
		return
	}
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		for _, id := range ids {
			op, err := tx.Operation(ctx, id)
			if fault.Is(err, fault.NotFound) || err == nil && !op.Status.Active() {
				c.progress.forget(id)
				continue
			}
			if err != nil {
				return err
			}
			c.progress.overlay(&op)
			if err := tx.UpdateOperation(ctx, &op); err != nil {
				return err
			}
		}
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			if err := tx.TouchAPIKey(ctx, key, keys[key]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		c.progress.giveBack(ids)
		c.log.Warn("progress could not be written; it will be tried again", "err", err)
	}
}
