package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// These tests end the shared server or damage what it keeps, so they do not run
// beside others.

// The server is ended with kill -9 while sandboxes run, sleep and are stopped: they
// are as they were, and running ones kept running.
func TestServerKilled(t *testing.T) {
	running, sleeping, stopped := newBox(t), newBox(t), newBox(t)
	for _, b := range []*box{running, sleeping, stopped} {
		b.furnish()
	}
	sleeping.hutch("sleep")
	stopped.hutch("stop")
	before := running.get()
	shared.kill()
	killed := time.Now()
	time.Sleep(3 * time.Second) // in which the program goes on
	up := time.Now()
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	running.is("ready")
	if got := running.get(); got.Generation != before.Generation || got.ID != before.ID {
		t.Errorf("before %+v, after %+v", before, got)
	}
	if !running.tickedBetween(killed, up) {
		t.Error("while the server was dead the program stood still")
	}
	running.filesAreThere()
	sleeping.is("sleeping")
	sleeping.hutch("wake")
	sleeping.filesAreThere()
	sleeping.waitTicks(sleeping.ticks())
	stopped.is("stopped")
	stopped.hutch("resume")
	stopped.filesAreThere()
	running.hutch("sleep")
	running.hutch("wake")
	running.waitTicks(running.ticks())
	// An exec that was made before the restart is still known.
	if list := running.commands(); !strings.Contains(list, "cmd_") {
		t.Errorf("commands after the restart: %s", list)
	}
	f := running.forks(1)[0]
	f.filesAreThere()
}

// tickedBetween says whether the program counted in a span of time.
func (b *box) tickedBetween(from, to time.Time) bool {
	b.t.Helper()
	for _, at := range strings.Fields(b.sh("cut -d' ' -f4 /workspace/ticks")) {
		seconds, err := strconv.ParseFloat(at, 64)
		if err != nil {
			b.t.Fatal(err)
		}
		if tick := time.Unix(0, int64(seconds*1e9)); tick.After(from) && tick.Before(to) {
			return true
		}
	}
	return false
}

// kill -9 of the sandbox's own processes: failed with its disk, and resumable (S8).
func TestSandboxKilled(t *testing.T) {
	b := newBox(t)
	b.furnish()
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	id := b.get().ID
	if out, err := exec.Command("pkill", "-9", "-f", "runsc-sandbox.*"+filepath.Join(l.run(), "sb", id)).CombinedOutput(); err != nil {
		t.Fatalf("pkill: %v %s", err, out)
	}
	if got := b.becomes("failed"); got.Reason != "crashed" {
		t.Errorf("after kill -9: %+v", got)
	}
	b.hutch("resume")
	b.filesAreThere()
}

// A damaged saved memory is refused as data_corrupt; the sandbox sleeps on, and goes
// on from its disk.
func TestDamagedImage(t *testing.T) {
	b := newBox(t)
	b.furnish()
	b.hutch("sleep")
	dir := filepath.Join(shared.data(), "pool", "saves", b.get().ID, "1", "mem")
	pages := filepath.Join(dir, "pages.img")
	info, err := os.Stat(pages)
	if err != nil {
		t.Fatal(err)
	}
	flip(t, pages, info.Size()/2)
	hutchFails(t, "data_corrupt", "wake", b.name)
	b.is("sleeping")
	flip(t, pages, info.Size()/2) // whole again
	b.hutch("wake")
	b.waitTicks(b.ticks())
	b.hutch("sleep")
	dir = filepath.Join(shared.data(), "pool", "saves", b.get().ID, "2", "mem")
	if err := os.Truncate(filepath.Join(dir, "pages.img"), 4096); err != nil {
		t.Fatal(err)
	}
	hutchFails(t, "data_corrupt", "wake", b.name)
	b.hutch("stop")
	b.hutch("resume")
	b.filesAreThere()
}

func flip(t *testing.T, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var one [1]byte
	if _, err := f.ReadAt(one[:], at); err != nil {
		t.Fatal(err)
	}
	one[0] ^= 0x10
	if _, err := f.WriteAt(one[:], at); err != nil {
		t.Fatal(err)
	}
}

func writeFile(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// doctor --clean ends what a dead server left; the next one finds those sandboxes
// ended, with their disks, and goes on.
func TestCleanThenUp(t *testing.T) {
	running, sleeping := newBox(t), newBox(t)
	running.furnish()
	sleeping.furnish()
	sleeping.hutch("sleep")
	r, err := shared.try(time.Minute, nil, "doctor", "--clean", "--data", shared.data())
	if err != nil || !strings.Contains(r.stdout, "clean: 0 things") {
		t.Errorf("while the server runs: %v %s", err, r)
	}
	running.waitTicks(running.ticks())
	shared.kill()
	// Nobody is there to ask: what runs goes on.
	if r, _ := shared.try(time.Minute, nil, "doctor", "--clean", "--data", shared.data()); r.code != 2 || !strings.Contains(r.stderr, "add --yes") ||
		!strings.Contains(r.stderr, "that still run") {
		t.Errorf("doctor --clean without an answer: %s", r)
	}
	if r, _ := shared.try(time.Minute, nil, "doctor", "--data", shared.data()); !strings.Contains(r.stdout, "without a server: ") ||
		!strings.Contains(r.stdout, "takes ") || !strings.Contains(r.stdout, "nothing is left that nobody owns") {
		t.Errorf("doctor: %s", r)
	}
	if r, err := shared.try(time.Minute, nil, "doctor", "--clean", "--yes", "--data", shared.data()); err != nil || !strings.Contains(r.stdout, "clean:") {
		t.Fatalf("doctor --clean: %v %s", err, r)
	}
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	if left := residue(l); left != "" {
		t.Errorf("after doctor --clean: %s", left)
	}
	if out, err := exec.Command("nft", "list", "table", "inet", "hutch-"+l.tag).CombinedOutput(); err == nil {
		t.Errorf("the host's rules are left: %s", out)
	}
	if _, err := os.Stat(l.run()); err == nil {
		t.Errorf("%s is left", l.run())
	}
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	if got := running.becomes("failed"); got.Reason != "crashed" || !strings.Contains(got.Message, "`hutch doctor --clean`") {
		t.Errorf("what ran is %+v", got)
	}
	running.hutch("resume")
	running.filesAreThere()
	sleeping.is("sleeping")
	sleeping.hutch("wake")
	sleeping.waitTicks(sleeping.ticks())
}
