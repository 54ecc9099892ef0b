package cli

import (
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// R3, F6: GB are 10^9 bytes and GiB 2^30 everywhere.
func TestParseSize(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in           string
		memory, disk int64
	}{
		{"512MiB", 512 << 20, 512 << 20},
		{"4GB", 4e9, 4e9},
		{"2g", 2 << 30, 2e9},
		{"2G", 2 << 30, 2e9},
		{"1.5GiB", 3 << 29, 3 << 29},
		{"64k", 64 << 10, 64e3},
		{" 1 TB ", 1e12, 1e12},
		{"1048576", 1 << 20, 1 << 20},
		{"10b", 10, 10},
	} {
		if got, err := parseMemory("memory", c.in); err != nil || got != c.memory {
			t.Errorf("parseMemory(%q) = %d, %v; want %d", c.in, got, err, c.memory)
		}
		if got, err := parseDisk("disk", c.in); err != nil || got != c.disk {
			t.Errorf("parseDisk(%q) = %d, %v; want %d", c.in, got, err, c.disk)
		}
	}
	for _, bad := range []string{"", "GB", "-1GB", "0", "4XB", "NaN", "inf", "1..5g", "99999999999TB", "0x10"} {
		if got, err := parseDisk("disk", bad); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("parseDisk(%q) = %d, %v; want invalid_argument", bad, got, err)
		}
	}
}

// What is shown for a size reads back as the same size.
func TestSizesReadBack(t *testing.T) {
	t.Parallel()
	for bytes, want := range map[int64]string{
		0: "0B", 512 << 20: "512MiB", 2 << 30: "2GiB", 3 << 29: "1.5GiB", 1023: "1023B",
		1<<20 - 1: "1MiB", 64 << 40: "64TiB",
	} {
		if got := formatMemory(bytes); got != want {
			t.Errorf("formatMemory(%d) = %s, want %s", bytes, got, want)
		}
	}
	for bytes, want := range map[int64]string{4e9: "4GB", 1.5e9: "1.5GB", 999_999_999: "1GB", 250e6: "250MB"} {
		if got := formatDisk(bytes); got != want {
			t.Errorf("formatDisk(%d) = %s, want %s", bytes, got, want)
		}
	}
	for _, bytes := range []int64{512 << 20, 3 << 29, 2 << 30} {
		if back, err := parseMemory("memory", formatMemory(bytes)); err != nil || back != bytes {
			t.Errorf("%d reads back as %d, %v", bytes, back, err)
		}
	}
}

// V4: --ttl takes seconds or a duration.
func TestParseDuration(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]time.Duration{
		"1800": 30 * time.Minute, "30m": 30 * time.Minute, "2h": 2 * time.Hour, "1d": 24 * time.Hour, "1h30m": 90 * time.Minute,
	} {
		if got, err := parseDuration("ttl", in); err != nil || got != want {
			t.Errorf("parseDuration(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "soon", "d", "1x", "-5", "-5m", "99999999999999999999"} {
		if got, err := parseDuration("ttl", bad); !fault.Is(err, fault.InvalidArgument) {
			t.Errorf("parseDuration(%q) = %v, %v; want invalid_argument", bad, got, err)
		}
	}
}

func TestFormatAge(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", 61 * time.Minute: "1h", 47 * time.Hour: "47h", 49 * time.Hour: "2d",
	} {
		if got := formatAge(d); got != want {
			t.Errorf("formatAge(%v) = %s, want %s", d, got, want)
		}
	}
}
