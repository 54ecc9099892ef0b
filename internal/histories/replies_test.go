package histories

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// How many replies are lost, of a creation and of each other call.
var lostOfCreate, lostOfEach = 1000, 200

// retriers is how many clients send the same call at a time.
const retriers = 4

// caller sends calls through the lossy proxy.
type caller struct {
	*rig
	proxy *lossy
	seed  uint64
	sent  map[string]bool // routes
}

// send sends one call once; an error is a reply that was lost.
func (c *caller) send(method, path, key, body string) (int, []byte, error) {
	req, err := http.NewRequestWithContext(c.t.Context(), method, c.proxy.url()+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.servers[0].Key)
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, text, err
}

// persist sends one call from several clients until each has an answer while replies are
// lost, and then once more. All answers name the same things.
func (c *caller) persist(lost int, method, path, body string) []byte {
	c.t.Helper()
	c.proxy.lose(lost)
	c.sent[route(method, path)] = true
	key := fmt.Sprintf("%s %s %d", method, path, c.seed)
	answers := make([][]byte, retriers)
	var all sync.WaitGroup
	for i := range answers {
		all.Go(func() {
			for {
				status, text, err := c.send(method, path, key, body)
				switch {
				case err != nil:
				case status < 300 && !c.losing():
					answers[i] = text
					return
				case status >= 300:
					c.t.Errorf("%s %s: %d: %s", method, path, status, text)
					return
				}
				if c.t.Context().Err() != nil {
					return
				}
			}
		})
	}
	all.Wait()
	for _, text := range answers[1:] {
		if !slices.Equal(named(text), named(answers[0])) {
			c.t.Errorf("%s %s was answered with\n%s\nand with\n%s", method, path, answers[0], text)
		}
	}
	return answers[0]
}

func (c *caller) losing() bool {
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	return c.proxy.left > 0
}

// named lists the ids of what an answer is about: the sandbox, the operation, the key,
// the copies; not what is at work on them by now.
func named(text []byte) []string {
	var body struct {
		ID        string
		Sandbox   struct{ ID string }
		Operation struct{ ID string }
		Key       struct{ ID string }
		Webhook   struct{ ID string }
		Grant     struct{ ID string }
		Forks     []struct{ Sandbox struct{ ID string } }
	}
	_ = json.Unmarshal(text, &body) // some answers have no body
	ids := []string{body.ID, body.Sandbox.ID, body.Operation.ID, body.Key.ID, body.Webhook.ID, body.Grant.ID}
	for _, f := range body.Forks {
		ids = append(ids, f.Sandbox.ID)
	}
	return ids
}

func (c *caller) rest(id string) {
	c.t.Helper()
	v, err := c.servers[0].Control.Get(c.t.Context(), me, id)
	if err == nil && v.Operation != nil {
		_, err = c.servers[0].Control.Wait(c.t.Context(), me, v.Operation.ID, patience)
	}
	if err != nil {
		c.t.Error(err)
	}
}

// TestLostReplies: a thousand replies to a creation are lost, at any point of their way, and
// hundreds to each other call that changes something; sent again with the same key each
// has its effect once, and is charged once.
func TestLostReplies_V1_B1(t *testing.T) {
	databases(t, func(t *testing.T, url string) {
		seed, r := newSeed(t), newRig(t, url)
		c := &caller{rig: r, proxy: newLossy(t, r.servers[0].URL, seed), seed: seed, sent: map[string]bool{}}
		var made api.Change
		if err := json.Unmarshal(c.persist(lostOfCreate, "POST", "/v1/sandboxes?wait=1m", `{"name": "otter"}`), &made); err != nil {
			t.Fatal(err)
		}
		id := made.Sandbox.ID
		c.rest(id)
		c.persist(lostOfEach, "POST", "/v1/sandboxes/"+id+"/commands", `{"command": ["add", "x"]}`)
		if a := r.command(t.Context(), call{sandbox: id, verb: get}); a.cell != "x" {
			t.Errorf("a command whose replies were lost has left %q", a.cell)
		}
		for _, verb := range []string{"sleep", "wake", "stop", "resume"} {
			c.persist(lostOfEach, "POST", "/v1/sandboxes/"+id+"/"+verb+"?wait=1m", "")
			c.rest(id)
		}
		c.persist(lostOfEach, "PATCH", "/v1/sandboxes/"+id, `{"labels": {"a": "b"}, "ttl_seconds": 1800}`)
		c.persist(lostOfEach, "POST", "/v1/sandboxes/"+id+"/fork", `{"count": 2, "name": "pup"}`)
		c.rest(id)
		c.persist(lostOfEach, "PUT", "/v1/sandboxes/"+id+"/firewall", `{"mode": "allowlist", "allow": ["example.com"]}`)
		var opened struct{ Grant struct{ ID string } }
		if err := json.Unmarshal(c.persist(lostOfEach, "POST", "/v1/sandboxes/"+id+"/ports", `{"port": 3000}`), &opened); err != nil {
			t.Fatal(err)
		}
		c.persist(lostOfEach, "DELETE", "/v1/sandboxes/"+id+"/ports/"+opened.Grant.ID, "")
		var key struct{ Key struct{ ID string } }
		if err := json.Unmarshal(c.persist(lostOfEach, "POST", "/v1/keys", `{"name": "spare"}`), &key); err != nil {
			t.Fatal(err)
		}
		c.persist(lostOfEach, "POST", "/v1/keys/"+key.Key.ID+"/rotate", `{}`)
		c.persist(lostOfEach, "DELETE", "/v1/keys/"+key.Key.ID, "")
		var line struct{ ID string }
		public := "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl spare" // RFC 8709, of nobody's secret
		if err := json.Unmarshal(c.persist(lostOfEach, "POST", "/v1/ssh-keys", `{"public_key": "`+public+`"}`), &line); err != nil {
			t.Fatal(err)
		}
		c.persist(lostOfEach, "DELETE", "/v1/ssh-keys/"+line.ID, "")
		c.persist(lostOfEach, "POST", "/v1/projects", `{"name": "second"}`)
		c.persist(lostOfEach, "PATCH", "/v1/projects/second", `{"budget": "10.00"}`)
		c.persist(lostOfEach, "POST", "/v1/templates", `{"name": "node", "source": {"debian": true}}`)
		c.built("node")
		c.persist(lostOfEach, "DELETE", "/v1/templates/node", "")
		c.webhooks()
		c.persist(lostOfEach, "POST", "/v1/sandboxes/"+id+"/keep", "")
		c.persist(lostOfEach, "DELETE", "/v1/sandboxes/"+id+"?wait=1m", "")
		c.persist(lostOfEach, "POST", "/v1/sandboxes/"+id+"/undelete?wait=1m", "")
		c.persist(lostOfEach, "DELETE", "/v1/sandboxes/"+id+"?permanent=true&wait=1m", "")

		for _, call := range keyed(t) {
			if !c.sent[call] {
				t.Errorf("no replies to %s were lost", call)
			}
		}
		c.once(id)
		r.honest()
		for _, name := range []string{"pup-1", "pup-2"} {
			r.do(diceOf(seed), call{sandbox: name, verb: string(sandbox.Delete)})
		}
		r.empty()
		c.proxy.mu.Lock()
		defer c.proxy.mu.Unlock()
		t.Logf("lost before the server %d, while it worked %d, after it %d, in the body %d; the server got %d calls",
			c.proxy.lost[beforeServer], c.proxy.lost[whileHandled], c.proxy.lost[afterHandled], c.proxy.lost[inTheBody], c.proxy.handed)
		for where := beforeServer; where < cuts; where++ {
			if c.proxy.lost[where] < lostOfCreate/8 {
				t.Errorf("only %d replies were lost at %d", c.proxy.lost[where], where)
			}
		}
	})
}

// webhooks loses replies to what is asked of webhooks. It is of events that do not come.
func (c *caller) webhooks() {
	c.t.Helper()
	var made struct{ Webhook struct{ ID string } }
	if err := json.Unmarshal(c.persist(lostOfEach, "POST", "/v1/webhooks", `{"url": "https://93.184.216.34/hook", "events": ["sandbox.archived"]}`), &made); err != nil {
		c.t.Fatal(err)
	}
	path := "/v1/webhooks/" + made.Webhook.ID
	c.persist(lostOfEach, "PATCH", path, `{"description": "of a test"}`)
	c.persist(lostOfEach, "POST", path+"/rotate-secret", `{}`)
	c.persist(lostOfEach, "POST", path+"/replay", `{"from": 1}`)
	page, err := c.servers[0].Control.Webhooks(c.t.Context(), me, control.PageQuery{})
	if err != nil || len(page.Webhooks) != 1 {
		c.t.Errorf("%d webhooks were made of one, %v", len(page.Webhooks), err)
	}
	c.persist(lostOfEach, "DELETE", path, "")
}

// built waits until no build of a template is at work.
func (c *caller) built(name string) {
	c.t.Helper()
	page, err := c.servers[0].Control.Operations(c.t.Context(), me, control.OperationQuery{})
	if err != nil {
		c.t.Fatal(err)
	}
	builds := 0
	for _, op := range page.Operations {
		if op.Kind == sandbox.BuildTemplate {
			builds++
			if a := c.ended(c.servers[0].Control, control.Result{Operation: &op}); a.word != ok {
				c.t.Errorf("the build of %s: %+v", name, a)
			}
		}
	}
	if builds != 1 {
		c.t.Errorf("%d builds were made", builds)
	}
}

// once counts in the history what each call has done, and in the ledger what it costs.
func (c *caller) once(id string) {
	c.t.Helper()
	page, err := c.servers[0].Control.Events(c.t.Context(), me, control.EventQuery{Limit: 1000})
	if err != nil {
		c.t.Fatal(err)
	}
	count := map[string]int{}
	for _, e := range page.Events {
		what := e.Type
		if e.Type == "operation.started" {
			var begun struct{ Kind string }
			if err := json.Unmarshal(e.Data, &begun); err != nil {
				c.t.Error(err)
			}
			what = "began " + begun.Kind
		}
		if e.Sandbox == id || e.Sandbox == "" || what == "sandbox.creating" {
			count[what]++
		}
	}
	for what, want := range map[string]int{
		"sandbox.creating": 3, // with two copies
		"began create":     1, "began sleep": 1, "began wake": 1, "began stop": 1, "began resume": 1, "began fork": 1, "began delete": 2, "began undelete": 1,
		"began build_template": 1, "sandbox.updated": 2 /* a label, the firewall */, "port.opened": 1, "port.closed": 1, "key.created": 2 /* with the server's own */, "key.deleted": 1, "sandbox.deleted": 2,
	} {
		if count[what] != want {
			c.t.Errorf("%q is told of %d times, want %d", what, count[what], want)
		}
	}
	bill, err := c.servers[0].Control.Bill(c.t.Context(), me, control.BillQuery{})
	if err != nil {
		c.t.Fatal(err)
	}
	sandboxes := map[string]bool{}
	for _, line := range bill.Lines {
		sandboxes[line.Sandbox] = true
	}
	if len(sandboxes) != 3 {
		c.t.Errorf("the bill has %d sandboxes, want one and its two copies", len(sandboxes))
	}
}

// route is a path without what it names.
func route(method, path string) string {
	path, _, _ = strings.Cut(path, "?")
	parts := strings.Split(path, "/")
	for i := range parts {
		if i > 2 && i%2 == 1 || strings.HasPrefix(parts[i], "{") {
			parts[i] = "{}"
		}
	}
	return method + " " + strings.Join(parts, "/")
}

// keyed lists the calls that take a request key.
func keyed(t *testing.T) []string {
	t.Helper()
	spec, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for path, item := range spec.Paths.Map() {
		for method, op := range item.Operations() {
			if op.Parameters.GetByInAndName("header", "Idempotency-Key") != nil {
				out = append(out, route(method, path))
			}
		}
	}
	return out
}
