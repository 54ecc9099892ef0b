package control

import (
	"context"
	"time"

	"github.com/hutchrun/hutch/internal/metering"
	"github.com/hutchrun/hutch/internal/store"
)

// priceDelay is how long before they are valid prices are written. What is metered at
// the same time has read the prices before, at an instant of before: it must not find
// later that another price held. It is longer than a transaction can take.
const priceDelay = time.Minute

// pricesLock is the lock of those who write prices.
const pricesLock = "prices"

// SetPrices makes these the operator's prices (B8), from a minute from now on; what was
// metered before keeps its own. It gives the version that says so: where the latest
// prices are the same, that is theirs, and nothing is written. Version and ValidFrom of
// p are not looked at.
func (c *Control) SetPrices(ctx context.Context, p metering.Price) (metering.Price, error) {
	err := c.store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		if err := tx.Lock(ctx, pricesLock); err != nil {
			return err
		}
		prices, err := tx.Prices(ctx)
		if err != nil {
			return err
		}
		list := prices.List()
		last := list[len(list)-1]
		if last.Same(p) {
			p = last
			return nil
		}
		now := c.instant()
		p.Version, p.ValidFrom = last.Version+1, now.Add(priceDelay)
		if !p.ValidFrom.After(last.ValidFrom) { // another server's clock is ahead
			p.ValidFrom = last.ValidFrom.Add(time.Millisecond)
		}
		if _, err := prices.With(p, now); err != nil {
			return err
		}
		return tx.AddPrice(ctx, p)
	})
	return p, err
}
