package network

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Making a network takes the kernel 15 to 30 ms, which a new sandbox would wait for.
// So some are made before anybody asks: a spare is a finished network under an id of
// its own, and Attach gives it to a sandbox by giving it the sandbox's names. A spare
// has no state worth keeping: those that an agent left behind are taken away by the
// next Open, and one that is half given away is completed by Attach like every network
// that is half made.

// sparePrefix begins the ids of spares; no sandbox's begins like this.
const sparePrefix = "spare_"

// sparePause is how long nobody must have asked for a network before new spares are
// made, so that they do not take the CPU from sandboxes that are just booting. Tests
// change it.
var sparePause = time.Second

type spare struct {
	id  string
	own []netip.Prefix // the host's addresses that its filter knows
}

// wantSpare asks for the stock to be filled up, some time after now.
func (m *Manager) wantSpare() {
	select {
	case m.asked <- struct{}{}:
	default:
	}
}

// keepSpares fills the stock up until ctx ends.
func (m *Manager) keepSpares(ctx context.Context) {
	pause := time.NewTimer(sparePause)
	defer pause.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.asked:
			pause.Reset(sparePause)
			continue
		case <-pause.C:
		}
		if !m.lacksSpare() {
			continue
		}
		s, err := m.makeSpare(ctx)
		if err != nil {
			if ctx.Err() == nil {
				m.log.Warn("no network could be made ahead; sandboxes start a little later", "err", err)
			}
			continue // until somebody asks again
		}
		m.mu.Lock()
		m.spares = append(m.spares, s)
		m.mu.Unlock()
		pause.Reset(0)
	}
}

func (m *Manager) lacksSpare() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.spares) < m.cfg.Spares
}

func (m *Manager) makeSpare(ctx context.Context) (spare, error) {
	own, err := m.hostAddresses()
	if err != nil {
		return spare{}, err
	}
	b := make([]byte, 8)
	rand.Read(b)
	s := spare{id: sparePrefix + hex.EncodeToString(b), own: own}
	if err := m.build(ctx, s.id); err != nil {
		return spare{}, errors.Join(err, m.dismantle(s.id))
	}
	return s, nil
}

// takeSpare gives a spare to a sandbox that has nothing yet. It says whether it did.
func (m *Manager) takeSpare(ctx context.Context, id string) (bool, error) {
	defer m.wantSpare()
	for _, side := range []side{sideGuest, sideRouter} {
		if _, err := os.Lstat(m.path(id, side)); !errors.Is(err, os.ErrNotExist) {
			return false, err // half made: build completes it
		}
	}
	m.mu.Lock()
	if len(m.spares) == 0 {
		m.mu.Unlock()
		return false, nil
	}
	s := m.spares[0]
	m.spares = m.spares[1:]
	m.mu.Unlock()
	if ok, err := m.fresh(s); err != nil || !ok {
		return false, errors.Join(err, m.dismantle(s.id))
	}
	if err := m.ensureTable(); err != nil {
		return false, errors.Join(err, m.dismantle(s.id))
	}
	if err := m.hand(ctx, s, id); err != nil {
		return false, errors.Join(err, m.dismantle(s.id), m.dismantle(id))
	}
	return true, nil
}

// fresh says whether a spare is whole and its filter still knows the host's addresses.
func (m *Manager) fresh(s spare) (bool, error) {
	own, err := m.hostAddresses()
	if err != nil || !slices.Equal(own, s.own) {
		return false, err
	}
	_, err = m.attached(s.id)
	if errors.Is(err, errNoSpace) {
		return false, nil
	}
	return err == nil, err
}

// hand gives a spare the names of a sandbox. The alias goes last: with it, the network
// is the sandbox's and finished.
func (m *Manager) hand(ctx context.Context, s spare, id string) error {
	if err := m.dropUplinks(id); err != nil {
		return err
	}
	for _, side := range []side{sideGuest, sideRouter} {
		if err := renameSpace(m.path(s.id, side), m.path(id, side)); err != nil {
			return err
		}
	}
	links, err := m.uplinks()
	if err != nil {
		return err
	}
	i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Alias == aliasOf(m.cfg.Tag, s.id) })
	if i < 0 {
		return fmt.Errorf("the uplink of %s is gone", s.id)
	}
	return errors.Join(ctx.Err(), m.host.nl.LinkSetAlias(links[i], aliasOf(m.cfg.Tag, id)))
}

// renameSpace gives a named namespace another name. The kernel moves no mount below a
// shared one, so it is mounted a second time.
func renameSpace(from, to string) error {
	f, err := os.OpenFile(to, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("name a network namespace: %w", err)
	}
	f.Close()
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("name a network namespace: %w", err)
	}
	if err := unix.Unmount(from, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", from, err)
	}
	return os.Remove(from)
}

// dropSpares takes away every spare of the instance, those that an earlier agent left
// included.
func (m *Manager) dropSpares() error {
	m.mu.Lock()
	m.spares = nil
	m.mu.Unlock()
	ids, err := m.inventory()
	if err != nil {
		return err
	}
	for _, id := range ids {
		if strings.HasPrefix(id, sparePrefix) {
			if err := m.dismantle(id); err != nil {
				return fmt.Errorf("take the spare network %s away: %w", id, err)
			}
		}
	}
	return nil
}
