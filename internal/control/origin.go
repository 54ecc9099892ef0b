package control

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// Call is the request of the API that a use case is carried out for. Operations that it
// starts remember it, so that a line of a host's log leads back to who asked.
type Call struct {
	Request string // its id
	Trace   string // its span, as in the header traceparent; "" is not traced
}

type callKey struct{}

// WithCall gives a context in which use cases are carried out for a call.
func WithCall(ctx context.Context, call Call) context.Context {
	return context.WithValue(ctx, callKey{}, call)
}

// Origin is the call that an operation comes from. It is kept among the operation's
// parameters, whatever else these are.
type Origin struct {
	Request string `json:"request,omitempty"`
	Trace   string `json:"trace,omitempty"`  // the operation's own span, known before the operation ends
	Parent  string `json:"parent,omitempty"` // the span of the call
}

// OriginOf gives the call that an operation comes from; the zero Origin where none asked.
func OriginOf(op sandbox.Operation) Origin {
	var o Origin
	if len(op.Params) > 0 {
		_ = json.Unmarshal(op.Params, &o) // what is there is not for us to judge
	}
	return o
}

// from gives what a host is told of an operation's origin.
func from(op sandbox.Operation) hostproto.Origin {
	o := OriginOf(op)
	return hostproto.Origin{Request: o.Request, Trace: o.Trace}
}

// withCall adds the call that ctx belongs to to an operation's parameters, a JSON object
// or nothing.
func withCall(ctx context.Context, params json.RawMessage) (json.RawMessage, error) {
	call, _ := ctx.Value(callKey{}).(Call)
	return withOrigin(params, Origin{Request: call.Request, Parent: call.Trace, Trace: childOf(call.Trace)})
}

// withOrigin puts an origin into an operation's parameters that have none.
func withOrigin(params json.RawMessage, o Origin) (json.RawMessage, error) {
	if o == (Origin{}) {
		return params, nil
	}
	b, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	rest := strings.TrimPrefix(string(params), "{")
	if rest == "" || rest == "}" {
		return b, nil
	}
	if len(rest) == len(params) {
		return nil, fmt.Errorf("control: the parameters of an operation are no object: %s", params)
	}
	return json.RawMessage(string(b[:len(b)-1]) + "," + rest), nil
}

// childOf gives a new span beneath one, "" beneath none. Its id is chosen before it has
// begun, so that the steps that a host takes can be put beneath it while it goes on.
func childOf(parent string) string {
	part := strings.Split(parent, "-") // version, trace, span, flags
	if len(part) != 4 {
		return ""
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	part[2] = hex.EncodeToString(id[:])
	return strings.Join(part, "-")
}
