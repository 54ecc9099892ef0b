package runtime

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"lukechampine.com/blake3"

	"github.com/hutchrun/hutch/internal/fault"
)

// ChunkBytes is the size of the pieces that an image's digests are taken of.
const ChunkBytes = 4 << 20

// Meta says what an image was captured with.
type Meta struct {
	Runtime     string `json:"runtime"`      // Capabilities.Runtime
	Version     string `json:"version"`      // Capabilities.Version
	CPUFeatures string `json:"cpu_features"` // CPUFeatures of the machine
}

// Manifest describes a sealed image. A runtime may restore damaged pages without an
// error (gVisor does), so these digests are what a restore has to be guarded by.
type Manifest struct {
	Meta
	Files []SealedFile `json:"files"` // by name
	Root  string       `json:"root"`  // digest over names, sizes and digests of all files
}

// SealedFile is one file of an image.
type SealedFile struct {
	Name   string   `json:"name"`
	Bytes  int64    `json:"bytes"`
	Chunks []string `json:"chunks"` // BLAKE3 of each ChunkBytes, hexadecimal; the last may be shorter
}

// Bytes is the size of all files.
func (m Manifest) Bytes() int64 {
	var sum int64
	for _, f := range m.Files {
		sum += f.Bytes
	}
	return sum
}

// Seal takes the digests of all files of an image and syncs them and their directory,
// so that after it returns the image outlives a power cut. The caller stores the
// manifest elsewhere: the directory holds the image and nothing else.
func Seal(ctx context.Context, dir string, meta Meta) (Manifest, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return Manifest{}, sealFault(err)
	}
	m := Manifest{Meta: meta}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			return Manifest{}, sealFault(errors.New(e.Name() + " is not a regular file"))
		}
		info, err := e.Info()
		if err != nil {
			return Manifest{}, sealFault(err)
		}
		m.Files = append(m.Files, SealedFile{Name: e.Name(), Bytes: info.Size(), Chunks: make([]string, chunks(info.Size()))})
	}
	err = eachChunk(ctx, dir, m.Files, func(f *SealedFile, chunk int, digest string) error {
		f.Chunks[chunk] = digest
		return nil
	})
	if err == nil {
		err = syncAll(dir, m.Files)
	}
	if err != nil {
		return Manifest{}, sealFault(err)
	}
	m.Root = m.root()
	return m, nil
}

func sealFault(err error) error {
	switch {
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Cancelled, "the save was cancelled")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.DeadlineExceeded, "the save took too long; try again")
	case errors.Is(err, unix.ENOSPC):
		return fault.Wrap(err, fault.Unavailable, "the host has no room left for saved memory; free some and try again").Because("pool_full")
	}
	return fault.Wrap(err, fault.Internal, "the saved memory could not be made safe on disk")
}

// Verify reads an image in full and compares it with its manifest. A difference, also
// a file that the manifest does not name, is DataCorrupt, naming the file and the byte
// where it begins to differ, to the chunk.
func Verify(ctx context.Context, dir string, m Manifest) error {
	if got := m.root(); got != m.Root {
		return corrupt("its manifest is damaged")
	}
	for _, f := range m.Files {
		if f.Name == "" || f.Name != filepath.Base(f.Name) || len(f.Chunks) != chunks(f.Bytes) {
			return corrupt("its manifest is damaged at %q", f.Name)
		}
		info, err := os.Lstat(filepath.Join(dir, f.Name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return corrupt("the file %s is missing", f.Name)
		case err != nil:
			return fault.Wrap(err, fault.Internal, "the saved memory cannot be read")
		case !info.Mode().IsRegular() || info.Size() != f.Bytes:
			return corrupt("the file %s has %d bytes, not %d", f.Name, info.Size(), f.Bytes)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fault.Wrap(err, fault.Internal, "the saved memory cannot be read")
	}
	for _, e := range entries {
		if !slices.ContainsFunc(m.Files, func(f SealedFile) bool { return f.Name == e.Name() }) {
			return corrupt("there is a file %s too many", e.Name())
		}
	}
	err = eachChunk(ctx, dir, m.Files, func(f *SealedFile, chunk int, digest string) error {
		if digest != f.Chunks[chunk] {
			return corrupt("the file %s differs at byte %d", f.Name, int64(chunk)*ChunkBytes)
		}
		return nil
	})
	if err == nil || fault.Is(err, fault.DataCorrupt) {
		return err
	}
	switch {
	case errors.Is(err, context.Canceled):
		return fault.Wrap(err, fault.Cancelled, "the check of the saved memory was cancelled")
	case errors.Is(err, context.DeadlineExceeded):
		return fault.Wrap(err, fault.DeadlineExceeded, "the check of the saved memory took too long; try again")
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, unix.EIO):
		return fault.Wrap(err, fault.DataCorrupt, "the saved memory is damaged: it cannot be read in full; it cannot be woken, resume the disk instead")
	}
	return fault.Wrap(err, fault.Internal, "the saved memory cannot be read")
}

func corrupt(format string, args ...any) error {
	f := fault.New(fault.DataCorrupt, format, args...)
	f.Message = "the saved memory is damaged: " + f.Message + "; it cannot be woken, resume the disk instead"
	return f
}

// RunsOn says whether an image can be restored by a runtime on a machine: nil, or
// FailedPrecondition with the reason "runtime", "runtime_version" or "cpu_features".
func (m Manifest) RunsOn(c Capabilities, cpuFeatures string) error {
	if m.Runtime != c.Runtime {
		return fault.New(fault.FailedPrecondition, "the memory was saved under the runtime %s and cannot be woken under %s; resume the disk instead", m.Runtime, c.Runtime).Because("runtime")
	}
	if m.Version != c.Version && !slices.Contains(c.Older, m.Version) {
		return fault.New(fault.FailedPrecondition, "the memory was saved by version %s of the runtime and cannot be woken by %s; install that version, or resume the disk", m.Version, c.Version).Because("runtime_version")
	}
	here := strings.Fields(cpuFeatures)
	for feature := range strings.FieldsSeq(m.CPUFeatures) {
		if !slices.Contains(here, feature) {
			return fault.New(fault.FailedPrecondition, "the memory was saved on a CPU with the feature %s, which this machine lacks; wake it on a machine like the first, or resume the disk", feature).Because("cpu_features")
		}
	}
	return nil
}

// CPUFeatures lists the features of this machine's CPU, sorted, with spaces between
// (the flags of /proc/cpuinfo).
func CPUFeatures() (string, error) {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		if key = strings.TrimSpace(key); key == "flags" || key == "Features" { // x86, arm64
			flags := strings.Fields(value)
			slices.Sort(flags)
			return strings.Join(slices.Compact(flags), " "), nil
		}
	}
	return "", errors.New("/proc/cpuinfo names no CPU features")
}

// root is the digest that stands for the whole image.
func (m Manifest) root() string {
	h := blake3.New(32, nil)
	for _, f := range m.Files {
		_, _ = io.WriteString(h, f.Name)
		var size [9]byte // a zero byte ends the name
		for i := range 8 {
			size[1+i] = byte(f.Bytes >> (8 * i))
		}
		_, _ = h.Write(size[:])
		for _, c := range f.Chunks {
			_, _ = io.WriteString(h, c)
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

func chunks(bytes int64) int { return int((bytes + ChunkBytes - 1) / ChunkBytes) }

// eachChunk takes the digest of each chunk of the files, on all CPUs, and hands it to
// see, which different goroutines call at the same time for different chunks. It stops
// at the first error.
func eachChunk(ctx context.Context, dir string, files []SealedFile, see func(f *SealedFile, chunk int, digest string) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for i := range files {
		f := &files[i]
		file, err := os.Open(filepath.Join(dir, f.Name))
		if err != nil {
			return err
		}
		var next atomic.Int64
		var workers sync.WaitGroup
		for range min(goruntime.GOMAXPROCS(0), len(f.Chunks)) {
			workers.Go(func() {
				buf := make([]byte, min(ChunkBytes, f.Bytes))
				for chunk := int(next.Add(1)) - 1; chunk < len(f.Chunks) && ctx.Err() == nil; chunk = int(next.Add(1)) - 1 {
					digest, err := chunkDigest(file, buf, f.Bytes, chunk)
					if err == nil {
						err = see(f, chunk, digest)
					}
					if err != nil {
						cancel(err)
					}
				}
			})
		}
		workers.Wait()
		_ = file.Close()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// zeroChunk is the digest of a whole chunk of zeros, which a hole in a sparse file is.
var zeroChunk = sync.OnceValue(func() string {
	sum := blake3.Sum256(make([]byte, ChunkBytes))
	return hex.EncodeToString(sum[:])
})

func chunkDigest(file *os.File, buf []byte, size int64, chunk int) (string, error) {
	begin := int64(chunk) * ChunkBytes
	buf = buf[:min(ChunkBytes, size-begin)]
	if len(buf) == ChunkBytes {
		// The offset that seeking moves is not used: reads name theirs.
		data, err := unix.Seek(int(file.Fd()), begin, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && data >= begin+ChunkBytes {
			return zeroChunk(), nil
		}
	}
	if n, err := file.ReadAt(buf, begin); n < len(buf) {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return "", err
	}
	sum := blake3.Sum256(buf)
	return hex.EncodeToString(sum[:]), nil
}

func syncAll(dir string, files []SealedFile) error {
	for _, f := range files {
		if err := syncFile(filepath.Join(dir, f.Name)); err != nil {
			return err
		}
	}
	return syncFile(dir)
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
