//go:build soak

package histories

import (
	"fmt"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/soakdoc"
)

// Half an hour of the storm on each database.
func TestSoakRestarts(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		st := newStorm(t, url)
		st.rage(500, 30*time.Minute)
		if t.Failed() {
			return
		}
		name := "SQLite"
		if url != "" {
			name = "PostgreSQL"
		}
		text := fmt.Sprintf("500 sandboxes of the fake runtime on the real store, control plane, host agent and API. %s.\n\n", st.report()) +
			"Afterwards every sandbox was what its clients had been told, the machine had what the states say and nothing else,\n" +
			"every event was there once with no gap, `hutch bill --verify` was clean, and after the deletions nothing was left.\n"
		if err := soakdoc.Write("../../docs/soak.md", "restarts-"+name, "A storm of restarts on "+name, text); err != nil {
			t.Fatal(err)
		}
	})
}
