package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fakehost"
	"github.com/hutchrun/hutch/internal/fakehost/fakeserver"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// latencies are what calls take with so many sandboxes in the tables.
type latencies struct {
	sandboxes      int
	get, name, new series
	list           series
	start          time.Duration // of the server, to its first answer
	memory         int64
	bill           time.Duration // with everything recomputed
}

// tables fills the tables up to a number of sandboxes and measures reads and creations.
func (b *bench) tables(ctx context.Context, sandboxes int, out *latencies) error {
	ids, err := b.fill(ctx, sandboxes)
	if err != nil {
		return err
	}
	out.sandboxes = len(ids)
	began := time.Now()
	if err := b.up(); err != nil {
		return err
	}
	out.start = time.Since(began)
	dice := rand.New(rand.NewPCG(1, 2))
	for range b.gets {
		if err := out.get.measure(func() error { _, err := b.api.get(ctx, ids[dice.IntN(len(ids))]); return err }); err != nil {
			return err
		}
	}
	names := make([]string, 0, b.gets/10)
	for range b.gets / 10 {
		s, err := b.api.get(ctx, ids[dice.IntN(len(ids))])
		if err != nil {
			return err
		}
		names = append(names, s.Name)
	}
	for _, name := range names {
		if err := out.name.measure(func() error { _, err := b.api.get(ctx, name); return err }); err != nil {
			return err
		}
	}
	for range b.gets / 30 {
		err := out.list.measure(func() error {
			_, err := decode[api.SandboxList](b.api.api.ListSandboxes(ctx, &api.ListSandboxesParams{}))
			return err
		})
		if err != nil {
			return err
		}
	}
	for range b.news {
		var made api.Sandbox
		if err := out.new.measure(func() (err error) { made, err = b.api.accept(ctx); return err }); err != nil {
			return err
		}
		if err := b.api.remove(ctx, made.ID); err != nil {
			return err
		}
	}
	began = time.Now()
	yes := true
	bill, err := decode[api.Bill](b.api.api.GetBill(ctx, &api.GetBillParams{Verify: yes}))
	if err != nil || len(bill.Differences) > 0 {
		return fmt.Errorf("the bill: %w %q", err, bill.Differences)
	}
	out.bill = time.Since(began)
	out.memory, err = b.proc.Memory()
	return err
}

// measure times one call.
func (s *series) measure(f func() error) error {
	began := time.Now()
	err := f()
	s.add(time.Since(began))
	return err
}

// batch is how many sandboxes are written in one transaction.
const batch = 500

// fill ends the server and writes stopped sandboxes, with the operations, events and
// metering of a short life, until there are so many. It gives the ids of all.
func (b *bench) fill(ctx context.Context, sandboxes int) (ids []string, err error) {
	b.proc.Stop()
	s, err := b.cfg.Open(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var prices metering.Prices
	err = s.View(ctx, func(ctx context.Context, r store.Reader) error {
		for page := (store.Page{Limit: 1000}); ; {
			rows, err := r.Sandboxes(ctx, store.SandboxFilter{Page: page})
			if err != nil {
				return err
			}
			for _, row := range rows {
				ids = append(ids, row.ID)
			}
			if len(rows) < page.Limit {
				break
			}
			last := rows[len(rows)-1]
			page.After = store.Cursor{At: last.CreatedAt, ID: last.ID}
		}
		var err error
		prices, err = r.Prices(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	for len(ids) < sandboxes && err == nil {
		err = s.Update(ctx, func(ctx context.Context, tx store.Tx) error {
			for i := len(ids); i < min(len(ids)+batch, sandboxes); i++ {
				if err := write(ctx, tx, prices, i); err != nil {
					return err
				}
			}
			return nil
		})
		for i, end := len(ids), min(len(ids)+batch, sandboxes); i < end; i++ {
			ids = append(ids, rowID("sbx", i))
		}
	}
	return ids, err
}

// rowID gives ids that look like real ones.
func rowID(prefix string, i int) string { return fmt.Sprintf("%s_%026d", prefix, i) }

// write writes one sandbox that was made, stopped and kept.
func write(ctx context.Context, tx store.Tx, prices metering.Prices, i int) error {
	id, name := rowID("sbx", i), fmt.Sprint("filled-", i)
	made := time.Now().UTC().Truncate(time.Millisecond).Add(-time.Hour)
	stopped := made.Add(time.Minute)
	row := sandbox.Sandbox{
		ID: id, Project: fakeserver.Project, Name: name, State: sandbox.Stopped, Host: "local", HostSeq: 2, Generation: 1, Started: true,
		Policy:    sandbox.DefaultPolicy(),
		Spec:      sandbox.Spec{Runtime: "fake", Template: "base", Version: fakehost.Template, CPUs: 1, Memory: 1 << 30, Disk: 4e9, Sleep: sandbox.SleepManual},
		CreatedAt: made, UpdatedAt: stopped, StateSince: stopped, SavedAt: stopped, Version: 3,
	}
	if err := tx.InsertSandbox(ctx, row); err != nil {
		return err
	}
	m := metering.Meter{Project: fakeserver.Project, Sandbox: id}
	for n, kind := range []sandbox.Verb{sandbox.Create, sandbox.Stop} {
		op := sandbox.Operation{ID: rowID(fmt.Sprint("op_", n), i), Project: fakeserver.Project, Sandbox: id, Kind: kind, Status: sandbox.Succeeded, Progress: 1,
			Generation: int64(n), CreatedAt: made, StartedAt: made, EndedAt: stopped, Version: 2}
		if err := tx.InsertOperation(ctx, op); err != nil {
			return err
		}
		for e, typ := range []string{"operation.started", "sandbox." + string(map[sandbox.Verb]sandbox.State{sandbox.Create: sandbox.Ready, sandbox.Stop: sandbox.Stopped}[kind]), "operation.succeeded"} {
			event := store.Event{ID: rowID(fmt.Sprintf("ev_%d%d", n, e), i), Project: fakeserver.Project, Sandbox: id, Operation: op.ID, Type: typ, Actor: "host", At: stopped}
			if err := tx.AddEvent(ctx, event); err != nil {
				return err
			}
		}
	}
	for n, f := range []metering.Fact{
		{Kind: metering.Found, At: made, Reason: metering.Running, Rate: metering.Rate{VCPUs: 1, MemoryBytes: 1 << 30}, Generation: 1},
		{Kind: metering.Ended, At: stopped, End: metering.ByStop},
	} {
		f.Event = rowID(fmt.Sprint("ev_fact", n), i)
		next, entries, err := m.Next(f, prices)
		if err != nil {
			return err
		}
		if err := tx.EnterFact(ctx, next, f, entries); err != nil {
			return err
		}
		m = next
	}
	return nil
}
