package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// sshAddress is where the shared server serves SSH.
var sshAddress string

// TestSSH_N2: OpenSSH's client runs commands, wakes what sleeps, and is refused once its
// key is revoked.
func TestSSH_N2(t *testing.T) {
	dir := t.TempDir()
	key := filepath.Join(dir, "key")
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen: %v: %s", err, out)
	}
	host, port, err := net.SplitHostPort(sshAddress)
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t)
	ssh := func(stdin string, args ...string) result {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "ssh", append([]string{
			"-F", os.DevNull, "-i", key, "-p", port, "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR",
			"-o", "UserKnownHostsFile=" + filepath.Join(dir, "known"), "-o", "StrictHostKeyChecking=accept-new", b.name + "@" + host,
		}, args...)...)
		var out, errs bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
		_ = cmd.Run()
		return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
	}
	if r := ssh("", "true"); r.code != 255 || !strings.Contains(r.stderr, "Permission denied") {
		t.Fatalf("with a key that nobody registered: %s", r)
	}
	id := strings.TrimSpace(hutchOK(t, "ssh-keys", "add", key+".pub"))
	if r := ssh("in", "cat; echo words >&2; exit 7"); r.stdout != "in" || r.stderr != "words\n" || r.code != 7 {
		t.Errorf("exec: %s", r)
	}
	if r := ssh("", "-tt", "test -t 0 && echo terminal"); !strings.Contains(r.stdout, "terminal") || r.code != 0 {
		t.Errorf("with a terminal: %s", r)
	}
	hutchOK(t, "sleep", b.name)
	if r := ssh("", "echo awake"); r.stdout != "awake\n" || r.code != 0 {
		t.Errorf("asleep: %s", r)
	}
	hutchOK(t, "stop", b.name)
	if r := ssh("", "true"); r.code != 255 || !strings.Contains(r.stderr, "hutch resume") {
		t.Errorf("stopped: %s", r)
	}
	hutchOK(t, "ssh-keys", "rm", id, "--yes")
	if r := ssh("", "true"); r.code != 255 || !strings.Contains(r.stderr, "Permission denied") {
		t.Errorf("with a key that was revoked: %s", r)
	}
}
