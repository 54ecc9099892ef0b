package pgtest

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestServerGoesWithItsTest: a test binary that is killed leaves neither a process nor
// a directory.
func TestServerGoesWithItsTest(t *testing.T) {
	if os.Getenv("HUTCH_TEST_PGTEST") != "" {
		os.Stdout.WriteString(URL(t) + "\n")
		select {} // until it is killed
	}
	if _, err := programs(); errors.Is(err, errMissing) {
		t.Skip(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestServerGoesWithItsTest$")
	cmd.Env = append(os.Environ(), "HUTCH_TEST_PGTEST=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	url, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the child said %q, %v", url, err)
	}
	_, rest, _ := strings.Cut(url, "host=")
	dir, _, _ := strings.Cut(rest, "&")
	pid, err := os.ReadFile(dir + "/data/postmaster.pid")
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	first, _, _ := strings.Cut(string(pid), "\n")
	for end := time.Now().Add(startTimeout); ; time.Sleep(20 * time.Millisecond) {
		_, there := os.Stat(dir)
		_, runs := os.ReadFile("/proc/" + first + "/cmdline")
		if there != nil && runs != nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after its test was killed: the directory %s (%v), the process %s (%v)", dir, there, first, runs)
		}
	}
}
