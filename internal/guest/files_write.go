package guest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

func (s fileService) Write(_ context.Context, stream guestproto.FilesWriteServerStream) (*guestproto.WriteResponse, error) {
	first, err := stream.Receive()
	if err != nil {
		return nil, err
	}
	header := first.GetHeader()
	if header == nil {
		return nil, fault.New(fault.InvalidArgument, "a write begins with its header")
	}
	t, err := s.target(header.Path, header.User)
	if err != nil {
		return nil, err
	}
	w, err := s.openWriter(t, header)
	if err != nil {
		return nil, err
	}
	defer w.abandon()
	for {
		req, err := stream.Receive()
		switch {
		case errors.Is(err, io.EOF):
			return nil, fault.New(fault.InvalidArgument, "the write of %q ended without a commit; nothing was changed", t.name).Because("no_commit")
		case err != nil:
			return nil, err
		}
		switch part := req.Part.(type) {
		case *guestproto.WriteRequest_Data:
			if len(part.Data) > guestproto.MaxChunk {
				return nil, fault.New(fault.TooLarge, "a chunk has %d bytes; send %d at a time", len(part.Data), guestproto.MaxChunk)
			}
			if _, err := w.file.Write(part.Data); err != nil {
				return nil, fileFault(err, "write", t.name)
			}
		case *guestproto.WriteRequest_Commit:
			if !part.Commit {
				continue
			}
			if err := s.g.as(t.account, w.commit); err != nil {
				return nil, fileFault(err, "write", t.name)
			}
			e, err := s.stat(t, true)
			if err != nil {
				return nil, err
			}
			return &guestproto.WriteResponse{Entry: e, InPlace: w.temp == ""}, nil
		default:
			return nil, fault.New(fault.InvalidArgument, "a write has one header, then data, then a commit")
		}
	}
}

// writer is a file that is being written: beside its place, to be renamed, or in
// place where nothing else is possible.
type writer struct {
	file     *os.File
	place    string // with a last symbolic link resolved
	temp     string // "" in place
	modified time.Time
	g        *Guest
	account  account
	placed   bool
	keep     bool // of an upload: what there is stays without a commit
}

// openWriter finds out how a file can be written and begins. Parents are made. A last
// symbolic link is followed. A file that is there keeps its mode, and its owner where
// root writes it; one that the user may not write is refused even where the user could
// replace it.
func (s fileService) openWriter(t target, h *guestproto.WriteHeader) (*writer, error) {
	if h.Mode > 0o7777 {
		return nil, fault.New(fault.InvalidArgument, "a mode has the 12 permission bits; this is %#o", h.Mode)
	}
	w := &writer{g: s.g, place: t.place, account: t.account}
	if h.ModifiedUnixNano != 0 {
		w.modified = time.Unix(0, h.ModifiedUnixNano)
	}
	owner := -1
	group := -1
	if h.Owner != "" {
		if t.account.uid != 0 {
			return nil, fault.New(fault.PermissionDenied, "only root gives a file to another user; write %q as root, or leave the owner out", t.name)
		}
		acc, err := s.g.accounts().find(h.Owner)
		if err != nil {
			return nil, err
		}
		owner, group = int(acc.uid), int(acc.gid)
	}
	if h.Offset < 0 || h.Offset > 0 && h.Upload == "" {
		return nil, fault.New(fault.InvalidArgument, "an offset is not negative, and goes with an upload's key")
	}
	err := s.g.as(t.account, func() error { return w.open(h, owner, group) })
	if err != nil {
		w.abandon()
		return nil, fileFault(err, "write", t.name)
	}
	return w, nil
}

// open runs with the user's rights.
func (w *writer) open(h *guestproto.WriteHeader, owner, group int) error {
	mode := fs.FileMode(h.Mode)
	if place, err := filepath.EvalSymlinks(w.place); err == nil {
		w.place = place
	}
	old, err := os.Stat(w.place)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.MkdirAll(filepath.Dir(w.place), 0o755); err != nil {
			return err
		}
	case err != nil:
		return err
	case old.IsDir():
		return syscall.EISDIR
	case !old.Mode().IsRegular() && h.Upload != "":
		return errUploadInPlace()
	case !old.Mode().IsRegular():
		return w.openInPlace(unix.O_NONBLOCK | unix.O_NOCTTY)
	default:
		if err := writable(w.place); err != nil {
			return err
		}
		st := old.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // what Linux gives
		if mode == 0 {
			mode = fs.FileMode(st.Mode & 0o7777)
		}
		if owner < 0 && w.account.uid == 0 {
			owner, group = int(st.Uid), int(st.Gid)
		}
	}
	if mode == 0 {
		mode = 0o644
	}
	if h.Upload != "" {
		err = w.takeUp(h.Upload, h.Offset)
	} else {
		w.file, err = os.CreateTemp(filepath.Dir(w.place), ".hutch-write-*")
	}
	if err != nil {
		if old == nil || w.keep {
			return err
		}
		if h.Upload != "" {
			return errUploadInPlace()
		}
		return w.openInPlace(os.O_TRUNC) // the directory allows no new file, the file is the user's
	}
	w.temp = w.file.Name()
	if owner >= 0 && os.Geteuid() == 0 {
		if err := w.file.Chown(owner, group); err != nil {
			return err
		}
	}
	return unix.Fchmod(int(w.file.Fd()), uint32(mode)) // after chown, which drops setuid bits
}

func (w *writer) openInPlace(flags int) (err error) {
	w.file, err = os.OpenFile(w.place, os.O_WRONLY|flags, 0)
	return err
}

// writable says whether the user may write a file that is there. A program that runs
// may be replaced, though not overwritten.
func writable(place string) error {
	f, err := os.OpenFile(place, os.O_WRONLY, 0)
	if errors.Is(err, syscall.ETXTBSY) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// commit puts the file into place; it runs with the user's rights.
func (w *writer) commit() error {
	if err := w.file.Close(); err != nil {
		return err
	}
	written := w.place
	if w.temp != "" {
		written = w.temp
	}
	if !w.modified.IsZero() {
		if err := os.Chtimes(written, w.modified, w.modified); err != nil {
			return err
		}
	}
	if w.temp == "" {
		return nil
	}
	err := os.Rename(w.temp, w.place)
	w.placed = err == nil
	return err
}

// abandon removes what commit has not put into place.
func (w *writer) abandon() {
	if w.file == nil {
		return
	}
	w.file.Close()
	if w.temp != "" && !w.placed && !w.keep {
		_ = w.g.as(w.account, func() error { return os.Remove(w.temp) })
	}
}
