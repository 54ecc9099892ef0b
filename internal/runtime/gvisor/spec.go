package gvisor

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/runtime"
)

// The parts of the OCI runtime specification (config.json) that are used here.
type (
	ociSpec struct {
		Version  string     `json:"ociVersion"`
		Process  ociProcess `json:"process"`
		Root     ociRoot    `json:"root"`
		Hostname string     `json:"hostname,omitempty"`
		Mounts   []ociMount `json:"mounts"`
		Linux    ociLinux   `json:"linux"`
	}
	ociProcess struct {
		User struct {
			UID int `json:"uid"`
			GID int `json:"gid"`
		} `json:"user"`
		Args            []string            `json:"args"`
		Env             []string            `json:"env,omitempty"`
		Cwd             string              `json:"cwd"`
		Capabilities    map[string][]string `json:"capabilities"`
		NoNewPrivileges bool                `json:"noNewPrivileges"`
	}
	ociRoot struct {
		Path string `json:"path"`
	}
	ociMount struct {
		Destination string   `json:"destination"`
		Type        string   `json:"type"`
		Source      string   `json:"source,omitempty"`
		Options     []string `json:"options,omitempty"`
	}
	ociLinux struct {
		Namespaces []ociNamespace `json:"namespaces"`
		Resources  ociResources   `json:"resources"`
	}
	ociNamespace struct {
		Type string `json:"type"`
		Path string `json:"path,omitempty"`
	}
	ociResources struct {
		Memory struct {
			Limit int64 `json:"limit"`
		} `json:"memory"`
		CPU struct {
			Quota  int64 `json:"quota"`
			Period int64 `json:"period"`
		} `json:"cpu"`
	}
)

// capabilities is the full set inside: root of a sandbox is root of its own computer.
// None of them is one of the host, where the sentry has a small fixed set.
var capabilities = []string{
	"CAP_AUDIT_CONTROL", "CAP_AUDIT_READ", "CAP_AUDIT_WRITE", "CAP_BLOCK_SUSPEND",
	"CAP_BPF", "CAP_CHECKPOINT_RESTORE", "CAP_CHOWN", "CAP_DAC_OVERRIDE",
	"CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_IPC_OWNER",
	"CAP_KILL", "CAP_LEASE", "CAP_LINUX_IMMUTABLE", "CAP_MAC_ADMIN", "CAP_MAC_OVERRIDE",
	"CAP_MKNOD", "CAP_NET_ADMIN", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST",
	"CAP_NET_RAW", "CAP_PERFMON", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP",
	"CAP_SETUID", "CAP_SYSLOG", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_CHROOT",
	"CAP_SYS_MODULE", "CAP_SYS_NICE", "CAP_SYS_PACCT", "CAP_SYS_PTRACE",
	"CAP_SYS_RAWIO", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG",
	"CAP_WAKE_ALARM",
}

// mounts are the file systems inside, the same in every sandbox: a restore refuses
// others than those of the captured one. /tmp is none of them, its files stay on the
// disk.
var mounts = []ociMount{
	{Destination: "/proc", Type: "proc"},
	{Destination: "/sys", Type: "sysfs"},
	{Destination: "/sys/fs/cgroup", Type: "cgroup"},
	{Destination: "/dev", Type: "tmpfs"},
	{Destination: "/dev/pts", Type: "devpts"},
	{Destination: "/dev/shm", Type: "tmpfs", Options: []string{"mode=1777"}},
	{Destination: "/run", Type: "tmpfs", Options: []string{"mode=755"}},
}

// cpuPeriod is the length in microseconds of the period that the CPU limit is counted
// in.
const cpuPeriod = 100_000

func newSpec(spec runtime.Spec, extra []ociMount) ociSpec {
	s := ociSpec{Version: "1.1.0", Hostname: spec.Hostname}
	s.Process.Args, s.Process.Env, s.Process.Cwd = spec.Args, spec.Env, "/"
	s.Process.Capabilities = map[string][]string{
		"bounding": capabilities, "effective": capabilities, "permitted": capabilities,
		"inheritable": {}, "ambient": {},
	}
	s.Root.Path = spec.Root
	s.Mounts = append(append(s.Mounts, mounts...), extra...)
	s.Linux.Namespaces = []ociNamespace{
		{Type: "pid"}, {Type: "mount"}, {Type: "ipc"}, {Type: "uts"},
		{Type: "network", Path: spec.NetNS},
	}
	s.Linux.Resources.Memory.Limit = spec.MemoryBytes
	s.Linux.Resources.CPU.Period = cpuPeriod
	s.Linux.Resources.CPU.Quota = int64(spec.CPUs) * cpuPeriod
	return s
}

func writeSpec(dir string, s ociSpec) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600)
}

const (
	logName   = "runsc.log" // what runsc has to say, in Spec.Dir
	panicName = "panic.log" // the sentry's panics
)

// flags are runsc's global flags for one sandbox.
func flags(spec runtime.Spec, debug bool) []string {
	network := "sandbox"
	if spec.NetNS == "" {
		network = "none"
	}
	f := []string{
		"--root=" + spec.Dir,
		"--log=" + filepath.Join(spec.Dir, logName),
		"--log-format=json",
		"--panic-log=" + filepath.Join(spec.Dir, panicName),
		"--platform=systrap",
		"--network=" + network,
		"--overlay2=none",        // the caller's overlay is the disk
		"--ignore-cgroups",       // ours; see cgroup.go
		"--host-settings=ignore", // the machine's sysctls are the operator's
		"--allow-suid",           // sudo inside
		"--net-raw",              // ping and Docker inside; the caller filters what leaves the namespace
		"--allow-packet-socket-write",
	}
	if debug {
		f = append(f, "--debug", "--debug-log="+filepath.Join(spec.Dir, "debug")+"/")
	}
	return f
}

// maxDir is the greatest length of Spec.Dir: the control socket's path has to fit
// into sockaddr_un.sun_path, which has 108 bytes with the zero at the end.
var maxDir = 107 - len(socketPath("/"))

func validate(spec runtime.Spec) error {
	if err := spec.Validate(); err != nil {
		return err
	}
	if len(spec.Dir) > maxDir {
		return fault.New(fault.InvalidArgument, "the sandbox cannot be started: its directory %q is longer than %d bytes; use a shorter data directory", spec.Dir, maxDir)
	}
	if spec.MemoryBytes < minMemory {
		return fault.New(fault.InvalidArgument, "the sandbox cannot be started: %d MiB of memory are fewer than %d", spec.MemoryBytes>>20, minMemory>>20)
	}
	return nil
}

// minMemory is what a sandbox needs to boot at all, the sentry included.
const minMemory = 64 << 20
