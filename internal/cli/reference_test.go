package cli

import (
	"net/url"
	"testing"

	"github.com/hutchrun/hutch/internal/fault"
)

// R1: what cannot be a name makes no call, whichever verb and part of the path.
func TestReferencesThatCannotBe(t *testing.T) {
	t.Parallel()
	for _, server := range []string{"http://h:1", "http://h:1/", "http://h:1/under/it", "http://h:1/under/it/"} {
		base, err := url.Parse(server)
		if err != nil {
			t.Fatal(err)
		}
		root, err := url.Parse(server + map[bool]string{true: "", false: "/"}[server[len(server)-1] == '/'])
		if err != nil {
			t.Fatal(err)
		}
		for path, ok := range map[string]bool{
			"sandboxes": true, "sandboxes?label=a%2Fb": true, "df": true, "version": true, "events?after=1": true, "sandboxes/demo": true,
			"sandboxes/demo/files?path=%2Fetc": true, "sandboxes/demo/commands/cmd_1/output": true, "sandboxes/x%20y": true,
			"sandboxes/": false, "sandboxes//sleep": false, "sandboxes/..%2F..%2Fetc": false, "sandboxes/a%2Fb/fork": false,
			"sandboxes/..": false, "sandboxes/../sleep": false, "sandboxes/.": false, "operations/": false, "operations/..": false,
			"sandboxes/demo/commands//signal": false, "templates/a%2Fb": false, "keys/": false,
		} {
			u, err := root.Parse("./v1/" + path)
			if err != nil {
				t.Fatal(err)
			}
			if err := checkReferences(base, u); (err == nil) != ok || err != nil && !fault.Is(err, fault.NotFound) {
				t.Errorf("%s of %s: %v", path, server, err)
			}
		}
	}
}
