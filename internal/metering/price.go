package metering

import (
	"regexp"
	"slices"
	"time"

	"github.com/shopspring/decimal"

	"github.com/hutchrun/hutch/internal/fault"
)

// DefaultArchivePrice is the price of archived disks where the operator sets none (B6).
const DefaultArchivePrice = "0.012"

// month is the month of archive prices: 730 h (B6).
const month = 730 * time.Hour

// Price is one version of what things cost, in units of the operator's currency.
type Price struct {
	Version        int64           `json:"version"`    // from 1, rising
	ValidFrom      time.Time       `json:"valid_from"` // whole milliseconds; of the first: never looked at, it holds from the beginning of time
	VCPUSecond     decimal.Decimal `json:"vcpu_second"`
	GiBSecond      decimal.Decimal `json:"gib_second"`       // of memory, 2^30 bytes
	ArchiveGBMonth decimal.Decimal `json:"archive_gb_month"` // of archived disk, 10^9 bytes for 730 h
}

// figure is what a price may look like: its length is bounded, so that no exponent makes
// sums explode.
var figure = regexp.MustCompile(`^[0-9]{1,9}(\.[0-9]{1,18})?$`)

// ParsePrice makes a version from decimal strings such as "0.000012".
func ParsePrice(version int64, validFrom time.Time, vcpuSecond, gibSecond, archiveGBMonth string) (Price, error) {
	p := Price{Version: version, ValidFrom: instant(validFrom)}
	for _, f := range []struct {
		name string
		text string
		to   *decimal.Decimal
	}{
		{"vcpu_second", vcpuSecond, &p.VCPUSecond},
		{"gib_second", gibSecond, &p.GiBSecond},
		{"archive_gb_month", archiveGBMonth, &p.ArchiveGBMonth},
	} {
		if !figure.MatchString(f.text) {
			return Price{}, fault.New(fault.InvalidArgument,
				"cannot take %.40q as the price %s: write a decimal number from 0 with up to 9 digits before the point and 18 after it, such as 0.000012",
				f.text, f.name).Because(f.name)
		}
		d, err := decimal.NewFromString(f.text)
		if err != nil {
			return Price{}, fault.Wrap(err, fault.InvalidArgument, "cannot take %q as the price %s", f.text, f.name).Because(f.name)
		}
		*f.to = d
	}
	return p, p.valid()
}

func (p Price) valid() error {
	if p.Version < 1 {
		return fault.New(fault.InvalidArgument, "cannot take %d as a price version: versions count from 1", p.Version).Because("version")
	}
	for _, d := range []decimal.Decimal{p.VCPUSecond, p.GiBSecond, p.ArchiveGBMonth} {
		if d.IsNegative() {
			return fault.New(fault.InvalidArgument, "cannot take price version %d: %s is negative; a price is 0 or more", p.Version, d)
		}
	}
	return nil
}

// Same says whether both cost the same, whatever their versions: a config that is read
// again makes no new version.
func (p Price) Same(q Price) bool {
	return p.VCPUSecond.Equal(q.VCPUSecond) && p.GiBSecond.Equal(q.GiBSecond) && p.ArchiveGBMonth.Equal(q.ArchiveGBMonth)
}

// Prices is every version that ever was, oldest first. It only grows. The zero value has
// none, and nothing can be entered with it.
type Prices struct {
	list []Price
}

// NewPrices takes versions in the order of their numbers and of their ValidFrom.
func NewPrices(list ...Price) (Prices, error) {
	if len(list) == 0 {
		return Prices{}, fault.New(fault.InvalidArgument, "there is no price; name one, of 0 if nothing is to cost anything")
	}
	out := Prices{list: slices.Clone(list)}
	for i := range out.list {
		p := &out.list[i]
		p.ValidFrom = instant(p.ValidFrom)
		if err := p.valid(); err != nil {
			return Prices{}, err
		}
		if i == 0 {
			continue
		}
		before := out.list[i-1]
		if p.Version <= before.Version || i > 1 && !p.ValidFrom.After(before.ValidFrom) {
			return Prices{}, fault.New(fault.InvalidArgument,
				"price version %d does not follow version %d: a later version has a higher number and a later valid-from", p.Version, before.Version)
		}
	}
	return out, nil
}

// With adds a version, valid from now at the earliest: what is in the ledger keeps its
// price.
func (ps Prices) With(p Price, now time.Time) (Prices, error) {
	if len(ps.list) > 0 && instant(p.ValidFrom).Before(instant(now)) {
		return ps, fault.New(fault.InvalidArgument,
			"cannot take price version %d: it would be valid from %s, which is over; a price changes now or later",
			p.Version, stamp(p.ValidFrom))
	}
	return NewPrices(append(slices.Clone(ps.list), p)...)
}

// List gives the versions, oldest first.
func (ps Prices) List() []Price { return slices.Clone(ps.list) }

// At gives the version that holds at an instant; false when there is none at all.
func (ps Prices) At(t time.Time) (Price, bool) {
	if len(ps.list) == 0 {
		return Price{}, false
	}
	i := len(ps.list) - 1
	for i > 0 && ps.list[i].ValidFrom.After(t) {
		i--
	}
	return ps.list[i], true
}

// version finds a version by its number.
func (ps Prices) version(n int64) (Price, error) {
	for _, p := range ps.list {
		if p.Version == n {
			return p, nil
		}
	}
	return Price{}, fault.New(fault.DataCorrupt, "the ledger names price version %d, which is not known", n).Because("price_version")
}

// changes gives the instants inside (from, to) at which another version begins; a zero
// to is no end.
func (ps Prices) changes(from, to time.Time) []time.Time {
	var out []time.Time
	for i, p := range ps.list {
		if i > 0 && p.ValidFrom.After(from) && (to.IsZero() || p.ValidFrom.Before(to)) {
			out = append(out, p.ValidFrom)
		}
	}
	return out
}

// instant is a time as the ledger keeps it: UTC, whole milliseconds.
func instant(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return t.UTC().Truncate(time.Millisecond)
}

// stamp writes an instant for people.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
