package guest

import (
	"syscall"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

// What the kernel says of a program that cannot be started is told for what it is: of a
// sandbox that is full, with what to do, and never as a fault of hutch's own.
func TestExecFault(t *testing.T) {
	p := program{args: []string{"x"}}
	for errno, want := range map[syscall.Errno]fault.Kind{
		syscall.ENOENT: fault.NotFound, syscall.EACCES: fault.PermissionDenied, syscall.E2BIG: fault.TooLarge,
		syscall.EAGAIN: fault.Unavailable, syscall.ENOMEM: fault.Unavailable, syscall.EMFILE: fault.Unavailable, syscall.EFAULT: fault.Unavailable,
	} {
		if f := fault.Of(p.execFault(errno)); f.Kind != want || want == fault.Unavailable && f.Reason != "process_limit" {
			t.Errorf("%v is %s (%s), want %s", errno, f.Kind, f.Reason, want)
		}
	}
	if err := p.execFault(nil); err != nil {
		t.Error(err)
	}
}
