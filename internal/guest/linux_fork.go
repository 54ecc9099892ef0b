package guest

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// sshHostKeys gives a fork SSH host keys of its own, of the same types, and makes the
// servers that hold the old ones read them: sshd starts itself anew on SIGHUP.
func (l *linux) sshHostKeys(IdentityWork) Outcome {
	old, err := filepath.Glob(l.path("/etc/ssh/ssh_host_*_key"))
	if err != nil || len(old) == 0 {
		return done("there are none")
	}
	keygen := l.path("/usr/bin/ssh-keygen")
	_, missing := os.Stat(keygen)
	for _, key := range old {
		kind := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(key), "ssh_host_"), "_key")
		for _, file := range []string{key, key + ".pub", key + "-cert.pub"} {
			if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
				return failed(err)
			}
		}
		if missing == nil {
			if err := l.run(keygen, "-q", "-t", kind, "-N", "", "-f", key); err != nil {
				return failed(fmt.Errorf("make a new %s key: %w", kind, err))
			}
		}
	}
	for _, p := range sshServers(readProcesses("/proc")) {
		if err := syscall.Kill(p, syscall.SIGHUP); err != nil && !errors.Is(err, syscall.ESRCH) {
			return failed(err)
		}
	}
	if missing != nil {
		return done(fmt.Sprintf("%d removed; there is no ssh-keygen to make new ones", len(old)))
	}
	return done(fmt.Sprintf("%d made anew", len(old)))
}

// sshServers gives the pids of the sshd processes that listen: those that no other
// sshd started.
func sshServers(list []process) []int {
	sshd := map[int]bool{}
	for _, p := range list {
		sshd[p.pid] = p.comm == "sshd"
	}
	var out []int
	for _, p := range list {
		if sshd[p.pid] && !sshd[p.parent] {
			out = append(out, p.pid)
		}
	}
	return out
}

// toolTime is how long a helper program of the agent may run.
const toolTime = time.Minute

// runTool runs a program to its end, with nothing on its descriptors.
func (g *Guest) runTool(args ...string) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	fd := null.Fd()
	pid, ended, err := g.reaper.start(func() (int, error) {
		return syscall.ForkExec(args[0], args, &syscall.ProcAttr{
			Dir: "/", Env: []string{"PATH=" + defaultPath, "HOME=/root"},
			Files: []uintptr{fd, fd, fd}, Sys: &syscall.SysProcAttr{Setsid: true},
		})
	})
	if err != nil {
		return err
	}
	timeout := time.NewTimer(toolTime)
	defer timeout.Stop()
	select {
	case status := <-ended:
		if status.code != 0 || status.signal != 0 || status.lost {
			return fmt.Errorf("%s ended with code %d, signal %d", filepath.Base(args[0]), status.code, int(status.signal))
		}
		return nil
	case <-timeout.C:
		g.reaper.signal(pid, syscall.SIGKILL)
		return fmt.Errorf("%s did not end within %s", filepath.Base(args[0]), toolTime)
	}
}

// connection is an established TCP connection.
type connection struct{ local, remote netip.AddrPort }

// parseNetTCP gives the established connections of /proc/net/tcp or tcp6 that lead
// outside: not those of the agent's port, and not those within the machine.
func parseNetTCP(text string) []connection {
	const established = "01"
	var out []connection
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 4 || f[3] != established {
			continue
		}
		c := connection{local: parseHexAddr(f[1]), remote: parseHexAddr(f[2])}
		if !c.local.IsValid() || !c.remote.IsValid() || c.local.Port() == guestproto.Port ||
			c.remote.Addr().IsLoopback() || c.remote.Addr() == c.local.Addr() {
			continue
		}
		out = append(out, c)
	}
	return out
}

// parseHexAddr reads an address of /proc/net/tcp: 32-bit words in the machine's byte
// order, in hex, a colon, the port in hex.
func parseHexAddr(s string) netip.AddrPort {
	addr, port, _ := strings.Cut(s, ":")
	raw, err1 := hex.DecodeString(addr)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err1 != nil || err2 != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}
	}
	for i := 0; i < len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	ip, ok := netip.AddrFromSlice(raw)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ip.Unmap(), uint16(n))
}

// connections ends the connections that a fork has inherited: their other ends belong
// to the source.
func (l *linux) connections(IdentityWork) Outcome {
	var found []connection
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return failed(err)
		}
		found = append(found, parseNetTCP(string(text))...)
	}
	for _, c := range found {
		switch err := destroy(c); {
		case err == nil, errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL):
			return impossible(fmt.Sprintf("%d left: this kernel has no request that ends a connection", len(found)))
		default:
			return failed(err)
		}
	}
	return done(fmt.Sprintf("%d ended", len(found)))
}

// destroy ends one TCP connection with an error to its owner (sock_diag(7),
// SOCK_DESTROY; kernels with CONFIG_INET_DIAG_DESTROY).
func destroy(c connection) error {
	const sockDestroy = 21
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 2}); err != nil {
		return err
	}
	family := byte(unix.AF_INET)
	if c.local.Addr().Is6() {
		family = unix.AF_INET6
	}
	// struct nlmsghdr, then struct inet_diag_req_v2 (linux/inet_diag.h).
	msg := binary.NativeEndian.AppendUint32(nil, 16+56)
	msg = binary.NativeEndian.AppendUint16(msg, sockDestroy)
	msg = binary.NativeEndian.AppendUint16(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	msg = append(msg, make([]byte, 8)...)
	msg = append(msg, family, unix.IPPROTO_TCP, 0, 0)
	msg = binary.NativeEndian.AppendUint32(msg, ^uint32(0)) // every state
	msg = binary.BigEndian.AppendUint16(msg, c.local.Port())
	msg = binary.BigEndian.AppendUint16(msg, c.remote.Port())
	for _, a := range []netip.Addr{c.local.Addr(), c.remote.Addr()} {
		var field [16]byte
		copy(field[:], a.AsSlice())
		msg = append(msg, field[:]...)
	}
	msg = binary.NativeEndian.AppendUint32(msg, 0)          // any interface
	msg = binary.NativeEndian.AppendUint64(msg, ^uint64(0)) // INET_DIAG_NOCOOKIE
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	reply := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, reply, 0)
	if err != nil {
		return err
	}
	if n < 20 || binary.NativeEndian.Uint16(reply[4:]) != unix.NLMSG_ERROR {
		return unix.EINVAL
	}
	if code := int32(binary.NativeEndian.Uint32(reply[16:])); code != 0 {
		return unix.Errno(-code)
	}
	return nil
}
