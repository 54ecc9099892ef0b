package hostagent

import (
	"sync"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// uses are what is at work in a sandbox through hutch, and the gate that all of it comes
// through. An operation that ends the sandbox's running shuts the gate before it begins,
// so that a call is either seen by the last check before a sleep, or waits for it and
// wakes the sandbox (Z4, Z5): none falls in between.
type uses struct {
	mu       sync.Mutex // never held across I/O
	sessions sandbox.Seen
	streams  sandbox.Seen
	commands *sandbox.Commands // of the present boot; nil is not known
	shut     bool
}

// seen is what the uses were at one moment.
type seen struct {
	sessions, streams sandbox.Seen
	commands          *sandbox.Commands
}

// of gives the count of a use, nil for one that is no activity.
func (u *uses) of(use hostproto.Use) *sandbox.Seen {
	switch use {
	case hostproto.UseLook:
		return nil
	case hostproto.UseStream:
		return &u.streams
	}
	return &u.sessions
}

// begin counts a use in; false where the gate is shut. One that found it shut has come
// all the same: no sleep that is not begun yet may overlook it.
func (u *uses) begin(use hostproto.Use) (done func(), ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	count := u.of(use)
	if count != nil {
		count.Begun++
	}
	if u.shut {
		return nil, false
	}
	if c := u.commands; c != nil && (use == hostproto.UseCommand || use == hostproto.UseDetached) {
		more := sandbox.Commands{Running: c.Running + 1, Foreground: c.Foreground}
		if use == hostproto.UseCommand {
			more.Foreground++
		}
		u.commands = &more
	}
	if count == nil {
		return func() {}, true
	}
	count.Open++
	return sync.OnceFunc(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		count.Open--
	}), true
}

func (u *uses) seen() seen {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.now()
}

// now is seen for who holds the lock.
func (u *uses) now() seen {
	return seen{sessions: u.sessions, streams: u.streams, commands: u.commands}
}

// quiet says whether nothing is open, and nothing has come since then.
func (s seen) quiet(then seen) bool {
	return s.sessions.Open+s.streams.Open == 0 && s.sessions.Begun == then.sessions.Begun && s.streams.Begun == then.streams.Begun
}

// hear takes in how many commands the guest says that there are, where nothing can have
// started one since it was asked: a start that is under way is not in its answer.
func (u *uses) hear(asked seen, running, foreground int) *sandbox.Commands {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.now().quiet(asked) {
		u.commands = u.commands.Below(running, foreground)
	}
	return u.commands
}

// closeIfQuiet shuts the gate unless something is open or has come since then.
func (u *uses) closeIfQuiet(then seen) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.shut = u.now().quiet(then)
	return u.shut
}

// shutFor shuts the gate for an operation that ends the sandbox's running.
func (u *uses) shutFor(verb sandbox.Verb) {
	switch verb {
	case sandbox.Sleep, sandbox.Stop, sandbox.Delete:
		u.close(true)
	}
}

func (u *uses) close(shut bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.shut = shut
}

// fresh begins the count of commands anew: none runs after a boot.
func (u *uses) fresh() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.commands = &sandbox.Commands{}
}
