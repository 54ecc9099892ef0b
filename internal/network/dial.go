package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"golang.org/x/sys/unix"
)

// Dial connects to a TCP port of the guest. The socket is made inside R, the only
// place from which the guest's address can be reached. A port that nobody listens
// on is Unavailable at once. A guest that does not answer at all (it boots, or is
// paused) is asked again with a new connection after 50 ms, 100 ms and so on, until
// ctx ends: the kernel would repeat its first packet only after a whole second.
func (m *Manager) Dial(ctx context.Context, id string, port int) (net.Conn, error) {
	if err := validID(id); err != nil {
		return nil, fault.New(fault.InvalidArgument, "%s", err)
	}
	if port < 1 || port > 65535 {
		return nil, fault.New(fault.InvalidArgument, "port %d of %s cannot be reached: a port is between 1 and 65535", port, id)
	}
	for patience := 50 * time.Millisecond; ; patience = min(2*patience, time.Second) {
		c, err := m.dialOnce(ctx, id, port, patience)
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, errNoSpace):
			return nil, fault.New(fault.NotFound, "%s has no network on this host", id)
		case ctx.Err() != nil:
			return nil, m.failed(ctx.Err(), fmt.Sprintf("%s did not answer on port %d in time", id, port))
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case errors.Is(err, unix.EHOSTUNREACH): // ARP found nobody
			select {
			case <-ctx.Done():
			case <-time.After(patience):
			}
		case errors.Is(err, unix.ECONNREFUSED):
			return nil, fault.Wrap(err, fault.Unavailable, "nothing listens on port %d of %s; start it, then try again", port, id)
		default:
			return nil, m.failed(err, fmt.Sprintf("port %d of %s could not be reached", port, id))
		}
	}
}

// dialOnce makes one attempt. Only socket(2) happens on a thread inside R; the wait
// for the answer is the poller's, so a thousand calls that wait hold no thread.
func (m *Manager) dialOnce(ctx context.Context, id string, port int, patience time.Duration) (net.Conn, error) {
	r, err := openSpace(m.path(id, sideRouter))
	if err != nil {
		return nil, err
	}
	defer r.close()
	return r.connect(ctx, netip.AddrPortFrom(Guest.Addr(), uint16(port)), 0, patience)
}

// connect makes a TCP connection from a namespace, whose packets carry a mark.
func (s *space) connect(ctx context.Context, to netip.AddrPort, mark int, patience time.Duration) (net.Conn, error) {
	var fd int
	err := s.do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "connection")
	defer f.Close() // net.FileConn has a descriptor of its own
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := f.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) })()
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	if errors.Is(err, unix.EINPROGRESS) {
		err = connected(f)
	}
	if err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	c, err := net.FileConn(f)
	if tcp, ok := c.(*net.TCPConn); ok {
		err = errors.Join(err, tcp.SetKeepAliveConfig(keepAlive))
	}
	return c, err
}

// keepAlive finds out within half a minute that a guest is out of reach for good (root
// inside took its address away): a stream with nothing to send would wait for ever.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}

// connected waits until the socket's connection is made or refused.
func connected(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Write(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			result = err
		case code != 0:
			result = unix.Errno(code)
		default:
			_, err := unix.Getpeername(int(fd))
			if err == unix.ENOTCONN {
				return false
			}
			result = err
		}
		return true
	})
	return errors.Join(err, result)
}
