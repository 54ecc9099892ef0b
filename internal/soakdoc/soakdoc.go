// Package soakdoc keeps docs/soak.md: what the tests of `make soak` saw in their last run.
// Each has a section there that its own run writes anew.
package soakdoc

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Write puts a section into the document at path, in the place of the one with the same
// mark.
func Write(path, mark, title, text string) error {
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(put(string(old), mark, title, text, time.Now())), 0o644)
}

func put(doc, mark, title, text string, now time.Time) string {
	begin, end := "<!-- "+mark+" -->\n", "<!-- /"+mark+" -->\n"
	section := fmt.Sprintf("%s## %s\n\n%s; %d cores, %s.\n\n%s%s", begin, title, now.UTC().Format("2006-01-02 15:04 UTC"),
		runtime.NumCPU(), kernel(), strings.TrimRight(text, "\n")+"\n", end)
	if i, j := strings.Index(doc, begin), strings.Index(doc, end); i >= 0 && j > i {
		return doc[:i] + section + doc[j+len(end):]
	}
	return strings.TrimRight(doc, "\n") + "\n\n" + section
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown kernel"
	}
	return "kernel " + unix.ByteSliceToString(u.Release[:])
}
