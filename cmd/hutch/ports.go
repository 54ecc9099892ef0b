package main

import (
	"context"
	"net"
	"net/http"

	"github.com/hutchrun/hutch/internal/apiserver"
	"github.com/hutchrun/hutch/internal/control"
	"github.com/hutchrun/hutch/internal/gateway"
)

// ports puts the gateway to the sandboxes' ports before the API.
func (f *front) ports(ctl *control.Control, api http.Handler) http.Handler {
	cfg := gateway.Config{
		Next: api, Fail: apiserver.Fail, Lasting: apiserver.Lasting, Log: f.log,
		Open: func(ctx context.Context, t gateway.Target, c gateway.Credential) (gateway.Way, error) {
			a, err := ctl.Port(ctx, t.Sandbox, t.Port, control.PortCredential{Token: c.Token, Key: c.Key})
			if err != nil {
				return gateway.Way{}, err
			}
			return gateway.Way{Sandbox: t.Sandbox, Generation: a.Guest.Generation, Dial: a.Guest.DialPort, Done: a.Guest.Done}, nil
		},
	}
	if f.domain != "" {
		cfg.Domains = []string{f.domain}
	}
	return gateway.New(cfg)
}

// portURL is the address of a port: below the operator's domain, which a proxy with TLS
// serves, or below localhost at the port that the caller called.
func (f *front) portURL(host, sandboxID string, port int) string {
	label := gateway.Label(sandboxID, port)
	if f.domain != "" {
		return "https://" + label + "." + f.domain + "/"
	}
	name := label + ".localhost"
	if _, p, err := net.SplitHostPort(host); err == nil {
		name = net.JoinHostPort(name, p)
	}
	return "http://" + name + "/"
}
