// Package histories proves the lifecycle contract from outside: it records what clients
// asked and were told while everything races or dies, and checks that there is one order
// of things that explains all of it.
package histories

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// What clients do, beside the verbs of sandbox.
const (
	look  = "look"  // read state and generation
	put   = "put"   // write the cell in memory, in a command
	get   = "get"   // read it
	write = "write" // write the cell on the disk, in a command
	read  = "read"
	stir  = "stir" // the wakes that a command may have caused on its way
)

// call is what one client asked.
type call struct {
	sandbox string
	verb    string // a sandbox.Verb or one of the above
	mode    sandbox.ForkMode
	value   string // of put and write
}

// word says how a call ended.
type word string

const (
	ok      word = "ok"
	refused word = "refused" // for the state that it is in
	unknown word = "unknown" // it may have had its effect, and may have it still
	nothing word = "nothing" // it had no effect, and says nothing of the state
)

// answer is what the client was told.
type answer struct {
	word       word
	state      sandbox.State // of a look or a refusal
	generation int64         // of a look
	cell, disk string        // of get and read, and of a fork: what the copy has
}

// box is a sandbox as its clients may think of it: one register.
type box struct {
	state      sandbox.State
	generation int64
	cell, disk string
}

func (b box) boots(cell string) box {
	return box{sandbox.Ready, b.generation + 1, cell, b.disk}
}

// step gives what a box may be after a call that was answered so; nothing means that the
// answer cannot be.
func (b box) step(c call, a answer) []box {
	same := []box{b}
	if a.word == refused {
		return when(b.state == a.state, same)
	}
	after := b.effect(c, a)
	if a.word == unknown {
		return append(after, b)
	}
	return after
}

// effect is step for an answer that says that the call had its effect.
func (b box) effect(c call, a answer) []box {
	is := func(states ...sandbox.State) bool { return slices.Contains(states, b.state) }
	same := []box{b}
	switch c.verb {
	case look:
		return when(a.state == b.state && (a.generation == b.generation || b.state == sandbox.Deleted), same)
	case string(sandbox.Sleep):
		if is(sandbox.Ready) {
			b.state = sandbox.Sleeping
		}
		return when(is(sandbox.Sleeping), []box{b})
	case string(sandbox.Wake):
		if is(sandbox.Sleeping) {
			return []box{b.boots(b.cell)}
		}
		return when(is(sandbox.Ready), same)
	case string(sandbox.Stop):
		if is(sandbox.Ready, sandbox.Sleeping) {
			b.state, b.cell = sandbox.Stopped, ""
		}
		return when(is(sandbox.Stopped), []box{b})
	case string(sandbox.Resume):
		switch {
		case is(sandbox.Sleeping):
			return []box{b.boots(b.cell)}
		case is(sandbox.Stopped, sandbox.Failed):
			return []box{b.boots("")}
		}
		return when(is(sandbox.Ready), same)
	case string(sandbox.Delete):
		b.state = sandbox.Deleted
		return []box{b}
	case string(sandbox.Fork):
		if c.mode == sandbox.ForkDisk {
			return when(is(sandbox.Ready, sandbox.Sleeping, sandbox.Stopped) && a.disk == b.disk && a.cell == "", same)
		}
		return when(is(sandbox.Ready, sandbox.Sleeping) && a.disk == b.disk && a.cell == b.cell, same)
	case put:
		b.cell = c.value
	case write:
		b.disk = c.value
	case get:
		return when(is(sandbox.Ready) && a.cell == b.cell, same)
	case read:
		return when(is(sandbox.Ready) && a.disk == b.disk, same)
	case stir:
		if is(sandbox.Sleeping) {
			return []box{b, b.boots(b.cell)}
		}
		return same
	}
	return when(is(sandbox.Ready), []box{b})
}

func when(cond bool, boxes []box) []box {
	if cond {
		return boxes
	}
	return nil
}

// register is the model of all sandboxes of a history: each is one register by itself,
// and is ready in its first generation when the history begins.
var register = (&porcupine.NondeterministicModel{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		of := map[string][]porcupine.Operation{}
		for _, op := range history {
			id := op.Input.(call).sandbox
			of[id] = append(of[id], op)
		}
		var parts [][]porcupine.Operation
		for _, part := range of {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() []any { return []any{box{state: sandbox.Ready, generation: 1}} },
	Step: func(state, input, output any) []any {
		var out []any
		for _, b := range state.(box).step(input.(call), output.(answer)) {
			out = append(out, b)
		}
		return out
	},
	Equal:             func(a, b any) bool { return a == b },
	DescribeOperation: func(input, output any) string { return describe(input.(call), output.(answer)) },
	DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
}).ToModel()

func describe(c call, a answer) string {
	return fmt.Sprintf("%s %s%s → %s %s %d %q %q", c.verb, c.value, c.mode, a.word, a.state, a.generation, a.cell, a.disk)
}

// history is what clients asked and were told, and when.
type history struct {
	began time.Time

	mu    sync.Mutex
	calls []porcupine.Operation
}

func newHistory() *history { return &history{began: time.Now()} }

// record has do carry out a call and writes down what came of it.
func (h *history) record(client int, c call, do func() answer) answer {
	from := time.Since(h.began).Nanoseconds()
	a := do()
	to := time.Since(h.began).Nanoseconds()
	if a.word == unknown {
		to = math.MaxInt64
	}
	if a.word != nothing {
		h.add(client, c, a, from, to)
	}
	return a
}

func (h *history) add(client int, c call, a answer, from, to int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, porcupine.Operation{ClientId: client, Input: c, Output: a, Call: from, Return: to})
}

// checkLimit bounds the search for an order. A history that needs more is too long.
const checkLimit = time.Minute

// check fails the test where no order explains what was answered about a sandbox, and
// leaves a drawing of it.
func (h *history) check(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, part := range register.Partition(h.calls) {
		result, info := porcupine.CheckOperationsVerbose(register, part, checkLimit)
		if result == porcupine.Ok {
			continue
		}
		drawing, err := os.CreateTemp("", "hutch-history-*.html")
		if err == nil {
			err = errors.Join(porcupine.Visualize(register, info, drawing), drawing.Close())
		}
		if err != nil {
			t.Error(err)
			return
		}
		t.Errorf("no order of %d calls explains what was answered (%s); it is drawn in %s\n%s", len(part), result, drawing.Name(), text(part))
	}
}

// text is a history for people, in the order of the calls.
func text(calls []porcupine.Operation) string {
	calls = slices.Clone(calls)
	slices.SortFunc(calls, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var out strings.Builder
	for _, op := range calls {
		c := op.Input.(call)
		if c.verb != stir { // it stands with the command that it belongs to
			fmt.Fprintf(&out, "%9.3f–%9.3f ms  client %2d  %s  %s\n", float64(op.Call)/1e6, float64(min(op.Return, int64(time.Hour)))/1e6, op.ClientId,
				c.sandbox[max(0, len(c.sandbox)-6):], describe(c, op.Output.(answer)))
		}
	}
	return out.String()
}
