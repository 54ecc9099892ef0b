package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Nothing is lost and nothing is orphaned, whatever dies when: sandboxes are worked with
// while the server, sentries and gofers are killed at random. `make soak` has the long
// one.
func TestStorm(t *testing.T) {
	st := newStorm(t, 4)
	st.rage(10, 200*time.Millisecond, 2500*time.Millisecond)
	t.Log(st.report())
}

// storm is a mixed load under random kills.
type storm struct {
	t      *testing.T
	s      *server
	label  string
	seed   uint64
	actors []*actor
	before footprint
	over   atomic.Bool

	mu    sync.Mutex
	verbs map[string]int
	kills map[string]int
	lines int
}

// actor works with one sandbox. It knows what was acknowledged to it.
type actor struct {
	*storm
	name string
	rng  *rand.Rand
	last int // the last line that was acknowledged in the sandbox's log
	next int

	program string // the token in the memory of the program that runs, "" for none

	mu     sync.Mutex
	killed int // how often its runtime was killed
	seen   int // of those, how many its actor has taken into account
}

func newStorm(t *testing.T, count int) *storm {
	st := &storm{t: t, s: shared, seed: uint64(time.Now().UnixNano()), verbs: map[string]int{}, kills: map[string]int{}}
	st.label = "storm=" + strings.ToLower(strconv.FormatUint(st.seed, 36))
	first := newName(t) // mounts the template, which then stays
	hutchOK(t, "new", "--name", first)
	hutchOK(t, "delete", first, "--yes", "--permanent")
	st.before = shared.footprint(t)
	t.Logf("seed %d", st.seed)
	for i := range count {
		a := &actor{storm: st, name: newName(t), rng: rand.New(rand.NewPCG(st.seed, uint64(i))), next: 1}
		hutchOK(t, "new", "--name", a.name, "--label", st.label, "--memory", "512MiB")
		st.actors = append(st.actors, a)
	}
	t.Cleanup(func() { _, _ = shared.try(5*time.Minute, nil, "delete", "--label", st.label, "--yes", "--permanent") })
	return st
}

// rage works and kills until so many were killed, with a random time between least and
// most from one to the next, and then looks at what is left.
func (st *storm) rage(kills int, least, most time.Duration) {
	var wg sync.WaitGroup
	for _, a := range st.actors {
		wg.Go(func() {
			for !st.over.Load() && !st.t.Failed() {
				a.step()
			}
		})
	}
	rng := rand.New(rand.NewPCG(st.seed, 1<<32))
	for killed := 0; killed < kills && !st.t.Failed(); {
		time.Sleep(least + time.Duration(rng.Int64N(int64(most-least))))
		if st.kill(rng) {
			killed++
		}
	}
	st.over.Store(true)
	wg.Wait()
	if st.t.Failed() {
		return
	}
	for _, a := range st.actors {
		wg.Go(func() { a.settle() })
	}
	wg.Wait()
	if _, err := st.s.try(10*time.Minute, nil, "delete", "--label", st.label, "--yes", "--permanent"); err != nil {
		st.t.Error(err)
	}
	if after := st.s.footprint(st.t); after.exceeds(st.before) { // less where what other tests deleted was erased meanwhile
		st.t.Errorf("the installation holds %+v, and held %+v before the storm", after, st.before)
	}
}

// kill ends one process with kill -9: the server, which is started again, or the
// sentry or the gofer of a sandbox. It says whether there was one.
func (st *storm) kill(rng *rand.Rand) bool {
	kind := "server"
	if n := rng.IntN(10); n >= 8 {
		kind = "gofer"
	} else if n >= 5 {
		kind = "sentry"
	}
	if kind == "server" {
		st.s.kill()
		time.Sleep(time.Duration(rng.IntN(700)) * time.Millisecond)
		if err := st.s.start(); err != nil {
			st.t.Errorf("the server does not come back: %v", err)
			return false
		}
	} else if !st.actors[rng.IntN(len(st.actors))].lose(kind) {
		return false
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.kills[kind]++
	return true
}

// lose kills a process of the sandbox's runtime, if it runs.
func (a *actor) lose(kind string) bool {
	info, err := a.get()
	if err != nil {
		return false
	}
	l, err := layoutOf(a.s.data())
	if err != nil {
		a.t.Error(err)
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.killed++ // before it dies: its actor may see it at once
	pattern := fmt.Sprintf("runsc-%s.*%s", map[string]string{"sentry": "sandbox", "gofer": "gofer"}[kind], filepath.Join(l.run(), "sb", info.ID))
	return exec.Command("pkill", "-9", "-f", pattern).Run() == nil
}

// excused says whether the sandbox's runtime was killed since its actor last asked.
func (a *actor) excused() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.killed > a.seen
	a.seen = a.killed
	return was
}

func (a *actor) murdered() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.killed > a.seen
}

// run runs the command line. It gives up at once where no server answers its first
// call, so that is tried again.
func (a *actor) run(args ...string) (result, error) {
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		r, err := a.s.try(5*time.Minute, nil, args...)
		if err == nil || !strings.Contains(r.stderr, "no server answers") || time.Since(began) > 2*time.Minute {
			return r, err
		}
	}
}

func (a *actor) get() (boxInfo, error) {
	var info boxInfo
	r, err := a.run("get", a.name, "--json")
	if err == nil {
		err = json.Unmarshal([]byte(r.stdout), &info)
	}
	return info, err
}

// verb runs a verb of the command line, which outlasts the server's restarts by
// itself. It must succeed, unless the sandbox's runtime was killed.
func (a *actor) verb(args ...string) (string, bool) {
	r, err := a.run(args...)
	a.storm.mu.Lock()
	a.verbs[args[0]]++
	a.storm.mu.Unlock()
	if err != nil && !a.murdered() {
		a.t.Errorf("nothing of %s was killed but the server: %v", a.name, err)
	}
	return r.stdout, err == nil
}

// sh runs a shell line in a sandbox. A cut that tells no exit code is no answer, and
// proves nothing; so it is asked again where the answer is needed.
func (a *actor) sh(name, script string) (string, bool) {
	r, err := a.run("exec", name, "--", "sh", "-c", script)
	a.storm.mu.Lock()
	a.verbs["exec"]++
	a.storm.mu.Unlock()
	return strings.TrimSpace(r.stdout), err == nil
}

func (a *actor) step() {
	info, err := a.get()
	if err != nil {
		a.t.Errorf("get %s: %v", a.name, err)
		return
	}
	switch info.State {
	case "ready":
		switch a.rng.IntN(10) {
		case 0, 1, 2:
			a.write()
		case 3, 4:
			a.check(a.name, true)
		case 5, 6:
			a.verb("sleep", a.name)
		case 7:
			if _, ok := a.verb("stop", a.name); ok {
				a.program = ""
			}
		case 8:
			a.fork("live", true)
		case 9:
			a.fork("disk", false)
		}
	case "sleeping":
		switch a.rng.IntN(6) {
		case 0:
			a.write() // wakes it
		case 1:
			a.fork("live", true)
		case 2:
			if _, ok := a.verb("stop", a.name); ok {
				a.program = ""
			}
		default:
			if _, ok := a.verb("wake", a.name); ok {
				a.check(a.name, true)
			}
		}
	case "stopped":
		a.program = ""
		if a.rng.IntN(3) == 0 {
			a.fork("disk", false)
		}
		a.resume()
	case "failed":
		if !a.excused() {
			a.t.Errorf("%s is failed (%s), and nothing of it was killed", a.name, info.Reason)
			return
		}
		a.program = ""
		a.resume()
	default:
		a.t.Errorf("%s is %s", a.name, info.State)
	}
}

func (a *actor) resume() {
	if _, ok := a.verb("resume", a.name); ok {
		a.check(a.name, false)
	}
}

// write appends a line to the sandbox's log. It counts when it was acknowledged.
func (a *actor) write() {
	if a.program == "" {
		a.start()
	}
	n := a.next
	a.next++
	if _, ok := a.sh(a.name, fmt.Sprintf("echo line %d. >> /workspace/log && sync /workspace/log && sync", n)); ok {
		a.last = n
		a.storm.mu.Lock()
		a.lines++
		a.storm.mu.Unlock()
	}
}

// start runs a program that only memory keeps.
func (a *actor) start() {
	token := fmt.Sprintf("%s-%d", a.name, a.rng.Uint64())
	out, ok := a.sh(a.name, fmt.Sprintf(`t=%s; (trap '' HUP; i=0; while :; do i=$((i+1)); echo $t $i > /tmp/tick.new; mv /tmp/tick.new /tmp/tick; sleep 0.3; done) > /dev/null 2>&1 < /dev/null &
echo started`, token))
	if ok && out == "started" {
		a.program = token
	}
}

// check looks in the sandbox, or a fork of it, for every line that was acknowledged
// and for the program that was never stopped.
func (a *actor) check(name string, program bool) {
	const script = `cat /workspace/log 2>/dev/null; echo; a=$(cat /tmp/tick 2>/dev/null); for k in 1 2 3 4 5 6 7 8 9 10; do sleep 0.4; b=$(cat /tmp/tick 2>/dev/null); test "$a" != "$b" && break; done; echo "tick ${a% *} $(test "$a" != "$b" && echo on)"`
	was := a.program
	out, ok := a.sh(name, script)
	if !ok || a.murdered() {
		return
	}
	got := map[string]bool{}
	for line := range strings.Lines(out) {
		got[strings.TrimSpace(line)] = true
	}
	if a.last > 0 && !got[fmt.Sprintf("line %d.", a.last)] {
		a.t.Errorf("%s: line %d was acknowledged and is not there: %q", name, a.last, out)
	}
	if program && was != "" && !got["tick "+was+" on"] {
		a.t.Errorf("%s: the program %s was never stopped and does not run: %q", name, was, out)
	}
}

// fork copies the sandbox, looks into the copy and deletes it.
func (a *actor) fork(mode string, program bool) {
	out, ok := a.verb("fork", a.name, "--mode", mode, "--json")
	if !ok {
		return
	}
	var body struct {
		Forks []struct {
			Sandbox struct{ Name string }
		}
	}
	if err := json.Unmarshal([]byte(out), &body); err != nil || len(body.Forks) != 1 {
		a.t.Errorf("fork of %s: %v: %s", a.name, err, out)
		return
	}
	name := body.Forks[0].Sandbox.Name
	a.check(name, program)
	a.verb("delete", name, "--yes", "--permanent")
}

// settle looks at the sandbox when nothing is killed any more.
func (a *actor) settle() {
	info, err := a.get()
	if err != nil {
		a.t.Error(err)
		return
	}
	switch info.State {
	case "failed":
		if !a.excused() {
			a.t.Errorf("%s is failed (%s), and nothing of it was killed", a.name, info.Reason)
		}
		a.program = ""
		a.resume()
	case "stopped":
		a.program = ""
		a.resume()
	case "sleeping":
		a.verb("wake", a.name)
	}
	if a.excused() {
		a.program = ""
	}
	a.check(a.name, true)
	out, ok := a.sh(a.name, "cat /workspace/log 2>/dev/null; true")
	if !ok {
		a.t.Errorf("%s answers nothing after the storm", a.name)
	}
	if a.last > 0 && !strings.Contains(out, fmt.Sprintf("line %d.", a.last)) {
		a.t.Errorf("%s: line %d was acknowledged and is not there: %q", a.name, a.last, out)
	}
}

func (st *storm) report() string {
	return fmt.Sprintf("%d sandboxes; killed: %v; %d lines acknowledged, all there; verbs: %v", len(st.actors), st.kills, st.lines, st.verbs)
}

// footprint is what an installation holds in the kernel.
type footprint struct{ mounts, loops, processes, namespaces int }

func (f footprint) exceeds(g footprint) bool {
	return f.mounts > g.mounts || f.loops > g.loops || f.processes > g.processes || f.namespaces > g.namespaces
}

func (s *server) footprint(t *testing.T) footprint {
	t.Helper()
	l, err := layoutOf(s.data())
	if err != nil {
		t.Fatal(err)
	}
	var f footprint
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, l.data) || strings.Contains(line, l.run()) {
			f.mounts++
		}
	}
	loops, _ := exec.Command("losetup", "-l", "-n", "-O", "BACK-FILE").Output()
	f.loops = strings.Count(string(loops), l.data)
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range all {
		if text, _ := os.ReadFile(p); strings.Contains(string(text), l.run()+"/") {
			f.processes++
		}
	}
	spaces, _ := filepath.Glob("/run/netns/*" + l.tag + "-sbx_*") // without those that are kept ready
	f.namespaces = len(spaces)
	return f
}
