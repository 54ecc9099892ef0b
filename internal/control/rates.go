package control

import (
	"sync"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/store"
)

// rates holds how much each key has called, for the rate of its project. Each server counts
// for itself, and a restart begins anew: it keeps a loop from taking the server, it is no
// measure of use.
type rates struct {
	mu  sync.Mutex
	at  map[string]time.Time // by key: when its bucket is full again
	due time.Time            // when those that are full are forgotten next
}

// ratesKept is how often keys whose bucket is full are forgotten.
const ratesKept = time.Minute

func newRates() *rates { return &rates{at: map[string]time.Time{}} }

// allow takes a call from a key's bucket, or says when there will be room for one. The
// bucket is the generic cell rate algorithm: it holds Burst calls and fills with PerSecond.
func (r *rates) allow(key string, rate store.Rate, now time.Time) error {
	if rate.PerSecond <= 0 {
		return nil
	}
	each := time.Second / time.Duration(rate.PerSecond)
	burst := rate.Burst
	if burst <= 0 {
		burst = rate.PerSecond
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(now)
	full := r.at[key]
	if full.Before(now) {
		full = now
	}
	if wait := full.Add(each).Sub(now) - time.Duration(burst)*each; wait > 0 {
		return fault.New(fault.RateLimited, "the API key calls more often than the %d times a second that its project allows; wait %s, then go on",
			rate.PerSecond, max(wait.Round(time.Millisecond), time.Millisecond)).Because("key").After(wait)
	}
	r.at[key] = full.Add(each)
	return nil
}

func (r *rates) forget(now time.Time) {
	if now.Before(r.due) {
		return
	}
	r.due = now.Add(ratesKept)
	for key, full := range r.at {
		if !full.After(now) {
			delete(r.at, key)
		}
	}
}
