package guest_test

import (
	"context"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// terminal starts a shell in a terminal and waits for its first prompt.
func terminalRequest(line string) *guestproto.StartRequest {
	return &guestproto.StartRequest{Shell: line, Pty: &guestproto.WindowSize{Rows: 30, Cols: 100}}
}

// E1 -t: a terminal has a size, which changes, and a Ctrl-C that interrupts.
func TestE1TerminalSizeAndInterrupt(t *testing.T) {
	t.Parallel()
	a := boot(t)
	s := start(t, a, terminalRequest("stty size; tty; trap 'stty size; echo resized' WINCH; trap 'echo interrupted; exit 5' INT; echo up; while :; do sleep 0.05; done"))
	o := newOutcome(0)
	until(t, s, o, func() bool { return strings.Contains(o.pty(), "up\r\n") })
	if !strings.Contains(o.pty(), "30 100\r\n/dev/pts/") {
		t.Errorf("got %q", o.pty())
	}
	if _, err := a.Client.Commands.Resize(t.Context(), &guestproto.ResizeRequest{Id: o.id, Size: &guestproto.WindowSize{Rows: 11, Cols: 22}}); err != nil {
		t.Fatal(err)
	}
	until(t, s, o, func() bool { return strings.Contains(o.pty(), "11 22\r\nresized") })
	if _, err := a.Client.Commands.Input(t.Context(), &guestproto.InputRequest{Id: o.id, Data: []byte{3}}); err != nil {
		t.Fatal(err)
	}
	until(t, s, o, func() bool { return o.exit != nil })
	if !strings.Contains(o.pty(), "interrupted") || o.exit.Code != 5 {
		t.Errorf("got %q, %v", o.pty(), o.exit)
	}
	_, err := a.Client.Commands.Resize(t.Context(), &guestproto.ResizeRequest{Id: o.id, Size: &guestproto.WindowSize{Rows: 1, Cols: 1}})
	wantFault(t, err, fault.FailedPrecondition, "")
}

// E6: a terminal outlives a dropped client and is taken up again; end-of-file ends it.
func TestE6TerminalSurvivesItsClient(t *testing.T) {
	t.Parallel()
	a := boot(t)
	ctx, cut := context.WithCancel(t.Context())
	s, err := a.Client.Commands.Start(ctx, terminalRequest("stty -echo; echo up; cat; echo bye"))
	if err != nil {
		t.Fatal(err)
	}
	o := newOutcome(0)
	until(t, s, o, func() bool { return strings.Contains(o.pty(), "up\r\n") })
	cut()
	again := follow(t, a, o.id, o.cursor)
	rest := newOutcome(o.cursor)
	until(t, again, rest, func() bool { return rest.id != "" })
	if _, err := a.Client.Commands.Input(t.Context(), &guestproto.InputRequest{Id: o.id, Data: []byte("typed\n")}); err != nil {
		t.Fatal(err)
	}
	until(t, again, rest, func() bool { return strings.Contains(rest.pty(), "typed\r\n") })
	for range 2 { // the second is a repeat and types nothing
		if _, err := a.Client.Commands.Input(t.Context(), &guestproto.InputRequest{Id: o.id, Offset: 6, Eof: true}); err != nil {
			t.Fatal(err)
		}
	}
	until(t, again, rest, func() bool { return rest.exit != nil })
	if rest.pty() != "typed\r\nbye\r\n" {
		t.Errorf("got %q", rest.pty())
	}
}

// Z1: a terminal counts as a foreground command only while something other than its
// shell is in front.
func TestZ1ForegroundOfATerminal(t *testing.T) {
	t.Parallel()
	a := boot(t)
	s := start(t, a, &guestproto.StartRequest{Args: []string{"bash", "--norc", "-i"}, Pty: &guestproto.WindowSize{}, Env: map[string]string{"PS1": "READY> "}})
	o := newOutcome(0)
	until(t, s, o, func() bool { return strings.Contains(o.pty(), "READY> ") })
	foreground := func() int32 {
		r, err := a.Client.Agent.Activity(t.Context(), &guestproto.ActivityRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if r.AttachedSessions != 1 || r.RunningCommands != 1 {
			t.Fatalf("got %v", r)
		}
		return r.ForegroundCommands
	}
	if n := foreground(); n != 0 {
		t.Errorf("a prompt counts as %d", n)
	}
	if _, err := a.Client.Commands.Input(t.Context(), &guestproto.InputRequest{Id: o.id, Data: []byte("sleep 600\n")}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "sleep in front", func() bool { return foreground() == 1 })
}
