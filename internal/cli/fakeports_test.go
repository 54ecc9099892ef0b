package cli

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/hutchrun/hutch/api"
)

// servePorts adds the calls on ports: grants in memory, of all sandboxes together.
func (f *fake) servePorts(mux *http.ServeMux) {
	at := api.At(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	mux.HandleFunc("GET /v1/sandboxes/{ref}/ports", func(w http.ResponseWriter, _ *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		answer(w, http.StatusOK, api.PortGrantList{Ports: append([]api.PortGrant{}, f.ports...)})
	})
	mux.HandleFunc("POST /v1/sandboxes/{ref}/ports", func(w http.ResponseWriter, r *http.Request) {
		var body api.OpenPort
		_ = json.NewDecoder(r.Body).Decode(&body)
		f.mu.Lock()
		defer f.mu.Unlock()
		g := api.PortGrant{ID: fmt.Sprint("prt_", len(f.ports)+1), Port: body.Port, Public: body.Public, CreatedAt: at}
		if body.Port != 0 {
			g.URL = fmt.Sprintf("http://%d-x.localhost/", body.Port)
		}
		token := ""
		if !body.Public {
			g.ExpiresAt, token = &at, "hutchp_abc"
		}
		f.ports = append(f.ports, g)
		answer(w, http.StatusCreated, api.OpenedPort{Grant: g, Token: token})
	})
	mux.HandleFunc("DELETE /v1/sandboxes/{ref}/ports/{id}", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		before := len(f.ports)
		f.ports = slices.DeleteFunc(f.ports, func(g api.PortGrant) bool { return g.ID == r.PathValue("id") })
		if len(f.ports) == before {
			fail(w, "not_found", "there is no such grant; `hutch ports ls NAME` lists those that are")
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
}
