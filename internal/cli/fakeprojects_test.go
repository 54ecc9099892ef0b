package cli

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/hutchrun/hutch/api"
)

// projectRoutes are one project with limits, which calls change, and its keys.
func (f *fake) projectRoutes(mux *http.ServeMux) {
	at := api.At(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	due := api.At(at.Add(time.Hour))
	web := func() api.Project {
		f.mu.Lock()
		defer f.mu.Unlock()
		if p, ok := f.byKey["project"].(api.Project); ok {
			return p
		}
		return api.Project{
			ID: "web", Plan: api.PlanTrial, Quotas: api.Quotas{Running: 5, MemoryBytes: 16 << 30}, Rate: api.Rate{PerSecond: 10, Burst: 20}, CreatedAt: at,
			Budget: &api.Budget{Limit: "10", Spent: "2.500000", DueAt: &due},
			Use:    api.Use{Sandboxes: 3, Running: 2, VCPUs: 4, MemoryBytes: 2 << 30, DiskBytes: 12e9},
		}
	}
	change := func(w http.ResponseWriter, r *http.Request, status int) {
		p := web()
		var body struct {
			api.UpdateProject
			Name string `json:"name"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			fail(w, "invalid_argument", err.Error())
			return
		}
		if body.Name != "" {
			p = api.Project{ID: body.Name, Plan: api.PlanStandard, CreatedAt: at}
		}
		if body.Plan != nil {
			p.Plan = *body.Plan
		}
		if body.Quotas != nil {
			p.Quotas = *body.Quotas
		}
		if body.Rate != nil {
			p.Rate = *body.Rate
		}
		if body.TTLSeconds != nil {
			p.TTLSeconds = *body.TTLSeconds
		}
		if body.Budget != nil {
			if p.Budget = nil; *body.Budget != "" {
				p.Budget = &api.Budget{Limit: *body.Budget, Spent: "0.000000"}
			}
		}
		f.mu.Lock()
		f.byKey["project"] = p
		f.mu.Unlock()
		answer(w, status, p)
	}
	mux.HandleFunc("GET /v1/projects", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, api.ProjectList{Projects: []api.Project{web()}})
	})
	mux.HandleFunc("POST /v1/projects", func(w http.ResponseWriter, r *http.Request) { change(w, r, 201) })
	mux.HandleFunc("GET /v1/projects/{id}", func(w http.ResponseWriter, r *http.Request) {
		if p := web(); p.ID == r.PathValue("id") {
			answer(w, 200, p)
			return
		}
		fail(w, "not_found", "there is no project "+r.PathValue("id"))
	})
	mux.HandleFunc("PATCH /v1/projects/{id}", func(w http.ResponseWriter, r *http.Request) { change(w, r, 200) })
	key := func(r *http.Request) api.Key {
		k := api.Key{ID: "key_1", Project: "default", Name: "ci", Prefix: "hutch_ab", Scopes: []api.Scope{"read", "write", "exec", "keys"}, CreatedAt: at}
		var body api.CreateKey
		if json.NewDecoder(r.Body).Decode(&body) != nil {
			return k
		}
		if body.Project != "" {
			k.Project = body.Project
		}
		if len(body.Scopes) > 0 {
			k.Scopes = body.Scopes
		}
		if until, err := time.Parse(time.RFC3339, body.ExpiresAt); err == nil {
			k.ExpiresAt = api.AtOrNil(until)
		}
		k.Name = body.Name
		return k
	}
	mux.HandleFunc("GET /v1/keys", func(w http.ResponseWriter, r *http.Request) {
		k := key(r)
		k.Project = r.URL.Query().Get("project")
		answer(w, 200, page(r, "keys", []api.Key{k}))
	})
	mux.HandleFunc("POST /v1/keys", func(w http.ResponseWriter, r *http.Request) {
		answer(w, 201, api.CreatedKey{Key: key(r), Secret: "hutch_secret"})
	})
	mux.HandleFunc("POST /v1/keys/{id}/rotate", func(w http.ResponseWriter, r *http.Request) {
		answer(w, 200, api.CreatedKey{Key: key(r), Secret: "hutch_fresh"})
	})
	sshKey := api.SSHKey{ID: "sshk_1", Project: "default", Name: "me@laptop", Fingerprint: "SHA256:abc", PublicKey: "ssh-ed25519 AAAA", CreatedAt: at}
	mux.HandleFunc("GET /v1/ssh-keys", func(w http.ResponseWriter, r *http.Request) {
		answer(w, 200, page(r, "ssh_keys", []api.SSHKey{sshKey}))
	})
	mux.HandleFunc("POST /v1/ssh-keys", func(w http.ResponseWriter, r *http.Request) {
		var body api.AddSSHKey
		k := sshKey
		if json.NewDecoder(r.Body).Decode(&body) == nil {
			k.PublicKey, k.Name = body.PublicKey, body.Name
		}
		answer(w, 201, k)
	})
	mux.HandleFunc("DELETE /v1/ssh-keys/{id}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
	mux.HandleFunc("DELETE /v1/keys/{id}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
}
