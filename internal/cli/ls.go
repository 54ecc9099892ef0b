package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// pageSize is the most that one page gives.
const pageSize = 1000

// paging are the flags of lists.
type paging struct {
	limit int
	all   bool
}

func (p *paging) add(cmd *cobra.Command) {
	cmd.Flags().IntVar(&p.limit, "limit", 100, "show at most this many")
	cmd.Flags().BoolVar(&p.all, "all", false, "show all, however many")
	cmd.MarkFlagsMutuallyExclusive("limit", "all")
}

// collect fetches pages until the list has what was asked for. fetch gives the cursor
// of the next page, "" after the last one. more says that there is more.
func (p paging) collect(fetch func(limit api.Limit, cursor string) (got int, next string, err error)) (next string, err error) {
	if p.limit < 1 && !p.all {
		return "", fault.New(fault.InvalidArgument, "--limit must be at least 1; --all shows all")
	}
	for have := 0; ; {
		limit := pageSize
		if !p.all {
			limit = min(limit, p.limit-have)
		}
		var got int
		if got, next, err = fetch(api.Limit(limit), next); err != nil {
			return "", err
		}
		have += got
		if next == "" || !p.all && have >= p.limit {
			return next, nil
		}
	}
}

// noteMore tells people that a list goes on.
func (a *app) noteMore(next string) {
	if next != "" {
		a.note("there are more; --all shows them")
	}
}

// sandboxList is a list of sandboxes as the API writes it.
type sandboxList struct {
	Sandboxes  []doc[api.Sandbox] `json:"sandboxes"`
	NextCursor *string            `json:"next_cursor"`
}

// listDocument is the JSON form of a list: the rows, and where it goes on.
func listDocument[T any](name string, rows []T, next string) map[string]any {
	if rows == nil {
		rows = []T{}
	}
	document := map[string]any{name: rows, "next_cursor": nil}
	if next != "" {
		document["next_cursor"] = next
	}
	return document
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func (a *app) listSandboxes(ctx context.Context, c *client, params api.ListSandboxesParams, p paging) (sandboxList, error) {
	var list sandboxList
	next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
		params.Limit, params.Cursor = &limit, cursor
		page, err := read[sandboxList](c.ListSandboxes(ctx, &params))
		list.Sandboxes = append(list.Sandboxes, page.Sandboxes...)
		return len(page.Sandboxes), orEmpty(page.NextCursor), err
	})
	if next != "" {
		list.NextCursor = &next
	}
	return list, err
}

func (a *app) lsCommand() *cobra.Command {
	var (
		p      paging
		params api.ListSandboxesParams
		states []string
		asJSON bool
		kept   bool
	)
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Long: "List sandboxes, oldest first. An operation that is at work on one stands beside its state. " +
			"Deleted ones are shown with --deleted, which lists those that `hutch undelete` can bring back, and with --state deleted, which lists all.",
		Example: "hutch ls\nhutch ls --state ready --label team=web\nhutch ls --deleted\nhutch ls --all --json",
		Args:    named(),
	}
	cmd.Flags().StringArrayVarP(&params.Label, "label", "l", nil, "only with this label, as key=value; all that are given must hold")
	cmd.Flags().StringSliceVarP(&states, "state", "s", nil, "only in these states: creating, ready, sleeping, stopped, archived, failed, deleted")
	cmd.Flags().StringVarP(&params.Template, "template", "t", "", "only from this template")
	cmd.Flags().BoolVar(&kept, "deleted", false, "only deleted ones that can be brought back, with the time left")
	cmd.MarkFlagsMutuallyExclusive("state", "deleted")
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		params.Undeletable = kept
		for _, s := range states {
			params.State = append(params.State, api.State(s))
		}
		list, err := a.listSandboxes(ctx, c, params, p)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("sandboxes", list.Sandboxes, orEmpty(list.NextCursor)))
		}
		rows := make([][]string, 0, len(list.Sandboxes))
		defer a.noteMore(orEmpty(list.NextCursor))
		if kept {
			for _, sb := range list.Sandboxes {
				rows = append(rows, a.deletedRow(sb.V))
			}
			return a.printTable([]string{"NAME", "ID", "STATE", "DISK", "DELETED", "LEFT"}, rows)
		}
		for _, sb := range list.Sandboxes {
			rows = append(rows, a.sandboxRow(sb.V))
		}
		return a.printTable([]string{"NAME", "STATE", "TEMPLATE", "CPUS", "MEMORY", "DISK", "AGE"}, rows)
	})
	return cmd
}

func (a *app) sandboxRow(s api.Sandbox) []string {
	return []string{
		clean(s.Name), stateText(s), orDash(s.Template), fmt.Sprint(s.CPUs),
		formatMemory(s.MemoryBytes), formatDisk(s.DiskBytes), formatAge(a.env.Now().Sub(s.CreatedAt.Time)),
	}
}

// deletedRow is one that can be brought back, with the time left for that.
func (a *app) deletedRow(s api.Sandbox) []string {
	row := []string{clean(s.Name), clean(s.ID), stateText(s), formatDisk(s.DiskBytes), "-", "-"}
	if s.DeletedAt != nil {
		row[4] = formatAge(a.env.Now().Sub(s.DeletedAt.Time)) + " ago"
	}
	if s.UndeleteUntil != nil {
		row[5] = formatAge(max(s.UndeleteUntil.Sub(a.env.Now()), 0))
	}
	return row
}

// stateText is the state, with the operation that is at work beside it.
func stateText(s api.Sandbox) string {
	text := clean(string(s.State))
	if s.Operation != nil {
		text += " (" + clean(s.Operation.Kind) + ")"
	}
	return text
}

// completeNames completes the names of sandboxes in a shell. What fails completes
// nothing.
func (a *app) completeNames(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	var names []string
	_ = a.verb(func(ctx context.Context, c *client, _ []string) error {
		list, err := a.listSandboxes(ctx, c, api.ListSandboxesParams{}, paging{limit: pageSize})
		for _, sb := range list.Sandboxes {
			names = append(names, sb.V.Name)
		}
		return err
	})(cmd, nil)
	return names, cobra.ShellCompDirectiveNoFileComp
}
