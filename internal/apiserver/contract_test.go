package apiserver

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/hutchrun/hutch/api"
	"github.com/hutchrun/hutch/internal/fault"
)

func mustLoad(t testing.TB) *openapi3.T {
	t.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(api.Spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := doc.Validate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return doc
}

// Every call of the description is served under its own pattern, so that no call
// escapes the checks.
func TestContractCoversEveryRoute(t *testing.T) {
	t.Parallel()
	h, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	s, ok := h.(*server)
	if !ok {
		t.Fatal("no server")
	}
	public := []string{}
	for pattern, op := range s.contract {
		method, path, _ := cutPattern(pattern)
		_, served := s.mux.Handler(&http.Request{Method: method, URL: &url.URL{Path: path}, Host: "localhost"})
		if served != pattern {
			t.Errorf("%s is served as %q", pattern, served)
		}
		if op.public {
			public = append(public, op.id)
		}
	}
	slices.Sort(public)
	if !slices.Equal(public, []string{"getHealth", "getReadiness", "getSpec"}) {
		t.Errorf("these calls need no key: %v", public)
	}
}

// Every object of the API is closed, so that an unknown field is never taken in silence.
func TestEverySchemaIsClosed(t *testing.T) {
	t.Parallel()
	doc := mustLoad(t)
	open := map[string]bool{"Labels": true}
	for name, ref := range doc.Components.Schemas {
		schema := ref.Value
		if !schema.Type.Is(openapi3.TypeObject) || open[name] {
			continue
		}
		if has := schema.AdditionalProperties.Has; has == nil || *has {
			t.Errorf("%s takes fields that it does not name", name)
		}
	}
	// What is refused as not yet supported is no field of the description.
	for pattern, op := range mustContract(t) {
		for name := range later[op.id] {
			if op.body != nil && op.body.Properties[name] != nil {
				t.Errorf("%s both has and refuses %s", pattern, name)
			}
		}
	}
}

func mustContract(t testing.TB) contract {
	t.Helper()
	c, err := loadContract(api.Spec)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCheckBody(t *testing.T) {
	t.Parallel()
	rules := mustContract(t)
	for _, c := range []struct {
		pattern, body string
		kind          fault.Kind // "" is accepted
		reason, names string
	}{
		{"POST /v1/sandboxes", `{}`, "", "", ""},
		{"POST /v1/sandboxes", `{"name":"a","sleep":{"mode":"never"},"labels":{"a":"b"}}`, "", "", ""},
		{"POST /v1/sandboxes", `{"nam":"a"}`, fault.InvalidArgument, "", `"nam"`},
		{"POST /v1/sandboxes", `{"NAME":"a"}`, fault.InvalidArgument, "", `"NAME"`},
		{"POST /v1/sandboxes", `{"sleep":{"mood":"x"}}`, fault.InvalidArgument, "", `"sleep.mood"`},
		{"POST /v1/sandboxes", `{"sleep":{"mode":"auto","idle_seconds":60},"on_idle":"stop"}`, "", "", ""},
		{"POST /v1/sandboxes", `{"sleep":{"mode":"often"}}`, fault.InvalidArgument, "", "sleep.mode"},
		{"POST /v1/sandboxes", `{"ttl_seconds":60}`, "", "", ""},
		{"POST /v1/sandboxes", `{"ttl_seconds":null}`, "", "", ""},
		{"POST /v1/sandboxes", `{"ttl_seconds":"60"}`, fault.InvalidArgument, "", "ttl_seconds"},
		{"POST /v1/sandboxes", `{"on_deadline":"stop","sleep":{"deadline":"paused"}}`, "", "", ""},
		{"POST /v1/sandboxes", `{"on_deadline":"explode"}`, fault.InvalidArgument, "", "on_deadline"},
		{"POST /v1/sandboxes", `{"sleep":{"deadline":"running"}}`, fault.InvalidArgument, "", "sleep.deadline"},
		{"POST /v1/sandboxes", `{"snapshot":"s"}`, fault.Unsupported, "snapshots", "snapshot"},
		{"POST /v1/sandboxes", `{"name":null}`, fault.InvalidArgument, "", "name"},
		{"POST /v1/sandboxes", `{"cpus":"two"}`, fault.InvalidArgument, "", "cpus"},
		{"POST /v1/sandboxes", `{"cpus":1.5}`, fault.InvalidArgument, "", "cpus"},
		{"POST /v1/sandboxes", `{"labels":{"a":1}}`, fault.InvalidArgument, "", "labels.a"},
		{"PATCH /v1/sandboxes/{ref}", `{"labels":{}}`, "", "", ""},
		{"PATCH /v1/sandboxes/{ref}", `{"ttl_seconds":60}`, "", "", ""},
		{"PATCH /v1/sandboxes/{ref}", `{"on_deadline":"delete","sleep":{"deadline":"run"}}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/stop", `{}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/stop", `{"force":true}`, fault.InvalidArgument, "", `"force"`},
		{"POST /v1/sandboxes/{ref}/resume", `{"ttl_seconds":60}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/wake", `{"ttl_seconds":null}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/wake", `{"ttl":60}`, fault.InvalidArgument, "", `"ttl"`},
		{"POST /v1/sandboxes/{ref}/fork", `{"ttl_seconds":60}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/fork", `{"mode":"half"}`, fault.InvalidArgument, "", "mode"},
		{"POST /v1/sandboxes/{ref}/commands", `{"command":["a"],"pty":{"rows":1,"cols":2}}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/commands", `{"command":"a b"}`, "", "", ""},
		{"POST /v1/sandboxes/{ref}/commands", `{}`, fault.InvalidArgument, "", "command"},
		{"POST /v1/sandboxes/{ref}/commands", `{"command":[]}`, fault.InvalidArgument, "", "command"},
		{"POST /v1/sandboxes/{ref}/commands", `{"command":7}`, fault.InvalidArgument, "", "command"},
		{"POST /v1/sandboxes/{ref}/commands", `{"command":["a"],"pty":{"rows":0,"cols":2}}`, fault.InvalidArgument, "", "pty.rows"},
		{"POST /v1/sandboxes/{ref}/commands", `{"command":["a"],"pty":{"rows":1,"cols":2,"z":1}}`, fault.InvalidArgument, "", `"pty.z"`},
		{"POST /v1/keys", `{"name":"k","scopes":["a"]}`, fault.InvalidArgument, "", "scopes"},
		{"POST /v1/templates", `{"name":"t","source":{"oci":"x","tag":1}}`, fault.InvalidArgument, "", `"source.tag"`},
	} {
		v, err := parseJSON([]byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		err = rules[c.pattern].checkBody(v)
		if c.kind == "" {
			if err != nil {
				t.Errorf("%s %s: %v", c.pattern, c.body, err)
			}
			continue
		}
		f := fault.Of(err)
		if err == nil || f.Kind != c.kind || f.Reason != c.reason || !contains(f.Message, c.names) {
			t.Errorf("%s %s: %+v, want %s %s that names %s", c.pattern, c.body, f, c.kind, c.reason, c.names)
		}
	}
}

func TestCheckQuery(t *testing.T) {
	t.Parallel()
	rules := mustContract(t)
	for _, c := range []struct{ pattern, query, names string }{
		{"GET /v1/sandboxes", "", ""},
		{"GET /v1/sandboxes", "limit=1000&cursor=&state=ready&state=stopped&label=a%3Db", ""},
		{"GET /v1/sandboxes", "limit=0", "limit"},
		{"GET /v1/sandboxes", "limit=1001", "limit"},
		{"GET /v1/sandboxes", "limit=ten", "limit"},
		{"GET /v1/sandboxes", "limit=1&limit=2", "limit"},
		{"GET /v1/sandboxes", "state=asleep", "state"},
		{"GET /v1/sandboxes", "stat=ready", "stat"},
		{"GET /v1/sandboxes", "template=a%00b", "template"},
		{"DELETE /v1/sandboxes/{ref}", "permanent=yes", "permanent"},
		{"GET /v1/events", "after=-1", "after"},
		{"PUT /v1/sandboxes/{ref}/files", "path=a&mode=rwx", "mode"},
		{"PUT /v1/sandboxes/{ref}/files", "path=a&mode=0755", ""},
		{"GET /v1/sandboxes/{ref}/files/list", "path=..%2F..&depth=3", ""},
		{"GET /v1/sandboxes/{ref}/files/list", "path=a&depth=65", "depth"},
	} {
		q, err := url.ParseQuery(c.query)
		if err != nil {
			t.Fatal(err)
		}
		err = rules[c.pattern].checkQuery(q)
		if c.names == "" {
			if err != nil {
				t.Errorf("%s?%s: %v", c.pattern, c.query, err)
			}
			continue
		}
		if !fault.Is(err, fault.InvalidArgument) || !contains(fault.Of(err).Message, c.names) {
			t.Errorf("%s?%s: %v", c.pattern, c.query, err)
		}
	}
}

func contains(s, part string) bool { return strings.Contains(s, part) }

func cutPattern(pattern string) (method, path string, ok bool) { return strings.Cut(pattern, " ") }
