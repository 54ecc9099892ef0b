package main

import (
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/config"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/webhook"
)

// eventFlags are the operator's settings of events and webhooks, as they are typed.
type eventFlags struct {
	keep  string
	http  bool
	allow string
}

func (f *eventFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.keep, "keep-events", "", "how long events, and operations and deliveries that ended, are kept, such as 720h (default 2160h, which is 90 days)")
	cmd.Flags().BoolVar(&f.http, "webhook-http", false, "let webhooks go to http:// addresses too")
	cmd.Flags().StringVar(&f.allow, "webhook-allow", "", "ranges that webhooks may go to although they are not public, such as 10.0.0.0/8,127.0.0.1")
}

// settle takes from the settings what no flag says.
func (f *eventFlags) settle(cmd *cobra.Command, s settings) {
	if !cmd.Flags().Changed("keep-events") {
		f.keep = s.duration(config.KeepEvents).String()
	}
	f.http, f.allow = s.text(config.WebhookHTTP) == "true", s.text(config.WebhookAllow)
}

// leastKept is the shortest that events may be kept: whoever follows them has the time to
// come again after a restart.
const leastKept = time.Hour

// apply puts the settings into a configuration.
func (f eventFlags) apply(cfg *control.Config) error {
	if f.keep != "" {
		d, err := time.ParseDuration(f.keep)
		if err != nil || d < leastKept {
			return fault.New(fault.InvalidArgument, "cannot keep events for %.40q: give an hour or more, such as 720h", f.keep).Because("keep-events")
		}
		cfg.Limits.HistoryKeep = d
	}
	policy := webhook.Policy{HTTP: f.http}
	for _, text := range strings.Split(f.allow, ",") {
		if text == "" {
			continue
		}
		p, err := parseRange(text)
		if err != nil || p != p.Masked() {
			return fault.New(fault.InvalidArgument, "cannot allow webhooks to go to %.60q: write ranges such as 10.0.0.0/8, with a comma between them", text).Because("webhook-allow")
		}
		policy.Inside = append(policy.Inside, p)
	}
	cfg.Webhooks = webhook.Config{Policy: policy, Agent: "hutch/" + version}
	return nil
}

// parseRange reads a range of addresses, or one address.
func parseRange(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		return a.Prefix(a.BitLen())
	}
	return netip.ParsePrefix(text)
}
