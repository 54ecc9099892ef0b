package main

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	wire "github.com/hutchrun/hutch/api"
)

// opened makes a grant for a port and gives what it answers.
func (b *box) opened(args ...string) (out wire.OpenedPort) {
	b.t.Helper()
	if err := json.Unmarshal([]byte(hutchOK(b.t, append([]string{"ports"}, append(args, "--json")...)...)), &out); err != nil {
		b.t.Fatal(err)
	}
	return out
}

// visit asks a port as a client in the machine's network does: the name below localhost
// leads to the server.
func (b *box) visit(client *http.Client, method, url, token, body string) (int, string) {
	b.t.Helper()
	label, path, _ := strings.Cut(strings.TrimPrefix(url, "http://"), "/")
	req, err := http.NewRequestWithContext(b.t.Context(), method, "http://"+shared.listen+"/"+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Host = label
	if token != "" {
		req.Header.Set("X-Hutch-Token", token)
	}
	res, err := client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

// program is a server that keeps its connections and counts its requests in memory.
const program = `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    n = 0
    def do_GET(self):
        H.n += 1
        body = b"%d" % H.n
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", 3000), H).serve_forever()
`

// N1, N5, Z5: a port is reached with a token, wakes its sandbox, and the first answer after
// each wake is the program's own, on a connection of that boot. Tokens end at a stop, a
// public port does not.
func TestPorts_N1(t *testing.T) {
	b := newBox(t)
	b.hutch("exec", "--detach", "--", "python3", "-c", program)
	b.sh("for i in $(seq 300); do curl -s http://127.0.0.1:3000/ -o /dev/null && exit 0; sleep 0.1; done; exit 1")
	grant := b.opened("connect", b.name, "3000")
	url := grant.Grant.URL
	client := &http.Client{Timeout: time.Minute}
	if status, body := b.visit(client, "GET", url, "", ""); status != 401 || !strings.Contains(body, "hutch ports") {
		t.Fatalf("without a token: %d %s", status, body)
	}
	if status, body := b.visit(client, "GET", url, "hutchp_wrong", ""); status != 401 {
		t.Fatalf("with a wrong token: %d %s", status, body)
	}
	if status, body := b.visit(client, "GET", url, grant.Token, ""); status != 200 || body != "2" {
		t.Fatalf("%d %s", status, body)
	}
	if status, body := b.visit(client, "POST", url, grant.Token, strings.Repeat("x", 3<<20)); status != 200 || len(body) != 3<<20 {
		t.Fatalf("%d, %d bytes", status, len(body))
	}
	other := strings.Replace(url, "3000-", "3001-", 1)
	if status, _ := b.visit(client, "GET", other, grant.Token, ""); status != 401 {
		t.Errorf("the token opens another port: %d", status)
	}
	all := b.opened("connect", b.name, "3000", "--any-port")
	if status, body := b.visit(client, "GET", other, all.Token, ""); status != 503 || !strings.Contains(body, "nothing listens on port 3001") {
		t.Errorf("a port that nobody listens on: %d %s", status, body)
	}

	for i := range 4 {
		b.hutch("sleep")
		if status, _ := b.visit(client, "GET", url, "hutchp_wrong", ""); status != 401 {
			t.Errorf("a wrong token: %d", status)
		}
		b.is("sleeping") // what is refused wakes nothing
		method, want := "GET", ""
		if i%2 == 1 {
			method, want = "POST", "hello"
		}
		if status, body := b.visit(client, method, url, grant.Token, "hello"); status != 200 || method == "POST" && body != want {
			t.Fatalf("the first %s after wake %d: %d %s", method, i, status, body)
		}
	}
	// A burst causes one wake.
	b.hutch("sleep")
	before := b.get().Generation
	answers := make(chan int)
	for range 20 {
		go func() { status, _ := b.visit(client, "GET", url, grant.Token, ""); answers <- status }()
	}
	for range 20 {
		if status := <-answers; status != 200 {
			t.Errorf("in a burst: %d", status)
		}
	}
	if after := b.get().Generation; after != before+1 {
		t.Errorf("a burst woke it %d times", after-before)
	}

	public := b.opened("share", b.name, "3000")
	if status, _ := b.visit(client, "GET", public.Grant.URL, "", ""); status != 200 {
		t.Errorf("the public port: %d", status)
	}
	b.hutch("stop")
	if status, body := b.visit(client, "GET", public.Grant.URL, "", ""); status != 409 || !strings.Contains(body, "hutch resume") {
		t.Errorf("the public port of a stopped sandbox: %d %s", status, body)
	}
	b.hutch("resume")
	if status, _ := b.visit(client, "GET", other, all.Token, ""); status != 401 {
		t.Errorf("a token of before the stop: %d", status)
	}
	if status, _ := b.visit(client, "GET", url, grant.Token, ""); status != 503 { // public still; its program has ended
		t.Errorf("the public port after a stop: %d", status)
	}
	hutchOK(t, "ports", "revoke", b.name, public.Grant.ID)
	if status, _ := b.visit(client, "GET", url, "", ""); status != 401 {
		t.Errorf("a port that was closed: %d", status)
	}
}
