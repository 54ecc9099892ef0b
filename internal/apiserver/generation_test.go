package apiserver

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/api"
)

// deafConn is a connection of a sandbox that is gone: once deaf, what is written to it
// reaches nobody, and no answer comes, as over a link that was cut without a word.
type deafConn struct {
	net.Conn
	deaf *atomic.Bool
}

func (c deafConn) Write(p []byte) (int, error) {
	if c.deaf.Load() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// N5: the first call after a wake never hangs on a connection from before it.
func TestFirstCallAfterAWakeUsesANewConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	var deaf atomic.Bool
	var dialled atomic.Int64
	r.host.mu.Lock()
	r.host.dial = func(ctx context.Context) (net.Conn, error) {
		conn, err := r.host.agent.Conn(ctx)
		if dialled.Add(1) > 1 || err != nil {
			return conn, err
		}
		return deafConn{Conn: conn, deaf: &deaf}, nil
	}
	r.host.mu.Unlock()
	call := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		res, err := r.client.Do(r.request("GET", "/v1/sandboxes/box/files/stat?path=.", nil).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != 200 {
			t.Fatalf("status %d", res.StatusCode)
		}
	}
	call()
	call()
	if n := dialled.Load(); n != 1 {
		t.Fatalf("two calls took %d connections", n)
	}
	r.verb("box", "sleep")
	deaf.Store(true)
	call() // wakes it
	if n := dialled.Load(); n != 2 {
		t.Errorf("after the wake %d connections in all", n)
	}
}

// A shutdown ends exec streams and input with a word about going on, and does not wait
// for the command. The command goes on and is found again by its id.
func TestShutdownEndsExecStreams(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("box")
	res := r.open("POST", "/v1/sandboxes/box/commands?follow=true", strings.NewReader(`{"command":["cat"],"stdin":true}`))
	defer func() { _ = res.Body.Close() }()
	lines := json.NewDecoder(res.Body)
	var e api.CommandEvent
	if err := lines.Decode(&e); err != nil || e.Started == nil {
		t.Fatalf("%+v %v", e, err)
	}
	input, typed := io.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		req := r.request("POST", "/v1/sandboxes/box/commands/"+e.Started.ID+"/stdin", input, "Content-Type: application/octet-stream")
		if res, err := r.client.Do(req); err == nil {
			_ = res.Body.Close()
		}
	})
	if _, err := io.WriteString(typed, "x"); err != nil {
		t.Fatal(err)
	}
	e = api.CommandEvent{}
	if err := lines.Decode(&e); err != nil || string(e.Data) != "x" {
		t.Fatalf("%+v %v", e, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	if err := r.http.Shutdown(ctx); err != nil {
		t.Errorf("the streams hold up the shutdown: %v", err)
	}
	e = api.CommandEvent{}
	if err := lines.Decode(&e); err != nil || e.Error == nil || e.Error.Reason != "server_stopping" {
		t.Errorf("the stream ends with %+v, %v", e, err)
	}
	_ = typed.Close()
	wg.Wait()
}
