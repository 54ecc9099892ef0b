package hostagent

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/hutchrun/hutch/internal/fault"
)

// BootID names the machine's present boot (random(4)): what ran under another one
// runs no more.
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fault.Wrap(err, fault.Unsupported, "the kernel's boot id cannot be read; is /proc mounted?")
	}
	return strings.TrimSpace(string(data)), nil
}

// memoryTotal is the machine's memory in bytes, 0 where the kernel does not say.
func memoryTotal() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}
