package hostproto

import (
	"time"

	"github.com/hutchrun/hutch/internal/sandbox"
)

// Use is what somebody wants with a sandbox that runs.
type Use string

// The uses.
const (
	// UseLook reads what is there and what was written. It wakes nothing and keeps nothing
	// awake (Z2).
	UseLook Use = "look"
	// UseFollow stays at what a command writes: an attached session that wakes nothing.
	UseFollow Use = "follow"
	// UseSession acts in the sandbox: a file call, the input of a command.
	UseSession Use = "session"
	// UseCommand starts a command in front, UseDetached one that is detached.
	UseCommand  Use = "command"
	UseDetached Use = "detached"
	// UseStream is an open LLM stream. Harness turns are known by their leases (Host.Renew).
	UseStream Use = "llm_stream"
)

// Wakes says whether a sandbox that sleeps is woken for it (Z5).
func (u Use) Wakes() bool { return u != UseLook && u != UseFollow }

// Active says whether a sandbox is not idle while it lasts (Z1).
func (u Use) Active() bool { return u != UseLook }

// Idleness is what a host says of a sandbox that runs (Z3).
type Idleness struct {
	sandbox.Idleness
	Mode   sandbox.SleepMode `json:"mode"`
	Window time.Duration     `json:"window_ns"`
	OnIdle sandbox.Verb      `json:"on_idle"`
	Every  time.Duration     `json:"every_ns"` // between two samples
	At     time.Time         `json:"at"`       // of the last sample, in host time
	// Failed is of the last tries to put it to sleep that failed, nil for none.
	Failed *sandbox.Retry `json:"failed,omitempty"`
}
