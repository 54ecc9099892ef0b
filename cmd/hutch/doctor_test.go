package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// doctor runs the doctor on the shared installation and reads what it says.
func doctor(t *testing.T, into any, args ...string) {
	t.Helper()
	r, err := shared.try(2*time.Minute, nil, append([]string{"doctor", "--json", "--data", shared.data()}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(r.stdout), into); err != nil {
		t.Fatalf("%v: %s", err, r)
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// planter leaves things behind as a crash does, and takes them away in the end
// whatever the doctor did.
type planter struct {
	t    *testing.T
	l    layout
	dead string            // a sandbox that no journal knows
	want map[string]string // kind to names, of what nobody owns
}

func (p *planter) orphan(kind, name string) { p.want[kind+" "+name] = "" }

// file makes a file, and its directories, as old as asked for.
func (p *planter) file(path string, old bool) string {
	p.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		p.t.Fatal(err)
	}
	writeFile(p.t, path, []byte("left"))
	p.t.Cleanup(func() { _ = os.RemoveAll(path) })
	if old {
		p.age(path)
	}
	return path
}

func (p *planter) age(path string) {
	p.t.Helper()
	then := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, then, then); err != nil {
		p.t.Fatal(err)
	}
}

// process starts one that lives until it is killed, and gives its end.
func (p *planter) process(name string, args ...string) (pid int, ended chan struct{}) {
	p.t.Helper()
	cmd := exec.Command(name, args...)
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	ended = make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	p.t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	return cmd.Process.Pid, ended
}

// group makes a control group of an installation, in each hierarchy.
func (p *planter) group(parent, id string) []string {
	p.t.Helper()
	var dirs []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu"} {
		if _, err := os.Stat(filepath.Join(root, p.l.cgroup())); err != nil {
			continue // the live server's group is where groups go
		}
		dir := filepath.Join(root, parent, id)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			p.t.Fatal(err)
		}
		p.t.Cleanup(func() { _ = unix.Rmdir(dir) })
		dirs = append(dirs, dir)
	}
	if len(dirs) == 0 {
		p.t.Fatal("no control group of the server")
	}
	return dirs
}

// plant leaves an orphan of every kind.
func (p *planter) plant() (ends []chan struct{}) {
	p.t.Helper()
	l, dead := p.l, p.dead
	pid, ended := p.process("sleep", "600")
	for _, dir := range p.group(l.cgroup(), dead) {
		writeFile(p.t, filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)))
		p.orphan("cgroup", dir)
	}
	p.orphan("process", strconv.Itoa(pid)+" sleep")
	// One that has lost its group.
	pid, second := p.process(filepath.Join(filepath.Dir(binary), "hutch-runsc"), "idle", filepath.Join(l.boots(), dead, "1"))
	p.orphan("process", strconv.Itoa(pid)+" hutch-runsc")

	point := filepath.Join(l.run(), "mnt", dead, "img")
	if err := os.MkdirAll(point, 0o700); err != nil {
		p.t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", point, "tmpfs", 0, "size=1m"); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = unix.Unmount(point, unix.MNT_DETACH); _ = removeEmpty(filepath.Dir(point)) })
	p.orphan("mount", point)
	p.orphan("file", filepath.Dir(point))

	image := p.file(filepath.Join(l.data, "pool", "disks", dead, "disk.img"), false)
	p.t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(image)) })
	if err := os.Truncate(image, 1<<20); err != nil {
		p.t.Fatal(err)
	}
	device := run(p.t, "losetup", "-f", "--show", image)
	p.t.Cleanup(func() { _ = exec.Command("losetup", "-d", device).Run() })
	p.orphan("loop", device+" "+image)
	p.orphan("disk", filepath.Dir(image))

	space := "hutch-" + l.tag + "-" + dead + "-g"
	run(p.t, "ip", "netns", "add", space)
	p.t.Cleanup(func() { _ = exec.Command("ip", "netns", "delete", space).Run() })
	p.orphan("netns", "/run/netns/"+space)
	p.link("hutch0000dead", l.tag, "hutch:"+l.tag+":"+dead)
	p.orphan("veth", "hutch0000dead")

	boot := filepath.Join(l.boots(), dead)
	p.file(filepath.Join(boot, "1", "hutch.json"), false)
	p.t.Cleanup(func() { _ = os.RemoveAll(boot) })
	p.orphan("file", boot)
	pool := filepath.Join(l.data, "pool")
	for _, path := range []string{filepath.Join(pool, "saves", dead, "2.tmp"), filepath.Join(pool, "tmp", dead), filepath.Join(pool, "trash", dead)} {
		p.file(filepath.Join(path, "half"), false)
		p.t.Cleanup(func() { _ = os.RemoveAll(path) })
		p.age(path)
		p.orphan("file", path)
	}
	capture := filepath.Join(pool, "saves", "op_"+dead, "0")
	p.file(filepath.Join(capture, "manifest.json"), false)
	p.t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(capture)) })
	p.orphan("save", capture)
	p.orphan("file", p.file(filepath.Join(l.journals(), dead+".journal.tmp"), false))
	p.orphan("file", p.file(filepath.Join(l.binaries(), "0000", ".new-1"), true))
	empty := filepath.Join(runRoot, "0badcafe")
	if err := os.MkdirAll(filepath.Join(empty, "mnt"), 0o700); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = removeEmpty(empty) })
	p.age(empty)
	p.orphan("file", empty)
	return []chan struct{}{ended, second}
}

// link makes an uplink that leads nowhere.
func (p *planter) link(name, tag, alias string) {
	p.t.Helper()
	group, err := strconv.ParseUint(tag, 16, 32)
	if err != nil {
		p.t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group = name, uint32(group)
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: "p" + name[len(name)-8:]}
	if err := netlink.LinkAdd(link); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = netlink.LinkDel(link) })
	if err := netlink.LinkSetAlias(link, alias); err != nil {
		p.t.Fatal(err)
	}
}

// foreign makes things of the same kinds that have another owner: another
// installation's, and other people's. It gives a check that all of it is there.
func (p *planter) foreign() func() {
	p.t.Helper()
	const other = "0badcafd"
	pid, _ := p.process("sh", "-c", "sleep 600; true", filepath.Join(p.l.boots(), p.dead, "1"))
	for _, dir := range p.group("hutch-"+other, p.dead) {
		p.t.Cleanup(func() { _ = unix.Rmdir(filepath.Dir(dir)) })
		p.t.Cleanup(func() { _ = unix.Rmdir(dir) })
	}
	space := "hutch-" + other + "-" + p.dead + "-g"
	run(p.t, "ip", "netns", "add", space)
	p.t.Cleanup(func() { _ = exec.Command("ip", "netns", "delete", space).Run() })
	p.link("hutch0000feed", other, "hutch:"+other+":"+p.dead)
	run(p.t, "nft", "add", "table", "inet", "hutch-"+other)
	p.t.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "inet", "hutch-"+other).Run() })
	theirs := p.file(filepath.Join(runRoot, other, "sb", "something"), true)
	p.t.Cleanup(func() { _ = os.RemoveAll(filepath.Join(runRoot, other)) })
	p.age(filepath.Join(runRoot, other))
	return func() {
		p.t.Helper()
		if err := unix.Kill(pid, 0); err != nil {
			p.t.Errorf("a process of somebody else: %v", err)
		}
		for _, path := range []string{"/run/netns/" + space, "/sys/class/net/hutch0000feed", theirs} {
			if _, err := os.Stat(path); err != nil {
				p.t.Errorf("a thing of somebody else: %v", err)
			}
		}
		groups, _ := filepath.Glob("/sys/fs/cgroup/*/hutch-" + other + "/" + p.dead)
		nested, _ := filepath.Glob("/sys/fs/cgroup/hutch-" + other + "/" + p.dead)
		if len(groups)+len(nested) == 0 {
			p.t.Error("a control group of somebody else is gone")
		}
		run(p.t, "nft", "list", "table", "inet", "hutch-"+other)
		run(p.t, "nft", "list", "table", "inet", "hutch-"+p.l.tag)
	}
}

// R10: beside a live server the doctor finds an orphan of every kind by its name, and
// removes it, and nothing that has an owner notices.
func TestR10OrphansBesideALiveServer(t *testing.T) {
	running, sleeping, stopped := newBox(t), newBox(t), newBox(t)
	running.furnish()
	sleeping.furnish()
	sleeping.hutch("sleep")
	stopped.hutch("stop")
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	var before diagnosis
	doctor(t, &before)
	if len(before.Orphans) > 0 || len(before.Sandboxes) > 0 {
		t.Fatalf("a healthy server has orphans: %+v", before)
	}
	p := &planter{t, l, "sbx_" + strings.ReplaceAll(running.name, "-", "dead"), map[string]string{}}
	intact := p.foreign()
	ends := p.plant()
	// What is half made may be in the making.
	young := p.file(filepath.Join(l.data, "pool", "tmp", "young", "half"), false)
	t.Cleanup(func() { _ = os.RemoveAll(filepath.Dir(young)) })

	var found diagnosis
	doctor(t, &found)
	p.compare(found.Orphans)
	intact()
	for _, o := range found.Orphans {
		if (o.Kept != "") != (o.Kind == "disk") {
			t.Errorf("%s %s is kept: %q", o.Kind, o.Name, o.Kept)
		}
	}
	r, err := shared.try(2*time.Minute, nil, "doctor", "--data", shared.data())
	if err != nil || !strings.Contains(r.stdout, "warning  orphans") || !strings.Contains(r.stdout, "orphan   netns            /run/netns/hutch-"+l.tag+"-"+p.dead+"-g") {
		t.Errorf("for people: %v %s", err, r)
	}

	var done cleaned
	doctor(t, &done, "--clean")
	if len(done.Failed) > 0 || len(done.Ended) > 0 || len(done.Kept) != 1 || done.Kept[0].Kind != "disk" {
		t.Errorf("clean: %+v", done)
	}
	for _, ended := range ends {
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			t.Fatal("a process without an owner lives on")
		}
	}
	var after diagnosis
	doctor(t, &after)
	if len(after.Orphans) != 1 || after.Orphans[0].Kind != "disk" {
		t.Errorf("after --clean: %+v", after.Orphans)
	}
	doctor(t, &done, "--clean", "--erase", p.dead)
	doctor(t, &after)
	if len(after.Orphans) > 0 {
		t.Errorf("after --erase: %+v", after.Orphans)
	}
	intact()
	if _, err := os.Stat(young); err != nil {
		t.Errorf("what may be in the making: %v", err)
	}
	running.is("ready")
	running.waitTicks(running.ticks())
	running.filesAreThere()
	sleeping.hutch("wake")
	sleeping.filesAreThere()
	stopped.hutch("resume")
}

// compare checks that just what was planted is found.
func (p *planter) compare(list []orphan) {
	p.t.Helper()
	want := map[string]string{}
	for k := range p.want {
		want[k] = ""
	}
	for _, o := range list {
		key := o.Kind + " " + o.Name
		if _, ok := want[key]; !ok {
			p.t.Errorf("found: %s", key)
		}
		delete(want, key)
	}
	for key := range want {
		p.t.Errorf("not found: %s", key)
	}
}

// Where no server runs the doctor tells what goes on without one from what nobody
// owns, and what journals know waits for the next server.
func TestR10OrphansOfADeadServer(t *testing.T) {
	running, stopped := newBox(t), newBox(t)
	running.furnish()
	stopped.hutch("stop")
	id, ended := running.get().ID, stopped.get().ID
	l, err := layoutOf(shared.data())
	if err != nil {
		t.Fatal(err)
	}
	p := &planter{t, l, "sbx_" + strings.ReplaceAll(running.name, "-", "dead"), map[string]string{}}
	intact := p.foreign()
	shared.kill()
	t.Cleanup(func() { // whatever becomes of this test, the next one has a server
		if live, _ := l.live(); !live {
			_ = shared.start()
		}
	})
	p.plant()
	// A sandbox's whose journal says that it has nothing in the kernel.
	for _, dir := range p.group(l.cgroup(), ended) {
		p.orphan("cgroup", dir)
	}
	var found diagnosis
	doctor(t, &found)
	p.compare(found.Orphans)
	if !slices.Contains(found.Sandboxes, id) || slices.Contains(found.Sandboxes, ended) {
		t.Errorf("%s goes on without a server, but these are said to: %v", id, found.Sandboxes)
	}
	if err := shared.start(); err != nil {
		t.Fatal(err)
	}
	running.is("ready")
	running.waitTicks(running.ticks())
	running.filesAreThere()
	var done cleaned
	doctor(t, &done, "--clean", "--erase", p.dead)
	if len(done.Failed) > 0 {
		t.Errorf("clean: %+v", done.Failed)
	}
	intact()
}

// A directory that is no installation is somebody else's: nothing in it is listed or
// removed, whatever it looks like. What bears the name of an installation whose
// directory is gone has no owner any more.
func TestR10ForeignDirectory(t *testing.T) {
	foreign := t.TempDir()
	l, err := layoutOf(foreign)
	if err != nil {
		t.Fatal(err)
	}
	p := &planter{t, l, "sbx_foreign", nil}
	var files []string
	for _, name := range []string{"lock", "pool/tmp/x/f", "pool/trash/x/f", "pool/saves/a/1.tmp/f", "bin/x/.new-1", "host/a.journal.tmp", "server.json", "pool.img.tmp"} {
		files = append(files, p.file(filepath.Join(foreign, name), true))
		p.age(filepath.Dir(files[len(files)-1]))
	}
	clean := func(data string) result {
		t.Helper()
		r, _ := shared.try(time.Minute, nil, "doctor", "--clean", "--data", data)
		return r
	}
	if r := clean(foreign); r.code != 12 || !strings.Contains(r.stderr, "there is no installation at") {
		t.Errorf("doctor --clean of somebody else's directory: %s", r)
	}
	for _, path := range files {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}

	if err := os.RemoveAll(foreign); err != nil {
		t.Fatal(err)
	}
	space := "hutch-" + l.tag + "-sbx_gone-r"
	run(t, "ip", "netns", "add", space)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "delete", space).Run() })
	point := filepath.Join(l.run(), "mnt", "sbx_gone", "root")
	if err := os.MkdirAll(point, 0o700); err != nil {
		t.Fatal(err)
	}
	run(t, "mount", "-t", "tmpfs", "none", point)
	t.Cleanup(func() { _ = unix.Unmount(point, unix.MNT_DETACH) })
	if r := clean(foreign); r.code != 0 || !strings.Contains(r.stdout, "removed  mount     "+point) {
		t.Errorf("doctor --clean of a directory that is gone: %s", r)
	}
	if left := residue(l); left != "" {
		t.Error(left)
	}
	if _, err := os.Stat(l.run()); err == nil {
		t.Errorf("%s is left", l.run())
	}
	if _, err := os.Stat(foreign); err == nil {
		t.Error("the clean-up made a directory")
	}
}
