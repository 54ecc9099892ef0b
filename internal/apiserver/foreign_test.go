package apiserver

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/fault"
)

// keyFor makes a key of a project and gives its header.
func (r *rig) keyFor(project string, scopes ...string) string {
	r.t.Helper()
	_, secret, err := r.control.CreateKey(r.t.Context(), control.Actor{Project: "default", Scopes: control.ScopeOperator},
		control.CreateKeyRequest{Name: "test", Project: project, Scopes: scopes})
	if err != nil {
		r.t.Fatal(err)
	}
	return "Authorization: Bearer " + secret
}

// publicKey is a key of SSH.
const publicKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA me@laptop"

// bodies are what calls need to get as far as looking for what they name.
var bodies = map[string]string{
	"startCommand": `{"command":["true"]}`, "signalCommand": `{"signal":"SIGKILL"}`, "resizeCommand": `{"rows":1,"cols":1}`,
	"forkSandbox": `{}`, "openPort": `{"port":1}`, "setFirewall": `{}`, "moveFile": `{"from":"a","to":"b"}`, "makeDirectory": `{"path":"a"}`, "updateSandbox": `{"name":"mine"}`, "updateWebhook": `{"description":"x"}`, "rotateWebhookSecret": `{}`, "replayWebhook": `{"from":1,"to":2}`, "updateProject": `{"plan":"trial"}`,
}

// without is a message without the name that was asked for.
func without(message, name string) string {
	return strings.ReplaceAll(message, strconv.Quote(name), "X")
}

// TestForeignKey_P1: whatever call is made with a key of another project, what it names is
// not found: with the very words that are said of what never was. A list has nothing of it.
func TestForeignKey_P1(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if _, err := r.control.CreateProject(t.Context(), control.Actor{Project: "default", Scopes: control.ScopeOperator}, "web", control.ProjectSettings{}); err != nil {
		t.Fatal(err)
	}
	theirs := r.keyFor("web")
	box := r.create("box")
	op := decode[api.OperationList](t, r.do("GET", "/v1/operations?limit=1", ""), 200).Operations[0]
	key := decode[api.CreatedKey](t, r.do("POST", "/v1/keys", `{"name":"ours"}`), 201).Key
	cmd := decode[api.Command](t, r.do("POST", "/v1/sandboxes/box/commands", `{"command":["sleep","600"],"detach":true}`), 201)
	r.template("secret")
	sshKey := decode[api.SSHKey](t, r.do("POST", "/v1/ssh-keys", `{"public_key":"`+publicKey+`"}`), 201)
	hook := decode[api.WebhookSecret](t, r.do("POST", "/v1/webhooks", `{"url":"https://1.1.1.1/hook"}`), 201).Webhook

	// What stands for each part of a path, and what never was.
	real := map[string][]string{"{ref}": {box.ID, box.Name}, "/v1/operations/{id}": {op.ID}, "/v1/keys/{id}": {key.ID}, "/v1/ssh-keys/{id}": {sshKey.ID}, "/v1/projects/{id}": {"default"}, "{name}": {"secret"}, "/v1/webhooks/{id}": {hook.ID}}
	walked := 0
	for pattern, o := range mustContract(t) {
		method, path, _ := strings.Cut(pattern, " ")
		if o.public || !strings.Contains(path, "{") {
			continue
		}
		walked++
		part := "{ref}"
		if !strings.Contains(path, part) {
			if part = "{name}"; !strings.Contains(path, part) {
				part = path[:strings.Index(path, "}")+1]
			}
		}
		if len(real[part]) == 0 {
			t.Errorf("%s names something that this test has none of: add it, so that it is known not to be seen from another project", pattern)
			continue
		}
		call := func(name string) answer {
			hole := part
			if strings.HasPrefix(part, "/") {
				hole = "{id}"
			}
			url := strings.Replace(path, hole, name, 1)
			url = strings.Replace(url, "{id}", cmd.ID, 1)
			url = strings.Replace(url, "{delivery}", "ev_0", 1)
			if _, takes := o.params["path"]; takes {
				url += "?path=x"
			}
			headers := []string{theirs}
			if o.binary {
				headers = append(headers, "Content-Type: application/octet-stream")
			}
			return r.do(method, url, bodies[o.id], headers...)
		}
		for _, name := range real[part] {
			found := refused(t, call(name), fault.NotFound)
			never := strings.Repeat("z", len(name))
			if strings.HasPrefix(name, "sbx_") || strings.HasPrefix(name, "op_") || strings.HasPrefix(name, "key_") || strings.HasPrefix(name, "sshk_") || strings.HasPrefix(name, "wh_") {
				never = name[:strings.Index(name, "_")+1] + strings.Repeat("0", len(name)-strings.Index(name, "_")-1)
			}
			none := refused(t, call(never), fault.NotFound)
			if without(found.Message, name) != without(none.Message, never) || found.Reason != none.Reason {
				t.Errorf("%s of another project says %q, of what never was %q", pattern, found.Message, none.Message)
			}
		}
	}
	if walked < 25 {
		t.Errorf("only %d calls were walked", walked)
	}

	for _, path := range []string{"/v1/sandboxes?state=ready&state=deleted", "/v1/operations", "/v1/events?limit=1000", "/v1/templates", "/v1/keys", "/v1/ssh-keys", "/v1/webhooks", "/v1/bill", "/v1/projects"} {
		a := r.do("GET", path, "", theirs, "Accept: application/json")
		for _, ours := range []string{box.ID, `"box"`, op.ID, key.ID, sshKey.ID, `"secret"`, `"default"`} {
			if strings.Contains(string(a.body), ours) {
				t.Errorf("%s with a foreign key has %s: %s", path, ours, a.body)
			}
		}
		if a.status != 200 {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	for _, path := range []string{"/v1/bill?project=default", "/v1/keys?project=default"} {
		refused(t, r.do("GET", path, "", theirs), fault.NotFound)
		if a := r.do("GET", path, ""); a.status != 200 {
			t.Errorf("%s for the operator: %d %s", path, a.status, a.body)
		}
	}
	refused(t, r.do("GET", "/v1/operations?sandbox="+box.ID, "", theirs), fault.NotFound)
	refused(t, r.do("GET", "/v1/df?sandbox=box", "", theirs), fault.NotFound)
	refused(t, r.do("POST", "/v1/keys", `{"name":"in","project":"default"}`, theirs), fault.NotFound)
}

// TestScopes_P1: a key that lacks the scope of a call is refused before anything is looked
// for; every call says which it needs.
func TestScopes_P1(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	keys := map[string]string{"read": r.keyFor("default", "read"), "write": r.keyFor("default", "write"), "exec": r.keyFor("default", "exec"), "keys": r.keyFor("default", "keys")}
	for _, c := range []struct {
		method, path, body string
		may                []string
	}{
		{"GET", "/v1/sandboxes/box", "", []string{"read", "write", "exec", "keys"}},
		{"PATCH", "/v1/sandboxes/box", `{"labels":{}}`, []string{"write"}},
		{"GET", "/v1/sandboxes/box/files/list?path=.", "", []string{"exec"}},
		{"POST", "/v1/sandboxes/box/commands", `{"command":["true"]}`, []string{"exec"}},
		{"GET", "/v1/keys", "", []string{"keys"}},
		{"POST", "/v1/projects", `{"name":"web"}`, nil},
		{"PATCH", "/v1/projects/default", `{"plan":"trial"}`, nil},
		{"POST", "/v1/sandboxes/none/sleep", "", nil}, // not even that it is not there
	} {
		for scope, header := range keys {
			a := r.do(c.method, c.path, c.body, header)
			may := slices.Contains(c.may, scope)
			if may && a.status >= 300 {
				t.Errorf("%s %s with the scope %s: %d %s", c.method, c.path, scope, a.status, a.body)
			}
			if !may && (c.path != "/v1/sandboxes/none/sleep" || scope != "write") {
				if d := refused(t, a, fault.PermissionDenied); d.Reason != "scope" || strings.Contains(d.Message, "none") {
					t.Errorf("%s %s with the scope %s: %+v", c.method, c.path, scope, d)
				}
			}
		}
	}
}
