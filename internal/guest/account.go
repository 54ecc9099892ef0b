package guest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"

	"github.com/hutchrun/hutch/internal/fault"
)

// account is a user of the sandbox with what a process of theirs needs.
// reasonNoUser is the reason of a fault about a user who is not in the sandbox.
const reasonNoUser = "user_not_found"

type account struct {
	name   string // "" where only a number is known
	uid    uint32
	gid    uint32
	groups []uint32 // supplementary
	home   string
	shell  string
}

// label is the account's name, or its number.
func (a account) label() string {
	if a.name == "" {
		return strconv.FormatUint(uint64(a.uid), 10)
	}
	return a.name
}

// passwdLine is one line of /etc/passwd.
type passwdLine struct {
	name        string
	uid, gid    uint32
	home, shell string
}

// parsePasswd reads /etc/passwd; lines that are not of its form are skipped.
func parsePasswd(text string) []passwdLine {
	var lines []passwdLine
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) < 7 || f[0] == "" {
			continue
		}
		uid, err1 := parseID(f[2])
		gid, err2 := parseID(f[3])
		if err1 != nil || err2 != nil {
			continue
		}
		lines = append(lines, passwdLine{name: f[0], uid: uid, gid: gid, home: f[5], shell: f[6]})
	}
	return lines
}

// groupLine is one line of /etc/group.
type groupLine struct {
	name    string
	gid     uint32
	members []string
}

// parseGroup reads /etc/group; lines that are not of its form are skipped.
func parseGroup(text string) []groupLine {
	var lines []groupLine
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimRight(line, "\n"), ":")
		if len(f) < 4 || f[0] == "" {
			continue
		}
		gid, err := parseID(f[2])
		if err != nil {
			continue
		}
		lines = append(lines, groupLine{name: f[0], gid: gid, members: strings.Split(f[3], ",")})
	}
	return lines
}

func parseID(s string) (uint32, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err == nil && n == 1<<32-1 { // means "no change" in the system calls
		return 0, strconv.ErrRange
	}
	return uint32(n), err
}

// accounts is the user database at one instant.
type accounts struct {
	users  []passwdLine
	groups []groupLine
}

// accountFiles is the user database as it was last read, and what it was read from.
type accountFiles struct {
	mu   sync.Mutex
	from string
	db   accounts
}

// accounts reads the sandbox's user database, or remembers it while its files are the
// same.
func (g *Guest) accounts() accounts {
	f := &g.accountFiles
	f.mu.Lock()
	defer f.mu.Unlock()
	if from := signature(g.path("/etc/passwd"), g.path("/etc/group")); from != f.from {
		f.db, f.from = readAccounts(g.path), from
	}
	return f.db
}

// signature is equal only while files are.
func signature(names ...string) string {
	var b strings.Builder
	for _, name := range names {
		var st syscall.Stat_t
		if err := syscall.Stat(name, &st); err == nil {
			fmt.Fprintln(&b, st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
		}
	}
	return b.String()
}

// readAccounts reads the user database; a missing file is an empty one, and only the
// first MiB of each counts.
func readAccounts(path func(string) string) accounts {
	return accounts{
		users:  parsePasswd(readStart(path("/etc/passwd"))),
		groups: parseGroup(readStart(path("/etc/group"))),
	}
}

func readStart(name string) string {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO there must not hold us
	if err != nil {
		return ""
	}
	defer f.Close()
	text, _ := io.ReadAll(io.LimitReader(f, 1<<20))
	return string(text)
}

// find gives the account of a name, "uid" or "uid:gid". A number needs no entry;
// root is known without one.
func (a accounts) find(spec string) (account, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	for _, u := range a.users {
		if u.name == name && !hasGroup {
			return a.complete(u), nil
		}
	}
	if uid, err := parseID(name); err == nil {
		acc := account{uid: uid, gid: uid, home: "/", shell: "/bin/sh"}
		for _, u := range a.users {
			if u.uid == uid {
				acc = a.complete(u)
				break
			}
		}
		if hasGroup {
			gid, err := parseID(group)
			if err != nil {
				return account{}, fault.New(fault.InvalidArgument, "user %q: the part behind the colon is not a group number", spec).Because(reasonNoUser)
			}
			acc.gid, acc.groups = gid, nil
		}
		return acc, nil
	}
	if name == "root" && !hasGroup {
		return account{name: "root", home: "/root", shell: "/bin/sh"}, nil
	}
	return account{}, fault.New(fault.InvalidArgument, "there is no user %q in the sandbox; name one of /etc/passwd, a uid, or uid:gid", spec).Because(reasonNoUser)
}

func (a accounts) complete(u passwdLine) account {
	acc := account{name: u.name, uid: u.uid, gid: u.gid, home: u.home, shell: u.shell}
	if acc.home == "" {
		acc.home = "/"
	}
	if acc.shell == "" {
		acc.shell = "/bin/sh"
	}
	for _, gr := range a.groups {
		for _, m := range gr.members {
			if m == u.name && gr.gid != u.gid {
				acc.groups = append(acc.groups, gr.gid)
			}
		}
	}
	return acc
}

// userName gives the name of a uid, "" where it has none.
func (a accounts) userName(uid uint32) string {
	for _, u := range a.users {
		if u.uid == uid {
			return u.name
		}
	}
	if uid == 0 {
		return "root"
	}
	return ""
}

// groupName gives the name of a gid, "" where it has none.
func (a accounts) groupName(gid uint32) string {
	for _, gr := range a.groups {
		if gr.gid == gid {
			return gr.name
		}
	}
	return ""
}

// account finds a call's user: what it names, or the template's.
func (g *Guest) account(spec string) (account, error) {
	if spec == "" {
		spec = g.template().user
	}
	if spec == "" {
		spec = "root"
	}
	return g.accounts().find(spec)
}

// as runs fn with the file rights of the account, in the kernel's eyes, and leaves
// every other goroutine's alone: fn gets a thread with the account's effective ids.
// (setfsuid would be the smaller tool, but gVisor has it not.) The real and saved uid
// stay root's, so no process of the user may signal or trace the agent meanwhile. An
// agent that is not root runs fn as it is.
func (g *Guest) as(a account, fn func() error) error {
	if syscall.Geteuid() != 0 || a.uid == 0 && a.gid == 0 {
		return fn()
	}
	return g.threads.do(fmt.Sprint("user ", a.uid, a.gid, a.groups), a.takeEffective, fn)
}

// takeEffective gives this thread, and only it, the account's effective ids. The raw
// system calls are used because Go's wrappers change every thread.
func (a account) takeEffective() error {
	const keep = ^uintptr(0)
	groups := append([]uint32{a.gid}, a.groups...)
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&groups[0])), 0); e != 0 {
		return os.NewSyscallError("setgroups", e)
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESGID, keep, uintptr(a.gid), keep); e != 0 {
		return os.NewSyscallError("setresgid", e)
	}
	if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, keep, uintptr(a.uid), keep); e != 0 {
		return os.NewSyscallError("setresuid", e)
	}
	return nil
}

// fileFault turns an operating system error about a path into a fault.
func fileFault(err error, what string, path string) error {
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return f
	}
	errno, _ := errors.AsType[syscall.Errno](err)
	kind, reason, text := classify(errno)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		kind, reason, text = fault.NotFound, "", "there is no such file or directory"
	case errors.Is(err, fs.ErrExist) && errno != syscall.ENOTEMPTY:
		kind, reason, text = fault.Conflict, "exists", "it exists already"
	case errors.Is(err, fs.ErrPermission) && kind == fault.Internal:
		kind, text = fault.PermissionDenied, "the user may not; try another user"
	}
	if text == "" {
		text = "the operating system said " + strconv.Quote(err.Error())
	}
	return fault.Wrap(err, kind, "cannot %s %q: %s", what, path, text).Because(reason)
}

// classify gives the kind, reason and text of an error number.
func classify(errno syscall.Errno) (fault.Kind, string, string) {
	switch errno {
	case syscall.EACCES, syscall.EPERM:
		return fault.PermissionDenied, "", "the user may not; try another user"
	case syscall.ENOTDIR:
		return fault.InvalidArgument, "not_a_directory", "a part of the path is not a directory"
	case syscall.EISDIR:
		return fault.InvalidArgument, "is_a_directory", "it is a directory"
	case syscall.ENAMETOOLONG:
		return fault.InvalidArgument, "", "the name is too long (255 bytes a part, 4,095 in all)"
	case syscall.ELOOP:
		return fault.InvalidArgument, "", "too many symbolic links"
	case syscall.EINVAL:
		return fault.InvalidArgument, "", "the operating system does not allow it"
	case syscall.ENOTEMPTY:
		return fault.FailedPrecondition, "not_empty", "the directory is not empty; ask for recursive"
	case syscall.ENOSPC, syscall.EDQUOT:
		return fault.FailedPrecondition, "disk_full", "the disk is full; remove something first"
	case syscall.EFBIG:
		return fault.TooLarge, "", "the file is too large"
	case syscall.EROFS:
		return fault.FailedPrecondition, "read_only", "the file system is read-only"
	case syscall.EXDEV:
		return fault.FailedPrecondition, "other_file_system", "source and destination are on different file systems; copy and remove instead"
	case syscall.EBUSY, syscall.ETXTBSY:
		return fault.FailedPrecondition, "busy", "it is in use"
	case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.EAGAIN:
		return fault.Unavailable, "", "the sandbox is short of descriptors or memory; try again"
	}
	return fault.Internal, "", ""
}
