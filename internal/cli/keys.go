package cli

import (
	"context"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) keysCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "keys",
		Short:   "Make, list, rotate and revoke API keys",
		Example: "hutch keys create ci --scope read --expires 30d\nhutch keys ls\nhutch keys rm key_01k3c9a6xwe8htz0s6h1j2k3m4",
	}, a.keysLsCommand(), a.keysCreateCommand(), a.keysRotateCommand(), a.keysRmCommand())
}

func (a *app) keysLsCommand() *cobra.Command {
	var p paging
	var asJSON bool
	var project string
	cmd := &cobra.Command{
		Use:     "ls",
		Short:   "List API keys, without their secrets",
		Example: "hutch keys ls --json",
		Args:    named(),
	}
	p.add(cmd)
	cmd.Flags().StringVar(&project, "project", "", "those of another project than the key's own, with an operator's key")
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, _ []string) error {
		list, next, err := a.listKeys(ctx, c, p, project)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(listDocument("keys", list, next))
		}
		rows := make([][]string, 0, len(list))
		for _, key := range list {
			used := "never"
			if key.V.LastUsedAt != nil {
				used = formatTime(key.V.LastUsedAt.Time)
			}
			expires := "never"
			if key.V.ExpiresAt != nil {
				expires = formatTime(key.V.ExpiresAt.Time)
			}
			rows = append(rows, []string{
				clean(key.V.ID), clean(key.V.Name), clean(key.V.Prefix), scopeText(key.V.Scopes), formatTime(key.V.CreatedAt.Time), expires, used,
			})
		}
		defer a.noteMore(next)
		return a.printTable([]string{"ID", "NAME", "PREFIX", "SCOPES", "CREATED", "EXPIRES", "LAST USED"}, rows)
	})
	return cmd
}

// scopeText is what a key may do, in one word each.
func scopeText(scopes []api.Scope) string {
	words := make([]string, len(scopes))
	for i, s := range scopes {
		words[i] = clean(string(s))
	}
	return strings.Join(words, ",")
}

func (a *app) listKeys(ctx context.Context, c *client, p paging, project string) (list []doc[api.Key], next string, err error) {
	next, err = p.collect(func(limit api.Limit, cursor string) (int, string, error) {
		page, err := read[struct {
			Keys       []doc[api.Key] `json:"keys"`
			NextCursor string         `json:"next_cursor"`
		}](c.ListKeys(ctx, &api.ListKeysParams{Limit: &limit, Cursor: cursor, Project: project}))
		list = append(list, page.Keys...)
		return len(page.Keys), page.NextCursor, err
	})
	return list, next, err
}

func (a *app) keysCreateCommand() *cobra.Command {
	var asJSON bool
	var requestKey, expires string
	var scopes []string
	var body api.CreateKey
	cmd := &cobra.Command{
		Use:     "create NAME",
		Aliases: []string{"new"},
		Short:   "Make an API key",
		Long: "Make an API key. Its secret goes to stdout and is shown this once: the server keeps only its hash.\n\n" +
			"A key is of one project and may do what its scopes say, no more than the key that makes it: read (see what there is), write (make, " +
			"change and end sandboxes and templates), exec (commands and files in a sandbox), keys (keys of the project), operator (all of it in " +
			"every project).",
		Example: "hutch keys create ci --scope read --scope exec --expires 30d\nhutch keys create web --project web\nexport HUTCH_API_KEY=$(hutch keys create ci)",
		Args:    named("NAME"),
	}
	cmd.Flags().StringVar(&body.Project, "project", "", "a key of another project than the key's own, with an operator's key")
	cmd.Flags().StringSliceVar(&scopes, "scope", nil, "what it may do; may be given more than once (read, write, exec and keys where not given)")
	cmd.Flags().StringVar(&expires, "expires", "", "when it ends by itself: after 12h or 30d, at 2026-03-01T12:00:00Z or 2026-03-01 (never where not given)")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		var err error
		body.Name = args[0]
		if body.ExpiresAt, err = expiry(expires, a.env.Now()); err != nil {
			return err
		}
		for _, s := range scopes {
			body.Scopes = append(body.Scopes, api.Scope(s))
		}
		key, err := read[doc[api.CreatedKey]](c.CreateKey(ctx, &api.CreateKeyParams{IdempotencyKey: keyOr(requestKey)}, body))
		if err != nil {
			return err
		}
		return a.showSecret(key, asJSON)
	})
	return cmd
}

// showSecret prints a secret, and beside it whose it is.
func (a *app) showSecret(key doc[api.CreatedKey], asJSON bool) error {
	if asJSON {
		return a.printJSON(key)
	}
	a.say("%s", clean(key.V.Secret))
	a.note("key %s (%s) of the project %s, for %s; the secret is not shown again", clean(key.V.Key.ID), clean(key.V.Key.Name), clean(key.V.Key.Project),
		scopeText(key.V.Key.Scopes))
	return nil
}

func (a *app) keysRotateCommand() *cobra.Command {
	var yes, asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:   "rotate ID",
		Short: "Give an API key another secret",
		Long: "Give an API key another secret, which goes to stdout and is shown this once. The one before opens nothing any more. " +
			"It is asked first; where there is no terminal to ask on, --yes is needed.",
		Example: "hutch keys rotate key_01k3c9a6xwe8htz0s6h1j2k3m4 --yes",
		Args:    named("ID"),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if !yes {
			if err := a.confirm(ctx, "end the present secret of the key "+args[0]); err != nil {
				return err
			}
		}
		key, err := read[doc[api.CreatedKey]](c.RotateKey(ctx, args[0], &api.RotateKeyParams{IdempotencyKey: keyOr(requestKey)}))
		if err != nil {
			return err
		}
		return a.showSecret(key, asJSON)
	})
	return cmd
}

func (a *app) keysRmCommand() *cobra.Command {
	var yes, asJSON bool
	var requestKey, project string
	cmd := &cobra.Command{
		Use:     "rm ID",
		Aliases: []string{"delete"},
		Short:   "Revoke an API key",
		Long:    "Revoke an API key: it opens nothing any more. It is asked first; where there is no terminal to ask on, --yes is needed.",
		Example: "hutch keys rm key_01k3c9a6xwe8htz0s6h1j2k3m4 --yes",
		Args:    named("ID"),
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	cmd.Flags().StringVar(&project, "project", "", "one of another project than the key's own, with an operator's key")
	addJSON(cmd, &asJSON)
	addRequestKey(cmd, &requestKey)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if !yes {
			keys, _, err := a.listKeys(ctx, c, paging{all: true}, project)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(keys, func(k doc[api.Key]) bool { return k.V.ID == args[0] }) {
				return fault.New(fault.NotFound, "there is no API key %s; `hutch keys ls` lists those that are", args[0]).Because("key")
			}
			if err := a.confirm(ctx, "revoke the key "+args[0]); err != nil {
				return err
			}
		}
		if err := done(c.DeleteKey(ctx, args[0], &api.DeleteKeyParams{IdempotencyKey: keyOr(requestKey)})); err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(map[string]string{"key": args[0]})
		}
		a.note("revoked %s", clean(args[0]))
		return nil
	})
	return cmd
}
