package hostagent

import (
	"testing"
	"time"
)

// Z6: the clock is judged by when the host asked and heard, so that an answer that was
// long on its way accuses no clock that is right, and a wrong one is found.
func TestZ6ClockItem(t *testing.T) {
	t.Parallel()
	sent := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, c := range map[string]struct {
		took, guest time.Duration // the guest's clock counted from sent
		want        string
	}{
		"right":                 {time.Millisecond, 0, "done"},
		"right, slow to ask":    {20 * time.Second, 20 * time.Second, "done"},
		"right, slow to answer": {20 * time.Second, 0, "done"},
		"a little behind":       {time.Millisecond, -400 * time.Millisecond, "done"},
		"behind":                {time.Millisecond, -600 * time.Millisecond, "failed"},
		"ahead":                 {time.Millisecond, 600 * time.Millisecond, "failed"},
		"ahead of a slow one":   {20 * time.Second, 21 * time.Second, "failed"},
		"asleep for a year":     {time.Millisecond, -365 * 24 * time.Hour, "failed"},
	} {
		if got := clockItem(sent, sent.Add(c.took), sent.Add(c.guest)); got.Status != c.want || got.Item != "clock" || got.Message == "" {
			t.Errorf("%s: got %+v, want %s", name, got, c.want)
		}
	}
	if got := clockItem(sent, sent, time.Time{}); got.Status != "failed" {
		t.Errorf("a guest that says nothing has the right clock: %+v", got)
	}
}
