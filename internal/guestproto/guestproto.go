// Package guestproto is what the host and the guest agent say to each other: three
// Connect services (Agent, Commands, Files), their limits, and how a fault crosses
// the wire. The host treats all that a guest says as hostile: sizes are bounded here
// for both sides, and words that come from a guest are checked against closed lists.
package guestproto

//go:generate ./generate.sh

import "time"

// Where the agent lives and listens.
const (
	// Port is the TCP port on the wildcard address inside the sandbox. Only the
	// sandbox's router namespace on the host reaches it.
	Port = 49982
	// TokenHeader carries the boot's token on every call.
	TokenHeader = "Hutch-Guest-Token"
	// AgentPath is the agent's executable inside the sandbox.
	AgentPath = "/.hutch/guest"
	// Workspace is the directory that relative paths and commands start in.
	Workspace = "/workspace"
	// ExitMarker holds ExitPoweroff or ExitReboot after somebody inside asked for
	// it. It is written last, and removed by Init.
	ExitMarker = "/var/lib/hutch/exit"
	// DockerConfig is a tmpfs of registry logins: in memory, so never on a saved
	// disk, and wiped in a fork. It is DOCKER_CONFIG of every command.
	DockerConfig = "/run/hutch/docker"
)

// What ExitMarker holds, and the exit code of PID 1 that goes with it.
const (
	ExitPoweroff     = "poweroff"
	ExitReboot       = "reboot"
	ExitCodePoweroff = 0
	ExitCodeReboot   = 133
)

// ReasonNotInitialised is the reason of the fault that answers every call before Init.
const ReasonNotInitialised = "not_initialised"

// Limits, enforced by client and server alike.
const (
	MaxMessage  = 4 << 20   // bytes of one message
	MaxChunk    = 256 << 10 // bytes of data in one message of a stream
	Chunk       = 64 << 10  // bytes of data that a sender should put into one
	MaxPath     = 4095      // bytes of a path, as Linux has it (PATH_MAX less its NUL)
	MinToken    = 32        // bytes of a token
	MaxToken    = 256
	MinEntropy  = 64 // bytes of Init's and Restored's entropy
	MaxEntropy  = 4096
	MaxArgBytes = 1 << 20 // bytes of a command's arguments and environment together
	MaxCommands = 1024    // commands that run at a time
	MaxHeader   = 16 << 10

	maxPublicMessage = 2 << 10 // bytes of a guest's error text that the host keeps
)

// Output kept.
const (
	// OutputLimit is the output kept per command: its head and its tail, half each.
	OutputLimit = 16 << 20
	// EndedCommands is how many ended commands are remembered at most.
	EndedCommands = 512
)

// Times.
const (
	DefaultGrace   = 10 * time.Second // of Shutdown
	ContainerGrace = 15 * time.Second // the least grace while containers run (V5)
	// DrainGrace is how long an exit waits for a pipe that a grandchild of the
	// command still holds open.
	DrainGrace = 250 * time.Millisecond
)

// Items of the identity proof (F2), in the order in which they are done.
const (
	ItemToken        = "token"
	ItemClock        = "clock"
	ItemEntropy      = "entropy"
	ItemRandom       = "random" // the kernel's random stream differs from the source's
	ItemHostname     = "hostname"
	ItemHosts        = "hosts"
	ItemMachineID    = "machine_id"
	ItemBootID       = "boot_id"
	ItemNetwork      = "network"
	ItemConnections  = "connections"   // inherited connections to the outside
	ItemSSHHostKeys  = "ssh_host_keys" // at rest, and in the servers that hold them
	ItemDockerConfig = "docker_config"
	ItemCommandIDs   = "command_ids"
	ItemPidsLimit    = "pids_limit"
	ItemExitMarker   = "exit_marker"
	ItemWorkspace    = "workspace"
)
