package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/metering"
)

const pricesFlagHelp = "what things cost, such as vcpu-second=0.000012,gib-second=0.0000035,archive-gb-month=0.012; " +
	"kept until others are given, valid a minute after the start (default: compute costs nothing)"

// parsePrices reads the flag --prices; nil for none.
func parsePrices(text string) (*metering.Price, error) {
	if text == "" {
		return nil, nil
	}
	given := map[string]string{"archive-gb-month": metering.DefaultArchivePrice}
	seen := map[string]bool{}
	for _, part := range strings.Split(text, ",") {
		name, figure, ok := strings.Cut(part, "=")
		known := name == "vcpu-second" || name == "gib-second" || name == "archive-gb-month"
		if !ok || !known || seen[name] {
			return nil, fault.New(fault.InvalidArgument,
				"cannot take the prices %.100q: write each once, as vcpu-second=…,gib-second=…,archive-gb-month=…", text).Because("prices")
		}
		given[name], seen[name] = figure, true
	}
	for _, name := range []string{"vcpu-second", "gib-second"} {
		if !seen[name] {
			return nil, fault.New(fault.InvalidArgument, "cannot take the prices %.100q: %s is not among them; give it, as 0 if it is to cost nothing", text, name).
				Because("prices")
		}
	}
	// The first version there can be: its real one is given when it is written.
	p, err := metering.ParsePrice(1, time.Time{}, given["vcpu-second"], given["gib-second"], given["archive-gb-month"])
	return &p, err
}

// setPrices makes what the flag says the operator's prices.
func setPrices(ctx context.Context, ctl *control.Control, log *slog.Logger, p *metering.Price) error {
	if p == nil {
		return nil
	}
	set, err := ctl.SetPrices(ctx, *p)
	if err != nil {
		return err
	}
	log.Info("the prices are set", "version", set.Version, "due", set.ValidFrom,
		"prices", fmt.Sprintf("vcpu-second=%s,gib-second=%s,archive-gb-month=%s", set.VCPUSecond, set.GiBSecond, set.ArchiveGBMonth))
	return nil
}
