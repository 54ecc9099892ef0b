package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/hutchrun/hutch/internal/store"
)

const (
	connectTimeout = 10 * time.Second // to one address; the total timeout holds too
	maxAnswer      = 4 << 10          // bytes of an answer's body that are read
	readAnswer     = time.Second      // how long they may take
	maxErrorText   = 300              // bytes of an error in the delivery log
	maxHeader      = 16 << 10         // bytes of an answer's headers
)

// result is what came of one attempt.
type result struct {
	at         time.Time
	took       time.Duration
	status     int           // 0: no answer
	err        string        // "" is a success; else for the delivery log
	cause      error         // behind err, for the server's own log
	retryAfter time.Duration // what the receiver asks for; 0 is nothing
	cut        bool          // this server stopped meanwhile: it says nothing of the receiver
}

// sender makes attempts. Its connections go where the policy lets them, to no proxy,
// and follow no redirect.
type sender struct {
	policy Policy
	client *http.Client
	agent  string
}

func newSender(p Policy, agent string) *sender {
	return &sender{policy: p, agent: agent, client: &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			// A proxy from the environment would resolve the name itself, behind the guard.
			Proxy:                  nil,
			DialContext:            p.dialer().DialContext,
			TLSClientConfig:        &tls.Config{RootCAs: p.Roots, MinVersion: tls.VersionTLS12},
			ForceAttemptHTTP2:      true,
			MaxResponseHeaderBytes: maxHeader,
			MaxIdleConns:           64,
			MaxIdleConnsPerHost:    2,
			IdleConnTimeout:        30 * time.Second,
			DisableCompression:     true, // a body is bounded as it comes, not as it unfolds
		},
	}}
}

// close ends the connections that are kept for later.
func (s *sender) close() { s.client.CloseIdleConnections() }

// send makes one attempt within the time of ctx.
func (s *sender) send(ctx context.Context, c store.ClaimedDelivery) result {
	r := result{at: time.Now()}
	r.cause = s.try(ctx, c, &r)
	r.took = time.Since(r.at)
	if r.cause != nil {
		r.err = clip(describe(r.cause))
		r.cut = r.status == 0 && errors.Is(context.Cause(ctx), errClosed)
	}
	return r
}

func (s *sender) try(ctx context.Context, c store.ClaimedDelivery, r *result) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	request, err := s.request(ctx, c, r.at)
	if err != nil {
		return err
	}
	response, err := s.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	r.status = response.StatusCode
	// The beginning of the body is read for the log, and so that the connection can be
	// used again. How that ends makes no difference to what the status said.
	timer := time.AfterFunc(readAnswer, cancel)
	defer timer.Stop()
	said, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if r.status >= 200 && r.status <= 299 {
		return nil
	}
	r.retryAfter = retryAfter(response.Header.Get("Retry-After"), r.at)
	return statusError{r.status, string(said)}
}

func (s *sender) request(ctx context.Context, c store.ClaimedDelivery, at time.Time) (*http.Request, error) {
	// The operator may have narrowed the policy since the webhook was made.
	if err := s.policy.CheckURL(c.Webhook.URL); err != nil {
		return nil, err
	}
	payload, err := body(c.Event)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.Webhook.URL, bytes.NewReader(payload))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("User-Agent", s.agent)
	return request, sign(request.Header, c.Webhook.Secrets, c.Delivery.ID, at, payload)
}

// statusError is an answer that is no success.
type statusError struct {
	status int
	said   string // by the receiver
}

func (e statusError) Error() string {
	switch {
	case e.status >= 300 && e.status < 400:
		return fmt.Sprintf("the receiver redirects (status %d), which is never followed; give the webhook its final URL", e.status)
	case strings.TrimSpace(e.said) == "":
		return fmt.Sprintf("the receiver answered with status %d", e.status)
	}
	return fmt.Sprintf("the receiver answered with status %d: %s", e.status, e.said)
}

// describe says what went wrong without the addresses that Go's errors carry: they are
// the server's own, its resolver's, or what a name resolves to inside.
func describe(err error) string {
	var (
		status    statusError
		refused   *blocked
		unknown   *net.DNSError
		untrusted *tls.CertificateVerificationError
		record    tls.RecordHeaderError
		alert     tls.AlertError
		errno     syscall.Errno
		timeout   net.Error
	)
	switch {
	case errors.As(err, &status):
		return status.Error()
	case errors.As(err, &refused):
		return refused.Error()
	case errors.As(err, &unknown) && unknown.IsNotFound:
		return "the receiver's name does not resolve"
	case errors.As(err, &untrusted):
		return "the receiver's certificate is not trusted: " + certificate(untrusted.Err)
	case errors.As(err, &record), errors.Is(err, http.ErrSchemeMismatch):
		return "the receiver does not speak TLS"
	case errors.As(err, &alert):
		return "the receiver refused the TLS connection: " + alert.Error()
	case errors.Is(err, context.Canceled), errors.Is(err, errClosed):
		return "this server stopped before the answer"
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "the receiver did not answer in time"
	case errors.As(err, &unknown):
		return "the receiver's name could not be looked up"
	case errors.As(err, &errno):
		return "the connection to the receiver failed: " + errno.Error()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "the receiver closed the connection without an answer"
	}
	return "the request failed: " + strings.TrimPrefix(unwrapped(err).Error(), "net/http: ")
}

func certificate(err error) string {
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return "it is for another name" // the text of x509 lists the names, at any length
	}
	return err.Error()
}

// unwrapped gives the innermost error: the layers around it repeat the URL and the
// addresses.
func unwrapped(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}

// clip makes a text of others fit for the log: one line, no control characters, bounded.
func clip(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxErrorText {
		s = strings.ToValidUTF8(s[:maxErrorText-len("…")], "") + "…"
	}
	return s
}

// retryAfter reads the header in both of its forms; 0 where it says nothing that can
// be used.
func retryAfter(header string, now time.Time) time.Duration {
	if seconds, err := strconv.ParseUint(header, 10, 32); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(header); err == nil && at.After(now) {
		return at.Sub(now)
	}
	return 0
}
