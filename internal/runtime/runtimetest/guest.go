package runtimetest

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hutchrun/hutch/internal/runtime"
)

// Port is where a test guest listens, on every address. It answers each line with
// one line; an answer that begins with "error " is a failure. The verbs:
//
//	get NAME          a value kept in memory; "token" is random and set at boot
//	set NAME VALUE
//	spawn             starts a child process that ticks every 10 ms
//	ticks             how often the children have ticked
//	random            16 bytes of the kernel's random stream, hexadecimal
//	clock             Unix time in milliseconds
//	write PATH TEXT   writes a file
//	read PATH
//	size              memory in bytes, CPUs, hostname
//	alloc MIB         touches so much more memory
//	unlinked BYTES    holds a deleted sparse file of so many bytes open
//	put OFFSET TEXT   writes into the deleted file that was opened last
//	pour MIB          fills its first so many MiB, each with its number as a byte
//	take OFFSET N     reads N bytes from it, as a quoted string
//	calls N           makes N system calls; gives the microseconds they took
//	pingpong N        sends a byte to another process and back N times; microseconds
//	fill PATH MIB     writes a file; gives how many MiB it wrote, and "ok" or the error
//	capacity PATH     the size of a file system in bytes
//	signal N          a child sends signal N to PID 1 in every way; how the child ended
//	nested VERB N     VERB is PID 1 of a namespace inside and gets signal N; how it ended
//	hog MIB           a child touches so much memory; how it ended
//	keep MIB          a child touches so much memory and keeps it
//	bomb DEPTH MIB    a child starts itself twice and so on, each with so much memory;
//	                  they are a session of their own
//	processes         how many processes there are
//	exit CODE         ends PID 1
//	crash             ends PID 1 as a fault would, with exit code 2
//
// A driver without a real guest may leave out those that a Bundle lets it.
const Port = 7000

// patience is how long the suite waits for what has to come; it is far beyond what a
// loaded machine needs.
const patience = 30 * time.Second

// Log gives a logger that writes to the test's output.
func Log(tb testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Ask sends one line to the guest and gives its answer.
func Ask(h runtime.Handle, words ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return ask(ctx, h, words...)
}

func ask(ctx context.Context, h runtime.Handle, words ...string) (string, error) {
	conn, err := h.DialGuest(ctx, Port)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return "", err
		}
	}
	if _, err := fmt.Fprintln(conn, strings.Join(words, " ")); err != nil {
		return "", err
	}
	lines := bufio.NewScanner(conn)
	if !lines.Scan() {
		return "", fmt.Errorf("%v: the guest closed the connection: %w", words, lines.Err())
	}
	if text, ok := strings.CutPrefix(lines.Text(), "error "); ok {
		return "", fmt.Errorf("%v: the guest says: %s", words, text)
	}
	return lines.Text(), nil
}

// MustAsk is Ask for an answer that has to come.
func MustAsk(tb testing.TB, h runtime.Handle, words ...string) string {
	tb.Helper()
	answer, err := Ask(h, words...)
	if err != nil {
		tb.Fatalf("%v: %v", words, err)
	}
	return answer
}

// Await waits until the guest answers: it listens a moment after PID 1 has started.
func Await(tb testing.TB, h runtime.Handle) {
	tb.Helper()
	var last error
	Eventually(tb, "the guest answers", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, last = ask(ctx, h, "get", "token")
		return last == nil
	})
}

// Ticks asks how often the guest's children have ticked.
func Ticks(tb testing.TB, h runtime.Handle) int {
	tb.Helper()
	n, err := strconv.Atoi(MustAsk(tb, h, "ticks"))
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

// AwaitTicks waits until the children have ticked more often than before.
func AwaitTicks(tb testing.TB, h runtime.Handle, before int) {
	tb.Helper()
	Eventually(tb, "the children tick", func() bool { return Ticks(tb, h) > before })
}

// Eventually polls until done says so.
func Eventually(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if done() {
			return
		}
	}
	tb.Fatalf("not within %v: %s", patience, what)
}

// Ended waits for the end of a sandbox.
func Ended(tb testing.TB, wait <-chan runtime.Exit) runtime.Exit {
	tb.Helper()
	select {
	case exit, ok := <-wait:
		if !ok {
			tb.Fatal("Wait closed its channel without an Exit")
		}
		if _, more := <-wait; more {
			tb.Fatal("Wait gave a second Exit")
		}
		return exit
	case <-time.After(patience):
		tb.Fatalf("the sandbox has not ended within %v", patience)
		return runtime.Exit{}
	}
}
