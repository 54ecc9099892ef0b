package guest

import (
	"bytes"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/internal/guestproto"
)

// tick is the unit of CPU times in /proc: USER_HZ is 100 on every Linux.
const tick = 10 * time.Millisecond

// activity reads the counters of Z1. It costs one read per process.
func (g *Guest) activity() *guestproto.ActivityResponse {
	list := g.processes()
	a := &guestproto.ActivityResponse{CpuNanos: int64(cpu(list))}
	received, sent := readNetDev()
	a.NetworkReceivedBytes = max(received-g.traffic.received.Load(), 0)
	a.NetworkSentBytes = max(sent-g.traffic.sent.Load(), 0)
	for _, c := range g.commands.live() {
		a.RunningCommands++
		a.AttachedSessions += c.attached.Load()
		if c.inFront(list) {
			a.ForegroundCommands++
		}
	}
	a.LastOutputUnixNano = g.commands.lastOutput.Load()
	a.NestedGuests = nestedGuests()
	return a
}

// cpu is the CPU time of everything but the agent: of the live, with what they have
// collected of their dead children, and of those that the agent has collected. The
// time of children whose parent ignores SIGCHLD is lost.
func cpu(list []process) time.Duration {
	var total time.Duration
	for _, p := range list {
		total += time.Duration(p.ticks) * tick
	}
	var ru syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &ru); err == nil {
		total += time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	return total
}

func readNetDev() (received, sent int64) {
	text, err := os.ReadFile("/proc/net/dev")
	if err != nil {
		return 0, 0
	}
	return parseNetDev(text)
}

// parseNetDev adds up the bytes of all interfaces of /proc/net/dev but the loopback.
func parseNetDev(text []byte) (received, sent int64) {
	for line := range bytes.Lines(text) {
		name, counters, ok := strings.Cut(string(line), ":")
		f := strings.Fields(counters)
		if !ok || strings.TrimSpace(name) == "lo" || len(f) < 9 {
			continue
		}
		r, err1 := strconv.ParseInt(f[0], 10, 64)
		s, err2 := strconv.ParseInt(f[8], 10, 64)
		if err1 == nil && err2 == nil {
			received += r
			sent += s
		}
	}
	return received, sent
}

// nestedGuests counts the processes that have a virtual machine open. Where there is
// no /dev/kvm there is none, and nothing is searched.
func nestedGuests() int32 {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return 0
	}
	var n int32
	for _, p := range readProcesses("/proc") {
		dir := "/proc/" + strconv.Itoa(p.pid) + "/fd"
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			if target, err := os.Readlink(dir + "/" + e.Name()); err == nil && (target == "/dev/kvm" || target == "anon_inode:kvm-vm") {
				n++
				break
			}
		}
	}
	return n
}

// traffic is the payload that the agent's own connections moved. Their headers are not
// in it, so that it never takes away from what others moved; for an idle sandbox they
// are far below the threshold that the counters serve (Z1: 1 KiB/s).
type traffic struct{ received, sent atomic.Int64 }

// guestListener counts its connections' traffic and, where the agent refuses local
// peers, closes connections that come from inside.
type guestListener struct {
	net.Listener
	g *Guest
}

func (l *guestListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.g.cfg.RefuseLocal && local(conn) {
			conn.Close()
			continue
		}
		return &countedConn{Conn: conn, traffic: &l.g.traffic}, nil
	}
}

// local says whether a connection's two ends are on the same machine.
func local(conn net.Conn) bool {
	from, ok1 := conn.RemoteAddr().(*net.TCPAddr)
	to, ok2 := conn.LocalAddr().(*net.TCPAddr)
	return !ok1 || !ok2 || from.IP.IsLoopback() || from.IP.Equal(to.IP)
}

type countedConn struct {
	net.Conn
	traffic *traffic
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.traffic.received.Add(int64(n))
	return n, err
}

func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.traffic.sent.Add(int64(n))
	return n, err
}
