package gvisor_test

import (
	"context"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

// The tests of this file prove what hutch-runsc changes in gVisor. Each fails on the
// stock module; docs/gvisor.md says how to see that.

// startOne boots a sandbox and kills it at the end.
func startOne(tb testing.TB, spec runtime.Spec) runtime.Handle {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	h, err := newDriver(tb).Start(ctx, spec)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { kill(tb, h) })
	runtimetest.Await(tb, h)
	return h
}

func kill(tb testing.TB, h runtime.Handle) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := h.Kill(ctx); err != nil {
		tb.Errorf("Kill: %v", err)
	}
}

// cpuOver gives the share of one core that a sandbox uses over a time.
func cpuOver(tb testing.TB, h runtime.Handle, d time.Duration) float64 {
	tb.Helper()
	before, err := h.Usage(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	begin := time.Now()
	time.Sleep(d) // the measurement itself
	after, err := h.Usage(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	return float64(after.CPU-before.CPU) / float64(time.Since(begin))
}

// Z1 reads a sandbox's CPU from the host; on the stock module an idle one uses about
// 3 % of a core for ever, paused or not.
func TestIdleSandboxUsesNoCPU_Z1(t *testing.T) {
	h := startOne(t, newSpec(t, tree(t)))
	wantIdle(t, h, "an idle sandbox")
	p, err := h.Pause(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	wantIdle(t, h, "a paused sandbox")
	if err := p.Resume(context.Background()); err != nil {
		t.Fatal(err)
	}
	runtimetest.MustAsk(t, h, "get", "token")
}

// wantIdle measures up to three times: what a boot leaves to do is done by then.
func wantIdle(t *testing.T, h runtime.Handle, what string) {
	t.Helper()
	const most = 0.002
	var share float64
	for range 3 {
		if share = cpuOver(t, h, 3*time.Second); share <= most {
			t.Logf("%s uses %.3f %% of a core", what, share*100)
			return
		}
	}
	t.Errorf("%s uses %.2f %% of a core, more than %.1f %%", what, share*100, most*100)
}

// A file in /tmp is on the disk, where a stop keeps it; stock runsc mounts a tmpfs on
// an empty /tmp (SPEC section 6, first row).
func TestTmpIsOnDisk(t *testing.T) {
	t.Parallel()
	spec := newSpec(t, tree(t))
	h := startOne(t, spec)
	runtimetest.MustAsk(t, h, "write", "/tmp/kept", "words")
	if got, err := os.ReadFile(spec.Root + "/tmp/kept"); err != nil || string(got) != "words" {
		t.Errorf("the disk's /tmp/kept holds %q, %v", got, err)
	}
	runtimetest.MustAsk(t, h, "write", "/run/lost", "words")
	if _, err := os.Stat(spec.Root + "/run/lost"); !os.IsNotExist(err) {
		t.Errorf("/run is on the disk: %v", err)
	}
}

// BenchmarkSystemCalls measures bursts of system calls, some after an idle time, where
// a parked loop could cost. With HUTCH_TEST_STOCK, the path of a binary of the stock
// module, it measures that one in turn with the other and gives the ratio of the
// medians: above 1 ours is the slower one. docs/gvisor.md has the last result.
func BenchmarkSystemCalls(b *testing.B) {
	ours := startOne(b, newSpec(b, tree(b)))
	stock := runtime.Handle(nil)
	if path := os.Getenv("HUTCH_TEST_STOCK"); path != "" {
		d := gvisor.New(gvisor.Config{Runsc: path, CgroupParent: parent})
		b.Cleanup(d.Close)
		h, err := d.Start(context.Background(), newSpec(b, tree(b)))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { kill(b, h) })
		runtimetest.Await(b, h)
		stock = h
	}
	for _, c := range []struct {
		verb  string
		count int
	}{{"calls", 100}, {"calls", 10_000}, {"calls", 100_000}, {"pingpong", 100}, {"pingpong", 5_000}} {
		count := strconv.Itoa(c.count)
		burst := func(h runtime.Handle) float64 {
			time.Sleep(50 * time.Millisecond) // idle again
			us, err := strconv.ParseFloat(runtimetest.MustAsk(b, h, c.verb, count), 64)
			if err != nil {
				b.Fatal(err)
			}
			return us * 1000 / float64(c.count)
		}
		b.Run(c.verb+"/"+count, func(b *testing.B) {
			var own, other []float64
			for b.Loop() {
				own = append(own, burst(ours))
				if stock != nil {
					other = append(other, burst(stock))
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(median(own), "ns/call")
			if stock != nil {
				b.ReportMetric(median(other), "stock-ns/call")
				b.ReportMetric(median(own)/median(other), "ratio")
			}
		})
	}
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}
