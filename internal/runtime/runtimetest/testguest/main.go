// Command testguest is PID 1 of the sandboxes of runtimetest. It listens on TCP port
// 7000 of every address and answers one line for each line that it is sent; package
// runtimetest documents the protocol.
package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "tick" {
		tick()
		return
	}
	if len(os.Args) > 1 {
		if err := hostile[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	token := make([]byte, 16)
	_, _ = rand.Read(token)
	g := &guest{values: map[string]string{"token": hex.EncodeToString(token)}}
	listener, err := net.Listen("tcp", ":7000")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for {
		conn, err := listener.Accept()
		if err != nil {
			continue
		}
		go g.serve(conn)
	}
}

// tick writes a byte every 10 ms.
func tick() {
	for {
		if _, err := os.Stdout.Write([]byte{'.'}); err != nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

type guest struct {
	mu     sync.Mutex
	values map[string]string
	ticks  atomic.Int64
	memory [][]byte   // what alloc has touched
	open   []*os.File // what unlinked holds
}

func (g *guest) serve(conn net.Conn) {
	defer conn.Close()
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		answer, err := g.answer(words[0], append(words[1:], "", "", ""))
		if err != nil {
			answer = "error " + err.Error()
		}
		if _, err := fmt.Fprintln(conn, answer); err != nil {
			return
		}
	}
}

func (g *guest) answer(verb string, args []string) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch verb {
	case "set":
		g.values[args[0]] = args[1]
		return "ok", nil
	case "get":
		return g.values[args[0]], nil
	case "spawn":
		return "ok", g.spawn()
	case "ticks":
		return strconv.FormatInt(g.ticks.Load(), 10), nil
	case "random":
		data := make([]byte, 16)
		_, err := rand.Read(data)
		return hex.EncodeToString(data), err
	case "clock":
		return strconv.FormatInt(time.Now().UnixMilli(), 10), nil
	case "write":
		return "ok", os.WriteFile(args[0], []byte(args[1]), 0o600)
	case "read":
		data, err := os.ReadFile(args[0])
		return string(data), err
	case "size":
		return size()
	case "alloc":
		return "ok", g.alloc(args[0])
	case "unlinked":
		return "ok", g.unlinked(args[0])
	case "put":
		return "ok", g.put(args[0], args[1])
	case "pour":
		return "ok", g.pour(args[0])
	case "take":
		return g.take(args[0], args[1])
	case "calls":
		return calls(args[0])
	case "pingpong":
		return pingPong(args[0])
	case "fill":
		return fill(args[0], args[1])
	case "capacity":
		return capacity(args[0])
	case "signal":
		return ended(child("signal", args[0]).Run()), nil
	case "nested":
		return nested(args[0], args[1])
	case "hog":
		return ended(child("hog", args[0]).Run()), nil
	case "keep":
		return "ok", keep(args[0])
	case "bomb":
		cmd := child("bomb", args[0], args[1])
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		return "ok", cmd.Start()
	case "processes":
		return processes()
	case "exit":
		code, err := strconv.Atoi(args[0])
		if err != nil {
			return "", err
		}
		os.Exit(code) //nolint:gocritic // the whole process is what is asked to end
	case "crash":
		go func() { panic("asked to crash") }()
		select {}
	}
	return "", fmt.Errorf("no verb %q", verb)
}

// spawn starts a child that ticks, and counts its ticks.
func (g *guest) spawn() error {
	child := exec.Command("/proc/self/exe", "tick")
	out, err := child.StdoutPipe()
	if err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return err
	}
	go func() {
		buf := make([]byte, 64)
		for {
			n, err := out.Read(buf)
			g.ticks.Add(int64(n))
			if err != nil {
				return
			}
		}
	}()
	return nil
}

// size gives the memory in bytes, the CPUs and the hostname.
func size() (string, error) {
	var info syscall.Sysinfo_t
	if err := syscall.Sysinfo(&info); err != nil {
		return "", err
	}
	host, err := os.Hostname()
	return fmt.Sprintf("%d %d %s", info.Totalram*uint64(info.Unit), runtime.NumCPU(), host), err
}

func (g *guest) alloc(mib string) error {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return err
	}
	for range n {
		block := make([]byte, 1<<20)
		_, _ = rand.Read(block[:8])
		for i := 8; i < len(block); i *= 2 {
			copy(block[i:], block[:i])
		}
		g.memory = append(g.memory, block)
	}
	return nil
}

// unlinked holds a deleted file of so many bytes open; it is a hole.
func (g *guest) unlinked(size string) error {
	n, err := strconv.ParseInt(size, 10, 64)
	if err != nil {
		return err
	}
	f, err := os.Create("/unlinked")
	if err != nil {
		return err
	}
	g.open = append(g.open, f)
	if err := f.Truncate(n); err != nil {
		return err
	}
	return os.Remove("/unlinked")
}

// put writes a text into the deleted file that was opened last.
func (g *guest) put(offset, text string) error {
	at, err := strconv.ParseInt(offset, 10, 64)
	if err != nil {
		return err
	}
	_, err = g.open[len(g.open)-1].WriteAt([]byte(text), at)
	return err
}

// pour fills the first MiB of that file, each with its number as a byte.
func (g *guest) pour(mib string) error {
	n, err := strconv.Atoi(mib)
	if err != nil {
		return err
	}
	for i := range n {
		block := bytes.Repeat([]byte{byte(i)}, 1<<20)
		if _, err := g.open[len(g.open)-1].WriteAt(block, int64(i)<<20); err != nil {
			return err
		}
	}
	return nil
}

// take reads so many bytes from it; they are shown as Go writes a string.
func (g *guest) take(offset, length string) (string, error) {
	at, err := strconv.ParseInt(offset, 10, 64)
	if err != nil {
		return "", err
	}
	n, err := strconv.Atoi(length)
	if err != nil {
		return "", err
	}
	text := make([]byte, n)
	n, err = g.open[len(g.open)-1].ReadAt(text, at)
	if err != nil && n == 0 {
		return "", err
	}
	return strconv.Quote(string(text[:n])), nil
}

// calls makes so many system calls and gives the time they took in microseconds.
func calls(count string) (string, error) {
	n, err := strconv.Atoi(count)
	if err != nil {
		return "", err
	}
	begin := time.Now()
	for range n {
		syscall.Getppid()
	}
	return strconv.FormatInt(time.Since(begin).Microseconds(), 10), nil
}
