package cli

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hutchrun/hutch/api"
)

// printTimings shows how long the steps took of the last operation of each kind, the
// latest first. An operation that took longer than its steps together waited, or wrote
// its records, in between.
func (a *app) printTimings(ctx context.Context, c *client, sandbox string, asJSON bool) error {
	last := map[string]doc[api.Operation]{}
	params := api.ListOperationsParams{Sandbox: sandbox}
	_, err := paging{all: true}.collect(func(limit api.Limit, cursor string) (int, string, error) {
		params.Limit, params.Cursor = &limit, cursor
		page, err := read[struct {
			Operations []doc[api.Operation] `json:"operations"`
			NextCursor string               `json:"next_cursor"`
		}](c.ListOperations(ctx, &params))
		for _, op := range page.Operations { // oldest first
			if op.V.EndedAt != nil && len(op.V.Timings) > 0 {
				last[op.V.Kind] = op
			}
		}
		return len(page.Operations), page.NextCursor, err
	})
	if err != nil {
		return err
	}
	list := make([]doc[api.Operation], 0, len(last))
	for _, op := range last {
		list = append(list, op)
	}
	slices.SortFunc(list, func(x, y doc[api.Operation]) int {
		return cmp.Or(y.V.EndedAt.Compare(x.V.EndedAt.Time), cmp.Compare(x.V.ID, y.V.ID))
	})
	if asJSON {
		return a.printJSON(listDocument("operations", list, ""))
	}
	var rows [][]string
	for _, op := range list {
		rows = append(rows, []string{clean(op.V.Kind), "", operationTook(op.V), formatTime(op.V.EndedAt.Time)})
		for _, t := range op.V.Timings {
			took := time.Duration(t.Milliseconds * float64(time.Millisecond))
			rows = append(rows, []string{"", clean(t.Step), fmt.Sprint(took.Round(10 * time.Microsecond)), ""})
		}
	}
	return a.printTable([]string{"OPERATION", "STEP", "TOOK", "ENDED"}, rows)
}
