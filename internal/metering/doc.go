// Package metering is the pure core of what a sandbox costs: which instants of its life
// are metered, the ledger entries that say so, and the sums over them. It does no I/O,
// reads no clock and starts no goroutine; what needs the time is given it.
//
// Facts go in, entries come out. A Meter is the small state that is kept with the
// sandbox's row. Every Fact that control writes an event of (a boot, an accepted stop, a
// due time, a failed save …) is given to Meter.Next inside the same transaction (S3); it
// gives the next Meter and the entries to append.
//
// An Entry is a closed interval, and it is made when nothing can change it any more: at
// the transition that ends it, never at the acceptance of the verb that will. Until then
// the interval is open and lives in the Meter. So the ledger is append-only without a
// correcting entry, although a host may report later that the sandbox crashed, was
// lost or fell due before a stop was accepted, and although a boot counts from its
// beginning only if it succeeds. Edges (on, off) instead would need an order that
// late facts do not have.
//
// The rules, by their ids:
//
//   - B1: a boot by create, resume or fork is metered from the assignment of a host, and
//     only if it becomes ready: Assigned opens a starting interval, which Ready enters
//     and Unstarted forgets. A boot that was not ready when the deletion of its sandbox
//     was accepted costs nothing.
//   - B2: ready and sleeping have one rate. Nothing is metered from the acceptance of a
//     save (Halted) to its end (Slept, Released). A save that was refused before it began
//     (Refused) did not pause anything. A wake leaves no gap: sleeping is metered until
//     Woken, running from then. Live forks, snapshots, replication and migrations are no
//     facts here: they change nothing.
//   - B3: an accepted stop or deletion (Halted) is the end of metering, not its commit.
//   - B4, A4, A7, Z7: what falls due is Halted at its due time, however late it is acted
//     on or told of; of several ends the earliest counts.
//   - B5, Z10, Z11: a save that failed (SaveFailed) leaves the meter paused from its
//     beginning, until a retry puts the sandbox to sleep (Slept), its user keeps it
//     (Kept) or wakes it (Woken). A failed stop or automatic stop is not made up for by a
//     sleep: it keeps its instant. An accepted deletion is never taken back.
//   - B6: archived is metered by the disk's bytes until Ready, or until the acceptance of
//     the deletion. A month is 730 hours and a GB 10^9 bytes. The boot that ends it is
//     metered too, from its host's assignment, so the two kinds may run at one time; the
//     intervals of one kind never overlap.
//   - B7: instants are whole milliseconds. Amounts are exact (see Amount) and rounded by
//     the caller in totals only. An entry has one price version: where the price changes
//     the interval is split. Verify recomputes all from the facts by another way.
//   - D8, S8: Ended carries the last instant at which the sandbox is known to have run.
//     One that is found again (Found) is metered from then on, not in between.
//
// Facts of one sandbox are given in the order in which they become known; their instants
// need not be in order. A fact never reaches behind what its sandbox's Meter has entered:
// an instant before that counts as that one. Entered is at Ready, Slept, Woken, Rebooted,
// Kept, Released and Ended, so before one of these a due time that has passed and counts
// is to be told first. Verify says where that was not done.
package metering
