package hostagent

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

const (
	colSentry = "sentry killed"
	colGofer  = "gofer killed"
	colState  = "state after"
	colAnswer = "wake"
)

var (
	realKills = proofs.Table("Real sandboxes: the agent's process killed", "A process with the real disk pool, network and gVisor, killed with SIGKILL by itself at the instant.",
		"instant", "before", "after")
	realDeaths = proofs.Table("Real sandboxes: their processes killed", "",
		"while", colSentry, colGofer)
	realSaves = proofs.Table("Real sandboxes: failed saves (Z10)", "",
		"fault", colState)
	realPower = proofs.Table("Real sandboxes: power cut in the middle of a save", "What was not synced is dropped: the pool goes on from a copy of its file as it lay on the host's disk.",
		"instant", colState)
	realDamage = proofs.Table("Real sandboxes: a damaged saved memory", "It sleeps on after each, is stopped and resumes from its disk, and one of them is deleted.",
		"damage", colAnswer)
)

// A sampled set of the kills above on the real parts: the process of the agent is
// killed, the next one finishes its verb.
func TestRealKills(t *testing.T) {
	t.Parallel()
	r := newReal(t)
	row := 0
	kill := func(verb sandbox.Verb, name string, nth int, afters ...bool) {
		for _, after := range afters {
			// To where the verb can be asked.
			switch state := r.book.state(sb); {
			case verb == sandbox.Wake && state == sandbox.Ready:
				r.must(sandbox.Sleep)
			case verb == sandbox.Resume && state == sandbox.Ready:
				r.must(sandbox.Stop)
			}
			cmd := r.command(verb)
			r.killedIn(cmd, name, nth, after)
			if f := r.run(cmd); f != nil {
				t.Fatalf("%s, killed at %s: %+v", verb, name, f)
			}
			if verb == sandbox.Create {
				r.leave()
			}
			state := r.sound()
			column := "before"
			if after {
				column = "after"
			}
			if !t.Failed() {
				realKills.Prove(row, fmt.Sprintf("%s: `%s`", verb, name), column, "done: "+state)
			}
		}
		row++
	}
	kill(sandbox.Create, "step boot", 1, true)
	kill(sandbox.Sleep, "step capture", 1, true)
	kill(sandbox.Sleep, "journal: committed", 1, false, true)
	kill(sandbox.Wake, "step restore", 1, true)
	kill(sandbox.Wake, "journal: committed", 1, false, true)
	kill(sandbox.Stop, "journal: committed", 1, false, true)
	kill(sandbox.Resume, "journal: ended", 1, false, true)
	kill(sandbox.Delete, "step kill", 1, true)
}

// The machine loses power in the middle of a save. Before its commit record what ran is
// failed (host_restarted) with the disk that was synced; after it, it sleeps, and its
// memory is whole (S8, D1).
func TestRealPowerCut_S8(t *testing.T) {
	t.Parallel()
	r := newReal(t)
	if _, err := os.Stat(filepath.Join(r.Dir, "pool.img")); err != nil {
		why := "the pool is not a file here, so it cannot be copied as a power cut would leave it"
		realPower.NotRun(why)
		t.Skip(why)
	}
	r.must(sandbox.Create)
	r.leave()
	for n, c := range []struct {
		name  string
		after bool
		want  sandbox.State
	}{
		{"step capture", true, sandbox.Failed},
		{"step seal", true, sandbox.Failed},
		{"journal: committed", false, sandbox.Failed},
		{"journal: committed", true, sandbox.Sleeping},
		{"step erase", true, sandbox.Sleeping},
	} {
		cmd := r.command(sandbox.Sleep)
		r.powerCut(cmd, c.name, c.after)
		f := r.run(cmd)
		state := r.book.state(sb)
		r.soon("the state", func() bool { state = r.book.state(sb); return state != sandbox.Ready })
		if state != c.want || (f == nil) != (c.want == sandbox.Sleeping) {
			t.Errorf("%s: it is %s, and the sleep ended with %+v", c.name, state, f)
		}
		r.sound()
		when := "before"
		if c.after {
			when = "after"
		}
		r.prove(realPower, n, fmt.Sprintf("sleep: %s `%s`", when, c.name), colState, string(state))
	}
}

// pids gives the processes of the sandbox's boot.
func (r *real) pids() (sentry, gofer int) {
	r.t.Helper()
	files, _ := filepath.Glob(filepath.Join(r.Run, "sb", sb, "*", "hutch.json"))
	for _, f := range files {
		var rec struct{ Sandbox, Gofer struct{ PID int } }
		data, err := os.ReadFile(f)
		if err == nil && json.Unmarshal(data, &rec) == nil && rec.Sandbox.PID > 0 {
			return rec.Sandbox.PID, rec.Gofer.PID
		}
	}
	r.t.Fatalf("no boot is on record: %v", files)
	return 0, 0
}

// runs says whether a sentry of the sandbox lives.
func (r *real) runs() bool {
	files, _ := filepath.Glob(filepath.Join(r.Run, "sb", sb, "*", "hutch.json"))
	for _, f := range files {
		var rec struct{ Sandbox struct{ PID int } }
		data, err := os.ReadFile(f)
		if err != nil || json.Unmarshal(data, &rec) != nil {
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", rec.Sandbox.PID))
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			return true
		}
	}
	return false
}

// hook puts something before a step of the agents that come.
func (r *real) hook(f func(verb sandbox.Verb, step string)) {
	r.stop()
	r.pts.step = func(ctx context.Context, _ string, verb sandbox.Verb, step string, do func(context.Context) error) error {
		f(verb, step)
		return do(ctx)
	}
	r.start()
}

// The sandbox's own processes are killed in each state in which it has any.
func TestRealDeaths(t *testing.T) {
	t.Parallel()
	r := newReal(t)
	var victim, at string
	r.hook(func(verb sandbox.Verb, step string) {
		if at == string(verb)+" "+step {
			at = ""
			r.slay(victim)
		}
	})
	r.must(sandbox.Create)
	r.leave()
	for _, victim = range []string{colSentry, colGofer} {
		r.slay(victim)
		r.soon("failed", func() bool { return r.book.state(sb) == sandbox.Failed })
		r.prove(realDeaths, 0, "ready", victim, r.sound())
		for n, when := range []string{"sleep capture", "sleep clone", "wake verify", "wake run", "stop shutdown", "resume init"} {
			if victim == colGofer && n > 0 && when != "wake verify" {
				continue // the gofer's end is the sentry's, see TestGoferDies_S8
			}
			verb := sandbox.Verb(strings.Fields(when)[0])
			switch verb {
			case sandbox.Wake:
				r.must(sandbox.Sleep)
			case sandbox.Resume:
				r.must(sandbox.Stop)
			}
			cmd := r.command(verb)
			at = when
			f := r.run(cmd)
			r.soon("the end to be told", func() bool { return r.book.state(sb) != sandbox.Ready || r.runs() })
			state := r.sound()
			text := "done: " + state
			if f != nil {
				text = "undone: " + state
			}
			r.prove(realDeaths, n+1, "`"+when+"`", victim, text)
		}
	}
}

func (r *real) slay(victim string) {
	sentry, gofer := r.pids()
	pid := sentry
	if victim == colGofer {
		pid = gofer
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		r.t.Error(err)
	}
	// The end is seen by whoever waits for it.
	r.soon("the end of the sentry", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", sentry))
		return err != nil || strings.Contains(string(stat), ") Z ")
	})
}

type prover interface {
	Prove(order int, row, column, outcome string)
}

func (r *real) prove(table prover, order int, row, column, text string) {
	if !r.t.Failed() {
		table.Prove(order, row, column, text)
	}
}

// Saves that fail on the real runtime: the sentry hangs while its memory is read, or
// cannot write it. A sandbox that can be thawed answers; one that cannot is told as
// guest_silent until it can.
func TestRealFailedSaves_Z10(t *testing.T) {
	t.Parallel()
	r := newReal(t)
	mode := ""
	r.stop()
	r.pts.limit = func(_ string, _ sandbox.Verb, step string) time.Duration {
		if mode == "stopped" && step == sandbox.StepCapture {
			return time.Second
		}
		return time.Minute
	}
	r.pts.step = func(ctx context.Context, _ string, verb sandbox.Verb, step string, do func(context.Context) error) error {
		if verb != sandbox.Sleep || step != sandbox.StepCapture {
			return do(ctx)
		}
		switch mode {
		case "stopped":
			sentry, _ := r.pids()
			_ = syscall.Kill(sentry, syscall.SIGSTOP)
		case "late":
			_ = do(ctx)
			return errMade
		}
		return do(ctx)
	}
	r.start()
	r.must(sandbox.Create)
	r.leave()
	g, err := r.agent.Guest(t.Context(), sb, hostproto.UseSession)
	if err != nil {
		t.Fatal(err)
	}
	mode = "stopped"
	f := r.run(r.command(sandbox.Sleep))
	if f == nil || f.Kind != string(fault.DeadlineExceeded) {
		t.Fatalf("the sleep of a stopped sentry: %+v", f)
	}
	if got := fmt.Sprint(r.book.state(sb), r.book.conditions(sb)); got != "ready[guest_silent save_failed]" {
		t.Errorf("with a stopped sentry it is %s", got)
	}
	r.prove(realSaves, 0, "the sentry stands still in `capture` and cannot be let run", colState, "ready, guest_silent, save_failed")
	sentry, _ := r.pids()
	if err := syscall.Kill(sentry, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	mode = ""
	r.soon("the end of guest_silent", func() bool { return fmt.Sprint(r.book.conditions(sb)) == "[save_failed]" })
	r.find()
	r.prove(realSaves, 1, "it goes on: the agent lets it run", colState, "ready, save_failed")
	mode = "late"
	if f := r.run(r.command(sandbox.Sleep)); f == nil {
		t.Fatal("the sleep succeeded")
	}
	r.find()
	r.prove(realSaves, 2, "`capture` fails when the memory is written already", colState, "ready, save_failed")
	mode = ""
	if again, err := r.agent.Guest(t.Context(), sb, hostproto.UseSession); err != nil || again.Token != g.Token {
		t.Errorf("it was booted anew: %v", err)
	}
	r.must(sandbox.Sleep)
	if left := r.book.conditions(sb); len(left) > 0 {
		t.Errorf("after the retry: %v", left)
	}
	r.prove(realSaves, 3, "the retry", colState, string(r.book.state(sb)))
	r.sound()
}

// Any flipped bit, any missing or cut file of a saved memory is refused as
// data_corrupt before a program runs; the disk resumes, and it can be deleted.
func TestRealDamagedMemory(t *testing.T) {
	t.Parallel()
	r := newReal(t)
	r.must(sandbox.Create)
	r.leave()
	r.must(sandbox.Sleep)
	dirs, _ := filepath.Glob(filepath.Join(r.pool.Dir(), "saves", sb, "*", "mem"))
	if len(dirs) != 1 {
		t.Fatalf("saves: %v", dirs)
	}
	files, err := os.ReadDir(dirs[0])
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	row := 0
	for _, e := range files {
		path := filepath.Join(dirs[0], e.Name())
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		flip := func(at int) []byte {
			bad := append([]byte(nil), data...)
			bad[at] ^= 0x10
			return bad
		}
		type damage struct {
			name string
			data []byte
		}
		damages := []damage{{"a byte too long", append(slices.Clone(data), 0)}, {"missing", nil}}
		if len(data) > 0 {
			damages = append(damages, damage{"the first byte flipped", flip(0)},
				damage{"a byte in the middle flipped", flip(len(data) / 2)}, damage{"cut in half", data[:len(data)/2]})
		}
		for _, d := range damages {
			if d.name == "missing" {
				err = os.Remove(path)
			} else {
				err = os.WriteFile(path, d.data, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			f := r.run(r.command(sandbox.Wake))
			if f == nil || f.Kind != string(fault.DataCorrupt) {
				t.Errorf("%s %s: %+v", e.Name(), d.name, f)
			}
			if got := r.book.state(sb); got != sandbox.Sleeping {
				t.Fatalf("%s %s: it is %s", e.Name(), d.name, got)
			}
			if left := r.processes(); len(left) > 0 {
				t.Errorf("%s %s: %v run", e.Name(), d.name, left)
			}
			r.prove(realDamage, row, "`"+e.Name()+"` "+d.name, colAnswer, "data_corrupt: sleeping")
			row++
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dirs[0], files[0].Name())
	if err := os.Truncate(path, 7); err != nil {
		t.Fatal(err)
	}
	r.must(sandbox.Stop)
	r.must(sandbox.Resume)
	r.find()
	r.must(sandbox.Sleep)
	dirs, _ = filepath.Glob(filepath.Join(r.pool.Dir(), "saves", sb, "*", "mem", "*"))
	if err := os.Truncate(dirs[0], 7); err != nil {
		t.Fatal(err)
	}
	r.must(sandbox.Delete)
	if got := r.sound(); got != string(sandbox.Deleted) {
		t.Errorf("it is %s", got)
	}
}

// A test that fails between two agents leaves nothing behind either: the clean-up, which
// looks for what is left, finds the sandbox that still runs.
func TestRealCleanUp(t *testing.T) {
	t.Parallel()
	r := newReal(t)
	r.must(sandbox.Create)
	r.stop()
}
