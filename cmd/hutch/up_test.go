package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A pool that cannot be is refused before anything is made.
func TestPoolSizeIsCheckedFirst(t *testing.T) {
	t.Parallel()
	for size, want := range map[string]string{"1KB": "at least 512MiB", "900TB": "are free", "x": "is not a size"} {
		data := filepath.Join(t.TempDir(), "data")
		r, _ := shared.try(time.Minute, nil, "up", "--data", data, "--listen", "127.0.0.1:0", "--pool-size", size)
		if r.code == 0 || !strings.Contains(r.stderr, want) {
			t.Errorf("up --pool-size %s: %s", size, r)
		}
		if _, err := os.Stat(data); err == nil {
			t.Errorf("up --pool-size %s made %s", size, data)
		}
	}
}

// The first start tells what it took and what to try, and later ones do not.
func TestWordsOfAStart(t *testing.T) {
	t.Parallel()
	l := layout{data: "/d"}
	if got := madePool(l, 28e9, false); got != "made a pool of 28.0 GB in /d/pool.img (half of the free space; --pool-size at the first start chooses)" {
		t.Errorf("%q", got)
	}
	if got := madePool(l, 4e9, true); got != "made a pool of 4.0 GB in /d/pool.img (as --pool-size says)" {
		t.Errorf("%q", got)
	}
	const build = "templates build base"
	for _, c := range []struct {
		hadPool, hadTemplate, noTemplate bool
		says, builds                     bool
	}{
		{false, false, false, true, false},
		{false, false, true, true, true},
		{true, false, false, true, false},
		{true, false, true, false, false},
		{true, true, false, false, false},
		{false, true, true, true, false},
	} {
		got := firstSteps(c.hadPool, c.hadTemplate, c.noTemplate)
		if says := strings.Contains(got, "hutch new"); says != c.says || strings.Contains(got, build) != c.builds {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// What a server said before it ended is shown without its log's records, unless there
// is nothing else.
func TestLastWords(t *testing.T) {
	t.Parallel()
	log := filepath.Join(t.TempDir(), "log")
	const record = "time=2026-01-01T00:00:00Z level=INFO msg=x\n"
	for text, want := range map[string]string{
		record + "hutch: it is so\n  → do this\n": "\nhutch: it is so\n  → do this",
		record: "\n" + strings.TrimSpace(record),
		"":     "it said nothing; its log is " + log,
	} {
		writeFile(t, log, []byte("before\n"+text))
		if got := lastWords(log, int64(len("before\n"))); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
