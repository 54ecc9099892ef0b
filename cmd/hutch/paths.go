package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// defaultData is where the state of an installation lies unless --data says else.
const defaultData = "/var/lib/hutch"

// defaultListen is the API's address.
const defaultListen = "127.0.0.1:4880"

// layout is where the parts of one installation lie.
type layout struct {
	data string // absolute
	tag  string // tells installations on one machine apart, in names of kernel objects
}

// layoutOf finds the layout of a data directory. Two paths to the same directory
// give the same one, so symbolic links are resolved.
func layoutOf(data string) (layout, error) {
	if data == "" {
		return layout{}, fault.New(fault.InvalidArgument, "--data is empty; name the directory of the installation, or leave the flag out for %s", defaultData)
	}
	abs, err := filepath.Abs(data)
	if err != nil {
		return layout{}, err
	}
	if resolved, err := filepath.EvalSymlinks(abs); err == nil {
		abs = resolved
	}
	sum := sha256.Sum256([]byte("hutch data " + abs))
	return layout{data: abs, tag: hex.EncodeToString(sum[:4])}, nil
}

// made says whether a server has been started here before.
func (l layout) made() bool {
	for _, path := range []string{l.database(), l.lockFile(), l.log()} {
		if _, err := os.Stat(path); err == nil {
			return true
		}
	}
	return false
}

// contextName tells the contexts of several installations apart.
func (l layout) contextName() string {
	if l.data == defaultData {
		return "local"
	}
	return "local-" + l.tag
}

// dataFlag is how the installation is named in a line to type, with a space before it.
func (l layout) dataFlag() string {
	if l.data == defaultData {
		return ""
	}
	return " --data " + l.data
}

// runRoot is where the run directories of all installations lie.
const runRoot = "/run/hutch"

func (l layout) run() string         { return filepath.Join(runRoot, l.tag) }
func (l layout) boots() string       { return filepath.Join(l.run(), "sb") }
func (l layout) cgroup() string      { return "hutch-" + l.tag }
func (l layout) probeCgroup() string { return "hutch-doctor-" + l.tag }
func (l layout) database() string    { return filepath.Join(l.data, "hutch.db") }
func (l layout) sshHostKey() string  { return filepath.Join(l.data, "ssh_host_ed25519_key") }
func (l layout) journals() string    { return filepath.Join(l.data, "host") }
func (l layout) binaries() string    { return filepath.Join(l.data, "bin") }
func (l layout) log() string         { return filepath.Join(l.data, "hutch.log") }
func (l layout) poolFile() string    { return filepath.Join(l.data, "pool.img") }
func (l layout) serverFile() string  { return filepath.Join(l.data, "server.json") }
func (l layout) lockFile() string    { return filepath.Join(l.data, "lock") }

// serverInfo is what a running server tells others on the machine.
type serverInfo struct {
	PID      int                `json:"pid"`
	URL      string             `json:"url"`
	Version  string             `json:"version,omitempty"`
	Runtime  string             `json:"runtime,omitempty"`  // the program of the runtime that boots get
	Agent    string             `json:"agent,omitempty"`    // the layer of the guest agent that boots get
	Settings map[string]setting `json:"settings,omitempty"` // that it was started with, without secrets
}

func (l layout) readServer() (serverInfo, error) {
	var info serverInfo
	data, err := os.ReadFile(l.serverFile())
	if err == nil {
		err = json.Unmarshal(data, &info)
	}
	return info, err
}

func (l layout) writeServer(info serverInfo) error {
	data, err := json.Marshal(info)
	if err != nil {
		return err
	}
	temp := l.serverFile() + ".tmp"
	if err := os.WriteFile(temp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(temp, l.serverFile())
}

// errLocked says that a live process uses the installation.
var errLocked = errors.New("the data directory is in use")

// lock makes this process the only one that uses the installation. The kernel takes
// the lock back when the process ends, however it does. One that only asks whether it
// is taken (live) holds it for an instant, which is waited for.
func (l layout) lock() (*os.File, error) {
	for range 10 {
		f, err := l.tryLock()
		if !errors.Is(err, errLocked) {
			return f, err
		}
		time.Sleep(5 * time.Millisecond)
	}
	return l.tryLock()
}

func (l layout) tryLock() (*os.File, error) {
	f, err := os.OpenFile(l.lockFile(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errLocked
		}
		return nil, err
	}
	return f, nil
}

// live says whether a server uses the installation now.
func (l layout) live() (bool, error) {
	if _, err := os.Stat(l.lockFile()); errors.Is(err, fs.ErrNotExist) {
		return l.undermined(), nil // a question makes no installation of a directory
	}
	f, err := l.tryLock()
	switch {
	case errors.Is(err, errLocked):
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	return false, f.Close()
}

// undermined says whether a server goes on whose data directory somebody has removed:
// what it holds still has an owner.
func (l layout) undermined() bool {
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*") // fails for a bad pattern only
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil && to == l.lockFile()+" (deleted)" {
			return true
		}
	}
	return false
}

// prepare makes the data directory, for its owner only.
func (l layout) prepare() error {
	if os.Geteuid() != 0 {
		return fault.New(fault.PermissionDenied, "hutch runs sandboxes as root; use `sudo hutch up`")
	}
	if entries, err := os.ReadDir(l.data); err == nil && len(entries) > 0 && !l.made() {
		return fault.New(fault.InvalidArgument, "%s has something in it and is no hutch installation; give an empty directory with --data", l.data)
	}
	if err := os.MkdirAll(l.data, 0o700); err != nil {
		return fault.Wrap(err, fault.InvalidArgument, "the data directory %s cannot be made; give another with --data", l.data)
	}
	if err := os.Chmod(l.data, 0o700); err != nil {
		return err
	}
	return os.MkdirAll(l.run(), 0o700)
}

// poolShare is the part of the free space that a pool's file takes when nobody says
// how much: half, so that the machine keeps room for others.
const poolShare = 2

// freeBytes is the free space at data, which may not be there yet.
func freeBytes(data string) (int64, error) {
	var st unix.Statfs_t
	for unix.Statfs(data, &st) != nil {
		if data == "/" || data == "." {
			return 0, fault.New(fault.InvalidArgument, "the free space of the data directory cannot be read; give --pool-size")
		}
		data = filepath.Dir(data)
	}
	return int64(st.Bavail) * st.Frsize, nil
}
