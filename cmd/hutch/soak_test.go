//go:build soak

package main

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/soakdoc"
)

// `make soak` runs what takes longer than `make test` may, and writes what it saw into
// docs/soak.md.

// cycles is how many sleeps and wakes, and stops and resumes, W3 speaks of.
const cycles = 500

// reading is what one installation holds at one time.
type reading struct {
	cycle int
	footprint
	extents, fds  int64
	pool, records int64 // bytes: used of the pool; journals and database
	memory        int64 // bytes of the server's resident memory
}

func (s *server) read(t *testing.T, b *box, cycle int) reading {
	t.Helper()
	l, err := layoutOf(s.data())
	if err != nil {
		t.Fatal(err)
	}
	r := reading{cycle: cycle, footprint: s.footprint(t)}
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	r.fds = int64(len(fds))

	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(l.data, "pool"), &st); err != nil {
		t.Fatal(err)
	}
	r.pool = int64(st.Blocks-st.Bfree) * st.Bsize
	id := b.get().ID
	_ = filepath.WalkDir(l.data, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		inPool := strings.HasPrefix(path, filepath.Join(l.data, "pool")+"/")
		if inPool && strings.Contains(path, id) {
			out, _ := exec.Command("filefrag", path).Output()
			_, rest, _ := strings.Cut(string(out), ": ")
			n, _ := strconv.ParseInt(strings.Fields(rest + " 0")[0], 10, 64)
			r.extents = max(r.extents, n)
		}
		if info, err := d.Info(); err == nil && !inPool && !strings.HasPrefix(d.Name(), "pool.") && !strings.HasSuffix(path, ".log") {
			r.records += info.Size()
		}
		return nil
	})
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if _, rest, ok := strings.Cut(string(status), "VmRSS:"); ok {
		kib, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		r.memory = kib << 10
	}
	return r
}

// W3: over 500 cycles extents, mounts, descriptors and stored bytes stay bounded, while
// the sandbox writes on as a working one does: a log that grows, a database that is
// overwritten in the middle, files that come and go.
func TestSoakW3Cycles(t *testing.T) {
	for _, kind := range [][2]string{{"sleep", "wake"}, {"stop", "resume"}} {
		t.Run(kind[0], func(t *testing.T) {
			b := newBox(t)
			b.sh("head -c 64000000 /dev/urandom > /workspace/db; : > /workspace/log; sync")
			began := time.Now()
			readings := []reading{}
			for i := 1; i <= cycles; i++ {
				b.sh(fmt.Sprintf(`cd /workspace
echo cycle %d >> log
for k in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=db bs=4096 count=1 conv=notrunc seek=$(( (%d * 7919 + k * 1543) %% 15000 )) status=none; done
head -c 2000000 /dev/urandom > tmp.$((%d %% 3))`, i, i, i))
				b.hutch(kind[0])
				b.hutch(kind[1])
				if i == 20 || i%100 == 0 {
					if got := b.sh("wc -l < /workspace/log"); got != fmt.Sprint(i) {
						t.Fatalf("after %d cycles the log has %s lines", i, got)
					}
					readings = append(readings, shared.read(t, b, i))
				}
			}
			first, last := readings[0], readings[len(readings)-1]
			within := func(what string, before, after, slack int64) {
				if after > before+slack {
					t.Errorf("%s grew from %d at cycle %d to %d at cycle %d", what, before, first.cycle, after, last.cycle)
				}
			}
			within("mounts", int64(first.mounts), int64(last.mounts), 0)
			within("loop devices", int64(first.loops), int64(last.loops), 0)
			within("network namespaces", int64(first.namespaces), int64(last.namespaces), 0)
			within("processes", int64(first.processes), int64(last.processes), 0)
			within("descriptors of the server", first.fds, last.fds, 10)
			within("the pool's bytes", first.pool, last.pool, 64e6)
			// Each cycle leaves rows for good: an operation and its events.
			within("bytes of journals and database", first.records, last.records, cycles*16<<10)
			within("memory of the server", first.memory, last.memory, 64<<20)
			within("extents", 0, last.extents, 20_000) // where a clone costs 0.3 s
			document(t, "cycles-"+kind[0], fmt.Sprintf("%d cycles of %s and %s", cycles, kind[0], kind[1]), cyclesTable(kind, readings, time.Since(began)))
		})
	}
}

// Twenty sandboxes, two hundred kills.
func TestSoakStorm(t *testing.T) {
	began := time.Now()
	st := newStorm(t, 20)
	st.rage(200, time.Second, 6*time.Second)
	t.Log(st.report())
	document(t, "storm", "A storm of kills", fmt.Sprintf("%s.\n\nIt took %s. Afterwards each sandbox answered, every acknowledged line was there, every program that was never\nstopped ran, and after their deletion the installation held no process, mount, loop device or namespace more than before.\n",
		st.report(), time.Since(began).Round(time.Second)))
}

func cyclesTable(kind [2]string, readings []reading, took time.Duration) string {
	var b strings.Builder
	fmt.Fprintf(&b, "One sandbox; before each %s it appends to a log, overwrites 8 random blocks of a 64 MB file and replaces a 2 MB\nfile. %d cycles took %s. Every line of the log was there.\n\n",
		kind[0], cycles, took.Round(time.Second))
	b.WriteString("| after cycle | extents of the disk | mounts | loop devices | network namespaces | processes | descriptors of the server | memory of the server | used of the pool | journals and database |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n")
	for _, r := range readings {
		fmt.Fprintf(&b, "| %d | %d | %d | %d | %d | %d | %d | %.0f MB | %.0f MB | %.1f MB |\n", r.cycle, r.extents, r.mounts, r.loops, r.namespaces,
			r.processes, r.fds, float64(r.memory)/1e6, float64(r.pool)/1e6, float64(r.records)/1e6)
	}
	return b.String()
}

// document writes a section of docs/soak.md.
func document(t *testing.T, mark, title, text string) {
	t.Helper()
	if t.Failed() {
		return
	}
	if err := soakdoc.Write("../../docs/soak.md", mark, title, text); err != nil {
		t.Fatal(err)
	}
}
