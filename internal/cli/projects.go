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

func (a *app) projectsCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "projects",
		Aliases: []string{"project"},
		Short:   "Make, list and limit projects",
		Long: "A project owns sandboxes, templates and API keys, and a key sees nothing of other projects. Projects are made and limited with " +
			"an operator's key, such as the one that `hutch up` makes; any other key sees its own.",
		Example: "hutch projects create web --plan trial --max-running 5\nhutch projects edit web --budget 10.00\nhutch projects ls",
	}, a.projectsLsCommand(), a.projectsGetCommand(), a.projectsCreateCommand(), a.projectsEditCommand())
}

func (a *app) projectsLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List projects with what they have",
		Example: "hutch projects ls --json",
		Args:    named(),
	}
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		var list []doc[api.Project]
		next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
			page, err := read[struct {
				Projects   []doc[api.Project] `json:"projects"`
				NextCursor string             `json:"next_cursor"`
			}](c.ListProjects(ctx, &api.ListProjectsParams{Limit: &limit, Cursor: cursor}))
			list = append(list, page.Projects...)
			return len(page.Projects), page.NextCursor, err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("projects", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, p := range list {
			rows = append(rows, []string{
				clean(p.V.ID), clean(string(p.V.Plan)), ofQuota(p.V.Use.Sandboxes, p.V.Quotas.Sandboxes), ofQuota(p.V.Use.Running, p.V.Quotas.Running),
				ofQuota(p.V.Use.VCPUs, p.V.Quotas.VCPUs), budgetText(p.V.Budget),
			})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"NAME", "PLAN", "SANDBOXES", "RUNNING", "VCPUS", "BUDGET"}, rows)
	})
	return cmd
}

// ofQuota is what there is of what there may be.
func ofQuota(has, most int64) string {
	if most == 0 {
		return fmt.Sprint(has)
	}
	return fmt.Sprintf("%d of %d", has, most)
}

// ofBytes is ofQuota for sizes.
func ofBytes(has, most int64, format func(int64) string) string {
	if most == 0 {
		return format(has)
	}
	return format(has) + " of " + format(most)
}

// budgetText is a budget in one line.
func budgetText(b *api.Budget) string {
	switch {
	case b == nil:
		return "-"
	case b.ExhaustedAt != nil:
		return fmt.Sprintf("%s, reached %s", clean(b.Limit), formatTime(b.ExhaustedAt.Time))
	}
	return fmt.Sprintf("%s of %s", clean(b.Spent), clean(b.Limit))
}

func (a *app) projectsGetCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "get NAME",
		Short:   "Show a project's limits, and what it has and spends",
		Example: "hutch projects get default",
		Args:    named("NAME"),
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		p, err := read[doc[api.Project]](c.GetProject(ctx, args[0]))
		if err != nil {
			return err
		}
		return a.showProject(p, asJSON)
	})
	return cmd
}

func (a *app) showProject(p doc[api.Project], asJSON bool) error {
	if asJSON {
		return a.printJSON(p)
	}
	v := p.V
	ttl, rate := "the installation's", "no limit"
	if v.TTLSeconds > 0 {
		ttl = (time.Duration(v.TTLSeconds) * time.Second).String()
	}
	if v.Rate.PerSecond > 0 {
		rate = fmt.Sprintf("%d calls a second a key", v.Rate.PerSecond)
		if v.Rate.Burst > 0 {
			rate += fmt.Sprintf(", %d at once", v.Rate.Burst)
		}
	}
	fields := [][2]string{
		{"name", v.ID}, {"plan", string(v.Plan)},
		{"sandboxes", ofQuota(v.Use.Sandboxes, v.Quotas.Sandboxes)}, {"running", ofQuota(v.Use.Running, v.Quotas.Running)},
		{"vcpus", ofQuota(v.Use.VCPUs, v.Quotas.VCPUs)}, {"memory", ofBytes(v.Use.MemoryBytes, v.Quotas.MemoryBytes, formatMemory)},
		{"disk", ofBytes(v.Use.DiskBytes, v.Quotas.DiskBytes, formatDisk)}, {"auto-stop", ttl}, {"rate", rate}, {"budget", budgetText(v.Budget)},
	}
	if v.Quotas.Forks > 0 {
		fields = append(fields, [2]string{"forks a call", fmt.Sprint(v.Quotas.Forks)})
	}
	if b := v.Budget; b != nil {
		if b.From != nil {
			fields = append(fields, [2]string{"counted from", formatTime(b.From.Time)})
		}
		if b.ExhaustedAt == nil && b.DueAt != nil {
			fields = append(fields, [2]string{"reached", "at " + formatTime(b.DueAt.Time) + ", as things are"})
		}
	}
	return a.printFields(append(fields, [2]string{"created", formatTime(v.CreatedAt.Time)}))
}

// projectFlags are the flags of what a project may have and spend.
type projectFlags struct {
	plan, ttl, budget, budgetFrom string
	noBudget                      bool
	memory, disk                  string
	sandboxes, running, vcpus     int64
	forks, rate, burst            int64
}

func (f *projectFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.plan, "plan", "", "standard, or trial: an auto-stop of 2h or less on every sandbox that boots")
	fl.Int64Var(&f.sandboxes, "max-sandboxes", 0, "most sandboxes; 0 is no limit, as for all of these")
	fl.Int64Var(&f.running, "max-running", 0, "most that run at a time")
	fl.Int64Var(&f.vcpus, "max-vcpus", 0, "most vCPUs of those that run")
	fl.StringVar(&f.memory, "max-memory", "", "most memory of those that run, such as 16GiB")
	fl.StringVar(&f.disk, "max-disk", "", "most disk of all, by their sizes, such as 100GB")
	fl.Int64Var(&f.forks, "max-forks", 0, "most forks of one call")
	fl.Int64Var(&f.rate, "rate", 0, "most calls a second of each key")
	fl.Int64Var(&f.burst, "burst", 0, "most calls at once after a pause (those of one second where not given)")
	fl.StringVar(&f.ttl, "ttl", "", "the auto-stop of sandboxes where nobody names one; 0 is the installation's")
	fl.StringVar(&f.budget, "budget", "", "what may be spent, such as 10.00: when it is reached what runs is stopped")
	fl.BoolVar(&f.noBudget, "no-budget", false, "no budget")
	fl.StringVar(&f.budgetFrom, "budget-from", "", "what was metered before this instant or day does not count; \"\" is the beginning")
	cmd.MarkFlagsMutuallyExclusive("budget", "no-budget")
}

// names are the flags that change something.
var projectFlagNames = []string{
	"plan", "max-sandboxes", "max-running", "max-vcpus", "max-memory", "max-disk", "max-forks", "rate", "burst", "ttl", "budget", "no-budget", "budget-from",
}

// body is what the flags ask for, on what the project has: quotas and the rate are replaced
// as a whole.
func (f *projectFlags) body(cmd *cobra.Command, had api.Project) (api.UpdateProject, error) {
	var out api.UpdateProject
	given := func(name string) bool { return cmd.Flags().Changed(name) }
	if given("plan") {
		plan := api.Plan(f.plan)
		out.Plan = &plan
	}
	quotas, changed := had.Quotas, false
	for name, to := range map[string]struct {
		field *int64
		value int64
	}{
		"max-sandboxes": {&quotas.Sandboxes, f.sandboxes}, "max-running": {&quotas.Running, f.running}, "max-vcpus": {&quotas.VCPUs, f.vcpus},
		"max-forks": {&quotas.Forks, f.forks},
	} {
		if given(name) {
			*to.field, changed = to.value, true
		}
	}
	for name, to := range map[string]struct {
		field *int64
		text  string
		parse func(flag, s string) (int64, error)
	}{
		"max-memory": {&quotas.MemoryBytes, f.memory, parseMemory}, "max-disk": {&quotas.DiskBytes, f.disk, parseDisk},
	} {
		if !given(name) {
			continue
		}
		*to.field, changed = 0, true
		if to.text != "0" && to.text != "" {
			var err error
			if *to.field, err = to.parse(name, to.text); err != nil {
				return out, err
			}
		}
	}
	if changed {
		out.Quotas = &quotas
	}
	if given("rate") || given("burst") {
		rate := had.Rate
		if given("rate") {
			rate.PerSecond = f.rate
		}
		if given("burst") {
			rate.Burst = f.burst
		}
		out.Rate = &rate
	}
	if given("ttl") {
		n := int64(0)
		if f.ttl != "0" && f.ttl != "" {
			d, err := parseDuration("ttl", f.ttl)
			if err != nil {
				return out, err
			}
			n = int64(d / time.Second)
		}
		out.TTLSeconds = &n
	}
	if given("budget") || f.noBudget {
		out.Budget = &f.budget
	}
	if given("budget-from") {
		out.BudgetFrom = &f.budgetFrom
	}
	return out, nil
}

func (a *app) projectsCreateCommand() *cobra.Command {
	var f projectFlags
	var asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:     "create NAME",
		Aliases: []string{"new"},
		Short:   "Make a project",
		Long:    "Make a project. It begins with the templates of the operator's own project; `hutch keys create NAME --project PROJECT` makes a key for it.",
		Example: "hutch projects create web\nhutch projects create guests --plan trial --max-running 3 --max-vcpus 6 --rate 10 --budget 25.00",
		Args:    named("NAME"),
	}
	f.add(cmd)
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		b, err := f.body(cmd, api.Project{})
		if err != nil {
			return err
		}
		p, err := read[doc[api.Project]](c.CreateProject(ctx, &api.CreateProjectParams{IdempotencyKey: keyOr(requestKey)}, api.CreateProject{
			Name: args[0], Plan: b.Plan, Quotas: b.Quotas, Rate: b.Rate, TTLSeconds: b.TTLSeconds, Budget: b.Budget, BudgetFrom: b.BudgetFrom,
		}))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(p)
		}
		a.say("%s", clean(p.V.ID))
		a.note("`hutch keys create NAME --project %s` makes a key for it", clean(p.V.ID))
		return nil
	})
	return cmd
}

func (a *app) projectsEditCommand() *cobra.Command {
	var f projectFlags
	var asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:   "edit NAME",
		Short: "Change what a project may have and spend",
		Long: "Change what a project may have and spend; what is not named stays. A quota below what there is takes nothing away: it refuses more. " +
			"A change of plan applies at the next boot of each sandbox.\n\n" +
			"A budget counts what is metered, from the beginning or from --budget-from on. At the instant at which the spending reaches it, " +
			"what runs or sleeps is stopped and metered to that instant, also where the machine stops later; then new, fork, wake and resume are " +
			"refused as budget_exhausted. Disks stay, and archived ones cost on. A higher budget lets all go on; what was stopped stays so until it is resumed.",
		Example: "hutch projects edit web --budget 10.00\nhutch projects edit web --max-running 0 --plan standard",
		Args:    named("NAME"),
	}
	f.add(cmd)
	cmd.MarkFlagsOneRequired(projectFlagNames...)
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		had, err := read[api.Project](c.GetProject(ctx, args[0]))
		if err != nil {
			return err
		}
		b, err := f.body(cmd, had)
		if err != nil {
			return err
		}
		p, err := read[doc[api.Project]](c.UpdateProject(ctx, args[0], &api.UpdateProjectParams{IdempotencyKey: keyOr(requestKey)}, b))
		if err != nil {
			return err
		}
		return a.showProject(p, asJSON)
	})
	return cmd
}

// expiry reads when a key expires: how long from now, an instant, or a day.
func expiry(text string, now time.Time) (string, error) {
	if text == "" || strings.Contains(text, "-") {
		return text, nil // the server reads what is a date
	}
	d, err := parseDuration("expires", text)
	if err != nil {
		return "", fault.Wrap(err, fault.InvalidArgument, "--expires %q is neither a duration such as 12h or 30d nor an instant or a day such as 2026-03-01", text)
	}
	return now.Add(d).UTC().Format(time.RFC3339), nil
}
