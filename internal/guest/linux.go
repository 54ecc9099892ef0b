package guest

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// linux does the identity work on the system that it runs on. path gives the place of
// the sandbox's files; run runs a program to its end (os/exec cannot in PID 1, whose
// reaper collects every child).
type linux struct {
	path func(string) string
	run  func(args ...string) error
}

// Apply does one item.
func (l *linux) Apply(item string, w IdentityWork) Outcome {
	apply, ok := map[string]func(IdentityWork) Outcome{
		guestproto.ItemExitMarker:   l.exitMarker,
		guestproto.ItemClock:        l.clock,
		guestproto.ItemEntropy:      l.entropy,
		guestproto.ItemRandom:       l.random,
		guestproto.ItemHostname:     l.hostname,
		guestproto.ItemHosts:        l.hosts,
		guestproto.ItemMachineID:    l.machineID,
		guestproto.ItemBootID:       l.bootID,
		guestproto.ItemNetwork:      l.network,
		guestproto.ItemConnections:  l.connections,
		guestproto.ItemSSHHostKeys:  l.sshHostKeys,
		guestproto.ItemDockerConfig: l.dockerConfig,
		guestproto.ItemWorkspace:    l.workspace,
	}[item]
	if !ok {
		return failed(fmt.Errorf("the item %q is not known here", item))
	}
	return apply(w)
}

func (l *linux) exitMarker(IdentityWork) Outcome {
	if err := os.Remove(l.path(guestproto.ExitMarker)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return failed(err)
	}
	return done("")
}

// The host's time was read a moment before it came here, and on a busy machine that
// moment is long. So a clock that is ahead of it is left alone for some seconds, and
// one that is behind is set. The host judges the result from both its ends.
const (
	clockAhead  = 10 * time.Second
	clockBehind = 20 * time.Millisecond
)

// clock sets the wall clock. gVisor has none of its own: its sentry reads the host's
// at each restore and refuses clock_settime.
func (l *linux) clock(w IdentityWork) Outcome {
	behind := time.Until(w.WallClock)
	off := behind.Abs().Round(time.Millisecond)
	if behind < clockBehind && behind > -clockAhead {
		return done(fmt.Sprintf("within %s of the host's", off))
	}
	ts := unix.NsecToTimespec(w.WallClock.UnixNano())
	switch err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); {
	case err == nil:
		return done(fmt.Sprintf("was %s off", off))
	case errors.Is(err, unix.EPERM):
		return impossible(fmt.Sprintf("%s away from the time that the host sent, and this kernel does not let it be set", off))
	default:
		return failed(fmt.Errorf("the clock is %s off and cannot be set: %w", off, err))
	}
}

// Requests of /dev/random (random(4), include/uapi/linux/random.h); x/sys has them not.
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// entropy mixes the host's bytes into the kernel's pool and credits them. A kernel
// without that request is gVisor's, whose device drops what is written: its sentry
// takes all randomness from the host (pkg/sentry/devices/memdev/random.go).
func (l *linux) entropy(w IdentityWork) Outcome {
	dev, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return failed(err)
	}
	defer dev.Close()
	buf := make([]byte, 8, 8+len(w.Entropy)+3)
	binary.NativeEndian.PutUint32(buf, uint32(len(w.Entropy)*8))
	binary.NativeEndian.PutUint32(buf[4:], uint32(len(w.Entropy)))
	buf = append(buf, w.Entropy...)
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, dev.Fd(), rndAddEntropy, uintptr(unsafe.Pointer(&buf[0])))
	switch errno {
	case 0:
		return done(fmt.Sprintf("%d bytes mixed in", len(w.Entropy)))
	case syscall.ENOTTY:
		return done("not needed: this kernel takes its randomness from the host")
	}
	return failed(os.NewSyscallError("RNDADDENTROPY", errno))
}

// random makes the kernel's generator take a new key from its pool, which the item
// before has mixed, so that it leaves the stream that it shared with its source.
func (l *linux) random(IdentityWork) Outcome {
	dev, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return failed(err)
	}
	defer dev.Close()
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, dev.Fd(), rndReseedCRNG, 0)
	switch errno {
	case 0:
		return done("the kernel's generator has a new key")
	case syscall.ENOTTY:
		return done("this kernel takes its randomness from the host")
	}
	return failed(os.NewSyscallError("RNDRESEEDCRNG", errno))
}

func (l *linux) hostname(w IdentityWork) Outcome {
	if w.Hostname == "" {
		return done("left as it is")
	}
	if err := unix.Sethostname([]byte(w.Hostname)); err != nil {
		return failed(os.NewSyscallError("sethostname", err))
	}
	if err := l.write("/etc/hostname", []byte(w.Hostname+"\n"), 0o644); err != nil {
		return failed(err)
	}
	return done("")
}

func (l *linux) hosts(w IdentityWork) Outcome {
	if w.Hosts == nil {
		return done("left as it is")
	}
	if err := l.write("/etc/hosts", w.Hosts, 0o644); err != nil {
		return failed(err)
	}
	return done("")
}

// machineID writes the id to systemd's place and, where D-Bus keeps a copy of its
// own, there too.
func (l *linux) machineID(w IdentityWork) Outcome {
	if w.MachineID == "" {
		return done("left as it is")
	}
	id := []byte(w.MachineID + "\n")
	if err := l.write("/etc/machine-id", id, 0o444); err != nil {
		return failed(err)
	}
	const dbus = "/var/lib/dbus/machine-id"
	if info, err := os.Lstat(l.path(dbus)); err == nil && info.Mode().IsRegular() {
		if err := l.write(dbus, id, 0o444); err != nil {
			return failed(err)
		}
	}
	return done("")
}

// bootID hides the kernel's boot id, which the fork has inherited, behind a file with
// a new one. Who read it before the fork keeps the old one, and no agent can help it.
func (l *linux) bootID(IdentityWork) Outcome {
	const kernel, ours = "/proc/sys/kernel/random/boot_id", "/run/hutch/boot_id"
	if _, err := os.Stat(kernel); err != nil {
		return done("this kernel has no boot id")
	}
	var u [16]byte
	rand.Read(u[:])
	u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80 // RFC 9562, version 4
	id := fmt.Sprintf("%x-%x-%x-%x-%x\n", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
	if err := os.MkdirAll(filepath.Dir(l.path(ours)), 0o755); err != nil {
		return failed(err)
	}
	// Written in place: an earlier fork may have mounted this very file.
	if err := os.WriteFile(l.path(ours), []byte(id), 0o444); err != nil {
		return failed(err)
	}
	if now, err := os.ReadFile(kernel); err == nil && string(now) == id {
		return done("replaced; programs that read it before the fork keep the old one")
	}
	if err := unix.Mount(l.path(ours), kernel, "", unix.MS_BIND, ""); err != nil {
		return impossible("the kernel's boot id cannot be changed, and not be hidden here: " + err.Error())
	}
	return done("replaced; programs that read it before the fork keep the old one")
}

func (l *linux) network(w IdentityWork) Outcome {
	if w.Resolv != nil {
		if err := l.write("/etc/resolv.conf", w.Resolv, 0o644); err != nil {
			return failed(err)
		}
	}
	list, err := net.Interfaces()
	if err != nil {
		return failed(err)
	}
	var up []string
	for _, i := range list {
		if i.Flags&net.FlagUp != 0 {
			up = append(up, i.Name)
		}
	}
	if len(up) == 0 {
		return failed(errors.New("no network interface is up"))
	}
	return done("up: " + strings.Join(up, ", "))
}

// workspace makes the default directory where the template has none.
func (l *linux) workspace(w IdentityWork) Outcome {
	return l.ownedDir(guestproto.Workspace, 0o755, w.User)
}

// dockerConfig makes the place of registry logins, on a tmpfs, and empties it: logins
// are no part of a fork.
func (l *linux) dockerConfig(w IdentityWork) Outcome {
	dir := l.path(guestproto.DockerConfig)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return failed(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return failed(err)
		}
	}
	if o := l.ownedDir(guestproto.DockerConfig, 0o700, w.User); o.Status != guestproto.ItemStatus_ITEM_STATUS_DONE {
		return o
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return failed(err)
	}
	if fs.Type == unix.TMPFS_MAGIC {
		return done(fmt.Sprintf("%d entries removed", len(entries)))
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=16m,mode=0700"); err != nil {
		return failed(fmt.Errorf("%s is not in memory, and no tmpfs can be mounted there: %w", guestproto.DockerConfig, err))
	}
	return l.ownedDir(guestproto.DockerConfig, 0o700, w.User)
}

// ownedDir makes a directory, if need be, and gives a new one or one in memory to a
// user. A user who is not known leaves it root's.
func (l *linux) ownedDir(path string, mode os.FileMode, user string) Outcome {
	dir := l.path(path)
	_, err := os.Stat(dir)
	if err == nil && path == guestproto.Workspace {
		return done("")
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return failed(err)
	}
	if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, os.ErrExist) {
		return failed(err)
	}
	if user != "" {
		acc, err := readAccounts(l.path).find(user)
		if fault.Of(err) != nil && fault.Of(err).Reason == reasonNoUser {
			return done(fmt.Sprintf("it is root's, as there is no user %q", user))
		}
		if err != nil {
			return failed(err)
		}
		if err := os.Chown(dir, int(acc.uid), int(acc.gid)); err != nil {
			return failed(err)
		}
	}
	return done("")
}

// write replaces a file whole. Where it is a mount of its own, which no rename can
// replace, it is overwritten.
func (l *linux) write(path string, data []byte, mode os.FileMode) error {
	place := l.path(path)
	if target, err := filepath.EvalSymlinks(place); err == nil {
		place = target
	}
	if old, err := os.ReadFile(place); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(place), 0o755); err != nil {
		return err
	}
	err := replaceFile(place, data, mode)
	if errors.Is(err, syscall.EBUSY) {
		return os.WriteFile(place, data, mode)
	}
	return err
}
