package gvisor_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
)

// A stand-in for hutch-runsc fails, dies or hangs: a start and a probe end with a typed
// error in bounded time, nothing of them is left, and the same place starts afterwards.
func TestRunscStandIns(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		script string
		start  fault.Kind
		silent bool // does not say its version either
	}{
		"fails":                  {"exit 1", fault.Internal, false},
		"dies":                   {"kill -9 $$", fault.Internal, false},
		"succeeds for nothing":   {"exit 0", fault.Internal, false},
		"hangs":                  {"exec sleep 1000000", fault.DeadlineExceeded, false},
		"leaves a child":         {"sleep 1000000 & exec sleep 1000000", fault.DeadlineExceeded, false},
		"says nothing":           {"exit 1", fault.Unsupported, true},
		"hangs from the first":   {"exec sleep 1000000", fault.DeadlineExceeded, true},
		"its child has the pipe": {"sleep 20 & exit 0", fault.Unsupported, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "runsc")
			// It joins the group that its first argument names, as the real one does.
			version := "if [ \"$1\" = --version ]; then echo runsc version stand-in; exit 0; fi\n"
			if c.silent {
				version = ""
			}
			script := "#!/bin/sh\n" + version + "if [ \"$1\" = join ]; then shift; while [ \"$1\" != -- ]; do echo $$ > \"$1\"; shift; done; fi\n" + c.script + "\n"
			if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			d := gvisor.New(gvisor.Config{Runsc: path, CgroupParent: parent})
			defer d.Close()
			spec := newSpec(t, tree(t))
			limit := time.Minute
			if c.start == fault.DeadlineExceeded {
				limit = 500 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			if _, err := d.Start(ctx, spec); !fault.Is(err, c.start) {
				t.Errorf("Start: %v", err)
			}
			if left := spoils(t, spec); len(left) > 0 {
				t.Errorf("the processes %v are left", left)
			}
			for _, dir := range []string{"memory", ""} {
				if _, err := os.Stat(filepath.Join("/sys/fs/cgroup", dir, parent, spec.ID)); err == nil {
					t.Errorf("its control group in %q is left", dir)
				}
			}
			if _, err := d.Probe(ctx); err == nil {
				t.Error("a probe with it succeeded")
			}
			h := startOne(t, spec)
			kill(t, h)
		})
	}
}
