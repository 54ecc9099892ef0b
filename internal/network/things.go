package network

import (
	"context"
	"os"
	"path/filepath"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
)

// Kinds of a Thing.
const (
	KindSpace = "netns"
	KindLink  = "veth"
	KindTable = "nftables"
)

// OwnerHost owns the instance's table on the host, and the networks that are kept
// ready.
const OwnerHost = "host"

// Thing is one thing that an instance has in the kernel.
type Thing struct {
	Kind  string
	Name  string
	Owner string // id of the sandbox; OwnerHost; "" for what is half made or names no sandbox
}

// Peek gives the networks of an instance as they are found, beside the process that
// uses them: no rule, no setting and no interface is changed. Things, Clear, Detach,
// Remove and Close may be called on it.
func Peek(cfg Config) (*Manager, error) {
	host, err := openSpace("/proc/self/ns/net")
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "the host's network cannot be read; hutch needs root")
	}
	return peek(cfg, host)
}

// peek is Peek with a namespace that stands for the host.
func peek(cfg Config, host *space) (*Manager, error) {
	m, err := prepare(context.Background(), cfg, host)
	if err == nil {
		m.peeked = true
		if err = m.recall(); err != nil {
			m.stop()
			err = m.failed(err, "the host's network rules could not be read")
		}
	}
	if err != nil {
		host.close()
		return nil, err
	}
	return m, nil
}

// Things lists all that the instance has. It reads and changes nothing.
func (m *Manager) Things(ctx context.Context) ([]Thing, error) {
	var list []Thing
	entries, err := os.ReadDir(spacesDir)
	if err != nil && !os.IsNotExist(err) {
		return nil, m.failed(err, "the list of network namespaces could not be read")
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), tableName(m.cfg.Tag)+"-") {
			continue
		}
		id, _ := idOfSpace(m.cfg.Tag, e.Name())
		list = append(list, Thing{KindSpace, filepath.Join(spacesDir, e.Name()), ownerOf(id)})
	}
	links, err := m.uplinks()
	if err != nil {
		return nil, m.failed(err, "the list of network interfaces could not be read")
	}
	for _, l := range links {
		id, _ := idOfAlias(m.cfg.Tag, l.Attrs().Alias)
		list = append(list, Thing{KindLink, l.Attrs().Name, ownerOf(id)})
	}
	present, err := m.host.hasTable(tableName(m.cfg.Tag))
	if err != nil {
		return nil, m.failed(err, "the host's network rules could not be read")
	}
	if present {
		list = append(list, Thing{KindTable, "inet " + tableName(m.cfg.Tag), OwnerHost})
	}
	return list, ctx.Err()
}

func ownerOf(id string) string {
	if strings.HasPrefix(id, sparePrefix) {
		return OwnerHost
	}
	return id
}

// Clear removes a namespace or an uplink that Things has listed and that nobody owns.
// It may be gone already. What belongs to one sandbox goes in the order of Detach.
func (m *Manager) Clear(ctx context.Context, t Thing) error {
	var err error
	switch {
	case t.Kind == KindTable:
		return m.Remove(ctx)
	case t.Owner != "":
		return m.Detach(ctx, t.Owner)
	case t.Kind == KindLink:
		err = m.host.dropLink(t.Name)
	default:
		err = removeSpace(filepath.Base(t.Name))
	}
	if err != nil {
		return m.failed(err, t.Name+" could not be removed")
	}
	return nil
}
