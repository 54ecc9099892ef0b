//go:build soak

package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// E1, E2, Z1: a command of 60 minutes that is silent for most of it keeps its sandbox awake,
// and its output and code come to who waited and to who comes back.
func TestSoakLongCommand(t *testing.T) {
	t.Parallel()
	b := newBox(t, "--no-auto-stop", "--idle-after", "10m")
	const parts, gap = 6, 10 * time.Minute
	began := time.Now()
	var want strings.Builder
	for i := range parts {
		fmt.Fprintf(&want, "part %d\n", i)
	}
	script := fmt.Sprintf("for i in $(seq 0 %d); do echo part $i; sleep %d; done; exit 7", parts-1, int(gap.Seconds()))
	id := strings.TrimSpace(b.hutch("exec", "--detach", "--", "sh", "-c", script))
	r, _ := shared.try(2*time.Hour, nil, "exec", b.name, "--", "sh", "-c", script)
	if r.code != 7 || r.stdout != want.String() {
		t.Errorf("who waited: %s", r)
	}
	if r, err := shared.try(10*time.Minute, nil, "commands", "logs", b.name, id, "--follow"); err != nil || r.stdout != want.String() {
		t.Errorf("who came back: %s, %v", r, err)
	}
	if c := b.command(id); c.Exit == nil || c.Exit.Code != 7 {
		t.Errorf("the detached one: %+v", c.Exit)
	}
	if g := b.get().Generation; g != 1 {
		t.Errorf("it slept meanwhile: generation %d", g)
	}
	document(t, "long-command", "A command of an hour", fmt.Sprintf("A command that wrote a line each %s ran for %s. All %d lines and its exit code came to the client that waited, and to one that\ncame back to a detached one. The sandbox stayed awake.\n",
		gap, time.Since(began).Round(time.Second), parts))
}
