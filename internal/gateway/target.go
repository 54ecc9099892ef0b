package gateway

import (
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Target is the port of a sandbox that a request is for.
type Target struct {
	Sandbox string // its id
	Port    int
	Prefix  string // of the path, which the program in the sandbox does not see; "" for none
}

// idPrefix begins each sandbox's id. It has a character that host names cannot have, so
// they leave it out.
const idPrefix = "sbx_"

// label is the first part of a host name that leads to a port: PORT-ID.
var label = regexp.MustCompile(`^([1-9][0-9]{0,4})-([0-9a-z]{26})$`)

// pathRoot begins the paths that lead to a port where names cannot: /p/PORT-ID/….
const pathRoot = "/p/"

// The headers that lead to a port where neither names nor paths can, as E2B's clients send
// them (e2b.dev, "Sandbox URL"). The port of E2B's own agent is none of a program's.
const (
	headerSandbox = "E2b-Sandbox-Id"
	headerPort    = "E2b-Sandbox-Port"
	agentPort     = 49983
)

// Label gives the part of a name or path that leads to a port.
func Label(sandbox string, port int) string {
	return strconv.Itoa(port) + "-" + strings.TrimPrefix(sandbox, idPrefix)
}

// ParseLabel reads what Label wrote, in lower or upper case; host names have no case.
func ParseLabel(text string) (Target, bool) {
	m := label.FindStringSubmatch(strings.ToLower(text))
	if m == nil {
		return Target{}, false
	}
	return target(idPrefix+m[2], m[1])
}

func target(sandbox, port string) (Target, bool) {
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65535 {
		return Target{}, false
	}
	return Target{Sandbox: sandbox, Port: n}, true
}

// ParseHost finds the target in a Host header, PORT-ID.DOMAIN, for one of the domains.
func ParseHost(host string, domains []string) (Target, bool) {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	first, domain, ok := strings.Cut(strings.TrimSuffix(host, "."), ".")
	if !ok || !slices.ContainsFunc(domains, func(d string) bool { return strings.EqualFold(d, domain) }) {
		return Target{}, false
	}
	return ParseLabel(first)
}

// find gives the target of a request: by its name, then its path, then its headers.
func find(r *http.Request, domains []string) (Target, bool) {
	if t, ok := ParseHost(r.Host, domains); ok {
		return t, true
	}
	if rest, ok := strings.CutPrefix(r.URL.Path, pathRoot); ok {
		first, _, _ := strings.Cut(rest, "/")
		t, ok := ParseLabel(first)
		t.Prefix = pathRoot + first
		return t, ok
	}
	id := strings.ToLower(r.Header.Get(headerSandbox))
	port := r.Header.Get(headerPort)
	if id == "" || port == "" || port == strconv.Itoa(agentPort) {
		return Target{}, false
	}
	return ParseLabel(port + "-" + strings.TrimPrefix(id, idPrefix))
}
