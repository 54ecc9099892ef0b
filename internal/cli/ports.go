package cli

import (
	"context"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func (a *app) portsCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:     "ports",
		Short:   "Reach programs in a sandbox over HTTP",
		Example: "hutch ports connect demo 3000\nhutch ports share demo 3000\nhutch ports ls demo",
	}, a.portsLsCommand(), a.portsConnectCommand(), a.portsShareCommand(), a.portsRevokeCommand())
}

func (a *app) portsLsCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls NAME",
		Short: "List who may reach its ports without an API key",
		Long: "List a sandbox's public ports and its connection tokens, which are shown once, when they are made. Whoever has an API key with " +
			"the scope exec reaches every port with the header X-API-Key.",
		Example:           "hutch ports ls demo --json",
		Args:              named("NAME"),
		ValidArgsFunction: a.completeNames,
	}
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		list, err := read[doc[api.PortGrantList]](c.ListPorts(ctx, args[0]))
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(list)
		}
		rows := make([][]string, 0, len(list.V.Ports))
		for _, g := range list.V.Ports {
			port, to, expires := strconv.FormatInt(g.Port, 10), "token", "at a stop"
			if g.Port == 0 {
				port = "any"
			}
			if g.Public {
				to, expires = "everybody", "never"
			} else if g.ExpiresAt != nil {
				expires = formatTime(g.ExpiresAt.Time)
			}
			rows = append(rows, []string{clean(g.ID), port, to, expires, clean(g.URL)})
		}
		return a.printTable([]string{"ID", "PORT", "OPEN TO", "EXPIRES", "URL"}, rows)
	})
	return cmd
}

// port reads a port that somebody typed.
func port(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 || n > 65535 {
		return 0, fault.New(fault.InvalidArgument, "%q is no port; use a number between 1 and 65535", text).Because("port")
	}
	return n, nil
}

func (a *app) openPort(ctx context.Context, c *client, name, key string, body api.OpenPort) (doc[api.OpenedPort], error) {
	return read[doc[api.OpenedPort]](c.OpenPort(ctx, name, &api.OpenPortParams{IdempotencyKey: keyOr(key)}, body))
}

func (a *app) portsConnectCommand() *cobra.Command {
	var asJSON, anyPort bool
	var requestKey, expires string
	cmd := &cobra.Command{
		Use:   "connect NAME PORT",
		Short: "Make an address with a token for one port",
		Long: "Make a connection token for a port, and print the address with it. Whoever has the address reaches the port until the token " +
			"expires, is revoked, or the sandbox stops; a request wakes the sandbox. Programs send the token as the header X-Hutch-Token; " +
			"browsers are given a cookie in exchange for it.",
		Example:           "hutch ports connect demo 3000 --expires 8h\ncurl \"$(hutch ports connect demo 3000)\"",
		Args:              named("NAME", "PORT"),
		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().StringVar(&expires, "expires", "", "when the token ends by itself: after 8h or 7d, at 2026-03-01T12:00:00Z; at most 30d (1h where not given)")
	cmd.Flags().BoolVar(&anyPort, "any-port", false, "the token opens every port of the sandbox")
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		n, err := port(args[1])
		if err != nil {
			return err
		}
		body := api.OpenPort{Port: n}
		if body.ExpiresAt, err = expiry(expires, a.env.Now()); err != nil {
			return err
		}
		if anyPort {
			body.Port = 0
		}
		opened, err := a.openPort(ctx, c, args[0], requestKey, body)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(opened)
		}
		if anyPort {
			a.say("%s", clean(opened.V.Token))
		} else {
			a.say("%s?hutch_token=%s", clean(opened.V.Grant.URL), url.QueryEscape(opened.V.Token))
		}
		if at := opened.V.Grant.ExpiresAt; at != nil {
			a.note("token %s, until %s or the next stop; it is not shown again", clean(opened.V.Grant.ID), formatTime(at.Time))
		}
		return nil
	})
	return cmd
}

func (a *app) portsShareCommand() *cobra.Command {
	var asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:   "share NAME PORT",
		Short: "Open a port to everybody",
		Long: "Open a port to everybody who can reach the server, until it is revoked; a request wakes the sandbox. It stays open across stops. " +
			"A fork begins with no port open.",
		Example:           "hutch ports share demo 3000",
		Args:              named("NAME", "PORT"),
		ValidArgsFunction: a.completeNames,
	}
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		n, err := port(args[1])
		if err != nil {
			return err
		}
		opened, err := a.openPort(ctx, c, args[0], requestKey, api.OpenPort{Port: n, Public: true})
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(opened)
		}
		a.say("%s", clean(opened.V.Grant.URL))
		a.note("the port is public; close it with `hutch ports revoke %s %s`", clean(args[0]), clean(opened.V.Grant.ID))
		return nil
	})
	return cmd
}

func (a *app) portsRevokeCommand() *cobra.Command {
	var asJSON bool
	var requestKey string
	cmd := &cobra.Command{
		Use:               "revoke NAME ID",
		Aliases:           []string{"rm"},
		Short:             "Revoke a token, or close a public port",
		Long:              "Revoke a connection token or close a public port, by the id that `hutch ports ls` shows. A connection that it opened goes on to its end.",
		Example:           "hutch ports revoke demo prt_01k3c9a6xwe8htz0s6h1j2k3m4",
		Args:              named("NAME", "ID"),
		ValidArgsFunction: a.completeNames,
	}
	addRequestKey(cmd, &requestKey)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		if err := done(c.RevokePort(ctx, args[0], args[1], &api.RevokePortParams{IdempotencyKey: keyOr(requestKey)})); err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(map[string]string{"grant": args[1]})
		}
		a.note("revoked %s", clean(args[1]))
		return nil
	})
	return cmd
}
