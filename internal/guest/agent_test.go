package guest_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guest"
	"github.com/hutchrun/hutch/internal/guest/guesttest"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// Before Init nothing is served; after it, nothing without the token.
func TestTokenGuardsEveryCall(t *testing.T) {
	t.Parallel()
	a := guesttest.Start(t, guest.Config{})
	_, err := a.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{})
	wantFault(t, err, fault.Unavailable, guestproto.ReasonNotInitialised)
	if err := a.Client.Await(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err = a.Dial(t, "short").Agent.Init(t.Context(), guesttest.InitRequest())
	wantFault(t, err, fault.Unauthenticated, "")
	if _, err := a.Client.Agent.Init(t.Context(), guesttest.InitRequest()); err != nil {
		t.Fatal(err)
	}
	for name, token := range map[string]string{"none": "", "short": "x", "another": guesttest.Token("other"), "longer": a.Token + "x", "huge": strings.Repeat("x", 300)} {
		bad := a.Dial(t, token)
		_, err := bad.Agent.Ping(t.Context(), &guestproto.PingRequest{})
		wantFault(t, err, fault.Unauthenticated, "")
		_, err = bad.Agent.Init(t.Context(), guesttest.InitRequest())
		wantFault(t, err, fault.Unauthenticated, "")
		_, err = bad.Agent.Restored(t.Context(), guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_FORK, guesttest.Token("stolen")))
		wantFault(t, err, fault.Unauthenticated, "")
		s, err := bad.Commands.Start(t.Context(), shell("echo "+name+" >leak"))
		if err == nil {
			_, err = s.Receive()
		}
		wantFault(t, err, fault.Unauthenticated, "")
		w, err := bad.Files.Write(t.Context())
		if err == nil {
			w.Send(&guestproto.WriteRequest{})
			_, err = w.CloseAndReceive()
		}
		wantFault(t, err, fault.Unauthenticated, "")
	}
	if list, err := a.Client.Commands.List(t.Context(), &guestproto.ListCommandsRequest{}); err != nil || len(list.Commands) != 0 {
		t.Errorf("something ran: %v, %v", list, err)
	}
}

// A call that is not for a service, or not of the protocol, does no harm.
func TestForeignRequests(t *testing.T) {
	t.Parallel()
	a := boot(t)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: dialer(a)}}
	for _, path := range []string{"/", "/hutch.guest.v1.Agent/Nothing", guestproto.AgentPingProcedure} {
		resp, err := client.Post("http://guest"+path, "application/json", strings.NewReader("{"))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode < 400 {
			t.Errorf("%s: %d %s", path, resp.StatusCode, body)
		}
	}
	conn, err := a.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(strings.Repeat("\x00\xff", 5000))); err != nil {
		t.Fatal(err)
	}
	conn.SetReadDeadline(time.Now().Add(15 * time.Second))
	if _, err := io.ReadAll(conn); errors.Is(err, io.EOF) {
		t.Error(err)
	}
	if _, err := a.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{}); err != nil {
		t.Error(err)
	}
}

// Init happens once: the same token gets the first answer, another is refused, and
// every item has been done once, in order.
func TestInitTwice(t *testing.T) {
	t.Parallel()
	a := guesttest.Start(t, guest.Config{})
	bad := guesttest.InitRequest()
	bad.Entropy = []byte("too little")
	_, err := a.Client.Agent.Init(t.Context(), bad)
	wantFault(t, err, fault.InvalidArgument, "")
	var wg sync.WaitGroup
	answers := make([]*guestproto.InitResponse, 10)
	for i := range answers {
		wg.Go(func() {
			r, err := a.Client.Agent.Init(t.Context(), guesttest.InitRequest())
			if err != nil {
				t.Error(err)
			}
			answers[i] = r
		})
	}
	wg.Wait()
	want := []string{"exit_marker", "clock", "entropy", "random", "hostname", "hosts", "machine_id", "network", "docker_config", "workspace"}
	if got := a.Identity.Items(); !slices.Equal(got, want) {
		t.Errorf("done: %v", got)
	}
	for _, r := range answers {
		if len(r.GetItems()) != len(want)+2 {
			t.Errorf("answered %v", r)
		}
	}
	_, err = a.Dial(t, guesttest.Token("other")).Agent.Init(t.Context(), guesttest.InitRequest())
	wantFault(t, err, fault.Unauthenticated, "")
}

// F2: a fork's identity is replaced item by item and told; it is repeatable under the
// old and the new token; the old token opens nothing more; command ids are new.
func TestF2RestoredFork(t *testing.T) {
	t.Parallel()
	a := boot(t)
	req := shell("echo kept; sleep 600")
	req.RequestKey = "k"
	s := start(t, a, req)
	o := newOutcome(0)
	until(t, s, o, func() bool { return o.stdout() == "kept\n" })
	before := len(a.Identity.Items())

	next := guesttest.Token("next")
	fork := guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_FORK, next)
	fork.Identity.Hostname = ""
	_, err := a.Client.Agent.Restored(t.Context(), fork)
	wantFault(t, err, fault.InvalidArgument, "")
	fork.Identity.Hostname = "fork"

	answer, err := a.Client.Agent.Restored(t.Context(), fork)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"clock", "entropy", "random", "hostname", "hosts", "machine_id", "boot_id", "network", "connections", "ssh_host_keys", "docker_config"}
	if got := a.Identity.Items()[before:]; !slices.Equal(got, want) {
		t.Errorf("done: %v", got)
	}
	for _, item := range answer.Items {
		if item.Status != guestproto.ItemStatus_ITEM_STATUS_DONE {
			t.Errorf("%v", item)
		}
	}
	renewed := a.Dial(t, next)
	for who, c := range map[string]*guestproto.Client{"old": a.Client, "new": renewed} {
		again, err := c.Agent.Restored(t.Context(), fork)
		if err != nil || len(again.Items) != len(answer.Items) {
			t.Errorf("repeated under the %s token: %v, %v", who, again, err)
		}
	}
	if got := len(a.Identity.Items()); got != before+len(want) {
		t.Errorf("repeats did the work again: %d items", got-before)
	}
	other := guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_FORK, guesttest.Token("third"))
	_, err = a.Client.Agent.Restored(t.Context(), other)
	wantFault(t, err, fault.Unauthenticated, "")
	_, err = a.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{})
	wantFault(t, err, fault.Unauthenticated, "")

	// Section 6: the program goes on under a new id, its old stream has ended.
	_, err = s.Receive()
	wantFault(t, err, fault.Unavailable, "forked")
	list, err := renewed.Commands.List(t.Context(), &guestproto.ListCommandsRequest{})
	if err != nil || len(list.Commands) != 1 || list.Commands[0].Id == o.id || list.Commands[0].Exit != nil {
		t.Fatalf("commands of the fork: %v, %v", list, err)
	}
	_, err = renewed.Commands.Get(t.Context(), &guestproto.GetCommandRequest{Id: o.id})
	wantFault(t, err, fault.NotFound, "")
	if _, err := renewed.Commands.Signal(t.Context(), &guestproto.SignalRequest{Id: list.Commands[0].Id, Signal: 9}); err != nil {
		t.Error(err)
	}
}

// Section 6: a wake keeps command ids and their output.
func TestRestoredWakeKeepsCommands(t *testing.T) {
	t.Parallel()
	a := boot(t)
	o := run(t, a, shell("echo kept"))
	next := guesttest.Token("next")
	wake := guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_WAKE, next)
	wake.Identity = nil
	if _, err := a.Client.Agent.Restored(t.Context(), wake); err != nil {
		t.Fatal(err)
	}
	a.Client = a.Dial(t, next)
	if got := drain(t, follow(t, a, o.id, 0), 0); got.stdout() != "kept\n" || got.exit == nil {
		t.Errorf("got %q, %v", got.stdout(), got.exit)
	}
	// A second wake, from a token that is a predecessor by now.
	if _, err := a.Client.Agent.Restored(t.Context(), guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_WAKE, guesttest.Token("third"))); err != nil {
		t.Fatal(err)
	}
	_, err := a.Dial(t, a.Token).Agent.Restored(t.Context(), guesttest.RestoredRequest(guestproto.RestoreKind_RESTORE_KIND_WAKE, guesttest.Token("third")))
	wantFault(t, err, fault.Unauthenticated, "")
}

// A panic in one item or call is that one's alone.
func TestPanicsStayInTheirCall(t *testing.T) {
	t.Parallel()
	a := guesttest.Start(t, guest.Config{Identity: panicking{}})
	r, err := a.Client.Agent.Init(t.Context(), guesttest.InitRequest())
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range r.Items {
		if item.Item == guestproto.ItemClock && (item.Status != guestproto.ItemStatus_ITEM_STATUS_FAILED || item.Message == "") {
			t.Errorf("got %v", item)
		}
	}
	if _, err := a.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{}); err != nil {
		t.Error(err)
	}
}

type panicking struct{}

func (panicking) Apply(item string, _ guest.IdentityWork) guest.Outcome { panic("broken: " + item) }

// Z11: the first phase tells nothing to exit; the second ends all, the stubborn too,
// and refuses new commands.
func TestZ11StopInTwoPhases(t *testing.T) {
	t.Parallel()
	a := boot(t)
	polite := start(t, a, shell("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"))
	stubborn := start(t, a, shell("trap '' TERM; echo up; while :; do sleep 0.05; done"))
	p, s := newOutcome(0), newOutcome(0)
	until(t, polite, p, func() bool { return p.stdout() == "up\n" })
	until(t, stubborn, s, func() bool { return s.stdout() == "up\n" })
	if _, err := a.Client.Agent.PrepareStop(t.Context(), &guestproto.PrepareStopRequest{}); err != nil {
		t.Fatal(err)
	}
	list, err := a.Client.Agent.Processes(t.Context(), &guestproto.ProcessesRequest{})
	if err != nil || len(list.Processes) < 2 || list.Processes[0].Comm == "" || list.Processes[0].User == "" {
		t.Fatalf("processes: %v, %v", list, err)
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			r, err := a.Client.Agent.Shutdown(t.Context(), &guestproto.ShutdownRequest{GraceNanos: int64(300 * time.Millisecond)})
			if err != nil || r.Signalled < 2 || r.Killed < 1 || len(r.Left) != 0 {
				t.Errorf("shutdown: %v, %v", r, err)
			}
		})
	}
	until(t, polite, p, func() bool { return p.exit != nil })
	until(t, stubborn, s, func() bool { return s.exit != nil })
	wg.Wait()
	if p.stdout() != "up\nbye\n" || p.exit.Code != 0 || s.exit.Signal != 9 {
		t.Errorf("got %q %v, %v", p.stdout(), p.exit, s.exit)
	}
	wantFault(t, startFails(t, a, shell("true")), fault.FailedPrecondition, "stopping")
	ping, err := a.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{})
	if err != nil || !ping.Stopping {
		t.Errorf("ping: %v, %v", ping, err)
	}
}

// Z1: what is counted, and that the agent's own calls are not.
func TestZ1Activity(t *testing.T) {
	t.Parallel()
	a := boot(t)
	activity := func() *guestproto.ActivityResponse {
		r, err := a.Client.Agent.Activity(t.Context(), &guestproto.ActivityRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := activity(); r.RunningCommands != 0 || r.LastOutputUnixNano != 0 || r.ForegroundCommands != 0 || r.AttachedSessions != 0 {
		t.Errorf("at rest: %v", r)
	}
	began := time.Now().UnixNano()
	s := start(t, a, shell("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo up; sleep 600"))
	o := newOutcome(0)
	until(t, s, o, func() bool { return o.stdout() == "up\n" })
	background := shell("sleep 600")
	background.Detach = true
	run(t, a, background)
	r := activity()
	if r.RunningCommands != 2 || r.ForegroundCommands != 1 || r.AttachedSessions != 1 || r.LastOutputUnixNano < began {
		t.Errorf("got %v", r)
	}
	if r.CpuNanos <= 0 {
		t.Errorf("no CPU time: %v", r)
	}
	s.Close()
	eventually(t, "the cut stream is no session", func() bool { return activity().AttachedSessions == 0 })
}

// One connection that does nothing, or sends slowly, holds up no other call.
func TestSlowRequestsHoldUpNothing(t *testing.T) {
	t.Parallel()
	a := boot(t)
	for i := range 50 {
		conn, err := a.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: guest\r\nContent-Type: application/proto\r\nContent-Length: 100\r\n%s: %s\r\n\r\nx", guestproto.AgentPingProcedure, guestproto.TokenHeader, a.Token)
		if _, err := io.WriteString(conn, head[:len(head)*(i+1)/50]); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	for range 100 {
		if _, err := a.Client.Agent.Ping(t.Context(), &guestproto.PingRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("ping: %s", time.Since(began)/100)
}

// Where local peers are refused a program inside cannot even connect.
func TestRefuseLocal(t *testing.T) {
	t.Parallel()
	a := guesttest.Start(t, guest.Config{RefuseLocal: true})
	_, err := a.Client.Agent.Init(t.Context(), guesttest.InitRequest())
	wantFault(t, err, fault.Unavailable, "")
}

// h2c is served beside HTTP/1.1.
func TestServesH2C(t *testing.T) {
	t.Parallel()
	a := boot(t)
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: protocols, DialContext: dialer(a)}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://guest"+guestproto.AgentPingProcedure, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(guestproto.TokenHeader, a.Token)
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if resp.StatusCode != 200 || resp.ProtoMajor != 2 || !strings.Contains(string(body), `"agentVersion":"test"`) {
		t.Errorf("%s %s %s", resp.Proto, resp.Status, body)
	}
}

// BenchmarkCommand and BenchmarkPing measure a round trip.
func BenchmarkCommand(b *testing.B) {
	a := guesttest.Boot(b, guest.Config{})
	for b.Loop() {
		s, err := a.Client.Commands.Start(b.Context(), &guestproto.StartRequest{Args: []string{"true"}})
		if err != nil {
			b.Fatal(err)
		}
		for err == nil {
			_, err = s.Receive()
		}
		if !errors.Is(err, io.EOF) {
			b.Fatal(err)
		}
	}
}

func BenchmarkPing(b *testing.B) {
	a := guesttest.Boot(b, guest.Config{})
	for b.Loop() {
		if _, err := a.Client.Agent.Ping(b.Context(), &guestproto.PingRequest{}); err != nil {
			b.Fatal(err)
		}
	}
}
