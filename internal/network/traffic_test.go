package network

import (
	"io"
	"testing"
)

// What goes over a sandbox's uplink is counted, and what hutch says to the guest is not.
func TestTraffic_Z1(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.open(Config{})
	id, _ := w.attach(m)
	other, _ := w.attach(m)
	count := func(id string) int64 {
		t.Helper()
		all, err := m.Traffic(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		bytes, there := all[id]
		if !there {
			t.Fatalf("the uplink of %s is not among %v", id, all)
		}
		return bytes
	}
	guest := w.at(m, id, sideGuest)
	inside := w.listen(guest, ":0", "hello")
	before, quiet := count(id), count(other)
	for range 10 {
		conn, err := m.Dial(t.Context(), id, inside)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, conn)
		_ = conn.Close()
	}
	if now := count(id); now-before >= 300 { // neighbours may ask for an address meanwhile
		t.Errorf("hutch's own connection counts %d bytes", now-before)
	}
	port := w.listen(w.internet, ":0", "hello")
	w.reaches(guest, internetAddr, port, "hello")
	if now := count(id); now-before < 400 {
		t.Errorf("a connection to the outside counts %d bytes", now-before)
	}
	if now := count(other); now-quiet >= 300 {
		t.Errorf("the other sandbox has moved %d bytes", now-quiet)
	}
	if err := m.Detach(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if all, err := m.Traffic(t.Context()); err != nil || all[id] != 0 {
		t.Errorf("after the end of its network: %v (%v)", all, err)
	}
}
