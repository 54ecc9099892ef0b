package network

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// BenchmarkAttach measures Attach and Detach one after the other on an idle host.
func BenchmarkAttach(b *testing.B) {
	m, err := Open(context.Background(), Config{Tag: unique()})
	if err != nil {
		b.Fatal(err)
	}
	defer m.Close()
	defer m.Remove(context.Background())
	var attach, again, detach time.Duration
	var before, after unix.Rusage
	unix.Getrusage(unix.RUSAGE_SELF, &before)
	for b.Loop() {
		id := newID()
		start := time.Now()
		_, err := m.Attach(context.Background(), id)
		attach += time.Since(start)
		if err != nil {
			b.Fatal(err)
		}
		start = time.Now()
		if _, err := m.Attach(context.Background(), id); err != nil {
			b.Fatal(err)
		}
		again += time.Since(start)
		start = time.Now()
		if err := m.Detach(context.Background(), id); err != nil {
			b.Fatal(err)
		}
		detach += time.Since(start)
	}
	unix.Getrusage(unix.RUSAGE_SELF, &after)
	cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / float64(b.N) }
	b.ReportMetric(ms(cpu), "cpu-ms/cycle")
	b.ReportMetric(ms(attach), "ms/attach")
	b.ReportMetric(ms(again), "ms/attach-again")
	b.ReportMetric(ms(detach), "ms/detach")
}
