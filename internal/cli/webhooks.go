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

func (a *app) webhooksCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "webhooks",
		Aliases: []string{"webhook"},
		Short:   "Have events sent to an address of yours",
		Long: "Have events sent to an address of yours as they happen: POSTed as JSON and signed by the Standard Webhooks scheme. " +
			"Events of one sandbox come in their order. What is not answered with a 2xx is tried again for 3 days, and may come twice, with the same id.",
		Example: "hutch webhooks create https://example.com/hook --events 'sandbox.*'\nhutch webhooks deliveries wh_01k3c9a6xwe8htz0s6h1j2k3m4 --status failed",
	}, a.webhooksCreateCommand(), a.webhooksLsCommand(), a.webhooksGetCommand(), a.webhooksEditCommand(), a.webhooksDeleteCommand(),
		a.webhooksTestCommand(), a.webhooksDeliveriesCommand(), a.webhooksReplayCommand(), a.webhooksRotateCommand())
}

const eventsFlagHelp = "event types that are sent, such as sandbox.ready or sandbox.* (may be given more than once; all where not given)"

func (a *app) webhooksCreateCommand() *cobra.Command {
	var body api.CreateWebhook
	var asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:     "create URL",
		Aliases: []string{"new"},
		Short:   "Make a webhook",
		Long: "Make a webhook: what happens from now on is sent to URL. The secret that signatures are checked with goes to stdout, and is not shown again. " +
			"URL is https and leads to a public address, unless the operator of the server allows more (`hutch up --help`).",
		Example: "hutch webhooks create https://example.com/hook\nhutch webhooks create https://example.com/hook --events 'sandbox.*' --events operation.failed --json",
		Args:    named("URL"),
	}
	cmd.Flags().StringSliceVar(&body.Events, "events", nil, eventsFlagHelp)
	cmd.Flags().StringVar(&body.Description, "description", "", "what it is for, for people")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		body.URL = args[0]
		made, err := read[doc[api.WebhookSecret]](c.CreateWebhook(ctx, &api.CreateWebhookParams{IdempotencyKey: keyOr(requestKey)}, body))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(made)
		}
		a.say("%s", clean(made.V.Secret))
		a.note("webhook %s; the secret is not shown again. `hutch webhooks test %s` sends it a message", clean(made.V.Webhook.ID), clean(made.V.Webhook.ID))
		return nil
	})
	return cmd
}

func (a *app) webhooksLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List webhooks",
		Example: "hutch webhooks ls --json",
		Args:    named(),
	}
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		var list []doc[api.Webhook]
		next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
			page, err := read[struct {
				Webhooks   []doc[api.Webhook] `json:"webhooks"`
				NextCursor string             `json:"next_cursor"`
			}](c.ListWebhooks(ctx, &api.ListWebhooksParams{Limit: &limit, Cursor: cursor}))
			list = append(list, page.Webhooks...)
			return len(page.Webhooks), page.NextCursor, err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("webhooks", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, w := range list {
			rows = append(rows, []string{clean(w.V.ID), clean(string(w.V.Status)), fmt.Sprint(w.V.Pending), eventsText(w.V.Events), clean(w.V.URL)})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"ID", "STATUS", "PENDING", "EVENTS", "URL"}, rows)
	})
	return cmd
}

func eventsText(types []string) string {
	if len(types) == 0 {
		return "all"
	}
	return clean(strings.Join(types, ","))
}

func (a *app) webhooksGetCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "get ID",
		Short:   "Show a webhook, and whether it takes what it is sent",
		Example: "hutch webhooks get wh_01k3c9a6xwe8htz0s6h1j2k3m4",
		Args:    named("ID"),
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		w, err := read[doc[api.Webhook]](c.GetWebhook(ctx, args[0]))
		if err != nil {
			return err
		}
		return a.printWebhook(w, asJSON)
	})
	return cmd
}

func (a *app) printWebhook(w doc[api.Webhook], asJSON bool) error {
	if asJSON {
		return a.printJSON(w)
	}
	fields := [][2]string{{"id", w.V.ID}, {"url", w.V.URL}}
	if w.V.Description != "" {
		fields = append(fields, [2]string{"description", w.V.Description})
	}
	fields = append(fields, [2]string{"events", eventsText(w.V.Events)}, [2]string{"status", string(w.V.Status)})
	if at := w.V.FailingSince; at != nil {
		fields = append(fields, [2]string{"failing since", formatTime(at.Time)}, [2]string{"last error", w.V.LastError})
	}
	if at := w.V.DisabledAt; at != nil {
		fields = append(fields, [2]string{"disabled", formatTime(at.Time)}, [2]string{"because", w.V.DisabledReason})
	}
	fields = append(fields, [2]string{"pending", fmt.Sprint(w.V.Pending)}, [2]string{"secrets", fmt.Sprint(w.V.Secrets)},
		[2]string{"created", formatTime(w.V.CreatedAt.Time)})
	return a.printFields(fields)
}

func (a *app) webhooksEditCommand() *cobra.Command {
	var asJSON, enable, disable bool
	var requestKey, url, description string
	var events []string
	cmd := &cobra.Command{
		Use:   "edit ID",
		Short: "Change a webhook, disable it or enable it again",
		Long: "Change a webhook. --disable ends what waits for it. One that is enabled again is sent what happens from then on; " +
			"`hutch webhooks replay` sends what it missed. What waits goes to a new --url.",
		Example: "hutch webhooks edit wh_01k3c9a6xwe8htz0s6h1j2k3m4 --enable\nhutch webhooks edit wh_01k3c9a6xwe8htz0s6h1j2k3m4 --events 'sandbox.*'",
		Args:    named("ID"),
	}
	cmd.Flags().StringVar(&url, "url", "", "where it is sent")
	cmd.Flags().StringSliceVar(&events, "events", nil, "event types that are sent, in place of those before; --events '*' is all")
	cmd.Flags().StringVar(&description, "description", "", "what it is for, for people")
	cmd.Flags().BoolVar(&enable, "enable", false, "send to it again")
	cmd.Flags().BoolVar(&disable, "disable", false, "send nothing more to it")
	cmd.MarkFlagsMutuallyExclusive("enable", "disable")
	cmd.MarkFlagsOneRequired("url", "events", "description", "enable", "disable")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		var body api.UpdateWebhook
		for flag, set := range map[string]func(){
			"url": func() { body.URL = &url }, "description": func() { body.Description = &description },
			"events": func() { body.Events = &events }, "enable": func() { body.Enabled = &enable },
			"disable": func() { enabled := !disable; body.Enabled = &enabled },
		} {
			if cmd.Flags().Changed(flag) {
				set()
			}
		}
		w, err := read[doc[api.Webhook]](c.UpdateWebhook(ctx, args[0], &api.UpdateWebhookParams{IdempotencyKey: keyOr(requestKey)}, body))
		if err != nil {
			return err
		}
		return a.printWebhook(w, asJSON)
	})
	return cmd
}

func (a *app) webhooksDeleteCommand() *cobra.Command {
	var yes, asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:     "delete ID",
		Aliases: []string{"rm"},
		Short:   "Delete a webhook and its log",
		Long:    "Delete a webhook and its log: nothing more is sent to it. It is asked first; where there is no terminal to ask on, --yes is needed.",
		Example: "hutch webhooks delete wh_01k3c9a6xwe8htz0s6h1j2k3m4 --yes",
		Args:    named("ID"),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if !yes {
			w, err := read[api.Webhook](c.GetWebhook(ctx, args[0]))
			if err != nil {
				return err
			}
			if err := a.confirm(ctx, fmt.Sprintf("delete the webhook %s (%s)", w.ID, w.URL)); err != nil {
				return err
			}
		}
		if err := done(c.DeleteWebhook(ctx, args[0], &api.DeleteWebhookParams{IdempotencyKey: keyOr(requestKey)})); err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(map[string]string{"webhook": args[0]})
		}
		a.note("deleted %s", clean(args[0]))
		return nil
	})
	return cmd
}

func (a *app) webhooksTestCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "test ID",
		Short: "Send a message to a webhook now, and show what came of it",
		Long: "Send one message of the type webhook.test to a webhook now, also where it is disabled, and show what came of it. " +
			"It is not tried again. The verb fails with failed_precondition (14) where the receiver did not take it.",
		Example: "hutch webhooks test wh_01k3c9a6xwe8htz0s6h1j2k3m4",
		Args:    named("ID"),
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		attempt, err := read[doc[api.DeliveryAttempt]](c.TestWebhook(ctx, args[0]))
		if err != nil {
			return err
		}
		if asJSON {
			if err := a.printJSON(attempt); err != nil {
				return err
			}
		}
		if attempt.V.Error != "" {
			return fault.New(fault.FailedPrecondition, "the test was not delivered: %s", clean(attempt.V.Error)).Because("not_delivered")
		}
		if !asJSON {
			a.say("delivered in %dms (status %d)", attempt.V.Milliseconds, attempt.V.Status)
		}
		return nil
	})
	return cmd
}

func (a *app) webhooksDeliveriesCommand() *cobra.Command {
	var p paging
	var params api.ListDeliveriesParams
	var status string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "deliveries ID [DELIVERY]",
		Short: "Show what was sent to a webhook, newest first, or all attempts of one",
		Long: "Show what was sent to a webhook and what waits to be sent, the newest event first; with DELIVERY all attempts of that one. " +
			"Deliveries are kept for 90 days after their end.",
		Example: "hutch webhooks deliveries wh_01k3c9a6xwe8htz0s6h1j2k3m4 --status failed\nhutch webhooks deliveries wh_01k3c9a6xwe8htz0s6h1j2k3m4 msg_0g1h2",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return fault.New(fault.InvalidArgument, "%s takes ID, and DELIVERY for one; `%s --help` shows an example", cmd.CommandPath(), cmd.CommandPath())
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&status, "status", "", "only those that are pending, delivered or failed")
	cmd.Flags().StringVar(&params.Sandbox, "sandbox", "", "only events of this sandbox")
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if len(args) == 2 {
			return a.showDelivery(ctx, c, args[0], args[1], asJSON)
		}
		params.Status = api.DeliveryStatus(status)
		var list []doc[api.Delivery]
		next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
			params.Limit, params.Cursor = &limit, cursor
			page, err := read[struct {
				Deliveries []doc[api.Delivery] `json:"deliveries"`
				NextCursor string              `json:"next_cursor"`
			}](c.ListDeliveries(ctx, args[0], &params))
			list = append(list, page.Deliveries...)
			return len(page.Deliveries), page.NextCursor, err
		})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("deliveries", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, d := range list {
			rows = append(rows, []string{clean(d.V.ID), fmt.Sprint(d.V.Seq), clean(d.V.Type), orDash(d.V.Sandbox), clean(string(d.V.Status)),
				fmt.Sprint(d.V.Attempts), formatTime(d.V.CreatedAt.Time), orDash(d.V.Error)})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"ID", "EVENT", "TYPE", "SANDBOX", "STATUS", "ATTEMPTS", "CREATED", "ERROR"}, rows)
	})
	return cmd
}

func (a *app) showDelivery(ctx context.Context, c *client, id, delivery string, asJSON bool) error {
	log, err := read[doc[api.DeliveryLog]](c.GetDelivery(ctx, id, delivery))
	if err != nil {
		return err
	}
	if asJSON {
		return a.printJSON(log)
	}
	d := log.V.Delivery
	fields := [][2]string{
		{"id", d.ID}, {"event", fmt.Sprintf("%d %s", d.Seq, d.Type)}, {"sandbox", orDash(d.Sandbox)}, {"status", string(d.Status)}, {"created", formatTime(d.CreatedAt.Time)},
	}
	if d.NextAt != nil {
		fields = append(fields, [2]string{"next try", formatTime(d.NextAt.Time)})
	}
	if d.EndedAt != nil {
		fields = append(fields, [2]string{"ended", formatTime(d.EndedAt.Time)})
	}
	if d.Error != "" {
		fields = append(fields, [2]string{"error", d.Error})
	}
	if err := a.printFields(fields); err != nil || len(log.V.Attempts) == 0 {
		return err
	}
	rows := make([][]string, 0, len(log.V.Attempts))
	for _, t := range log.V.Attempts {
		status := "-"
		if t.Status != 0 {
			status = fmt.Sprint(t.Status)
		}
		rows = append(rows, []string{fmt.Sprint(t.Number), formatTime(t.At.Time), fmt.Sprintf("%dms", t.Milliseconds), status, orDash(t.Error)})
	}
	a.say("")
	return a.printTable([]string{"ATTEMPT", "AT", "TOOK", "STATUS", "ERROR"}, rows)
}

func (a *app) webhooksReplayCommand() *cobra.Command {
	var body api.ReplayWebhook
	var asJSON bool
	var requestKey, since string
	cmd := &cobra.Command{
		Use:   "replay ID [DELIVERY]",
		Short: "Send events to a webhook again",
		Long: "Send one delivery again, or all events from a number or a time on, also those that the webhook never had. They keep their ids, so that " +
			"the receiver can tell what it has, and hold up nothing that happens meanwhile.",
		Example: "hutch webhooks replay wh_01k3c9a6xwe8htz0s6h1j2k3m4 --since 2h\nhutch webhooks replay wh_01k3c9a6xwe8htz0s6h1j2k3m4 msg_0g1h2",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return fault.New(fault.InvalidArgument, "%s takes ID, and DELIVERY for one; `%s --help` shows an example", cmd.CommandPath(), cmd.CommandPath())
			}
			return nil
		},
	}
	cmd.Flags().Int64Var(&body.From, "from-event", 0, "from the event with this number on")
	cmd.Flags().Int64Var(&body.To, "to-event", 0, "up to the event with this number (the newest where not given)")
	cmd.Flags().StringVar(&since, "since", "", sinceFlagHelp)
	cmd.MarkFlagsMutuallyExclusive("from-event", "since")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) (err error) {
		if len(args) == 2 {
			body.Delivery = args[1]
		}
		if body.Since, err = a.instant("since", since); err != nil {
			return err
		}
		if body.Delivery == "" && body.From == 0 && body.Since == "" {
			return fault.New(fault.InvalidArgument, "say what is to be replayed: a DELIVERY, or all from --since 2h or --from-event 1200 on")
		}
		n, err := read[doc[api.Replayed]](c.ReplayWebhook(ctx, args[0], &api.ReplayWebhookParams{IdempotencyKey: keyOr(requestKey)}, body))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(n)
		}
		a.say("%d on their way; `hutch webhooks deliveries %s` shows what comes of them", n.V.Deliveries, clean(args[0]))
		return nil
	})
	return cmd
}

func (a *app) webhooksRotateCommand() *cobra.Command {
	var asJSON bool
	var requestKey, overlap string
	cmd := &cobra.Command{
		Use:   "rotate-secret ID",
		Short: "Replace the secret that a webhook's messages are signed with",
		Long: "Replace the secret that a webhook's messages are signed with. The new one goes to stdout and is not shown again. " +
			"For --overlap messages carry a signature of each, so that the receiver can change over without losing one.",
		Example: "hutch webhooks rotate-secret wh_01k3c9a6xwe8htz0s6h1j2k3m4 --overlap 2h",
		Args:    named("ID"),
	}
	cmd.Flags().StringVar(&overlap, "overlap", "1d", "how long the secret before signs along; 0 ends it at once")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		d, err := parseDuration("overlap", overlap)
		if err != nil {
			return err
		}
		seconds := int64(d / time.Second)
		w, err := read[doc[api.WebhookSecret]](c.RotateWebhookSecret(ctx, args[0],
			&api.RotateWebhookSecretParams{IdempotencyKey: keyOr(requestKey)}, api.RotateSecret{OverlapSeconds: &seconds}))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(w)
		}
		a.say("%s", clean(w.V.Secret))
		if d == 0 {
			a.note("the secret before is void; the new one is not shown again")
		} else {
			a.note("the secret before signs along for %s; the new one is not shown again", d)
		}
		return nil
	})
	return cmd
}
