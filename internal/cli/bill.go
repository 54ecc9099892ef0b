package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) billCommand() *cobra.Command {
	var params api.GetBillParams
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "bill",
		Short: "Show what the project used and what it costs",
		Long: "Show what each sandbox of the project used, for what reason, and what it costs at the operator's prices, up to now: a machine that " +
			"runs or sleeps by its vCPUs and memory, a disk in cold storage by its size. Metering begins with a boot that succeeds and " +
			"ends when a sleep or a stop begins. PRICE is the version of the prices that held. Sums are exact; what is shown is rounded.\n\n" +
			"--verify recomputes all that the project ever used from what happened, by another way than it was metered. Each difference is " +
			"named, and any ends the command with data_corrupt (22).",
		Example: "hutch bill\nhutch bill --project web --from 2026-03-01 --to 2026-04-01\nhutch bill --verify --json",
		Args:    cobra.NoArgs,
	}
	cmd.Flags().StringVar(&params.Project, "project", "", "that of another project than the key's own, with an operator's key")
	cmd.Flags().StringVar(&params.From, "from", "", "from this instant or day on (2026-03-01T12:00:00Z, 2026-03-01), in UTC")
	cmd.Flags().StringVar(&params.To, "to", "", "up to this instant or day")
	cmd.Flags().BoolVar(&params.Verify, "verify", false, "recompute every figure, and fail on any difference")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		bill, err := read[doc[api.Bill]](c.GetBill(ctx, &params))
		if err != nil {
			return err
		}
		if asJSON {
			err = a.printJSON(bill)
		} else {
			err = a.printBill(bill.V)
		}
		if err != nil || !params.Verify {
			return err
		}
		return verified(bill.V)
	})
	return cmd
}

func (a *app) printBill(b api.Bill) error {
	var rows [][]string
	for _, s := range b.Sandboxes {
		name := s.Name
		if name == "" {
			name = s.ID
		}
		for _, l := range s.Lines {
			rows = append(rows, []string{
				clean(name), clean(string(l.Reason)), fmt.Sprintf("v%d", l.PriceVersion), formatMetered(l.Milliseconds), clean(l.VcpuSeconds), clean(l.MemoryGibSeconds), clean(l.DiskGbHours), clean(l.Amount),
			})
		}
		if len(s.Lines) > 1 {
			rows = append(rows, []string{clean(name), "all", "", "", "", "", "", clean(s.Total)})
		}
	}
	rows = append(rows, []string{"total", "", "", "", "", "", "", clean(b.Total)})
	if err := a.printTable([]string{"NAME", "WHAT", "PRICE", "TIME", "VCPU-S", "GIB-S", "DISK GB-H", "AMOUNT"}, rows); err != nil {
		return err
	}
	if b.Verified && len(b.Differences) == 0 {
		a.say("verified: every figure was recomputed and is the same")
	}
	return nil
}

// formatMetered is a metered time, to the millisecond.
func formatMetered(ms int64) string { return (time.Duration(ms) * time.Millisecond).String() }

// verified fails where the ledger says otherwise than what happened. A server that did
// not verify is as bad.
func verified(b api.Bill) error {
	switch {
	case !b.Verified:
		return fault.New(fault.Unsupported, "the server did not verify the bill; it is too old for that")
	case len(b.Differences) == 0:
		return nil
	}
	lines := make([]string, len(b.Differences))
	for i, d := range b.Differences {
		lines[i] = "  " + clean(d)
	}
	return fault.New(fault.DataCorrupt, "the bill is not what happened; restore a backup of the database, or tell us:\n%s", strings.Join(lines, "\n")).Because("ledger")
}
