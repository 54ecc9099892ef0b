package main

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	hutchapi "github.com/hutchrun/hutch/api"
)

// E2, W1: a server that was started in the background is listed with the same id after a
// wake, and killing it frees its port.
func TestBackgroundServer_E2(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	id := strings.TrimSpace(b.hutch("exec", "--detach", "--", "python3", "-m", "http.server", "8123"))
	listening := "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123), 5)' 2>/dev/null"
	b.sh("until " + listening + "; do sleep 0.1; done")
	b.hutch("sleep")
	b.hutch("wake")
	command := b.command(id)
	if command.Exit != nil || !command.Detach {
		t.Fatalf("after the wake: %+v", command)
	}
	b.sh(listening)
	hutchOK(t, "commands", "kill", b.name, id)
	hutchOK(t, "commands", "logs", b.name, id, "--follow")
	b.sh("python3 -c 'import socket; socket.socket().bind((\"127.0.0.1\", 8123))'")
	if command = b.command(id); command.Exit == nil || command.Exit.Signal != "TERM" {
		t.Errorf("after the kill: %+v", command.Exit)
	}
}

// command finds a command in the list.
func (b *box) command(id string) hutchapi.Command {
	b.t.Helper()
	var list hutchapi.CommandList
	if err := json.Unmarshal([]byte(b.commands()), &list); err != nil {
		b.t.Fatal(err)
	}
	for _, c := range list.Commands {
		if c.ID == id {
			return c
		}
	}
	b.t.Fatalf("no command %s in %+v", id, list)
	return hutchapi.Command{}
}

// E3: of 20 MB of output head, tail and the short stderr are kept, and what fell out is
// counted.
func TestKeptOutput_E3(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	id := strings.TrimSpace(b.hutch("exec", "--detach", "--", "sh", "-c",
		"echo first; head -c 20000000 /dev/zero | tr '\\0' x; echo; echo tail; echo last words >&2; exit 1"))
	for b.command(id).Exit == nil {
		time.Sleep(50 * time.Millisecond)
	}
	r, err := shared.try(2*time.Minute, nil, "commands", "logs", b.name, id)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(r.stdout, "first\nx") || !strings.HasSuffix(r.stdout, "x\ntail\n") || !strings.Contains(r.stderr, "last words\n") {
		t.Errorf("of %d bytes head or tail is gone; stderr %q", len(r.stdout), r.stderr)
	}
	c := b.command(id)
	if c.Exit.Code != 1 || c.OutputBytes != int64(len("first\n")+20_000_000+len("\ntail\n")+len("last words\n")) ||
		c.OmittedBytes != c.OutputBytes-int64(len(r.stdout)+len("last words\n")) || c.OmittedBytes == 0 {
		t.Errorf("%d bytes came, %d were written, %d are omitted; exit %+v", len(r.stdout), c.OutputBytes, c.OmittedBytes, c.Exit)
	}
	if !strings.Contains(r.stderr, fmt.Sprintf("%d bytes of output are no longer kept", c.OmittedBytes)) {
		t.Errorf("what fell out is not told: %q", r.stderr)
	}
}

// E1: of a thousand commands that fail at once each has its stderr and its own code.
func TestQuickFailures_E1(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	next, bad := atomic.Int64{}, atomic.Int64{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for {
				n := next.Add(1)
				if n > 1000 || bad.Load() > 5 {
					return
				}
				status, body := api(t, "POST", "/v1/sandboxes/"+b.name+"/commands?follow=true", map[string]string{"Accept": "application/x-ndjson"},
					strings.NewReader(fmt.Sprintf(`{"command":["sh","-c","echo word-%d >&2; exit %d"]}`, n, 1+n%200)))
				var errs bytes.Buffer
				code := -1
				for dec := json.NewDecoder(strings.NewReader(body)); ; {
					var e hutchapi.CommandEvent
					if dec.Decode(&e) != nil {
						break
					}
					if e.Stream == hutchapi.CommandEventStreamStderr {
						errs.Write(e.Data)
					}
					if e.Exit != nil {
						code = e.Exit.Code
					}
				}
				if status != 200 || errs.String() != fmt.Sprintf("word-%d\n", n) || code != int(1+n%200) {
					bad.Add(1)
					t.Errorf("command %d: status %d, stderr %q, code %d: %s", n, status, errs.String(), code, body)
				}
			}
		})
	}
	wg.Wait()
}

// E2: the detach of a command that runs for 300 s returns within a second.
func TestDetachIsQuick_E2(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	best := time.Hour
	for range 5 { // on a machine that other tests keep busy
		began := time.Now()
		b.hutch("exec", "--detach", "--", "sleep", "300")
		best = min(best, time.Since(began))
	}
	if best > time.Second {
		t.Errorf("the quickest of 5 took %s", best)
	}
	if n := strings.Count(b.commands(), `"sleep"`); n != 5 {
		t.Errorf("%d of 5 are listed", n)
	}
}

// A3: coming to a sandbox, with no option, moves neither its deadline nor its policy.
func TestConnectingChangesNothing_A3(t *testing.T) {
	t.Parallel()
	b := newBox(t, "--ttl", "2h", "--on-deadline", "sleep", "--delete-after", "3d")
	policy := func() string {
		var sb hutchapi.Sandbox
		if err := json.Unmarshal([]byte(b.hutch("get", "--json")), &sb); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal([]any{sb.Deadline.At, sb.TTLSeconds, sb.OnDeadline, sb.OnIdle, sb.DeleteAfter, sb.ArchiveAfter, sb.Sleep})
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	before := policy()
	b.sh("true")
	id := strings.TrimSpace(b.hutch("exec", "--detach", "--", "true"))
	hutchOK(t, "commands", "logs", b.name, id, "--follow")
	hutchOK(t, "cp", b.name+":/etc/hostname", "-")
	if status, body := api(t, "PATCH", "/v1/sandboxes/"+b.name, nil, strings.NewReader("{}")); status >= 500 {
		t.Errorf("a change of nothing: %d %s", status, body)
	}
	if after := policy(); after != before {
		t.Errorf("before %s\nafter  %s", before, after)
	}
}

// Z6: a TLS certificate that was issued while it slept is valid in it.
func TestCertificateIssuedDuringSleep_Z6(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.hutch("sleep")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"},
		NotBefore: now, NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	name := t.TempDir() + "/cert.pem"
	writeFile(t, name, append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})...))
	b.hutch("wake")
	hutchOK(t, "cp", name, b.name+":/workspace/cert.pem")
	r := b.exec(nil, "--", "python3", "-c", `
import socket, ssl, threading
l = socket.create_server(("127.0.0.1", 0))
def serve():
    c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    c.load_cert_chain("/workspace/cert.pem")
    with c.wrap_socket(l.accept()[0], server_side=True) as s: s.sendall(b"well")
threading.Thread(target=serve, daemon=True).start()
c = ssl.create_default_context(cafile="/workspace/cert.pem")
with c.wrap_socket(socket.create_connection(l.getsockname()), server_hostname="localhost") as s: print(s.recv(10).decode())
`)
	if r.stdout != "well\n" {
		t.Errorf("the handshake: %s", r)
	}
}

// E6: a terminal outlives its client and a sleep, and is attached to again.
func TestTerminalAgain_E6(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	id := strings.TrimSpace(b.hutch("exec", "--tty", "--detach", "--", "bash", "--norc"))
	if _, err := shared.try(time.Minute, strings.NewReader("word=kept\n"), "commands", "stdin", b.name, id, "--keep-open"); err != nil {
		t.Fatal(err)
	}
	b.hutch("sleep")
	b.hutch("wake")
	r, _ := shared.try(time.Minute, strings.NewReader("echo it-is-$word; exit 5\n"), "attach", b.name)
	if r.code != 5 || !strings.Contains(r.stdout, "it-is-kept") {
		t.Errorf("attached again: %s", r)
	}
	if c := b.command(id); c.Exit == nil || c.Exit.Code != 5 {
		t.Errorf("the command: %+v", c)
	}
	// The input of a detached command.
	id = strings.TrimSpace(b.hutch("exec", "--detach", "--stdin=always", "--", "sh", "-c", "cat; exit 3"))
	for _, part := range []string{"one\n", "two\n"} {
		args := []string{"commands", "stdin", b.name, id}
		if part == "one\n" {
			args = append(args, "--keep-open")
		}
		if _, err := shared.try(time.Minute, strings.NewReader(part), args...); err != nil {
			t.Fatal(err)
		}
	}
	if got := hutchOK(t, "commands", "logs", b.name, id, "--follow"); got != "one\ntwo\n" {
		t.Errorf("it wrote %q", got)
	}
}

// toll is a way to the shared server that counts what passes, and cuts.
type toll struct {
	listener net.Listener
	up, down atomic.Int64
	cut      atomic.Int64 // connections are cut once so many bytes have passed; 0 is never
	cuts     atomic.Int64 // how often that was done
	once     bool
}

func newToll(t *testing.T, cut int64) *toll {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &toll{listener: l}
	p.cut.Store(cut)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.pass(c)
		}
	}()
	return p
}

func (p *toll) pass(c net.Conn) {
	defer c.Close()
	s, err := net.Dial("tcp", shared.listen)
	if err != nil {
		return
	}
	defer s.Close()
	carry := func(to, from net.Conn, n *atomic.Int64) {
		defer to.Close()
		buf := make([]byte, 64<<10)
		for {
			got, err := from.Read(buf)
			total := n.Add(int64(got))
			if cut := p.cut.Load(); cut > 0 && total > cut && p.cut.CompareAndSwap(cut, 0) {
				p.cuts.Add(1)
				c.Close()
				s.Close()
				return
			}
			if got > 0 {
				if _, err := to.Write(buf[:got]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	go carry(c, s, &p.down)
	carry(s, c, &p.up)
}

// command is the command line, going through it.
func (p *toll) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(shared.environ(), "HUTCH_URL="+(&url.URL{Scheme: "http", Host: p.listener.Addr().String()}).String(), "HUTCH_API_KEY="+shared.key(t))
	return cmd
}

// E4: a copy that is cut in the middle goes on there, in the same call and in a later
// one of a hutch that was killed.
func TestCopyGoesOn_E4(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	const size, most = 48 << 20, 60 << 20 // most: of what may pass when nothing is sent anew from the start
	dir := t.TempDir()
	data := make([]byte, size)
	_, _ = rand.Read(data)
	writeFile(t, dir+"/in", data)
	want := fmt.Sprintf("%x", sha256.Sum256(data))

	p := newToll(t, 24<<20)
	if out, err := p.command(t, "cp", dir+"/in", b.name+":/workspace/in").CombinedOutput(); err != nil {
		t.Fatalf("the upload: %v: %s", err, out)
	}
	if got := b.sh("sha256sum < /workspace/in"); !strings.HasPrefix(got, want) {
		t.Error("the upload differs")
	}
	if p.cuts.Load() != 1 || p.up.Load() > most {
		t.Errorf("the upload was cut %d times, and %d bytes passed", p.cuts.Load(), p.up.Load())
	}
	p = newToll(t, 24<<20)
	if out, err := p.command(t, "cp", b.name+":/workspace/in", dir+"/out").CombinedOutput(); err != nil {
		t.Fatalf("the download: %v: %s", err, out)
	}
	if !bytes.Equal(readFile(t, dir+"/out"), data) {
		t.Error("the download differs")
	}
	if p.cuts.Load() != 1 || p.down.Load() > most {
		t.Errorf("the download was cut %d times, and %d bytes passed", p.cuts.Load(), p.down.Load())
	}

	p = newToll(t, 24<<20)
	killed := p.command(t, "cp", dir+"/in", b.name+":/workspace/again")
	if err := killed.Start(); err != nil {
		t.Fatal(err)
	}
	for p.cuts.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	_ = killed.Process.Kill()
	_ = killed.Wait()
	passed := p.up.Load()
	if out, err := p.command(t, "cp", dir+"/in", b.name+":/workspace/again").CombinedOutput(); err != nil {
		t.Fatalf("the upload after a kill: %v: %s", err, out)
	}
	if got := b.sh("sha256sum < /workspace/again; ls -A /workspace"); !strings.HasPrefix(got, want) || strings.Contains(got, "hutch-upload") {
		t.Errorf("the upload after a kill: %s", got)
	}
	if rest := p.up.Load() - passed; rest > 40<<20 {
		t.Errorf("after the kill %d bytes were sent of %d", rest, size)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 2 {
		t.Errorf("here is left: %v, %v", left, err)
	}
}

// E4: a watch outlives a sleep, wakes nothing, and says that it may have missed something.
func TestWatchAcrossSleep_E4(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	cmd := exec.CommandContext(t.Context(), binary, "watch", b.name+":/workspace", "--json")
	cmd.Env = shared.environ()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			lines <- s.Text()
		}
		_, _ = io.Copy(io.Discard, out)
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	sees := func(want string) {
		t.Helper()
		limit := time.After(2 * time.Minute)
		for {
			select {
			case line, ok := <-lines:
				if !ok {
					t.Fatalf("the watch ended before %s: %s", want, errs.String())
				}
				if strings.Contains(line, want) {
					return
				}
			case <-limit:
				t.Fatalf("%s is not told", want)
			}
		}
	}
	sees(`"watching":true`)
	b.sh("touch /workspace/one")
	sees(`"path":"one"`)
	b.hutch("sleep")
	time.Sleep(3 * time.Second) // in which a watch that wakes it would
	b.is("sleeping")
	b.hutch("wake")
	sees(`"rescan":true`)
	b.sh("touch /workspace/two")
	sees(`"path":"two"`)
}
