package apiserver

import (
	"context"
	"errors"
	"io"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// ReadFile streams a file.
func (s *server) ReadFile(ctx context.Context, r ReadFileRequestObject) (ReadFileResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stream, err := g.Files.Read(ctx, &guestproto.ReadRequest{Path: []byte(r.Params.Path), User: r.Params.User, Offset: r.Params.Offset})
	if err == nil {
		err = g.begins(cancel, func() error { _, err := stream.Receive(); return err }) // the entry; after it all is data
		if err != nil {
			_ = stream.Close()
		}
	}
	if err != nil {
		cancel()
		return nil, g.failed(err)
	}
	return fileBytes{g: g, stream: stream, cancel: cancel}, nil
}

// fileBytes is a file's contents on their way out.
type fileBytes struct {
	g      guest
	stream guestproto.FilesReadClientStream
	cancel context.CancelFunc
}

// begins waits for a stream's first message as long as a guest has to answer. What
// follows may take as long as it likes.
func (g guest) begins(cancel context.CancelFunc, receive func() error) error {
	timer := time.AfterFunc(guestTimeout, cancel)
	err := receive()
	if !timer.Stop() {
		return fault.Wrap(err, fault.DeadlineExceeded, "the agent in the sandbox %s does not answer; `hutch stop` and `hutch resume` start it anew", g.id).Because("guest_silent")
	}
	return err
}

// VisitReadFileResponse copies the bytes. An error breaks the connection, for the
// status is sent by then.
func (f fileBytes) VisitReadFileResponse(w http.ResponseWriter) error {
	defer f.cancel()
	defer func() { _ = f.stream.Close() }() // all of it was read, or the error is known
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Disposition", "attachment")
	w.WriteHeader(http.StatusOK)
	for {
		msg, err := f.stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return f.g.failed(err)
		}
		if _, err := w.Write(msg.Data); err != nil {
			return err
		}
	}
}

// WriteFile writes a file whole or not at all.
func (s *server) WriteFile(ctx context.Context, r WriteFileRequestObject) (WriteFileResponseObject, error) {
	mode, err := parseMode(r.Params.Mode)
	if err != nil {
		return nil, err
	}
	if r.Params.Offset != 0 && r.Params.Upload == "" {
		return nil, fault.New(fault.InvalidArgument, "offset goes with upload only: a file without an upload's key is written whole")
	}
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // without a commit the file is as it was
	stream, err := g.Files.Write(ctx)
	if err != nil {
		return nil, g.failed(err)
	}
	err = stream.Send(&guestproto.WriteRequest{Part: &guestproto.WriteRequest_Header{
		Header: &guestproto.WriteHeader{Path: []byte(r.Params.Path), User: r.Params.User, Mode: mode, Upload: r.Params.Upload, Offset: r.Params.Offset},
	}})
	buf := make([]byte, guestproto.Chunk)
	for err == nil {
		n, readErr := r.Body.Read(buf)
		if n > 0 {
			err = stream.Send(&guestproto.WriteRequest{Part: &guestproto.WriteRequest_Data{Data: buf[:n]}})
		}
		if errors.Is(readErr, io.EOF) {
			break
		}
		if readErr != nil {
			return nil, fault.Wrap(readErr, fault.InvalidArgument, "the body did not come whole; the file is as it was")
		}
	}
	if err == nil {
		err = stream.Send(&guestproto.WriteRequest{Part: &guestproto.WriteRequest_Commit{Commit: true}})
	}
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the agent has answered already, with what is wrong
		return nil, g.failed(err)
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return nil, g.failed(err)
	}
	return WriteFile200JSONResponse(fileInfo(res.GetEntry())), nil
}

// parseMode reads octal permission bits; "" is 0, which leaves the choice to the agent.
func parseMode(s string) (uint32, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 8, 12)
	if err != nil || n == 0 {
		return 0, fault.New(fault.InvalidArgument, "the mode %.20q is refused; give octal permission bits, as 0644", s)
	}
	return uint32(n), nil
}

// RemoveFile removes a file or a directory.
func (s *server) RemoveFile(ctx context.Context, r RemoveFileRequestObject) (RemoveFileResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	_, err = unary(ctx, g, guestWorkTimeout, g.Files.Remove, &guestproto.RemoveRequest{
		Path: []byte(r.Params.Path), User: r.Params.User, Recursive: r.Params.Recursive,
	})
	return RemoveFile204Response{}, err
}

// StatFile describes a file.
func (s *server) StatFile(ctx context.Context, r StatFileRequestObject) (StatFileResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	res, err := unary(ctx, g, guestTimeout, g.Files.Stat, &guestproto.StatRequest{
		Path: []byte(r.Params.Path), User: r.Params.User, Upload: r.Params.Upload,
	})
	if err != nil {
		return nil, err
	}
	return StatFile200JSONResponse(fileInfo(res.GetEntry())), nil
}

// ListFiles gives a page of a directory. The cursor is the last entry's path, so that
// a page goes on at the right place although files come and go.
func (s *server) ListFiles(ctx context.Context, r ListFilesRequestObject) (ListFilesResponseObject, error) {
	after, err := decodeCursor(r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, guestTimeout)
	defer cancel()
	req := &guestproto.ListFilesRequest{Path: []byte(r.Params.Path), User: r.Params.User}
	if r.Params.Depth != nil {
		req.Depth = int32(*r.Params.Depth) //nolint:gosec // the contract bounds it
	}
	stream, err := g.Files.List(ctx, req)
	if err != nil {
		return nil, g.failed(err)
	}
	defer func() { _ = stream.Close() }() // the page is full, or the error is known
	limit := limitOf(r.Params.Limit)
	list := ListFiles200JSONResponse{Files: []api.FileInfo{}}
	last := ""
	for {
		batch, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, g.failed(err)
		}
		for _, entry := range batch.Entries {
			if after != "" && !walksAfter(string(entry.Path), after) {
				continue
			}
			if len(list.Files) == limit {
				list.NextCursor = encodeCursor(last)
				return list, nil
			}
			list.Files = append(list.Files, fileInfo(entry))
			last = string(entry.Path)
		}
	}
}

// walksAfter says whether a walk, which takes names in order and a directory before
// what is in it, meets a after b.
func walksAfter(a, b string) bool {
	as, bs := strings.Split(a, "/"), strings.Split(b, "/")
	for i := range min(len(as), len(bs)) {
		if as[i] != bs[i] {
			return as[i] > bs[i]
		}
	}
	return len(as) > len(bs)
}

// MoveFile moves a file or a directory.
func (s *server) MoveFile(ctx context.Context, r MoveFileRequestObject) (MoveFileResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	_, err = unary(ctx, g, guestWorkTimeout, g.Files.Move, &guestproto.MoveRequest{
		Source: []byte(r.Body.From), Destination: []byte(r.Body.To), User: r.Params.User,
	})
	return MoveFile204Response{}, err
}

// MakeDirectory makes a directory and those above it.
func (s *server) MakeDirectory(ctx context.Context, r MakeDirectoryRequestObject) (MakeDirectoryResponseObject, error) {
	g, err := s.guest(ctx, r.Ref, hostproto.UseSession)
	if err != nil {
		return nil, err
	}
	_, err = unary(ctx, g, guestTimeout, g.Files.MakeDir, &guestproto.MakeDirRequest{Path: []byte(r.Body.Path), User: r.Params.User})
	return MakeDirectory204Response{}, err
}

// WatchFiles tells of changes until the client goes.
func (s *server) WatchFiles(ctx context.Context, r WatchFilesRequestObject) (WatchFilesResponseObject, error) {
	use := hostproto.UseSession
	if r.Params.NoWake {
		use = hostproto.UseFollow
	}
	g, err := s.guest(ctx, r.Ref, use)
	if err != nil {
		return nil, err
	}
	ctx, cancel := Lasting(ctx)
	stream, err := g.Files.Watch(ctx, &guestproto.WatchRequest{
		Path: []byte(r.Params.Path), User: r.Params.User, Recursive: r.Params.Recursive,
	})
	if err == nil {
		err = g.begins(cancel, func() error { _, err := stream.Receive(); return err })
		if err != nil { // the empty message that says that the watch stands
			_ = stream.Close()
		}
	}
	if err != nil {
		cancel()
		return nil, g.failed(err)
	}
	return lines(func(send func(any) error) error {
		defer cancel()
		defer func() { _ = stream.Close() }() // the client has gone, or the error is told
		if err := send(api.FileEvent{Watching: true}); err != nil {
			return err
		}
		for {
			batch, err := stream.Receive()
			if err != nil {
				d := s.fail(ctx, g.failed(watchEnded(ctx, g.id, err)))
				return send(api.FileEvent{Error: &d})
			}
			for _, c := range batch.Changes {
				change := api.FileChange{Path: validUTF8(c.Name), Type: changeTypes[c.Type]}
				if change.Type == "" {
					continue
				}
				if err := send(api.FileEvent{Change: &change}); err != nil {
					return err
				}
			}
		}
	}), nil
}

func watchEnded(ctx context.Context, sandbox string, err error) error {
	if ctx.Err() != nil {
		return fault.New(fault.Unavailable, "the server is shutting down; watch again").Because("server_stopping")
	}
	if errors.Is(err, io.EOF) {
		return fault.New(fault.Unavailable, "the sandbox %s ended the watch; list the directory and watch it again", sandbox).
			Because("guest_unreachable")
	}
	return err
}

var changeTypes = map[guestproto.ChangeType]api.FileChangeType{
	guestproto.ChangeType_CHANGE_TYPE_CREATE:     api.FileChangeTypeCreate,
	guestproto.ChangeType_CHANGE_TYPE_WRITE:      api.FileChangeTypeWrite,
	guestproto.ChangeType_CHANGE_TYPE_REMOVE:     api.FileChangeTypeRemove,
	guestproto.ChangeType_CHANGE_TYPE_RENAME:     api.FileChangeTypeRename,
	guestproto.ChangeType_CHANGE_TYPE_ATTRIBUTES: api.FileChangeTypeAttributes,
}

var fileTypes = map[guestproto.FileType]api.FileInfoType{
	guestproto.FileType_FILE_TYPE_FILE:             api.FileInfoTypeFile,
	guestproto.FileType_FILE_TYPE_DIRECTORY:        api.FileInfoTypeDirectory,
	guestproto.FileType_FILE_TYPE_SYMLINK:          api.FileInfoTypeSymlink,
	guestproto.FileType_FILE_TYPE_FIFO:             api.FileInfoTypeFifo,
	guestproto.FileType_FILE_TYPE_SOCKET:           api.FileInfoTypeSocket,
	guestproto.FileType_FILE_TYPE_BLOCK_DEVICE:     api.FileInfoTypeBlockDevice,
	guestproto.FileType_FILE_TYPE_CHARACTER_DEVICE: api.FileInfoTypeCharacterDevice,
}

// permissionBits are the mode's bits that a file keeps (chmod(2)).
const permissionBits = 0o7777

func fileInfo(e *guestproto.Entry) api.FileInfo {
	full := string(e.GetPath())
	out := api.FileInfo{
		Path: validUTF8(e.GetPath()), Name: path.Base(validUTF8(e.GetPath())), Type: fileTypes[e.GetType()], Size: e.GetSize(),
		Mode: "0" + strconv.FormatUint(uint64(e.GetMode()&permissionBits), 8), UID: int(e.GetUid()), GID: int(e.GetGid()),
		Owner: e.GetOwner(), Group: e.GetGroup(), Target: validUTF8(e.GetSymlinkTarget()),
		ModifiedAt: api.At(time.Unix(0, e.GetModifiedUnixNano())),
	}
	if out.Type == "" {
		out.Type = api.FileInfoTypeFile
	}
	if !utf8.ValidString(full) {
		out.PathBytes = e.GetPath()
	}
	return out
}

func validUTF8(b []byte) string { return strings.ToValidUTF8(string(b), "\uFFFD") }
