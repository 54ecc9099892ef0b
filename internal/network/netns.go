package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// spacesDir is where iproute2 keeps named namespaces (ip-netns(8)).
const spacesDir = "/run/netns"

// A space is an open network namespace with an rtnetlink socket in it. While it is
// open the kernel keeps the namespace, so it is closed as soon as the work is done.
type space struct {
	path string // that it was opened by
	fd   netns.NsHandle
	nl   *netlink.Handle
}

// errNoSpace says that no namespace is mounted at a path: the file is absent, or
// is an empty one that a crash or a restart of the machine left.
var errNoSpace = errors.New("no network namespace there")

// kernelAnswer is how long the kernel may take for an answer over netlink. It takes
// milliseconds; the rest is other programs' work under the same lock.
var kernelAnswer = 30 * time.Second

// opened is called after each netlink socket that is opened. Tests make the kernel
// silent there.
var opened = func() {}

// openSpace opens a namespace by its path.
func openSpace(path string) (*space, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Type != unix.NSFS_MAGIC {
		return nil, errNoSpace
	}
	if err != nil {
		return nil, fmt.Errorf("statfs %s: %w", path, err)
	}
	fd, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	nl, err := netlink.NewHandleAt(fd, unix.NETLINK_ROUTE)
	if err != nil {
		fd.Close()
		return nil, fmt.Errorf("rtnetlink in %s: %w", path, err)
	}
	if err := nl.SetSocketTimeout(kernelAnswer); err != nil {
		nl.Close()
		fd.Close()
		return nil, fmt.Errorf("rtnetlink in %s: %w", path, err)
	}
	opened()
	return &space{path: path, fd: fd, nl: nl}, nil
}

// close gives the namespace back.
func (s *space) close() {
	s.nl.Close()
	s.fd.Close()
}

// do runs fn on a thread that is inside the namespace. A socket that fn makes
// belongs to the namespace for good, wherever it is used later.
func (s *space) do(fn func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(s.fd), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return fn()
	})
}

// onThread runs fn on a thread of its own and brings the thread back into the
// process's namespace. Where that fails, the thread ends with its goroutine, so no
// other goroutine ever runs in a wrong namespace.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		err = fn()
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
			err = errors.Join(err, fmt.Errorf("leave a network namespace: %w", back))
		} else {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// ensureSpace opens a named namespace and makes it first if need be.
func ensureSpace(name string) (s *space, made bool, err error) {
	path := filepath.Join(spacesDir, name)
	s, err = openSpace(path)
	if !errors.Is(err, errNoSpace) {
		return s, false, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o444)
	if err != nil {
		return nil, false, fmt.Errorf("name a network namespace: %w", err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("name a network namespace: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	s, err = openSpace(path)
	return s, true, err
}

// removeSpace takes a namespace's name away. The kernel ends the namespace when no
// process and no socket is in it.
func removeSpace(name string) error {
	path := filepath.Join(spacesDir, name)
	// EINVAL: the file is there, no namespace is mounted on it.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// prepareSpacesDir makes /run/netns a shared mount, as ip-netns does: so that a
// name that is taken away goes away in every mount namespace that had copied it.
// The lock is the one that iproute2 takes for the same work.
func prepareSpacesDir() error {
	if err := os.MkdirAll(spacesDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(spacesDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", spacesDir, err)
	}
	err = unix.Mount("", spacesDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // not a mount of its own yet
		if err = unix.Mount(spacesDir, spacesDir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", spacesDir, "none", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return fmt.Errorf("share %s: %w", spacesDir, err)
	}
	return nil
}

// sysctl writes kernel settings in the namespace, in order. A setting of IPv6 that
// is not there is as good as off.
func (s *space) sysctl(settings ...[2]string) error {
	return s.do(func() error {
		for _, kv := range settings {
			err := os.WriteFile("/proc/sys/net/"+kv[0], []byte(kv[1]), 0)
			if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(kv[0], "ipv6/") {
				continue
			}
			if err != nil {
				return fmt.Errorf("set %s: %w", kv[0], err)
			}
		}
		return nil
	})
}

// sysctlOf reads one kernel setting in the namespace.
func (s *space) sysctlOf(key string) (value string, err error) {
	err = s.do(func() error {
		b, err := os.ReadFile("/proc/sys/net/" + key)
		value = strings.TrimSpace(string(b))
		return err
	})
	return value, err
}

// link finds an interface by name; nil is none.
func (s *space) link(name string) (netlink.Link, error) {
	l, err := s.nl.LinkByName(name)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
		return nil, nil
	}
	return l, err
}

// dump reads a list from the kernel, and reads it again when interfaces came or
// went meanwhile: such a list may be incomplete (NLM_F_DUMP_INTR, netlink(7)). A socket
// on which an earlier list was given up is busy with it (EBUSY) until somebody reads on,
// which each further try does.
func dump[T any](what string, list func() ([]T, error)) ([]T, error) {
	for try := 1; ; try++ {
		all, err := list()
		switch {
		case err == nil:
			return all, nil
		case !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.EBUSY) || try == 100:
			return nil, fmt.Errorf("list %s: %w", what, err)
		}
	}
}

// links lists the interfaces.
func (s *space) links() ([]netlink.Link, error) { return dump("interfaces", s.nl.LinkList) }

// addresses lists the IPv4 addresses of one interface, or of all.
func (s *space) addresses(l netlink.Link) ([]netlink.Addr, error) {
	return dump("addresses", func() ([]netlink.Addr, error) { return s.nl.AddrList(l, netlink.FAMILY_V4) })
}

// dropLink deletes an interface, and with it the other end of its pair.
func (s *space) dropLink(name string) error {
	l, err := s.link(name)
	if err != nil || l == nil {
		return err
	}
	return gone(s.nl.LinkDel(l))
}

// gone takes "no such device" for success of a deletion.
func gone(err error) error {
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

func ipNet(a []byte, bits int) *net.IPNet {
	return &net.IPNet{IP: a, Mask: net.CIDRMask(bits, 32)}
}
