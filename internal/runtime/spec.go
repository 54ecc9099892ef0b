package runtime

import (
	"path/filepath"

	"github.com/hutchrun/hutch/internal/fault"
)

// Validate refuses a Spec that no driver can boot (InvalidArgument). A driver may
// have narrower limits of its own.
func (s Spec) Validate() error {
	bad := func(format string, args ...any) error {
		f := fault.New(fault.InvalidArgument, format, args...)
		f.Message = "the sandbox cannot be started: " + f.Message
		return f
	}
	switch {
	case s.ID == "" || s.ID != filepath.Base(s.ID) || s.ID == "." || s.ID == "..":
		return bad("its id %q is not a file name", s.ID)
	case !filepath.IsAbs(s.Dir):
		return bad("its directory %q is not an absolute path", s.Dir)
	case !filepath.IsAbs(s.Root):
		return bad("its root file system %q is not an absolute path", s.Root)
	case len(s.Args) == 0:
		return bad("there is no command to run as PID 1")
	case s.CPUs < 1:
		return bad("%d CPUs are fewer than 1", s.CPUs)
	case s.MemoryBytes < 1:
		return bad("%d bytes of memory are fewer than 1", s.MemoryBytes)
	}
	return nil
}
