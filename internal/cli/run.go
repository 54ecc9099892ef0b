package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"charm.land/fang/v2"
	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/internal/fault"
)

// exitStatus ends hutch with a code and without a word: the exit code of a command
// that ran in a sandbox.
type exitStatus int

// Error says which.
func (e exitStatus) Error() string { return fmt.Sprintf("the command ended with exit code %d", int(e)) }

// Run runs the command line and gives its exit code. Errors go to stderr: two lines
// for people, one JSON object where --json is given. ctx must not end on a signal:
// each verb handles its signals itself (exec forwards them, waiting verbs name the
// operation that goes on).
func Run(ctx context.Context, root *cobra.Command, args []string) int {
	if args == nil {
		args = []string{} // cobra takes nil for the process's own
	}
	root.SetArgs(args)
	var failure error
	ran := root
	keepErrors(root, &failure, &ran)
	quiet := func(w io.Writer, _ fang.Styles, _ error) {}
	usage := fang.Execute(ctx, root, fang.WithoutVersion(), fang.WithoutManpage(), fang.WithErrorHandler(quiet))
	if usage != nil {
		var rest []string
		if ran, rest, _ = root.Find(args); ran == nil {
			ran = root
		}
		failure = usageFault(ran, usage, rest)
	}
	if failure == nil {
		return 0
	}
	if status, ok := errors.AsType[exitStatus](failure); ok {
		return int(status)
	}
	code := ExitCode(failure)
	if ran.Annotations[annotationExec] != "" {
		code = exitExec
	}
	if wantsJSON(args) {
		body := bodyOf(failure)
		body.ExitCode = code
		_ = writeJSON(root.ErrOrStderr(), errorDocument{body}) // nothing is left to tell of a broken stderr
	} else {
		reportError(root.ErrOrStderr(), failure)
	}
	return code
}

// annotationExec marks the command whose own failures end with exitExec.
const annotationExec = "hutch-exec"

// keepErrors makes every command hand its error to failure rather than to fang, which
// asks the terminal for its colours whenever a command fails: the terminal of an exec
// belongs to the command inside. ran becomes the command that ran.
func keepErrors(cmd *cobra.Command, failure *error, ran **cobra.Command) {
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			*ran = cmd
			*failure = run(cmd, args)
			return nil
		}
	}
	for _, sub := range cmd.Commands() {
		keepErrors(sub, failure, ran)
	}
}

// wantsJSON says whether the line asks for JSON, also where it could not be parsed.
func wantsJSON(args []string) bool {
	if i := slices.Index(args, "--"); i >= 0 {
		args = args[:i]
	}
	return slices.Contains(args, "--json") || slices.Contains(args, "--json=true")
}

// errorDocument is the JSON form of an error.
type errorDocument struct {
	Error errorBody `json:"error"`
}

type errorBody struct {
	Code       string `json:"code"`
	Message    string `json:"message"`
	Reason     string `json:"reason,omitempty"`
	RetryAfter int    `json:"retry_after_seconds,omitempty"`
	Operation  string `json:"operation,omitempty"`
	Sandbox    string `json:"sandbox,omitempty"`
	RequestID  string `json:"request_id,omitempty"`
	ExitCode   int    `json:"exit_code"`
}

// bodyOf gives the public form of an error. An error without a kind comes from this
// side, so its text is shown: it holds nothing of the server's.
func bodyOf(err error) errorBody {
	body := errorBody{Code: string(fault.Internal), Message: err.Error(), ExitCode: ExitCode(err)}
	if f, ok := errors.AsType[*fault.Fault](err); ok {
		body.Code, body.Message, body.Reason = string(f.Kind), f.Message, f.Reason
		body.RetryAfter = int((f.RetryAfter + time.Second - 1) / time.Second)
	}
	if w, ok := errors.AsType[*waitError](err); ok {
		body.Operation, body.Sandbox = w.Operation, w.Sandbox
	}
	if r, ok := errors.AsType[*responseError](err); ok {
		body.RequestID = r.RequestID
	}
	return body
}

// reportError writes an error to stderr, for people.
func reportError(w io.Writer, err error) {
	body := bodyOf(err)
	what, next, _ := strings.Cut(body.Message, "; ")
	if cause := causeOf(err); cause != "" {
		what += " (" + cause + ")"
	}
	fmt.Fprintf(w, "hutch: %s\n", clean(what))
	if next == "" {
		next = hint(err, fault.Kind(body.Code), body.Reason)
	}
	if body.RetryAfter > 0 {
		next = strings.TrimPrefix(next+fmt.Sprintf("; try again in %d s", body.RetryAfter), "; ")
	}
	if next != "" {
		fmt.Fprintf(w, "  %s\n", clean(next))
	}
}

// causeOf gives the cause that a fault of this side has. What comes from a server has
// none.
func causeOf(err error) string {
	f, ok := errors.AsType[*fault.Fault](err)
	if !ok || f.Err == nil {
		return ""
	}
	if _, remote := errors.AsType[*responseError](f.Err); remote {
		return ""
	}
	if _, waiting := errors.AsType[*waitError](f.Err); waiting {
		return ""
	}
	return f.Err.Error()
}

// hint says what to do next where the message does not. It fits what was not found, and
// speaks of a server only where one spoke.
func hint(err error, kind fault.Kind, reason string) string {
	_, remote := errors.AsType[*responseError](err)
	switch {
	case kind == fault.NotFound && remote:
		return notFoundHints[reason]
	case kind == fault.RateLimited:
		return "wait a little and try again"
	case kind == fault.Unavailable:
		return "try again in a moment"
	case kind == fault.Internal && remote:
		return "the server's log says more"
	}
	return ""
}

// notFoundHints are by the reason of a not_found, which says what is not there.
var notFoundHints = map[string]string{
	"sandbox":   "`hutch ls` lists those that are",
	"operation": "`hutch operations ls` lists those that are",
	"template":  "`hutch templates ls` lists those that are",
	"key":       "`hutch keys ls` lists those that are",
	"command":   "`hutch commands ls NAME` lists those that are",
}
