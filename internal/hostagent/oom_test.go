package hostagent

import (
	"testing"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// killed sums what was reported of processes that ran out of memory.
func (b *book) killed(id string) (n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.facts[id] {
		n += r.OOMKills
	}
	return n
}

// R3: processes that were killed for want of memory are told of, each once, whatever
// becomes of the agent, and counted anew in each boot.
func TestR3OutOfMemoryIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.command(sb, sandbox.Create))
	w.machine.RunOutOfMemory(sb, 3)
	eventually(t, "three kills to be told", func() bool { return w.book.killed(sb) == 3 })
	w.agent.Stop()
	w.start()
	w.machine.RunOutOfMemory(sb, 2)
	eventually(t, "two more to be told, and none twice", func() bool { return w.book.killed(sb) == 5 })
	w.must(w.command(sb, sandbox.Stop))
	w.must(w.command(sb, sandbox.Resume))
	w.machine.RunOutOfMemory(sb, 1)
	eventually(t, "one in the new boot", func() bool { return w.book.killed(sb) == 6 })
}
