package hostagent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// R10: from outside, a journal says what its sandbox may have on the machine, and what
// it needs; one that cannot be read gives nothing away.
func TestR10Holdings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const running, stopped, torn = "sbx_running", "sbx_stopped", "sbx_torn"
	for _, id := range []string{running, stopped} {
		w.must(w.command(id, sandbox.Create))
		w.idle(id)
	}
	w.must(w.command(stopped, sandbox.Stop))
	w.idle(stopped)
	dir := filepath.Join(w.dir, "journal")
	if err := os.WriteFile(journalPath(dir, torn), []byte("0123"), 0o600); err != nil {
		t.Fatal(err)
	}
	look := func(boot string) (map[string]Holding, map[string]bool) {
		t.Helper()
		sandboxes, captures, err := Holdings{Dir: dir, BootID: boot}.All()
		if err != nil || len(sandboxes) != 3 {
			t.Fatalf("%+v, %v", sandboxes, err)
		}
		return sandboxes, captures
	}
	nobody := Holding{Kernel: true, Open: true}
	if got, captures := look(w.boot); got[running] != (Holding{Kernel: true}) || got[stopped] != (Holding{}) || got[torn] != nobody || len(captures) > 0 {
		t.Errorf("at rest: %+v %v", got, captures)
	}
	if got, _ := look("another boot"); got[running] != (Holding{}) {
		t.Errorf("after a reboot of the machine: %+v", got[running])
	}
	// A fork that is at work holds its capture.
	reached, goOn := make(chan struct{}), make(chan struct{})
	w.setTrap(func(verb sandbox.Verb, step string) error {
		if verb == sandbox.Fork && step == sandbox.StepSeal {
			close(reached)
			<-goOn
		}
		return nil
	})
	fork := w.command(running, sandbox.Fork)
	fork.Children = []hostproto.Child{{Sandbox: "sbx_child", Operation: opID(), Name: "child"}}
	if err := w.agent.Submit(t.Context(), fork); err != nil {
		t.Fatal(err)
	}
	<-reached
	if got, captures := look(w.boot); got[running] != nobody || !captures[fork.Operation] || len(captures) != 1 {
		t.Errorf("in a fork: %+v %v", got, captures)
	}
	close(goOn)
	if f := w.book.end(t, fork.Operation); f != nil {
		t.Error(f.Message)
	}
	if none, _, err := (Holdings{Dir: filepath.Join(w.dir, "none")}).All(); len(none) > 0 || err != nil {
		t.Errorf("without journals: %v %v", none, err)
	}
}
