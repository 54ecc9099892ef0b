package apiserver

import (
	"context"
	"time"

	"github.com/shopspring/decimal"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
)

// places is how many decimal places are shown.
const places = 6

var (
	gibSecond = decimal.NewFromInt(1000 << 30)          // in bytes × ms
	gbHour    = decimal.NewFromInt(1e9 * 3600).Shift(3) // in bytes × ms
)

// GetBill says what the project used and what it costs.
func (s *server) GetBill(ctx context.Context, r GetBillRequestObject) (GetBillResponseObject, error) {
	q := control.BillQuery{Project: r.Params.Project, Verify: r.Params.Verify}
	var err error
	if q.From, err = parseInstant("from", r.Params.From); err != nil {
		return nil, err
	}
	if q.To, err = parseInstant("to", r.Params.To); err != nil {
		return nil, err
	}
	bill, err := s.control.Bill(ctx, callOf(ctx).caller, q)
	if err != nil {
		return nil, err
	}
	return GetBill200JSONResponse(billOf(bill)), nil
}

// parseInstant reads an instant or a day of a query.
func parseInstant(name, text string) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if t, err := time.Parse(layout, text); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fault.New(fault.InvalidArgument, "%s takes an instant such as 2026-03-01T12:00:00Z or a day such as 2026-03-01, not %.40q", name, text).
		Because(name)
}

func billOf(b control.Bill) api.Bill {
	out := api.Bill{
		Project: b.Project, From: api.AtOrNil(b.From), To: api.At(b.To), Sandboxes: []api.SandboxBill{}, Total: amount(b.Total),
		Verified: b.Verified, Differences: b.Differences,
	}
	if out.Differences == nil {
		out.Differences = []string{}
	}
	totals := map[string]metering.Amount{}
	for _, l := range b.Lines {
		totals[l.Sandbox] = totals[l.Sandbox].Plus(l.Amount)
	}
	for i, l := range b.Lines {
		if i == 0 || b.Lines[i-1].Sandbox != l.Sandbox {
			out.Sandboxes = append(out.Sandboxes, api.SandboxBill{ID: l.Sandbox, Name: b.Names[l.Sandbox], Lines: []api.BillLine{}, Total: amount(totals[l.Sandbox])})
		}
		last := &out.Sandboxes[len(out.Sandboxes)-1]
		last.Lines = append(last.Lines, api.BillLine{
			Kind: api.BillLineKind(l.Kind()), Reason: api.BillLineReason(l.Reason), PriceVersion: l.Price, Milliseconds: l.Time.Milliseconds(),
			VcpuSeconds:      l.VCPUMillis.Shift(-3).StringFixed(places),
			MemoryGibSeconds: l.MemoryByteMillis.DivRound(gibSecond, places).StringFixed(places),
			DiskGbHours:      l.DiskByteMillis.DivRound(gbHour, places).StringFixed(places),
			Amount:           amount(l.Amount),
		})
	}
	return out
}

func amount(a metering.Amount) api.Decimal { return a.Round(places).StringFixed(places) }
