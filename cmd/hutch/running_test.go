package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/config"
)

// What an operator does with the installation as a whole. These tests end the shared
// server, so they do not run beside others.

// R7: what runs when the machine goes down is put to sleep, and is back with its memory
// after the next start; what slept or was stopped is as it was.
func TestMachineGoesDown(t *testing.T) {
	running, sleeping, stopped := newBox(t), newBox(t), newBox(t)
	running.furnish()
	sleeping.hutch("sleep")
	stopped.hutch("stop")
	ticks := running.ticks()
	out := hutchOK(t, "down", "--sleep", "--data", shared.data())
	if !strings.Contains(out, "1 sandbox sleeps; the next `hutch up` brings it back") {
		t.Errorf("it said %q", out)
	}
	<-shared.ended
	if out := hutchOK(t, "doctor", "--json", "--data", shared.data()); !strings.Contains(out, `"sandboxes": []`) {
		t.Errorf("a sandbox runs on: %s", out)
	}
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	running.becomes("ready")
	running.waitTicks(ticks) // its memory goes on
	running.filesAreThere()
	sleeping.is("sleeping")
	stopped.is("stopped")
	if _, err := os.Stat(filepath.Join(shared.data(), "rest.json")); err == nil {
		t.Error("what was brought back is still on record")
	}
}

// R9: a backup is made beside the server. After it was put back the host's facts win:
// nothing is lost or done twice, and what was made since can be taken in.
func TestBackupAndRestore(t *testing.T) {
	kept, gone := newBox(t), newBox(t)
	kept.sh("echo kept > note")
	backup := filepath.Join(t.TempDir(), "backup.tar")
	hutchOK(t, "backup", "create", "--to", backup, "--data", shared.data())
	hutchFailsRaw(t, "failed_precondition", []string{"backup", "restore", backup, "--json", "--data", shared.data()}) // a server uses it
	kept.sh("echo later >> note")
	kept.hutch("sleep")
	gone.hutch("delete", "--yes", "--permanent") // else the host still has it, and tells so
	fresh := newBox(t)
	fresh.sh("echo fresh > note")
	want := kept.get()

	hutchOK(t, "down", "--data", shared.data())
	<-shared.ended
	out := hutchOK(t, "backup", "restore", backup, "--yes", "--json", "--data", shared.data())
	var told struct{ Unknown []string }
	if err := json.Unmarshal([]byte(out), &told); err != nil || !slices.Equal(told.Unknown, []string{fresh.name}) {
		t.Errorf("%v: %s", err, out)
	}
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	if got := kept.get(); got.State != "sleeping" || got.Generation != want.Generation {
		t.Errorf("it is %+v, and was %+v", got, want)
	}
	if got := kept.sh("cat note"); got != "kept\nlater" { // the command wakes it
		t.Errorf("the disk has %q", got)
	}
	if got := gone.get(); got.State != "failed" || got.Reason != "host_lost" {
		t.Errorf("what was deleted since is %+v", got)
	}
	hutchFails(t, "not_found", "get", fresh.name)
	shared.kill()
	args := shared.args
	shared.args = append(slices.Clone(args), "--adopt", "all")
	err := shared.start()
	shared.args = args
	if err != nil {
		t.Fatal(err)
	}
	fresh.is("ready")
	if got := fresh.sh("cat note"); got != "fresh" {
		t.Errorf("what was taken in has %q", got)
	}
	fresh.hutch("sleep")
	hutchOK(t, "bill", "--verify")
}

// R8: a new version takes the place of a running server, with its flags, and sandboxes go
// on meanwhile.
func TestUpgradeInPlace(t *testing.T) {
	b := newBox(t)
	b.furnish()
	before := b.get()
	dir := t.TempDir()
	for _, name := range programs {
		if err := copyProgram(filepath.Join(filepath.Dir(binary), name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	upgrade := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(filepath.Join(dir, "hutch"), append([]string{"upgrade", "--data", shared.data()}, args...)...)
		cmd.Env = shared.environ()
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("upgrade: %v: %s", err, out)
		}
		return string(out)
	}
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	old, err := l.readServer()
	if err != nil {
		t.Fatal(err)
	}
	upgrade("--check")
	if now, err := l.readServer(); err != nil || now.PID != old.PID {
		t.Fatalf("a check changed the server: %+v, %v", now, err)
	}
	begin := time.Now()
	upgrade()
	<-shared.ended
	now, err := l.readServer()
	if err != nil || now.PID == old.PID || now.URL != old.URL {
		t.Errorf("the server is %+v and was %+v, %v", now, old, err)
	}
	if exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", now.PID)); exe != filepath.Join(dir, "hutch") {
		t.Errorf("it runs from %s", exe)
	}
	if got := b.get(); got.State != "ready" || got.Generation != before.Generation {
		t.Errorf("the sandbox is %+v and was %+v", got, before)
	}
	b.waitTicks(b.ticks())
	if !b.tickedBetween(begin, time.Now()) {
		t.Error("its program stood still")
	}
	if len(l.backupFiles()) == 0 {
		t.Error("the database was not backed up")
	}
	hutchOK(t, "down", "--data", shared.data())
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
}

// R10: a prune removes what nothing needs and leaves what has an owner: the program of the
// runtime that a saved memory needs, the template of a sandbox, the newest backup.
func TestPrune(t *testing.T) {
	b := newBox(t)
	b.furnish()
	b.hutch("sleep")
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	// A version of a template that is replaced while a sandbox is on it, which then goes.
	image := filepath.Join(t.TempDir(), "image.tar")
	build := func(content string) string {
		t.Helper()
		writeFile(t, image, dockerTar(t, map[string]string{"etc/content": content}))
		return field(t, hutchOK(t, "templates", "build", "pruned", "--from-oci", image, "--json"), "version")
	}
	first := build("one")
	user := newBox(t, "--template", "pruned")
	second := build("two")
	template := func(digest string) bool {
		_, err := os.Stat(filepath.Join(shared.data(), "pool", "templates", digest))
		return err == nil
	}
	hutchOK(t, "prune", "--data", shared.data())
	if !template(first) || !template(second) {
		t.Fatal("a template that a sandbox is on, or that has the name, was removed")
	}
	user.hutch("delete", "--yes", "--permanent")
	old := filepath.Join(l.binaries(), "0000000000000000", "hutch-runsc")
	if err := os.MkdirAll(filepath.Dir(old), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(old, []byte("#!/bin/sh\necho runsc version of-old\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	aged := func(name string, days int) string {
		path := filepath.Join(l.backups(), name)
		if err := os.MkdirAll(l.backups(), 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, []byte("x"))
		at := time.Now().AddDate(0, 0, -days)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		return path
	}
	// Named so that they come before those that other tests made, and after.
	ancient, newest := aged("hutch-00010101T000000.000Z.tar", 400), aged("hutch-99990101T000000.000Z.tar", 300)
	defer os.Remove(newest)
	for _, dry := range []bool{true, false} {
		args := []string{"prune", "--json", "--data", shared.data()}
		if dry {
			args = append(args, "--dry-run")
		}
		var did pruned
		if err := json.Unmarshal([]byte(hutchOK(t, args...)), &did); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, r := range did.Removed {
			names = append(names, r.Name)
		}
		if !slices.Contains(names, old) || !slices.Contains(names, ancient) || slices.Contains(names, newest) || len(did.Kept) > 0 {
			t.Errorf("dry run %v: %+v", dry, did)
		}
		for _, path := range []string{old, ancient} {
			if _, err := os.Stat(path); (err == nil) != dry {
				t.Errorf("dry run %v: %s: %v", dry, path, err)
			}
		}
	}
	if _, err := os.Stat(newest); err != nil {
		t.Error(err)
	}
	if template(first) || !template(second) {
		t.Errorf("of the replaced version is there: %v, of the present one: %v", template(first), template(second))
	}
	b.hutch("wake") // by the program that saved it
	b.waitTicks(b.ticks())
	b.forks(1, "--mode", "disk") // on its template
}

// tree lists what lies below a directory, with the kind of each.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		list = append(list, strings.TrimPrefix(path, root)+" "+d.Type().String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// R10: what an installation put on a machine is gone after `uninstall --purge`, and all
// but its data after `uninstall`.
func TestUninstall(t *testing.T) {
	t.Parallel()
	s, err := newServer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.kill()
		_, gone := os.Lstat(s.data())
		if gone != nil {
			err = os.RemoveAll(s.dir)
		} else {
			err = s.remove()
		}
		if err != nil {
			t.Error(err)
		}
	})
	s.pool = "1GB"
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	before := tree(t, root)
	run := func(code int, args ...string) result {
		t.Helper()
		r, _ := s.try(2*time.Minute, nil, args...)
		if r.code != code {
			t.Fatalf("hutch %s: %s", strings.Join(args, " "), r)
		}
		return r
	}
	install := []string{"up", "--install", "--install-root", root, "--data", s.data(), "--config", "/etc/hutch/hutch.toml"}
	run(0, install...)
	run(0, install...) // again
	if _, problems, err := readConfig(filepath.Join(root, "etc/hutch/hutch.toml")); err != nil || len(problems) != 0 {
		t.Errorf("the settings that it wrote: %v %v", problems, err)
	}
	for _, name := range programs {
		if st, err := os.Stat(filepath.Join(root, "usr/local/bin", name)); err != nil || st.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v %v", name, st, err)
		}
	}
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	l, err := layoutOf(s.data())
	if err != nil {
		t.Fatal(err)
	}
	if r := run(2, "uninstall", "--purge", "--data", s.data(), "--config", "/etc/hutch/hutch.toml"); !strings.Contains(r.stderr, "lose for good") || !strings.Contains(r.stderr, s.data()) {
		t.Errorf("it does not name what is lost: %s", r)
	}
	if live, err := l.live(); err != nil || !live {
		t.Fatalf("a no ended the server: %v, %v", live, err)
	}
	at := []string{"--install-root", root, "--config", "/etc/hutch/hutch.toml", "--data", s.data(), "--yes"}
	run(0, append([]string{"uninstall"}, at...)...)
	<-s.ended
	if left := residue(l); left != "" {
		t.Errorf("left in the kernel: %s", left)
	}
	if _, err := os.Stat(l.database()); err != nil {
		t.Errorf("the data is gone without --purge: %v", err)
	}
	after := slices.DeleteFunc(tree(t, root), func(line string) bool { return strings.HasSuffix(line, " d---------") })
	before = slices.DeleteFunc(before, func(line string) bool { return strings.HasSuffix(line, " d---------") })
	if !slices.Equal(before, after) {
		t.Errorf("left on the machine: %v", after)
	}
	if err := s.start(); err != nil { // it goes on from the data
		t.Fatal(err)
	}
	run(0, append([]string{"uninstall", "--purge"}, at...)...)
	<-s.ended
	if _, err := os.Lstat(s.data()); err == nil {
		t.Errorf("the data is there: %v", tree(t, s.data()))
	}
	if _, err := os.Lstat(l.run()); err == nil {
		t.Errorf("the run directory is there")
	}
	if _, err := os.Lstat(s.config()); err == nil {
		t.Error("the context of the command line is there")
	}
	if left := residue(l); left != "" {
		t.Errorf("left in the kernel: %s", left)
	}
	run(0, append([]string{"uninstall", "--purge"}, at...)...) // the goal is reached
	writeFile(t, filepath.Join(root, "etc", "mine"), []byte("x"))
	r := run(2, "uninstall", "--purge", "--yes", "--data", filepath.Join(root, "etc"))
	if _, err := os.Stat(filepath.Join(root, "etc", "mine")); err != nil {
		t.Errorf("somebody else's directory was removed: %v: %s", err, r)
	}
}

// R7: the unit is what systemd takes. It is checked by systemd where that is here.
func TestUnit(t *testing.T) {
	t.Parallel()
	text := unitText(unitSettings{config: "/etc/hutch/hutch.toml", data: "/srv/a b%", home: "/root", stop: 5 * time.Minute})
	for _, want := range []string{
		"ExecStart=/usr/local/bin/hutch up --foreground --config /etc/hutch/hutch.toml\n",
		"ExecStop=/usr/local/bin/hutch down --sleep=machine --config /etc/hutch/hutch.toml\n",
		"KillMode=process\n", "TimeoutStopSec=360\n", "WantedBy=multi-user.target\n",
		"StandardOutput=append:/srv/a\\x20b%%/hutch.log\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the unit lacks %q:\n%s", want, text)
		}
	}
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	dir := t.TempDir()
	unit := filepath.Join(dir, "hutch-test.service")
	// The program of the test stands in for the one that would be installed.
	text = strings.ReplaceAll(unitText(unitSettings{config: "/etc/hutch/hutch.toml", data: "/var/lib/hutch", home: "/root", stop: time.Minute}), "/usr/local/bin/hutch", binary)
	writeFile(t, unit, []byte(text))
	out, err := exec.Command(verify, "verify", "--man=no", unit).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "hutch-test.service") {
			t.Errorf("systemd says: %s", line)
		}
	}
	if err != nil && strings.Contains(string(out), "hutch-test.service") {
		t.Error(err)
	}
}

// R7: only a machine that goes down has its sandboxes put away by the service's stop.
func TestMachineStops(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for said, want := range map[string]bool{"stopping": true, "running": false, "degraded": false} {
		writeFile(t, filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\necho "+said+"\nexit 1\n"))
		if err := os.Chmod(filepath.Join(dir, "systemctl"), 0o755); err != nil {
			t.Fatal(err)
		}
		if got, err := machineStops(t.Context()); err != nil || got != want {
			t.Errorf("%s: %v, %v", said, got, err)
		}
	}
	writeFile(t, filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\nexit 1\n"))
	if _, err := machineStops(t.Context()); err == nil {
		t.Error("a systemd that says nothing")
	}
}

// R5: flags win over variables, those over the file, and that over the defaults; the
// server says what it was started with.
func TestSettingsInForce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "hutch.toml")
	writeFile(t, path, []byte("data = \""+shared.data()+"\"\n[log]\nfiles = 7\n"))
	var shown struct {
		Running  bool
		Settings []shownKey
	}
	if err := json.Unmarshal([]byte(hutchOK(t, "config", "show", "--config", path, "--json")), &shown); err != nil {
		t.Fatal(err)
	}
	got := map[string]shownKey{}
	for _, k := range shown.Settings {
		got[k.Key] = k
	}
	if !shown.Running || len(got) != len(config.Keys) || got[config.Listen].setting != (setting{shared.listen, "--listen"}) ||
		got[config.LogFiles].setting != (setting{"4", "default"}) || got[config.LogFiles].Next == nil || *got[config.LogFiles].Next != (setting{"7", path + ":3"}) {
		t.Errorf("%+v", shown)
	}
	env := []string{"PATH=" + os.Getenv("PATH"), databaseVariable + "=postgres://u:geheim@h/d"}
	cmd := exec.Command(binary, "config", "show", "--config", path, "--data", "/nowhere")
	cmd.Env = env
	out, err := cmd.CombinedOutput()
	if text := string(out); err != nil || strings.Contains(text, "geheim") || !strings.Contains(text, databaseVariable) ||
		!strings.Contains(text, path+":3") || !strings.Contains(text, "--data") {
		t.Errorf("%v: %s", err, out)
	}
	writeFile(t, path, []byte("[log]\nfiles = \"7\"\n"))
	for _, args := range [][]string{{"up"}, {"down"}, {"config", "check"}, {"doctor"}, {"logs"}, {"server"}} {
		r, _ := shared.try(time.Minute, nil, append(args, "--config", path)...)
		if r.code != 2 || !strings.Contains(r.stdout+r.stderr, "line 2: log.files is not a whole number") {
			t.Errorf("%v: %s", args, r)
		}
	}
}

// R10: the log is bounded, is read over its files, and is followed over a turn.
func TestLogIsBounded(t *testing.T) {
	t.Parallel()
	l := layout{data: t.TempDir()}
	writeFile(t, l.oldLog(2), []byte("time=2026-03-01T10:00:00Z level=INFO msg=a\npanic: x\n"))
	writeFile(t, l.oldLog(1), []byte("time=2026-03-01T11:00:00Z level=INFO msg=b\n"))
	writeFile(t, l.log(), []byte("{\"time\":\"2026-03-01T12:00:00.5Z\",\"msg\":\"c\"}\ntrace\n"))
	for _, c := range []struct {
		since time.Time
		lines int
		want  string
	}{
		{time.Time{}, 0, "a panic b c trace"},
		{time.Time{}, 2, "c trace"},
		{time.Date(2026, 3, 1, 10, 30, 0, 0, time.UTC), 0, "b c trace"},
		{time.Date(2026, 3, 1, 12, 0, 1, 0, time.UTC), 0, ""},
	} {
		var out strings.Builder
		if err := showLog(t.Context(), &out, l, c.since, c.lines, false); err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(out.String()) {
			for _, word := range []string{"msg=a", "panic", "msg=b", `"c"`, "trace"} {
				if strings.Contains(line, word) {
					got = append(got, strings.Trim(strings.TrimPrefix(word, "msg="), `"`))
				}
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("since %s, %d lines: %v, want %q", c.since, c.lines, got, c.want)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(showLog(ctx, w, l, time.Time{}, 1, true)) }()
	next := func(want string) {
		t.Helper()
		line := make([]byte, 0, 100)
		one := make([]byte, 1)
		for !strings.HasSuffix(string(line), "\n") {
			if _, err := r.Read(one); err != nil {
				t.Fatal(err)
			}
			line = append(line, one[0])
		}
		if string(line) != want {
			t.Fatalf("it shows %q, want %q", line, want)
		}
	}
	next("trace\n")
	f, err := os.OpenFile(l.log(), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fmt.Fprintln(f, "last of the old")
	if err := os.Rename(l.log(), l.oldLog(1)); err != nil {
		t.Fatal(err)
	}
	writeFile(t, l.log(), []byte("first of the new\n"))
	next("last of the old\n")
	next("first of the new\n")
}

// R10: the server turns its own log, and what it says after that is in the new file.
func TestServerTurnsItsLog(t *testing.T) {
	t.Parallel()
	s, err := newServer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = s.try(time.Minute, nil, "down", "--data", s.data())
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(s.dir, "hutch.toml")
	writeFile(t, path, []byte("data = \""+s.data()+"\"\nlisten = \""+s.listen+"\"\npool_size = \"1GB\"\n[log]\nsize = \"0.2KB\"\nfiles = 2\n"))
	l, err := layoutOf(s.data())
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if r, err := s.try(2*time.Minute, nil, "up", "--no-template", "--config", path); err != nil {
			t.Fatal(r)
		}
		// One that is up already is no error, whatever the file says.
		if r, err := s.try(2*time.Minute, nil, "up", "--no-template", "--config", path); err != nil || !strings.Contains(r.stdout, "hutch is up already") {
			t.Fatal(r)
		}
		if r, err := s.try(2*time.Minute, nil, "down", "--config", path); err != nil {
			t.Fatal(r)
		}
	}
	files, err := filepath.Glob(l.log() + "*")
	if err != nil || len(files) != 3 {
		t.Errorf("%v, %v", files, err)
	}
	for _, path := range files {
		if st, err := os.Stat(path); err != nil || st.Size() > 2000 || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", path, st, err)
		}
	}
	r, err := s.try(time.Minute, nil, "logs", "--config", path, "--tail", "1")
	if err != nil || !strings.Contains(r.stdout, "hutch goes down") {
		t.Errorf("%v: %s", err, r)
	}
}

// R10: `down` says which installation it meant, and which others run.
func TestDownSaysWhich(t *testing.T) {
	t.Parallel()
	nowhere := filepath.Join(t.TempDir(), "data")
	out := hutchOK(t, "down", "--data", nowhere)
	if !strings.Contains(out, "hutch is down already: there is no installation at "+nowhere) || !strings.Contains(out, "another one runs on "+shared.data()) {
		t.Errorf("it says %q", out)
	}
}

// Versions are compared by their numbers, and what has none is not.
func TestOlder(t *testing.T) {
	t.Parallel()
	for pair, want := range map[[2]string]bool{
		{"0.1.0", "0.2.0"}: true, {"0.9.0", "0.10.0"}: true, {"0.2.0", "0.1.9"}: false, {"0.1.0", "0.1.0"}: false,
		{"0.1.0-dev", "0.1.0"}: false, {"v1.0.0", "1.0.1"}: true, {"devel", "9.9.9"}: false, {"1.0.0", "unknown"}: false,
	} {
		if got := older(pair[0], pair[1]); got != want {
			t.Errorf("%s before %s: %v", pair[0], pair[1], got)
		}
	}
}
