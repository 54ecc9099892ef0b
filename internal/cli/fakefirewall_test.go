package cli

import (
	"cmp"
	"encoding/json"
	"net/http"

	"github.com/hutchrun/hutch/api"
)

// firewall shows a sandbox's firewall, and replaces it.
func (f *fake) firewall(s *api.Sandbox, w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPut {
		var body api.Firewall
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			fail(w, "invalid_argument", err.Error())
			return
		}
		f.setFirewall(s.ID, body)
	}
	now := f.firewalls[s.ID]
	now.Mode, now.Ports = cmp.Or(now.Mode, api.FirewallModeOpen), cmp.Or(now.Ports, api.FirewallPortsAllow)
	answer(w, 200, api.FirewallState{Sandbox: s.ID, Firewall: now})
}

func (f *fake) setFirewall(id string, body api.Firewall) {
	if f.firewalls == nil {
		f.firewalls = map[string]api.Firewall{}
	}
	f.firewalls[id] = body
}
