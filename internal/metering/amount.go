package metering

import (
	"math/big"

	"github.com/shopspring/decimal"

	"github.com/hutchrun/hutch/internal/fault"
)

// parts is how many parts a unit of currency is counted in, so that every amount is an
// exact decimal. A price by the month is divided by 2,628,000,000 ms = 657 × 4,000,000,
// and 657 = 9 × 73 is what no decimal can be divided by; the rest are tens and twos.
var parts = decimal.NewFromInt(657)

var (
	// archiveStep is parts / (month in ms): one price by the month in parts by the ms.
	archiveStep = decimal.New(25, -8)
	// perGiB is 1/2^30 = 5^30/10^30.
	perGiB = decimal.NewFromBigInt(new(big.Int).Exp(big.NewInt(5), big.NewInt(30), nil), -30)
)

// Amount is an exact sum of money. Sums of amounts are exact too; only Round rounds, and
// it belongs to totals that are shown (B7). The zero value is nothing.
type Amount struct {
	n decimal.Decimal // in 1/657 of the unit of currency
}

// NewAmount is a decimal as an amount.
func NewAmount(d decimal.Decimal) Amount { return Amount{d.Mul(parts)} }

// Plus adds.
func (a Amount) Plus(b Amount) Amount { return Amount{a.n.Add(b.n)} }

// Cmp is -1, 0 or 1 as a is less than, equal to or more than b.
func (a Amount) Cmp(b Amount) int { return a.n.Cmp(b.n) }

// Round gives the amount with so many decimal places, halves away from zero.
func (a Amount) Round(places int32) decimal.Decimal { return a.n.DivRound(parts, places) }

// Text is the amount exactly, for ParseAmount and not for people.
func (a Amount) Text() string { return a.n.String() }

// ParseAmount reads what Text wrote.
func ParseAmount(text string) (Amount, error) {
	n, err := decimal.NewFromString(text)
	if err != nil {
		return Amount{}, fault.Wrap(err, fault.DataCorrupt, "%.60q is no amount; restore a backup", text)
	}
	return Amount{n}, nil
}

// String is the amount to six places, for messages; it is rounded.
func (a Amount) String() string { return a.Round(6).StringFixed(6) }

// rat is the exact amount as a fraction.
func (a Amount) rat() *big.Rat { return new(big.Rat).Quo(a.n.Rat(), parts.Rat()) }

// computeRate is what a machine costs in a millisecond, in parts.
func (p Price) computeRate(r Rate) decimal.Decimal {
	cpus := p.VCPUSecond.Mul(decimal.NewFromInt(r.VCPUs))
	memory := p.GiBSecond.Mul(decimal.NewFromInt(r.MemoryBytes)).Mul(perGiB)
	return cpus.Add(memory).Shift(-3).Mul(parts)
}

// archiveRate is what an archived disk costs in a millisecond, in parts.
func (p Price) archiveRate(bytes int64) decimal.Decimal {
	return p.ArchiveGBMonth.Mul(decimal.NewFromInt(bytes)).Shift(-9).Mul(archiveStep)
}

// rate is what an entry costs in a millisecond at a price, in parts.
func (e Entry) rate(p Price) decimal.Decimal {
	if e.Kind == Archive {
		return p.archiveRate(e.DiskBytes)
	}
	return p.computeRate(e.Rate)
}
