package histories

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// mix is what clients ask, each as often as its weight.
type mix []struct {
	verb   string
	mode   sandbox.ForkMode
	weight int
}

func (m mix) pick(dice *rand.Rand, id, value string) call {
	total := 0
	for _, e := range m {
		total += e.weight
	}
	n := dice.IntN(total)
	for _, e := range m {
		if n -= e.weight; n < 0 {
			return call{sandbox: id, verb: e.verb, mode: e.mode, value: value}
		}
	}
	panic("the weights do not add up")
}

var everything = mix{
	{look, "", 4}, {put, "", 2}, {get, "", 2}, {write, "", 1}, {read, "", 1},
	{"sleep", "", 3}, {"wake", "", 3}, {"stop", "", 2}, {"resume", "", 3},
	{"fork", sandbox.ForkLive, 1}, {"fork", sandbox.ForkDisk, 1},
}

// race has clients work on the sandboxes, each with its own mix, and records it.
func (r *rig) race(h *history, seed uint64, ids []string, calls int, clients ...mix) {
	var all sync.WaitGroup
	for client, m := range clients {
		dice := diceOf(seed, "client", client)
		all.Go(func() {
			for i := range calls {
				r.record(h, client, dice, m.pick(dice, ids[dice.IntN(len(ids))], fmt.Sprintf("%d.%d", client, i)))
			}
		})
	}
	all.Wait()
}

// finish lets a history rest, looks at all sandboxes once more, checks it and the ledger,
// and deletes what is left.
func (r *rig) finish(h *history, seed uint64, ids []string) {
	r.t.Helper()
	dice := diceOf(seed, "finish")
	var all sync.WaitGroup
	for i, id := range ids {
		dice := diceOf(seed, "finish", i)
		all.Go(func() {
			r.record(h, 100, dice, call{sandbox: id, verb: look})
			r.record(h, 100, dice, call{sandbox: id, verb: string(sandbox.Delete)})
			r.record(h, 100, dice, call{sandbox: id, verb: look})
		})
	}
	all.Wait()
	h.check(r.t)
	r.tells(r.server(dice), ids)
	r.honest()
	r.empty()
}

// tells checks that the events tell of each sandbox one thing after the other: each
// change of state begins where the one before ended, and operations do not overlap.
func (r *rig) tells(at *control.Control, ids []string) {
	r.t.Helper()
	var c chronicle
	for after := int64(0); ; {
		page, err := at.Events(r.t.Context(), me, control.EventQuery{After: after, Limit: 1000})
		if err != nil {
			r.t.Fatal(err)
		}
		if len(page.Events) == 0 {
			break
		}
		for _, e := range page.Events {
			c.add(entry{ID: e.ID, Seq: e.Seq, Sandbox: e.Sandbox, Operation: e.Operation, Type: e.Type, Data: e.Data})
		}
		after = page.Seen
	}
	for _, id := range ids {
		if got := c.states[id]; got != sandbox.Deleted {
			r.t.Errorf("the last that is told of %s is %s", id, got)
		}
	}
	for _, wrong := range c.wrong {
		r.t.Error(wrong)
	}
}

// TestFiftyWakes: fifty parallel wakes give one running sandbox, one boot and fifty
// successes.
func TestFiftyWakes_S4(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r, h := newSeed(t), newRig(t, url), newHistory()
		ids := r.ready(3)
		for client, id := range ids {
			dice := diceOf(seed, id)
			r.record(h, client, dice, call{sandbox: id, verb: put, value: "kept"})
			if a := r.record(h, client, dice, call{sandbox: id, verb: "sleep"}); a.word != ok {
				t.Fatalf("a sleep: %+v", a)
			}
			begin := make(chan struct{})
			var all sync.WaitGroup
			for i := range 50 {
				dice := diceOf(seed, id, i)
				all.Go(func() {
					<-begin
					if a := r.record(h, i, dice, call{sandbox: id, verb: "wake"}); a.word != ok {
						t.Errorf("one of fifty wakes: %+v", a)
					}
				})
			}
			close(begin)
			all.Wait()
			v, err := r.servers[0].Control.Get(t.Context(), me, id)
			if err != nil || v.Sandbox.State != sandbox.Ready || v.Sandbox.Generation != 2 {
				t.Errorf("after fifty wakes it is %s in generation %d, %v", v.Sandbox.State, v.Sandbox.Generation, err)
			}
			if n := r.operations(id, sandbox.Wake); n != 1 {
				t.Errorf("fifty wakes made %d operations", n)
			}
			r.record(h, client, dice, call{sandbox: id, verb: get})
		}
		r.finish(h, seed, ids)
	})
}

// operations counts a sandbox's operations of a kind.
func (r *rig) operations(id string, kind sandbox.Verb) int {
	r.t.Helper()
	page, err := r.servers[0].Control.Operations(r.t.Context(), me, control.OperationQuery{Sandbox: id})
	if err != nil {
		r.t.Fatal(err)
	}
	n := 0
	for _, op := range page.Operations {
		if op.Kind == kind {
			n++
		}
	}
	return n
}

// TestWakeAfterSleepReturned: a wake that comes up to half a second after a sleep returned,
// at its end or at once, brings back what was there; a command waits for the sleep and
// wakes it.
func TestWakeAfterSleepReturned_Z5(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r, h := newSeed(t), newRig(t, url), newHistory()
		ids := r.ready(24)
		var all sync.WaitGroup
		for i, id := range ids {
			dice := diceOf(seed, "delay", i)
			all.Go(func() {
				r.record(h, i, dice, call{sandbox: id, verb: put, value: id})
				sleep := func() answer { return r.record(h, i, dice, call{sandbox: id, verb: "sleep"}) }
				var slept sync.WaitGroup
				if i%3 == 0 {
					sleep()
				} else {
					accepted := make(chan struct{})
					slept.Go(func() {
						h.record(i, call{sandbox: id, verb: "sleep"}, func() answer {
							res, err := r.servers[0].Control.Sleep(r.t.Context(), me, id, control.Idempotency{})
							close(accepted)
							if err != nil {
								return r.failed(call{sandbox: id, verb: "sleep"}, err)
							}
							return r.ended(r.servers[0].Control, res)
						})
					})
					<-accepted
				}
				pause(r.t.Context(), time.Duration(dice.IntN(500))*time.Millisecond)
				if i%3 == 2 {
					if a := r.record(h, i, dice, call{sandbox: id, verb: get}); a.word != ok || a.cell != id {
						t.Errorf("a command after a sleep: %+v", a)
					}
				} else {
					for {
						a := r.record(h, i, dice, call{sandbox: id, verb: "wake"})
						if a.word == ok {
							break
						}
						if a.word != nothing { // else the sleep is still at work
							t.Errorf("a wake after a sleep: %+v", a)
							break
						}
						pause(r.t.Context(), time.Millisecond)
					}
				}
				slept.Wait()
				r.record(h, i, dice, call{sandbox: id, verb: get})
			})
		}
		all.Wait()
		r.finish(h, seed, ids)
	})
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// TestSleepAgainstCommands: a command that races a sleep runs before it, or wakes it; what
// was acknowledged is there after any number of them.
func TestSleepAgainstCommands_S4_Z5(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r, h := newSeed(t), newRig(t, url), newHistory()
		ids := r.ready(2)
		commands := mix{{put, "", 2}, {get, "", 2}, {write, "", 1}, {read, "", 1}}
		sleeps := mix{{"sleep", "", 3}, {"wake", "", 1}, {look, "", 2}}
		r.race(h, seed, ids, 25, sleeps, sleeps, commands, commands, commands)
		r.finish(h, seed, ids)
	})
}

// TestStopAgainstForks: a fork that races a stop copies one instant before it, or is
// refused.
func TestStopAgainstForks_S4_F1(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r, h := newSeed(t), newRig(t, url), newHistory()
		ids := r.ready(2)
		stops := mix{{"stop", "", 2}, {"resume", "", 3}, {look, "", 1}}
		forks := mix{{"fork", sandbox.ForkLive, 2}, {"fork", sandbox.ForkDisk, 1}, {look, "", 1}}
		writes := mix{{put, "", 2}, {write, "", 2}}
		r.race(h, seed, ids, 20, stops, stops, forks, forks, writes)
		r.finish(h, seed, ids)
	})
}

// TestDeleteAgainstEverything: a deletion wins against whatever else is asked, and nothing
// of the sandbox is left.
func TestDeleteAgainstEverything_S5(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r, h := newSeed(t), newRig(t, url), newHistory()
		ids := r.ready(16)
		var all sync.WaitGroup
		for i, id := range ids {
			for client := range 3 {
				dice := diceOf(seed, "rival", i, client)
				all.Go(func() {
					for n := range 6 {
						r.record(h, client, dice, everything.pick(dice, id, fmt.Sprintf("%d.%d", client, n)))
					}
				})
			}
			dice := diceOf(seed, "deletion", i)
			all.Go(func() {
				pause(r.t.Context(), time.Duration(dice.IntN(300))*time.Millisecond)
				if a := r.record(h, 9, dice, call{sandbox: id, verb: "delete"}); a.word != ok {
					t.Errorf("a deletion: %+v", a)
				}
			})
		}
		all.Wait()
		r.finish(h, seed, ids)
	})
}

// TestEverythingAtOnce: whatever clients ask, each sandbox is one register.
func TestEverythingAtOnce_S4(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r, h := newSeed(t), newRig(t, url), newHistory()
		ids := r.ready(4)
		r.race(h, seed, ids, 40, everything, everything, everything, everything, everything, everything)
		r.finish(h, seed, ids)
	})
}
