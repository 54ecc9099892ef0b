package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// maxEvent is the longest line of an event stream.
const maxEvent = 4 << 20

// Where `events` begins when nobody says: with the last that happened.
const (
	tailShown    = 100
	tailFollowed = 10
)

const sinceFlagHelp = "from this long ago, or this instant or day, on (10m, 2026-03-01T12:00:00Z)"

func (a *app) eventsCommand() *cobra.Command {
	var p paging
	var params api.ListEventsParams
	var follow, asJSON bool
	var since string
	var tail int64
	cmd := &cobra.Command{
		Use:   "events [NAME]",
		Short: "Show what happened, in order",
		Long: "Show what happened, oldest first: the last 100 events, or those from a time or an event number on. With --follow it goes on with what is yet " +
			"to happen, without gap or repeat, also across a lost connection; --json then prints one event a line. Events are kept for 90 days.",
		Example: "hutch events demo\nhutch events --since 10m --type 'sandbox.*'\nhutch events --after 1200 --all\nhutch events --follow --json",
		Args:    atMostOne("NAME"),

		ValidArgsFunction: a.completeNames,
	}
	cmd.Flags().Int64Var(&params.After, "after", 0, "only events after this number")
	cmd.Flags().StringVar(&since, "since", "", sinceFlagHelp)
	cmd.Flags().Int64Var(&tail, "tail", tailShown, "begin with the last so many; with --follow 10 where not given")
	cmd.Flags().StringSliceVar(&params.Type, "type", nil, "only events of this type, or all of a kind as sandbox.* (may be given more than once)")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what is yet to happen")
	p.add(cmd)
	addJSON(cmd, &asJSON)
	cmd.MarkFlagsMutuallyExclusive("follow", "limit")
	cmd.MarkFlagsMutuallyExclusive("follow", "all")
	cmd.MarkFlagsMutuallyExclusive("after", "since", "tail")
	cmd.MarkFlagsMutuallyExclusive("tail", "limit")
	cmd.MarkFlagsMutuallyExclusive("tail", "all")
	cmd.RunE = a.verb(func(ctx context.Context, c *client, args []string) (err error) {
		if len(args) > 0 {
			params.Sandbox = args[0]
		}
		if params.Since, err = a.instant("since", since); err != nil {
			return err
		}
		given := func(name string) bool { return cmd.Flags().Changed(name) }
		if !given("after") && !given("since") && !given("limit") && !given("all") {
			if follow && !given("tail") {
				tail = tailFollowed
			}
			params.Tail, p.limit = &tail, int(tail)+1 // one more than there are: the page is the last
		}
		if follow {
			err := a.followEvents(ctx, c, params, asJSON)
			if interrupted(ctx) {
				return exitStatus(exitCodes[fault.Cancelled])
			}
			return err
		}
		return a.printEvents(ctx, c, params, p, asJSON)
	})
	return cmd
}

// instant reads a time of a flag: an instant or a day as it is, or how long ago. "" is none.
func (a *app) instant(flag, text string) (string, error) {
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if _, err := time.Parse(layout, text); err == nil || text == "" {
			return text, nil
		}
	}
	ago, err := parseDuration(flag, text)
	if err != nil {
		return "", fault.New(fault.InvalidArgument, "--%s %q is no time; write how long ago (10m, 2h, 1d), an instant (2026-03-01T12:00:00Z) or a day", flag, text)
	}
	return a.env.Now().Add(-ago).UTC().Format(time.RFC3339Nano), nil
}

func (a *app) printEvents(ctx context.Context, c *client, params api.ListEventsParams, p paging, asJSON bool) error {
	var list []doc[api.Event]
	next, err := p.collect(func(limit api.Limit, cursor string) (int, string, error) {
		params.Limit, params.Cursor = &limit, cursor
		page, err := read[struct {
			Events     []doc[api.Event] `json:"events"`
			NextCursor string           `json:"next_cursor"`
		}](c.ListEvents(ctx, &params, accept("application/json")))
		list = append(list, page.Events...)
		return len(page.Events), page.NextCursor, err
	})
	if err != nil {
		return err
	}
	if asJSON {
		return a.printJSON(listDocument("events", list, next))
	}
	for _, e := range list {
		a.sayEvent(e.V)
	}
	if params.Tail != nil && len(list) > 0 && int64(len(list)) == *params.Tail {
		a.note("the last %d; --all shows all that are kept, --follow goes on", len(list))
	}
	if next != "" && len(list) > 0 {
		a.note("there are more; --after %d goes on, --all shows them all", list[len(list)-1].V.Seq)
	}
	return nil
}

// followEvents prints events as they come. A stream that was cut off is taken up where
// the server had got to.
func (a *app) followEvents(ctx context.Context, c *client, params api.ListEventsParams, asJSON bool) error {
	goOn := true
	params.Follow = &goOn
	last := params.After
	return a.keepAsking(ctx, func() (bool, error) {
		body, err := open(c.ListEvents(ctx, &params, accept("text/event-stream")))
		if err != nil {
			return false, err
		}
		defer body.Close()
		before, opened := last, time.Now()
		err = serverSentEvents(body, func(id string, data []byte) error {
			if len(data) > 0 {
				var event doc[api.Event]
				if err := json.Unmarshal(data, &event); err != nil {
					return fault.Wrap(err, fault.Internal, "an event cannot be read; compare `hutch version` with the server's")
				}
				if event.V.Seq <= last {
					return nil
				}
				a.progress.hide()
				last = event.V.Seq
				if asJSON {
					err = a.printLine(event)
				} else {
					a.sayEvent(event.V)
				}
			}
			params.LastEventID = id // wins over where it began
			return err
		})
		return last > before || time.Since(opened) > steady, err
	})
}

// serverSentEvents calls each with the id and the data of every event of a stream, until
// that ends. One without data tells how far the stream has come; comments keep the
// connection alive.
func serverSentEvents(body io.Reader, each func(id string, data []byte) error) error {
	scanner := bufio.NewScanner(body)
	scanner.Buffer(make([]byte, 0, 64<<10), maxEvent)
	var id string
	var data []byte
	fresh := false // something came since the last empty line
	for scanner.Scan() {
		line := scanner.Text()
		if line == "" {
			if fresh {
				if err := each(id, data); err != nil {
					return err
				}
			}
			data, fresh = nil, false
			continue
		}
		if value, ok := strings.CutPrefix(line, "id:"); ok {
			id, fresh = strings.TrimPrefix(value, " "), true
		}
		if value, ok := strings.CutPrefix(line, "data:"); ok {
			if data != nil {
				data = append(data, '\n')
			}
			data, fresh = append(data, strings.TrimPrefix(value, " ")...), true
		}
	}
	err := scanner.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		return fault.Wrap(err, fault.TooLarge, "an event is longer than %d bytes; read it with `hutch events --json`", maxEvent)
	}
	if err == nil {
		err = io.EOF
	}
	return fmt.Errorf("%w: %w", errCut, err)
}

// sayEvent writes an event in a line.
func (a *app) sayEvent(e api.Event) {
	line := fmt.Sprintf("%d  %s  %-22s  %s", e.Seq, formatTime(e.At.Time), e.Type, orDash(e.Sandbox))
	if e.Operation != "" {
		line += "  " + e.Operation
	}
	if data := string(e.Data); data != "" && data != "null" && data != "{}" {
		line += "  " + data
	}
	a.say("%s", clean(line))
}
