package control

import (
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// SleepSettings are what a caller says of a sandbox's sleep (Z1, A8). What is left out
// stays as it is.
type SleepSettings struct {
	Mode        string // never, manual or auto
	IdleSeconds *int64 // the idle window of auto
	OnIdle      string // sleep or stop
}

func (s SleepSettings) given() bool { return s != SleepSettings{} }

// set gives the policy and the mode with what was asked for. Whether that may be,
// Policy.Check says.
func (s SleepSettings) set(p sandbox.Policy, mode sandbox.SleepMode) (sandbox.Policy, sandbox.SleepMode, error) {
	if s.Mode != "" {
		mode = sandbox.SleepMode(s.Mode)
	}
	if s.OnIdle != "" {
		p.OnIdle = sandbox.Verb(s.OnIdle)
	}
	if n := s.IdleSeconds; n != nil {
		if *n <= 0 || *n > math.MaxInt64/int64(time.Second) {
			return p, mode, invalid("idle_seconds", "an idle window of %d seconds is not possible; it is a positive number of seconds", *n)
		}
		p.IdleAfter = time.Duration(*n) * time.Second
	}
	return p, mode, nil
}

// Why is what there is to say of whether a sandbox falls asleep by itself (Z3).
type Why struct {
	View
	Idle hostproto.Idleness
	// Message says it in a sentence, with what to do where something is in the way.
	Message string
}

// Why reads each criterion of idleness, and says which one blocks and when the next
// decision falls. It is no activity and wakes nothing. Of a sandbox that does not run
// there is nothing to read.
func (c *Control) Why(ctx context.Context, a Actor, ref string) (Why, error) {
	v, err := c.Get(ctx, a, ref)
	if err != nil {
		return Why{}, err
	}
	p := v.Sandbox.Policy
	out := Why{View: v, Idle: hostproto.Idleness{Mode: v.Sandbox.Spec.Sleep, Window: p.IdleAfter, OnIdle: p.OnIdle}}
	out.Idle.Blocker = sandbox.IdleState
	if v.Sandbox.State == sandbox.Ready {
		if err := c.readIdleness(ctx, &out); err != nil {
			return out, err
		}
	}
	out.Message = out.explain()
	return out, nil
}

// readIdleness asks the host. One that has gone on meanwhile has nothing to read, and
// reports soon.
func (c *Control) readIdleness(ctx context.Context, out *Why) error {
	h, err := c.host(out.Sandbox.Host)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.limits.CallTimeout)
	defer cancel()
	idle, err := h.Idleness(ctx, out.Sandbox.ID)
	if fault.Is(err, fault.FailedPrecondition) {
		out.Idle.Blocker = sandbox.IdleOperation
		return nil
	}
	if err == nil {
		out.Idle = idle
	}
	return err
}

// blocks says in words what a criterion that does not hold means.
var blocks = map[string]string{
	sandbox.IdleSamples:    "it has not been watched for long enough",
	sandbox.IdleTurns:      "a harness turn is queued or running",
	sandbox.IdleStreams:    "an LLM stream is open",
	sandbox.IdleSessions:   "somebody works in it: a session or a call is open, or was a moment ago",
	sandbox.IdleForeground: "a command runs in front; `hutch exec --detach` starts one that does not keep it awake",
	sandbox.IdleOutput:     "a command writes output",
	sandbox.IdleCPU:        "its programs use CPU time",
	sandbox.IdleNetwork:    "it sends or receives over the network",
	sandbox.IdleNested:     "a virtual machine runs inside",
}

func (w Why) explain() string {
	s, idle := w.Sandbox, w.Idle
	does := map[sandbox.Verb]string{sandbox.Sleep: "is put to sleep", sandbox.Stop: "is stopped"}[idle.OnIdle]
	rule := fmt.Sprintf("it %s after %s of idleness", does, idle.Window)
	turnOn := fmt.Sprintf("`hutch edit %s --sleep auto` turns it on: then %s", s.Name, rule)
	switch {
	case s.State != sandbox.Ready && idle.Mode == sandbox.SleepAuto:
		return fmt.Sprintf("it is %s; once it runs again, %s", s.State, rule)
	case s.State != sandbox.Ready:
		return fmt.Sprintf("it is %s, and its sleep mode is %s: once it runs again, nothing puts it to sleep by itself; %s", s.State, idle.Mode, turnOn)
	case idle.Blocker == sandbox.IdleOperation:
		return "an operation is at work on it; what is idle is looked at when that has ended"
	case idle.Blocker == sandbox.IdleHeld:
		return "it is held, as the disk pool of its host is full; `hutch df` shows what takes the space"
	case idle.Mode != sandbox.SleepAuto:
		text := fmt.Sprintf("its sleep mode is %s, so nothing puts it to sleep by itself; %s", idle.Mode, turnOn)
		if busy := busyNow(idle.Criteria); busy != "" {
			text += "; at present it would stay awake: " + busy
		}
		return text
	case idle.Idle && idle.Failed != nil:
		return fmt.Sprintf("it is idle, and the last try to save it failed; it is tried again (%d so far)", idle.Failed.Tries)
	case idle.Idle:
		return fmt.Sprintf("it is idle and %s now", does)
	}
	for _, c := range idle.Criteria {
		if c.Name == idle.Blocker && c.OK && c.Name != sandbox.IdleSamples {
			return fmt.Sprintf("it has not been quiet for %s; what it did last: %s", idle.Window, blocks[idle.Blocker])
		}
	}
	return "it stays awake: " + blocks[idle.Blocker]
}

// busyNow says what does not hold now.
func busyNow(list []sandbox.Criterion) string {
	var busy []string
	for _, c := range list {
		if !c.OK {
			busy = append(busy, blocks[c.Name])
		}
	}
	return strings.Join(busy, ", and ")
}
