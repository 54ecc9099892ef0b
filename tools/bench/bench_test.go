package main

import (
	"bytes"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSeries(t *testing.T) {
	t.Parallel()
	ten := series{10, 1, 9, 2, 8, 3, 7, 4, 6, 5}
	for _, c := range []struct {
		s                series
		median, min, p90 float64
	}{
		{ten, 5.5, 1, 9},
		{series{3}, 3, 3, 3},
		{series{2, 1}, 1.5, 1, 2},
		{series{5, 1, 3}, 3, 1, 5},
	} {
		if c.s.median() != c.median || c.s.min() != c.min || c.s.p90() != c.p90 {
			t.Errorf("%v: median %v, min %v, p90 %v", c.s, c.s.median(), c.s.min(), c.s.p90())
		}
	}
	if ten[0] != 10 {
		t.Error("the measurements were put into another order")
	}
	var none series
	if !math.IsNaN(none.median()) || !math.IsNaN(none.min()) || !math.IsNaN(none.p90()) {
		t.Error("nothing measured gives a number")
	}
}

func TestCells(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ got, want string }{
		{milliseconds.cell(123.4), "123 ms"},
		{mebibytes.cell(12.34), "12.3 MiB"},
		{percent.cell(0.123), "0.12 %"},
		{milliseconds.cell(math.NaN()), "–"},
		{ratio(3, 2), "× 1.50"},
		{ratio(3, math.NaN()), "–"},
		{ratio(3, 0), "–"},
	} {
		if c.got != c.want {
			t.Errorf("%q, not %q", c.got, c.want)
		}
	}
}

// Every row is described, and shows in the document with what was measured.
func TestDocument(t *testing.T) {
	t.Parallel()
	r := new(results)
	for id, row := range rows {
		if row.what == "" || row.unit == "" || row.hutch == "" && row.bare == "" {
			t.Errorf("row %d is not described", id)
		}
		r.add(hutchSide, rowID(id), 30)
		if row.bare != "" {
			r.add(bareSide, rowID(id), 20)
		}
	}
	text := document(2, machine{started: time.Now()}, facts{}, r)
	for id, row := range rows {
		aim := aims[rowID(id)].cell(row.unit, 30, 1.5)
		if row.bare == "" {
			aim = aims[rowID(id)].cell(row.unit, 30, math.NaN())
		}
		u := " " + string(row.unit)
		want := "| " + row.what + " | 30.0" + u + " | 30.0" + u + " | 30.0" + u + " | 20.0" + u + " | × 1.50 | " + aim + " |\n"
		if row.bare == "" {
			want = "| " + row.what + " | 30.0" + u + " | 30.0" + u + " | 30.0" + u + " | – | – | " + aim + " |\n"
		}
		if !strings.Contains(text, want) {
			t.Errorf("the document lacks %q", want)
		}
	}
	if !strings.Contains(text, "trial") {
		t.Error("two rounds are not called a trial")
	}
	if strings.Contains(document(leastRounds, machine{}, facts{}, r), "trial") {
		t.Error("ten rounds are called a trial")
	}
}

func TestMemoryGroup(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"5:memory:/hutch/1a/sbx_1\n2:cpu,cpuacct:/x\n0::/\n": "/hutch/1a/sbx_1",
		"0::/hutch/1a/sbx_1\n":                               "/hutch/1a/sbx_1",
		"":                                                   "",
	} {
		if got := memoryGroup(text); got != want {
			t.Errorf("%q: %q, not %q", text, got, want)
		}
	}
}

// The programs of a bare sandbox are found with all their descendants, and collected.
func TestFamily(t *testing.T) {
	t.Parallel()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil { // as prepare does
		t.Fatal(err)
	}
	mark := "--root=" + t.TempDir()
	cmd := exec.Command("sh", "-c", `sleep 600 & sleep 600 & echo here; wait`, "sh", mark)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Error(err)
	}
	pids, err := family(mark)
	if err != nil || len(pids) != 3 || pids[0] != cmd.Process.Pid {
		t.Errorf("%d: %v, %v", cmd.Process.Pid, pids, err)
	}
	own, err := usageOf([]int{os.Getpid()})
	if err != nil || own.own <= 0 || own.pss <= own.own || own.rss < own.pss || own.cpu <= 0 {
		t.Errorf("this process uses %+v, %v", own, err)
	}
	kill(pids)
	if left, err := family(mark); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	_ = cmd.Wait() // collected already
	if _, err := usageOf(pids); err != nil {
		t.Errorf("of ended processes: %v", err)
	}
}

// A bare sandbox's pipe: what is not the line is kept for the message.
func TestListen(t *testing.T) {
	t.Parallel()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p := &program{running: make(chan struct{}), silent: make(chan struct{})}
	go p.listen(out)
	_, err = in.WriteString("no such thing\n" + strings.Repeat(line+"\n", 3))
	if err != nil {
		t.Fatal(err)
	}
	<-p.running
	_ = in.Close()
	<-p.silent
	if p.said.String() != "no such thing\n" {
		t.Errorf("kept: %q", p.said.String())
	}
}

func TestCountExtents(t *testing.T) {
	t.Parallel()
	f, err := os.CreateTemp("/var/tmp", "hutch-bench-test-") // no tmpfs: that counts no extents
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	const size = 1 << 20
	for _, at := range []int64{0, 2 * size} { // with a hole between
		if _, err := f.WriteAt(bytes.Repeat([]byte{1}, size), at); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if n, err := countExtents(f); err != nil || n < 2 {
		t.Errorf("%d extents, %v", n, err)
	}
}

func TestParseMounts(t *testing.T) {
	t.Parallel()
	got := parseMounts("36 35 7:3 / /mnt/t ro,noatime shared:1 - erofs /dev/loop3 ro,user_xattr\n37 35 0:9 / /c rw - cgroup cgroup rw,memory\nbroken\n")
	want := []mount{{"7:3", "/mnt/t", "erofs", "ro,user_xattr"}, {"0:9", "/c", "cgroup", "rw,memory"}}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

func TestAims(t *testing.T) {
	for _, c := range []struct {
		a             aim
		median, ratio float64
		want          string
	}{
		{aim{}, 1, 1, ""},
		{aim{ratio: 1.3}, 100, 1.3, "≤ × 1.3"},
		{aim{ratio: 1.3}, 1, 1.31, "≤ × 1.3, **missed**"},
		{aim{ratio: 1.3}, 1, math.NaN(), "≤ × 1.3, **missed**"},
		{aim{median: 10}, 10, 9, "≤ 10 ms"},
		{aim{median: 10}, 10.1, 0.1, "≤ 10 ms, **missed**"},
	} {
		if got := c.a.cell(milliseconds, c.median, c.ratio); got != c.want {
			t.Errorf("%v of %g, %g: %q, not %q", c.a, c.median, c.ratio, got, c.want)
		}
	}
}
