package histories

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fakehost"
	"github.com/hutchrun/hutch/internal/fakehost/fakeserver"
	"github.com/hutchrun/hutch/internal/sandbox"
	"github.com/hutchrun/hutch/internal/store"
)

// TestRestartStorm: the processes of the server and the agent are killed with kill -9 at
// random under a mixed load on 500 sandboxes. Afterwards every state agrees with what runs,
// every event is there once, the ledger is what happened, and nothing is left. `make soak`
// has the long one.
func TestRestartStorm_S7_B7_H1(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		st := newStorm(t, url)
		st.rage(500, 6*time.Second)
		t.Log(st.report())
	})
}

// storm is a mixed load on servers that are killed.
type storm struct {
	t     *testing.T
	seed  uint64
	dir   string
	base  fakeserver.Config
	calm  atomic.Bool // nothing more is asked
	names atomic.Int64

	mu    sync.Mutex
	nodes []*node
	kills int
	calls map[string]int
	began time.Time
	key   string // of the API

	follower follower
}

// node is a server that comes back at the same address.
type node struct {
	cfg  fakeserver.Config
	proc *fakeserver.Process
}

// newStorm brings the servers up: one, and on PostgreSQL a second without the machine.
func newStorm(t *testing.T, url string) *storm {
	t.Helper()
	st := &storm{t: t, seed: newSeed(t), dir: quickDir(t), calls: map[string]int{}, began: time.Now()}
	for i := range 2 {
		if i == 1 && url == "" {
			break
		}
		listen, err := freeAddress()
		if err != nil {
			t.Fatal(err)
		}
		n := &node{cfg: fakeserver.Config{Dir: st.dir, Database: url, NoHost: i == 1, Listen: listen, Log: filepath.Join(st.dir, fmt.Sprint("log-", i))}}
		if n.proc, err = fakeserver.Launch(n.cfg); err != nil {
			t.Fatal(err)
		}
		st.key = n.proc.Key
		t.Cleanup(func() { n.proc.Kill() })
		st.nodes = append(st.nodes, n)
	}
	return st
}

// freeAddress finds a port that nothing listens on, below those that the kernel gives to
// outgoing connections.
func freeAddress() (string, error) {
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20000+rand.IntN(12000)))
		if err == nil {
			return l.Addr().String(), l.Close()
		}
	}
	return "", errors.New("no port is free between 20000 and 32000")
}

// keeper works with some of the sandboxes, one call after the other on each, so that it
// knows what each has to be.
type keeper struct {
	*storm
	dice  *rand.Rand
	boxes []*kept
}

// kept is a sandbox as it was acknowledged.
type kept struct {
	id    string
	state sandbox.State
	cells []string // one of them is in memory
	disks []string // one of them is on the disk
}

const keepers = 16

// rage makes the sandboxes, works and kills for a time, and looks at what is left.
func (st *storm) rage(count int, d time.Duration) {
	followed := make(chan struct{})
	ctx, stop := context.WithCancel(st.t.Context())
	defer stop()
	go func() { defer close(followed); st.follow(ctx) }()
	var made, work sync.WaitGroup
	var all []*keeper
	for i := range keepers {
		k := &keeper{storm: st, dice: diceOf(st.seed, "keeper", i)}
		all = append(all, k)
		made.Go(func() {
			for range count / keepers {
				k.create()
			}
		})
	}
	work.Go(func() {
		dice := diceOf(st.seed, "killer")
		for !st.calm.Load() && !st.t.Failed() {
			pause(st.t.Context(), 500*time.Millisecond+time.Duration(dice.Int64N(int64(1500*time.Millisecond))))
			st.kill(dice)
		}
	})
	made.Wait()
	for _, k := range all {
		work.Go(func() {
			for !st.calm.Load() && !st.t.Failed() {
				k.step()
			}
		})
	}
	pause(st.t.Context(), d)
	st.calm.Store(true)
	work.Wait()
	if st.t.Failed() {
		return
	}
	want := map[string]*kept{}
	for _, k := range all {
		for _, b := range k.boxes {
			want[b.id] = b
		}
	}
	st.agrees(want)
	for _, k := range all {
		work.Go(func() { k.settle() })
	}
	work.Wait()
	st.verified()
	st.quiet(map[string]*kept{})
	stop()
	<-followed
	st.told()
}

// kill ends a server with kill -9 and starts it again.
func (st *storm) kill(dice *rand.Rand) {
	n := st.nodes[dice.IntN(len(st.nodes))]
	n.proc.Kill()
	pause(st.t.Context(), time.Duration(dice.IntN(300))*time.Millisecond)
	proc, err := fakeserver.Launch(n.cfg)
	if err != nil {
		st.t.Errorf("the server does not come back: %v", err)
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	n.proc = proc
	st.kills++
}

// errCut says that an answer did not arrive.
var errCut = errors.New("no answer")

// send sends a call once, to the server that has the machine or to any.
func (st *storm) send(ctx context.Context, node int, method, path, key string, body any) (*http.Response, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	var content io.Reader
	if body != nil {
		content = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+st.nodes[node].cfg.Listen+path, content)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+st.key)
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := stormClient.Do(req)
	if err != nil {
		return nil, errors.Join(errCut, err)
	}
	return res, nil
}

var stormClient = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}

// ask sends a call until it is answered, with the same key each time.
func (st *storm) ask(dice *rand.Rand, method, path string, body, answer any) {
	key := ""
	if method != http.MethodGet {
		key = fmt.Sprint("storm-", st.names.Add(1))
	}
	node := 0
	if path != "/v1/sandboxes?wait=1m" { // a creation needs the machine's server
		node = dice.IntN(len(st.nodes))
	}
	for end := time.Now().Add(patience); ; pause(st.t.Context(), 20*time.Millisecond) {
		res, err := st.send(st.t.Context(), node, method, path, key, body)
		var text []byte
		if err == nil {
			text, err = io.ReadAll(res.Body)
			_ = res.Body.Close()
		}
		switch {
		case st.t.Context().Err() != nil:
			return
		case err == nil && res.StatusCode < 300:
			if err := json.Unmarshal(text, answer); err != nil {
				st.t.Errorf("%s %s: %v: %s", method, path, err, text)
			}
			return
		case err == nil && res.StatusCode != http.StatusServiceUnavailable:
			st.t.Errorf("%s %s: %d: %s", method, path, res.StatusCode, text)
			return
		case time.Now().After(end):
			st.t.Errorf("%s %s has no answer: %v: %s", method, path, err, text)
			return
		}
	}
}

// verb asks for a verb and waits for its end, which is success: rivals there are none, and
// a death of a server is no failure of an operation.
func (k *keeper) verb(b *kept, verb string) {
	method, path := http.MethodPost, b.id+"/"+verb+"?wait=1m"
	if verb == "delete" {
		method, path = http.MethodDelete, b.id+"?permanent=true&wait=1m"
	}
	var c api.Change
	k.ask(k.dice, method, "/v1/sandboxes/"+path, nil, &c)
	k.count(verb)
	k.ended(b, c.Operation)
}

func (st *storm) count(call string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.calls[call]++
}

func (k *keeper) ended(b *kept, op *api.Operation) {
	for op != nil && (op.Status == api.OperationStatusPending || op.Status == api.OperationStatusRunning) && !k.t.Failed() {
		next := api.Operation{}
		k.ask(k.dice, http.MethodGet, "/v1/operations/"+op.ID+"?wait=1m", nil, &next)
		op = &next
	}
	if op != nil && op.Status != api.OperationStatusSucceeded {
		k.t.Errorf("%s of %s, which was %s: %s (%+v)", op.Kind, b.id, b.state, op.Status, op.Error)
	}
}

func (k *keeper) create() {
	var c api.Change
	k.ask(k.dice, http.MethodPost, "/v1/sandboxes?wait=1m", map[string]any{}, &c)
	b := &kept{id: c.Sandbox.ID, state: sandbox.Ready, cells: []string{""}, disks: []string{""}}
	k.count("create")
	k.ended(b, c.Operation)
	k.boxes = append(k.boxes, b)
}

// step asks something of one sandbox that its state allows.
func (k *keeper) step() {
	i := k.dice.IntN(len(k.boxes))
	b := k.boxes[i]
	post := func(verb string, to sandbox.State) {
		k.verb(b, verb)
		b.state = to
	}
	n := k.dice.IntN(20)
	switch {
	case n == 0:
		k.verb(b, "delete")
		k.boxes = slices.Delete(k.boxes, i, i+1)
		k.create()
	case n == 1 && b.state != sandbox.Failed:
		k.fork(b)
	case b.state == sandbox.Ready && n < 6:
		k.put(b)
	case b.state == sandbox.Ready && n < 8:
		k.check(b)
	case b.state == sandbox.Ready && n < 13:
		post("sleep", sandbox.Sleeping)
	case b.state == sandbox.Ready && n < 17, b.state == sandbox.Sleeping && n < 6:
		post("stop", sandbox.Stopped)
		b.cells = []string{""}
	case b.state == sandbox.Ready && n == 19:
		k.crash(b)
	case b.state == sandbox.Sleeping && n < 10:
		k.check(b) // wakes it
	case b.state == sandbox.Sleeping:
		post("wake", sandbox.Ready)
	case b.state == sandbox.Stopped, b.state == sandbox.Failed:
		post("resume", sandbox.Ready)
	}
}

// fork copies a sandbox; the copy is the keeper's, and another goes.
func (k *keeper) fork(b *kept) {
	mode := "disk"
	if b.state != sandbox.Stopped && k.dice.IntN(2) == 0 {
		mode = "live"
	}
	var f api.ForkResult
	k.ask(k.dice, http.MethodPost, "/v1/sandboxes/"+b.id+"/fork?wait=1m", map[string]any{"mode": mode}, &f)
	if len(f.Forks) != 1 {
		return
	}
	k.count("fork " + mode)
	k.ended(b, &f.Operation)
	child := &kept{id: f.Forks[0].Sandbox.ID, state: sandbox.Ready, cells: []string{""}, disks: slices.Clone(b.disks)}
	if mode == "live" {
		child.cells = slices.Clone(b.cells)
	}
	k.ended(child, f.Forks[0].Operation)
	k.check(child)
	old := k.dice.IntN(len(k.boxes))
	k.verb(k.boxes[old], "delete")
	k.boxes[old] = child
}

// put writes a value into memory and one onto the disk. Where no answer says that it is
// there, it may be.
func (k *keeper) put(b *kept) {
	value := fmt.Sprint("v", k.names.Add(1))
	cells := []string{value}
	if _, ok := k.command(b, fakehost.Put, value); !ok {
		cells = append(slices.Clone(b.cells), value)
	}
	b.cells = cells
	disks := []string{value}
	if _, ok := k.command(b, fakehost.Write, value); !ok {
		disks = append(slices.Clone(b.disks), value)
	}
	b.disks = disks
}

// check reads both cells, which wakes the sandbox.
func (k *keeper) check(b *kept) {
	for _, c := range []struct {
		word string
		may  *[]string
	}{{fakehost.Get, &b.cells}, {fakehost.Read, &b.disks}} {
		for end := time.Now().Add(patience); ; pause(k.t.Context(), 20*time.Millisecond) {
			out, ok := k.command(b, c.word, "")
			if ok {
				if !slices.Contains(*c.may, out) {
					k.t.Errorf("%s of %s, which is %s, gives %q, and not one of %q", c.word, b.id, b.state, out, *c.may)
				}
				*c.may = []string{out}
				break
			}
			if time.Now().After(end) || k.t.Failed() {
				k.t.Errorf("%s of %s is not answered", c.word, b.id)
				return
			}
		}
	}
	b.state = sandbox.Ready
}

// crash ends a sandbox from inside, and waits until that is told.
func (k *keeper) crash(b *kept) {
	for end := time.Now().Add(patience); ; pause(k.t.Context(), 20*time.Millisecond) {
		k.command(b, fakehost.Crash, "")
		var s api.Sandbox
		k.ask(k.dice, http.MethodGet, "/v1/sandboxes/"+b.id, nil, &s)
		if string(s.State) == string(sandbox.Failed) {
			b.state, b.cells = sandbox.Failed, []string{""}
			return
		}
		if time.Now().After(end) || k.t.Failed() {
			k.t.Errorf("%s does not end: %s", b.id, s.State)
			return
		}
	}
}

// command runs a command once; false is an answer that did not arrive whole.
func (k *keeper) command(b *kept, word, value string) (string, bool) {
	ctx, cancel := context.WithTimeout(k.t.Context(), patience)
	defer cancel()
	body := map[string]any{"command": []string{word, value}}
	res, err := k.send(ctx, 0, http.MethodPost, "/v1/sandboxes/"+b.id+"/commands?follow=true", "", body)
	if err != nil {
		return "", false
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusBadRequest {
		text, _ := io.ReadAll(res.Body)
		k.t.Errorf("the command %s: %s", word, text)
	}
	var out []byte
	for d := json.NewDecoder(res.Body); res.StatusCode == http.StatusOK; {
		var e api.CommandEvent
		if err := d.Decode(&e); err != nil || e.Error != nil {
			return "", false
		}
		out = append(out, e.Data...)
		if e.Exit != nil {
			k.count("command " + word)
			_, _ = io.Copy(io.Discard, res.Body)
			return string(out), true
		}
	}
	return "", false
}

// settle looks into a keeper's sandboxes when nothing is killed any more, and deletes them.
func (k *keeper) settle() {
	for _, b := range k.boxes {
		switch still := b.state == sandbox.Stopped || b.state == sandbox.Failed; {
		case !still:
			k.check(b)
		case k.dice.IntN(4) == 0:
			k.verb(b, "resume")
			k.check(b)
		}
		k.verb(b, "delete")
	}
	k.boxes = nil
}

// agrees checks that each sandbox is what was acknowledged, and that the machine has what
// the states say, no more and no less.
func (st *storm) agrees(want map[string]*kept) {
	st.t.Helper()
	var page api.SandboxList
	st.ask(diceOf(st.seed, "list"), http.MethodGet, "/v1/sandboxes?limit=1000", nil, &page)
	for _, s := range page.Sandboxes {
		b := want[s.ID]
		if b == nil || string(s.State) != string(b.state) || s.Operation != nil {
			st.t.Errorf("%s is %s (operation %v), and was left as %+v", s.ID, s.State, s.Operation, b)
		}
	}
	if len(page.Sandboxes) != len(want) {
		st.t.Errorf("%d sandboxes are listed, %d were left", len(page.Sandboxes), len(want))
	}
	st.quiet(want)
	st.counted(want)
}

// counted checks that what the host told of each sandbox was applied to the last report:
// the database applies them one after the other, so that none is missing.
func (st *storm) counted(want map[string]*kept) {
	st.t.Helper()
	db, err := st.nodes[0].cfg.Open(st.t.Context())
	if err != nil {
		st.t.Error(err)
		return
	}
	defer db.Close()
	for id := range want {
		var s sandbox.Sandbox
		err := db.View(st.t.Context(), func(ctx context.Context, r store.Reader) (err error) { s, err = r.Sandbox(ctx, id); return err })
		told, untaken, err2 := fakehost.Told(filepath.Join(st.dir, "host"), id)
		if err != nil || err2 != nil || told != s.HostSeq || untaken != 0 {
			st.t.Errorf("of %s report %d was applied, %d was the last told, %d were not taken (%v, %v)", id, s.HostSeq, told, untaken, err, err2)
		}
	}
}

// quiet waits until the machine has what the states say.
func (st *storm) quiet(want map[string]*kept) {
	st.t.Helper()
	var in = func(states ...sandbox.State) []string {
		var ids []string
		for id, b := range want {
			if slices.Contains(states, b.state) {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
		return ids
	}
	var wrong []string
	for end := time.Now().Add(patience); ; pause(st.t.Context(), 20*time.Millisecond) {
		h, err := fakehost.Look(filepath.Join(st.dir, "host"))
		if err != nil {
			st.t.Error(err)
			return
		}
		wrong = nil
		for _, c := range []struct {
			what      string
			has, want []string
		}{
			{"runs", h.Running, in(sandbox.Ready)}, {"is mounted", h.Mounted, in(sandbox.Ready)}, {"has a network", h.Networks, in(sandbox.Ready)},
			{"has a disk", h.Disks, in(sandbox.Ready, sandbox.Stopped, sandbox.Failed)}, {"has a save", h.Saves, in(sandbox.Sleeping)},
			{"has a journal", h.Journals, in(sandbox.States...)}, {"has an unfinished save", h.Unfinished, nil},
		} {
			slices.Sort(c.has)
			for _, id := range c.has {
				if _, ok := slices.BinarySearch(c.want, id); !ok {
					wrong = append(wrong, fmt.Sprintf("%s %s, and should not", id, c.what))
				}
			}
			for _, id := range c.want {
				if _, ok := slices.BinarySearch(c.has, id); !ok {
					wrong = append(wrong, fmt.Sprintf("%s not %s, and should", id, c.what))
				}
			}
		}
		if len(wrong) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, w := range wrong {
		st.t.Error(w)
	}
}

// verified has the server recompute every figure of the ledger.
func (st *storm) verified() {
	st.t.Helper()
	var bill api.Bill
	st.ask(diceOf(st.seed, "bill"), http.MethodGet, "/v1/bill?verify=true", nil, &bill)
	if !bill.Verified || len(bill.Differences) > 0 {
		st.t.Errorf("the ledger was verified: %v; %q", bill.Verified, bill.Differences)
	}
}

// follower is a client that follows the events all the time.
type follower struct {
	mu       sync.Mutex
	story    chronicle
	streams  int
	problems []string
}

// follow reads the stream of events, and goes on after a cut from the last number that it
// saw.
func (st *storm) follow(ctx context.Context) {
	f := &st.follower
	for i := 0; ctx.Err() == nil; i++ {
		f.mu.Lock()
		after := f.story.last
		f.mu.Unlock()
		res, err := st.send(ctx, i%len(st.nodes), http.MethodGet, fmt.Sprintf("/v1/events?after=%d", after), "", nil)
		if err != nil {
			pause(ctx, 10*time.Millisecond)
			continue
		}
		f.read(res.Body)
		_ = res.Body.Close()
	}
}

// read takes the events of one stream in. Its end may be anywhere.
func (f *follower) read(stream io.Reader) {
	lines := bufio.NewScanner(stream)
	lines.Buffer(nil, 1<<20)
	first := true
	for lines.Scan() {
		data, is := strings.CutPrefix(lines.Text(), "data: ")
		if !is {
			continue
		}
		var e api.Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return // it was cut
		}
		f.mu.Lock()
		if first {
			f.streams++
			first = false
		}
		f.story.add(entryOf(e))
		f.mu.Unlock()
	}
}

func entryOf(e api.Event) entry {
	return entry{ID: e.ID, Seq: e.Seq, Sandbox: e.Sandbox, Operation: e.Operation, Type: e.Type, Data: e.Data}
}

// told compares what the follower saw with the history that is kept.
func (st *storm) told() {
	st.t.Helper()
	var whole chronicle
	for {
		var page api.EventList
		res, err := st.page(whole.last, &page)
		if err != nil {
			st.t.Fatalf("the events after %d: %v, %v", whole.last, res, err)
		}
		if len(page.Events) == 0 {
			break
		}
		for _, e := range page.Events {
			whole.add(entryOf(e))
		}
	}
	f := &st.follower
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range []*chronicle{&whole, &f.story} {
		for _, wrong := range c.wrong[:min(len(c.wrong), 20)] {
			st.t.Error(wrong)
		}
		for id, state := range c.states {
			if state != sandbox.Deleted && c == &whole {
				st.t.Errorf("the last that is told of %s is %s", id, state)
			}
		}
		for id, seq := range c.ids {
			if whole.ids[id] != seq {
				st.t.Errorf("event %s was followed as %d and is kept as %d", id, seq, whole.ids[id])
			}
		}
	}
	if f.story.last < whole.last*9/10 || f.streams < 2 {
		st.t.Errorf("only %d of %d events were followed, on %d streams", f.story.last, whole.last, f.streams)
	}
}

func (st *storm) page(after int64, into *api.EventList) (int, error) {
	req, err := http.NewRequestWithContext(st.t.Context(), http.MethodGet,
		fmt.Sprintf("http://%s/v1/events?after=%d&limit=1000", st.nodes[0].cfg.Listen, after), nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Authorization", "Bearer "+st.key)
	req.Header.Set("Accept", "application/json")
	res, err := stormClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	return res.StatusCode, json.NewDecoder(res.Body).Decode(into)
}

func (st *storm) report() string {
	st.mu.Lock()
	defer st.mu.Unlock()
	return fmt.Sprintf("%d servers, killed %d times; %d events on %d streams, each once; calls: %v; in %s",
		len(st.nodes), st.kills, st.follower.story.last, st.follower.streams, st.calls, time.Since(st.began).Round(time.Second))
}
