//go:build soak

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// N5, Z5: traffic on kept connections goes on across 100 sleeps and wakes. The first answer
// after each is the program's own and comes within 2 s.
func TestSoakPortsAcrossWakes(t *testing.T) {
	b := newBox(t, "--no-auto-stop")
	b.hutch("exec", "--detach", "--", "python3", "-c", program)
	b.sh("for i in $(seq 300); do curl -s http://127.0.0.1:3000/ -o /dev/null && exit 0; sleep 0.1; done; exit 1")
	grant := b.opened("connect", b.name, "3000")
	client := &http.Client{Timeout: time.Minute}
	const wakes, most = 100, 2 * time.Second
	var longest, sum time.Duration
	for i := range wakes {
		b.hutch("sleep")
		for call := range 10 {
			method, sent := "GET", ""
			if (i+call)%2 == 1 {
				method, sent = "POST", "hello"
			}
			began := time.Now()
			status, body := b.visit(client, method, grant.Grant.URL, grant.Token, sent)
			took := time.Since(began)
			if status != 200 || method == "POST" && body != sent || strings.TrimSpace(body) == "" {
				t.Fatalf("wake %d, call %d, %s: %d %s", i, call, method, status, body)
			}
			if call == 0 {
				longest, sum = max(longest, took), sum+took
			}
		}
	}
	if longest > most {
		t.Errorf("a first answer took %s, more than %s", longest, most)
	}
	if g := b.get().Generation; g != wakes+1 {
		t.Errorf("%d sleeps, generation %d", wakes, g)
	}
	document(t, "ports-across-wakes", "Ports across sleeps and wakes", fmt.Sprintf("%d times a sandbox was put to sleep and ten requests followed, on connections that the client kept. Each was answered by the\nprogram. The first answer after a sleep, its wake in it, took %s on average and %s at most.\n",
		wakes, (sum/wakes).Round(time.Millisecond), longest.Round(time.Millisecond)))
}
