package gvisor

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxUnlinked is how much of deleted but open files a save may carry, in bytes. They
// are copied into the image while the sandbox stands still, and out of it again before
// it wakes, at the disk's speed.
const maxUnlinked = 4 << 30

// unlinkedBytes sums what the deleted regular files that the processes hold open take
// on the disk, each file once. Holes do not count: they are not saved.
func unlinkedBytes(pids ...int) (int64, error) {
	type file struct{ dev, ino uint64 }
	seen := map[file]bool{}
	var sum int64
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/fd", pid)
		names, err := os.ReadDir(dir)
		if err != nil {
			return 0, err
		}
		for _, name := range names {
			path := dir + "/" + name.Name()
			link, err := os.Readlink(path)
			// The sentry's own memory file is a deleted one, too.
			if err != nil || !strings.HasSuffix(link, " (deleted)") || strings.HasPrefix(link, "/memfd:") {
				continue
			}
			var st unix.Stat_t
			if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 0 {
				continue
			}
			if id := (file{st.Dev, st.Ino}); !seen[id] {
				seen[id] = true
				sum += st.Blocks * 512 // stat(2)
			}
		}
	}
	return sum, nil
}
