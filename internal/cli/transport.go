package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
)

// headerKey is the header with which a call may be made twice and takes effect once.
const headerKey = "Idempotency-Key"

// retryDelays are the waits between the attempts of one call.
var retryDelays = []time.Duration{100 * time.Millisecond, 400 * time.Millisecond, time.Second}

// transport adds the API key and repeats calls that a network failure cut off. It
// repeats only what is safe to do twice: reads, files written whole, and calls with
// an idempotency key; and only where the body can be sent again. Its errors are
// faults, and so is every answer that is none of success.
type transport struct {
	base   http.RoundTripper
	conn   connection        // whose key goes with each call
	flags  map[string]string // how the verb's fields are typed
	agent  string
	delays []time.Duration
	// patience is how long a server that is gone is asked for the fate of a change
	// that it may have received; 0 leaves it at delays.
	patience time.Duration
}

// RoundTrip sends a request, again if need be.
func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	if t.conn.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+t.conn.APIKey)
	}
	if req.Header.Get(headerKey) == "" {
		req.Header.Del(headerKey)
	}
	req.Header.Set("User-Agent", t.agent)
	began, arrived := time.Now(), false
	for attempt := 0; ; attempt++ {
		resp, err := t.base.RoundTrip(req)
		if err == nil && resp.StatusCode >= 200 && resp.StatusCode < 300 {
			return resp, nil
		}
		if err == nil {
			defer resp.Body.Close()
			return nil, t.inOwnWords(answerFault(resp, t.conn.URL))
		}
		// A change that may have arrived is not given up because the server is just being
		// started again: it would be made twice by who asks for it anew.
		arrived = arrived || req.Header.Get(headerKey) != "" && connected(err)
		var pause time.Duration
		switch again := repeatable(req, err) || arrived && errors.Is(err, syscall.ECONNREFUSED) && resendable(req); {
		case again && attempt < len(t.delays):
			pause = t.delays[attempt]
		case again && arrived && time.Since(began) < t.patience:
			pause = time.Second
		case arrived && !interrupted(req.Context()):
			return nil, fault.Wrap(networkFault(req, t.conn, err), fault.Unavailable,
				"the server at %s went away; what was asked may be done all the same%s", t.conn.URL, lookAt(req))
		default:
			return nil, networkFault(req, t.conn, err)
		}
		if sleepFor(req.Context(), pause) != nil {
			return nil, networkFault(req, t.conn, err)
		}
		if req.GetBody != nil {
			body, err := req.GetBody()
			if err != nil {
				return nil, fault.Wrap(err, fault.Internal, "what was to be sent cannot be read again")
			}
			req = req.Clone(req.Context())
			req.Body = body
		}
	}
}

// repeatable says whether a call that ended with err may be sent again. A refused
// connection is not worth it: nothing listens there.
func repeatable(req *http.Request, err error) bool {
	if errors.Is(err, syscall.ECONNREFUSED) {
		return false
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return false
	}
	if !resendable(req) {
		return false
	}
	switch req.Method {
	case http.MethodGet, http.MethodHead, http.MethodPut:
		return true
	}
	return req.Header.Get(headerKey) != ""
}

// connected says whether a call that ended with err had a connection.
func connected(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return !ok || op.Op != "dial"
}

// resendable says whether a request can be sent once more as it is.
func resendable(req *http.Request) bool {
	return req.Context().Err() == nil && (req.Body == nil || req.Body == http.NoBody || req.GetBody != nil)
}

// sleepFor waits, or ends early with the context's error.
func sleepFor(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// newRequestKey makes a random idempotency key.
func newRequestKey() string { return "cli_" + rand.Text() }

// networkFault makes a fault of a call that got no answer.
func networkFault(req *http.Request, conn connection, err error) error {
	ctx, url := req.Context(), conn.URL
	switch {
	case interrupted(ctx) && req.Method == http.MethodGet:
		return fault.Wrap(context.Canceled, fault.Cancelled, "gave up before %s answered; nothing was changed", url)
	case interrupted(ctx):
		return fault.Wrap(context.Canceled, fault.Cancelled, "gave up before %s answered; what was asked may be done all the same%s", url, lookAt(req))
	case ctx.Err() != nil:
		return fault.Wrap(ctx.Err(), fault.DeadlineExceeded, "the server at %s did not answer in time", url)
	case errors.Is(err, syscall.ECONNREFUSED) && conn.Others && conn.Source == "default":
		return fault.Wrap(syscall.ECONNREFUSED, fault.Unavailable,
			"no server answers at %s, and no context is the current one; `hutch context ls` lists them, `hutch context use NAME` chooses one", url)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fault.Wrap(syscall.ECONNREFUSED, fault.Unavailable,
			"no server answers at %s; `hutch up` starts one on this machine, HUTCH_URL names another", url)
	}
	return fault.Wrap(err, fault.Unavailable,
		"the server at %s could not be reached; check HUTCH_URL and the network, `hutch up` starts a server on this machine", url)
}

// lookAt says where a call whose answer is not known shows.
func lookAt(req *http.Request) string {
	switch {
	case strings.HasSuffix(req.URL.Path, "/commands"):
		return ", `hutch commands ls NAME` shows whether it runs"
	case strings.Contains(req.URL.Path, "/commands/"), strings.Contains(req.URL.Path, "/files"), strings.Contains(req.URL.Path, "/keys"):
		return ""
	}
	return ", `hutch operations ls` shows what is at work"
}

// responseError says which answer of the server a fault was made of.
type responseError struct {
	Status    int // 0 in a stream
	RequestID string
}

// Error names the status.
func (e *responseError) Error() string { return fmt.Sprintf("HTTP status %d", e.Status) }
