package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// machine is where and when the figures were made.
type machine struct {
	cores   int
	cpu     string // the processor's name
	memory  int64  // bytes
	kernel  string
	system  string // the distribution
	started time.Time
	load    string // load averages of 1, 5 and 15 minutes
}

func readMachine() (machine, error) {
	m := machine{cores: runtime.NumCPU(), started: time.Now()}
	meminfo, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, err
	}
	m.memory = kilobytes(meminfo, "MemTotal")
	if m.load, err = load(); err != nil {
		return m, err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return m, err
	}
	m.kernel = unix.ByteSliceToString(name.Release[:]) + " " + unix.ByteSliceToString(name.Machine[:])
	m.cpu = value("/proc/cpuinfo", "model name", ":")
	m.system = strings.Trim(value("/etc/os-release", "PRETTY_NAME", "="), `"`)
	return m, nil
}

// load reads the load averages, which say how much else the machine had to do.
func load() (string, error) {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(text))
	if len(fields) < 3 {
		return "", fmt.Errorf("/proc/loadavg has %q", text)
	}
	return strings.Join(fields[:3], ", "), nil
}

// value finds the first line "key SEPARATOR value" of a file; "unknown" without one.
func value(path, key, separator string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	for l := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(l, separator); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}
