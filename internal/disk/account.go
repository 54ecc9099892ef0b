package disk

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// Account is the user that commands and file calls in a sandbox run as.
type Account struct {
	Name  string `json:"name"`
	UID   int    `json:"uid"`
	GID   int    `json:"gid"`
	Home  string `json:"home"`
	Shell string `json:"shell"`
}

const (
	accountName  = "user"
	accountID    = 1000 // uid and gid, where the image leaves them free
	workspaceDir = "workspace"
)

// stamp is the time of what a build adds to a tree, so that the same input gives the
// same digest on another day.
var stamp = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// editor changes the tree of a template that is being made.
type editor struct {
	*tree
	touched map[string]bool // what gets the time stamp in the end
}

// prepareTree gives a tree what every sandbox relies on: the account with sudo,
// /workspace, the image's own working directory ("" for none), and the files that name a
// machine. What the image has stays. It gives whom commands run as: the image's own user
// where it names one, that account where not ("").
func prepareTree(dir, workdir, user string) (Account, error) {
	t, err := openTree(dir, asRoot)
	if err != nil {
		return Account{}, err
	}
	defer t.Close()
	e := &editor{t, map[string]bool{}}
	account, err := e.account()
	if err != nil {
		return Account{}, fmt.Errorf("add the account %s: %w", accountName, err)
	}
	if user != "" {
		if account, err = e.imageUser(user); err != nil {
			return Account{}, err
		}
	}
	if err := e.directory(workspaceDir, 0o755, account); err != nil {
		return Account{}, err
	}
	if err := e.workdir(workdir, account); err != nil {
		return Account{}, err
	}
	for name, text := range map[string]string{
		"etc/hosts":       "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
		"etc/hostname":    "sandbox\n",
		"etc/resolv.conf": "",
	} {
		if err := e.unlessThere(name, text, 0o644); err != nil {
			return Account{}, err
		}
	}
	// Sandboxes would share the identity of the image.
	if err := e.write("etc/machine-id", "", 0o444); err != nil {
		return Account{}, err
	}
	for _, name := range []string{"poweroff", "halt", "shutdown", "reboot"} {
		if err := e.program("usr/sbin/"+name, GuestPath); err != nil {
			return Account{}, err
		}
	}
	return account, e.stampAll()
}

// workdir makes the directory that the image says its programs start in, where it is
// missing, as container engines do.
func (e *editor) workdir(name string, owner Account) error {
	if name == "" {
		return nil
	}
	if f, err := e.open(name, unix.O_PATH, 0); err == nil {
		return f.Close()
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	for at, _ := split(name); at != ""; at, _ = split(at) {
		e.touched[at] = true
	}
	return e.directory(name, 0o755, owner)
}

// program links a name to the guest agent, which goes by several, unless the image has
// a program of that name.
func (e *editor) program(name, agent string) error {
	if f, err := e.open(name, unix.O_PATH|unix.O_NOFOLLOW, 0); err == nil {
		return f.Close()
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	up, base := split(name)
	dir, err := e.mkdirs(up)
	if err != nil {
		return err
	}
	defer dir.Close()
	for at := up; at != ""; at, _ = split(at) { // each may have been made here
		e.touched[at] = true
	}
	e.touched[""] = true
	if err := unix.Symlinkat(agent, int(dir.Fd()), base); err != nil {
		return err
	}
	at := unix.NsecToTimespec(stamp.UnixNano())
	return unix.UtimesNanoAt(int(dir.Fd()), base, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW)
}

// account finds the account or adds it.
func (e *editor) account() (Account, error) {
	passwd, err := e.read("etc/passwd")
	if err != nil {
		return Account{}, err
	}
	if passwd == "" {
		passwd = "root:x:0:0:root:/root:/bin/sh\n"
	}
	group, err := e.read("etc/group")
	if err != nil {
		return Account{}, err
	}
	if group == "" {
		group = "root:x:0:\n"
	}
	if a, ok := findAccount(passwd, func(a Account) bool { return a.Name == accountName }); ok {
		return a, e.sudo()
	}
	id := freeID(passwd, group)
	a := Account{Name: accountName, UID: id, GID: id, Home: "/home/" + accountName, Shell: "/bin/sh"}
	if f, err := e.open("bin/bash", unix.O_PATH, 0); err == nil {
		f.Close()
		a.Shell = "/bin/bash"
	}
	lines := []struct {
		name, text string
		mode       uint32
	}{
		{"etc/passwd", addLine(passwd, fmt.Sprintf("%s:x:%d:%d::%s:%s", a.Name, a.UID, a.GID, a.Home, a.Shell)), 0o644},
		{"etc/group", addLine(group, fmt.Sprintf("%s:x:%d:", a.Name, a.GID)), 0o644},
	}
	shadow, err := e.read("etc/shadow")
	if err != nil {
		return Account{}, err
	}
	if shadow != "" { // no password matches *, but the account is not locked
		lines = append(lines, struct {
			name, text string
			mode       uint32
		}{"etc/shadow", addLine(shadow, a.Name+":*:10957:0:99999:7:::"), 0o640})
	}
	for _, l := range lines {
		if err := e.write(l.name, l.text, l.mode); err != nil {
			return Account{}, err
		}
	}
	if err := e.home(a); err != nil {
		return Account{}, err
	}
	return a, e.sudo()
}

// sudo lets the account become root without a password, where the image has sudo.
func (e *editor) sudo() error {
	f, err := e.open("etc/sudoers", unix.O_PATH, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	f.Close()
	return e.write("etc/sudoers.d/"+accountName, accountName+" ALL=(ALL:ALL) NOPASSWD:ALL\n", 0o440)
}

// home makes the home directory from the image's skeleton.
func (e *editor) home(a Account) error {
	if err := e.directory(a.Home, 0o755, a); err != nil {
		return err
	}
	for _, name := range []string{".bashrc", ".profile", ".bash_logout"} {
		text, err := e.read("etc/skel/" + name)
		if err != nil {
			return err
		}
		if text == "" {
			continue
		}
		to := path.Join(a.Home, name)
		if err := e.write(to, text, 0o644); err != nil {
			return err
		}
		if err := e.chown(to, a); err != nil {
			return err
		}
	}
	return nil
}

// maxText bounds the files that an editor reads; an image is not trusted.
const maxText = 1 << 20

// read gives the text of a file, "" where there is none.
func (e *editor) read(name string) (string, error) {
	f, err := e.open(name, unix.O_RDONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := mustBePlain(f); err != nil {
		return "", err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err == nil && len(text) > maxText {
		err = fmt.Errorf("%s is larger than %d bytes", name, maxText)
	}
	return string(text), err
}

// write replaces the text of a file.
func (e *editor) write(name, text string, mode uint32) error {
	up, _ := split(name)
	dir, err := e.mkdirs(up)
	if err != nil {
		return err
	}
	dir.Close()
	f, err := e.open(name, unix.O_WRONLY|unix.O_CREAT, mode)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := mustBePlain(f); err != nil {
		return err
	}
	e.touched[name], e.touched[up] = true, true
	if err := f.Truncate(0); err != nil {
		return err
	}
	if _, err := f.WriteString(text); err != nil {
		return err
	}
	return f.Chmod(os.FileMode(mode))
}

func (e *editor) unlessThere(name, text string, mode uint32) error {
	f, err := e.open(name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err == nil {
		return f.Close()
	}
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return e.write(name, text, mode)
}

// directory makes a directory of the account.
func (e *editor) directory(name string, mode os.FileMode, owner Account) error {
	d, err := e.mkdirs(name)
	if err != nil {
		return err
	}
	defer d.Close()
	up, _ := split(name)
	e.touched[name], e.touched[up] = true, true
	if err := d.Chown(owner.UID, owner.GID); err != nil {
		return err
	}
	return d.Chmod(mode)
}

func (e *editor) chown(name string, owner Account) error {
	f, err := e.open(name, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Chown(owner.UID, owner.GID)
}

// stampAll sets the times of all that was touched. Every directory is among it that
// a touched file lies in.
func (e *editor) stampAll() error {
	at := unix.NsecToTimespec(stamp.UnixNano())
	for name := range e.touched {
		f, err := e.open(name, unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		err = unix.UtimesNanoAt(unix.AT_FDCWD, fdPath(f), []unix.Timespec{at, at}, 0)
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// fdPath names an open file to calls that take a path only.
func fdPath(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

func mustBePlain(f *os.File) error {
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is no plain file", f.Name())
	}
	return err
}

// imageUser finds whom an image says that its programs run as: user, uid, user:group and
// so on, see the OCI image specification, config.md. As container engines do it, a number
// needs no entry, a name that has none is refused, and a uid without an entry and a group
// has the group 0. The name is one that the guest understands.
func (e *editor) imageUser(spec string) (Account, error) {
	passwd, err := e.read("etc/passwd")
	if err != nil {
		return Account{}, err
	}
	groups, err := e.read("etc/group")
	if err != nil {
		return Account{}, err
	}
	user, group, hasGroup := strings.Cut(spec, ":")
	a, found := findAccount(passwd, func(a Account) bool { return a.Name == user })
	if uid, ok := parseID(user); !found && ok {
		if a, found = findAccount(passwd, func(a Account) bool { return a.UID == uid }); !found {
			a, found = Account{Name: fmt.Sprintf("%d:0", uid), UID: uid, Home: "/", Shell: "/bin/sh"}, true
		}
	}
	if !found {
		return Account{}, fault.New(fault.InvalidArgument, "the image says that its programs run as the user %q, whom its /etc/passwd does not have; "+
			"add that user to the image, or take USER out of it", user).Because("user_not_found")
	}
	if !hasGroup {
		return a, nil
	}
	gid, ok := findGroup(groups, group)
	if !ok {
		return Account{}, fault.New(fault.InvalidArgument, "the image says that its programs run in the group %q, which its /etc/group does not have; "+
			"add that group to the image, or take it out of USER", group).Because("group_not_found")
	}
	if gid != a.GID {
		a.Name, a.GID = fmt.Sprintf("%d:%d", a.UID, gid), gid
	}
	return a, nil
}

// parseID reads the number of a user or a group. The last one means "no change" in the
// system calls and is none.
func parseID(text string) (int, bool) {
	n, err := strconv.ParseUint(text, 10, 32)
	return int(n), err == nil && n != 1<<32-1
}

// findGroup gives the number of a group by name or number, see group(5).
func findGroup(text, group string) (int, bool) {
	for line := range strings.Lines(text) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) == 4 && f[0] == group {
			return parseID(f[2])
		}
	}
	return parseID(group)
}

// findAccount looks an account up in the text of a passwd file, see passwd(5).
func findAccount(passwd string, want func(Account) bool) (Account, bool) {
	for line := range strings.Lines(passwd) {
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) != 7 {
			continue
		}
		uid, ok1 := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if a := (Account{Name: f[0], UID: uid, GID: gid, Home: f[5], Shell: f[6]}); ok1 && ok2 && want(a) {
			return a, true
		}
	}
	return Account{}, false
}

// freeID gives the first number from accountID on that neither a user nor a group has.
func freeID(files ...string) int {
	taken := map[string]bool{}
	for _, text := range files {
		for line := range strings.Lines(text) {
			if f := strings.Split(line, ":"); len(f) > 2 {
				taken[f[2]] = true
			}
		}
	}
	id := accountID
	for taken[strconv.Itoa(id)] {
		id++
	}
	return id
}

func addLine(text, line string) string {
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return text + line + "\n"
}
