package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
)

// E1: streams, stdin and the command's own exit code.
func TestExec(t *testing.T) {
	t.Parallel()
	b := newBox(t, "--env", "COLOUR=blue")
	for _, code := range []int{0, 1, 7, 125, 255} {
		if r := b.exec(nil, "--", "sh", "-c", fmt.Sprintf("echo out; echo err >&2; exit %d", code)); r.code != code || r.stdout != "out\n" || r.stderr != "err\n" {
			t.Errorf("exit %d: %s", code, r)
		}
	}
	if r := b.exec(nil, "--", "sh", "-c", "kill -9 $$"); r.code != 137 {
		t.Errorf("a killed command: %s", r)
	}
	if r := b.exec(nil, "--", "no-such-program"); r.code != 127 && r.code != 125 {
		t.Errorf("a program that is not there: %s", r)
	}
	// E5: the template's user, in /workspace, with the sandbox's variables.
	if got := b.sh("id -un; pwd; echo $COLOUR $LANG"); got != "user\n/workspace\nblue C.UTF-8" {
		t.Errorf("who, where, with what: %q", got)
	}
	if got := b.sh("sudo id -un"); got != "root" {
		t.Errorf("sudo gives %q", got)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	if r := b.exec(bytes.NewReader(big), "--", "sha256sum"); !strings.HasPrefix(r.stdout, fmt.Sprintf("%x", sha256.Sum256(big))) {
		t.Errorf("1 MiB of stdin: %s", r)
	}
	r := b.exec(nil, "--", "sh", "-c", "head -c 20000000 /dev/zero; echo last words >&2; exit 1")
	if len(r.stdout) != 20000000 || r.stderr != "last words\n" || r.code != 1 {
		t.Errorf("20 MB of output: %d bytes, stderr %q, code %d", len(r.stdout), r.stderr, r.code)
	}
	if r := b.exec(nil, "-t", "--", "sh", "-c", "test -t 1 && stty size && echo terminal"); !strings.Contains(r.stdout, "terminal") {
		t.Errorf("a terminal: %s", r)
	}
}

// E4: files in and out, byte for byte.
func TestCopy(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	dir := t.TempDir()
	data := bytes.Repeat([]byte("hutch\x00\n"), 500_000)
	writeFile(t, dir+"/in", data)
	hutchOK(t, "cp", dir+"/in", b.name+":/workspace/deep/dir/file")
	if got := b.sh("sha256sum < /workspace/deep/dir/file"); !strings.HasPrefix(got, fmt.Sprintf("%x", sha256.Sum256(data))) {
		t.Errorf("inside it has %s", got)
	}
	hutchOK(t, "cp", b.name+":/workspace/deep/dir/file", dir+"/out")
	if !bytes.Equal(readFile(t, dir+"/out"), data) {
		t.Error("the copy out differs")
	}
}

// Programs that agents use work as on any machine.
func TestOrdinaryWork(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	got := b.sh(`set -e
git init -q repo && cd repo && git config user.email a@b && git config user.name a
for i in $(seq 50); do echo $i > f$i; done
git add . && git commit -qm one && git mv f1 g1 && git commit -qam two && git log --oneline | wc -l
mv /workspace/repo /workspace/repo2 && ls /workspace
python3 -c 'import sqlite3; c = sqlite3.connect("/workspace/db"); c.execute("pragma journal_mode=wal"); c.execute("create table t(x)"); c.execute("insert into t values (42)"); c.commit(); print(c.execute("select x from t").fetchone()[0])'
sudo mv /usr/share/doc /usr/share/doc2 && test -d /usr/share/doc2 && echo renamed
`)
	if got != "2\nrepo2\n42\nrenamed" {
		t.Errorf("got %q", got)
	}
}
