package guest_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// E4: what has come of an upload that breaks off is kept, found by its key, and goes on.
func TestE4UploadGoesOn(t *testing.T) {
	t.Parallel()
	a := boot(t)
	const key = "0123456789abcdef"
	data := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	size := func() int64 {
		r, err := a.Client.Files.Stat(t.Context(), &guestproto.StatRequest{Path: []byte("/workspace/big"), Upload: key})
		if fault.Is(err, fault.NotFound) {
			return -1
		}
		if err != nil {
			t.Fatal(err)
		}
		return r.Entry.Size
	}
	if got := size(); got != -1 {
		t.Fatalf("before it began %d bytes have come", got)
	}
	header := func(offset int64) *guestproto.WriteHeader {
		return &guestproto.WriteHeader{Path: []byte("/workspace/big"), Upload: key, Offset: offset, Mode: 0o755}
	}
	half := int64(len(data) / 2)
	_, err := write(t, a, header(0), data[:half], false)
	wantFault(t, err, fault.InvalidArgument, "no_commit")
	if got := size(); got != half {
		t.Fatalf("%d bytes are kept, not %d", got, half)
	}
	_, err = a.Client.Files.Stat(t.Context(), &guestproto.StatRequest{Path: []byte("/workspace/big")})
	wantFault(t, err, fault.NotFound, "")
	_, err = write(t, a, header(half+1), data[half+1:], true)
	wantFault(t, err, fault.FailedPrecondition, "upload_offset")
	r, err := write(t, a, header(half-7), data[half-7:], true) // twice the same bytes are once there
	if err != nil || r.Entry.Size != int64(len(data)) || r.Entry.Mode != 0o755 {
		t.Fatalf("the rest: %v, %v", r, err)
	}
	_, got, err := read(t, a, &guestproto.ReadRequest{Path: []byte("/workspace/big")})
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("it has %d bytes, %v", len(got), err)
	}
	if got := size(); got != -1 {
		t.Errorf("after its end %d bytes are left", got)
	}
	for _, bad := range []string{"short", "../../../../etc/passwd", "0123456789abcde/"} {
		_, err = write(t, a, &guestproto.WriteHeader{Path: []byte("/workspace/big"), Upload: bad}, nil, true)
		wantFault(t, err, fault.InvalidArgument, "")
	}
	_, err = write(t, a, &guestproto.WriteHeader{Path: []byte("/workspace/big"), Offset: 5}, nil, true)
	wantFault(t, err, fault.InvalidArgument, "")
}

// What nobody takes up again goes away; what is younger stays.
func TestE4UploadsAreSwept(t *testing.T) {
	t.Parallel()
	a := boot(t)
	upload := func(name, key string, commit bool) {
		_, _ = write(t, a, &guestproto.WriteHeader{Path: []byte(filepath.Join("/workspace", name)), Upload: key}, []byte("x"), commit)
	}
	upload("old", "old-0123456789abcdef", false)
	upload("young", "young-0123456789abcdef", false)
	place := func(key string) string { return filepath.Join(a.Root, "/workspace/.hutch-upload-"+key) }
	day := time.Now().Add(-25 * time.Hour)
	if err := os.Chtimes(place("old-0123456789abcdef"), day, day); err != nil {
		t.Fatal(err)
	}
	upload("next", "next-0123456789abcdef", true)
	if _, err := os.Stat(place("old-0123456789abcdef")); !os.IsNotExist(err) {
		t.Errorf("the old one: %v", err)
	}
	if _, err := os.Stat(place("young-0123456789abcdef")); err != nil {
		t.Errorf("the young one: %v", err)
	}
}
