package main

import (
	"bufio"
	"crypto/sha1"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/gateway"
)

// talker is a server of WebSockets, which it echoes, and of event streams.
const talker = `
import base64, hashlib, http.server, struct, time
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101); self.send_header("Upgrade", "websocket"); self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()); self.end_headers()
            self.wfile.flush()
            self.close_connection = True
            while True:
                head = self.rfile.read(2)
                if len(head) < 2 or head[0] & 15 == 8: return
                size = head[1] & 127
                if size == 126: size = struct.unpack(">H", self.rfile.read(2))[0]
                mask = self.rfile.read(4); data = self.rfile.read(size)
                data = bytes(b ^ mask[i % 4] for i, b in enumerate(data))
                out = struct.pack(">BB", head[0], size) if size < 126 else struct.pack(">BBH", head[0], 126, size)
                self.wfile.write(out + data); self.wfile.flush()
        elif self.path == "/events":
            self.send_response(200); self.send_header("Content-Type", "text/event-stream"); self.send_header("Connection", "close"); self.end_headers()
            self.close_connection = True
            self.wfile.write(b"data: first\n\n"); self.wfile.flush()
            time.sleep(3600)
        else:
            body = self.path.encode()
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", 3000), H).serve_forever()
`

// Z5: WebSocket clients, event streams, curl by name, HTTP/2 without TLS, paths and headers
// reach a program, and each wakes its sandbox.
func TestPortClients_Z5(t *testing.T) {
	b := newBox(t)
	b.hutch("exec", "--detach", "--", "python3", "-c", talker)
	b.sh("for i in $(seq 300); do curl -s http://127.0.0.1:3000/ -o /dev/null && exit 0; sleep 0.1; done; exit 1")
	grant := b.opened("connect", b.name, "3000")
	label := gateway.Label(b.get().ID, 3000)
	const header = "X-Hutch-Token: "

	b.hutch("sleep")
	curl := func(args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "curl", append([]string{"-sS", "-m", "60", "-H", header + grant.Token}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("curl %q: %v: %s", args, err, out)
		}
		return string(out)
	}
	if got := curl(grant.Grant.URL + "named"); got != "/named" {
		t.Errorf("by name: %s", got)
	}
	if got := curl("--http2-prior-knowledge", "-w", " %{http_version}", grant.Grant.URL+"two"); got != "/two 2" {
		t.Errorf("HTTP/2: %s", got)
	}
	b.hutch("sleep")
	if got := curl("http://" + shared.listen + "/p/" + label + "/by/path?x=1"); got != "/by/path?x=1" {
		t.Errorf("by path: %s", got)
	}
	if got := curl("-H", "E2b-Sandbox-Id: "+b.get().ID, "-H", "E2b-Sandbox-Port: 3000", "http://"+shared.listen+"/v1/sandboxes"); got != "/v1/sandboxes" {
		t.Errorf("by headers: %s", got)
	}

	b.hutch("sleep")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+shared.listen+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = label + ".localhost"
	req.Header.Set("X-Hutch-Token", grant.Token)
	events, err := (&http.Client{Timeout: time.Minute}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer events.Body.Close()
	if line, err := bufio.NewReader(events.Body).ReadString('\n'); line != "data: first\n" { // while the stream goes on
		t.Errorf("an event: %q %v", line, err)
	}

	b.hutch("sleep") // ends the stream
	conn, err := net.Dial("tcp", shared.listen)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	const key = "dGhlIHNhbXBsZSBub25jZQ=="
	_, _ = io.WriteString(conn, "GET /ws HTTP/1.1\r\nHost: "+label+".localhost\r\nCookie: hutch_token="+grant.Token+
		"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "+key+"\r\n\r\n")
	in := bufio.NewReader(conn)
	up, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	if up.StatusCode != http.StatusSwitchingProtocols || up.Header.Get("Sec-WebSocket-Accept") != base64.StdEncoding.EncodeToString(sum[:]) {
		t.Fatalf("the handshake: %s %v", up.Status, up.Header)
	}
	for _, text := range []string{"hello", strings.Repeat("x", 5000)} {
		mask := []byte{1, 2, 3, 4}
		frame := []byte{0x81, 0x80 | byte(min(len(text), 126))}
		if len(text) > 125 {
			frame = append(frame, byte(len(text)>>8), byte(len(text)))
		}
		frame = append(frame, mask...)
		for i := range len(text) {
			frame = append(frame, text[i]^mask[i%4])
		}
		if _, err := conn.Write(frame); err != nil {
			t.Fatal(err)
		}
		back := make([]byte, len(frame)-4)
		if _, err := io.ReadFull(in, back); err != nil || string(back[len(back)-len(text):]) != text {
			t.Fatalf("a message of %d bytes came back otherwise: %v", len(text), err)
		}
	}
	b.hutch("sleep")
	if _, err := in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) { // no connection goes on across a sleep, and none hangs
		t.Errorf("the connection goes on after the sleep: %v", err)
	}
}
