package postgres

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/hutchrun/hutch/internal/store/postgres/pgtest"
)

// moment is when the proxy cuts a connection.
type moment int

const (
	never     moment = iota
	statement        // the statement with the mark never arrives
	commit           // the commit after the mark never arrives
	answer           // the commit after the mark is done, and its answer never arrives
	all              // every connection, at once and from now on
)

// proxy stands between a store and its database, and cuts.
type proxy struct {
	socket string
	addr   string

	mu    sync.Mutex
	when  moment
	mark  string // is in a statement of the connection to be cut
	cuts  int
	conns map[net.Conn]bool
}

// newProxy gives a proxy and the URL of a new database behind it.
func newProxy(t *testing.T) (*proxy, string) {
	t.Helper()
	url := pgtest.URL(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{socket: pgtest.Socket(t), addr: listener.Addr().String(), conns: map[net.Conn]bool{}}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			done.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		p.cut(all, "")
		done.Wait()
	})
	config, err := parse(url)
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := strings.Cut(p.addr, ":")
	return p, fmt.Sprintf("postgres://hutch@127.0.0.1:%s/%s?sslmode=disable&search_path=%s", port, config.Database, config.RuntimeParams["search_path"])
}

// cut arms the proxy: one connection is cut, or all.
func (p *proxy) cut(when moment, mark string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.when, p.mark, p.cuts = when, mark, 0
	if when == all {
		for c := range p.conns {
			c.Close()
		}
	}
}

// cutOff says how many connections were cut since it was armed.
func (p *proxy) cutOff() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

func (p *proxy) track(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.when == all {
		return false
	}
	p.conns[c] = true
	return true
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("unix", p.socket)
	if err != nil {
		return
	}
	defer server.Close()
	if !p.track(client) {
		return
	}
	mute := make(chan struct{}) // closed: the client hears no more
	var back sync.WaitGroup
	back.Go(func() {
		defer client.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			select {
			case <-mute:
				return // the commit's answer
			default:
			}
			if err != nil {
				return
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	defer back.Wait()
	marked := false
	buf := make([]byte, 64<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			server.Close()
			return
		}
		switch p.decide(buf[:n], &marked) {
		case statement:
			server.Close()
			return
		case answer:
			close(mute)
			if _, err := server.Write(buf[:n]); err != nil {
				return
			}
			back.Wait()
			return
		}
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
	}
}

// decide looks at what a client says. statement: it is cut here; answer: after the
// server's next word.
func (p *proxy) decide(said []byte, marked *bool) moment {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mark == "" {
		return never
	}
	if bytes.Contains(said, []byte(p.mark)) {
		*marked = true
		if p.when != statement {
			return never
		}
	} else if !*marked || !bytes.Contains(said, []byte("commit")) {
		return never
	}
	p.mark = "" // once
	p.cuts++
	if p.when == answer {
		return answer
	}
	return statement
}
