package cli

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) dfCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "df [NAME]",
		Short: "Show what takes the space of the disk pool",
		Long: "Show how full each host's disk pool is and what takes its space; then the sandboxes, the one that takes most first. " +
			"USED is what a disk and its saves take in the pool, what they share with copies included; OWN is the part that nothing else " +
			"shares, so that deleting the sandbox for good gives back at least that much; MEMORY is saved memory. With NAME, only that sandbox. " +
			"What is deleted and can be brought back is `deleted`; `hutch delete --permanent` gives its space back.\n\n" +
			"A pool that is `low` takes no new sandboxes and forks; what is there goes on, sleeps and stops. In one that is `full` " +
			"sandboxes that run are held (degraded, disk_full) until there is space.",
		Example:           "hutch df\nhutch df demo\nhutch df --json",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeNames,
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		var params api.GetDiskUsageParams
		if len(args) == 1 {
			if params.Sandbox = args[0]; params.Sandbox == "" {
				return fault.New(fault.InvalidArgument, "the sandbox's name is empty; `hutch df` without one shows all")
			}
		}
		usage, err := read[doc[api.DiskUsage]](c.GetDiskUsage(ctx, &params))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(usage)
		}
		for i, h := range usage.V.Hosts {
			if i > 0 {
				a.say("")
			}
			if err := a.printHostDisk(h, len(args) == 1); err != nil {
				return err
			}
		}
		return nil
	})
	return cmd
}

func (a *app) printHostDisk(h api.HostDisk, one bool) error {
	if !one {
		if err := a.printFields(hostDiskFields(h)); err != nil {
			return err
		}
		a.say("")
	}
	rows := make([][]string, 0, len(h.Sandboxes))
	for _, s := range h.Sandboxes {
		own := "-"
		if s.UniqueBytes != nil {
			own = formatDisk(*s.UniqueBytes)
		}
		rows = append(rows, []string{
			clean(s.Name), clean(string(s.State)), formatDisk(s.SizeBytes), formatDisk(s.AllocatedBytes), own, formatDisk(s.SavedMemoryBytes),
		})
	}
	return a.printTable([]string{"NAME", "STATE", "DISK", "USED", "OWN", "MEMORY"}, rows)
}

// hostDiskFields are a pool's facts for people; parts that are not there are left out.
func hostDiskFields(h api.HostDisk) [][2]string {
	percent := 0.0
	if h.PoolBytes > 0 {
		percent = 100 * float64(h.PoolFreeBytes) / float64(h.PoolBytes)
	}
	pool := fmt.Sprintf("%s, %s free (%.0f %%), %s in reserve for saves", formatDisk(h.PoolBytes), formatDisk(h.PoolFreeBytes), percent, formatDisk(h.ReserveBytes))
	state := "ok; nothing new is made below " + formatDisk(h.LowMarkBytes) + " free"
	switch h.State {
	case api.HostDiskStateLow:
		state = "low: nothing new is made until " + formatDisk(h.LowMarkBytes) + " are free; delete sandboxes, or make the pool larger"
	case api.HostDiskStateFull:
		state = "full: sandboxes that run are held until " + formatDisk(h.StopMarkBytes) + " are free; delete or stop some, or make the pool larger"
	}
	fields := [][2]string{
		{"host", h.ID}, {"pool", pool}, {"state", state},
		{"disks", formatDisk(h.DisksBytes) + ", what they share counted each time"},
		{"of deleted ones", deletedDisks(h)},
		{"saved memory", fmt.Sprintf("%s of at most %s", formatDisk(h.SavedMemoryBytes), formatDisk(h.MemoryQuotaBytes))},
	}
	for _, part := range []struct {
		name, what string
		share      api.Share
	}{
		{"templates", "%s (%d)", h.Templates},
		{"forks at work", "%s (%d captures)", h.Forks},
		{"other projects", "%s (%d sandboxes)", h.Others},
		{"unowned", "%s (%d sandboxes that the host does not know; see `hutch doctor`)", h.Unowned},
	} {
		if part.share.Count > 0 {
			fields = append(fields, [2]string{part.name, fmt.Sprintf(part.what, formatDisk(part.share.Bytes), part.share.Count)})
		}
	}
	data := fmt.Sprintf("%s, %s free", formatDisk(h.DataBytes), formatDisk(h.DataFreeBytes))
	if h.PoolInFile {
		data += ", the pool's file in it"
	}
	fields = slices.DeleteFunc(fields, func(f [2]string) bool { return f[1] == "" })
	return slices.Concat(fields, [][2]string{{"other", formatDisk(h.OtherBytes)}, {"data directory", data}})
}

// deletedDisks is what the disks take that `hutch undelete` brings back, "" where there
// are none.
func deletedDisks(h api.HostDisk) string {
	n, bytes := 0, int64(0)
	for _, s := range h.Sandboxes {
		if s.State == api.StateDeleted {
			n, bytes = n+1, bytes+s.AllocatedBytes
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%s (%d sandboxes that can be brought back; `hutch delete --permanent` erases them)", formatDisk(bytes), n)
}
