package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// The control socket speaks gVisor's urpc (pkg/urpc): one JSON object for the call,
// with file descriptors on its first byte, and one for the answer, over a unix stream
// socket. These sixty lines are instead of a process of hutch-runsc for each call:
// such a process costs 20 to 30 ms before its first byte, a save takes three calls,
// and a call whose caller dies is no different. The socket belongs to the same build
// of runsc that this package drives, so its form cannot drift apart unseen: every
// test here would fail.

// containerID is the one container's name inside its own runsc root; the root is the
// sandbox's own, so it need not differ. Short: a socket path has 107 bytes at most.
const containerID = "s"

func socketPath(dir string) string {
	return filepath.Join(dir, "runsc-"+containerID+".sock")
}

// errGone says that nobody listens at the control socket.
var errGone = errors.New("the sandbox's control socket does not answer")

// refusal is an error that the sentry answered: the call was carried out and failed.
type refusal struct{ text string }

func (r refusal) Error() string { return r.text }

type callRequest struct {
	Method string `json:"method"`
	Arg    any    `json:"arg"`
}

type callAnswer struct {
	Success bool            `json:"success"`
	Err     string          `json:"err"`
	Result  json.RawMessage `json:"result"`
}

// call calls one method of the sentry. An error that is neither a refusal nor errGone
// leaves open whether the call was, or will yet be, carried out.
func call(ctx context.Context, dir, method string, arg any, files []*os.File, result any) error {
	conn, err := ask(ctx, dir, method, arg, files)
	if err != nil {
		return err
	}
	return hear(ctx, conn, method, result)
}

// ask sends a call, for whose answer hear waits.
func ask(ctx context.Context, dir, method string, arg any, files []*os.File) (*net.UnixConn, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", socketPath(dir))
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
			return nil, errGone
		}
		return nil, err
	}
	conn := c.(*net.UnixConn) //nolint:forcetypeassert // dialled as unix
	if err := bounded(ctx, conn, func() error {
		return send(conn, callRequest{Method: "containerManager." + method, Arg: arg}, files)
	}); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// hear waits for the answer to a call, and closes its connection.
func hear(ctx context.Context, conn *net.UnixConn, method string, result any) error {
	defer conn.Close()
	return bounded(ctx, conn, func() error { return receive(conn, method, result) })
}

// bounded does a part of a call, which the end of ctx interrupts.
func bounded(ctx context.Context, conn *net.UnixConn, part func() error) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := part()
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE) {
		return errGone
	}
	return err
}

func send(conn *net.UnixConn, request callRequest, files []*os.File) error {
	data, err := json.Marshal(request)
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	n, _, err := conn.WriteMsgUnix(data, rights, nil)
	if err != nil {
		return err
	}
	_, err = conn.Write(data[n:])
	return err
}

func receive(conn *net.UnixConn, method string, result any) error {
	var answer callAnswer
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return err
	}
	if !answer.Success {
		return refusal{answer.Err}
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(answer.Result, result); err != nil {
		return fmt.Errorf("the answer to %s: %w", method, err)
	}
	return nil
}
