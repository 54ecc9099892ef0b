package control

import (
	"context"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// BeginTurn says that a harness turn is active in a sandbox: while one is, its auto-stop
// is put off (A3). Only the control plane says so, never the sandbox (X4). Its host has
// it when BeginTurn returns, or hears of it with the next renewal.
func (c *Control) BeginTurn(ctx context.Context, sandboxID, turn string) error {
	return c.turn(ctx, sandboxID, func(ctx context.Context, tx store.Tx, s sandbox.Sandbox) error {
		if s.State != sandbox.Ready && s.State != sandbox.Sleeping || !s.DeletedAt.IsZero() {
			return fault.New(fault.FailedPrecondition, "cannot begin a turn in %s: it is %s; `resume` it first", s.Name, s.State).Because("state_" + string(s.State))
		}
		return tx.PutLease(ctx, s.ID, turn, c.instant())
	})
}

// EndTurn says that a turn is over.
func (c *Control) EndTurn(ctx context.Context, sandboxID, turn string) error {
	return c.turn(ctx, sandboxID, func(ctx context.Context, tx store.Tx, s sandbox.Sandbox) error {
		return tx.DropLeases(ctx, s.ID, turn)
	})
}

func (c *Control) turn(ctx context.Context, sandboxID string, write func(context.Context, store.Tx, sandbox.Sandbox) error) error {
	var s sandbox.Sandbox
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) (err error) {
		if s, err = tx.Sandbox(ctx, sandboxID); err != nil {
			return err
		}
		return write(ctx, tx, s)
	})
	if _, here := c.hosts[s.Host]; err == nil && here {
		c.renewLeases(ctx, s.Host)
	}
	return err
}

// leasesLoop renews the leases of a host's sandboxes.
func (c *Control) leasesLoop(ctx context.Context, host string) {
	renew := func(ctx context.Context) { c.renewLeases(ctx, host) }
	renew(ctx)
	every(ctx, c.limits.LeaseEvery, renew)
}

// renewLeases tells a host of every turn that is active there; what it is not told of
// has ended. A host that does not hear of it keeps what it was told last for one
// auto-stop.
func (c *Control) renewLeases(ctx context.Context, host string) {
	c.leasing.Lock() // what was read first is told first
	defer c.leasing.Unlock()
	var turns map[string][]string
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) (err error) {
		turns, err = r.Leases(ctx, host)
		return err
	})
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
		defer cancel()
		err = c.hosts[host].Renew(ctx, turns)
	}
	if err != nil && ctx.Err() == nil {
		c.log.Warn("the leases of a host could not be renewed; it is tried again", "host", host, "err", err)
	}
}
