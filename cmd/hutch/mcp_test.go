package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// agent is a client of `hutch mcp`.
type agent struct {
	t *testing.T
	*mcp.ClientSession
}

func connectMCP(t *testing.T, transport mcp.Transport) agent {
	t.Helper()
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), transport, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = session.Close() })
	return agent{t, session}
}

// call calls a tool and gives its structured answer.
func (a agent) call(name string, args map[string]any) map[string]any {
	a.t.Helper()
	out, failed := a.try(name, args)
	if failed != "" {
		a.t.Fatalf("%s %v: %s", name, args, failed)
	}
	return out
}

func (a agent) try(name string, args map[string]any) (out map[string]any, failed string) {
	a.t.Helper()
	res, err := a.CallTool(a.t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		return nil, err.Error()
	}
	if res.IsError {
		text, _ := json.Marshal(res.Content)
		return nil, string(text)
	}
	text, err := json.Marshal(res.StructuredContent)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return out, ""
}

// An agent takes a sandbox through its life over stdio.
func TestMCPOnStdio(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(binary, "mcp")
	cmd.Env = shared.environ()
	a := connectMCP(t, &mcp.CommandTransport{Command: cmd})
	name := newName(t)
	for _, gone := range []string{name, name + "-copy"} {
		t.Cleanup(func() { _, _ = shared.try(time.Minute, nil, "delete", gone, "--yes") })
	}
	if got := a.call("new", map[string]any{"name": name, "ttl_seconds": 7200}); got["state"] != "ready" || got["stops_at"] == nil {
		t.Fatalf("new: %v", got)
	}
	box := map[string]any{"sandbox": name}
	with := func(more ...any) map[string]any {
		args := map[string]any{"sandbox": name}
		for i := 0; i < len(more); i += 2 {
			args[more[i].(string)] = more[i+1]
		}
		return args
	}
	if got := a.call("exec", with("command", "echo out; echo err >&2; exit 7")); got["status"] != "exited" || got["exit_code"] != 7.0 ||
		got["stdout"] != "out\n" || got["stderr"] != "err\n" {
		t.Errorf("exec: %v", got)
	}
	if got := a.call("exec", with("args", []string{"head", "-c", "1000000", "/dev/zero"})); got["omitted_bytes"] != 1000000.0-64<<10 {
		t.Errorf("much output: %v bytes omitted", got["omitted_bytes"])
	}
	// One that takes longer than the call waits is read on, and its code is its own.
	got := a.call("exec", with("command", "echo begun; while ! test -e /workspace/go; do sleep 0.1; done; echo ended; exit 9", "wait_seconds", 2))
	if got["status"] != "running" || got["exit_code"] != nil {
		t.Fatalf("a long one: %v", got)
	}
	a.call("write_file", with("path", "/workspace/go", "content", "h\u00e9\n", "mode", "0600"))
	rest := a.call("command_output", with("id", got["id"], "cursor", got["cursor"], "wait_seconds", 60))
	if all := fmt.Sprint(got["stdout"], rest["stdout"]); all != "begun\nended\n" || rest["exit_code"] != 9.0 {
		t.Errorf("read on: %v, then %v", got, rest)
	}
	if got := a.call("read_file", with("path", "/workspace/go")); got["content"] != "h\u00e9\n" || got["bytes"] != 4.0 {
		t.Errorf("read_file: %v", got)
	}
	if got := a.call("list_files", with("path", "/workspace")); !strings.Contains(fmt.Sprint(got), "/workspace/go") {
		t.Errorf("list_files: %v", got)
	}
	server := a.call("exec", with("args", []string{"sleep", "1000"}, "detach", true))
	if got := a.call("sleep", box); got["state"] != "sleeping" {
		t.Errorf("sleep: %v", got)
	}
	if got := a.call("wake", box); got["state"] != "ready" {
		t.Errorf("wake: %v", got)
	}
	a.call("command_kill", with("id", server["id"], "signal", "KILL"))
	if got := a.call("command_output", with("id", server["id"], "wait_seconds", 60)); got["signal"] != "KILL" {
		t.Errorf("killed: %v", got)
	}
	if got := a.call("fork", with("name", name+"-copy")); !strings.Contains(fmt.Sprint(got), name+"-copy") {
		t.Errorf("fork: %v", got)
	}
	if got := a.call("exec", map[string]any{"sandbox": name + "-copy", "command": "cat go"}); got["stdout"] != "h\u00e9\n" {
		t.Errorf("in the fork: %v", got)
	}
	a.call("delete", map[string]any{"sandbox": name + "-copy"})
	if got := a.call("stop", box); got["state"] != "stopped" {
		t.Errorf("stop: %v", got)
	}
	if got := a.call("list", map[string]any{"state": "stopped"}); !strings.Contains(fmt.Sprint(got), name) {
		t.Errorf("list: %v", got)
	}
	a.call("delete", map[string]any{"sandbox": name, "permanent": true})
	if _, failed := a.try("get", box); !strings.Contains(failed, "not_found") {
		t.Errorf("after the delete: %q", failed)
	}
	if _, failed := a.try("exec", with("command", "a", "args", []string{"b"})); !strings.Contains(failed, "invalid_argument") {
		t.Errorf("both: %q", failed)
	}
}

// Over HTTP each request brings its key, and one without gets nowhere.
func TestMCPOverHTTP(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), binary, "mcp", "--listen", "127.0.0.1:0")
	cmd.Env = shared.environ()
	said, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(said).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	at := strings.TrimPrefix(strings.TrimSpace(line), "MCP at ")
	with := func(key string) *mcp.StreamableClientTransport {
		return &mcp.StreamableClientTransport{Endpoint: at, HTTPClient: &http.Client{Transport: keyed(key)}}
	}
	a := connectMCP(t, with(shared.key(t)))
	b := newBox(t)
	if got := a.call("exec", map[string]any{"sandbox": b.name, "command": "echo over http"}); got["stdout"] != "over http\n" {
		t.Errorf("exec: %v", got)
	}
	if _, failed := connectMCP(t, with("hutch_wrong")).try("list", nil); !strings.Contains(failed, "unauthenticated") {
		t.Errorf("with a wrong key: %q", failed)
	}
	for name, c := range map[string]struct {
		header [2]string
		want   int
	}{
		"no key":         {[2]string{}, http.StatusUnauthorized},
		"another origin": {[2]string{"Origin", "https://evil.example"}, http.StatusForbidden},
	} {
		req, err := http.NewRequestWithContext(t.Context(), "POST", at, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		if c.header[0] != "" {
			req.Header.Set(c.header[0], c.header[1])
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != c.want {
			t.Errorf("%s: status %d", name, res.StatusCode)
		}
	}
}

// keyed adds a key to each request.
type keyed string

func (k keyed) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+string(k))
	return http.DefaultTransport.RoundTrip(req)
}
