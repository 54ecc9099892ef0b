package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
)

// Inventory is all that belongs to a pool, as it is found and not as anybody
// remembers it: for recovery and for the doctor.
type Inventory struct {
	Disks     []DiskEntry
	Saves     []SaveEntry
	Templates []string // digests
	Agents    []string // digests of the agent layers
	Mounts    []MountPoint
	Loops     []Loop // without that of the pool's own file
}

// DiskEntry is a disk, or what is left of one.
type DiskEntry struct {
	ID       string
	Info     Info
	Attached bool  // a loop device serves its image
	Image    bool  // its file system is mounted
	Root     bool  // its overlay is mounted: a sandbox may run on it
	Stray    bool  // mounts or devices whose disk is gone; Unmount clears them
	Err      error // why Info is empty
}

// SaveEntry is a save, committed or left behind.
type SaveEntry struct {
	ID         string
	Generation int64
	Committed  bool
	Info       Info // of its disk, empty where it has none
}

// Inventory looks at everything. It changes nothing.
func (p *Pool) Inventory(ctx context.Context) (Inventory, error) {
	table, err := mounts()
	if err != nil {
		return Inventory{}, err
	}
	loops, err := loopsUnder(p.dir + "/")
	if err != nil {
		return Inventory{}, err
	}
	inv := Inventory{Agents: names(p.path("agents")), Templates: names(p.path("templates")), Loops: loops}
	for _, m := range table {
		if m.Target == p.dir || strings.HasPrefix(m.Target, p.run+"/") {
			inv.Mounts = append(inv.Mounts, m)
		}
	}
	known := map[string]bool{}
	for _, id := range append(names(p.path("disks")), p.strays(table, loops)...) {
		if known[id] {
			continue
		}
		known[id] = true
		if err := ctx.Err(); err != nil {
			return Inventory{}, wrap(err, "the inventory of the pool could not be taken")
		}
		inv.Disks = append(inv.Disks, p.diskEntry(id, table, loops))
	}
	for _, id := range names(p.path("saves")) {
		for _, name := range names(p.path("saves", id)) {
			generation, committed, ok := parseSave(name)
			if !ok {
				continue
			}
			info, err := statImage(p.path("saves", id, name))
			if err != nil && !fault.Is(err, fault.NotFound) {
				p.log.Warn("the disk of a save cannot be read", "sandbox", id, "step", "inventory", "err", err)
			}
			inv.Saves = append(inv.Saves, SaveEntry{ID: id, Generation: generation, Committed: committed, Info: info})
		}
	}
	return inv, nil
}

func (p *Pool) diskEntry(id string, table mountTable, loops []Loop) DiskEntry {
	e := DiskEntry{ID: id, Image: table.at(p.imgDir(id)) != nil, Root: table.at(p.rootDir(id)) != nil}
	for _, l := range loops {
		e.Attached = e.Attached || l.Backing == p.image(id)
	}
	e.Info, e.Err = statImage(p.diskDir(id))
	e.Stray = fault.Is(e.Err, fault.NotFound)
	return e
}

// strays names the disks that mounts and devices speak of.
func (p *Pool) strays(table mountTable, loops []Loop) []string {
	var ids []string
	for _, m := range table {
		if rel, ok := strings.CutPrefix(m.Target, p.run+"/"); ok {
			if id, _, ok := strings.Cut(rel, "/"); ok && id != "templates" {
				ids = append(ids, id)
			}
		}
	}
	for _, l := range loops {
		if rel, ok := strings.CutPrefix(l.Backing, p.path("disks")+"/"); ok {
			ids = append(ids, filepath.Dir(rel))
		}
	}
	return ids
}

// Manifests reads those of all committed saves. An error means that one is there that
// cannot be read.
func (p *Pool) Manifests() ([][]byte, error) {
	var list [][]byte
	for _, id := range names(p.path("saves")) {
		for _, name := range names(p.path("saves", id)) {
			if _, committed, ok := parseSave(name); !ok || !committed {
				continue
			}
			text, err := os.ReadFile(p.path("saves", id, name, manifestName))
			if errors.Is(err, os.ErrNotExist) && !exists(p.path("saves", id, name)) {
				continue // dropped meanwhile
			}
			if err != nil {
				return nil, wrap(err, "the save %s of %s cannot be read", name, id)
			}
			list = append(list, text)
		}
	}
	return list, nil
}
