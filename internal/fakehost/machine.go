// Package fakehost is a machine made of files, for tests and benches: disks, saves,
// networks and the sandboxes of the fake runtime lie in one directory. They outlive the
// process that works with them, kill -9 included, so that the real host agent can be
// killed for good and started again on what it left.
//
// What a guest keeps are two cells, one in its memory and one on its disk, which
// commands read and write: enough to tell what a save, a wake, a fork or a stop kept.
package fakehost

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/runtime"
	"github.com/hutchrun/hutch/internal/runtime/fake"
)

// Template is the digest of the one template that the machine has.
const Template = "sha256:fake"

// Machine is a machine that this process works with. One at a time works with a
// directory.
type Machine struct {
	dir    string
	fake   *fake.Machine
	guests *guests
	disks  *disks
}

// Open goes on with the machine of a directory, and makes it where there is none.
func Open(dir string) (*Machine, error) {
	m := &Machine{dir: dir, guests: newGuests()}
	for _, sub := range []string{"disks", "mounts", "saves", "networks", "journals", "boots"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	m.disks = &disks{dir: dir}
	var err error
	if m.fake, err = fake.OpenMachine(filepath.Join(dir, "machine"), m.guests.boot); err != nil {
		m.guests.close()
		return nil, err
	}
	return m, nil
}

// Agent gives a new host agent on the machine. change, which may be nil, sets what it
// is to have other than a host agent in earnest.
func (m *Machine) Agent(id string, log *slog.Logger, change func(*hostagent.Config)) (*hostagent.Agent, error) {
	cfg := hostagent.Config{
		ID: id, Dir: filepath.Join(m.dir, "journals"), RunDir: filepath.Join(m.dir, "boots"), BootID: "boot-1",
		Driver: m.fake.Driver(), Disks: m.disks, Network: network{filepath.Join(m.dir, "networks")}, Agent: "agent-1",
		Capabilities: runtime.Capabilities{Runtime: "fake", Version: fake.Version, MemorySnapshot: true, HeldRestore: true},
		BootTimeout:  time.Minute, Log: log,
	}
	if change != nil {
		change(&cfg)
	}
	return hostagent.New(cfg)
}

// Crash ends a sandbox as the kernel may.
func (m *Machine) Crash(id string) {
	m.fake.Crash(id, runtime.Exit{Known: true, Signal: 9})
}

// Close ends this process's part in the machine. The sandboxes stay.
func (m *Machine) Close() { m.guests.close() }

// Holdings is what a machine has of sandboxes: their ids.
type Holdings struct {
	Running, Mounted, Disks, Saves, Networks, Journals []string
	Unfinished                                         []string // saves that were never committed, and what was on its way out
}

// Look reads what the machine of a directory has, also while a process works with it.
func Look(dir string) (Holdings, error) {
	var h Holdings
	var err error
	if h.Running, err = fake.Kept(filepath.Join(dir, "machine")); err != nil {
		return h, err
	}
	for sub, ids := range map[string]*[]string{"mounts": &h.Mounted, "disks": &h.Disks, "networks": &h.Networks, "journals": &h.Journals} {
		if *ids, err = list(filepath.Join(dir, sub)); err != nil {
			return h, err
		}
	}
	kept := h.Journals[:0]
	for _, name := range h.Journals {
		if id, ok := strings.CutSuffix(name, ".journal"); ok {
			kept = append(kept, id)
		}
	}
	h.Journals = kept
	saves, err := list(filepath.Join(dir, "saves"))
	for _, name := range saves {
		owner, _, _ := strings.Cut(name, "@")
		if committed(filepath.Join(dir, "saves", name)) {
			h.Saves = append(h.Saves, owner)
		} else {
			h.Unfinished = append(h.Unfinished, name)
		}
	}
	return h, err
}

// Told says what the host agent of a directory's machine has told of a sandbox: the
// number of its last report, and how many have not been taken.
func Told(dir, id string) (last int64, untaken int, err error) {
	text, err := os.ReadFile(filepath.Join(dir, "journals", id+".journal"))
	if err != nil {
		return 0, 0, err
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	_, record, _ := strings.Cut(lines[len(lines)-1], " ") // behind its checksum
	var r struct {
		Seq     int64             `json:"seq"`
		Unacked []json.RawMessage `json:"unacked"`
	}
	err = json.Unmarshal([]byte(record), &r)
	return r.Seq, len(r.Unacked), err
}

// list gives the names in a directory, without those that are being written.
func list(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), newMark) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// network is a hostagent.Network whose namespaces are empty files.
type network struct{ dir string }

// Attach implements hostagent.Network.
func (n network) Attach(_ context.Context, id string, _ hostagent.Rules) (string, error) {
	path := filepath.Join(n.dir, id)
	return path, os.WriteFile(path, nil, 0o600)
}

// SetEgress implements hostagent.Network: nothing leaves a fake sandbox.
func (n network) SetEgress(context.Context, string, hostagent.Rules) error { return nil }

// Detach implements hostagent.Network.
func (n network) Detach(_ context.Context, id string) error { return gone(filepath.Join(n.dir, id)) }

// Dial implements hostagent.Network: the fake runtime reaches its guests by itself.
func (n network) Dial(context.Context, string, int) (net.Conn, error) {
	return nil, net.ErrClosed
}

// IDs implements hostagent.Network.
func (n network) IDs(context.Context) ([]string, error) { return list(n.dir) }

// Traffic implements hostagent.Network: nothing goes in or out.
func (n network) Traffic(ctx context.Context) (map[string]int64, error) {
	ids, err := n.IDs(ctx)
	none := make(map[string]int64, len(ids))
	for _, id := range ids {
		none[id] = 0
	}
	return none, err
}

// gone removes a file that may not be there.
func gone(path string) error {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}
