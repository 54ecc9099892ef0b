package gvisor_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
	"github.com/hutchrun/hutch/internal/runtime/runtimetest"
)

// olderBuild makes a binary in a folder of kept ones that differs from the one under
// test in nothing but its version, and gives that.
func olderBuild(t *testing.T, kept, version string) string {
	t.Helper()
	text, err := os.ReadFile(runsc(t))
	if err != nil {
		t.Fatal(err)
	}
	old := []byte(version)
	other := slices.Clone(old)
	copy(other[len(other)-6:], "older!")
	if !bytes.Contains(text, old) {
		t.Fatalf("the binary does not hold its version %q", version)
	}
	path := filepath.Join(kept, "digest", "hutch-runsc")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.ReplaceAll(text, old, other), 0o755); err != nil {
		t.Fatal(err)
	}
	return string(other)
}

// A memory saved by an older runsc is woken by that one, as long as it is kept (R8).
func TestWakeByTheRunscThatSaved_R8(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	now, err := newDriver(t).Probe(ctx)
	if err != nil {
		t.Fatal(err)
	}
	kept := t.TempDir()
	older := olderBuild(t, kept, now.Version)

	before := gvisor.New(gvisor.Config{Runsc: filepath.Join(kept, "digest", "hutch-runsc"), Log: runtimetest.Log(t), CgroupParent: parent})
	t.Cleanup(before.Close)
	spec := newSpec(t, tree(t))
	h, err := before.Start(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, h) })
	runtimetest.Await(t, h)
	token := runtimetest.MustAsk(t, h, "get", "token")

	// After an upgrade the sandbox runs on, and what is captured of it is of its version.
	after := gvisor.New(gvisor.Config{Runsc: runsc(t), Kept: kept, Log: runtimetest.Log(t), CgroupParent: parent})
	t.Cleanup(after.Close)
	caps, err := after.Probe(ctx)
	if err != nil || caps.Version != now.Version || !slices.Equal(caps.Older, []string{older}) {
		t.Fatalf("Probe: %+v, %v; want the versions %s and %s", caps, err, now.Version, older)
	}
	adopted, err := after.Adopt(ctx, spec)
	if err != nil {
		t.Fatal(err)
	}
	if got := adopted.Version(); got != older {
		t.Errorf("the adopted sandbox has the version %s, not %s", got, older)
	}
	p, err := adopted.Pause(ctx)
	if err != nil {
		t.Fatal(err)
	}
	image := t.TempDir()
	if err := p.Capture(ctx, image); err != nil {
		t.Fatal(err)
	}
	kill(t, adopted)
	if err := (runtime.Manifest{Meta: runtime.Meta{Runtime: "gvisor", Version: older}}).RunsOn(caps, ""); err != nil {
		t.Errorf("the image cannot run here: %v", err)
	}

	// Its own runsc wakes it.
	place := newSpec(t, spec.Root)
	place.Version = older
	again, err := after.Restore(ctx, place, image)
	if err != nil {
		t.Fatalf("Restore: %v", err)
	}
	if err := again.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if got := runtimetest.MustAsk(t, again, "get", "token"); got != token {
		t.Errorf("the memory holds %s, not %s", got, token)
	}
	if got := again.Version(); got != older {
		t.Errorf("the woken sandbox has the version %s, not %s", got, older)
	}
	kill(t, again)

	// Another one refuses it, and so does the driver when the binary is gone.
	refused := func(what, version string) {
		t.Helper()
		place := newSpec(t, spec.Root)
		place.Version = version
		_, err := after.Restore(ctx, place, image)
		if f := fault.Of(err); f == nil || f.Kind != fault.FailedPrecondition || f.Reason != "runtime_version" {
			t.Errorf("%s: got %v, want failed_precondition runtime_version", what, err)
		}
	}
	refused("by the present runsc", now.Version)
	if err := os.RemoveAll(filepath.Join(kept, "digest")); err != nil {
		t.Fatal(err)
	}
	refused("without the kept runsc", older)
}
