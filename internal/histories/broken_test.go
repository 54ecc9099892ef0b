package histories

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// pretender is a system that keeps the contract in memory, or breaks it in one way.
type pretender struct {
	mu     sync.Mutex
	boxes  map[string]*box
	before map[string]box
	lies   string
	told   int // lies that made a difference
	dice   *rand.Rand
}

// enough is how many lies make a history long: one alone may have been put right before
// anyone could see it.
const enough = 20

func (p *pretender) more(calls int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return calls < 60 || p.lies != "" && p.told < enough && calls < 3000
}

func (p *pretender) do(c call) answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.boxes[c.sandbox]
	if b == nil {
		b = &box{state: sandbox.Ready, generation: 1}
		p.boxes[c.sandbox] = b
	}
	was := *b
	lie := p.dice.IntN(4) == 0
	defer func() {
		if *b != was {
			p.before[c.sandbox] = was
		}
	}()
	a := answer{word: ok}
	switch c.verb {
	case look:
		seen := *b
		if old, had := p.before[c.sandbox]; had && lie && p.lies == "an old state is read" {
			p.count(seen.state != old.state || seen.generation != old.generation)
			seen = old
		}
		a.state, a.generation = seen.state, seen.generation
		return a
	case get:
		a.cell = b.cell
	case read:
		a.disk = b.disk
	case string(sandbox.Fork):
		a.cell, a.disk = b.cell, b.disk
		if c.mode == sandbox.ForkDisk {
			a.cell = ""
		} else if old := p.before[c.sandbox]; lie && p.lies == "a copy is of two instants" {
			p.count(b.state == sandbox.Ready && b.cell != old.cell)
			if b.effect(c, a) != nil {
				a.cell = old.cell
				return a
			}
		}
	}
	next := b.effect(c, a)
	if len(next) == 0 {
		return answer{word: refused, state: b.state}
	}
	switch {
	case lie && p.lies == "what was acknowledged is not done":
		p.count(next[0] != *b)
		return a
	case lie && p.lies == "memory is lost in a wake" && next[0].generation != b.generation:
		p.count(next[0].cell != "")
		next[0].cell = ""
	case lie && p.lies == "a wake boots twice" && next[0].generation != b.generation:
		p.count(true)
		next[0].generation++
	case lie && p.lies == "a refusal names a wrong state" && c.verb == string(sandbox.Stop):
		p.count(true)
		return answer{word: refused, state: sandbox.Failed}
	}
	*b = next[0]
	return a
}

func (p *pretender) count(told bool) {
	if told {
		p.told++
	}
}

// TestCheckerFindsABrokenRegister is the test of the tests here: a system that keeps the
// contract passes, and each way of breaking it is found.
func TestCheckerFindsABrokenRegister(t *testing.T) {
	t.Parallel()
	for _, lies := range []string{
		"", "an old state is read", "what was acknowledged is not done", "memory is lost in a wake", "a wake boots twice",
		"a copy is of two instants", "a refusal names a wrong state",
	} {
		t.Run(lies, func(t *testing.T) {
			t.Parallel()
			seed := newSeed(t)
			p := &pretender{boxes: map[string]*box{}, before: map[string]box{}, lies: lies, dice: rand.New(rand.NewPCG(seed, 1))}
			h := newHistory()
			var all sync.WaitGroup
			for client := range 3 {
				dice := rand.New(rand.NewPCG(seed, uint64(10+client)))
				all.Go(func() {
					for i := 0; p.more(i); i++ {
						c := everything.pick(dice, fmt.Sprint("box-", i%2), fmt.Sprintf("%d.%d", client, i))
						h.record(client, c, func() answer { return p.do(c) })
					}
				})
			}
			all.Wait()
			want := porcupine.Ok
			if lies != "" {
				want = porcupine.Illegal
			}
			if got := porcupine.CheckOperationsTimeout(register, h.calls, checkLimit); got != want {
				t.Errorf("the history of one of which it is true that %q is %s, want %s\n%s", lies, got, want, text(h.calls))
			}
		})
	}
}
