package guest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// fileService answers the Files service.
type fileService struct{ g *Guest }

var _ guestproto.FilesHandler = fileService{}

// target is a path of a call, checked, with the user who works on it.
type target struct {
	name    string // as it is told: absolute
	place   string // on the agent's own file system
	account account
}

// target checks a path. ".." is legal: the file system is the sandbox's own.
func (s fileService) target(path []byte, user string) (target, error) {
	switch {
	case len(path) == 0:
		return target{}, fault.New(fault.InvalidArgument, "the path is empty")
	case len(path) > guestproto.MaxPath:
		return target{}, fault.New(fault.InvalidArgument, "the path has %d bytes; %d are the most", len(path), guestproto.MaxPath)
	case bytes.IndexByte(path, 0) >= 0:
		return target{}, fault.New(fault.InvalidArgument, "a path may not hold a NUL byte")
	}
	acc, err := s.g.account(user)
	if err != nil {
		return target{}, err
	}
	name := string(path)
	if !filepath.IsAbs(name) {
		name = guestproto.Workspace + "/" + name
	}
	return target{name: name, place: s.g.path(name), account: acc}, nil
}

// entry describes a file. place is its path on the agent's file system, name the one
// that is told.
func entry(name, place string, info fs.FileInfo, users accounts) *guestproto.Entry {
	e := &guestproto.Entry{
		Path:             []byte(filepath.Clean(name)),
		Type:             fileType(info.Mode()),
		Size:             info.Size(),
		ModifiedUnixNano: info.ModTime().UnixNano(),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Mode, e.Uid, e.Gid = st.Mode&0o7777, st.Uid, st.Gid
		e.Owner, e.Group = clipText(users.userName(st.Uid)), clipText(users.groupName(st.Gid))
	}
	if e.Type == guestproto.FileType_FILE_TYPE_SYMLINK {
		link, _ := os.Readlink(place)
		e.SymlinkTarget = []byte(link)
	}
	return e
}

func fileType(mode fs.FileMode) guestproto.FileType {
	switch {
	case mode.IsRegular():
		return guestproto.FileType_FILE_TYPE_FILE
	case mode.IsDir():
		return guestproto.FileType_FILE_TYPE_DIRECTORY
	case mode&fs.ModeSymlink != 0:
		return guestproto.FileType_FILE_TYPE_SYMLINK
	case mode&fs.ModeNamedPipe != 0:
		return guestproto.FileType_FILE_TYPE_FIFO
	case mode&fs.ModeSocket != 0:
		return guestproto.FileType_FILE_TYPE_SOCKET
	case mode&fs.ModeCharDevice != 0:
		return guestproto.FileType_FILE_TYPE_CHARACTER_DEVICE
	case mode&fs.ModeDevice != 0:
		return guestproto.FileType_FILE_TYPE_BLOCK_DEVICE
	}
	return guestproto.FileType_FILE_TYPE_UNSPECIFIED
}

// stat describes what is there, as the target's user sees it.
func (s fileService) stat(t target, follow bool) (e *guestproto.Entry, err error) {
	users := s.g.accounts()
	err = s.g.as(t.account, func() error {
		look := os.Lstat
		if follow {
			look = os.Stat
		}
		info, err := look(t.place)
		if err != nil {
			return err
		}
		e = entry(t.name, t.place, info, users)
		return nil
	})
	return e, fileFault(err, "look at", t.name)
}

func (s fileService) Stat(_ context.Context, req *guestproto.StatRequest) (*guestproto.StatResponse, error) {
	t, err := s.target(req.Path, req.User)
	if err != nil {
		return nil, err
	}
	if req.Upload != "" {
		if err := s.g.as(t.account, func() error {
			t.place, err = uploadPlace(t.place, req.Upload)
			return err
		}); err != nil {
			return nil, err
		}
		req.Follow = false
	}
	e, err := s.stat(t, req.Follow)
	if err != nil {
		return nil, err
	}
	return &guestproto.StatResponse{Entry: e}, nil
}

// batchBytes is about how many bytes of entries one message of List has.
const batchBytes = guestproto.Chunk

func (s fileService) List(ctx context.Context, req *guestproto.ListFilesRequest, stream guestproto.FilesListServerStream) error {
	t, err := s.target(req.Path, req.User)
	if err != nil {
		return err
	}
	if req.Depth < 0 {
		return fault.New(fault.InvalidArgument, "a depth is not negative")
	}
	users := s.g.accounts()
	var batch guestproto.ListFilesResponse
	size := 0
	flush := func() error {
		defer func() { batch.Entries, size = nil, 0 }()
		return stream.Send(&batch)
	}
	var walk func(dir target, depth int32) error
	walk = func(dir target, depth int32) error {
		entries, err := s.readDir(dir, users)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			batch.Entries = append(batch.Entries, e)
			if size += len(e.Path) + len(e.SymlinkTarget) + 100; size >= batchBytes {
				if err := flush(); err != nil {
					return err
				}
			}
			if e.Type != guestproto.FileType_FILE_TYPE_DIRECTORY || depth <= 1 {
				continue
			}
			below := target{name: string(e.Path), place: filepath.Join(dir.place, filepath.Base(string(e.Path))), account: dir.account}
			// A directory below that has gone or is closed to the user is passed over:
			// its own entry has been told.
			if err := walk(below, depth-1); err != nil && !fault.Is(err, fault.NotFound) && !fault.Is(err, fault.PermissionDenied) {
				return err
			}
		}
		return nil
	}
	if err := walk(t, req.Depth); err != nil {
		return err
	}
	return flush()
}

// readDir describes a directory's entries, sorted by name.
func (s fileService) readDir(t target, users accounts) (out []*guestproto.Entry, err error) {
	err = s.g.as(t.account, func() error {
		f, err := os.OpenFile(t.place, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		list, err := f.ReadDir(-1)
		for _, d := range list {
			info, err := d.Info()
			if err != nil {
				continue // gone meanwhile
			}
			out = append(out, entry(filepath.Join(t.name, d.Name()), filepath.Join(t.place, d.Name()), info, users))
		}
		return err
	})
	slices.SortFunc(out, func(a, b *guestproto.Entry) int { return bytes.Compare(a.Path, b.Path) })
	return out, fileFault(err, "list", t.name)
}

func (s fileService) Read(ctx context.Context, req *guestproto.ReadRequest, stream guestproto.FilesReadServerStream) error {
	t, err := s.target(req.Path, req.User)
	if err != nil {
		return err
	}
	if req.Offset < 0 || req.Limit < 0 {
		return fault.New(fault.InvalidArgument, "offset and limit are not negative")
	}
	users := s.g.accounts()
	var f *os.File
	var e *guestproto.Entry
	err = s.g.as(t.account, func() error {
		// Non-blocking, so that a FIFO does not hold the thread; regular files do not care.
		if f, err = os.OpenFile(t.place, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0); err != nil {
			return err
		}
		info, err := f.Stat()
		if err != nil {
			return err
		}
		e = entry(t.name, t.place, info, users)
		return nil
	})
	if f != nil {
		defer f.Close()
	}
	if err != nil {
		return fileFault(err, "read", t.name)
	}
	switch e.Type {
	case guestproto.FileType_FILE_TYPE_FILE:
	case guestproto.FileType_FILE_TYPE_DIRECTORY:
		return fileFault(syscall.EISDIR, "read", t.name)
	default:
		return fault.New(fault.InvalidArgument, "cannot read %q: it is not a regular file", t.name).Because("not_a_file")
	}
	if err := stream.Send(&guestproto.ReadResponse{Entry: e}); err != nil {
		return err
	}
	if req.Offset > 0 {
		if _, err := f.Seek(req.Offset, io.SeekStart); err != nil {
			return fileFault(err, "read", t.name)
		}
	}
	return sendFile(ctx, f, cmp.Or(req.Limit, 1<<62), t.name, stream.Send)
}

// sendFile sends up to limit bytes of a file in chunks.
func sendFile(ctx context.Context, f io.Reader, limit int64, name string, send func(*guestproto.ReadResponse) error) error {
	buf := make([]byte, guestproto.Chunk)
	for limit > 0 && ctx.Err() == nil {
		n, err := f.Read(buf[:min(int64(len(buf)), limit)])
		if n > 0 {
			limit -= int64(n)
			if err := send(&guestproto.ReadResponse{Data: buf[:n]}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fileFault(err, "read", name)
		}
	}
	return ctx.Err()
}

func (s fileService) Move(_ context.Context, req *guestproto.MoveRequest) (*guestproto.MoveResponse, error) {
	from, err := s.target(req.Source, req.User)
	if err != nil {
		return nil, err
	}
	to, err := s.target(req.Destination, req.User)
	if err != nil {
		return nil, err
	}
	err = s.g.as(from.account, func() error {
		if err := os.MkdirAll(filepath.Dir(to.place), 0o755); err != nil {
			return err
		}
		return os.Rename(from.place, to.place)
	})
	if err != nil {
		return nil, fileFault(err, "move to "+to.name+" the file", from.name)
	}
	e, err := s.stat(to, false)
	if err != nil {
		return nil, err
	}
	return &guestproto.MoveResponse{Entry: e}, nil
}

func (s fileService) Remove(_ context.Context, req *guestproto.RemoveRequest) (*guestproto.RemoveResponse, error) {
	t, err := s.target(req.Path, req.User)
	if err != nil {
		return nil, err
	}
	if filepath.Clean(t.name) == "/" {
		return nil, fault.New(fault.InvalidArgument, "the root directory is not removed; delete the sandbox instead")
	}
	err = s.g.as(t.account, func() error {
		// RemoveAll is content with a missing path; the caller is told.
		if _, err := os.Lstat(t.place); err != nil || !req.Recursive {
			return cmp.Or(err, os.Remove(t.place))
		}
		return os.RemoveAll(t.place)
	})
	if err != nil {
		return nil, fileFault(err, "remove", t.name)
	}
	return &guestproto.RemoveResponse{}, nil
}

func (s fileService) MakeDir(_ context.Context, req *guestproto.MakeDirRequest) (*guestproto.MakeDirResponse, error) {
	t, err := s.target(req.Path, req.User)
	if err != nil {
		return nil, err
	}
	res := &guestproto.MakeDirResponse{}
	mode := fs.FileMode(cmp.Or(req.Mode, 0o755)) & 0o777
	err = s.g.as(t.account, func() error {
		if err := os.MkdirAll(filepath.Dir(filepath.Clean(t.place)), 0o755); err != nil {
			return err
		}
		err := os.Mkdir(t.place, mode)
		if errors.Is(err, fs.ErrExist) {
			info, serr := os.Stat(t.place)
			if serr == nil && info.IsDir() {
				res.Existed = true
				return nil
			}
		}
		return err
	})
	if err != nil {
		return nil, fileFault(err, "make the directory", t.name)
	}
	res.Entry, err = s.stat(t, true)
	return res, err
}
