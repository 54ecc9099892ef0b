package apiserver

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

// Every call of the description once, each answer checked against it.
func TestEveryRoute(t *testing.T) {
	t.Parallel()
	r := newRig(t)

	box := r.create("box")
	if box.Template != "base" || box.Generation != 1 || !box.Capabilities.MemorySnapshot || box.Host != "local" {
		t.Errorf("the sandbox is %+v", box)
	}
	if got := decode[api.Sandbox](t, r.do("GET", "/v1/sandboxes/box?wait=1s", ""), 200); got.ID != box.ID {
		t.Errorf("by name: %+v", got)
	}
	list := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes?limit=10&state=ready", ""), 200)
	if len(list.Sandboxes) != 1 || list.NextCursor != "" {
		t.Errorf("the list is %+v", list)
	}
	updated := decode[api.Sandbox](t, r.do("PATCH", "/v1/sandboxes/"+box.ID, `{"name":"crate","labels":{"team":"a"}}`), 200)
	if updated.Name != "crate" || updated.Labels["team"] != "a" {
		t.Errorf("updated to %+v", updated)
	}
	if walls := decode[api.FirewallState](t, r.do("GET", "/v1/sandboxes/crate/firewall", ""), 200); walls.Firewall.Mode != api.FirewallModeOpen {
		t.Errorf("the firewall is %+v", walls)
	}
	walls := decode[api.FirewallState](t, r.do("PUT", "/v1/sandboxes/crate/firewall", `{"mode":"allowlist","allow":["Example.com"],"deny_ports":[22]}`), 200)
	if f := walls.Firewall; f.Mode != api.FirewallModeAllowlist || len(f.Allow) != 1 || f.Allow[0] != "example.com" || len(f.DenyPorts) != 1 || walls.Pending {
		t.Errorf("the firewall is %+v", walls)
	}
	refused(t, r.do("PUT", "/v1/sandboxes/crate/firewall", `{"allow":["not a name"]}`), fault.InvalidArgument)
	decode[api.FirewallState](t, r.do("PUT", "/v1/sandboxes/crate/firewall", `{}`), 200)
	if why := decode[api.Idleness](t, r.do("GET", "/v1/sandboxes/crate/idle", ""), 200); why.State != api.StateReady || why.Sleep.Mode != api.SleepModeManual {
		t.Errorf("the idleness is %+v", why)
	}
	if m := decode[api.MissedTimers](t, r.do("GET", "/v1/sandboxes/crate/missed-timers", ""), 200); m.From != nil || len(m.Timers) != 0 {
		t.Errorf("it has missed %+v", m)
	}
	id := decode[api.Identity](t, r.do("GET", "/v1/sandboxes/crate/identity", ""), 200)
	if id.Sandbox != box.ID || len(id.Items) != 2 || id.Items[1].Status != api.IdentityItemStatusImpossible {
		t.Errorf("the identity is %+v", id)
	}
	everyCommandRoute(t, r)
	everyFileRoute(t, r)
	everyPortRoute(t, r)

	if slept := r.verb("crate", "sleep"); slept.Sandbox.State != api.StateSleeping || slept.Sandbox.Workspace.SavedAt == nil {
		t.Errorf("after sleep %+v", slept)
	}
	if woken := r.verb("crate", "wake"); woken.Sandbox.Generation != 2 {
		t.Errorf("after wake %+v", woken)
	}
	forks := decode[api.ForkResult](t, r.do("POST", "/v1/sandboxes/crate/fork?wait=20s", `{"mode":"live","count":2,"name":"twin"}`), 200)
	if len(forks.Forks) != 2 || forks.Forks[0].Sandbox.State != api.StateReady || forks.Forks[0].Sandbox.Origin.Source != box.ID {
		t.Errorf("forks %+v", forks)
	}
	if stopped := r.verb("crate", "stop"); stopped.Sandbox.State != api.StateStopped {
		t.Errorf("after stop %+v", stopped)
	}
	if resumed := r.verb("crate", "resume"); resumed.Sandbox.State != api.StateReady || resumed.Outcome != api.OutcomeStarted {
		t.Errorf("after resume %+v", resumed)
	}
	if kept := decode[api.Change](t, r.do("POST", "/v1/sandboxes/crate/keep", ""), 200); kept.Outcome != api.OutcomeDone || kept.Operation != nil {
		t.Errorf("with nothing to keep %+v", kept)
	}
	kept := decode[api.Change](t, r.do("DELETE", "/v1/sandboxes/crate?wait=20s", ""), 200)
	if kept.Sandbox.UndeleteUntil == nil || kept.Sandbox.State != api.StateDeleted {
		t.Errorf("after a delete %+v", kept)
	}
	if left := decode[api.SandboxList](t, r.do("GET", "/v1/sandboxes?undeletable=true", ""), 200); len(left.Sandboxes) != 1 || left.Sandboxes[0].ID != box.ID {
		t.Errorf("what can be brought back: %+v", left)
	}
	back := decode[api.Change](t, r.do("POST", "/v1/sandboxes/crate/undelete?wait=20s&name=box", ""), 200)
	if back.Sandbox.State != api.StateStopped || back.Sandbox.Name != "box" || back.Sandbox.UndeleteUntil != nil {
		t.Errorf("after undelete %+v", back)
	}
	decode[api.Sandbox](t, r.do("PATCH", "/v1/sandboxes/box", `{"name":"crate"}`), 200)
	receipts := decode[api.ReceiptList](t, r.do("GET", "/v1/sandboxes/crate/receipts", ""), 200)
	keys := decode[api.ReceiptKeyList](t, r.do("GET", "/v1/receipt-keys", ""), 200)
	if len(receipts.Receipts) != 2 || len(keys.Keys) != 1 || !strings.Contains(receipts.Receipts[0].Document, keys.Keys[0].ID) {
		t.Errorf("receipts %+v, keys %+v", receipts, keys)
	}
	gone := decode[api.Change](t, r.do("DELETE", "/v1/sandboxes/crate?permanent=true&wait=20s", ""), 200)
	if gone.Sandbox.State != api.StateDeleted || gone.Operation.Status != api.OperationStatusSucceeded {
		t.Errorf("after delete %+v", gone)
	}
	refused(t, r.do("GET", "/v1/sandboxes/"+box.ID, ""), fault.NotFound)

	ops := decode[api.OperationList](t, r.do("GET", "/v1/operations?sandbox="+forks.Forks[0].Sandbox.ID, ""), 200)
	if len(ops.Operations) != 1 || ops.Operations[0].Kind != "create" {
		t.Errorf("operations %+v", ops)
	}
	op := decode[api.Operation](t, r.do("GET", "/v1/operations/"+forks.Operation.ID+"?wait=1s", ""), 200)
	if op.Kind != "fork" || op.EndedAt == nil || op.Actor == "" {
		t.Errorf("operation %+v", op)
	}
	decode[api.Operation](t, r.do("POST", "/v1/operations/"+forks.Operation.ID+"/cancel", ""), 200)
	events := decode[api.EventList](t, r.do("GET", "/v1/events?limit=1000&sandbox="+forks.Forks[0].Sandbox.ID, "", "Accept: application/json"), 200)
	if len(events.Events) == 0 || events.Events[len(events.Events)-1].Type == "" {
		t.Errorf("events %+v", events)
	}
	bill := decode[api.Bill](t, r.do("GET", "/v1/bill?verify=true&from=2026-01-01&to=9999-01-01T00:00:00Z", ""), 200)
	if len(bill.Sandboxes) != 3 || bill.Sandboxes[0].Name != "crate" || bill.Total != "0.000000" || !bill.Verified || len(bill.Differences) != 0 {
		t.Errorf("the bill is %+v", bill)
	}
	refused(t, r.do("GET", "/v1/bill?from=yesterday", ""), fault.InvalidArgument)
	everyOtherRoute(t, r)
	everyWebhookRoute(t, r)

	for _, item := range mustContract(t) {
		if _, ok := r.seen.Load(item.id); !ok {
			t.Errorf("%s was not called, or never went well", item.id)
		}
	}
}

func everyCommandRoute(t *testing.T, r *rig) {
	t.Helper()
	const commands = "/v1/sandboxes/crate/commands"
	started := decode[api.Command](t, r.do("POST", commands, `{"command":"read x; echo got $x; exit 3","stdin":true,"pty":{"rows":10,"cols":40}}`), 201)
	if started.PID == 0 || started.Pty == nil || started.Pty.Cols != 40 || started.Exit != nil {
		t.Errorf("started %+v", started)
	}
	one := commands + "/" + started.ID
	if a := r.do("POST", one+"/resize", `{"rows":20,"cols":80}`); a.status != 204 {
		t.Errorf("resize: %d %s", a.status, a.body)
	}
	if sent := decode[api.StdinResult](t, r.do("POST", one+"/stdin?offset=0&keep_open=true", "hi\n", "Content-Type: application/octet-stream"), 200); sent.Offset != 3 {
		t.Errorf("stdin %+v", sent)
	}
	events := readEvents(t, r, one+"/output?follow=true")
	if text := output(events, api.CommandEventStreamPty); !strings.Contains(text, "got hi") {
		t.Errorf("the terminal shows %q", text)
	}
	if last := events[len(events)-1]; last.Exit == nil || last.Exit.Code != 3 {
		t.Errorf("the end is %+v", last)
	}
	sleeper := decode[api.Command](t, r.do("POST", commands, `{"command":["sleep","600"],"detach":true}`), 201)
	if a := r.do("POST", commands+"/"+sleeper.ID+"/signal", `{"signal":"SIGKILL"}`); a.status != 204 {
		t.Errorf("signal: %d %s", a.status, a.body)
	}
	end := readEvents(t, r, commands+"/"+sleeper.ID+"/output?follow=true")
	if exit := end[len(end)-1].Exit; exit == nil || exit.Code != 137 || exit.Signal != "KILL" {
		t.Errorf("the killed command ended with %+v", exit)
	}
	got := decode[api.Command](t, r.do("GET", one, ""), 200)
	if got.Exit == nil || got.Exit.Code != 3 || got.EndedAt == nil || got.StdinOffset != 3 || got.Pty.Rows != 20 {
		t.Errorf("ended %+v", got)
	}
	first := decode[api.CommandList](t, r.do("GET", commands+"?limit=1", ""), 200)
	second := decode[api.CommandList](t, r.do("GET", commands+"?limit=1&cursor="+first.NextCursor, ""), 200)
	if first.Commands[0].ID != started.ID || second.Commands[0].ID != sleeper.ID || second.NextCursor != "" {
		t.Errorf("pages %+v and %+v", first, second)
	}
}

func everyFileRoute(t *testing.T, r *rig) {
	t.Helper()
	const files = "/v1/sandboxes/crate/files"
	if a := r.do("POST", files+"/mkdir", `{"path":"a/b"}`); a.status != 204 {
		t.Errorf("mkdir: %d %s", a.status, a.body)
	}
	watch := r.open("GET", files+"/watch?path=a/b", nil)
	lines := json.NewDecoder(watch.Body)
	var event api.FileEvent
	if err := lines.Decode(&event); err != nil || !event.Watching {
		t.Errorf("the watch begins with %+v, %v", event, err)
	}
	content := strings.Repeat("0123456789abcdef", 40_000) // several messages
	info := decode[api.FileInfo](t, r.do("PUT", files+"?path=a/b/f&mode=0640", content, "Content-Type: application/octet-stream"), 200)
	if info.Size != int64(len(content)) || info.Mode != "0640" || info.Path != "/workspace/a/b/f" || info.Name != "f" || info.Type != api.FileInfoTypeFile {
		t.Errorf("written %+v", info)
	}
	event = api.FileEvent{}
	if err := lines.Decode(&event); err != nil || event.Change == nil {
		t.Errorf("the watch says %+v, %v", event, err)
	}
	_ = watch.Body.Close()
	if a := r.do("GET", files+"?path=/workspace/a/b/f", ""); a.status != 200 || string(a.body) != content {
		t.Errorf("read %d: %d bytes", a.status, len(a.body))
	}
	if a := r.do("POST", files+"/move", `{"from":"a/b/f","to":"a/g"}`); a.status != 204 {
		t.Errorf("move: %d %s", a.status, a.body)
	}
	stat := decode[api.FileInfo](t, r.do("GET", files+"/stat?path=a/g", ""), 200)
	if stat.Size != info.Size || stat.Owner != "root" {
		t.Errorf("stat %+v", stat)
	}
	first := decode[api.FileList](t, r.do("GET", files+"/list?path=.&depth=2&limit=2", ""), 200)
	second := decode[api.FileList](t, r.do("GET", files+"/list?path=.&depth=2&limit=2&cursor="+first.NextCursor, ""), 200)
	if len(first.Files) != 2 || first.Files[0].Name != "a" || first.Files[1].Name != "b" || len(second.Files) != 1 || second.Files[0].Name != "g" {
		t.Errorf("pages %+v and %+v", first, second)
	}
	refused(t, r.do("DELETE", files+"?path=a", ""), fault.FailedPrecondition)
	if a := r.do("DELETE", files+"?path=a&recursive=true", ""); a.status != 204 {
		t.Errorf("remove: %d %s", a.status, a.body)
	}
	refused(t, r.do("GET", files+"?path=a/g", ""), fault.NotFound)

	// A name need not be UTF-8: its bytes come in base64 and go percent-encoded.
	if err := os.WriteFile(filepath.Join(r.host.agent.Root, "workspace", "\xff"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	odd := decode[api.FileList](t, r.do("GET", files+"/list?path=.", ""), 200)
	if len(odd.Files) != 1 || string(odd.Files[0].PathBytes) != "/workspace/\xff" {
		t.Errorf("odd name: %+v", odd)
	}
	if a := r.do("GET", files+"?path=/workspace/%FF", ""); string(a.body) != "x" {
		t.Errorf("odd name: %d %s", a.status, a.body)
	}
}

func everyOtherRoute(t *testing.T, r *rig) {
	t.Helper()
	r.template("other")
	if got := decode[api.Template](t, r.do("GET", "/v1/templates/other", ""), 200); got.Source != "debian" {
		t.Errorf("template %+v", got)
	}
	templates := decode[api.TemplateList](t, r.do("GET", "/v1/templates?limit=1", ""), 200)
	if len(templates.Templates) != 1 || templates.NextCursor == "" {
		t.Errorf("templates %+v", templates)
	}
	if a := r.do("DELETE", "/v1/templates/other", ""); a.status != 204 {
		t.Errorf("delete template: %d %s", a.status, a.body)
	}
	made := decode[api.CreatedKey](t, r.do("POST", "/v1/keys", `{"name":"second"}`), 201)
	if !strings.HasPrefix(made.Secret, made.Key.Prefix) || len(made.Secret) < 50 {
		t.Errorf("key %+v", made)
	}
	keys := r.do("GET", "/v1/keys", "")
	if list := decode[api.KeyList](t, keys, 200); len(list.Keys) != 2 || strings.Contains(string(keys.body), made.Secret) {
		t.Errorf("keys %s", keys.body)
	}
	if a := r.do("GET", "/v1/version", "", "Authorization: ", "X-API-Key: "+made.Secret); a.status != 200 {
		t.Errorf("with the new key: %d %s", a.status, a.body)
	}
	if a := r.do("DELETE", "/v1/keys/"+made.Key.ID, ""); a.status != 204 {
		t.Errorf("delete key: %d %s", a.status, a.body)
	}
	refused(t, r.do("GET", "/v1/version", "", "Authorization: ", "X-API-Key: "+made.Secret), fault.Unauthenticated)
	rotated := decode[api.CreatedKey](t, r.do("POST", "/v1/keys/"+decode[api.CreatedKey](t, r.do("POST", "/v1/keys", `{"name":"third","scopes":["exec"],"expires_at":"9999-01-01"}`), 201).Key.ID+"/rotate", ""), 200)
	if rotated.Key.RotatedAt == nil || rotated.Key.ExpiresAt == nil || len(rotated.Key.Scopes) != 2 || rotated.Secret == "" {
		t.Errorf("rotated %+v", rotated)
	}
	everyProjectRoute(t, r)
	ssh := decode[api.SSHKey](t, r.do("POST", "/v1/ssh-keys", `{"public_key":"`+publicKey+`"}`), 201)
	if ssh.Name != "me@laptop" || !strings.HasPrefix(ssh.Fingerprint, "SHA256:") || ssh.PublicKey+" me@laptop" != publicKey {
		t.Errorf("SSH key %+v", ssh)
	}
	refused(t, r.do("POST", "/v1/ssh-keys", `{"public_key":"`+publicKey+`"}`), fault.Conflict)
	refused(t, r.do("POST", "/v1/ssh-keys", `{"public_key":"command=\"x\" `+publicKey+`"}`), fault.InvalidArgument)
	refused(t, r.do("POST", "/v1/ssh-keys", `{"public_key":"`+publicKey+`"}`, r.keyFor("default", "keys")), fault.PermissionDenied)
	if list := decode[api.SSHKeyList](t, r.do("GET", "/v1/ssh-keys", ""), 200); len(list.SSHKeys) != 1 || list.SSHKeys[0] != ssh {
		t.Errorf("SSH keys %+v", list)
	}
	if a := r.do("DELETE", "/v1/ssh-keys/"+ssh.ID, ""); a.status != 204 {
		t.Errorf("delete SSH key: %d %s", a.status, a.body)
	}
	hosts := decode[api.HostList](t, r.do("GET", "/v1/hosts", ""), 200)
	if len(hosts.Hosts) != 1 || hosts.Hosts[0].ID != "local" || !hosts.Hosts[0].Capabilities.HeldRestore {
		t.Errorf("hosts %+v", hosts)
	}
	r.create("full")
	df := decode[api.DiskUsage](t, r.do("GET", "/v1/df?sandbox=full", ""), 200)
	if h := df.Hosts[0]; len(df.Hosts) != 1 || h.State != api.HostDiskStateLow || h.Templates.Bytes != 7 || len(h.Sandboxes) != 1 ||
		h.Sandboxes[0].Name != "full" || h.Sandboxes[0].UniqueBytes != nil || h.Sandboxes[0].SavedMemoryBytes != 5 {
		t.Errorf("df %+v", df)
	}
	refused(t, r.do("GET", "/v1/df?sandbox=none", ""), fault.NotFound)
	if v := decode[api.Version](t, r.do("GET", "/v1/version", ""), 200); v.Version != "v0.0.0-test" {
		t.Errorf("version %+v", v)
	}
	if a := r.do("GET", "/metrics", ""); a.status != 200 || !strings.Contains(string(a.body), "hutch_sandboxes") {
		t.Errorf("metrics: %d %s", a.status, a.body)
	}
	for _, path := range []string{"/healthz", "/readyz", "/openapi.yaml"} {
		if a := r.do("GET", path, "", "Authorization: "); a.status != 200 {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
}

func everyProjectRoute(t *testing.T, r *rig) {
	t.Helper()
	made := decode[api.Project](t, r.do("POST", "/v1/projects", `{"name":"web","plan":"trial","quotas":{"running":3},"ttl_seconds":1800,"budget":"10.50"}`), 201)
	if made.ID != "web" || made.Plan != api.PlanTrial || made.Quotas.Running != 3 || made.TTLSeconds != 1800 || made.Budget == nil || made.Budget.Limit != "10.5" {
		t.Errorf("project %+v", made)
	}
	edited := decode[api.Project](t, r.do("PATCH", "/v1/projects/web", `{"rate":{"per_second":5,"burst":9},"budget":"","plan":"standard"}`), 200)
	if edited.Rate.Burst != 9 || edited.Budget != nil || edited.Plan != api.PlanStandard || edited.Quotas.Running != 3 {
		t.Errorf("edited %+v", edited)
	}
	if got := decode[api.Project](t, r.do("GET", "/v1/projects/default", ""), 200); got.Use.Sandboxes == 0 || got.Use.VCPUs == 0 {
		t.Errorf("project %+v", got)
	}
	if list := decode[api.ProjectList](t, r.do("GET", "/v1/projects?limit=1", ""), 200); len(list.Projects) != 1 || list.NextCursor == "" {
		t.Errorf("projects %+v", list)
	}
	if key := decode[api.CreatedKey](t, r.do("POST", "/v1/keys", `{"name":"theirs","project":"web"}`), 201).Key; key.Project != "web" {
		t.Errorf("key %+v", key)
	}
}

// readEvents reads a stream of a command to its end.
func readEvents(t *testing.T, r *rig, path string) []api.CommandEvent {
	t.Helper()
	a := r.do("GET", path, "")
	if a.status != 200 {
		t.Fatalf("%s: %d %s", path, a.status, a.body)
	}
	return parseEvents(t, a.body)
}

func parseEvents(t *testing.T, body []byte) []api.CommandEvent {
	t.Helper()
	var out []api.CommandEvent
	for line := range strings.Lines(string(body)) {
		var e api.CommandEvent
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %q", err, line)
		}
		out = append(out, e)
	}
	if len(out) == 0 {
		t.Fatal("the stream is empty")
	}
	return out
}

func output(events []api.CommandEvent, stream api.CommandEventStream) string {
	var b strings.Builder
	for _, e := range events {
		if e.Stream == stream {
			b.Write(e.Data)
		}
	}
	return b.String()
}

// The bytes of output are base64 on the wire.
func TestOutputIsBase64(t *testing.T) {
	t.Parallel()
	cursor := int64(0)
	b, err := json.Marshal(api.CommandEvent{Stream: api.CommandEventStreamStdout, Cursor: &cursor, Data: []byte("hi\xff")})
	want := `{"cursor":0,"data":"` + base64.StdEncoding.EncodeToString([]byte("hi\xff")) + `","stream":"stdout"}`
	if err != nil || string(b) != want {
		t.Errorf("%s, want %s", b, want)
	}
}

func everyPortRoute(t *testing.T, r *rig) {
	made := decode[api.OpenedPort](t, r.do("POST", "/v1/sandboxes/crate/ports", `{"port":3000}`, "Idempotency-Key: k"), 201)
	if !strings.HasPrefix(made.Token, "hutchp_") || made.Grant.Public || made.Grant.ExpiresAt == nil {
		t.Errorf("opened %+v", made)
	}
	if again := decode[api.OpenedPort](t, r.do("POST", "/v1/sandboxes/crate/ports", `{"port":3000}`, "Idempotency-Key: k"), 201); again.Token != "" || again.Grant.ID != made.Grant.ID {
		t.Errorf("a repeat gives %+v", again)
	}
	if public := decode[api.OpenedPort](t, r.do("POST", "/v1/sandboxes/crate/ports", `{"port":8000,"public":true}`), 201); public.Token != "" || !public.Grant.Public || public.Grant.ExpiresAt != nil {
		t.Errorf("made public: %+v", public)
	}
	for _, body := range []string{`{"port":0,"public":true}`, `{"port":65536}`, `{"port":-1}`, `{"port":1,"expires_at":"2020-01-01"}`, `{"port":1,"expires_at":"soon"}`,
		`{"port":1,"expires_at":"9999-01-01"}`, `{"port":1,"public":true,"expires_at":"9999-01-01"}`, `{}`} {
		refused(t, r.do("POST", "/v1/sandboxes/crate/ports", body), fault.InvalidArgument)
	}
	if list := decode[api.PortGrantList](t, r.do("GET", "/v1/sandboxes/crate/ports", ""), 200); len(list.Ports) != 2 || list.Ports[0].ID != made.Grant.ID {
		t.Errorf("the list is %+v", list)
	}
	if a := r.do("DELETE", "/v1/sandboxes/crate/ports/"+made.Grant.ID, ""); a.status != 204 {
		t.Errorf("revoke: %d %s", a.status, a.body)
	}
	refused(t, r.do("DELETE", "/v1/sandboxes/crate/ports/"+made.Grant.ID, ""), fault.NotFound)
}
