package guest

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The user database is the sandbox's own: lines of any form do no harm.
func TestE5Accounts(t *testing.T) {
	t.Parallel()
	db := accounts{
		users:  parsePasswd("root:x:0:0:root:/root:/bin/bash\n\n#x\nbroken:x\nuser:x:1000:1000::/home/user:\nbig:x:4294967295:1::/:\nneg:x:-1:1::/:\n"),
		groups: parseGroup("root:x:0:\nuser:x:1000:\ndocker:x:999:user,other\nwheel:x:10:user\nbad\n"),
	}
	for spec, want := range map[string]account{
		"root":      {name: "root", home: "/root", shell: "/bin/bash"},
		"user":      {name: "user", uid: 1000, gid: 1000, groups: []uint32{999, 10}, home: "/home/user", shell: "/bin/sh"},
		"1000":      {name: "user", uid: 1000, gid: 1000, groups: []uint32{999, 10}, home: "/home/user", shell: "/bin/sh"},
		"1000:5":    {name: "user", uid: 1000, gid: 5, home: "/home/user", shell: "/bin/sh"},
		"4242":      {uid: 4242, gid: 4242, home: "/", shell: "/bin/sh"},
		"4242:4243": {uid: 4242, gid: 4243, home: "/", shell: "/bin/sh"},
	} {
		got, err := db.find(spec)
		if err != nil || got.name != want.name || got.uid != want.uid || got.gid != want.gid || !slices.Equal(got.groups, want.groups) || got.home != want.home || got.shell != want.shell {
			t.Errorf("%s: got %+v, %v", spec, got, err)
		}
	}
	for _, spec := range []string{"nobody", "big", "neg", "-1", "4294967295", "user:5", "1000:x", "broken"} {
		if got, err := db.find(spec); err == nil {
			t.Errorf("%s: got %+v", spec, got)
		}
	}
	if acc, err := (accounts{}).find("root"); err != nil || acc.uid != 0 {
		t.Errorf("root without a database: %+v, %v", acc, err)
	}
}

func TestParseStat(t *testing.T) {
	t.Parallel()
	p, err := parseStat([]byte("42 (a) b (c) S 1 40 39 0 -1 4194560 1 2 3 4 100 20 3 4 20 0 1 0 5 6 7\n"))
	if err != nil || p.pid != 42 || p.comm != "a) b (c" || p.parent != 1 || p.group != 40 || p.session != 39 || p.state != 'S' || p.ticks != 127 {
		t.Errorf("got %+v, %v", p, err)
	}
	for _, bad := range []string{"", "42", "42 (x", "x (y) S 1", ")(", "42 (x) S 1 2 3"} {
		if p, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q: %+v", bad, p)
		}
	}
}

func TestParseNetDev(t *testing.T) {
	t.Parallel()
	text := "Inter-|   Receive    |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes\n" +
		"    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n  eth0:5 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n eth1: 10 1 0 0 0 0 0 0 20 1\nbad: x\n"
	if r, s := parseNetDev([]byte(text)); r != 15 || s != 27 {
		t.Errorf("got %d, %d", r, s)
	}
}

func TestParseNetTCP(t *testing.T) {
	t.Parallel()
	text := "  sl  local_address rem_address   st\n" +
		"   0: 0100007F:1F90 0100007F:C350 01 0\n" + // loopback
		"   1: 0201A8C0:C350 08080808:01BB 01 0\n" + // outside
		"   2: 0201A8C0:C33E 0101A8C0:9C40 01 0\n" + // the agent's port
		"   3: 0201A8C0:C351 08080808:01BB 06 0\n" + // not established
		"   4: 0201A8C0:C352 0201A8C0:01BB 01 0\n" + // itself
		"   5: bad bad 01\n" +
		"   6: B80D0120000000000000000001000000:C350 B80D0120000000000000000002000000:0050 01 0\n"
	got := parseNetTCP(text)
	if len(got) != 2 || got[0].local.String() != "192.168.1.2:50000" || got[0].remote.String() != "8.8.8.8:443" ||
		got[1].local.String() != "[2001:db8::1]:50000" || got[1].remote.String() != "[2001:db8::2]:80" {
		t.Errorf("got %v", got)
	}
}

func TestSSHServers(t *testing.T) {
	t.Parallel()
	got := sshServers([]process{
		{pid: 10, parent: 1, comm: "sshd"}, {pid: 11, parent: 10, comm: "sshd"}, {pid: 12, parent: 11, comm: "sshd"},
		{pid: 13, parent: 1, comm: "bash"}, {pid: 14, parent: 13, comm: "sshd"},
	})
	if !slices.Equal(got, []int{10, 14}) {
		t.Errorf("got %v", got)
	}
}

func TestRequestNames(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		want int
	}{
		{[]string{"/usr/sbin/poweroff"}, 38}, {[]string{"halt", "-p"}, 38}, {[]string{"shutdown", "-h", "now"}, 38},
		{[]string{"shutdown", "-r", "now"}, 39}, {[]string{"reboot"}, 39}, {[]string{"/.hutch/guest"}, 0},
	} {
		if sig, _ := request(filepath.Base(tc.args[0]), tc.args); int(sig) != tc.want {
			t.Errorf("%v: %d", tc.args, sig)
		}
	}
}

// Z1: only a shell at its prompt is no foreground command.
func TestInteractiveShell(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]bool{
		"/bin/bash -i -l": true, "bash": true, "-bash": true, "bash --norc -i": true, "zsh": true,
		"bash -c true": false, "/bin/bash -lc true": false, "bash script": false, "vim": false, "python3": false,
	} {
		if got := interactiveShell(strings.Fields(line)); got != want {
			t.Errorf("%s: %v", line, got)
		}
	}
}
