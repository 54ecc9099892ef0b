package hostagent

import (
	"slices"
	"testing"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// R9: a host says how it stands with each sandbox, and its journals say the same from
// outside when it is down.
func TestFacts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, id := range []string{"runs", "sleeps", "stopped", "cycled"} {
		w.must(w.command(id, sandbox.Create))
	}
	w.must(w.command("sleeps", sandbox.Sleep))
	w.must(w.command("stopped", sandbox.Stop))
	w.must(w.command("cycled", sandbox.Sleep))
	w.must(w.command("cycled", sandbox.Wake))
	want := map[string]sandbox.State{"runs": sandbox.Ready, "sleeps": sandbox.Sleeping, "stopped": sandbox.Stopped, "cycled": sandbox.Ready}
	for id := range want {
		w.idle(id)
	}
	check := func(list []hostproto.Fact, err error) {
		t.Helper()
		if err != nil || len(list) != len(want) {
			t.Fatalf("%+v, %v", list, err)
		}
		for _, f := range list {
			last := w.book.last(f.Sandbox)
			if f.State != want[f.Sandbox] || f.Seq != last.Seq || f.Acked != f.Seq || f.Generation != last.Generation || f.Operation != "" || f.Spec.Memory == 0 {
				t.Errorf("%+v; the last report is %+v", f, last)
			}
		}
	}
	eventually(t, "the reports to be taken", func() bool {
		list, err := w.agent.Facts(t.Context())
		return err == nil && !slices.ContainsFunc(list, func(f hostproto.Fact) bool { return f.Acked != f.Seq })
	})
	check(w.agent.Facts(t.Context()))
	held := Holdings{Dir: w.agent.cfg.Dir, BootID: w.agent.cfg.BootID}
	w.agent.Stop()
	check(held.Facts())
	layers, err := held.Layers()
	if err != nil || !layers[w.agent.cfg.Agent] {
		t.Errorf("layers %v, %v", layers, err)
	}
	w.start()
	w.consistent("runs", "sleeps", "stopped", "cycled")
}

// S5, D8: the deletion of what the host has lost ends for the generation that it was
// asked of; else it would never be taken for the end.
func TestDeleteOfWhatIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cmd := w.command("lost", sandbox.Delete)
	cmd.Generation = 7
	w.must(cmd)
	if r := w.book.last("lost"); r.Generation != 7 || r.Event != sandbox.EventDeleted {
		t.Errorf("it reports %+v", r)
	}
}
