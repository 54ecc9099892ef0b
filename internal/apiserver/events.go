package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

// eventKeepAlive is how often a quiet stream says that it lives, so that proxies do
// not take it for dead and a client that has gone is noticed.
const eventKeepAlive = 15 * time.Second

// eventStall is how long a client may take to read what it is sent. One that reads no
// more is cut off, and goes on where it was when it comes again.
const eventStall = time.Minute

// ListEvents gives a page of events, or a stream of them. The number of the last event
// that a client has seen is all that it needs to go on without gap or repeat.
func (s *server) ListEvents(ctx context.Context, r ListEventsRequestObject) (ListEventsResponseObject, error) {
	q, err := s.eventQuery(ctx, r.Params)
	if err != nil {
		return nil, err
	}
	first, err := s.control.Events(ctx, callOf(ctx).caller, q)
	if err != nil {
		return nil, err
	}
	if c := callOf(ctx); c.accepts("application/json") && !c.accepts("text/event-stream") {
		out := ListEvents200JSONResponse{Events: []api.Event{}, Seen: first.Seen}
		for _, e := range first.Events {
			out.Events = append(out.Events, eventOf(e))
		}
		if len(first.Events) == q.Limit {
			out.NextCursor = strconv.FormatInt(first.Seen, 10)
		}
		return out, nil
	}
	follow := r.Params.Follow == nil || *r.Params.Follow
	return eventStream{s: s, ctx: ctx, first: first, query: q, follow: follow}, nil
}

// eventQuery reads what is asked for and where to begin. A number that a client has from
// before wins over where it began then.
func (s *server) eventQuery(ctx context.Context, p api.ListEventsParams) (control.EventQuery, error) {
	q := control.EventQuery{After: p.After, Types: p.Type, Limit: limitOf(p.Limit)}
	placed := false
	for _, later := range []struct{ name, value string }{{"cursor", p.Cursor}, {"Last-Event-ID", p.LastEventID}} {
		if later.value == "" {
			continue
		}
		n, err := strconv.ParseInt(later.value, 10, 64)
		if err != nil || n < 0 {
			return q, fault.New(fault.InvalidArgument, "%s takes the number of an event, not %.40q", later.name, later.value)
		}
		q.After, placed = n, true
	}
	if p.Sandbox != "" {
		var err error
		if q.Sandbox, err = s.control.SandboxID(ctx, callOf(ctx).caller, p.Sandbox); err != nil {
			return q, err
		}
	}
	since, err := parseInstant("since", p.Since)
	if err != nil || since.IsZero() && p.Tail == nil {
		return q, err
	}
	if p.After != 0 || !since.IsZero() && p.Tail != nil {
		return q, fault.New(fault.InvalidArgument, "cannot begin at two places: give one of after, since and tail")
	}
	if placed {
		return q, nil
	}
	var tail int64
	if p.Tail != nil {
		tail = *p.Tail
	}
	q.After, err = s.control.EventStart(ctx, callOf(ctx).caller, q, since, tail)
	return q, err
}

// eventStream is events on their way out as they happen.
type eventStream struct {
	s      *server
	ctx    context.Context //nolint:containedctx // the generated visitor is given none
	first  control.EventPage
	query  control.EventQuery
	follow bool
}

// VisitListEventsResponse writes server-sent events, each page sent at once. It ends with
// the client, with the server, or where the stream is not to follow.
func (e eventStream) VisitListEventsResponse(w http.ResponseWriter) error {
	ctx, cancel := Lasting(e.ctx)
	defer cancel()
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(w)
	_ = flusher.Flush() // a writer that cannot flush is a test's
	defer func() { _ = flusher.SetWriteDeadline(time.Time{}) }()
	page := e.first
	for {
		_ = flusher.SetWriteDeadline(time.Now().Add(eventStall)) // as above
		for _, event := range page.Events {
			if err := writeEvent(w, event); err != nil {
				return err
			}
		}
		if len(page.Events) == 0 {
			if !e.follow {
				return nil
			}
			// Where there is nothing for this client it still gets on, so that what it has
			// seen is not pruned away under it.
			if _, err := fmt.Fprintf(w, "id: %d\n\n", page.Seen); err != nil {
				return err
			}
		}
		if err := flusher.Flush(); err != nil {
			return err
		}
		e.query.After = page.Seen
		if e.follow {
			e.query.Wait = eventKeepAlive
		}
		var err error
		page, err = e.s.control.Events(ctx, callOf(ctx).caller, e.query)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func writeEvent(w http.ResponseWriter, e control.Event) error {
	data, err := json.Marshal(eventOf(e))
	if err != nil {
		return err
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "id: %d\nevent: %s\ndata: %s\n\n", e.Seq, e.Type, data)
	_, err = w.Write(out.Bytes())
	return err
}
