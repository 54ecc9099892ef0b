package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// V3: a server that stays away for longer than it is asked for undoes nothing, and the
// message says so and how to go on.
func TestAwaitWithoutAServer(t *testing.T) {
	t.Parallel()
	a := &app{env: Env{Stderr: &bytes.Buffer{}}, progress: &progress{}, patience: 1}
	away := clientOf(t, 503, api.Error{Error: api.ErrorDetail{Code: "unavailable", Message: "away"}})
	for kind, want := range map[string]string{
		"sleep":       "the sleep of demo goes on when it is back, `hutch operations wait op_1` waits again",
		buildTemplate: "the build of template demo goes on when it is back, `hutch operations wait op_1` waits again",
	} {
		op := doc[api.Operation]{V: api.Operation{ID: "op_1", Kind: kind, Status: api.OperationStatusRunning}}
		got, err := a.await(t.Context(), away, "demo", op, func(string) {})
		if !fault.Is(err, fault.Unavailable) || !strings.Contains(fault.Of(err).Message, want) || !active(got.V) {
			t.Errorf("await = %+v, %v; want %q", got.V, err, want)
		}
	}
}

// A command named by its id alone is not said to be nowhere while a sandbox that may
// have it does not answer.
func TestFindCommandWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	f.mu.Lock()
	f.rules = append(f.rules, &rule{method: "GET", prefix: "/v1/sandboxes/sbx_00000000000000000000000001/commands", times: 1, what: "unavailable", message: "the guest is busy"})
	f.mu.Unlock()
	vars := map[string]string{"HUTCH_URL": f.server.URL, "HUTCH_API_KEY": fakeKey}
	a := &app{env: Env{Getenv: func(name string) string { return vars[name] }}}
	c, err := a.newClient(New(a.env))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := a.findCommand(t.Context(), c, a.commandsKillCommand(), []string{"cmd_1"}); !fault.Is(err, fault.Unavailable) {
		t.Errorf("findCommand = %v; want unavailable", err)
	}
	if _, _, err := a.findCommand(t.Context(), c, a.commandsKillCommand(), []string{"cmd_1"}); !fault.Is(err, fault.NotFound) {
		t.Errorf("findCommand = %v; want not_found", err)
	}
}

// V3: a verb that succeeded is not called a failure because the server was just started
// again when the sandbox was looked at last: whoever believes that does it twice.
func TestFinishOutlastsARestart(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.add("demo", api.StateReady)
	f.mu.Lock()
	f.rules = append(f.rules, &rule{method: "GET", prefix: "/v1/sandboxes/sbx_00000000000000000000000001", times: 1, what: "unavailable", message: "the server starts"})
	f.mu.Unlock()
	vars := map[string]string{"HUTCH_URL": f.server.URL, "HUTCH_API_KEY": fakeKey}
	a := &app{env: Env{Stderr: &bytes.Buffer{}, Getenv: func(name string) string { return vars[name] }}, progress: &progress{}, patience: time.Minute}
	c, err := a.newClient(New(a.env))
	if err != nil {
		t.Fatal(err)
	}
	done := doc[api.Operation]{V: api.Operation{ID: "op_1", Kind: "sleep", Status: api.OperationStatusSucceeded}}
	ch, err := a.finish(t.Context(), c, change{Sandbox: doc[api.Sandbox]{V: api.Sandbox{ID: "sbx_00000000000000000000000001", Name: "demo"}}, Operation: &done},
		&changeFlags{}, func(string) {})
	if err != nil || ch.Sandbox.V.State != api.StateReady {
		t.Errorf("finish = %+v, %v", ch.Sandbox.V.State, err)
	}
}
