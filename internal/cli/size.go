package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// units are the factors of size suffixes in lower case. GB are 10^9 bytes and GiB
// 2^30 everywhere.
var units = map[string]float64{
	"": 1, "b": 1,
	"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}

// parseMemory reads a size of memory in bytes: `512MiB`, `2GB`, `2g`. A lone letter
// means the binary unit, as memory is counted.
func parseMemory(flag, s string) (int64, error) { return parseSize(flag, s, "ib") }

// parseDisk reads a size of a disk in bytes. A lone letter means the decimal unit, as
// disks are counted.
func parseDisk(flag, s string) (int64, error) { return parseSize(flag, s, "b") }

// parseSize reads a number and a unit; loneSuffix completes a unit of one letter.
func parseSize(flag, s, loneSuffix string) (int64, error) {
	text := strings.ToLower(strings.TrimSpace(s))
	cut := strings.LastIndexAny(text, "0123456789.") + 1
	number, unit := text[:cut], strings.TrimSpace(text[cut:])
	if len(unit) == 1 && unit != "b" {
		unit += loneSuffix
	}
	factor, known := units[unit]
	value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	bytes := value * factor
	if !known || err != nil || bytes < 1 || bytes >= math.MaxInt64 {
		return 0, fault.New(fault.InvalidArgument,
			"--%s %q is not a size; write a number and a unit, such as 512MiB, 4GB or 2g", flag, s)
	}
	return int64(math.Round(bytes)), nil
}

// formatMemory writes bytes in KiB, MiB or GiB, in a form that --memory reads.
func formatMemory(bytes int64) string {
	return formatSize(bytes, 1<<10, memoryUnits, math.Round)
}

// formatDisk writes bytes in MB or GB of 10^9, in a form that --disk reads.
func formatDisk(bytes int64) string {
	return formatSize(bytes, 1000, diskUnits, math.Round)
}

var (
	memoryUnits = []string{"B", "KiB", "MiB", "GiB", "TiB"}
	diskUnits   = []string{"B", "KB", "MB", "GB", "TB"}
)

// formatSize writes a size in the largest unit that fits, with one digit behind the
// point as round makes it.
func formatSize(bytes int64, base float64, names []string, round func(float64) float64) string {
	value, i := float64(bytes), 0
	for i < len(names)-1 && round(value*10)/10 >= base {
		value /= base
		i++
	}
	return strconv.FormatFloat(round(value*10)/10, 'f', -1, 64) + names[i]
}

// parseDuration reads seconds (`1800`) or a duration (`30m`, `2h`, `1d`).
func parseDuration(flag, s string) (time.Duration, error) {
	number, unit := s, time.Second
	if days, ok := strings.CutSuffix(s, "d"); ok {
		number, unit = days, 24*time.Hour
	}
	if n, err := strconv.ParseInt(number, 10, 64); err == nil && n >= 0 && n <= math.MaxInt64/int64(unit) {
		return time.Duration(n) * unit, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, fault.New(fault.InvalidArgument,
			"--%s %q is not a duration; write seconds (1800) or a duration (30m, 2h, 1d)", flag, s)
	}
	return d, nil
}

// formatAge writes how long ago something was, in its largest whole unit.
func formatAge(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

// formatTook writes how long a verb took, to a precision that suits a person.
func formatTook(d time.Duration) string {
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// formatTime writes an instant in the local zone, named.
func formatTime(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05 MST")
}

// parsePairs reads `K=V` flags. what names the flag in the message.
func parsePairs(flag string, pairs []string) (map[string]string, error) {
	if len(pairs) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(pairs))
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, fault.New(fault.InvalidArgument, "--%s %q is not of the form KEY=VALUE; write --%s KEY=VALUE", flag, pair, flag)
		}
		out[key] = value
	}
	return out, nil
}
