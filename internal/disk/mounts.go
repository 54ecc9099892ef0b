package disk

import (
	"context"
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// MountPoint is one line of the kernel's mount table.
type MountPoint struct {
	Target  string   // where it is mounted
	Type    string   // ext4, overlay …
	Source  string   // the device, or a word
	Options []string // those of the file system, not those of the mount point
}

type mountTable []MountPoint

// at gives what is mounted on a path, the topmost where there are several.
func (t mountTable) at(path string) *MountPoint {
	for i := len(t) - 1; i >= 0; i-- {
		if t[i].Target == path {
			return &t[i]
		}
	}
	return nil
}

// option gives the value of NAME=value.
func (m *MountPoint) option(name string) string {
	for _, o := range m.Options {
		if v, ok := strings.CutPrefix(o, name+"="); ok {
			return v
		}
	}
	return ""
}

// mounts reads the mount table of this process's namespace.
func mounts() (mountTable, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, wrap(err, "the mount table could not be read")
	}
	return parseMounts(string(text)), nil
}

// parseMounts reads the format of proc_pid_mountinfo(5): the fields before " - " are
// the mount point's, those behind it the file system's.
func parseMounts(text string) mountTable {
	var table mountTable
	for line := range strings.Lines(text) {
		point, system, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		left, right := strings.Fields(point), strings.Fields(system)
		if !ok || len(left) < 6 || len(right) < 3 {
			continue
		}
		table = append(table, MountPoint{
			Target:  unescape(left[4]),
			Type:    right[0],
			Source:  unescape(right[1]),
			Options: strings.Split(unescape(right[2]), ","),
		})
	}
	return table
}

// unescape undoes the octal escapes of the mount table.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

// unmount takes down what is mounted on a path, every layer of it, and waits for a
// mount that is busy only for a moment. Nothing mounted there is fine.
func unmount(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	err := poll(ctx, func() (bool, error) {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // not a mount point (any more)
			return true, nil
		case err == nil, errors.Is(err, unix.EBUSY):
			return false, nil
		}
		return false, err
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return fault.Wrap(err, fault.Unavailable, "%s is still in use; end what uses it and try again", path).After(settle)
	}
	return wrap(err, "%s could not be unmounted", path)
}

// share makes a directory a mount of its own that shares its events with copies of
// itself, unless something is mounted on it. A process that gets a mount namespace
// copies all mounts. Were those below this one private, an unmount here would leave
// the copies, and each of them would keep a disk busy for as long as that process
// lives (see the kernel's Documentation/filesystems/sharedsubtree.rst).
func share(dir string) error {
	table, err := mounts()
	if err != nil || table.at(dir) != nil {
		return err
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		return wrap(err, "%s could not be made a mount", dir)
	}
	// Private first, to leave the group of the file system that it was bound from.
	for _, kind := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", dir, "", kind, ""); err != nil {
			return errors.Join(wrap(err, "the propagation of %s could not be set", dir), unix.Unmount(dir, 0))
		}
	}
	return nil
}
