package guest_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guest/guesttest"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// write sends a file; commit says whether it is finished.
func write(t *testing.T, a *guesttest.Agent, h *guestproto.WriteHeader, data []byte, commit bool) (*guestproto.WriteResponse, error) {
	t.Helper()
	s, err := a.Client.Files.Write(t.Context())
	if err != nil {
		return nil, err
	}
	err = s.Send(&guestproto.WriteRequest{Part: &guestproto.WriteRequest_Header{Header: h}})
	for part := range slices.Chunk(data, guestproto.Chunk) {
		if err != nil {
			break
		}
		err = s.Send(&guestproto.WriteRequest{Part: &guestproto.WriteRequest_Data{Data: part}})
	}
	if commit && err == nil {
		err = s.Send(&guestproto.WriteRequest{Part: &guestproto.WriteRequest_Commit{Commit: true}})
	}
	if err != nil && !errors.Is(err, io.EOF) { // io.EOF: the answer says why
		return nil, err
	}
	return s.CloseAndReceive()
}

func mustWrite(t *testing.T, a *guesttest.Agent, path string, data string) *guestproto.Entry {
	t.Helper()
	r, err := write(t, a, &guestproto.WriteHeader{Path: []byte(path)}, []byte(data), true)
	if err != nil {
		t.Fatalf("write %s: %v", path, err)
	}
	return r.Entry
}

func read(t *testing.T, a *guesttest.Agent, req *guestproto.ReadRequest) (*guestproto.Entry, []byte, error) {
	t.Helper()
	s, err := a.Client.Files.Read(t.Context(), req)
	if err != nil {
		return nil, nil, err
	}
	defer s.Close()
	var e *guestproto.Entry
	var data []byte
	for {
		r, err := s.Receive()
		if errors.Is(err, io.EOF) {
			return e, data, nil
		}
		if err != nil {
			return e, data, err
		}
		if r.Entry != nil {
			e = r.Entry
		}
		data = append(data, r.Data...)
	}
}

func list(t *testing.T, a *guesttest.Agent, path string, depth int32) ([]string, error) {
	t.Helper()
	s, err := a.Client.Files.List(t.Context(), &guestproto.ListFilesRequest{Path: []byte(path), Depth: depth})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	var names []string
	for {
		r, err := s.Receive()
		if errors.Is(err, io.EOF) {
			return names, nil
		}
		if err != nil {
			return names, err
		}
		for _, e := range r.Entries {
			names = append(names, string(e.Path))
		}
	}
}

// E4: what is written is read again, of every size and at every offset.
func TestE4WriteAndRead(t *testing.T) {
	t.Parallel()
	a := boot(t)
	for _, size := range []int{0, 1, guestproto.Chunk, guestproto.Chunk + 1, 5 << 20} {
		data := bytes.Repeat([]byte("0123456789abcdefg"), size/17+1)[:size]
		path := fmt.Sprintf("deep/er/%d", size)
		e := mustWrite(t, a, path, string(data))
		if e.Size != int64(size) || e.Mode != 0o644 || string(e.Path) != "/workspace/"+path || e.Type != guestproto.FileType_FILE_TYPE_FILE {
			t.Errorf("entry %v", e)
		}
		if _, got, err := read(t, a, &guestproto.ReadRequest{Path: []byte(path)}); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes: read %d, %v", size, len(got), err)
		}
		from, n := int64(size/3), int64(size/2)
		if _, got, err := read(t, a, &guestproto.ReadRequest{Path: []byte(path), Offset: from, Limit: n}); err != nil || n > 0 && !bytes.Equal(got, data[from:from+n]) {
			t.Errorf("%d bytes, a part: read %d, %v", size, len(got), err)
		}
	}
	if _, got, err := read(t, a, &guestproto.ReadRequest{Path: []byte("deep/er/1"), Offset: 100}); err != nil || len(got) != 0 {
		t.Errorf("behind the end: %q, %v", got, err)
	}
}

// E4: a write shows whole or not at all, keeps the old file's mode, and leaves nothing
// behind when it is not committed.
func TestE4WriteIsAtomic(t *testing.T) {
	t.Parallel()
	a := boot(t)
	dir := filepath.Join(a.Root, "workspace")
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	before, err := os.Open(filepath.Join(dir, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	_, err = write(t, a, &guestproto.WriteHeader{Path: []byte("f")}, []byte("half"), false)
	wantFault(t, err, fault.InvalidArgument, "no_commit")
	if got, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(got) != "old" {
		t.Fatalf("got %q, %v", got, err)
	}
	when := time.Date(2020, 2, 3, 4, 5, 6, 7, time.UTC)
	r, err := write(t, a, &guestproto.WriteHeader{Path: []byte("f"), ModifiedUnixNano: when.UnixNano()}, []byte("new"), true)
	if err != nil || r.InPlace || r.Entry.Mode != 0o600 || r.Entry.ModifiedUnixNano != when.UnixNano() {
		t.Fatalf("got %v, %v", r, err)
	}
	if old, err := io.ReadAll(before); err != nil || string(old) != "old" {
		t.Errorf("a reader that had it open got %q, %v", old, err)
	}
	if r, err := write(t, a, &guestproto.WriteHeader{Path: []byte("f"), Mode: 0o755}, nil, true); err != nil || r.Entry.Mode != 0o755 || r.Entry.Size != 0 {
		t.Errorf("with a mode: %v, %v", r, err)
	}
	names, err := os.ReadDir(dir)
	if err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// E4: a symbolic link is written through, a device in place; a directory is refused.
func TestE4WriteTargets(t *testing.T) {
	t.Parallel()
	a := boot(t)
	dir := filepath.Join(a.Root, "workspace")
	mustWrite(t, a, "real", "1")
	if err := os.Symlink("real", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	mustWrite(t, a, "link", "2")
	if got, err := os.ReadFile(filepath.Join(dir, "real")); err != nil || string(got) != "2" {
		t.Errorf("got %q, %v", got, err)
	}
	st, err := a.Client.Files.Stat(t.Context(), &guestproto.StatRequest{Path: []byte("link")})
	if err != nil || st.Entry.Type != guestproto.FileType_FILE_TYPE_SYMLINK || string(st.Entry.SymlinkTarget) != "real" {
		t.Errorf("the link: %v, %v", st, err)
	}
	st, err = a.Client.Files.Stat(t.Context(), &guestproto.StatRequest{Path: []byte("link"), Follow: true})
	if err != nil || st.Entry.Type != guestproto.FileType_FILE_TYPE_FILE || st.Entry.Size != 1 {
		t.Errorf("followed: %v, %v", st, err)
	}
	if err := os.Symlink("/dev/null", filepath.Join(dir, "null")); err != nil {
		t.Fatal(err)
	}
	if r, err := write(t, a, &guestproto.WriteHeader{Path: []byte("null")}, []byte("gone"), true); err != nil || !r.InPlace {
		t.Errorf("a device: %v, %v", r, err)
	}
	_, err = write(t, a, &guestproto.WriteHeader{Path: []byte(".")}, nil, true)
	wantFault(t, err, fault.InvalidArgument, "is_a_directory")
	_, _, err = read(t, a, &guestproto.ReadRequest{Path: []byte(".")})
	wantFault(t, err, fault.InvalidArgument, "is_a_directory")
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, _, err = read(t, a, &guestproto.ReadRequest{Path: []byte("fifo")})
	wantFault(t, err, fault.InvalidArgument, "not_a_file")
	_, err = write(t, a, &guestproto.WriteHeader{Path: []byte("real/below")}, nil, true)
	wantFault(t, err, fault.InvalidArgument, "not_a_directory")
}

// E4: paths that no system has are refused, others are the kernel's to judge.
func TestE4Paths(t *testing.T) {
	t.Parallel()
	a := boot(t)
	for name, path := range map[string]string{
		"empty": "", "NUL": "a\x00b", "too long": "/" + strings.Repeat("a/", 3000), "a long part": strings.Repeat("x", 300),
	} {
		_, err := a.Client.Files.Stat(t.Context(), &guestproto.StatRequest{Path: []byte(path)})
		t.Run(name, func(t *testing.T) { wantFault(t, err, fault.InvalidArgument, "") })
	}
	_, err := a.Client.Files.Stat(t.Context(), &guestproto.StatRequest{Path: []byte("none")})
	wantFault(t, err, fault.NotFound, "")
	for _, path := range []string{"gr\u00fc\u00df/\u65e5\u672c \U0001F980", "../workspace/up", "not\xffutf8", " \n"} {
		mustWrite(t, a, path, "x")
		if _, got, err := read(t, a, &guestproto.ReadRequest{Path: []byte(path)}); err != nil || string(got) != "x" {
			t.Errorf("%q: %q, %v", path, got, err)
		}
	}
	names, err := list(t, a, "/workspace", 9)
	if want := []string{"/workspace/ \n", "/workspace/gr\u00fc\u00df", "/workspace/gr\u00fc\u00df/\u65e5\u672c \U0001F980", "/workspace/not\xffutf8", "/workspace/up"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("listed %q, %v", names, err)
	}
}

// E4: list, move, remove, make.
func TestE4ListMoveRemoveMake(t *testing.T) {
	t.Parallel()
	a := boot(t)
	for i := range 3000 {
		if err := os.WriteFile(filepath.Join(a.Root, "workspace", fmt.Sprintf("%04d-%s", i, strings.Repeat("n", 100))), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if names, err := list(t, a, ".", 1); err != nil || len(names) != 3000 || !slices.IsSorted(names) {
		t.Errorf("listed %d, %v", len(names), err)
	}
	_, err := list(t, a, "none", 1)
	wantFault(t, err, fault.NotFound, "")
	_, err = list(t, a, "0000-"+strings.Repeat("n", 100), 1)
	wantFault(t, err, fault.InvalidArgument, "not_a_directory")

	made, err := a.Client.Files.MakeDir(t.Context(), &guestproto.MakeDirRequest{Path: []byte("/a/b/c"), Mode: 0o700})
	if err != nil || made.Existed || made.Entry.Mode != 0o700 || made.Entry.Type != guestproto.FileType_FILE_TYPE_DIRECTORY {
		t.Fatalf("got %v, %v", made, err)
	}
	if made, err = a.Client.Files.MakeDir(t.Context(), &guestproto.MakeDirRequest{Path: []byte("/a/b/c/")}); err != nil || !made.Existed {
		t.Errorf("again: %v, %v", made, err)
	}
	mustWrite(t, a, "/a/b/c/f", "x")
	_, err = a.Client.Files.MakeDir(t.Context(), &guestproto.MakeDirRequest{Path: []byte("/a/b/c/f")})
	wantFault(t, err, fault.Conflict, "exists")
	moved, err := a.Client.Files.Move(t.Context(), &guestproto.MoveRequest{Source: []byte("/a/b"), Destination: []byte("/new/place")})
	if err != nil || string(moved.Entry.Path) != "/new/place" {
		t.Fatalf("moved: %v, %v", moved, err)
	}
	_, err = a.Client.Files.Move(t.Context(), &guestproto.MoveRequest{Source: []byte("/a/b"), Destination: []byte("/x")})
	wantFault(t, err, fault.NotFound, "")
	if names, err := list(t, a, "/new", 5); err != nil || !slices.Equal(names, []string{"/new/place", "/new/place/c", "/new/place/c/f"}) {
		t.Errorf("listed %v, %v", names, err)
	}
	remove := func(path string, recursive bool) error {
		_, err := a.Client.Files.Remove(t.Context(), &guestproto.RemoveRequest{Path: []byte(path), Recursive: recursive})
		return err
	}
	wantFault(t, remove("/new", false), fault.FailedPrecondition, "not_empty")
	if err := remove("/new", true); err != nil {
		t.Error(err)
	}
	wantFault(t, remove("/new", true), fault.NotFound, "")
	wantFault(t, remove("/..", true), fault.InvalidArgument, "")
}

// E4: watch tells what happens below, in directories that were made meanwhile too.
func TestE4Watch(t *testing.T) {
	t.Parallel()
	a := boot(t)
	s, err := a.Client.Files.Watch(t.Context(), &guestproto.WatchRequest{Path: []byte("."), Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Receive(); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	await := func(want ...string) {
		t.Helper()
		for !slices.ContainsFunc([]bool{true}, func(bool) bool {
			return !slices.ContainsFunc(want, func(w string) bool { return !seen[w] })
		}) {
			r, err := s.Receive()
			if err != nil {
				t.Fatalf("%v; seen %v", err, seen)
			}
			for _, c := range r.Changes {
				seen[strings.TrimPrefix(c.Type.String(), "CHANGE_TYPE_")+" "+string(c.Name)] = true
			}
		}
	}
	dir := filepath.Join(a.Root, "workspace")
	for _, step := range []func() error{
		func() error { return os.MkdirAll(filepath.Join(dir, "a/b"), 0o755) },
		func() error { return os.WriteFile(filepath.Join(dir, "a/b/f"), []byte("x"), 0o644) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	await("CREATE a", "CREATE a/b", "CREATE a/b/f")
	if err := os.WriteFile(filepath.Join(dir, "a/b/f"), []byte("xy"), 0o644); err != nil {
		t.Fatal(err)
	}
	await("WRITE a/b/f")
	if err := os.Rename(filepath.Join(dir, "a/b"), filepath.Join(dir, "c")); err != nil {
		t.Fatal(err)
	}
	await("RENAME a/b", "CREATE c", "CREATE c/f")
	if err := os.Chmod(filepath.Join(dir, "c/f"), 0o600); err != nil {
		t.Fatal(err)
	}
	await("ATTRIBUTES c/f")
	if err := os.RemoveAll(filepath.Join(dir, "c")); err != nil {
		t.Fatal(err)
	}
	await("REMOVE c/f", "REMOVE c")
	_, err = a.Client.Files.Watch(t.Context(), &guestproto.WatchRequest{Path: []byte("none")})
	if err == nil {
		bad, _ := a.Client.Files.Watch(t.Context(), &guestproto.WatchRequest{Path: []byte("none")})
		_, err = bad.Receive()
		bad.Close()
	}
	wantFault(t, err, fault.NotFound, "")
}
