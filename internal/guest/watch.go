package guest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// mostWatches is how many directories one Watch may cover.
const mostWatches = 8192

// watchMask is what is told: creations, writes, removals, renames, attribute changes.
const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_DELETE |
	unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB | unix.IN_ONLYDIR

// watcher follows changes below one directory by inotify(7).
type watcher struct {
	file      *os.File
	fd        int
	root      string
	recursive bool
	dirs      map[int32]string // watch descriptor to the directory, relative to root
}

func (s fileService) Watch(ctx context.Context, req *guestproto.WatchRequest, stream guestproto.FilesWatchServerStream) error {
	t, err := s.target(req.Path, req.User)
	if err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fileFault(err, "watch", t.name)
	}
	w := &watcher{file: os.NewFile(uintptr(fd), "inotify"), fd: fd, root: t.place, recursive: req.Recursive, dirs: map[int32]string{}}
	defer w.file.Close()
	defer context.AfterFunc(ctx, func() { w.file.Close() })()
	if err := s.g.as(t.account, func() error { return w.add("", nil) }); err != nil {
		return fileFault(err, "watch", t.name)
	}
	if err := stream.Send(&guestproto.WatchResponse{}); err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := w.file.Read(buf)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return fileFault(err, "watch", t.name)
		}
		var changes []*guestproto.Change
		err = s.g.as(t.account, func() (err error) {
			changes, err = w.decode(buf[:n])
			return err
		})
		if len(changes) > 0 {
			if err := stream.Send(&guestproto.WatchResponse{Changes: changes}); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
	}
}

// add watches a directory and, where asked, those below it. found, if not nil, gets
// what is there already: a new directory may have been filled before it was watched.
func (w *watcher) add(dir string, found *[]*guestproto.Change) error {
	if len(w.dirs) >= mostWatches {
		return fault.New(fault.TooLarge, "the directory has more than %d directories below it; watch a smaller part", mostWatches)
	}
	place := filepath.Join(w.root, dir)
	wd, err := unix.InotifyAddWatch(w.fd, place, watchMask)
	if err != nil {
		return err
	}
	w.dirs[int32(wd)] = dir
	if !w.recursive {
		return nil
	}
	entries, err := os.ReadDir(place)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if found != nil {
			*found = append(*found, change(name, guestproto.ChangeType_CHANGE_TYPE_CREATE))
		}
		if !e.IsDir() {
			continue
		}
		if err := w.add(name, found); err != nil && !passable(err) {
			return err
		}
	}
	return nil
}

// passable says whether a directory that cannot be watched is passed over: it has
// gone, has become something else, or is closed to the user.
func passable(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOTDIR)
}

// decode turns a read of inotify events into changes.
func (w *watcher) decode(buf []byte) ([]*guestproto.Change, error) {
	var out []*guestproto.Change
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(buf))
		mask := binary.NativeEndian.Uint32(buf[4:])
		size := binary.NativeEndian.Uint32(buf[12:])
		raw := buf[unix.SizeofInotifyEvent:][:size]
		buf = buf[unix.SizeofInotifyEvent+int(size):]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			return out, fault.New(fault.FailedPrecondition, "changes came faster than they could be told; list the directory and watch again").Because("events_lost")
		}
		dir, ok := w.dirs[wd]
		if mask&unix.IN_IGNORED != 0 {
			delete(w.dirs, wd)
			if dir == "" && ok {
				return out, fault.New(fault.NotFound, "the watched directory is gone")
			}
			continue
		}
		if !ok || len(raw) == 0 {
			continue // about the directory itself; its parent tells it
		}
		name := filepath.Join(dir, string(bytes.TrimRight(raw, "\x00")))
		out = append(out, change(name, changeType(mask)))
		switch {
		case mask&unix.IN_ISDIR == 0 || !w.recursive:
		case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
			if err := w.add(name, &out); err != nil && !passable(err) {
				return out, err
			}
		case mask&unix.IN_MOVED_FROM != 0:
			w.forget(name)
		}
	}
	return out, nil
}

// forget stops watching a directory that was moved away, and those below it.
func (w *watcher) forget(name string) {
	for wd, dir := range w.dirs {
		if dir == name || strings.HasPrefix(dir, name+"/") {
			unix.InotifyRmWatch(w.fd, uint32(wd))
			delete(w.dirs, wd)
		}
	}
}

func change(name string, kind guestproto.ChangeType) *guestproto.Change {
	return &guestproto.Change{Name: []byte(name), Type: kind}
}

func changeType(mask uint32) guestproto.ChangeType {
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		return guestproto.ChangeType_CHANGE_TYPE_CREATE
	case mask&(unix.IN_MODIFY|unix.IN_CLOSE_WRITE) != 0:
		return guestproto.ChangeType_CHANGE_TYPE_WRITE
	case mask&unix.IN_DELETE != 0:
		return guestproto.ChangeType_CHANGE_TYPE_REMOVE
	case mask&unix.IN_MOVED_FROM != 0:
		return guestproto.ChangeType_CHANGE_TYPE_RENAME
	}
	return guestproto.ChangeType_CHANGE_TYPE_ATTRIBUTES
}
