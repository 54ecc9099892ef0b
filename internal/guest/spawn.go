package guest

import (
	"cmp"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// defaultPath is PATH of a command where nothing sets one.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// program is what to execute, decided before anything is started.
type program struct {
	args    []string
	env     []string // NAME=value
	path    string   // PATH of env
	cwd     string   // absolute, on the agent's own file system
	account account
}

// plan decides what a request runs. It looks at files but changes nothing.
func (g *Guest) plan(req *guestproto.StartRequest) (program, error) {
	if err := checkStart(req); err != nil {
		return program{}, err
	}
	acc, err := g.account(req.User)
	if err != nil {
		return program{}, err
	}
	env := environment(acc, g.template().env, req.Env, req.Pty != nil)
	p := program{args: req.Args, account: acc, path: env["PATH"]}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		p.env = append(p.env, name+"="+env[name])
	}
	if req.Shell != "" {
		shell := "/bin/sh"
		if _, err := os.Stat(g.path("/bin/bash")); err == nil {
			shell = "/bin/bash"
		}
		p.args = []string{shell, "-c", req.Shell}
	}
	cwd := req.Cwd
	if !filepath.IsAbs(cwd) {
		cwd = guestproto.Workspace + "/" + cwd
	}
	p.cwd = g.path(cwd)
	if info, err := os.Stat(p.cwd); err != nil || !info.IsDir() {
		return program{}, cwdFault(cmp.Or(err, error(syscall.ENOTDIR)), cwd)
	}
	return p, nil
}

// cwdFault is the fault of a working directory that cannot be one.
func cwdFault(err error, cwd string) error {
	f := fault.Of(fileFault(err, "start the command in", cwd))
	switch f.Kind {
	case fault.NotFound, fault.PermissionDenied:
		return f.Because("cwd_" + string(f.Kind))
	}
	return f.Because("cwd_unusable")
}

// checkStart refuses a request that no system could run.
func checkStart(req *guestproto.StartRequest) error {
	if (len(req.Args) == 0) == (req.Shell == "") {
		return fault.New(fault.InvalidArgument, "a command needs either args or shell")
	}
	if len(req.Args) > 0 && req.Args[0] == "" {
		return fault.New(fault.InvalidArgument, "the command's name is empty")
	}
	size := len(req.Shell) + len(req.Cwd)
	for _, a := range append([]string{req.Shell, req.Cwd, req.Tag, req.RequestKey}, req.Args...) {
		if strings.ContainsRune(a, 0) {
			return fault.New(fault.InvalidArgument, "a command's words may not hold a NUL byte")
		}
		size += len(a)
	}
	for name, value := range req.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return fault.New(fault.InvalidArgument, "the environment variable %q has no valid name or value", name)
		}
		size += len(name) + len(value)
	}
	switch {
	case size > guestproto.MaxArgBytes:
		return fault.New(fault.TooLarge, "arguments and environment have %d bytes; %d is the most: put data into stdin or a file", size, guestproto.MaxArgBytes)
	case len(req.Cwd) > guestproto.MaxPath:
		return fault.New(fault.InvalidArgument, "the working directory's path is too long")
	case len(req.Tag) > 256 || len(req.RequestKey) > 256:
		return fault.New(fault.InvalidArgument, "tag and request key have 256 bytes at most")
	case req.TimeoutNanos < 0:
		return fault.New(fault.InvalidArgument, "a timeout is not negative")
	}
	return nil
}

// environment is what a command gets: the account's, the template's above it, the
// call's on top.
func environment(acc account, template, call map[string]string, tty bool) map[string]string {
	name := acc.label()
	env := map[string]string{
		"HOME": acc.home, "USER": name, "LOGNAME": name, "SHELL": acc.shell,
		"PATH": defaultPath, "TERM": "dumb", "LANG": "C.UTF-8",
		"DOCKER_CONFIG": guestproto.DockerConfig,
	}
	if tty {
		env["TERM"] = "xterm-256color"
	}
	maps.Copy(env, template)
	maps.Copy(env, call)
	return env
}

// find gives the executable that a program's name stands for.
func (p program) find(root func(string) string) (string, error) {
	name := p.args[0]
	if strings.Contains(name, "/") {
		if filepath.IsAbs(name) {
			return root(name), nil
		}
		return filepath.Join(p.cwd, name), nil
	}
	denied := false
	for _, dir := range filepath.SplitList(p.path) {
		file := root(filepath.Join(dir, name))
		if !filepath.IsAbs(dir) {
			file = filepath.Join(p.cwd, dir, name)
		}
		info, err := os.Stat(file)
		switch {
		case err != nil || info.IsDir():
		case info.Mode()&0o111 == 0:
			denied = true
		default:
			return file, nil
		}
	}
	if denied {
		return "", notExecutable(name, syscall.EACCES)
	}
	return "", fault.New(fault.NotFound, "the command %q was not found in PATH (%s)", name, p.path).Because("command_not_found")
}

func notExecutable(name string, err error) error {
	return fault.Wrap(err, fault.PermissionDenied, "the command %q is there but the user may not execute it", name).Because("not_executable")
}

// exec forks and executes, with files as descriptors 0, 1 and 2, in a session of its
// own. With a terminal, descriptor 0 becomes the controlling one.
func (g *Guest) exec(p program, file string, files []*os.File, tty bool) (pid int, err error) {
	attr := &syscall.ProcAttr{
		Dir: p.cwd,
		Env: p.env,
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: tty},
	}
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	if syscall.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: p.account.uid, Gid: p.account.gid, Groups: p.account.groups}
	}
	fork := func() (err error) {
		pid, err = syscall.ForkExec(file, p.args, attr)
		return err
	}
	if group := g.pids.Load(); group != nil {
		err = group.fork(&g.threads, attr.Sys, fork)
	} else {
		err = fork()
	}
	if errors.Is(err, syscall.EACCES) {
		// The child enters its directory as the user, with the same error. Which was it?
		if cerr := g.as(p.account, func() error { _, err := os.Stat(p.cwd + "/."); return err }); cerr != nil {
			return 0, cwdFault(cerr, p.cwd)
		}
		if g.as(p.account, func() error { _, err := os.Stat(file + "/."); return err }) == nil {
			return 0, fault.Wrap(err, fault.PermissionDenied, "the command %q is a directory and no program; name a file in it", p.args[0]).Because("not_executable")
		}
	}
	return pid, p.execFault(err)
}

func (p program) execFault(err error) error {
	name := p.args[0]
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
		return fault.Wrap(err, fault.NotFound, "the command %q, or the interpreter that it names, was not found", name).Because("command_not_found")
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM), errors.Is(err, syscall.ENOEXEC), errors.Is(err, syscall.EISDIR):
		return notExecutable(name, err)
	case errors.Is(err, syscall.E2BIG):
		return fault.Wrap(err, fault.TooLarge, "arguments and environment of %q are too large for the sandbox", name)
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE),
		errors.Is(err, syscall.EFAULT): // gVisor's answer where there is no memory for what it copies
		return fault.Wrap(err, fault.Unavailable, "the sandbox has no room for another process (%v); end some first", err).Because("process_limit")
	}
	return fault.Wrap(err, fault.Internal, "the command %q could not be started: %v", name, err)
}
