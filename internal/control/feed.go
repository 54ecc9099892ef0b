package control

import (
	"slices"
	"sync"

	"github.com/hutchrun/hutch/internal/store"
)

// feedSize is how many of the last events are kept in memory at least. A reader that follows is
// served from there, so that a hundred of them cost the database no more than one.
const feedSize = 4096

// feed is the last events of all projects, as the one goroutine that follows the database
// read them.
type feed struct {
	mu     sync.Mutex
	on     bool          // somebody follows the database
	before int64         // the number before the first of events
	events []store.Event // without gaps, oldest first
	fresh  chan struct{} // closed when there is more, or the feed is off
}

func newFeed() *feed { return &feed{fresh: make(chan struct{})} }

// start begins the feed behind a number.
func (f *feed) start(after int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on, f.before, f.events = true, after, nil
	f.wake()
}

// stop leaves readers to the database.
func (f *feed) stop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on, f.events = false, nil
	f.wake()
}

// add appends what was read next. A feed that was off begins there.
func (f *feed) add(events []store.Event) {
	if len(events) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.on {
		f.on, f.before = true, events[0].Seq-1
	}
	f.events = append(f.events, events...)
	// As many again may gather before the oldest go, so that not every event copies all.
	if over := len(f.events) - feedSize; over > feedSize {
		f.before = f.events[over-1].Seq
		f.events = slices.Clone(f.events[over:])
	}
	f.wake()
}

func (f *feed) wake() {
	close(f.fresh)
	f.fresh = make(chan struct{})
}

// waiting gives a channel that is closed when there is more than now.
func (f *feed) waiting() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.fresh
}

// read gives events after filter.After and the number up to which it looked. It is not ok
// where the feed does not reach back so far.
func (f *feed) read(filter store.EventFilter) (page EventPage, ok bool) {
	f.mu.Lock()
	events, before, on := f.events, f.before, f.on // what is in the slice never changes
	f.mu.Unlock()
	if !on || filter.After < before {
		return page, false
	}
	page.Seen = filter.After
	first, _ := slices.BinarySearchFunc(events, filter.After+1, func(e store.Event, seq int64) int { return int(e.Seq - seq) })
	for _, e := range events[first:] {
		if len(page.Events) == filter.Limit {
			break
		}
		page.Seen = e.Seq
		if filter.Selects(e) {
			page.Events = append(page.Events, e)
		}
	}
	return page, true
}
