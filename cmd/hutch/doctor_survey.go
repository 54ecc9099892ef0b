package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/network"
	"github.com/hutchrun/hutch/internal/runtime/gvisor"
)

// orphan is something of an installation that nobody owns.
type orphan struct {
	Kind    string `json:"kind"` // process, mount, loop, netns, veth, nftables, cgroup, file, disk, save
	Name    string `json:"name"` // as the kernel or the file system knows it
	Sandbox string `json:"sandbox,omitempty"`
	Kept    string `json:"kept,omitempty"` // why --clean leaves it, and what removes it
	clear   func(context.Context) error
}

// thing is one thing that bears the installation's name, whoever owns it.
type thing struct {
	kind, name string
	owner      string // a sandbox, a fork's operation, a probe; ownerServer; "" for nobody
	since      time.Time
	clear      func(context.Context) error
}

// ownerServer owns what serves all sandboxes: the pool's mount, the host's rules.
const ownerServer = "server"

const (
	kindProcess = "process"
	kindCgroup  = "cgroup"
)

const (
	// youth is how old a half-made file must be beside a live server that may be
	// making it at this moment.
	youth = 10 * time.Minute
	// probing is longer than a try of the runtime may take.
	probing = 2 * time.Minute
	// starting is longer than a start takes from its first directory to the next.
	starting = time.Minute
)

// survey looks at an installation from outside. It reads, and touches nothing.
type survey struct {
	layout layout
	live   bool // a server uses the installation
	made   bool // the data directory is one, and nobody else's
	owners hostagent.Holdings
	driver *gvisor.Driver
	probes *gvisor.Driver // the doctor's own tries
	net    *network.Manager
	pool   *disk.Pool // nil where the data directory is somebody else's
}

func newSurvey(l layout, live bool) (*survey, error) {
	boot, err := hostagent.BootID()
	if err != nil {
		return nil, err
	}
	s := &survey{
		layout: l, live: live, made: l.hasState(), owners: hostagent.Holdings{Dir: l.journals(), BootID: boot},
		driver: gvisor.New(gvisor.Config{CgroupParent: l.cgroup()}),
		probes: gvisor.New(gvisor.Config{CgroupParent: l.probeCgroup()}),
	}
	if s.net, err = network.Peek(network.Config{Tag: l.tag}); err != nil {
		s.close()
		return nil, err
	}
	if _, err := os.Stat(l.data); s.made || errors.Is(err, fs.ErrNotExist) {
		s.pool = disk.Peek(disk.Config{Dir: l.data, RunDir: l.run()})
	}
	return s, nil
}

func (s *survey) close() {
	s.driver.Close()
	s.probes.Close()
	if s.net != nil {
		_ = s.net.Close()
	}
}

// orphans finds what nobody owns, and the sandboxes that run on without a server.
// Beside a live server it looks twice, and believes what it has seen both times:
// what came or went in between is somebody's work.
func (s *survey) orphans(ctx context.Context) (list []orphan, waiting []string, err error) {
	list, waiting, err = s.look(ctx)
	if err != nil || !s.live || len(list) == 0 {
		return list, waiting, err
	}
	again, waiting, err := s.look(ctx)
	again = slices.DeleteFunc(again, func(o orphan) bool {
		return !slices.ContainsFunc(list, func(p orphan) bool { return p.Kind == o.Kind && p.Name == o.Name })
	})
	return again, waiting, err
}

// look lists first what there is and then reads who owns it: what a sandbox has came
// after its journal, and goes before it.
func (s *survey) look(ctx context.Context) (list []orphan, waiting []string, err error) {
	things, err := s.things(ctx)
	if err != nil {
		return nil, nil, err
	}
	sandboxes, captures, err := s.owners.All()
	if err != nil {
		return nil, nil, err
	}
	for _, t := range things {
		switch owned, waits := s.judge(t, sandboxes, captures); {
		case waits && t.kind == kindProcess && !slices.Contains(waiting, t.owner):
			waiting = append(waiting, t.owner)
		case !owned && !waits:
			o := orphan{Kind: t.kind, Name: t.name, clear: t.clear}
			if t.owner != ownerServer {
				o.Sandbox = t.owner
			}
			if whole(t) && !hostagent.IsCapture(t.owner) {
				o.Kept = "no disk is removed unless it is named: --clean --erase " + t.owner
			}
			list = append(list, o)
		}
	}
	slices.Sort(waiting)
	return list, waiting, nil
}

func whole(t thing) bool { return t.kind == disk.KindDisk || t.kind == disk.KindSave }

// judge says whether a thing has an owner that lives, or one that waits for the next
// server.
func (s *survey) judge(t thing, sandboxes map[string]hostagent.Holding, captures map[string]bool) (owned, waits bool) {
	holding, known := sandboxes[t.owner]
	switch {
	case t.owner == "":
		// A link that is not named yet is younger than its age can be told.
		return s.live && (t.kind == network.KindLink || time.Since(t.since) < youth && !t.since.IsZero()), false
	case t.owner == ownerServer:
		return s.live, !s.live
	case strings.HasPrefix(t.owner, "hutch-probe-"):
		return time.Since(t.since) < probing, false
	case hostagent.IsCapture(t.owner):
		return captures[t.owner], false
	case !known:
		return false, false
	case s.live, whole(t):
		return true, false
	case t.kind == disk.KindFile && strings.HasPrefix(t.name, s.layout.data+"/"):
		return holding.Open, false
	}
	return false, holding.Kernel
}

// things lists all that bears the installation's name, in the order in which it can
// be taken away.
func (s *survey) things(ctx context.Context) ([]thing, error) {
	var list []thing
	for _, of := range []struct {
		driver *gvisor.Driver
		boots  string
	}{{s.driver, s.layout.boots()}, {s.probes, ""}} {
		left, err := of.driver.Leftovers(of.boots)
		if err != nil {
			return nil, err
		}
		for _, l := range left {
			list = append(list, processes(of.driver, of.boots, l)...)
		}
	}
	if s.pool != nil {
		found, err := s.pool.Things(ctx)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			t := thing{f.Kind, f.Name, f.Owner, f.Since, func(ctx context.Context) error { return s.pool.Clear(ctx, f) }}
			if f.Owner == disk.OwnerPool {
				t.owner = ownerServer
			}
			if f.What != "" {
				t.name += " " + f.What
			}
			list = append(list, t)
		}
	}
	found, err := s.net.Things(ctx)
	if err != nil {
		return nil, err
	}
	for _, f := range found {
		t := thing{f.Kind, f.Name, f.Owner, time.Time{}, func(ctx context.Context) error { return s.net.Clear(ctx, f) }}
		if f.Owner == network.OwnerHost {
			t.owner = ownerServer
		}
		list = append(list, t)
	}
	return append(list, s.files()...), nil
}

// processes are a sandbox's processes and control groups.
func processes(d *gvisor.Driver, boots string, l gvisor.Leftover) []thing {
	end := func(ctx context.Context) error {
		err := d.End(ctx, l.ID, boots)
		if err == nil && strings.HasPrefix(l.ID, "hutch-probe-") {
			err = os.RemoveAll(filepath.Join(os.TempDir(), l.ID))
		}
		return err
	}
	var list []thing
	for _, pid := range l.Processes {
		name, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
		list = append(list, thing{kindProcess, strings.TrimSpace(strconv.Itoa(pid) + " " + string(name)), l.ID, l.Since, end})
	}
	for _, dir := range l.Groups {
		list = append(list, thing{kindCgroup, dir, l.ID, l.Since, end})
	}
	return list
}

// files lists the rest: what lies in the run directory, what a write has left beside
// its file, and the run directories of starts that failed.
func (s *survey) files() []thing {
	var list []thing
	add := func(path, owner string, clear func(context.Context) error) {
		if st, err := os.Lstat(path); err == nil {
			list = append(list, thing{disk.KindFile, path, owner, st.ModTime(), clear})
		}
	}
	remove := func(path string) func(context.Context) error {
		return func(context.Context) error { return os.RemoveAll(path) }
	}
	boots, _ := os.ReadDir(s.layout.boots())
	for _, e := range boots {
		path := filepath.Join(s.layout.boots(), e.Name())
		add(path, e.Name(), remove(path))
	}
	for _, pattern := range []string{"host/*.journal.tmp", "bin/*/.new-*", ".reflink.*", "server.json.tmp"} {
		if !s.made {
			break
		}
		paths, _ := filepath.Glob(filepath.Join(s.layout.data, pattern)) // fails for a bad pattern only
		for _, path := range paths {
			id, _ := strings.CutSuffix(filepath.Base(path), ".journal.tmp")
			if id == filepath.Base(path) {
				id = ""
			}
			add(path, id, remove(path))
		}
	}
	if s.made && !s.live {
		add(s.layout.serverFile(), ownerServer, remove(s.layout.serverFile()))
	}
	for _, path := range emptyRuns(s.layout) {
		add(path, "", func(context.Context) error { return removeEmpty(path) })
	}
	return list
}

// emptyRuns are the run directories, of whichever installation, that a start has made
// and nothing was put into.
func emptyRuns(l layout) []string {
	var list []string
	entries, _ := os.ReadDir(runRoot)
	for _, e := range entries {
		path := filepath.Join(runRoot, e.Name())
		st, err := os.Lstat(path)
		if err == nil && st.IsDir() && time.Since(st.ModTime()) > starting && path != l.run() && hollow(path, st) {
			list = append(list, path)
		}
	}
	return list
}

// hollow says whether a directory has nothing in it but directories of its own file
// system, none of which is a mount.
func hollow(root string, of fs.FileInfo) bool {
	if mountedBelow(root) {
		return false
	}
	return filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			err = errors.New("something")
		}
		return err
	}) == nil
}

// mountedBelow says whether anything is mounted on or below a directory.
func mountedBelow(root string) bool {
	data, err := os.ReadFile("/proc/self/mountinfo")
	return err != nil || strings.Contains(string(data), " "+root+"/") || strings.Contains(string(data), " "+root+" ")
}

// removeEmpty removes a tree of empty directories, and stops at the first that is not.
func removeEmpty(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		dirs = append(dirs, path)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	slices.Reverse(dirs)
	for _, dir := range dirs {
		if err := unix.Rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fault.Wrap(err, fault.FailedPrecondition, "%s is in use by now; it stays", dir)
		}
	}
	return nil
}
