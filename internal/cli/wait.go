package cli

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

const (
	waitSlice = "60s"                  // of ?wait=, one question for the end
	stepEvery = 250 * time.Millisecond // how often a terminal sees the step
)

// changeFlags are the flags of all verbs that change a sandbox.
type changeFlags struct {
	wait, noWait bool
	requestKey   string
	json         bool
}

func (f *changeFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.wait, "wait", false, "wait until the work is done (the default)")
	cmd.Flags().BoolVar(&f.noWait, "no-wait", false, "return as soon as the work has begun")
	cmd.MarkFlagsMutuallyExclusive("wait", "no-wait")
	addRequestKey(cmd, &f.requestKey)
	addJSON(cmd, &f.json)
}

func addRequestKey(cmd *cobra.Command, key *string) {
	cmd.Flags().StringVar(key, "request-key", "", "a key of your own: the same call with the same key happens once (a random one where not given)")
}

// keyOr gives a call's idempotency key, a random one where the user gave none.
func keyOr(key string) string {
	if key == "" {
		return newRequestKey()
	}
	return key
}

// key gives the idempotency key of a call. Several sandboxes in one line get a key
// each, as a key stands for one call.
func (f *changeFlags) key(name string, several bool) string {
	if several && f.requestKey != "" {
		return f.requestKey + ":" + name
	}
	return keyOr(f.requestKey)
}

// waitError says which operation a failure belongs to.
type waitError struct {
	Operation string
	Sandbox   string
}

// Error names the operation.
func (e *waitError) Error() string { return "operation " + e.Operation }

// board is the progress of several things at once on the one line.
type board struct {
	p *progress

	mu    sync.Mutex
	texts []string
}

func newBoard(p *progress, n int) *board { return &board{p: p, texts: make([]string, n)} }

// set changes what one of them is at; "" is nothing any more.
func (b *board) set(i int, text string) {
	b.mu.Lock()
	b.texts[i] = text
	var live []string
	for _, t := range b.texts {
		if t != "" {
			live = append(live, t)
		}
	}
	b.mu.Unlock()
	line := strings.Join(live, ", ")
	if len(live) > 1 {
		line = fmt.Sprintf("%d of %d to go: %s", len(live), len(b.texts), line)
	}
	b.p.set(line)
}

// doing are the verbs as progress shows them, by the operation's kind.
var doing = map[string]string{
	"create": "creating", "sleep": "sleeping", "wake": "waking", "stop": "stopping", "resume": "resuming",
	"fork": "forking", "delete": "deleting", "undelete": "bringing back", "snapshot": "saving", "archive": "archiving", "migrate": "migrating",
	buildTemplate: "building",
}

// buildTemplate is the kind of the operation that builds a template. It has no sandbox.
const buildTemplate = "build_template"

// work names an operation for people: `the sleep of demo`.
func work(name string, op api.Operation) string {
	switch {
	case op.Kind == buildTemplate && name != "":
		return "the build of template " + name
	case op.Kind == buildTemplate:
		return "the build of a template"
	}
	return "the " + op.Kind + " of " + name
}

// lookLine is the line that shows what became of an operation's object.
func lookLine(name string, op api.Operation) string {
	if op.Kind == buildTemplate {
		return "hutch templates ls"
	}
	return "hutch get " + name
}

// stepText is an operation at work in words: `sleeping demo … capture`.
func stepText(name string, op api.Operation) string {
	verb, ok := doing[op.Kind]
	if !ok {
		verb = op.Kind
	}
	text := verb + " " + name
	if op.Step != "" {
		text += " … " + op.Step
	}
	if op.Progress > 0 && op.Progress < 1 {
		text += fmt.Sprintf(" %d%%", int(op.Progress*100))
	}
	return text
}

func active(op api.Operation) bool {
	return op.Status == api.OperationStatusPending || op.Status == api.OperationStatusRunning
}

// await waits for the end of an operation. Network failures meanwhile are outlasted:
// the operation goes on by itself. show gets the step where progress is visible. An
// operation that ended badly is its fault.
func (a *app) await(ctx context.Context, c *client, name string, op doc[api.Operation], show func(string)) (doc[api.Operation], error) {
	if active(op.V) && a.progress.visible() {
		show(stepText(name, op.V))
		defer a.watchSteps(ctx, c, name, op.V.ID, show)()
	}
	for active(op.V) {
		err := a.keepAsking(ctx, func() (bool, error) {
			next, err := read[doc[api.Operation]](c.GetOperation(ctx, op.V.ID, &api.GetOperationParams{Wait: waitSlice}))
			if err == nil {
				op = next
			}
			return false, err
		})
		if interrupted(ctx) {
			return op, fault.Wrap(&waitError{op.V.ID, op.V.Sandbox}, fault.Cancelled,
				"stopped waiting for %s; it goes on as operation %[2]s, `hutch operations wait %[2]s` waits again",
				work(name, op.V), op.V.ID)
		}
		if fault.Is(err, fault.NotFound) {
			return op, fault.Wrap(&waitError{op.V.ID, op.V.Sandbox}, fault.NotFound,
				"the server at %s knows nothing of operation %s any more, so how %s ended is not known; `%s` shows what there is now",
				c.url, op.V.ID, work(name, op.V), lookLine(name, op.V))
		}
		if fault.Is(err, fault.Unavailable) {
			return op, fault.Wrap(&waitError{op.V.ID, op.V.Sandbox}, fault.Unavailable,
				"the server at %s has not answered for %s; %s goes on when it is back, `hutch operations wait %s` waits again",
				c.url, formatTook(a.patience), work(name, op.V), op.V.ID)
		}
		if err != nil {
			f := *fault.Of(err)
			f.Err = &waitError{op.V.ID, op.V.Sandbox}
			return op, &f
		}
	}
	return op, operationFault(name, op.V)
}

// watchSteps shows the operation's step until the returned function is called.
func (a *app) watchSteps(ctx context.Context, c *client, name, id string, show func(string)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sleepFor(ctx, stepEvery) == nil {
			if op, err := read[api.Operation](c.GetOperation(ctx, id, &api.GetOperationParams{})); err == nil && active(op) {
				show(stepText(name, op))
			}
		}
	}()
	return func() { cancel(); <-done; show("") }
}

// operationFault gives the error of an operation that has ended without success.
func operationFault(name string, op api.Operation) error {
	where := &waitError{op.ID, op.Sandbox}
	switch {
	case op.Status == api.OperationStatusSucceeded || active(op):
		return nil
	case op.Error != nil:
		return &fault.Fault{Kind: fault.Kind(op.Error.Code), Message: op.Error.Message, Reason: op.Error.Reason, Err: where}
	case op.Status == api.OperationStatusCancelled:
		return fault.Wrap(where, fault.Cancelled, "%s was cancelled; `%s` shows what there is now", work(name, op), lookLine(name, op))
	}
	return fault.Wrap(where, fault.Internal, "%s failed; `hutch operations get %s` shows the operation", work(name, op), op.ID)
}

// finish waits for the operation of a change, unless told not to, and gives the
// change as it is then.
func (a *app) finish(ctx context.Context, c *client, ch change, f *changeFlags, show func(string)) (change, error) {
	if ch.Operation == nil || f.noWait {
		return ch, nil
	}
	op, err := a.await(ctx, c, ch.Sandbox.V.Name, *ch.Operation, show)
	ch.Operation = &op
	if active(op.V) {
		return ch, err
	}
	// The change is made: a server that is just being started again does not make it fail.
	var now doc[api.Sandbox]
	getErr := a.keepAsking(ctx, func() (ended bool, err error) {
		now, err = read[doc[api.Sandbox]](c.GetSandbox(ctx, ch.Sandbox.V.ID, &api.GetSandboxParams{}))
		return false, err
	})
	switch {
	case getErr == nil:
		ch.Sandbox = now
	case fault.Is(getErr, fault.NotFound): // deleted meanwhile
		ch.Sandbox.V.State, ch.Sandbox.V.Operation, ch.Sandbox.text = api.StateDeleted, nil, nil
	case err == nil:
		err = getErr
	}
	return ch, err
}
