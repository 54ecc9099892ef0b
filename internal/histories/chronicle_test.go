package histories

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// entry is an event.
type entry struct {
	ID, Sandbox, Operation, Type string
	Seq                          int64
	Data                         json.RawMessage
}

// chronicle reads all events in their order and writes down what cannot be.
type chronicle struct {
	last    int64
	ids     map[string]int64         // the number of each event
	states  map[string]sandbox.State // by sandbox
	active  map[string]string        // the operation at work, by sandbox
	ended   map[string]bool          // operations
	entries map[string]int64         // of the ledger, by sandbox
	wrong   []string
}

func (c *chronicle) blame(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// add takes the next event in.
func (c *chronicle) add(e entry) {
	if c.ids == nil {
		c.ids, c.states, c.active = map[string]int64{}, map[string]sandbox.State{}, map[string]string{}
		c.ended, c.entries = map[string]bool{}, map[string]int64{}
	}
	if e.Seq != c.last+1 {
		c.blame("event %d comes after %d", e.Seq, c.last)
	}
	c.last = e.Seq
	if twice, seen := c.ids[e.ID]; seen {
		c.blame("the event %s is there twice: %d and %d", e.ID, twice, e.Seq)
	}
	c.ids[e.ID] = e.Seq
	switch {
	case e.Type == "operation.started":
		if at := c.active[e.Sandbox]; at != "" && e.Sandbox != "" {
			c.blame("event %d: %s began on %s while %s was at work", e.Seq, e.Operation, e.Sandbox, at)
		}
		c.active[e.Sandbox] = e.Operation
	case strings.HasPrefix(e.Type, "operation."):
		c.end(e)
	case e.Type == "meter.entry":
		var entry struct {
			N int64 `json:"n"`
		}
		if err := json.Unmarshal(e.Data, &entry); err != nil || entry.N != c.entries[e.Sandbox]+1 {
			c.blame("event %d: entry %d of the ledger of %s comes after %d, %v", e.Seq, entry.N, e.Sandbox, c.entries[e.Sandbox], err)
		}
		c.entries[e.Sandbox] = entry.N
	default:
		c.change(e)
	}
}

func (c *chronicle) end(e entry) {
	if c.ended[e.Operation] {
		c.blame("event %d: %s has ended twice", e.Seq, e.Operation)
	}
	c.ended[e.Operation] = true
	if at := c.active[e.Sandbox]; at != e.Operation && e.Sandbox != "" && at != "" {
		c.blame("event %d: %s ended on %s while %s was at work", e.Seq, e.Operation, e.Sandbox, at)
	}
	delete(c.active, e.Sandbox)
}

func (c *chronicle) change(e entry) {
	state, is := strings.CutPrefix(e.Type, "sandbox.")
	if !is || !isState(state) {
		return
	}
	var change struct {
		From sandbox.State `json:"from"`
	}
	if err := json.Unmarshal(e.Data, &change); err != nil {
		c.blame("event %d: %v", e.Seq, err)
	}
	if was := c.states[e.Sandbox]; change.From != was {
		c.blame("event %d: %s came to %s from %q, and was told to be %q", e.Seq, e.Sandbox, state, change.From, was)
	}
	c.states[e.Sandbox] = sandbox.State(state)
}

func isState(word string) bool {
	for _, s := range sandbox.States {
		if string(s) == word {
			return true
		}
	}
	return false
}
