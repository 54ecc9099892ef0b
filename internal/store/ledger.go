package store

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/metering"
)

// LedgerReader is what a transaction can read of what sandboxes use.
type LedgerReader interface {
	// Meter gives a sandbox's meter; NotFound where it never had one. Its row is not
	// held: whoever changes it has read the sandbox, which is.
	Meter(ctx context.Context, sandboxID string) (metering.Meter, error)
	// Meters gives those of a project, in the order of the sandboxes' ids.
	Meters(ctx context.Context, project string) ([]metering.Meter, error)
	// RunningMeters gives those of a project by which something is metered or may yet be.
	RunningMeters(ctx context.Context, project string) ([]metering.Meter, error)
	// MeterFacts gives a sandbox's facts in the order in which they were applied. One that is not
	// what was written is DataCorrupt.
	MeterFacts(ctx context.Context, sandboxID string) ([]metering.Fact, error)
	// MeterFactsOf is MeterFacts of many sandboxes at once, by their ids.
	MeterFactsOf(ctx context.Context, sandboxIDs []string) (map[string][]metering.Fact, error)
	// MeterEntries gives the entries of the ledger, sandbox by sandbox, oldest first.
	MeterEntries(ctx context.Context, f EntryFilter) ([]metering.Entry, error)
	Prices(ctx context.Context) (metering.Prices, error)
}

// LedgerWriter is what a write transaction can add to it. Nothing is taken out.
type LedgerWriter interface {
	// EnterFact appends a fact and the entries that it completes, and puts the meter in
	// place of the one that the fact was given to. Conflict with ReasonExists where an
	// entry of a number is there: the fact was applied to a meter that is out of date.
	EnterFact(ctx context.Context, m metering.Meter, f metering.Fact, entries []metering.Entry) error
	// AddPrice: Conflict with ReasonExists where the version is there.
	AddPrice(ctx context.Context, p metering.Price) error
}

// EntryFilter selects entries of a project that lie in [From, To), if only in part. A
// zero From is the beginning, a zero To is no end.
type EntryFilter struct {
	Project string
	Sandbox string // "" for all
	From    time.Time
	To      time.Time
}
