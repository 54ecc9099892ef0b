package fakeserver

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"
)

// variable makes of a program that calls Main a server.
const variable = "HUTCH_FAKESERVER"

// upTimeout is how long a process may take to come up on a machine that has much else to
// do.
const upTimeout = 2 * time.Minute

// Main turns this process into the server that Launch asked for, and does nothing
// otherwise. A program that calls Launch calls it first.
func Main() {
	text := os.Getenv(variable)
	if text == "" {
		return
	}
	if err := serve(text); err != nil {
		fmt.Fprintln(os.Stderr, "fakeserver:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// up is what a process says when it answers.
type up struct{ URL, Key string }

func serve(text string) error {
	var cfg Config
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	s, err := Start(context.Background(), cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := json.NewEncoder(os.Stdout).Encode(up{s.URL, s.Key}); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin) // until who launched it closes it, or has ended
	return err
}

// Process is a server in a process of its own.
type Process struct {
	URL, Key string

	cmd   *exec.Cmd
	input io.Closer
	ended chan struct{}
	once  sync.Once
}

// Launch starts this program anew as a server, and returns when it answers. It ends with
// this process at the latest.
func Launch(cfg Config) (*Process, error) {
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), variable+"="+string(text))
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	output, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{cmd: cmd, input: input, ended: make(chan struct{})}
	said := make(chan up, 1)
	go func() {
		var u up
		lines := bufio.NewScanner(output)
		if lines.Scan() && json.Unmarshal(lines.Bytes(), &u) == nil {
			said <- u
		}
		_, _ = io.Copy(io.Discard, output)
		_ = cmd.Wait()
		close(p.ended)
	}()
	select {
	case u := <-said:
		p.URL, p.Key = u.URL, u.Key
		return p, nil
	case <-p.ended:
	case <-time.After(upTimeout):
		p.Kill()
	}
	return nil, errNoAnswer
}

// Kill ends it as kill -9 does.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
	_ = p.input.Close()
}

// Stop ends it in order.
func (p *Process) Stop() {
	p.once.Do(func() { _ = p.input.Close() })
	<-p.ended
}

// Memory is what it has in memory, in bytes.
func (p *Process) Memory() (int64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kib, err := strconv.ParseInt(strings.Fields(rest + " -")[0], 10, 64)
	return kib << 10, err
}
