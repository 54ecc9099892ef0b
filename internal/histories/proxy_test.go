package histories

import (
	"bufio"
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// cut is where a reply is lost.
type cut int

const (
	whole        cut = iota // nowhere
	beforeServer            // the server gets a part of the request, or nothing
	whileHandled            // the server gets it all, and nobody waits for its answer
	afterHandled            // the answer is there, and nothing of it arrives
	inTheBody               // a part of the answer arrives
	cuts
)

// lossy is a proxy between clients and a server that cuts connections. A connection
// carries one request.
type lossy struct {
	listener net.Listener
	server   string // host:port
	done     sync.WaitGroup

	mu     sync.Mutex
	dice   *rand.Rand
	left   int // how many replies are still to be lost
	lost   map[cut]int
	handed int // requests that the server got whole
}

func newLossy(t *testing.T, url string, seed uint64) *lossy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &lossy{listener: l, server: strings.TrimPrefix(url, "http://"), dice: diceOf(seed, "proxy"), lost: map[cut]int{}}
	p.done.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.done.Go(func() { p.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.done.Wait()
	})
	return p
}

func (p *lossy) url() string { return "http://" + p.listener.Addr().String() }

// lose has the next n replies lost.
func (p *lossy) lose(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = n
}

// choose gives where this reply is lost, and how far the part gets that is let through.
func (p *lossy) choose() (cut, float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 {
		return whole, 1
	}
	p.left--
	where := cut(1 + p.dice.IntN(int(cuts)-1))
	p.lost[where]++
	return where, p.dice.Float64()
}

func (p *lossy) serve(client net.Conn) {
	where, part := p.choose()
	defer abort(client)
	var request bytes.Buffer
	read := bufio.NewReader(io.TeeReader(client, &request))
	req, err := http.ReadRequest(read)
	if err != nil {
		return
	}
	if _, err := io.Copy(io.Discard, req.Body); err != nil {
		return
	}
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		return
	}
	defer abort(server)
	if where == beforeServer {
		_, _ = server.Write(request.Bytes()[:int(part*float64(request.Len()-1))]) // never all of it
		return
	}
	if _, err := server.Write(request.Bytes()); err != nil {
		return
	}
	p.mu.Lock()
	p.handed++
	p.mu.Unlock()
	if where == whileHandled {
		return
	}
	reply, err := io.ReadAll(server)
	if err != nil && len(reply) == 0 {
		return
	}
	switch where {
	case afterHandled:
		return
	case inTheBody:
		reply = reply[:int(part*float64(len(reply)-1))]
	}
	_, _ = client.Write(reply)
	if where == whole {
		_ = client.Close()
	}
}

// abort breaks a connection, as a cable does.
func abort(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}
