package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/creack/pty"

	"github.com/hutchrun/hutch/api"
)

func afterContext(r *http.Request, f func()) (stop func() bool) {
	return context.AfterFunc(r.Context(), f)
}

// fakeCommand is a real process with its output kept by cursor.
type fakeCommand struct {
	api.Command
	events []api.CommandEvent // output, then the exit
	cmd    *exec.Cmd
	tty    *os.File
	stdin  io.WriteCloser
	taken  int64
}

func (c *fakeCommand) kill() {
	if c.Exit == nil {
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
	}
}

func (f *fake) commandRoutes(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/sandboxes/{ref}/commands", f.startCommand)
	mux.HandleFunc("GET /v1/sandboxes/{ref}/commands", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		var rows []api.Command
		for _, c := range f.commands {
			rows = append(rows, c.Command)
		}
		answer(w, 200, page(r, "commands", rows))
	})
	mux.HandleFunc("GET /v1/sandboxes/{ref}/commands/{id}", f.command(func(c *fakeCommand, w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, c.Command)
	}))
	mux.HandleFunc("GET /v1/sandboxes/{ref}/commands/{id}/output", f.command(f.output))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/commands/{id}/stdin", f.command(f.input))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/commands/{id}/signal", f.command(func(c *fakeCommand, w http.ResponseWriter, r *http.Request) {
		var body api.SignalCommand
		_ = json.NewDecoder(r.Body).Decode(&body)
		numbers := map[string]syscall.Signal{
			"INT": syscall.SIGINT, "TERM": syscall.SIGTERM, "HUP": syscall.SIGHUP, "QUIT": syscall.SIGQUIT, "PIPE": syscall.SIGPIPE, "KILL": syscall.SIGKILL,
		}
		_ = syscall.Kill(-c.cmd.Process.Pid, numbers[body.Signal])
		w.WriteHeader(204)
	}))
	mux.HandleFunc("POST /v1/sandboxes/{ref}/commands/{id}/resize", f.command(func(c *fakeCommand, w http.ResponseWriter, r *http.Request) {
		var body api.WindowSize
		_ = json.NewDecoder(r.Body).Decode(&body)
		_ = pty.Setsize(c.tty, &pty.Winsize{Rows: uint16(body.Rows), Cols: uint16(body.Cols)})
		w.WriteHeader(204)
	}))
}

// command hands the command of a call to a handler, under the lock.
func (f *fake) command(h func(*fakeCommand, http.ResponseWriter, *http.Request)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		c, s := f.commands[r.PathValue("id")], f.find(r.PathValue("ref"))
		if c == nil || s == nil || s.ID != c.Sandbox {
			refuse(w, "not_found", "command", "there is no command "+r.PathValue("id"))
			return
		}
		h(c, w, r)
	}
}

func (f *fake) startCommand(w http.ResponseWriter, r *http.Request) {
	var body api.StartCommand
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		fail(w, "invalid_argument", err.Error())
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.find(r.PathValue("ref"))
	if s == nil {
		refuse(w, "not_found", "sandbox", "there is no sandbox "+r.PathValue("ref"))
		return
	}
	key := r.Header.Get(headerKey)
	c, joined := f.byKey[key].(*fakeCommand)
	if !joined {
		var err error
		if c, err = f.spawn(s, body); err != nil {
			fail(w, "invalid_argument", "cannot run it: "+err.Error())
			return
		}
		f.byKey[key] = c
	}
	if r.URL.Query().Get("follow") == "true" {
		f.follow(c, 0, true, w, r)
		return
	}
	answer(w, 201, c.Command)
}

// spawn runs a process whose output grows c.events.
func (f *fake) spawn(s *api.Sandbox, body api.StartCommand) (*fakeCommand, error) {
	c := &fakeCommand{cmd: exec.Command(body.Command.Args[0], body.Command.Args[1:]...)}
	for key, value := range body.Env {
		c.cmd.Env = append(c.cmd.Environ(), key+"="+value)
	}
	c.cmd.Dir = body.Cwd
	streams := map[api.CommandEventStream]io.Reader{}
	var err error
	if body.Pty != nil {
		c.tty, err = pty.StartWithSize(c.cmd, &pty.Winsize{Rows: uint16(body.Pty.Rows), Cols: uint16(body.Pty.Cols)})
		streams[api.CommandEventStreamPty], c.stdin = c.tty, c.tty
	} else {
		c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		streams[api.CommandEventStreamStdout], _ = c.cmd.StdoutPipe()
		streams[api.CommandEventStreamStderr], _ = c.cmd.StderrPipe()
		if body.Stdin {
			c.stdin, _ = c.cmd.StdinPipe()
		}
		err = c.cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	c.Command = api.Command{
		ID: fmt.Sprintf("cmd_%d", len(f.commands)+1), Sandbox: s.ID, Command: body.Command.Args, Cwd: "/workspace", User: "user",
		PID: c.cmd.Process.Pid, Detach: body.Detach, StartedAt: api.At(time.Now()),
	}
	f.commands[c.ID] = c
	ended := make(chan struct{})
	for name, stream := range streams {
		go func() {
			f.keep(c, name, stream)
			ended <- struct{}{}
		}()
	}
	go func() {
		for range streams {
			<-ended
		}
		err := c.cmd.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		c.Exit = &api.Exit{Code: c.cmd.ProcessState.ExitCode()}
		if status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			c.Exit = &api.Exit{Code: 128 + int(status.Signal()), Signal: "KILL"}
		}
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			c.Exit.Reason = "lost"
		}
		c.events = append(c.events, api.CommandEvent{Exit: c.Exit})
		f.cond.Broadcast()
	}()
	return c, nil
}

func (f *fake) keep(c *fakeCommand, name api.CommandEventStream, stream io.Reader) {
	buf := make([]byte, 4096)
	for {
		n, err := stream.Read(buf)
		f.mu.Lock()
		if n > 0 {
			cursor := c.OutputBytes
			c.events = append(c.events, api.CommandEvent{Stream: name, Cursor: &cursor, Data: append([]byte(nil), buf[:n]...)})
			c.OutputBytes += int64(n)
		}
		f.cond.Broadcast()
		f.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (f *fake) output(c *fakeCommand, w http.ResponseWriter, r *http.Request) {
	switch s := f.find(c.Sandbox); s.State {
	case api.StateReady:
	case api.StateSleeping:
		fail(w, "failed_precondition", "cannot reach "+s.Name+": it is sleeping; wake it")
		return
	default:
		fail(w, "failed_precondition", "cannot reach "+s.Name+": it is "+string(s.State)+"; start it with `hutch resume "+s.Name+"`")
		return
	}
	cursor, _ := strconv.ParseInt(r.URL.Query().Get("cursor"), 10, 64)
	f.follow(c, cursor, r.URL.Query().Get("follow") == "true", w, r)
}

// follow streams from a cursor. Where a cut is set, the connection ends without a word
// after that many bytes; the last event is repeated from a little before, which a
// client must see through.
func (f *fake) follow(c *fakeCommand, from int64, follow bool, w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", jsonLines)
	enc := json.NewEncoder(w)
	_ = enc.Encode(api.CommandEvent{Started: &api.CommandStarted{ID: c.ID, PID: c.PID}})
	defer f.wakeOn(r)()
	sent := 0
	for i := 0; ; i++ {
		for i == len(c.events) {
			w.(http.Flusher).Flush()
			if !follow || r.Context().Err() != nil {
				return
			}
			f.cond.Wait()
		}
		e := c.events[i]
		if e.Cursor != nil && *e.Cursor+int64(len(e.Data)) <= from {
			continue
		}
		if e.Cursor != nil {
			skip := max(0, from-*e.Cursor-1) // one byte too early
			cursor := *e.Cursor + skip
			e.Cursor, e.Data = &cursor, e.Data[skip:]
			if f.cutEvery > 0 && len(e.Data) > f.cutEvery {
				e.Data = e.Data[:f.cutEvery]
			}
			sent += len(e.Data)
		}
		_ = enc.Encode(e)
		if e.Exit != nil {
			return
		}
		if f.cutEvery > 0 && sent >= f.cutEvery {
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}
}

func (f *fake) input(c *fakeCommand, w http.ResponseWriter, r *http.Request) {
	f.mu.Unlock()
	data, err := io.ReadAll(r.Body)
	f.mu.Lock()
	offset, _ := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	if err != nil || r.URL.Query().Get("offset") == "" || c.stdin == nil {
		fail(w, "invalid_argument", "bad input")
		return
	}
	skip := min(c.taken-offset, int64(len(data)))
	f.mu.Unlock()
	_, err = c.stdin.Write(data[skip:])
	if r.URL.Query().Get("keep_open") != "true" && err == nil {
		if c.tty != nil {
			_, _ = c.stdin.Write([]byte{4}) // ctrl-D
		} else {
			c.stdin.Close()
		}
	}
	f.mu.Lock()
	if err != nil {
		fail(w, "failed_precondition", "the command takes no more input")
		return
	}
	c.taken = max(c.taken, offset+int64(len(data)))
	answer(w, 200, api.StdinResult{Offset: c.taken})
}

func (f *fake) fileRoutes(mux *http.ServeMux) {
	info := func(name string) api.FileInfo {
		return api.FileInfo{Path: name, Name: path.Base(name), Type: api.FileInfoTypeFile, Size: int64(len(f.files[name])), Mode: "0755", ModifiedAt: api.At(time.Unix(1_800_000_000, 0))}
	}
	missing := func(w http.ResponseWriter, name string) {
		fail(w, "not_found", "there is no file "+name+" in it; check the path")
	}
	mux.HandleFunc("GET /v1/sandboxes/{ref}/files/stat", f.with(func(_ *api.Sandbox, w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("path")
		if _, ok := f.files[name]; ok {
			answer(w, 200, info(name))
			return
		}
		for file := range f.files {
			if strings.HasPrefix(file, strings.TrimSuffix(name, "/")+"/") {
				answer(w, 200, api.FileInfo{Path: name, Name: path.Base(name), Type: api.FileInfoTypeDirectory, Mode: "0755"})
				return
			}
		}
		missing(w, name)
	}))
	mux.HandleFunc("GET /v1/sandboxes/{ref}/files", f.with(func(_ *api.Sandbox, w http.ResponseWriter, r *http.Request) {
		data := f.files[r.URL.Query().Get("path")]
		if offset, err := strconv.Atoi(r.URL.Query().Get("offset")); err == nil {
			data = data[min(offset, len(data)):]
		}
		if f.cutEvery > 0 && len(data) > f.cutEvery {
			_, _ = w.Write(data[:f.cutEvery])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(data)
	}))
	mux.HandleFunc("PUT /v1/sandboxes/{ref}/files", func(w http.ResponseWriter, r *http.Request) {
		data, err := io.ReadAll(r.Body)
		f.mu.Lock()
		defer f.mu.Unlock()
		if err != nil {
			fail(w, "unavailable", "not all of the file came; send it again")
			return
		}
		name := r.URL.Query().Get("path")
		f.files[name] = data
		answer(w, 200, info(name))
	})
}

func (f *fake) templateRoutes(mux *http.ServeMux) {
	base := api.Template{Name: "base", Version: "sha256:" + strings.Repeat("ab", 32), Source: "debian", Bytes: 3e8, User: "user", Workdir: "/workspace", CreatedAt: api.At(time.Now().Add(-49 * time.Hour))}
	mux.HandleFunc("GET /v1/templates", func(w http.ResponseWriter, r *http.Request) {
		answer(w, 200, page(r, "templates", []api.Template{base}))
	})
	mux.HandleFunc("GET /v1/templates/{name}", func(w http.ResponseWriter, r *http.Request) {
		made := base
		made.Name = r.PathValue("name")
		answer(w, 200, made)
	})
	mux.HandleFunc("POST /v1/templates", f.buildTemplate)
	mux.HandleFunc("DELETE /v1/templates/{name}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
}

// buildTemplate is an operation that has no sandbox.
func (f *fake) buildTemplate(w http.ResponseWriter, r *http.Request) {
	var body api.CreateTemplate
	_ = json.NewDecoder(r.Body).Decode(&body)
	f.mu.Lock()
	defer f.mu.Unlock()
	op, again := f.byKey[r.Header.Get(headerKey)].(*fakeOp)
	if !again {
		op = f.start(&api.Sandbox{}, "build_template", func() {})
		f.byKey[r.Header.Get(headerKey)] = op
	}
	answer(w, 202, api.TemplateChange{Operation: op.Operation})
}
