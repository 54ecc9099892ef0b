package apiserver

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/hostproto"
)

// Whatever callers send and get, and whether it is taken or refused, no secret of theirs
// comes into the log, at any level.
func TestNoSecretIsLogged(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const canary = "canary-7f3a91"
	decode[api.Change](t, r.do("POST", "/v1/sandboxes?wait=20s",
		`{"name":"box","env":{"TOKEN":"`+canary+`-env"},"labels":{"note":"`+canary+`-label"}}`, "Idempotency-Key: "+canary+"-request"), 200)
	const box = "/v1/sandboxes/box"
	events := readStream(t, r, "POST", box+"/commands", `{"command":["sh","-c","cat; echo `+canary+`-output >&2; exit 1"],"env":{"PASSWORD":"`+canary+`-command"}}`)
	if !strings.Contains(events, "exit") {
		t.Fatalf("the command said %s", events)
	}
	reader := decode[api.Command](t, r.do("POST", box+"/commands", `{"command":"read x","stdin":true,"detach":true}`), 201)
	r.do("POST", box+"/commands/"+reader.ID+"/stdin?offset=0", canary+"-stdin\n", "Content-Type: application/octet-stream")
	r.do("PUT", box+"/files?path=f", canary+"-content", "Content-Type: application/octet-stream")
	if a := r.do("GET", box+"/files?path=f", ""); string(a.body) != canary+"-content" {
		t.Fatalf("the file has %s", a.body)
	}
	made := decode[api.CreatedKey](t, r.do("POST", "/v1/keys", `{"name":"second"}`), 201)
	r.do("GET", "/v1/version", "", "Authorization: ", "X-API-Key: "+made.Secret)
	r.do("DELETE", "/v1/keys/"+made.Key.ID, "")
	hook := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", `{"url":"https://127.0.0.1:1/?token=`+canary+`-url","events":["webhook.*"]}`), 201)
	r.do("POST", "/v1/webhooks/"+hook.Webhook.ID+"/test", "") // to a private address, which is refused
	// What fails at the host is logged with its cause.
	r.host.fail("sleep", &hostproto.Failure{Kind: "internal", Message: "made to fail"})
	r.verb("box", "sleep")

	for pattern := range mustContract(t) {
		method, path, _ := cutPattern(pattern)
		if path == "/v1/events" || strings.HasSuffix(path, "/watch") || method == "DELETE" {
			continue // a stream without an end; what goes away
		}
		path = strings.NewReplacer("{ref}", "box", "{id}", reader.ID, "{name}", "base").Replace(path)
		for _, headers := range [][]string{
			{"Authorization: Bearer hutch_" + canary + "-bearer"},
			{"Authorization: Basic " + canary + "-basic", "X-API-Key: " + canary + "-key", "Cookie: " + canary},
			{"Idempotency-Key: " + canary + "-key2"},
		} {
			for _, query := range []string{"", "?" + canary + "=" + canary} {
				body := ""
				if method != "GET" {
					body = `{"` + canary + `":"` + canary + `"}`
				}
				r.do(method, path+query, body, headers...)
			}
		}
	}
	log := r.log.String()
	for line := range strings.Lines(log) {
		if strings.Contains(line, canary) || strings.Contains(line, r.key) || strings.Contains(line, made.Secret) || strings.Contains(line, hook.Secret) {
			t.Errorf("a secret is in the log: %s", line)
		}
	}
	if strings.Count(log, `"msg":"request"`) < 100 {
		t.Errorf("the log has few lines: %s", log)
	}
}

// readStream calls and reads the answer to its end.
func readStream(t *testing.T, r *rig, method, path, body string) string {
	t.Helper()
	a := r.do(method, path, body)
	if a.status != 200 && a.status != 201 {
		t.Fatalf("%s: %d %s", path, a.status, a.body)
	}
	return string(a.body)
}

// One call is found by one id: in its answer, in its line of the log, in the operation
// that it began and in what the host is told.
func TestRequestIDLeadsFromTheCallToTheHost(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	a := r.do("POST", "/v1/sandboxes/box/fork?wait=20s", `{"mode":"live","count":2,"name":"twin"}`)
	forked := decode[api.ForkResult](t, a, 200)
	id := a.header.Get("X-Request-Id")
	if id == "" || forked.Operation.RequestID != id {
		t.Errorf("the call is %q, its operation is of %q", id, forked.Operation.RequestID)
	}
	for _, child := range forked.Forks {
		ops := decode[api.OperationList](t, r.do("GET", "/v1/operations?sandbox="+child.Sandbox.ID, ""), 200)
		if ops.Operations[0].RequestID != id {
			t.Errorf("the creation of %s is of %q", child.Sandbox.Name, ops.Operations[0].RequestID)
		}
	}
	slept := r.do("POST", "/v1/sandboxes/box/sleep?wait=20s", "")
	woken := r.do("GET", "/v1/sandboxes/box/files/list?path=.", "") // wakes it
	ops := decode[api.OperationList](t, r.do("GET", "/v1/operations?sandbox=box", ""), 200).Operations
	if last := ops[len(ops)-1]; last.Kind != "wake" || last.RequestID != woken.header.Get("X-Request-Id") {
		t.Errorf("the wake is %+v, the call that woke it %q", last, woken.header.Get("X-Request-Id"))
	}
	byVerb := map[string]string{}
	r.host.mu.Lock()
	for _, c := range r.host.submitted {
		byVerb[string(c.Verb)] = c.Request
	}
	r.host.mu.Unlock()
	for verb, want := range map[string]string{
		"fork": id, "sleep": slept.header.Get("X-Request-Id"), "wake": woken.header.Get("X-Request-Id"),
	} {
		if byVerb[verb] != want {
			t.Errorf("the host has the %s of %q, the call was %q", verb, byVerb[verb], want)
		}
		if !logged(r.log.String(), "request", want) {
			t.Errorf("no line of the log is of %s", want)
		}
	}
}

// logged says whether a line of the log has the value beneath the key.
func logged(log, key, value string) bool {
	for line := range strings.Lines(log) {
		var fields map[string]any
		if json.Unmarshal([]byte(line), &fields) == nil && fmt.Sprint(fields[key]) == value {
			return true
		}
	}
	return false
}
