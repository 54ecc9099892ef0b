package main

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

func TestEventFlags(t *testing.T) {
	t.Parallel()
	var cfg control.Config
	f := eventFlags{keep: "720h", http: true, allow: "10.0.0.0/8,127.0.0.1,fd00::/8"}
	if err := f.apply(&cfg); err != nil {
		t.Fatal(err)
	}
	var inside []string
	for _, p := range cfg.Webhooks.Policy.Inside {
		inside = append(inside, p.String())
	}
	if fmt.Sprint(inside) != "[10.0.0.0/8 127.0.0.1/32 fd00::/8]" || !cfg.Webhooks.Policy.HTTP || cfg.Limits.HistoryKeep != 720*time.Hour ||
		!cfg.Webhooks.Policy.Inside[1].Contains(netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("%+v", cfg)
	}
	cfg = control.Config{}
	if err := (eventFlags{}).apply(&cfg); err != nil || cfg.Webhooks.Policy.HTTP || len(cfg.Webhooks.Policy.Inside) != 0 || cfg.Limits.HistoryKeep != 0 {
		t.Errorf("without flags: %+v, %v", cfg, err)
	}
	for _, bad := range []eventFlags{{keep: "90"}, {keep: "59m"}, {keep: "-1h"}, {allow: "10.0.0.1/8"}, {allow: "example.com"}, {allow: "10.0.0.0/8 127.0.0.1"}} {
		if err := bad.apply(&control.Config{}); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
