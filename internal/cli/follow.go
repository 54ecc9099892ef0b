package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// follower writes the output of one command as it comes, each byte once however
// often the stream is cut off and taken up again.
type follower struct {
	a   *app
	c   *client
	ref string // the sandbox
	id  string // "" until the command is known to run

	opened bool      // the server has sent some of it
	cursor int64     // of the next byte that is wanted
	exit   *api.Exit // nil until the server has told the end

	started func(id string)                   // called once; nil for nothing
	broken  func()                            // called once, when nobody reads the output any more
	emit    func(doc[api.CommandEvent]) error // in place of the output, where events are wanted
	deaf    map[api.CommandEventStream]bool   // streams whose reader has gone
}

// steady is how long a stream must have lived to count as an answer of the server,
// although nothing came.
const steady = 5 * time.Second

// stream writes what comes in an answer until the command's end or the stream's. got
// says whether that was of any use.
func (f *follower) stream(resp *http.Response, err error) (got bool, _ error) {
	body, err := open(resp, err)
	if err != nil {
		return false, err
	}
	defer body.Close()
	f.opened = true
	before, opened := f.cursor, time.Now()
	err = lines(body, func(event doc[api.CommandEvent]) (bool, error) {
		f.a.progress.hide()
		return f.take(event)
	})
	return f.cursor > before || time.Since(opened) > steady, err
}

// resume takes the stream up where it ended, again and again until the command's end.
// While the sandbox sleeps it waits, as this must not wake it. Without follow it ends
// at what has been written by now.
func (f *follower) resume(ctx context.Context, follow bool) error {
	told := false
	return f.a.keepAsking(ctx, func() (bool, error) {
		got, err := f.stream(f.c.GetCommandOutput(ctx, f.ref, f.id,
			&api.GetCommandOutputParams{Cursor: f.cursor, Follow: follow}, accept(jsonLines)))
		if !follow && errors.Is(err, io.EOF) { // a whole answer, not one that was cut off
			err = nil
		}
		if !follow || !asleep(err) {
			return got, err
		}
		if !told {
			f.a.note("hutch: %s sleeps; its output goes on when it wakes", f.ref)
			told = true
		}
		return true, fault.Wrap(err, fault.Unavailable, "%s sleeps; wake it with `hutch wake %s`", f.ref, f.ref).After(askAsleep)
	})
}

// askAsleep is how often a sleeping sandbox is looked at.
const askAsleep = time.Second

// asleep says whether an answer was refused because the sandbox sleeps.
func asleep(err error) bool {
	return err != nil && fault.Is(err, fault.FailedPrecondition) && fault.Of(err).Reason == "state_sleeping"
}

// take acts on one event and says whether it is the last.
func (f *follower) take(event doc[api.CommandEvent]) (last bool, err error) {
	e := event.V
	switch {
	case e.Started != nil:
		if f.id == "" {
			f.id = e.Started.ID
			if f.started != nil {
				f.started(f.id)
			}
		}
		return false, nil
	case e.Error != nil:
		return true, detailFault(*e.Error)
	}
	if f.emit != nil && !f.stale(e) {
		if err := f.emit(event); err != nil {
			return true, err
		}
	}
	switch {
	case e.Exit != nil:
		f.exit = e.Exit
		return true, nil
	case e.Gap != nil:
		if e.Gap.To > f.cursor {
			f.missed(e.Gap.To - max(e.Gap.From, f.cursor))
			f.cursor = e.Gap.To
		}
	case e.Stream != "":
		return false, f.write(e)
	}
	return false, nil
}

// stale says whether an event tells only of bytes that were written already.
func (f *follower) stale(e api.CommandEvent) bool {
	return e.Stream != "" && e.Cursor != nil && *e.Cursor+int64(len(e.Data)) <= f.cursor
}

// write writes the bytes of an event that were not written before.
func (f *follower) write(e api.CommandEvent) error {
	data := e.Data
	if e.Cursor != nil {
		switch skip := f.cursor - *e.Cursor; {
		case skip < 0:
			f.missed(-skip)
		case skip >= int64(len(data)):
			return nil
		default:
			data = data[skip:]
		}
		f.cursor = *e.Cursor + int64(len(e.Data))
	} else {
		f.cursor += int64(len(data))
	}
	if f.emit != nil || f.deaf[e.Stream] {
		return nil
	}
	out := f.a.env.Stdout
	if e.Stream == api.CommandEventStreamStderr {
		out = f.a.env.Stderr
	}
	_, err := out.Write(data)
	if errors.Is(err, syscall.EPIPE) {
		f.deafen(e.Stream)
		return nil
	}
	if err != nil {
		return fault.Wrap(err, fault.Internal, "the command's output cannot be written; it goes on as %s, `%s` shows the output", f.id, f.logsLine())
	}
	return nil
}

// deafen remembers that nobody reads a stream any more. What comes of it is dropped.
func (f *follower) deafen(stream api.CommandEventStream) {
	if f.deaf == nil {
		f.deaf = map[api.CommandEventStream]bool{}
		if f.broken != nil {
			f.broken()
		}
	}
	f.deaf[stream] = true
}

// missed tells of output that is no longer kept.
func (f *follower) missed(n int64) {
	if f.emit == nil {
		f.a.note("hutch: %d bytes of output are no longer kept", n)
	}
}

// logsLine is the line that shows the output from where it was left.
func (f *follower) logsLine() string {
	return fmt.Sprintf("hutch commands logs %s %s --cursor %d --follow", f.ref, f.id, f.cursor)
}
