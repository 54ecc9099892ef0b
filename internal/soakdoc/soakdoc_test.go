package soakdoc

import (
	"strings"
	"testing"
	"time"
)

// TestPut: a section is written once, in its place, and the others stay.
func TestPut(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	doc := put(put("# Soak\n", "a", "First", "one\n", now), "b", "Second", "two", now)
	again := put(doc, "a", "First", "three", now)
	for _, want := range []string{"# Soak\n", "## First\n", "three\n<!-- /a -->\n", "## Second\n", "two\n<!-- /b -->\n"} {
		if strings.Count(again, want) != 1 {
			t.Errorf("%q is there %d times:\n%s", want, strings.Count(again, want), again)
		}
	}
	if strings.Contains(again, "one\n") || strings.Index(again, "First") > strings.Index(again, "Second") {
		t.Errorf("the old text is there, or the order has changed:\n%s", again)
	}
	if put(doc, "b", "Second", "two", now) != doc {
		t.Error("writing the same changes the document")
	}
}
