// Package mcp gives hutch's sandboxes to agents as tools of the Model Context Protocol.
// Each tool is a few calls of the API, with the rights of the key that they carry: it
// may do no more than that key may.
package mcp

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// maxAnswer is how much of an answer of the API is read.
const maxAnswer = 16 << 20

// waitSlice is how long one question for the end of an operation waits for it.
const waitSlice = "60s"

// instructions are what a client tells its model of the server.
const instructions = "hutch runs computers (sandboxes) on machines that their owner has. Make one with `new`, run commands in it with `exec`, " +
	"read and write its files, `fork` it to try several ways from one state, and `sleep` it while it is not needed: " +
	"memory and disk are kept, and the next exec wakes it. `stop` ends its programs and keeps its disk. " +
	"Each tool takes a sandbox by its name or id."

// tools is what the tools call.
type tools struct{ api *api.Client }

// New makes a server whose tools call the API through client. Errors of the client have
// to be faults, and so has each answer that is none of success, as those of the command
// line's are.
func New(client *api.Client, version string) *mcp.Server {
	s := mcp.NewServer(&mcp.Implementation{Name: "hutch", Title: "hutch", Version: version}, &mcp.ServerOptions{Instructions: instructions})
	t := &tools{api: client}
	t.addLife(s)
	t.addCommands(s)
	t.addFiles(s)
	return s
}

// Stdio serves one client on stdin and stdout until it goes or ctx ends.
func Stdio(ctx context.Context, s *mcp.Server) error {
	err := s.Run(ctx, &mcp.StdioTransport{})
	if errors.Is(err, io.EOF) || ctx.Err() != nil {
		return nil
	}
	return err
}

// Handler serves clients over streamable HTTP. Each request brings an API key of its own
// as a bearer token, of which connect makes the client that its tools use: who reaches
// the port has no more rights than its key. Nothing is kept between two requests, so that
// none runs with the key of another.
func Handler(connect func(key string) (*api.Client, error), version string) http.Handler {
	inner := mcp.NewStreamableHTTPHandler(func(r *http.Request) *mcp.Server {
		client, err := connect(bearer(r))
		if err != nil {
			return nil // answered with 400
		}
		return New(client, version)
	}, &mcp.StreamableHTTPOptions{Stateless: true, PropagateRequestCancellation: true})
	guarded := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if bearer(r) == "" {
			w.Header().Set("WWW-Authenticate", `Bearer realm="hutch"`)
			http.Error(w, "send an API key of hutch as the bearer token; `hutch keys create` makes one", http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	})
	return http.NewCrossOriginProtection().Handler(guarded) // a web page does not speak to it
}

func bearer(r *http.Request) string {
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}

// add makes a tool of a function. Its error is the tool's answer, in words that say what
// to do: the model reads them, where an error of the protocol would end with the client.
func add[In, Out any](s *mcp.Server, name, description string, hints *mcp.ToolAnnotations, run func(context.Context, In) (Out, error)) {
	mcp.AddTool(s, &mcp.Tool{Name: name, Description: description, Annotations: hints},
		func(ctx context.Context, _ *mcp.CallToolRequest, in In) (*mcp.CallToolResult, Out, error) {
			out, err := run(ctx, in)
			if f := fault.Of(err); f != nil {
				err = errors.New(string(f.Kind) + ": " + f.Message)
			}
			return nil, out, err
		})
}

// Hints of what a tool does to its surroundings.
var (
	looks    = &mcp.ToolAnnotations{ReadOnlyHint: true, OpenWorldHint: new(false)}
	changes  = &mcp.ToolAnnotations{DestructiveHint: new(false), OpenWorldHint: new(false)}
	destroys = &mcp.ToolAnnotations{DestructiveHint: new(true), OpenWorldHint: new(false)}
	runs     = &mcp.ToolAnnotations{DestructiveHint: new(true), OpenWorldHint: new(true)}
)

// read takes an answer of the API and gives its JSON body, or the fault that it carries.
func read[T any](resp *http.Response, err error) (T, error) {
	var out T
	body, err := open(resp, err)
	if err != nil {
		return out, err
	}
	defer body.Close()
	if err := json.NewDecoder(io.LimitReader(body, maxAnswer)).Decode(&out); err != nil {
		return out, fault.Wrap(err, fault.Unavailable, "the server's answer was cut off; try again")
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

func open(resp *http.Response, err error) (io.ReadCloser, error) {
	if err == nil {
		return resp.Body, nil
	}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		return nil, f
	}
	return nil, fault.Wrap(err, fault.InvalidArgument, "the call cannot be made")
}

// key makes an idempotency key, so that a call whose answer was lost is not done twice.
func key() string { return "mcp_" + rand.Text() }

// await waits for the end of an operation and gives its fault where it ended badly.
func (t *tools) await(ctx context.Context, op *api.Operation) error {
	if op == nil {
		return nil
	}
	at := *op
	for lost := 0; at.Status == api.OperationStatusPending || at.Status == api.OperationStatusRunning; {
		next, err := read[api.Operation](t.api.GetOperation(ctx, at.ID, &api.GetOperationParams{Wait: waitSlice}))
		switch {
		case err == nil:
			at, lost = next, 0
		case !fault.Is(err, fault.Unavailable) || lost == 60 || ctx.Err() != nil:
			return err
		default: // a server that is started anew; the operation goes on by itself
			lost++
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	if at.Status == api.OperationStatusSucceeded {
		return nil
	}
	if at.Error != nil {
		return &fault.Fault{Kind: fault.Kind(at.Error.Code), Message: at.Error.Message, Reason: at.Error.Reason}
	}
	return fault.New(fault.Cancelled, "the %s %s was cancelled", at.Kind, at.ID)
}
