package bunstore

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/uptrace/bun"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/store"
)

type meterRow struct {
	bun.BaseModel `bun:"table:meters,alias:m"`

	Sandbox string `bun:",pk"`
	Project string
	Meter   string
	Running bool // something is metered, or may yet be
}

func (r *meterRow) meter() (metering.Meter, error) {
	var m metering.Meter
	if err := json.Unmarshal([]byte(r.Meter), &m); err != nil {
		return m, fmt.Errorf("bunstore: the meter of %s: %w", r.Sandbox, err)
	}
	return m, nil
}

type entryRow struct {
	bun.BaseModel `bun:"table:meter_entries,alias:e"`

	Sandbox     string `bun:",pk"`
	N           int64  `bun:",pk"`
	Project     string
	Kind        string
	Reason      string
	EndReason   string
	BeganAt     int64
	EndedAt     int64
	VCPUs       int64 `bun:"vcpus"`
	MemoryBytes int64
	DiskBytes   int64
	Price       int64
	Generation  int64
	Event       string
}

func rowOfEntry(e metering.Entry) entryRow {
	return entryRow{
		Sandbox: e.Sandbox, N: e.N, Project: e.Project, Kind: string(e.Kind), Reason: string(e.Reason), EndReason: string(e.End),
		BeganAt: millis(e.From), EndedAt: millis(e.To), VCPUs: e.Rate.VCPUs, MemoryBytes: e.Rate.MemoryBytes, DiskBytes: e.DiskBytes,
		Price: e.Price, Generation: e.Generation, Event: e.Event,
	}
}

func (r *entryRow) entry() metering.Entry {
	return metering.Entry{
		Sandbox: r.Sandbox, N: r.N, Project: r.Project, Kind: metering.Kind(r.Kind), Reason: metering.Reason(r.Reason), End: metering.End(r.EndReason),
		From: instant(r.BeganAt), To: instant(r.EndedAt), Rate: metering.Rate{VCPUs: r.VCPUs, MemoryBytes: r.MemoryBytes}, DiskBytes: r.DiskBytes,
		Price: r.Price, Generation: r.Generation, Event: r.Event,
	}
}

type priceRow struct {
	bun.BaseModel `bun:"table:prices,alias:p"`

	Version        int64 `bun:",pk"`
	ValidFrom      int64
	VCPUSecond     string `bun:"vcpu_second"`
	GiBSecond      string `bun:"gib_second"`
	ArchiveGBMonth string `bun:"archive_gb_month"`
}

// Meter implements store.LedgerReader.
func (r *reader) Meter(ctx context.Context, sandboxID string) (metering.Meter, error) {
	var row meterRow
	err := r.db.NewSelect().Model(&row).Where("sandbox = ?", text(sandboxID)).Scan(ctx)
	if missing(err) {
		return metering.Meter{}, fault.New(fault.NotFound, "there is no meter of %s", sandboxID)
	}
	if err != nil {
		return metering.Meter{}, r.fail(err, "read a meter")
	}
	return row.meter()
}

// Meters implements store.LedgerReader.
func (r *reader) Meters(ctx context.Context, project string) ([]metering.Meter, error) {
	return r.meters(ctx, func(q *bun.SelectQuery) *bun.SelectQuery { return q.Where("project = ?", text(project)) })
}

// RunningMeters implements store.LedgerReader.
func (r *reader) RunningMeters(ctx context.Context, project string) ([]metering.Meter, error) {
	return r.meters(ctx, func(q *bun.SelectQuery) *bun.SelectQuery {
		return q.Where("project = ?", text(project)).Where("running")
	})
}

func (r *reader) meters(ctx context.Context, where func(*bun.SelectQuery) *bun.SelectQuery) ([]metering.Meter, error) {
	var rows []meterRow
	if err := where(r.db.NewSelect().Model(&rows)).OrderExpr("sandbox").Scan(ctx); err != nil {
		return nil, r.fail(err, "read meters")
	}
	out := make([]metering.Meter, len(rows))
	for i := range rows {
		var err error
		if out[i], err = rows[i].meter(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// MeterFacts implements store.LedgerReader.
func (r *reader) MeterFacts(ctx context.Context, sandboxID string) ([]metering.Fact, error) {
	var rows []factRow
	err := r.db.NewSelect().Table("meter_facts").Column("n", "fact").Where("sandbox = ?", text(sandboxID)).OrderExpr("n").Scan(ctx, &rows)
	if err != nil {
		return nil, r.fail(err, "read the facts of a meter")
	}
	out := make([]metering.Fact, len(rows))
	for i, row := range rows {
		if out[i], err = row.fact(sandboxID, int64(i+1)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// factRow is a fact as it is kept.
type factRow struct {
	Sandbox string
	N       int64
	Fact    string
}

// fact reads the nth fact of a sandbox. A text that says the same as what was written, or
// more than a fact can, is not what was written.
func (r factRow) fact(sandboxID string, n int64) (f metering.Fact, err error) {
	if err := json.Unmarshal([]byte(r.Fact), &f); err != nil {
		return f, fault.Wrap(err, fault.DataCorrupt, "fact %d of %s cannot be read; restore a backup", n, sandboxID).Because("ledger")
	}
	if encode(f) != r.Fact || r.N != n {
		return f, fault.New(fault.DataCorrupt, "fact %d of %s is not what was written; restore a backup", n, sandboxID).Because("ledger")
	}
	return f, nil
}

// MeterFactsOf implements store.LedgerReader.
func (r *reader) MeterFactsOf(ctx context.Context, sandboxIDs []string) (map[string][]metering.Fact, error) {
	out := make(map[string][]metering.Fact, len(sandboxIDs))
	for some := range slices.Chunk(sandboxIDs, listed) {
		var rows []factRow
		q := r.db.NewSelect().Table("meter_facts").Column("sandbox", "n", "fact").Where("sandbox IN (?)", bun.List(some)).OrderExpr("sandbox, n")
		if err := q.Scan(ctx, &rows); err != nil {
			return nil, r.fail(err, "read the facts of meters")
		}
		for _, row := range rows {
			f, err := row.fact(row.Sandbox, int64(len(out[row.Sandbox])+1))
			if err != nil {
				return nil, err
			}
			out[row.Sandbox] = append(out[row.Sandbox], f)
		}
	}
	return out, nil
}

// MeterEntries implements store.LedgerReader.
func (r *reader) MeterEntries(ctx context.Context, f store.EntryFilter) ([]metering.Entry, error) {
	var rows []entryRow
	q := r.db.NewSelect().Model(&rows).Where("project = ?", text(f.Project)).OrderExpr("sandbox, n")
	if f.Sandbox != "" {
		q = q.Where("sandbox = ?", text(f.Sandbox))
	}
	if !f.From.IsZero() {
		q = q.Where("ended_at > ?", millis(f.From))
	}
	if !f.To.IsZero() {
		q = q.Where("began_at < ?", millis(f.To))
	}
	if err := q.Scan(ctx); err != nil {
		return nil, r.fail(err, "read the ledger")
	}
	out := make([]metering.Entry, len(rows))
	for i := range rows {
		out[i] = rows[i].entry()
	}
	return out, nil
}

// Prices implements store.LedgerReader.
func (r *reader) Prices(ctx context.Context) (metering.Prices, error) {
	var rows []priceRow
	if err := r.db.NewSelect().Model(&rows).OrderExpr("version").Scan(ctx); err != nil {
		return metering.Prices{}, r.fail(err, "read the prices")
	}
	list := make([]metering.Price, len(rows))
	for i, row := range rows {
		var err error
		list[i], err = metering.ParsePrice(row.Version, instant(row.ValidFrom), row.VCPUSecond, row.GiBSecond, row.ArchiveGBMonth)
		if err != nil {
			return metering.Prices{}, fault.Wrap(err, fault.DataCorrupt, "price version %d in the database cannot be; restore a backup", row.Version)
		}
	}
	return metering.NewPrices(list...)
}

// EnterFact implements store.LedgerWriter.
func (t *tx) EnterFact(ctx context.Context, m metering.Meter, f metering.Fact, entries []metering.Entry) error {
	_, err := t.db.NewInsert().Model(&meterRow{Sandbox: m.Sandbox, Project: m.Project, Meter: encode(m), Running: m.Metering()}).
		On("CONFLICT (sandbox) DO UPDATE").Set("meter = EXCLUDED.meter, running = EXCLUDED.running").Exec(ctx)
	if err != nil {
		return t.fail(err, "write a meter")
	}
	_, err = t.db.NewRaw("INSERT INTO meter_facts (sandbox, n, fact) SELECT ?, COALESCE(MAX(n), 0) + 1, ? FROM meter_facts WHERE sandbox = ?",
		m.Sandbox, encode(f), m.Sandbox).Exec(ctx)
	if err != nil {
		return t.fail(err, "write a fact of a meter")
	}
	for _, e := range entries {
		row := rowOfEntry(e)
		clash := fault.New(fault.Conflict, "entry %d of %s is in the ledger already", e.N, e.Sandbox).Because(store.ReasonExists)
		if err := t.insert(ctx, &row, "entry of the ledger", clash); err != nil {
			return err
		}
	}
	return nil
}

// AddPrice implements store.LedgerWriter.
func (t *tx) AddPrice(ctx context.Context, p metering.Price) error {
	clash := fault.New(fault.Conflict, "the price version %d is there already", p.Version).Because(store.ReasonExists)
	return t.insert(ctx, &priceRow{
		Version: p.Version, ValidFrom: millis(p.ValidFrom),
		VCPUSecond: p.VCPUSecond.String(), GiBSecond: p.GiBSecond.String(), ArchiveGBMonth: p.ArchiveGBMonth.String(),
	}, "price", clash)
}
