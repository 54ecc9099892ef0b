package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"
)

// Bounds, so that a machine that hangs is told from one that is slow.
const (
	startTimeout    = 3 * time.Minute // the pool's file is allocated
	templateTimeout = 30 * time.Minute
	endTimeout      = 30 * time.Second
)

// server is an installation of hutch that nobody else uses.
type server struct {
	hutch string // the binary
	dir   string
	pool  int64 // size of the pool's file, in GB

	cmd   *exec.Cmd
	ended chan struct{}
	api   *client
}

func (s *server) data() string   { return filepath.Join(s.dir, "data") }
func (s *server) config() string { return filepath.Join(s.dir, "config.toml") }
func (s *server) log() string    { return filepath.Join(s.dir, "log") }
func (s *server) env() []string  { return append(os.Environ(), "HUTCH_CONFIG="+s.config()) }

// start runs the server and waits until it answers.
func (s *server) start(ctx context.Context) error {
	log, err := os.OpenFile(s.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	s.cmd = exec.Command(s.hutch, "up", "--foreground", "--data", s.data(), "--listen", "127.0.0.1:0", "--pool-size", fmt.Sprintf("%dGB", s.pool))
	s.cmd.Env, s.cmd.Stdout, s.cmd.Stderr = s.env(), log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // a ctrl-C is for this program, which ends the server in order
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.ended = make(chan struct{})
	go func() { _ = s.cmd.Wait(); close(s.ended) }()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for !s.ready(ctx) {
		select {
		case <-s.ended:
			return fmt.Errorf("the server ended: %s", s.lastWords())
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w: %s", ctx.Err(), s.lastWords())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// ready connects once the server has written the context with the key, and answers.
func (s *server) ready(ctx context.Context) bool {
	text, err := os.ReadFile(s.config())
	if err != nil {
		return false
	}
	var file struct {
		Current  string `toml:"current"`
		Contexts map[string]struct {
			URL    string `toml:"url"`
			APIKey string `toml:"api_key"`
		} `toml:"contexts"`
	}
	if toml.Unmarshal(text, &file) != nil {
		return false
	}
	at := file.Contexts[file.Current]
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.URL+"/readyz", nil)
	if err != nil {
		return false
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return false
	}
	s.api, err = newClient(at.URL, at.APIKey)
	return err == nil
}

// run runs the command line against the server.
func (s *server) run(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, s.hutch, args...)
	cmd.Env = s.env()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("hutch %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// buildTemplate makes the default template, which takes some minutes.
func (s *server) buildTemplate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, templateTimeout)
	defer cancel()
	return s.run(ctx, "templates", "build", "base", "--debian")
}

// image finds the default template's image in the pool.
func (s *server) image(ctx context.Context) (string, error) {
	t, err := s.api.template(ctx, "base")
	if err != nil {
		return "", err
	}
	dir := filepath.Join(s.data(), "pool/templates", t.Version)
	found, err := filepath.Glob(dir + "/rootfs.*")
	if err != nil || len(found) != 1 {
		return "", fmt.Errorf("%s has %d images of the template, not one: %w", dir, len(found), err)
	}
	return found[0], nil
}

// close deletes the sandboxes, ends the server, and has hutch remove what is left in
// the kernel. It may be called in any state.
func (s *server) close(ctx context.Context) error {
	if s.cmd == nil || s.cmd.Process == nil {
		return nil
	}
	var errs []error
	if s.api != nil && s.alive() {
		errs = append(errs, s.api.removeAll(ctx))
	}
	_ = s.cmd.Process.Signal(unix.SIGTERM) // fails where it has ended
	select {
	case <-s.ended:
	case <-time.After(endTimeout):
		errs = append(errs, fmt.Errorf("the server did not end in %s and was killed", endTimeout))
		_ = s.cmd.Process.Kill()
		<-s.ended
	}
	return errors.Join(append(errs, s.run(ctx, "doctor", "--clean", "--yes", "--data", s.data()))...)
}

func (s *server) alive() bool {
	select {
	case <-s.ended:
		return false
	default:
		return true
	}
}

// lastWords is the end of the server's log.
func (s *server) lastWords() string {
	text, err := os.ReadFile(s.log())
	if err != nil {
		return err.Error()
	}
	const most = 2000
	return string(text[max(0, len(text)-most):])
}
