package guestproto

import (
	"context"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/hutchrun/hutch/internal/fault"
)

// Client bundles the clients of one boot's services. It is safe for concurrent use.
// Errors of all calls are faults. A wake, a fork or a boot changes the token and
// breaks connections: make a new Client then and Close the old one.
type Client struct {
	Agent    AgentClient
	Commands CommandsClient
	Files    FilesClient

	transport *http.Transport
}

// NewClient makes a client that reaches the agent through dial and shows token on
// every call. HTTP/1.1 with keep-alive: each stream has a connection of its own, so
// a reader that is slow holds up nothing else, and a closed stream is a closed
// connection. Calls have no deadline but their context's.
func NewClient(dial func(ctx context.Context) (net.Conn, error), token string) *Client {
	transport := &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		MaxIdleConnsPerHost:    32,
		IdleConnTimeout:        90 * time.Second,
		DisableCompression:     true,
		ReadBufferSize:         Chunk,
		WriteBufferSize:        Chunk,
		MaxResponseHeaderBytes: MaxHeader,
	}
	client := connect.NewClient(
		connecthttp.NewTransport(&http.Client{
			Transport: transport,
			// A guest could send the host elsewhere.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}, "http://guest",
			connecthttp.WithReadMaxBytes(MaxMessage),
			connecthttp.WithSendMaxBytes(MaxMessage),
			connecthttp.WithCompressors()),
		withToken(token), withFaults,
	)
	return &Client{
		Agent:     NewAgentClient(client),
		Commands:  NewCommandsClient(client),
		Files:     NewFilesClient(client),
		transport: transport,
	}
}

// Close ends the idle connections; calls that run go on.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Await returns when the agent answers: nil when it serves this token's calls, or waits
// for Init. Take the wall clock for Init or Restored after it: the connection stands
// then, and the time is fresh when it arrives. What else than "not there yet" goes
// wrong (another token, say) is returned at once, and ctx bounds the wait.
func (c *Client) Await(ctx context.Context) error {
	const first, most = time.Millisecond, 20 * time.Millisecond
	for pause := first; ; pause = min(pause*2, most) {
		_, err := c.Agent.Ping(ctx, &PingRequest{})
		f := fault.Of(err)
		if f == nil || f.Reason == ReasonNotInitialised {
			return nil
		}
		if f.Kind != fault.Unavailable {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fault.Wrap(err, fault.DeadlineExceeded, "the guest agent did not come up in time")
		}
	}
}

func withToken(token string) connect.ClientInterceptor {
	return func(next connect.ClientFunc) connect.ClientFunc {
		return func(ctx context.Context, spec connect.Spec) (connect.ClientStream, error) {
			if info, ok := connect.CallInfoForClientContext(ctx); ok {
				info.RequestHeader().Set(TokenHeader, token)
			}
			return next(ctx, spec)
		}
	}
}

// withFaults turns what the wire says into faults, on every way out of a stream.
func withFaults(next connect.ClientFunc) connect.ClientFunc {
	return func(ctx context.Context, spec connect.Spec) (connect.ClientStream, error) {
		stream, err := next(ctx, spec)
		if err != nil {
			return nil, FromWire(err)
		}
		return faultStream{stream}, nil
	}
}

type faultStream struct{ connect.ClientStream }

func (s faultStream) SendHeaders() error    { return FromWire(s.ClientStream.SendHeaders()) }
func (s faultStream) Send(msg any) error    { return FromWire(s.ClientStream.Send(msg)) }
func (s faultStream) CloseSend() error      { return FromWire(s.ClientStream.CloseSend()) }
func (s faultStream) Receive(msg any) error { return FromWire(s.ClientStream.Receive(msg)) }
func (s faultStream) Close() error          { return FromWire(s.ClientStream.Close()) }
