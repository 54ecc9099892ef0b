package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// pool is a place in the shared server's disk pool.
func poolPath(t *testing.T, elem ...string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(shared.data(), "*", "disks"))
	if err != nil || len(found) != 1 {
		t.Fatalf("the pool of %s: %v, %v", shared.data(), found, err)
	}
	return filepath.Join(append([]string{filepath.Dir(found[0])}, elem...)...)
}

func (b *box) saveFailed() bool {
	b.t.Helper()
	for _, c := range b.get().Conditions {
		if c.Type == "degraded" && c.Reason == "save_failed" {
			return true
		}
	}
	return false
}

type boxOperation struct {
	ID, Kind, Status, Actor string
}

func (b *box) operations() []boxOperation {
	b.t.Helper()
	var ops struct {
		Operations []boxOperation `json:"operations"`
	}
	if err := json.Unmarshal([]byte(hutchOK(b.t, "operations", "ls", b.name, "--json")), &ops); err != nil {
		b.t.Fatal(err)
	}
	return ops.Operations
}

// until waits for something.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it did not happen: %s", what)
		}
	}
}

// Z10: a save that fails leaves the sandbox running, says so, and is tried again by
// itself until it succeeds or its user keeps it. The save that succeeds has a receipt
// (X1), which holds without a server, and not when a byte of it is changed.
func TestFailedSave_Z10(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.sh("echo kept > /workspace/kept; sleep 1000 >/dev/null 2>&1 & echo $! > /workspace/pid")
	block := poolPath(t, "saves", b.get().ID) // where its saves would be
	if err := os.WriteFile(block, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(block) })
	sleep := func() {
		t.Helper()
		r, err := shared.try(2*time.Minute, nil, "sleep", b.name)
		if err == nil || !strings.Contains(r.stderr, "hutch keep "+b.name) {
			t.Fatalf("a sleep that cannot be saved: %s", r)
		}
	}
	sleep()
	if b.is("ready"); !b.saveFailed() {
		t.Fatal("it is not degraded")
	}
	b.sh("kill -0 $(cat /workspace/pid)")
	until(t, "a retry", func() bool {
		ops := b.operations()
		last := ops[len(ops)-1]
		return last.Kind == "sleep" && last.Actor == "host" && last.Status == "failed"
	})
	if text := b.hutch("keep"); !strings.Contains(text, "metered from now on") || b.saveFailed() {
		t.Errorf("keep says %q", text)
	}
	if text := b.hutch("keep"); !strings.Contains(text, "no save of") {
		t.Errorf("a second keep says %q", text)
	}
	sleep()
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	b.becomes("sleeping")
	if b.saveFailed() {
		t.Error("it is degraded after the save")
	}

	dir := t.TempDir()
	file, key := filepath.Join(dir, "receipt.json"), filepath.Join(dir, "hutch.pub")
	doc := b.hutch("receipt", "--json")
	for path, text := range map[string]string{file: doc, key: hutchOK(t, "receipts", "key")} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if text := hutchOK(t, "receipts", "verify", file, "--key", key); !strings.Contains(text, "sleep of "+b.name) {
		t.Errorf("verify says %q", text)
	}
	if text := b.hutch("receipt"); !strings.Contains(text, "blake3:") || !strings.Contains(text, "not covered") {
		t.Errorf("the receipt for people: %s", text)
	}
	if err := os.WriteFile(file, []byte(strings.Replace(doc, "blake3:", "blake3;", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	hutchFailsRaw(t, "data_corrupt", []string{"receipts", "verify", file, "--key", key, "--json"})

	if got := b.sh("kill -0 $(cat /workspace/pid) && cat /workspace/kept"); got != "kept" {
		t.Errorf("after the wake: %q", got)
	}
}

// A cancellation comes before the commit, and everything is as before, or too late, and
// says so.
func TestCancel(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.sh("sleep 1000 >/dev/null 2>&1 & echo $! > /workspace/pid")
	b.hutch("sleep", "--no-wait")
	ops := b.operations()
	op := ops[len(ops)-1]
	r, err := shared.try(2*time.Minute, nil, "operations", "cancel", op.ID)
	switch {
	case err == nil:
		b.is("ready")
	case strings.Contains(r.stderr, "too late") || strings.Contains(r.stderr, "point of no return"):
		b.becomes("sleeping")
	default:
		t.Fatalf("cancel: %s", r)
	}
	if b.sh("kill -0 $(cat /workspace/pid)"); b.saveFailed() {
		t.Error("a save that was cancelled is no failed one")
	}
}

// X9: what is deleted comes back as stopped, with its disk, within its time; then it is
// erased.
func TestUndelete_X9(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.sh("echo kept > /workspace/kept") // which nobody has synced
	id := b.get().ID
	b.hutch("delete", "--yes")
	listed := func() bool { return strings.Contains(hutchOK(t, "ls", "--deleted", "--all"), id) }
	if !listed() {
		t.Fatal("it is not listed")
	}
	if f := hutchFails(t, "not_found", "get", b.name); !strings.Contains(f["message"].(string), "hutch undelete "+id) {
		t.Errorf("get says %v", f)
	}
	b.hutch("undelete")
	b.is("stopped")
	b.hutch("resume")
	if got := b.sh("cat /workspace/kept"); got != "kept" {
		t.Errorf("its disk has %q", got)
	}
	b.hutch("sleep")
	b.hutch("delete", "--yes")
	if _, err := os.Stat(poolPath(t, "disks", id)); err != nil {
		t.Errorf("its disk is not kept: %v", err)
	}
	until(t, "it is erased", func() bool { return !listed() })
	until(t, "its disk is removed", func() bool {
		_, err := os.Stat(poolPath(t, "disks", id))
		return os.IsNotExist(err)
	})
	hutchFails(t, "not_found", "undelete", id)
}
