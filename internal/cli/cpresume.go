package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// resumeFrom is the size from which on what has come of a copy outlives hutch. A smaller
// file is sent again as fast as it is asked for.
const resumeFrom = 8 << 20

// copyKey names a copy, so that the same one of the same contents is found again. What
// contents are the same is told by size and time, as rsync does.
func copyKey(parts ...any) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", parts))
	return hex.EncodeToString(sum[:16])
}

// inPlace says whether an upload was refused because its target can be overwritten only.
func inPlace(err error) bool {
	return err != nil && fault.Of(err).Reason == "upload_in_place"
}

// uploadInParts sends a file and goes on where it was cut off, be it in this call or by
// an earlier one that ended.
func (a *app) uploadInParts(ctx context.Context, c *client, ref string, params *api.WriteFileParams, file *os.File, count *counter) (api.FileInfo, error) {
	var written api.FileInfo
	began, err := file.Stat()
	if err != nil {
		return written, localFault("read", file.Name(), err)
	}
	full, err := filepath.Abs(file.Name())
	if err != nil {
		return written, localFault("read", file.Name(), err)
	}
	params.Upload = copyKey(full, began.Size(), began.ModTime().UnixNano(), params.Path, params.User)
	err = a.keepAsking(ctx, func() (bool, error) {
		have, err := read[api.FileInfo](c.StatFile(ctx, ref, &api.StatFileParams{Path: params.Path, User: params.User, Upload: params.Upload}))
		if err != nil && !fault.Is(err, fault.NotFound) {
			return false, err
		}
		now, err := file.Stat()
		if err != nil {
			return false, localFault("read", file.Name(), err)
		}
		if now.Size() != began.Size() || !now.ModTime().Equal(began.ModTime()) {
			return false, fault.New(fault.Conflict, "%s changed while it was copied; copy it again", file.Name())
		}
		params.Offset = have.Size
		if have.Size > began.Size() {
			params.Offset = 0
		}
		if _, err := file.Seek(params.Offset, io.SeekStart); err != nil {
			return false, localFault("read", file.Name(), err)
		}
		before := count.n.Swap(params.Offset)
		written, err = read[api.FileInfo](c.WriteFileWithBody(ctx, ref, params, "application/octet-stream", count.reader(file),
			func(_ context.Context, req *http.Request) error {
				if req.ContentLength = began.Size() - params.Offset; req.ContentLength == 0 {
					req.Body = http.NoBody
				}
				return nil
			}))
		if err != nil && fault.Of(err).Reason == "upload_offset" { // less is left than there was: ask again
			err = fault.Wrap(err, fault.Unavailable, "the upload of %s was lost in part", file.Name())
		}
		return params.Offset > before, err
	})
	if interrupted(ctx) {
		return written, fault.New(fault.Cancelled, "the copy was given up; %s:%s is as it was, and the same copy goes on where this one ended", ref, params.Path)
	}
	return written, err
}

// fetch copies one file out of a sandbox, each byte once.
type fetch struct {
	a     *app
	c     *client
	user  string
	from  place
	stat  api.FileInfo
	count *counter
	at    int64 // bytes that are there
	kept  bool  // they outlive hutch
}

// all writes the file from at on, and goes on where the connection breaks as long as
// the file is the same.
func (d *fetch) all(ctx context.Context, w io.Writer) error {
	asked := false
	return d.a.keepAsking(ctx, func() (bool, error) {
		if asked {
			now, err := read[api.FileInfo](d.c.StatFile(ctx, d.from.ref, &api.StatFileParams{Path: d.from.path, User: d.user}))
			if err != nil {
				return false, err
			}
			if now.Size != d.stat.Size || !now.ModifiedAt.Equal(d.stat.ModifiedAt.Time) {
				return false, fault.New(fault.Conflict, "%s:%s changed while it was copied; copy it again", d.from.ref, d.from.path)
			}
		}
		asked = true
		resp, err := d.c.ReadFile(ctx, d.from.ref, &api.ReadFileParams{Path: d.from.path, User: d.user, Offset: d.at})
		body, err := open(resp, err)
		if err != nil {
			return false, err
		}
		defer body.Close()
		d.count.n.Store(d.at)
		d.count.failed.Store(false)
		n, err := io.Copy(w, d.count.reader(body))
		d.at += n
		if err != nil && ctx.Err() == nil && d.count.failed.Load() {
			// A file without a size, as those of /proc, is another one each time.
			kind := fault.Unavailable
			if d.stat.Size == 0 {
				kind = fault.Internal
			}
			return n > 0, fault.Wrap(err, kind, "the connection broke after %d bytes of %s:%s; copy it again", d.at, d.from.ref, d.from.path)
		}
		return n > 0, err
	})
}

// file writes the file beside its name and puts it there when it is whole.
func (d *fetch) file(ctx context.Context, name string) error {
	part, err := d.part(name)
	if err != nil {
		return localFault("write", name, err)
	}
	defer part.Close()
	defer func() {
		if !d.kept {
			_ = os.Remove(part.Name())
		}
	}()
	if d.at, err = part.Seek(0, io.SeekEnd); err == nil && d.at > d.stat.Size {
		if err = part.Truncate(0); err == nil {
			d.at, err = part.Seek(0, io.SeekStart)
		}
	}
	if err != nil {
		return localFault("write", name, err)
	}
	if err := d.all(ctx, part); err != nil {
		if fault.Is(err, fault.Conflict) {
			d.kept = false
		}
		if _, known := err.(*fault.Fault); known { //nolint:errorlint // one of a call, or of this machine
			return err
		}
		return localFault("write", name, err)
	}
	err = part.Chmod(fileMode(d.stat))
	if err == nil {
		err = os.Rename(part.Name(), name)
	}
	if err != nil {
		return localFault("write", name, err)
	}
	d.kept = true // under its name
	return nil
}

// part opens what is there of a copy; that of a large file outlives hutch.
func (d *fetch) part(name string) (*os.File, error) {
	dir, base := filepath.Split(name)
	if d.stat.Size >= resumeFrom {
		key := copyKey(d.from.ref, d.from.path, d.stat.Size, d.stat.ModifiedAt.UnixNano(), d.user)
		f, err := os.OpenFile(filepath.Join(dir, "."+base+".hutch-"+key), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			d.kept = true
			return f, nil
		}
		f.Close() // another hutch is at it
	}
	return os.CreateTemp(filepath.Clean(dir), "."+base+".*")
}

// goesOn says that the same copy goes on, where it does.
func (d *fetch) goesOn() string {
	if !d.kept {
		return ""
	}
	return ", and the same copy goes on where this one ended"
}
