package storetest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// Bench measures what a create writes and a get reads, one after the other and with
// eight callers at a time. s is empty.
func Bench(b *testing.B, s store.Store) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	err := s.Update(b.Context(), func(ctx context.Context, tx store.Tx) error {
		return tx.InsertProject(ctx, store.Project{ID: "p1", CreatedAt: at})
	})
	if err != nil {
		b.Fatal(err)
	}
	var n atomic.Int64
	step := func(b *testing.B) {
		i := n.Add(1)
		id := fmt.Sprintf("sbx_%026d", i)
		err := s.Update(b.Context(), func(ctx context.Context, tx store.Tx) error {
			row := sandbox.Sandbox{
				ID: id, Project: "p1", Name: fmt.Sprint("s", i), State: sandbox.Creating, Host: "local", Labels: map[string]string{"env": "prod"},
				Spec:      sandbox.Spec{Template: "base", Version: "sha256:aa", CPUs: 1, Memory: 1 << 30, Disk: 4e9, Sleep: sandbox.SleepManual},
				CreatedAt: at, UpdatedAt: at, StateSince: at, Version: 1,
			}
			op := sandbox.Operation{ID: "op_" + id, Project: "p1", Sandbox: id, Kind: sandbox.Create, Status: sandbox.Pending, CreatedAt: at, Version: 1}
			return errorsOf(tx.InsertSandbox(ctx, row), tx.InsertOperation(ctx, op),
				tx.AddEvent(ctx, store.Event{Project: "p1", Sandbox: id, Type: "sandbox.creating", At: at}),
				tx.AddEvent(ctx, store.Event{Project: "p1", Sandbox: id, Type: "operation.started", At: at}),
				tx.PutRequest(ctx, store.Request{Project: "p1", Route: "POST /v1/sandboxes", Key: id, Sandboxes: []string{id}, CreatedAt: at}))
		})
		if err == nil {
			err = s.View(b.Context(), func(ctx context.Context, r store.Reader) error {
				_, err := r.Sandbox(ctx, id)
				_, err2 := r.ActiveOperation(ctx, id)
				return errorsOf(err, err2)
			})
		}
		if err != nil {
			b.Error(err)
		}
	}
	rate := func(b *testing.B) { b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates+gets/s") }
	b.Run("alone", func(b *testing.B) {
		for b.Loop() {
			step(b)
		}
		rate(b)
	})
	b.Run("eight", func(b *testing.B) {
		b.SetParallelism(4) // times GOMAXPROCS, on two cores
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				step(b)
			}
		})
		rate(b)
	})
}
