package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// maxAnswer is how much of a JSON answer is read.
const maxAnswer = 64 << 20

// client is the generated client with what belongs to one server.
type client struct {
	*api.Client
	url string
}

// newClient makes a client of a verb for the server that the environment or the context
// names.
func (a *app) newClient(cmd *cobra.Command) (*client, error) {
	conn, err := a.connect()
	if err != nil {
		return nil, err
	}
	return a.clientOf(cmd, conn)
}

// clientOf makes a client of a verb for the server of a connection.
func (a *app) clientOf(cmd *cobra.Command, conn connection) (*client, error) {
	if _, ok := cleanURL(conn.URL); !ok && conn.Context != "" {
		return nil, fault.New(fault.InvalidArgument, "%q, of the context %q in %s, is no server's address; correct it to one such as %s",
			conn.URL, conn.Context, conn.Path, defaultURL)
	} else if !ok {
		return nil, fault.New(fault.InvalidArgument, "HUTCH_URL is %q, which is no server's address; set it to one such as %s", conn.URL, defaultURL)
	}
	wire := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // as the library documents
	wire.DisableCompression = true                          // streams come as they are written
	doer := &http.Client{
		Transport: &transport{
			base: wire, conn: conn, flags: fieldFlags[verbPath(cmd)], agent: "hutch-cli/" + a.env.Version, delays: retryDelays, patience: a.patience,
		},
	}
	base, err := url.Parse(conn.URL)
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "no client for %s can be made", conn.URL)
	}
	check := func(_ context.Context, req *http.Request) error { return checkReferences(base, req.URL) }
	inner, err := api.NewClient(conn.URL, api.WithHTTPClient(doer), api.WithRequestEditorFn(check))
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "no client for %s can be made", conn.URL)
	}
	return &client{Client: inner, url: conn.URL}, nil
}

// verb makes a command's body of one that speaks to the server. A signal ends the
// context.
func (a *app) verb(run func(ctx context.Context, c *client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.newClient(cmd)
		if err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		return run(ctx, c, args)
	}
}

// doc is a part of an answer: what this version knows of it, and the text as it came,
// so that --json shows also what a newer server adds.
type doc[T any] struct {
	V    T
	text json.RawMessage
}

// UnmarshalJSON keeps the text and reads what is known.
func (d *doc[T]) UnmarshalJSON(text []byte) error {
	d.text = append(json.RawMessage(nil), text...)
	return json.Unmarshal(text, &d.V)
}

// MarshalJSON writes the text as it came.
func (d doc[T]) MarshalJSON() ([]byte, error) {
	if d.text == nil {
		return json.Marshal(d.V)
	}
	return d.text, nil
}

// change is the answer to a verb.
type change struct {
	Sandbox   doc[api.Sandbox]    `json:"sandbox"`
	Operation *doc[api.Operation] `json:"operation"`
	Outcome   api.Outcome         `json:"outcome"`
}

// read takes an answer of the generated client and gives its JSON body, or the fault
// that it carries.
func read[T any](resp *http.Response, err error) (T, error) {
	var out T
	body, err := open(resp, err)
	if err != nil {
		return out, err
	}
	defer body.Close()
	text, err := io.ReadAll(io.LimitReader(body, maxAnswer))
	if err != nil {
		return out, fault.Wrap(err, fault.Unavailable, "the server's answer was cut off; try again")
	}
	if err := json.Unmarshal(text, &out); err != nil {
		return out, fault.Wrap(err, fault.Internal, "the server's answer cannot be read; compare `hutch version` with the server's")
	}
	return out, nil
}

// done takes an answer without a body that matters.
func done(resp *http.Response, err error) error {
	body, err := open(resp, err)
	if err != nil {
		return err
	}
	return body.Close()
}

// open gives the body of an answer, to be closed by the caller, or the fault in its
// place: the transport lets no answer through that is none of success.
func open(resp *http.Response, err error) (io.ReadCloser, error) {
	if err != nil {
		if f, ok := errors.AsType[*fault.Fault](err); ok {
			return nil, f
		}
		return nil, fault.Wrap(err, fault.InvalidArgument, "the call cannot be made")
	}
	return resp.Body, nil
}

// answerFault makes a fault of an answer of the server at url that is none of success.
func answerFault(resp *http.Response, url string) *fault.Fault {
	var body api.Error
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20)) // what there is is enough
	if err := json.Unmarshal(text, &body); err != nil || body.Error.Code == "" {
		kind := fault.Internal
		if resp.StatusCode == http.StatusBadGateway || resp.StatusCode == http.StatusServiceUnavailable ||
			resp.StatusCode == http.StatusGatewayTimeout {
			kind = fault.Unavailable
		}
		return fault.New(kind, "%s answered with HTTP status %d and nothing that hutch knows; check that a hutch server is there (`hutch config`)",
			url, resp.StatusCode)
	}
	f := detailFault(body.Error)
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && seconds > 0 {
		f.RetryAfter = time.Duration(seconds) * time.Second
	}
	f.Err = &responseError{Status: resp.StatusCode, RequestID: body.Error.RequestID}
	return f
}

// detailFault makes a fault of an error in an answer or in a stream.
func detailFault(d api.ErrorDetail) *fault.Fault {
	return &fault.Fault{
		Kind: fault.Kind(d.Code), Message: d.Message, Reason: d.Reason,
		Err: &responseError{RequestID: d.RequestID},
	}
}

// jsonLines is a stream of JSON objects, one a line.
const jsonLines = "application/x-ndjson"

// accept asks for a form of the answer.
func accept(mediaType string) api.RequestEditorFn {
	return func(_ context.Context, req *http.Request) error {
		req.Header.Set("Accept", mediaType)
		return nil
	}
}

// lines reads a stream of JSON objects, one a line, and calls each with every one
// until it says stop or the stream ends. A stream that was cut off gives errCut.
func lines[T any](body io.Reader, each func(T) (stop bool, err error)) error {
	dec := json.NewDecoder(body)
	for {
		var event T
		if err := dec.Decode(&event); err != nil {
			return fmt.Errorf("%w: %w", errCut, err)
		}
		if stop, err := each(event); stop || err != nil {
			return err
		}
	}
}

// errCut says that a stream ended before it said so.
var errCut = errors.New("the stream was cut off")

// retryable says whether asking again later may help.
func retryable(err error) bool {
	return errors.Is(err, errCut) || fault.Is(err, fault.Unavailable) || fault.Is(err, fault.RateLimited)
}

// patience is how long something that goes on by itself is asked for while the server
// does not answer.
const patience = 2 * time.Minute

// keepAsking calls ask until it succeeds or fails for good. ask says whether it got
// anything; without, it is called again for as long as patience lasts.
func (a *app) keepAsking(ctx context.Context, ask func() (progress bool, err error)) error {
	wait, since := 100*time.Millisecond, time.Now()
	for {
		progress, err := ask()
		if err == nil || !retryable(err) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if progress {
			wait, since = 100*time.Millisecond, time.Now()
		}
		if f := fault.Of(err); f.RetryAfter > wait {
			wait = min(f.RetryAfter, patience)
		}
		if time.Since(since) > a.patience {
			return err
		}
		a.progress.set("trying again")
		if err := sleepFor(ctx, wait); err != nil {
			return err
		}
		wait = min(2*wait, 5*time.Second)
	}
}

// interrupted says whether the user gave up.
func interrupted(ctx context.Context) bool { return errors.Is(ctx.Err(), context.Canceled) }
