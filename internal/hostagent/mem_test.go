package hostagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/hutchrun/hutch/internal/disk"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/runtime/fake"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// memNetwork is a Network in memory.
type memNetwork struct {
	mu       sync.Mutex
	attached map[string]bool
	traffic  map[string]int64
	modes    map[string]sandbox.FirewallMode
	failing  atomic.Bool // SetEgress fails
}

func (n *memNetwork) Attach(_ context.Context, id string, rules Rules) (string, error) {
	n.set(id, rules)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.attached[id] = true
	return "/run/netns/" + id, nil
}

// SetEgress remembers the mode of the rules that came last.
func (n *memNetwork) SetEgress(_ context.Context, id string, rules Rules) error {
	if n.failing.Load() {
		return errors.New("the kernel has no memory")
	}
	n.set(id, rules)
	return nil
}

func (n *memNetwork) set(id string, rules Rules) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.modes == nil {
		n.modes = map[string]sandbox.FirewallMode{}
	}
	n.modes[id] = rules().Mode
}

func (n *memNetwork) mode(id string) sandbox.FirewallMode {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.modes[id]
}

func (n *memNetwork) Detach(_ context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.attached, id)
	return nil
}

func (n *memNetwork) Dial(context.Context, string, int) (net.Conn, error) {
	return nil, errors.New("the fake runtime dials by itself")
}

func (n *memNetwork) IDs(context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(maps.Keys(n.attached)), nil
}

func (n *memNetwork) Traffic(context.Context) (map[string]int64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.traffic), nil
}

// move lets bytes go in and out.
func (n *memNetwork) move(id string, bytes int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.traffic == nil {
		n.traffic = map[string]int64{}
	}
	n.traffic[id] += bytes
}

func (n *memNetwork) has(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.attached[id]
}

func (n *memNetwork) clear() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.attached)
}

// memDisks is a Disks in memory; saved memory is in files, for the digests.
type memDisks struct {
	dir      string
	full     atomic.Bool // nothing more can be written
	short    atomic.Bool // nothing new is made
	reboots  atomic.Bool // what ends inside asks for a reboot
	mu       sync.Mutex
	onDelete func(id string) // is told of each disk that is deleted
	serial   int
	left     int64             // what may still be written
	disks    map[string]string // id to content
	mounted  map[string]bool
	saves    map[string]*memSave
}

type memSave struct {
	owner     string
	dir       string
	disk      string
	hasDisk   bool
	manifest  []byte
	committed bool
}

func saveKey(owner string, generation int64) string { return fmt.Sprintf("%s@%d", owner, generation) }

func (d *memDisks) Create(_ context.Context, id string, _ int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.disks[id]; !ok {
		if d.full.Load() {
			return errFull
		}
		d.serial++
		d.disks[id] = fmt.Sprint("disk ", d.serial)
	}
	return nil
}

var errFull = fault.New(fault.NoCapacity, "the pool is full").Because("pool_full")

// content says what is on the sandbox's disk, or on that of its save.
func (d *memDisks) content(id string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if text, ok := d.disks[id]; ok {
		return text
	}
	for _, s := range d.saves {
		if s.owner == id && s.committed {
			return s.disk
		}
	}
	return ""
}

func (d *memDisks) Mount(_ context.Context, id, _, agent string) (string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.disks[id]; !ok {
		return "", fault.New(fault.NotFound, "no disk %s", id)
	}
	if agent == "" {
		return "", errors.New("no agent layer")
	}
	d.mounted[id] = true
	return "/mnt/" + id, nil
}

func (d *memDisks) Unmount(_ context.Context, id string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.mounted, id)
	return nil
}

func (d *memDisks) Sync(context.Context, string) error { return nil }

func (d *memDisks) Delete(_ context.Context, id string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mounted[id] {
		return errors.New("a mounted disk is deleted")
	}
	delete(d.disks, id)
	if d.onDelete != nil {
		d.onDelete(id)
	}
	return nil
}

func (d *memDisks) Has(_ context.Context, id string) (bool, error) { return d.has(id), nil }

// lose is damage: nothing of the sandbox's disk or saves is there any more.
func (d *memDisks) lose(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.disks, id)
	for key, s := range d.saves {
		if s.owner == id {
			_ = os.RemoveAll(s.dir)
			delete(d.saves, key)
		}
	}
}

func (d *memDisks) Erase(ctx context.Context, id string) error {
	if err := d.Delete(ctx, id); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for key, s := range d.saves {
		if s.owner == id {
			_ = os.RemoveAll(s.dir)
			delete(d.saves, key)
		}
	}
	return nil
}

func (d *memDisks) ReadGuestFile(context.Context, string, string, int64) ([]byte, error) {
	if d.reboots.Load() {
		return []byte(guestproto.ExitReboot), nil
	}
	return nil, os.ErrNotExist
}

type memStaging struct {
	d   *memDisks
	key string
	s   *memSave
}

func (d *memDisks) Stage(_ context.Context, owner string, generation, _ int64) (Staging, error) {
	if d.full.Load() {
		return nil, errFull
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	key := saveKey(owner, generation)
	if old := d.saves[key]; old != nil {
		if old.committed {
			return nil, fault.New(fault.Conflict, "saved already")
		}
		_ = os.RemoveAll(old.dir)
	}
	dir := filepath.Join(d.dir, key)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	s := &memSave{owner: owner, dir: dir}
	d.saves[key] = s
	return &memStaging{d, key, s}, nil
}

func (m *memStaging) MemDir() string { return m.s.dir }

func (m *memStaging) CloneDisk(_ context.Context, id string) error {
	if m.d.full.Load() {
		return errFull
	}
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	content, ok := m.d.disks[id]
	if !ok {
		return fault.New(fault.NotFound, "no disk %s", id)
	}
	m.s.disk, m.s.hasDisk = content, true
	return nil
}

func (m *memStaging) Commit(_ context.Context, manifest []byte) error {
	if m.d.full.Load() {
		return errFull
	}
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	if !m.s.hasDisk {
		return errors.New("a save without its disk is committed")
	}
	m.s.manifest, m.s.committed = manifest, true
	return nil
}

func (m *memStaging) Abort() error {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	if !m.s.committed && m.d.saves[m.key] == m.s {
		_ = os.RemoveAll(m.s.dir)
		delete(m.d.saves, m.key)
	}
	return nil
}

func (d *memDisks) Saved(_ context.Context, owner string, generation int64) (disk.Saved, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.saves[saveKey(owner, generation)]
	if s == nil || !s.committed {
		return disk.Saved{}, fault.New(fault.NotFound, "no save %s", saveKey(owner, generation))
	}
	return disk.Saved{ID: owner, Generation: generation, MemDir: s.dir, Manifest: s.manifest}, nil
}

func (d *memDisks) CloneSaved(_ context.Context, owner string, generation int64, id string) error {
	if d.full.Load() {
		return errFull
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.saves[saveKey(owner, generation)]
	if s == nil || !s.committed {
		return fault.New(fault.NotFound, "no save %s", saveKey(owner, generation))
	}
	if d.mounted[id] {
		return errors.New("a mounted disk is replaced")
	}
	d.disks[id] = s.disk
	return nil
}

func (d *memDisks) CopySaved(_ context.Context, owner string, generation int64, to string, toGeneration int64) error {
	if d.full.Load() {
		return errFull
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.saves[saveKey(owner, generation)]
	if s == nil || !s.committed {
		return fault.New(fault.NotFound, "no save %s", saveKey(owner, generation))
	}
	dir := filepath.Join(d.dir, saveKey(to, toGeneration))
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.CopyFS(dir, os.DirFS(s.dir)); err != nil {
		return err
	}
	d.saves[saveKey(to, toGeneration)] = &memSave{owner: to, dir: dir, disk: s.disk, hasDisk: true, manifest: s.manifest, committed: true}
	return nil
}

func (d *memDisks) DropSaved(_ context.Context, owner string, generation int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.saves[saveKey(owner, generation)]; s != nil {
		_ = os.RemoveAll(s.dir)
		delete(d.saves, saveKey(owner, generation))
	}
	return nil
}

func (d *memDisks) IDs(context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.disks)), nil
}

func (d *memDisks) Mounted(context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.mounted)), nil
}

func (d *memDisks) SaveOwners(context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	owners := map[string]bool{}
	for _, s := range d.saves {
		owners[s.owner] = true
	}
	return sortedKeys(owners), nil
}

func (d *memDisks) Headroom(context.Context) (disk.Headroom, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return disk.Headroom{Left: d.left, Clear: 10}, nil
}

func (d *memDisks) Report(context.Context) (disk.Report, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var r disk.Report
	for id := range d.disks {
		r.Disks = append(r.Disks, disk.DiskUse{ID: id, Space: disk.Space{Size: 100, Allocated: 10, Unique: 1}})
	}
	for _, s := range d.saves {
		r.Saves = append(r.Saves, disk.SaveUse{ID: s.owner, Memory: 5, Disk: disk.Space{Size: 100, Allocated: 10, Unique: -1}})
	}
	return r, nil
}

func (d *memDisks) BuildTemplate(context.Context, hostproto.TemplateSource, func(string, float64)) (hostproto.Template, error) {
	return hostproto.Template{Digest: "template-1"}, nil
}
func (d *memDisks) DeleteTemplate(context.Context, string) error { return nil }
func (d *memDisks) Space(context.Context) (total, free int64, _ error) {
	if d.short.Load() {
		return 100, 9, nil
	}
	return 100, 50, nil
}

func (d *memDisks) has(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.disks[id]
	return ok
}

func (d *memDisks) isMounted(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mounted[id]
}

func (d *memDisks) unmountAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.mounted)
}

func (d *memDisks) savesOf(owner string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, s := range d.saves {
		if s.owner == owner {
			n++
		}
	}
	return n
}

func (d *memDisks) captures() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, s := range d.saves {
		if isCapture(s.owner) {
			n++
		}
	}
	return n
}

// memGuest is a guest agent in memory that remembers who it is.
type memGuest struct {
	guestproto.UnimplementedAgentHandler
	boot   fake.Boot
	silent <-chan struct{} // while it is open no call is answered
	frozen chan struct{}   // of a pause, the same
	gone   chan struct{}   // closed at its end
	paused atomic.Bool
	dirty  atomic.Int64 // written and not on disk yet
	work   atomic.Int64 // CPU time, in ns
	asked  atomic.Int64 // how often it was asked what it does
	server *http.Server
	ln     net.Listener

	mu    sync.Mutex
	state guestState
	does  guestproto.ActivityResponse
}

type guestState struct {
	Life                       int    // of the boot that its memory began with
	Previous                   string // token, of before the last Restored
	Token, Hostname, MachineID string
	Past                       []string // machine ids that it has had
}

var lives atomic.Int64

func newMemGuest(b fake.Boot) (*memGuest, error) {
	g := &memGuest{boot: b, gone: make(chan struct{})}
	if b.Restored {
		if err := json.Unmarshal(b.Memory, &g.state); err != nil {
			return nil, err
		}
	}
	var err error
	if g.ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	if !b.Restored {
		g.state.Life = int(lives.Add(1))
	}
	services := connect.NewServer()
	guestproto.RegisterAgentHandler(services, g)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services)
	g.server = &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		g.mu.Lock()
		token := r.Header.Get(guestproto.TokenHeader)
		ok := g.state.Token == "" || g.state.Token == token || g.state.Previous == token && r.URL.Path == guestproto.AgentRestoredProcedure
		g.mu.Unlock()
		if !ok {
			http.Error(rw, "wrong token", http.StatusUnauthorized)
			return
		}
		g.mu.Lock()
		waits := []<-chan struct{}{g.silent, g.frozen}
		g.mu.Unlock()
		for _, until := range waits {
			if until == nil {
				continue
			}
			select {
			case <-until:
			case <-g.gone:
				return
			}
		}
		mux.ServeHTTP(rw, r)
	})}
	go func() { _ = g.server.Serve(g.ln) }()
	return g, nil
}

// hush makes the guest answer nothing until the channel is closed.
func (g *memGuest) hush(until <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.silent = until
}

func (g *memGuest) life() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.state.Life
}

func (g *memGuest) Dial(ctx context.Context, _ int) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", g.ln.Addr().String())
}

// Pause stops it: what is asked meanwhile waits.
func (g *memGuest) Pause() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.frozen = make(chan struct{})
	g.paused.Store(true)
}

func (g *memGuest) Resume() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.frozen)
	g.frozen = nil
	g.paused.Store(false)
}
func (g *memGuest) Release() {}

// CPUTime is what the fake runtime counts.
func (g *memGuest) CPUTime() time.Duration { return time.Duration(g.work.Load()) }

// Activity tells what do has said.
func (g *memGuest) Activity(context.Context, *guestproto.ActivityRequest) (*guestproto.ActivityResponse, error) {
	g.asked.Add(1)
	g.mu.Lock()
	defer g.mu.Unlock()
	return &guestproto.ActivityResponse{
		CpuNanos: g.work.Load(), RunningCommands: g.does.RunningCommands, ForegroundCommands: g.does.ForegroundCommands,
		LastOutputUnixNano: g.does.LastOutputUnixNano,
	}, nil
}

// do says what runs inside.
func (g *memGuest) do(running, foreground int32, output int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.does.RunningCommands, g.does.ForegroundCommands, g.does.LastOutputUnixNano = running, foreground, output
}

// DirtyBytes is what the fake runtime counts.
func (g *memGuest) DirtyBytes() int64 { return g.dirty.Load() }

// Stop ends it.
func (g *memGuest) Stop() {
	close(g.gone)
	_ = g.server.Close()
}

func (g *memGuest) Snapshot() ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return json.Marshal(g.state)
}

func (g *memGuest) Init(ctx context.Context, r *guestproto.InitRequest) (*guestproto.InitResponse, error) {
	info, _ := connect.CallInfoForServerContext(ctx)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state.Token = info.RequestHeader().Get(guestproto.TokenHeader)
	g.state.Hostname, g.state.MachineID = r.GetIdentity().GetHostname(), r.GetIdentity().GetMachineId()
	return &guestproto.InitResponse{}, nil
}

func (g *memGuest) Restored(_ context.Context, r *guestproto.RestoredRequest) (*guestproto.RestoredResponse, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state.Token == r.GetNewToken() {
		return &guestproto.RestoredResponse{}, nil // its reply was lost
	}
	g.state.Previous, g.state.Token = g.state.Token, r.GetNewToken()
	if r.GetKind() == guestproto.RestoreKind_RESTORE_KIND_FORK {
		g.state.Past = append(g.state.Past, g.state.MachineID)
		g.state.Hostname, g.state.MachineID = r.GetIdentity().GetHostname(), r.GetIdentity().GetMachineId()
	}
	return &guestproto.RestoredResponse{}, nil
}

func (g *memGuest) Ping(context.Context, *guestproto.PingRequest) (*guestproto.PingResponse, error) {
	return &guestproto.PingResponse{}, nil
}

func (g *memGuest) Sync(context.Context, *guestproto.SyncRequest) (*guestproto.SyncResponse, error) {
	return &guestproto.SyncResponse{}, nil
}

func (g *memGuest) Shutdown(context.Context, *guestproto.ShutdownRequest) (*guestproto.ShutdownResponse, error) {
	return &guestproto.ShutdownResponse{}, nil
}
