package guest_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guest"
	"github.com/hutchrun/hutch/internal/guest/guesttest"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// E1: the command's own exit code, 0 to 255, and a signal apart from it.
func TestE1ExitCodes(t *testing.T) {
	t.Parallel()
	a := boot(t)
	for _, code := range []int32{0, 1, 3, 125, 127, 255} {
		o := run(t, a, shell(fmt.Sprintf("echo out; echo err >&2; exit %d", code)))
		if o.exit.GetCode() != code || o.exit.Signal != 0 || o.stdout() != "out\n" || o.stderr() != "err\n" {
			t.Errorf("exit %d: got %v, %q, %q", code, o.exit, o.stdout(), o.stderr())
		}
		if o.exit.Cursor != o.cursor {
			t.Errorf("the exit's cursor is %d, the output ended at %d", o.exit.Cursor, o.cursor)
		}
	}
	o := run(t, a, shell("kill -TERM $$"))
	if o.exit.Signal != int32(syscall.SIGTERM) || o.exit.Code != 128+15 {
		t.Errorf("killed by SIGTERM: got %v", o.exit)
	}
}

// E5: commands start in /workspace, with the usual environment, the template's above
// it and the call's on top.
func TestE5Environment(t *testing.T) {
	t.Parallel()
	a := guesttest.Start(t, guest.Config{})
	req := guesttest.InitRequest()
	req.Env = map[string]string{"A": "template", "B": "template"}
	if _, err := a.Client.Agent.Init(t.Context(), req); err != nil {
		t.Fatal(err)
	}
	o := run(t, a, &guestproto.StartRequest{
		Args: []string{"sh", "-c", "pwd; echo $A $B $HOME $USER $TERM $DOCKER_CONFIG; printf '%s' \"$1\"", "x", "gr\u00fc\u00df \u65e5\u672c"},
		Env:  map[string]string{"B": "call"},
	})
	want := a.Root + "/workspace\ntemplate call /root root dumb /run/hutch/docker\ngr\u00fc\u00df \u65e5\u672c"
	if o.stdout() != want {
		t.Errorf("got %q, want %q", o.stdout(), want)
	}
	if err := os.Mkdir(filepath.Join(a.Root, "workspace/sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if o := run(t, a, &guestproto.StartRequest{Shell: "pwd", Cwd: "sub"}); !strings.HasSuffix(o.stdout(), "/workspace/sub\n") {
		t.Errorf("a relative directory: %q", o.stdout())
	}
}

// A command that cannot start says why, and nothing of it is left.
func TestStartRefusals(t *testing.T) {
	t.Parallel()
	a := boot(t)
	script := filepath.Join(a.Root, "workspace", "script")
	if err := os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(script+".txt", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", guestproto.MaxArgBytes)
	for name, tc := range map[string]struct {
		req    *guestproto.StartRequest
		kind   fault.Kind
		reason string
	}{
		"nothing":          {&guestproto.StartRequest{}, fault.InvalidArgument, ""},
		"both":             {&guestproto.StartRequest{Args: []string{"a"}, Shell: "b"}, fault.InvalidArgument, ""},
		"empty name":       {&guestproto.StartRequest{Args: []string{""}}, fault.InvalidArgument, ""},
		"NUL":              {&guestproto.StartRequest{Args: []string{"echo", "a\x00b"}}, fault.InvalidArgument, ""},
		"env name":         {&guestproto.StartRequest{Shell: "true", Env: map[string]string{"A=B": ""}}, fault.InvalidArgument, ""},
		"too long":         {&guestproto.StartRequest{Args: []string{"echo", long}}, fault.TooLarge, ""},
		"not found":        {&guestproto.StartRequest{Args: []string{"no-such-command"}}, fault.NotFound, "command_not_found"},
		"path not found":   {&guestproto.StartRequest{Args: []string{"./no-such-command"}}, fault.NotFound, "command_not_found"},
		"no interpreter":   {&guestproto.StartRequest{Args: []string{"./script"}}, fault.NotFound, "command_not_found"},
		"not executable":   {&guestproto.StartRequest{Args: []string{"./script.txt"}}, fault.PermissionDenied, "not_executable"},
		"a directory":      {&guestproto.StartRequest{Args: []string{"/usr"}}, fault.PermissionDenied, "not_executable"},
		"cwd missing":      {&guestproto.StartRequest{Shell: "true", Cwd: "/no/such"}, fault.NotFound, "cwd_not_found"},
		"cwd a file":       {&guestproto.StartRequest{Shell: "true", Cwd: "script"}, fault.InvalidArgument, "cwd_unusable"},
		"user":             {&guestproto.StartRequest{Shell: "true", User: "nobody-here"}, fault.InvalidArgument, "user_not_found"},
		"negative timeout": {&guestproto.StartRequest{Shell: "true", TimeoutNanos: -1}, fault.InvalidArgument, ""},
	} {
		t.Run(name, func(t *testing.T) { wantFault(t, startFails(t, a, tc.req), tc.kind, tc.reason) })
	}
	if err := startFails(t, a, &guestproto.StartRequest{Args: []string{"/usr"}}); !strings.Contains(err.Error(), "is a directory") {
		t.Errorf("of a directory is said: %v", err)
	}
	list, err := a.Client.Commands.List(t.Context(), &guestproto.ListCommandsRequest{})
	if err != nil || len(list.Commands) != 0 {
		t.Errorf("left over: %v, %v", list, err)
	}
}

// 200 commands that fail at once all give all that they said.
func TestE1QuickFailuresLoseNothing(t *testing.T) {
	t.Parallel()
	a := boot(t)
	var wg sync.WaitGroup
	limit := make(chan struct{}, 16)
	for i := range 200 {
		wg.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			o := run(t, a, shell(fmt.Sprintf("echo gone %d >&2; exit 7", i)))
			if want := fmt.Sprintf("gone %d\n", i); o.stderr() != want || o.exit.GetCode() != 7 {
				t.Errorf("got %q, %v; want %q", o.stderr(), o.exit, want)
			}
		})
	}
	wg.Wait()
}

// E2: a detached command goes on; its output is replayed from any byte cursor, each
// byte once.
func TestE2DetachAndFollowFromEveryCursor(t *testing.T) {
	t.Parallel()
	a := boot(t)
	req := shell("echo one; echo two >&2; echo three; exit 4")
	req.Detach = true
	began := time.Now()
	o := run(t, a, req)
	if o.id == "" || o.exit != nil || time.Since(began) > time.Second {
		t.Fatalf("detached: %+v", o)
	}
	full := drain(t, follow(t, a, o.id, 0), 0)
	if full.exit.GetCode() != 4 || full.all.Len() != len("one\ntwo\nthree\n") {
		t.Fatalf("got %q, %v", full.all.String(), full.exit)
	}
	for from := range int64(full.all.Len() + 1) {
		part := drain(t, follow(t, a, o.id, from), from)
		if got, want := part.all.String(), full.all.String()[from:]; got != want || part.exit.GetCode() != 4 {
			t.Fatalf("from %d: got %q, want %q", from, got, want)
		}
	}
	_, err := follow(t, a, o.id, full.cursor+1).Receive()
	wantFault(t, err, fault.InvalidArgument, "cursor")
	_, err = follow(t, a, "cmd_no", 0).Receive()
	wantFault(t, err, fault.NotFound, "")
}

// E2: a cut stream kills nothing and is taken up again by its cursor.
func TestE2CutStreamResumes(t *testing.T) {
	t.Parallel()
	a := boot(t)
	fifo := filepath.Join(a.Root, "workspace", "go")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cut := context.WithCancel(t.Context())
	s, err := a.Client.Commands.Start(ctx, shell("echo before; read x <go; echo after"))
	if err != nil {
		t.Fatal(err)
	}
	o := newOutcome(0)
	until(t, s, o, func() bool { return o.stdout() == "before\n" })
	cut()
	if err := os.WriteFile(fifo, []byte("x\n"), 0); err != nil {
		t.Fatal(err)
	}
	rest := drain(t, follow(t, a, o.id, o.cursor), o.cursor)
	if rest.stdout() != "after\n" || rest.exit.GetCode() != 0 {
		t.Errorf("got %q, %v", rest.stdout(), rest.exit)
	}
}

const megabytes20 = "head -c 20000000 /dev/zero | tr '\\0' 'x'"

// E3: head and tail are kept and the gap between them is exact; a follower that does
// not read holds up neither the command nor others.
func TestE3SlowFollowerOf20MB(t *testing.T) {
	t.Parallel()
	a := boot(t)
	slow := start(t, a, shell(megabytes20))
	first, err := slow.Receive()
	if err != nil {
		t.Fatal(err)
	}
	id := first.GetStarted().GetId()
	wait, err := a.Client.Commands.Wait(t.Context(), &guestproto.WaitRequest{Id: id, TimeoutNanos: int64(time.Minute)})
	if err != nil || wait.Exit == nil || wait.Exit.Cursor != 20_000_000 {
		t.Fatalf("the command waited for its reader: %v, %v", wait, err)
	}
	if o := run(t, a, shell("echo quick")); o.stdout() != "quick\n" {
		t.Fatalf("another command: %q", o.stdout())
	}
	o := drain(t, slow, 0)
	var lost int64
	for _, g := range o.gaps {
		lost += g.To - g.From
	}
	if o.cursor != 20_000_000 || int64(o.all.Len())+lost != 20_000_000 || len(o.gaps) != 1 {
		t.Errorf("cursor %d, %d bytes, gaps %v", o.cursor, o.all.Len(), o.gaps)
	}
	if kept := o.all.Len(); kept < guestproto.OutputLimit*9/10 || kept > guestproto.OutputLimit+2<<20 {
		t.Errorf("kept %d of %d", kept, guestproto.OutputLimit)
	}
	got, err := a.Client.Commands.Get(t.Context(), &guestproto.GetCommandRequest{Id: id})
	if err != nil || got.Command.Cursor != 20_000_000 || got.Command.Omitted < 20_000_000-guestproto.OutputLimit {
		t.Errorf("get: %v, %v", got, err)
	}
}

// A lossless reader gets all 20 MB however slow it is, and lets the command go when it
// is cut.
func TestLosslessReader(t *testing.T) {
	t.Parallel()
	a := guesttest.Boot(t, guest.Config{OutputBudget: 4 << 20})
	req := shell(megabytes20)
	req.Lossless = true
	s := start(t, a, req)
	first, err := s.Receive()
	if err != nil {
		t.Fatal(err)
	}
	wait, err := a.Client.Commands.Wait(t.Context(), &guestproto.WaitRequest{Id: first.GetStarted().GetId(), TimeoutNanos: int64(300 * time.Millisecond)})
	if err != nil || wait.Exit != nil {
		t.Fatalf("the command did not wait for its reader: %v, %v", wait, err)
	}
	o := drain(t, s, 0)
	if o.all.Len() != 20_000_000 || len(o.gaps) != 0 || o.exit.GetCode() != 0 {
		t.Errorf("%d bytes, gaps %v, exit %v", o.all.Len(), o.gaps, o.exit)
	}

	ctx, cut := context.WithCancel(t.Context())
	cutStream, err := a.Client.Commands.Start(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	first, err = cutStream.Receive()
	if err != nil {
		t.Fatal(err)
	}
	cut()
	wait, err = a.Client.Commands.Wait(t.Context(), &guestproto.WaitRequest{Id: first.GetStarted().GetId(), TimeoutNanos: int64(time.Minute)})
	if err != nil || wait.Exit == nil {
		t.Errorf("the command still waits for a reader that has gone: %v, %v", wait, err)
	}
}

// All output together stays within the budget: ended commands lose theirs first.
func TestE3BudgetOverCommands(t *testing.T) {
	t.Parallel()
	a := guesttest.Boot(t, guest.Config{OutputBudget: 3 << 20})
	var ids []string
	for range 4 {
		ids = append(ids, run(t, a, shell("head -c 1500000 /dev/zero")).id)
	}
	list, err := a.Client.Commands.List(t.Context(), &guestproto.ListCommandsRequest{})
	if err != nil || len(list.Commands) != 4 {
		t.Fatalf("list: %v, %v", list, err)
	}
	kept := int64(0)
	for _, c := range list.Commands {
		kept += c.Cursor - c.Omitted
		if c.Exit == nil {
			t.Errorf("%s has no exit", c.Id)
		}
	}
	if kept > 3<<20 || list.Commands[0].Omitted != 1500000 || list.Commands[3].Omitted != 0 {
		t.Errorf("kept %d; %v", kept, list.Commands)
	}
	o := drain(t, follow(t, a, ids[0], 0), 0)
	if len(o.gaps) != 1 || o.gaps[0].To != 1500000 || o.exit == nil {
		t.Errorf("the oldest: gaps %v, exit %v", o.gaps, o.exit)
	}
}

// E1: stdin arrives once however often it is sent, and a gap is refused.
func TestE1InputIsIdempotentByOffset(t *testing.T) {
	t.Parallel()
	a := boot(t)
	s := start(t, a, &guestproto.StartRequest{Args: []string{"cat"}, Stdin: true})
	o := newOutcome(0)
	until(t, s, o, func() bool { return o.id != "" })
	send := func(offset int64, data string, eof bool) (int64, error) {
		r, err := a.Client.Commands.Input(t.Context(), &guestproto.InputRequest{Id: o.id, Offset: offset, Data: []byte(data), Eof: eof})
		return r.GetOffset(), err
	}
	for _, tc := range []struct {
		offset int64
		data   string
		eof    bool
		want   int64
	}{
		{0, "hello ", false, 6}, {0, "hello ", false, 6}, {3, "lo world", false, 11},
		{11, "!", true, 12}, {11, "!", true, 12}, {0, "hello", false, 12}, {12, "", true, 12},
	} {
		if got, err := send(tc.offset, tc.data, tc.eof); err != nil || got != tc.want {
			t.Fatalf("%+v: got %d, %v", tc, got, err)
		}
	}
	_, err := send(13, "x", false)
	wantFault(t, err, fault.FailedPrecondition, "input_gap")
	_, err = send(12, "x", false)
	wantFault(t, err, fault.FailedPrecondition, "")
	until(t, s, o, func() bool { return o.exit != nil })
	if o.stdout() != "hello world!" {
		t.Errorf("got %q", o.stdout())
	}
	if o := run(t, a, &guestproto.StartRequest{Args: []string{"cat"}}); o.exit.GetCode() != 0 {
		t.Errorf("without stdin it is empty: %v", o.exit)
	}
}

// A command that does not read its stdin holds up only that call, which can be cut and
// repeated from the offset that was taken.
func TestInputCutAndRepeated(t *testing.T) {
	t.Parallel()
	a := boot(t)
	fifo := filepath.Join(a.Root, "workspace", "go")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, a, &guestproto.StartRequest{Shell: "read x <go; cat | md5sum", Stdin: true})
	o := newOutcome(0)
	until(t, s, o, func() bool { return o.id != "" })
	data := bytes.Repeat([]byte("0123456789abcdef"), guestproto.MaxChunk/16)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := a.Client.Commands.Input(ctx, &guestproto.InputRequest{Id: o.id, Data: data})
	wantFault(t, err, fault.DeadlineExceeded, "")
	if err := os.WriteFile(fifo, []byte("x\n"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Client.Commands.Input(t.Context(), &guestproto.InputRequest{Id: o.id, Data: data, Eof: true}); err != nil {
		t.Fatal(err)
	}
	until(t, s, o, func() bool { return o.exit != nil })
	want := run(t, a, shell("for i in $(seq 16384); do printf 0123456789abcdef; done | md5sum"))
	if o.stdout() != want.stdout() {
		t.Errorf("got %q, want %q", o.stdout(), want.stdout())
	}
}

// A grandchild that holds the pipe does not hold the exit, and what it writes later
// can still be read.
func TestExitDoesNotWaitForGrandchildren(t *testing.T) {
	t.Parallel()
	a := boot(t)
	fifo := filepath.Join(a.Root, "workspace", "go")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	o := run(t, a, shell("(read x <go; echo late) & head -c 300000 /dev/zero; exit 3"))
	if o.exit.GetCode() != 3 || o.all.Len() != 300000 {
		t.Fatalf("got %d bytes, %v", o.all.Len(), o.exit)
	}
	if err := os.WriteFile(fifo, []byte("x\n"), 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the late output", func() bool {
		return drain(t, follow(t, a, o.id, o.cursor), o.cursor).stdout() == "late\n"
	})
}

// E1: signals go to the whole group; a command that has ended gets none.
func TestE1SignalsTheGroup(t *testing.T) {
	t.Parallel()
	a := boot(t)
	s := start(t, a, shell("trap 'echo caught; exit 9' TERM; sleep 600 & echo up; wait"))
	o := newOutcome(0)
	until(t, s, o, func() bool { return o.stdout() == "up\n" })
	if _, err := a.Client.Commands.Signal(t.Context(), &guestproto.SignalRequest{Id: o.id, Signal: 15}); err != nil {
		t.Fatal(err)
	}
	until(t, s, o, func() bool { return o.exit != nil })
	if o.stdout() != "up\ncaught\n" || o.exit.Code != 9 {
		t.Errorf("got %q, %v", o.stdout(), o.exit)
	}
	_, err := a.Client.Commands.Signal(t.Context(), &guestproto.SignalRequest{Id: o.id, Signal: 15})
	wantFault(t, err, fault.FailedPrecondition, "ended")
	_, err = a.Client.Commands.Signal(t.Context(), &guestproto.SignalRequest{Id: o.id, Signal: 65})
	wantFault(t, err, fault.InvalidArgument, "")
}

// A timeout belongs to the command, not to the stream that started it.
func TestTimeoutKills(t *testing.T) {
	t.Parallel()
	a := boot(t)
	req := shell("sleep 600")
	req.Detach, req.TimeoutNanos = true, int64(100*time.Millisecond)
	o := run(t, a, req)
	wait, err := a.Client.Commands.Wait(t.Context(), &guestproto.WaitRequest{Id: o.id, TimeoutNanos: int64(time.Minute)})
	if err != nil || wait.Exit.GetError() != "timeout" || wait.Exit.Signal != 9 {
		t.Errorf("got %v, %v", wait, err)
	}
}

// V1: a start that is repeated under the same key runs once.
func TestV1RequestKeyStartsOnce(t *testing.T) {
	t.Parallel()
	a := boot(t)
	req := shell("echo x >>count; echo done")
	req.RequestKey = "k1"
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]int{}
	for range 20 {
		wg.Go(func() {
			o := run(t, a, req)
			mu.Lock()
			ids[o.id]++
			mu.Unlock()
			if o.stdout() != "done\n" {
				t.Errorf("got %q", o.stdout())
			}
		})
	}
	wg.Wait()
	count, err := os.ReadFile(filepath.Join(a.Root, "workspace", "count"))
	if err != nil || string(count) != "x\n" || len(ids) != 1 {
		t.Errorf("ran %q times under the ids %v, %v", count, ids, err)
	}
	// A start that was refused leaves the key free.
	req = &guestproto.StartRequest{Args: []string{"no-such-command"}, RequestKey: "k2"}
	wantFault(t, startFails(t, a, req), fault.NotFound, "command_not_found")
	req.Args = []string{"true"}
	if o := run(t, a, req); o.joined || o.exit.GetCode() != 0 {
		t.Errorf("got %+v", o)
	}
}
