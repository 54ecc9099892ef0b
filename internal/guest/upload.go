package guest

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// uploadPrefix begins the names of what uploads have brought so far, each beside the
// file that it is to be.
const uploadPrefix = ".hutch-upload-"

// uploadAge is how old what nobody has taken up again gets.
const uploadAge = 24 * time.Hour

var uploadKey = regexp.MustCompile(`^[A-Za-z0-9_-]{16,64}$`)

// uploadPlace is where an upload to place keeps what has come.
func uploadPlace(place, key string) (string, error) {
	if !uploadKey.MatchString(key) {
		return "", fault.New(fault.InvalidArgument, "an upload's key has 16 to 64 letters, digits, - and _")
	}
	if real, err := filepath.EvalSymlinks(place); err == nil {
		place = real
	}
	return filepath.Join(filepath.Dir(place), uploadPrefix+key), nil
}

// takeUp opens what an upload has brought and goes on at offset. It runs with the user's
// rights. One writer at a time has it: the one of a connection that broke may not have
// heard of it yet.
func (w *writer) takeUp(key string, offset int64) error {
	place, err := uploadPlace(w.place, key)
	if err != nil {
		w.keep = true
		return err
	}
	f, err := os.OpenFile(place, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	w.file, w.temp, w.keep = f, place, true
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return fault.New(fault.Unavailable, "another call is at this upload; try again").Because("upload_busy")
		}
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errUploadInPlace()
	}
	// The one before may have put it into place between the open and the lock.
	if now, err := os.Lstat(place); err != nil || !os.SameFile(info, now) {
		return fault.New(fault.Unavailable, "the upload has just ended; look at the file, or send it anew").Because("upload_busy")
	}
	if info.Size() < offset {
		return fault.New(fault.FailedPrecondition, "%d bytes have come of this upload, so none can be put at %d; ask for its size and go on from there", info.Size(), offset).
			Because("upload_offset")
	}
	if err := f.Truncate(offset); err != nil {
		return err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	sweepUploads(filepath.Dir(place), place)
	return nil
}

// sweepUploads removes what nobody has taken up again from a directory.
func sweepUploads(dir, but string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // it may be closed to reading, and is not ours to tidy then
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if !strings.HasPrefix(e.Name(), uploadPrefix) || name == but || !e.Type().IsRegular() {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > uploadAge {
			_ = os.Remove(name) // another user's may stay
		}
	}
}

// errUploadInPlace refuses an upload to what cannot be put into place by a rename.
func errUploadInPlace() error {
	return fault.New(fault.FailedPrecondition, "the file can only be overwritten in place, so an upload to it cannot be taken up again; write it without a key").
		Because("upload_in_place")
}
