package sandbox

import (
	"slices"
	"time"
)

// LeaseRenewal is how often the control plane renews the leases of active turns.
const LeaseRenewal = 60 * time.Second

// leaseTerm is how long a lease holds while the server is in reach: two renewals may
// be late or lost. An ended turn does not wait for it; the next renewal lacks it.
const leaseTerm = 2*LeaseRenewal + LeaseRenewal/2

// Lease is the control plane's word that a harness turn is active (A3). Nothing from
// inside a sandbox makes one (X4).
type Lease struct {
	Turn    string    `json:"turn"`
	Since   time.Time `json:"since"`
	Renewed time.Time `json:"renewed"`
}

// Leases are what a host knows of a sandbox's turns.
type Leases struct {
	Turns []Lease   `json:"turns,omitempty"`
	Heard time.Time `json:"heard,omitzero"` // until when the server is known to have been in reach
}

// Renew gives the leases after the control plane has said which turns are active now:
// all of them, so that what it leaves out has ended.
func (l Leases) Renew(turns []string, now time.Time) Leases {
	now = bare(now)
	next := Leases{Heard: later(l.Heard, now)}
	for _, turn := range turns {
		lease := Lease{Turn: turn, Since: now, Renewed: now}
		if i := slices.IndexFunc(l.Turns, func(old Lease) bool { return old.Turn == turn }); i >= 0 {
			lease.Since = l.Turns[i].Since
		}
		next.Turns = append(next.Turns, lease)
	}
	return next
}

// active finds a turn that is active at an instant. While the server is in reach a
// lease holds for its term; where no server was there to ask, for one auto-stop after
// its last renewal, so that a server that stays away lets a sandbox live for one more
// auto-stop at most.
func (l Leases) active(at time.Time, ttl time.Duration) (turn string, ok bool) {
	for _, lease := range l.Turns {
		asked := !at.After(l.Heard) && at.Before(lease.Renewed.Add(leaseTerm))
		if !lease.Since.After(at) && (asked || at.Before(lease.Renewed.Add(ttl))) {
			return lease.Turn, true
		}
	}
	return "", false
}

// Awake counts the turns that keep a sandbox awake at an instant (Z1). With no server to
// ask a lease counts for as long as it would move the deadline (A3), and for its term at
// least.
func (l Leases) Awake(at time.Time, ttl time.Duration) int {
	n := 0
	for _, lease := range l.Turns {
		if at.Before(lease.Renewed.Add(max(ttl, leaseTerm))) {
			n++
		}
	}
	return n
}
