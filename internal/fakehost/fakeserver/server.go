// Package fakeserver is a whole hutch server on a machine of package fakehost: the real
// store, control plane, host agent and API, in this process or in one of its own that
// can be killed. Tests and benches use it.
package fakeserver

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fakehost"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostagent"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/store"
	"github.com/hutchrun/hutch/internal/store/postgres"
	"github.com/hutchrun/hutch/internal/store/sqlite"
)

// Project is the one that everything belongs to.
const Project = "default"

// hostID is the name of the machine.
const hostID = "local"

// Config says what a server is.
type Config struct {
	Dir      string // the machine's; it is made where it is not there
	Database string // URL of PostgreSQL; "" is SQLite in Dir
	NoHost   bool   // as `hutch server`: on PostgreSQL, beside one that has the machine
	Listen   string // "" is any free port of 127.0.0.1
	Log      string // file that the log goes to; "" is nowhere
	Debug    bool
	Limits   control.Limits
}

// Server is a server in this process.
type Server struct {
	URL     string
	Key     string // of the API
	Store   store.Store
	Control *control.Control
	Machine *fakehost.Machine // nil where it has none
	Agent   *hostagent.Agent

	http *http.Server
	log  *os.File
}

// Start brings a server up, in the order in which `hutch up` does. It answers when Start
// returns.
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, err
	}
	s := &Server{}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	log := slog.New(slog.DiscardHandler)
	if cfg.Log != "" {
		if s.log, err = os.OpenFile(cfg.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
			return nil, err
		}
		level := slog.LevelInfo
		if cfg.Debug {
			level = slog.LevelDebug
		}
		log = slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: level}))
	}
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = listener.Close()
		}
	}()
	if s.Store, err = cfg.open(ctx, log); err != nil {
		return nil, err
	}
	hosts := map[string]hostproto.Host{}
	if !cfg.NoHost {
		if s.Machine, err = fakehost.Open(filepath.Join(cfg.Dir, "host")); err != nil {
			return nil, err
		}
		if s.Agent, err = s.Machine.Agent(hostID, log, nil); err != nil {
			return nil, err
		}
		hosts[hostID] = s.Agent
	}
	s.Control = control.New(control.Config{Store: s.Store, Hosts: hosts, Shared: cfg.Database != "", Log: log, Limits: cfg.Limits})
	if s.Agent != nil {
		if err := s.Agent.Start(ctx, s.Control); err != nil {
			return nil, err
		}
	}
	if err := s.Control.Start(ctx); err != nil {
		return nil, err
	}
	if err := s.furnish(ctx, filepath.Join(cfg.Dir, "key")); err != nil {
		return nil, err
	}
	handler, err := apiserver.New(apiserver.Config{Control: s.Control, Log: log, Version: "v0.0.0-fake"})
	if err != nil {
		return nil, err
	}
	s.URL, s.http = "http://"+listener.Addr().String(), apiserver.HTTPServer(handler, log)
	go func() { _ = s.http.Serve(listener) }() // ends with Close
	return s, nil
}

// Open opens the server's database beside it, or in its place.
func (cfg Config) Open(ctx context.Context) (store.Store, error) { return cfg.open(ctx, nil) }

func (cfg Config) open(ctx context.Context, log *slog.Logger) (store.Store, error) {
	if cfg.Database == "" {
		return sqlite.Open(ctx, filepath.Join(cfg.Dir, "hutch.db"))
	}
	return postgres.Open(ctx, cfg.Database, log)
}

// furnish makes what a first start needs: the project, the template, and a key that is
// kept in a file.
func (s *Server) furnish(ctx context.Context, keyFile string) error {
	if err := s.Control.EnsureProject(ctx, Project); err != nil {
		return err
	}
	err := s.Store.Update(ctx, func(ctx context.Context, tx store.Tx) error {
		_, err := tx.Template(ctx, Project, control.DefaultLimits.Template)
		if !fault.Is(err, fault.NotFound) {
			return err
		}
		return tx.PutTemplate(ctx, store.Template{Project: Project, Name: control.DefaultLimits.Template, Digest: fakehost.Template, Source: "fake",
			User: "user", Workdir: "/workspace", CreatedAt: time.Now()})
	})
	if err != nil {
		return err
	}
	if text, err := os.ReadFile(keyFile); err == nil {
		s.Key = strings.TrimSpace(string(text))
		return nil
	}
	_, secret, err := s.Control.CreateKey(ctx, control.Actor{Project: Project, Scopes: control.ScopeOperator}, control.CreateKeyRequest{Name: "fake", Scopes: []string{"operator"}})
	if err != nil {
		return err
	}
	s.Key = secret
	if err := os.WriteFile(keyFile+".new", []byte(secret), 0o600); err != nil {
		return err
	}
	return os.Rename(keyFile+".new", keyFile)
}

// Close ends the server in order. The sandboxes stay.
func (s *Server) Close() {
	if s.http != nil {
		grace, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		if err := s.http.Shutdown(grace); err != nil {
			_ = s.http.Close()
		}
		cancel()
	}
	if s.Control != nil {
		s.Control.Close()
	}
	if s.Agent != nil {
		s.Agent.Stop()
	}
	if s.Machine != nil {
		s.Machine.Close()
	}
	if s.Store != nil {
		_ = s.Store.Close()
	}
	if s.log != nil {
		_ = s.log.Close()
	}
}

// errNoAnswer says that a process did not come up.
var errNoAnswer = errors.New("fakeserver: the server does not come up")
