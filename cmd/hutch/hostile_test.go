package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Root in a sandbox is hostile. Whatever it does is its own affair: its neighbour and
// the host stay well, and the sandbox can still be stopped, resumed and deleted.

// worked waits until the sandbox, which may have ended by what was done in it, answers
// commands again, resuming it where it has ended; reasons are those that are allowed.
func (b *box) worked(reasons ...string) {
	b.t.Helper()
	for began := time.Now(); time.Since(began) < 2*time.Minute; time.Sleep(200 * time.Millisecond) {
		got := b.get()
		if got.State == "failed" {
			ok := false
			for _, r := range reasons {
				ok = ok || r == got.Reason
			}
			if !ok {
				b.t.Fatalf("it is failed (%s)", got.Reason)
			}
			b.hutch("resume")
		}
		if b.exec(nil, "--", "echo", "well").stdout == "well\n" {
			return
		}
	}
	b.t.Fatalf("it does not answer any more: %+v", b.get())
}

// cycled stops and resumes it, which nothing inside can keep it from.
func (b *box) cycled() {
	b.t.Helper()
	b.hutch("stop")
	b.hutch("resume")
	if got := b.sh("cat /workspace/mine"); got != "mine" {
		b.t.Errorf("after stop and resume its file has %q", got)
	}
}

func TestHostileGuest(t *testing.T) {
	t.Parallel()
	neighbour := newBox(t, "--memory", "256MiB")
	neighbour.furnish()
	for name, attack := range map[string]func(t *testing.T, b *box){
		"fork bomb": func(t *testing.T, b *box) {
			b.exec(nil, "--timeout", "5s", "--", "bash", "-c", "f() { f | f & }; f; sleep 3")
			b.hutch("stop")
			b.hutch("resume")
		},
		"memory bomb": func(t *testing.T, b *box) {
			b.exec(nil, "--", "python3", "-c", "x = []\nwhile True: x.append(bytearray(16 << 20))")
			b.worked("oom_killed")
		},
		"shared memory bomb": func(t *testing.T, b *box) {
			b.exec(nil, "--", "sh", "-c", "head -c 4G /dev/zero > /dev/shm/bomb")
			b.worked("oom_killed")
		},
		"inode bomb": func(t *testing.T, b *box) {
			out := b.exec(nil, "--user", "root", "--", "python3", "-c", `
import os
os.mkdir("/workspace/many")
try:
    for i in range(10_000_000):
        os.mknod("/workspace/many/%d" % i)
except OSError as e:
    print("error", e.errno)
`)
			if !strings.Contains(out.stdout, "error 28") { // ENOSPC
				t.Errorf("the inode bomb ended with %s", out)
			}
			b.hutch("sleep")
			b.hutch("wake")
		},
		"disk bomb": func(t *testing.T, b *box) {
			b.exec(nil, "--user", "root", "--", "sh", "-c", "head -c 4G /dev/zero > /workspace/bomb")
			b.hutch("sleep")
			b.hutch("wake")
			b.sh("rm -f /workspace/bomb; echo more > /workspace/more")
		},
		"descriptors": func(t *testing.T, b *box) {
			b.hutch("exec", "--detach", "--", "python3", "-c", `
import os, time
fds = []
try:
    while True: fds.append(os.open("/dev/null", os.O_RDONLY))
except OSError: pass
os.close(fds[0])
open("/workspace/full", "w").close()
time.sleep(1000)
`)
			b.sh("while ! test -e /workspace/full; do sleep 0.1; done")
			b.hutch("sleep")
			b.hutch("wake")
		},
		"output": func(t *testing.T, b *box) {
			id := field(t, b.hutch("exec", "--detach", "--json", "--", "sh", "-c", "echo first; head -c 300M /dev/zero | tr '\\0' x; echo last"), "id")
			if r := b.exec(nil, "--", "sh", "-c", "head -c 100M /dev/zero"); len(r.stdout) != 100<<20 || r.code != 0 {
				t.Errorf("of 100 MiB of output %d bytes came, exit code %d", len(r.stdout), r.code)
			}
			hutchOK(t, "commands", "logs", b.name, id, "--follow") // as much as it can keep up with
			log := hutchOK(t, "commands", "logs", b.name, id)
			if !strings.HasPrefix(log, "first\n") || !strings.HasSuffix(log, "last\n") || len(log) > 17<<20 {
				t.Errorf("of 300 MB of output %d bytes were kept, beginning %.20q", len(log), log)
			}
		},
		"PID 1": func(t *testing.T, b *box) {
			b.exec(nil, "--user", "root", "--timeout", "10s", "--", "sh", "-c", "kill -STOP 1; kill -9 1; kill -SEGV 1; sleep 1")
			b.worked()
		},
		"lost address": func(t *testing.T, b *box) {
			r, _ := shared.try(4*time.Minute, nil, "exec", b.name, "--user", "root", "--", "sh", "-c", "ip addr flush dev eth0; sleep 600")
			if r.code != 125 {
				t.Errorf("a command that is out of reach: %s", r)
			}
			began := time.Now()
			for got := b.get(); len(got.Conditions) == 0 || got.Conditions[0].Reason != "guest_silent"; got = b.get() {
				if time.Since(began) > 3*time.Minute {
					t.Fatalf("it is out of reach and does not say so: %+v", got)
				}
				time.Sleep(time.Second)
			}
			b.hutch("sleep")
			b.hutch("wake")
			b.sh("true")
			if got := b.get(); len(got.Conditions) != 0 {
				t.Errorf("after a wake: %+v", got)
			}
		},
		"replaced agent": func(t *testing.T, b *box) {
			b.exec(nil, "--user", "root", "--", "sh", "-c", "cp /bin/sleep /tmp/s; mv /.hutch/guest /.hutch/old; cp /tmp/s /.hutch/guest; rm -rf /.hutch; mkdir -p /.hutch; cp /tmp/s /.hutch/guest; sync")
			b.hutch("sleep")
			b.hutch("wake")
		},
		"links and mounts": func(t *testing.T, b *box) {
			secret := filepath.Join(t.TempDir(), "secret")
			if err := os.WriteFile(secret, []byte("the host's"), 0o644); err != nil {
				t.Fatal(err)
			}
			up := strings.Repeat("../", 20)
			b.root(fmt.Sprintf(`set -e
ln -s %[1]s /workspace/absolute; ln -s %[2]s%[1]s /workspace/relative
rm -f /etc/hostname /etc/machine-id /etc/hosts /etc/resolv.conf
for f in hostname machine-id hosts resolv.conf; do ln -s %[2]s%[1]s /etc/$f; done
mkdir -p /workspace/proc /workspace/tmpfs
python3 -c '
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for kind in (b"proc", b"tmpfs"):
    if libc.mount(kind, b"/workspace/" + kind, kind, 0, None): raise OSError(ctypes.get_errno(), kind)
'`, secret, up))
			for _, link := range []string{"/workspace/absolute", "/workspace/relative", "/etc/hostname"} {
				if r, err := shared.try(time.Minute, nil, "cp", b.name+":"+link, filepath.Join(t.TempDir(), "out")); err == nil {
					t.Errorf("%s leads out: %s", link, r)
				}
			}
			f := b.forks(1, "--mode", "disk")[0] // the host gives it names before it boots
			if got := f.sh("cat /workspace/mine"); got != "mine" {
				t.Errorf("the fork's file has %q", got)
			}
			b.hutch("sleep")
			b.hutch("wake")
			if text, err := os.ReadFile(secret); err != nil || string(text) != "the host's" {
				t.Errorf("the host's file has %q (%v)", text, err)
			}
		},
		"network": func(t *testing.T, b *box) {
			b.reachesNothing(t, neighbour)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBox(t, "--memory", "512MiB", "--disk", "1GB")
			b.sh("echo mine > /workspace/mine; sync")
			attack(t, b)
			b.cycled()
			neighbour := &box{t, neighbour.name}
			neighbour.filesAreThere()
			neighbour.waitTicks(neighbour.ticks())
		})
	}
}

// reachesNothing proves from inside that the host's services, the address where clouds
// serve their metadata, private ranges and other sandboxes cannot be reached (N3).
func (b *box) reachesNothing(t *testing.T, neighbour *box) {
	t.Helper()
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "the host's service\n")
			_ = c.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	neighbour = &box{t, neighbour.name}
	neighbour.hutch("exec", "--detach", "--", "python3", "-m", "http.server", "8000")
	var targets []string
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		ip, _, _ := net.ParseCIDR(a.String())
		if !ip.IsLoopback() {
			targets = append(targets, net.JoinHostPort(ip.String(), port))
		}
	}
	gateway := b.sh("ip route | awk '/default/ {print $3}'")
	const address = "ip -o -4 addr show dev eth0 | awk '{print $4}' | cut -d/ -f1"
	own := neighbour.sh(address)
	for _, a := range []string{gateway, "169.254.169.254", "fd00:ec2::254", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "fe80::1"} {
		targets = append(targets, net.JoinHostPort(a, port), net.JoinHostPort(a, "80"), net.JoinHostPort(a, "22"))
	}
	if own != b.sh(address) {
		targets = append(targets, net.JoinHostPort(own, "8000"))
	}
	out := b.sh(fmt.Sprintf(`cat > /tmp/reach.py <<'END'
import socket, sys, threading
def reach(target):
    host, port = target.rsplit(":", 1)
    host = host.strip("[]")
    for kind in (socket.SOCK_STREAM,):
        try:
            s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
            s.settimeout(3)
            s.connect((host, int(port)))
            print("reached", target)
        except OSError:
            pass
threads = [threading.Thread(target=reach, args=(t,)) for t in sys.argv[1:]]
for t in threads: t.start()
for t in threads: t.join()
print("tried", len(threads))
END
python3 /tmp/reach.py %s`, strings.Join(targets, " ")))
	if strings.Contains(out, "reached") || !strings.Contains(out, fmt.Sprintf("tried %d", len(targets))) {
		t.Errorf("from inside: %s", out)
	}
}
