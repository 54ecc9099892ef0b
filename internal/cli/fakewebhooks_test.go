package cli

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/hutchrun/hutch/api"
)

// serveWebhooks adds the calls on webhooks: rows in memory, whose receiver fails on tests as
// long as they are disabled.
func (f *fake) serveWebhooks(mux *http.ServeMux) {
	find := func(r *http.Request) int {
		return slices.IndexFunc(f.webhooks, func(w api.Webhook) bool { return w.ID == r.PathValue("id") })
	}
	with := func(fn func(hook *api.Webhook, w http.ResponseWriter, r *http.Request)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if i := find(r); i >= 0 {
				fn(&f.webhooks[i], w, r)
				return
			}
			fail(w, "not_found", "there is no webhook; `hutch webhooks ls` lists those that are")
		}
	}
	at := api.At(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	delivery := api.Delivery{ID: "msg_1", Seq: 7, Type: "sandbox.ready", Sandbox: "sbx_1", Status: api.DeliveryStatusFailed, Error: "status 500", Attempts: 1, EndedAt: &at, CreatedAt: at}
	mux.HandleFunc("POST /v1/webhooks", func(w http.ResponseWriter, r *http.Request) {
		var body api.CreateWebhook
		_ = json.NewDecoder(r.Body).Decode(&body)
		f.mu.Lock()
		defer f.mu.Unlock()
		hook := api.Webhook{ID: "wh_1", URL: body.URL, Description: body.Description, Events: body.Events, Status: api.WebhookStatusEnabled, Secrets: 1, CreatedAt: at}
		f.webhooks = append(f.webhooks, hook)
		answer(w, http.StatusCreated, api.WebhookSecret{Webhook: hook, Secret: "whsec_Zmlyc3Q="})
	})
	mux.HandleFunc("GET /v1/webhooks", func(w http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		answer(w, http.StatusOK, page(r, "webhooks", f.webhooks))
	})
	mux.HandleFunc("GET /v1/webhooks/{id}", with(func(hook *api.Webhook, w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, hook) }))
	mux.HandleFunc("PATCH /v1/webhooks/{id}", with(func(hook *api.Webhook, w http.ResponseWriter, r *http.Request) {
		var body api.UpdateWebhook
		_ = json.NewDecoder(r.Body).Decode(&body)
		if body.URL != nil {
			hook.URL = *body.URL
		}
		if body.Events != nil {
			hook.Events = *body.Events
		}
		if body.Enabled != nil {
			hook.Status, hook.DisabledAt, hook.DisabledReason = api.WebhookStatusEnabled, nil, ""
			if !*body.Enabled {
				hook.Status, hook.DisabledAt, hook.DisabledReason = api.WebhookStatusDisabled, &at, "disabled by hand"
			}
		}
		answer(w, http.StatusOK, hook)
	}))
	mux.HandleFunc("DELETE /v1/webhooks/{id}", with(func(_ *api.Webhook, w http.ResponseWriter, _ *http.Request) {
		f.webhooks = nil
		w.WriteHeader(http.StatusNoContent)
	}))
	mux.HandleFunc("POST /v1/webhooks/{id}/rotate-secret", with(func(hook *api.Webhook, w http.ResponseWriter, r *http.Request) {
		var body api.RotateSecret
		_ = json.NewDecoder(r.Body).Decode(&body)
		hook.Secrets = 1 + int(min(1, *body.OverlapSeconds))
		answer(w, http.StatusOK, api.WebhookSecret{Webhook: *hook, Secret: "whsec_c2Vjb25k"})
	}))
	mux.HandleFunc("POST /v1/webhooks/{id}/test", with(func(hook *api.Webhook, w http.ResponseWriter, _ *http.Request) {
		out := api.DeliveryAttempt{Number: 1, At: at, Milliseconds: 12, Status: 204}
		if hook.DisabledAt != nil {
			out.Status, out.Error = 500, "the receiver answered with status 500"
		}
		answer(w, http.StatusOK, out)
	}))
	mux.HandleFunc("POST /v1/webhooks/{id}/replay", with(func(_ *api.Webhook, w http.ResponseWriter, r *http.Request) {
		var body api.ReplayWebhook
		_ = json.NewDecoder(r.Body).Decode(&body)
		n := body.To - body.From + 1
		if body.Delivery != "" {
			n = 1
		}
		answer(w, http.StatusOK, api.Replayed{Deliveries: n})
	}))
	mux.HandleFunc("GET /v1/webhooks/{id}/deliveries", with(func(_ *api.Webhook, w http.ResponseWriter, r *http.Request) {
		answer(w, http.StatusOK, page(r, "deliveries", []api.Delivery{delivery}))
	}))
	mux.HandleFunc("GET /v1/webhooks/{id}/deliveries/{delivery}", with(func(_ *api.Webhook, w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, api.DeliveryLog{Delivery: delivery, Attempts: []api.DeliveryAttempt{
			{Number: 1, At: at, Milliseconds: 9, Error: "the receiver did not answer in time"}, {Number: 2, At: at, Milliseconds: 5, Status: 500, Error: "status 500"},
		}})
	}))
}
