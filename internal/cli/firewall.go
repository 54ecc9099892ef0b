package cli

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// firewallFlags are the flags of a whole firewall.
type firewallFlags struct {
	mode, ports           string
	allow, deny           []string
	allowPorts, denyPorts []int
}

func (f *firewallFlags) add(cmd *cobra.Command, mode string) {
	flags := cmd.Flags()
	flags.StringVar(&f.mode, mode, "", "what it reaches: the internet (open, the default), what is allowed (allowlist, the default with --allow alone), or nothing (deny-all)")
	flags.StringSliceVar(&f.allow, "allow", nil, "an IPv4 range, address or name that it may reach, such as 203.0.113.0/24, example.com or *.example.com")
	flags.StringSliceVar(&f.deny, "deny", nil, "one that it may not reach")
	flags.StringVar(&f.ports, "ports", "", "whether those with access reach the ports inside that no rule names: allow (the default) or deny")
	flags.IntSliceVar(&f.allowPorts, "allow-port", nil, "a port inside that may be reached")
	flags.IntSliceVar(&f.denyPorts, "deny-port", nil, "one that may not be reached")
}

// firewall is what the flags say, nil for nothing.
func (f *firewallFlags) firewall() *api.Firewall {
	if f.mode == "" && f.ports == "" && len(f.allow)+len(f.deny)+len(f.allowPorts)+len(f.denyPorts) == 0 {
		return nil
	}
	out := &api.Firewall{
		Mode: api.FirewallMode(f.mode), Allow: f.allow, Deny: f.deny,
		Ports: api.FirewallPorts(f.ports), AllowPorts: f.allowPorts, DenyPorts: f.denyPorts,
	}
	if f.mode == "" && len(f.allow) > 0 && len(f.deny) == 0 {
		out.Mode = api.FirewallModeAllowlist
	}
	return out
}

func (a *app) firewallCommand() *cobra.Command {
	var asJSON bool
	var key string
	var f firewallFlags
	actions := []string{"show", "set", "allow", "deny", "reset"}
	cmd := &cobra.Command{
		Use:   "firewall NAME [show | set | allow RULE... | deny RULE... | reset]",
		Short: "Show or change what a sandbox may reach, and be reached on",
		Long: "Show or change what a sandbox may reach outside, and on which ports those with access reach it. A RULE is an IPv4 range, " +
			"an address, a name such as example.com or *.example.com (its subdomains), or the number of a port inside. In the mode open " +
			"what is denied is closed, save what is allowed; in the mode allowlist only what is allowed is open, save what is denied. " +
			"Names hold for TLS and HTTP, which tell the peer's name: it is read and has to be one of them; all else to such an address is " +
			"refused, QUIC too, and so are names that are not allowed, and other DNS servers. Private, link-local and host addresses and other " +
			"sandboxes are out of reach whatever the rules. A change works on a sandbox in any state, holds at once, and cuts connections that " +
			"are not allowed any more; forks copy the rules. set replaces them all; what it does not name is the default.",
		Example: "hutch firewall demo\nhutch firewall demo set --mode allowlist --allow registry.example.com --allow '*.example.org'\n" +
			"hutch firewall demo allow 203.0.113.0/24\nhutch firewall demo deny example.net 8080\nhutch firewall demo set --mode deny-all\nhutch firewall demo reset",
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return fault.New(fault.InvalidArgument, "hutch firewall takes a NAME; write hutch firewall NAME")
			case len(args) == 1:
			case !slices.Contains(actions, args[1]):
				return fault.New(fault.InvalidArgument, "%q is nothing that hutch firewall does; use %s", args[1], strings.Join(actions, ", "))
			case (args[1] == "allow" || args[1] == "deny") && len(args) < 3:
				return fault.New(fault.InvalidArgument, "hutch firewall NAME %s takes a RULE; write a range, a name or a port", args[1])
			case args[1] != "allow" && args[1] != "deny" && len(args) > 2:
				return fault.New(fault.InvalidArgument, "hutch firewall NAME %s takes nothing more", args[1])
			}
			if f.firewall() != nil && (len(args) < 2 || args[1] != "set") {
				return fault.New(fault.InvalidArgument, "rules as flags belong to set; write hutch firewall NAME set --mode MODE …")
			}
			return nil
		},
		ValidArgsFunction: a.completeNames,
	}
	f.add(cmd, "mode")
	addRequestKey(cmd, &key)
	addJSON(cmd, &asJSON)
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) error {
		action := "show"
		if len(args) > 1 {
			action = args[1]
		}
		var body api.Firewall
		switch action {
		case "set":
			if given := f.firewall(); given != nil {
				body = *given
			} else {
				return fault.New(fault.InvalidArgument, "hutch firewall NAME set takes rules as flags; use reset for the default")
			}
		case "show", "allow", "deny":
			now, err := read[doc[api.FirewallState]](c.GetFirewall(ctx, args[0]))
			if err != nil {
				return err
			}
			if action == "show" {
				return a.showFirewall(now, asJSON)
			}
			body = edited(now.V.Firewall, action == "allow", args[2:])
		}
		now, err := read[doc[api.FirewallState]](c.SetFirewall(ctx, args[0], &api.SetFirewallParams{IdempotencyKey: keyOr(key)}, body))
		if err != nil {
			return err
		}
		return a.showFirewall(now, asJSON)
	})
	return cmd
}

// edited is a firewall with rules moved into one of its lists. What is allowed where
// nothing was becomes the only thing that is.
func edited(f api.Firewall, allow bool, rules []string) api.Firewall {
	for _, r := range rules {
		if n, err := strconv.Atoi(r); err == nil {
			to, from := &f.AllowPorts, &f.DenyPorts
			if !allow {
				to, from = from, to
			}
			*from = slices.DeleteFunc(*from, func(p int) bool { return p == n })
			*to = append(*to, n)
			continue
		}
		to, from := &f.Allow, &f.Deny
		if !allow {
			to, from = from, to
		} else if f.Mode == api.FirewallModeDenyAll {
			f.Mode, f.Allow = api.FirewallModeAllowlist, nil
		}
		same := strings.TrimSuffix(strings.ToLower(r), "/32")
		*from = slices.DeleteFunc(*from, func(p string) bool { return strings.TrimSuffix(p, "/32") == same })
		*to = append(*to, r)
	}
	return f
}

func (a *app) showFirewall(now doc[api.FirewallState], asJSON bool) error {
	if asJSON {
		return a.printJSON(now)
	}
	f := now.V.Firewall
	list := func(name string, rules []string) {
		if len(rules) > 0 {
			a.say("%-12s %s", name, clean(strings.Join(rules, " ")))
		}
	}
	numbers := func(ports []int) (out []string) {
		for _, p := range ports {
			out = append(out, strconv.Itoa(p))
		}
		return out
	}
	a.say("%-12s %s", "mode", f.Mode)
	list("allow", f.Allow)
	list("deny", f.Deny)
	a.say("%-12s %s", "ports", f.Ports)
	list("allow-port", numbers(f.AllowPorts))
	list("deny-port", numbers(f.DenyPorts))
	if now.V.Pending {
		a.note("it is not applied yet: its host has not answered; hutch firewall NAME shows when it is")
	}
	return nil
}
