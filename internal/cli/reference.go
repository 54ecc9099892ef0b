package cli

import (
	"net/url"
	"strings"

	"github.com/hutchrun/hutch/internal/fault"
)

// collections are what a path of the API names one of, by the segment before its name;
// "" for those that name nothing.
var collections = map[string]string{
	"sandboxes": "sandbox", "commands": "command", "operations": "operation", "templates": "template", "keys": "key", "ssh-keys": "SSH key", "projects": "project", "webhooks": "webhook", "deliveries": "delivery",
	"bill": "", "df": "", "events": "", "hosts": "", "receipt-keys": "", "version": "",
}

// checkReferences refuses a call whose path has something in it that no name can be:
// it would reach another path of the API, or none. base is the server's address.
func checkReferences(base, u *url.URL) error {
	path, ok := strings.CutPrefix(u.EscapedPath(), strings.TrimSuffix(base.EscapedPath(), "/")+"/v1/")
	segments := strings.Split(path, "/")
	if _, known := collections[segments[0]]; !ok || !known { // "." and ".." have moved it
		return fault.New(fault.NotFound, "nothing has the name . or ..; a name has the characters a to z, 0 to 9 and -, an id also _")
	}
	for i, segment := range segments[1:] {
		name, err := url.PathUnescape(segment)
		if err == nil && name != "" && !strings.Contains(name, "/") {
			continue
		}
		what := collections[segments[i]]
		if what == "" {
			continue
		}
		return fault.New(fault.NotFound, "there is no %s %q; a name has the characters a to z, 0 to 9 and -, an id also _", what, name).Because(what)
	}
	return nil
}
