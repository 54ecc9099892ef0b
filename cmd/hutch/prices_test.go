package main

import (
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

func TestParsePrices_B8(t *testing.T) {
	t.Parallel()
	if p, err := parsePrices(""); p != nil || err != nil {
		t.Errorf("none: %+v, %v", p, err)
	}
	p, err := parsePrices("gib-second=0.0000035,vcpu-second=0.000012")
	if err != nil || p.VCPUSecond.String() != "0.000012" || p.GiBSecond.String() != "0.0000035" || p.ArchiveGBMonth.String() != "0.012" {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := parsePrices("vcpu-second=0,gib-second=0,archive-gb-month=1"); err != nil || p.ArchiveGBMonth.String() != "1" {
		t.Errorf("%+v, %v", p, err)
	}
	for _, bad := range []string{
		"free", "vcpu-second=1", "gib-second=1", "vcpu-second=1,gib-second=", "vcpu-second=-1,gib-second=1", "vcpu-second=1,gib-second=1,vcpu-second=2",
		"vcpu-second=1,gib-second=1,disk=3", "vcpu-second=1,gib-second=1,",
	} {
		if _, err := parsePrices(bad); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
