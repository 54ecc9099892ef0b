package sshgate

import (
	"net/netip"
	"sync"
	"time"
)

// Failed logins that an address has: a burst, and one more in each interval.
const (
	triesBurst    = 30
	triesInterval = 10 * time.Second
	triesKept     = 4096 // addresses
)

// tries counts failed logins by address.
type tries struct {
	now func() time.Time
	mu  sync.Mutex
	by  map[netip.Addr]*tally
}

type tally struct {
	failed int
	since  time.Time // failed counts down from here
}

func newTries(now func() time.Time) *tries {
	return &tries{now: now, by: map[netip.Addr]*tally{}}
}

// settle takes off what the time since has forgiven.
func (t *tally) settle(now time.Time) {
	n := int(min(now.Sub(t.since)/triesInterval, triesBurst))
	t.failed = max(0, t.failed-n)
	t.since = t.since.Add(time.Duration(n) * triesInterval)
	if t.failed == 0 {
		t.since = now
	}
}

// may says whether an address may try again.
func (t *tries) may(from netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.by[from]
	if c == nil {
		return true
	}
	c.settle(t.now())
	return c.failed < triesBurst
}

func (t *tries) failed(from netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	c := t.by[from]
	if c == nil {
		if len(t.by) >= triesKept {
			t.sweep(now)
		}
		c = &tally{since: now}
		t.by[from] = c
	}
	c.settle(now)
	c.failed = min(c.failed+1, triesBurst)
}

// sweep forgets who is forgiven, and somebody in any case.
func (t *tries) sweep(now time.Time) {
	for a, c := range t.by {
		if c.settle(now); c.failed == 0 {
			delete(t.by, a)
		}
	}
	for a := range t.by {
		if len(t.by) < triesKept {
			return
		}
		delete(t.by, a)
	}
}

func (t *tries) succeeded(from netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.by, from)
}
