package hostagent

import (
	"context"
	"net"

	"github.com/hutchrun/hutch/internal/network"
)

// Links is the Network of a network.Manager.
type Links struct{ *network.Manager }

// Attach gives the path of the guest's namespace.
func (l Links) Attach(ctx context.Context, id string, rules Rules) (string, error) {
	at, err := l.Manager.AttachTo(ctx, id, network.Rules(rules))
	return at.NetNS, err
}

// SetEgress applies a sandbox's rules.
func (l Links) SetEgress(ctx context.Context, id string, rules Rules) error {
	return l.Manager.SetEgress(ctx, id, network.Rules(rules))
}

// Dial opens a connection to a port of the guest.
func (l Links) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	return l.Manager.Dial(ctx, id, port)
}

// IDs lists the sandboxes that have anything in the kernel.
func (l Links) IDs(ctx context.Context) ([]string, error) { return l.Inventory(ctx) }
