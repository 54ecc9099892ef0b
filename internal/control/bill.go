package control

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/store"
)

// BillQuery asks for what a project used in [From, To). A zero From is the
// beginning. A zero To is now, and so is one that lies after it.
type BillQuery struct {
	Project string // "" is the actor's; another is for the operator
	From    time.Time
	To      time.Time
	Verify  bool // recompute every figure from the facts
}

// Bill is what a project used.
type Bill struct {
	metering.Statement
	Project string
	Names   map[string]string // of the sandboxes in it, by id
	// Verified says that everything the project ever used was recomputed, not only what
	// lies in [From, To); Differences are what came out otherwise, in words.
	Verified    bool
	Differences []string
}

// Bill adds up what a project used, from the ledger and from what is metered
// right now. All of it is of one instant.
func (c *Control) Bill(ctx context.Context, a Actor, q BillQuery) (Bill, error) {
	now := c.instant()
	if q.To.IsZero() || q.To.After(now) {
		q.To = now
	}
	out := Bill{Names: map[string]string{}}
	err := c.store.View(ctx, func(ctx context.Context, r store.Reader) error {
		p, err := project(ctx, r, a, q.Project)
		if err != nil {
			return err
		}
		out.Project = p.ID
		prices, err := r.Prices(ctx)
		if err != nil {
			return err
		}
		meters, err := r.Meters(ctx, p.ID)
		if err != nil {
			return err
		}
		if q.Verify {
			if out.Differences, err = verify(ctx, r, p.ID, meters, prices, now); err != nil {
				return err
			}
			out.Verified = true
		}
		entries, err := r.MeterEntries(ctx, store.EntryFilter{Project: p.ID, From: q.From, To: q.To})
		if err != nil {
			return err
		}
		for _, m := range meters {
			entries = append(entries, m.Open(q.To, prices)...)
		}
		out.Statement, err = metering.Bill(entries, prices, q.From, q.To)
		if fault.Is(err, fault.DataCorrupt) && len(out.Differences) > 0 {
			return damaged(err, out.Differences) // the sum cannot be made, but the faults can be named
		}
		if err != nil {
			return err
		}
		return names(ctx, r, out)
	})
	return out, err
}

// damaged is the fault of a ledger that no bill can be made of, with what is wrong.
func damaged(err error, differences []string) error {
	text := ""
	for _, d := range differences {
		text += "\n" + d
	}
	return fault.Wrap(err, fault.DataCorrupt, "no bill can be made of this ledger; restore a backup. What it says otherwise than its facts:%s", text).
		Because("ledger")
}

func names(ctx context.Context, r store.Reader, b Bill) error {
	var ids []string
	for _, l := range b.Lines {
		if _, listed := b.Names[l.Sandbox]; !listed {
			b.Names[l.Sandbox] = ""
			ids = append(ids, l.Sandbox)
		}
	}
	names, err := r.SandboxNames(ctx, ids)
	maps.Copy(b.Names, names)
	return err
}

// accounts is how many sandboxes are verified at a time.
const accounts = 500

// verify recomputes everything of a project from the facts (B7). Entries of a sandbox
// that has no meter are looked at too: there is nothing that they can come from.
func verify(ctx context.Context, r store.Reader, project string, meters []metering.Meter, prices metering.Prices, now time.Time) ([]string, error) {
	entries, err := r.MeterEntries(ctx, store.EntryFilter{Project: project})
	if err != nil {
		return nil, err
	}
	metered := map[string]bool{}
	for _, m := range meters {
		metered[m.Sandbox] = true
	}
	of := map[string][]metering.Entry{}
	for _, e := range entries {
		of[e.Sandbox] = append(of[e.Sandbox], e)
		if !metered[e.Sandbox] {
			metered[e.Sandbox] = true
			meters = append(meters, metering.Meter{Project: project, Sandbox: e.Sandbox})
		}
	}
	var out []string
	for some := range slices.Chunk(meters, accounts) {
		ids := make([]string, len(some))
		for i, m := range some {
			ids[i] = m.Sandbox
		}
		facts, err := r.MeterFactsOf(ctx, ids)
		if err != nil {
			return nil, err
		}
		for _, m := range some {
			upTo := now
			for _, f := range facts[m.Sandbox] { // a host's clock may be ahead
				if f.At.After(upTo) {
					upTo = f.At
				}
			}
			out = append(out, metering.Verify(metering.Account{Facts: facts[m.Sandbox], Entries: of[m.Sandbox], Meter: m}, prices, upTo)...)
		}
	}
	return out, nil
}
