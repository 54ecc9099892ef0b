package cli

import (
	"net"
	"net/url"
	"strings"
)

// defaultPorts are what an address without a port means.
var defaultPorts = map[string]string{"http": "80", "https": "443"}

// cleanURL gives a server's address in its one form: scheme and host in lower case,
// no default port, no slash at the end. False is no address that a server can have.
func cleanURL(address string) (string, bool) {
	u, err := url.Parse(strings.TrimSpace(address))
	if err != nil || u.Hostname() == "" || defaultPorts[u.Scheme] == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", false
	}
	host, port := strings.ToLower(u.Hostname()), u.Port()
	switch {
	case port != "" && port != defaultPorts[u.Scheme]:
		host = net.JoinHostPort(host, port)
	case strings.Contains(host, ":"):
		host = "[" + host + "]"
	}
	return u.Scheme + "://" + host + strings.TrimRight(u.Path, "/"), true
}

// sameServer says whether two addresses are written differently and mean the same
// server. localhost is 127.0.0.1, where `hutch up` listens; ::1 is another address, on
// which another user's program may listen.
func sameServer(a, b string) bool {
	byNumber := func(address string) string {
		clean, ok := cleanURL(address)
		if !ok {
			return address
		}
		u, err := url.Parse(clean)
		if err == nil && u.Hostname() == "localhost" {
			u.Host = strings.Replace(u.Host, "localhost", "127.0.0.1", 1)
			return u.String()
		}
		return clean
	}
	return byNumber(a) == byNumber(b)
}
