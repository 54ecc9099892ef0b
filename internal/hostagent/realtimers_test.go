package hostagent

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/guestproto"
	"github.com/hutchrun/hutch/internal/hostproto"
	"github.com/hutchrun/hutch/internal/sandbox"
)

// waits is an ELF program for amd64 (elf(5)) that does nothing: pause(2), again and again.
func waits() []byte {
	code := []byte{0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7} // mov eax, 34; syscall; jmp
	const base, header = 0x400000, 64 + 56
	var b bytes.Buffer
	b.WriteString("\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	for _, v := range []any{
		uint16(2), uint16(62), uint32(1), uint64(base + header), uint64(64), uint64(0), uint32(0), uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0),
		uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), uint64(header + len(code)), uint64(header + len(code)), uint64(0x1000),
	} {
		_ = binary.Write(&b, binary.LittleEndian, v) // a buffer takes everything
	}
	return append(b.Bytes(), code...)
}

// put writes a file inside.
func (r *real) put(path string, mode uint32, data []byte) {
	r.t.Helper()
	r.guest(func(ctx context.Context, c *guestproto.Client) error {
		stream, err := c.Files.Write(ctx)
		if err != nil {
			return err
		}
		for _, part := range []*guestproto.WriteRequest{
			{Part: &guestproto.WriteRequest_Header{Header: &guestproto.WriteHeader{Path: []byte(path), User: "root", Mode: mode}}},
			{Part: &guestproto.WriteRequest_Data{Data: data}}, {Part: &guestproto.WriteRequest_Commit{Commit: true}},
		} {
			if err := stream.Send(part); err != nil {
				return err
			}
		}
		_, err = stream.CloseAndReceive()
		return err
	})
}

// missed gives the reports of what a sleep missed.
func (r *real) missed() (out []hostproto.Missed) {
	for _, rep := range r.book.of(sb) {
		if rep.Missed != nil {
			out = append(out, *rep.Missed)
		}
	}
	return out
}

// X7, Z8: after a wake the lines of the crontabs that fell into the sleep are told of, on
// gVisor, where a cron daemon runs; a sleep in which nothing fell due tells of nothing.
func TestRealMissedTimers_X7(t *testing.T) {
	r := newReal(t)
	r.stop()
	r.passed = &atomic.Int64{} // the host's clocks go on by that
	r.start()
	p := policy(0)
	cmd := r.command(sandbox.Create)
	cmd.Policy = &p
	if f := r.run(cmd); f != nil {
		t.Fatalf("create failed: %+v", f)
	}
	r.put("/bin/cron", 0o755, waits())
	r.put("/etc/cron.d/job", 0o644, []byte("# a comment\n*/10 * * * * user echo ten\n17 4 29 2 * root echo never\n"))
	r.put("/var/spool/cron/crontabs/user", 0o600, []byte("@hourly echo hour\n"))
	r.put("/etc/cron.d/not.one", 0o644, []byte("* * * * * root echo ignored\n"))
	sleep := func(d time.Duration) {
		t.Helper()
		r.must(sandbox.Sleep)
		r.passed.Add(int64(d))
		r.must(sandbox.Wake)
	}
	sleep(2 * time.Hour) // no daemon runs
	r.guest(func(ctx context.Context, c *guestproto.Client) error {
		stream, err := c.Commands.Start(ctx, &guestproto.StartRequest{Args: []string{"/bin/cron"}, User: "root", Cwd: "/", Detach: true, RequestKey: "cron"})
		if err != nil {
			return err
		}
		defer stream.Close()
		if _, err = stream.Receive(); err == io.EOF {
			return nil
		}
		return err
	})
	sleep(2 * time.Hour)
	r.soon("the report", func() bool { return len(r.missed()) > 0 })
	got := r.missed()
	if len(got) != 1 || got[0].Zone != "UTC" || got[0].To.Sub(got[0].From) < 2*time.Hour || got[0].Omitted != 0 {
		t.Fatalf("it was told of %+v", got)
	}
	var text string
	for _, m := range got[0].Timers {
		text += fmt.Sprintf("%s:%d %s %s %s\n", m.Source, m.Line, m.Schedule, m.User, m.Command)
		if m.Count < 2 || m.Count > 13 || m.Last.After(got[0].To) || m.Last.Before(got[0].From) {
			t.Errorf("%s: %d times, last %s", m.Command, m.Count, m.Last)
		}
	}
	if want := "/etc/cron.d/job:2 */10 * * * * user echo ten\n/var/spool/cron/crontabs/user:1 @hourly user echo hour\n"; text != want {
		t.Errorf("missed:\n%swant:\n%s", text, want)
	}
	if rec := r.record(); rec.Missed != nil {
		t.Errorf("it is still to be told: %+v", rec.Missed)
	}
}

// record is what the host remembers of the sandbox.
func (r *real) record() (rec *record) {
	r.t.Helper()
	o, err := r.agent.find(sb)
	if err == nil {
		err = o.call(r.t.Context(), func() error { rec = o.rec.clone(); return nil })
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return rec
}

// A3, A6: on gVisor a lease puts the auto-stop off; when the turn is over the sandbox is
// stopped at the deadline that it then has.
func TestRealLease_A3(t *testing.T) {
	r := newReal(t)
	r.stop()
	r.passed = &atomic.Int64{}
	r.start()
	p := policy(time.Hour)
	cmd := r.command(sandbox.Create)
	cmd.Policy = &p
	if f := r.run(cmd); f != nil {
		t.Fatalf("create failed: %+v", f)
	}
	renew := func(turns map[string][]string) {
		t.Helper()
		if err := r.agent.Renew(t.Context(), turns); err != nil {
			t.Fatal(err)
		}
	}
	last := func() hostproto.Report { facts := r.book.of(sb); return facts[len(facts)-1] }
	due := last().Deadline
	renew(map[string][]string{sb: {"t1"}})
	r.passed.Add(int64(time.Hour))
	r.soon("the move", func() bool { return last().Turn == "t1" })
	if got := last().Deadline; !got.Equal(due.Add(time.Hour)) || r.book.state(sb) != sandbox.Ready {
		t.Fatalf("it is %s, its deadline %s, want %s", r.book.state(sb), got, due.Add(time.Hour))
	}
	r.leave()
	renew(nil)
	r.passed.Add(int64(time.Hour))
	r.soon("the stop", func() bool { return r.book.state(sb) == sandbox.Stopped })
	if got := last(); got.Cause != sandbox.CauseDeadline || !got.Due.Equal(due.Add(time.Hour)) {
		t.Errorf("the stop: %+v", got)
	}
}
